"""Rows of .npy files, which are read where they lie, and of .npz archives."""

from __future__ import annotations

import shutil
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from factormix.data.layouts import npy_layout
from factormix.data.readers.columns import Column, chosen_columns
from factormix.data.readers.spool import spool, spooled
from factormix.data.sources import FileRows, check_finite
from factormix.data.sources.checks import CHUNK_BYTES
from factormix.errors import InputError

__all__ = ["read_npy", "read_npz"]

# The array taken from an .npz file that has several.
USUAL_KEYS = ("X", "x", "data")


def read_npy(path: Path, columns: Sequence[Column] | None) -> FileRows:
    """Make rows of a .npy file, which stays where it is."""
    source = _checked(FileRows(path, name=str(path)), path, columns)
    source.name = path.name
    return source


def read_npz(path: Path, columns: Sequence[Column] | None, key: str | None) -> FileRows:
    """Make rows of the array called `key`, or of the one that is meant, in an .npz file."""
    try:
        with zipfile.ZipFile(path) as archive:
            member = _npz_member(path, archive.namelist(), key)
            with archive.open(member) as stream:
                layout = npy_layout(stream, f"{path} [{member.removesuffix('.npy')}]")
            with spool() as file, archive.open(member) as stream:
                shutil.copyfileobj(stream, file, CHUNK_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(
            f"{path} is not a readable .npz file; write it again with numpy.savez."
        ) from error
    source = spooled(file, layout, path)
    try:
        return _checked(source, path, columns)
    except InputError:
        source.close()
        raise


def _checked(source: FileRows, path: Path, columns: Sequence[Column] | None) -> FileRows:
    """Choose columns and check the values in them."""
    if columns is not None:
        source = source.select(chosen_columns(columns, None, source.n_features, path))
    return source.known_finite(complete=check_finite(source, str(path)))


def _npz_member(path: Path, members: Sequence[str], key: str | None) -> str:
    names = [member.removesuffix(".npy") for member in members if member.endswith(".npy")]
    if not names:
        raise InputError(f"{path} has no arrays in it; write it again with numpy.savez.")
    if key is None:
        key = names[0] if len(names) == 1 else next((k for k in USUAL_KEYS if k in names), None)
    if key is None:
        raise InputError(f"{path} has several arrays ({', '.join(names)}); say which with a key.")
    if key not in names:
        raise InputError(f"{path} has no array called {key!r}; it has {', '.join(names)}.")
    return f"{key}.npy"
