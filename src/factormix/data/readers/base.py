"""What the readers share: a choice of columns, and temporary copies of what cannot be mapped."""

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

__all__ = [
    "Column",
    "TableRows",
    "create_spool",
    "find_columns",
    "missing_package_error",
    "open_spool",
]

TableRows: TypeAlias = ArrayRows | FileRows | ShardedRows
"""Rows that a reader makes of files."""
Column = str | int
"""A name, or a number from 0; a string that is not the name of a column may be such a number."""


def find_columns(
    columns: Sequence[Column], names: Sequence[str] | None, width: int, path: Path
) -> NDArray[np.intp]:
    """Find the positions of the chosen columns among ``width``, which may have names."""
    if not columns:
        raise InputError(f"No columns of {path} were chosen; name at least one.")
    places = [_place(column, names, width, path) for column in columns]
    if len(set(places)) < len(places):
        raise InputError(f"A column of {path} was chosen twice; name each one once.")
    return np.array(places, dtype=np.intp)


def _place(column: Column, names: Sequence[str] | None, width: int, path: Path) -> int:
    if isinstance(column, str) and names is not None and column in names:
        if list(names).count(column) > 1:
            raise InputError(f"{path} has several columns called {column!r}; choose by number.")
        return list(names).index(column)
    number = str(column)
    if number.isascii() and number.isdigit() and int(number) < width:
        return int(number)
    there = f"it has {', '.join(names[:10])}" if names else "it has no names"
    more = " and others" if names and len(names) > 10 else ""
    raise InputError(
        f"{path} has no column {column!r}; {there}{more}, and numbers count from 0 to {width - 1}."
    )


_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


@contextmanager
def create_spool() -> Iterator[IO[bytes]]:
    """Open a temporary file for writing, which stays unless something goes wrong."""
    with tempfile.NamedTemporaryFile(prefix="factormix-", delete=False) as file:
        try:
            yield file
            file.flush()
        except BaseException as error:
            # What is still in the buffer cannot be written either.
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
    """Hand the temporary file over to the rows that read it and delete it in the end."""
    return FileRows(file.name, layout=layout, name=path.name, feature_names=names, delete=True)


def missing_package_error(package: str, what: str) -> InputError:
    """Say which package is missing, and how to install it."""
    return InputError(f'Reading {what} needs {package}: run pip install "factormix[data]".')
