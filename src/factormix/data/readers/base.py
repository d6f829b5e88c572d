"""Code that the readers share: the choice of columns, and temporary copies of their data."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.files import FileRows, Layout
from factormix.data.sources.shards import ShardedRows
from factormix.errors import InputError

TableRows: TypeAlias = ArrayRows | FileRows | ShardedRows
"""Rows that a reader makes of files."""
Column: TypeAlias = str | int
"""A name, or a number from 0; a string that is not the name of a column may be such a number."""

_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def find_columns(
    columns: Sequence[Column], names: Sequence[str] | None, width: int, path: Path
) -> NDArray[np.intp]:
    """Find the positions of the chosen columns among ``width``, which may have names."""
    if not columns:
        raise InputError(f"No columns of {path} were chosen; name at least one.")
    places = [_find_column(column, names, width, path) for column in columns]
    if len(set(places)) < len(places):
        raise InputError(f"A column of {path} was chosen twice; name each one once.")
    return np.array(places, dtype=np.intp)


def _find_column(column: Column, names: Sequence[str] | None, width: int, path: Path) -> int:
    if isinstance(column, str) and names is not None and column in names:
        if list(names).count(column) > 1:
            raise InputError(f"{path} has several columns called {column!r}; choose by number.")
        return list(names).index(column)
    number = str(column)
    if number.isascii() and number.isdigit() and int(number) < width:
        return int(number)
    known = f"it has {', '.join(names[:10])}" if names else "it has no names"
    more = " and others" if names and len(names) > 10 else ""
    raise InputError(
        f"{path} has no column {column!r}; {known}{more}, and numbers count from 0 to {width - 1}."
    )


@contextmanager
def create_spool() -> Iterator[IO[bytes]]:
    """Open a temporary file for writing, which is deleted only if an error occurs."""
    with tempfile.NamedTemporaryFile(prefix="factormix-", delete=False) as file:
        try:
            yield file
            file.flush()
        except BaseException as error:
            # The rest of the buffer cannot be written either.
            with suppress(OSError):
                file.close()
            Path(file.name).unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise InputError(
                    f"There is no room for a temporary copy in {tempfile.gettempdir()}; "
                    "set TMPDIR to a folder that has it."
                ) from error
            raise


def open_spool(
    file: IO[bytes], layout: Layout, path: Path, names: tuple[str, ...] | None = None
) -> FileRows:
    """Make rows of a temporary file, which they delete in the end."""
    return FileRows(file.name, layout=layout, name=path.name, feature_names=names, delete=True)


def missing_package_error(package: str, what: str) -> InputError:
    """Build the error about a missing package, with the command that installs it."""
    return InputError(f'Reading {what} needs {package}: run pip install "factormix[data]".')
