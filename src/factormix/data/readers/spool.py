"""Temporary copies of what cannot be read where it lies."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from factormix.data.layouts import Layout
from factormix.data.sources import FileRows
from factormix.errors import InputError

__all__ = ["missing_package", "spool", "spooled"]

_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


@contextmanager
def spool() -> Iterator[IO[bytes]]:
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


def spooled(
    file: IO[bytes], layout: Layout, path: Path, names: tuple[str, ...] | None = None
) -> FileRows:
    """Hand the temporary file over to the rows that read it and delete it in the end."""
    return FileRows(file.name, layout=layout, name=path.name, feature_names=names, delete=True)


def missing_package(package: str, what: str) -> InputError:
    """Say which package is missing, and how to install it."""
    return InputError(f'Reading {what} needs {package}: run pip install "factormix[data]".')
