"""Temporary copies of what cannot be read where it lies.

Rows of .npy files, which are read where they lie, and of .npz archives.

Rows of safetensors files, and of folders of .npy or safetensors shards, read where they lie.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from factormix.data.checks import CHUNK_BYTES, check_finite
from factormix.data.readers.base import Column, create_spool, find_columns, open_spool
from factormix.data.sources.files import FileRows, Layout, check_table, read_npy_layout
from factormix.data.sources.shards import ShardedRows
from factormix.errors import InputError

__all__ = [
    "SHARD_SUFFIXES",
    "read_npy",
    "read_npz",
    "read_shards",
]


# The array taken from an .npz file that has several.
USUAL_NAMES = ("X", "x", "data")


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
                layout = read_npy_layout(stream, f"{path} [{member.removesuffix('.npy')}]")
            with create_spool() as file, archive.open(member) as stream:
                shutil.copyfileobj(stream, file, CHUNK_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(
            f"{path} is not a readable .npz file; write it again with numpy.savez."
        ) from error
    source = open_spool(file, layout, path)
    try:
        return _checked(source, path, columns)
    except InputError:
        source.close()
        raise


def _checked(source: FileRows, path: Path, columns: Sequence[Column] | None) -> FileRows:
    """Choose columns and check the values in them."""
    if columns is not None:
        source = source.select(find_columns(columns, None, source.n_features, path))
    return source.mark_finite(complete=check_finite(source, str(path)))


def _npz_member(path: Path, members: Sequence[str], key: str | None) -> str:
    names = [member.removesuffix(".npy") for member in members if member.endswith(".npy")]
    if not names:
        raise InputError(f"{path} has no arrays in it; write it again with numpy.savez.")
    if key is None:
        key = names[0] if len(names) == 1 else next((k for k in USUAL_NAMES if k in names), None)
    if key is None:
        raise InputError(f"{path} has several arrays ({', '.join(names)}); say which with a key.")
    if key not in names:
        raise InputError(f"{path} has no array called {key!r}; it has {', '.join(names)}.")
    return f"{key}.npy"


SHARD_SUFFIXES = (".npy", ".safetensors")
DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "U16": "<u2",
    "U32": "<u4",
    "BOOL": "?",
}
HALF = "BF16"
"""Numbers of which NumPy has no type: the upper halves of float32."""
MOST_HEADER = 100_000_000
"""Bytes that the header of a safetensors file may have."""
USUAL_KEYS = ("X", "x", "data", "activations", "embeddings")


def read_shards(
    files: Sequence[Path], name: str, columns: Sequence[Column] | None, key: str | None = None
) -> ShardedRows:
    """Make rows of files of the same width and type, one below the other."""
    if key is not None and files[0].suffix.lower() == ".npy":
        raise InputError(f"A key was given, but {name} holds .npy files; leave the key out.")
    shards = [_shard(file, key) for file in files]
    first = shards[0]
    for shard in shards[1:]:
        if shard.layout.shape[1:] != first.layout.shape[1:] or shard.kind != first.kind:
            raise InputError(
                f"{shard.name} has rows of {_shape(shard)}, {shard.kind}, and {first.name} of"
                f" {_shape(first)}, {first.kind}: shards of one table must agree."
            )
    dtype = np.dtype(np.float32) if first.half else first.layout.dtype
    rows = ShardedRows(
        shards, first.layout.n_features, dtype, name=name, image_shape=first.layout.image_shape
    )
    if columns is None:
        return rows
    return rows.select(find_columns(columns, None, rows.n_features, Path(name)))


@dataclass
class _Shard:
    """The table of a file, of which any rows can be read."""

    path: Path
    layout: Layout
    half: bool = False
    first: int = 0
    direct: bool = True

    @property
    def n_rows(self) -> int:
        return self.layout.shape[0]

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def kind(self) -> str:
        return "bfloat16" if self.half else str(self.layout.dtype)

    def chunks(self, size: int, first: int) -> Iterator[NDArray[Any]]:
        """Yield rows (size, d) from chunk number ``first`` on."""
        dtype = np.dtype(np.float32) if self.half else self.layout.dtype
        for at in range(first * size, self.n_rows, size):
            rows = np.empty((min(size, self.n_rows - at), self.layout.n_features), dtype)
            self.fill(at, rows)
            yield rows

    def fill(self, first: int, out: NDArray[Any]) -> None:
        """Read rows from number ``first`` on into ``out``, (m, d)."""
        rows = np.empty(out.shape, self.layout.dtype) if self.half else out
        try:
            with open(self.path, "rb", buffering=0) as file:
                self.layout.read(file, first, rows)
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        if self.half:
            out[:] = _widened(rows)


def _widened(halves: NDArray[Any]) -> NDArray[np.float32]:
    """Turn upper halves of float32 into float32, exactly."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _shard(path: Path, key: str | None) -> _Shard:
    """Read where the table of a file lies, and check that the file has all of it."""
    with open(path, "rb", buffering=0) as file:
        if path.suffix.lower() == ".npy":
            shard = _Shard(path, read_npy_layout(file, str(path)))
        else:
            shard = _tensor(file, path, key)
        size = file.seek(0, os.SEEK_END)
    if size < shard.layout.end:
        raise InputError(
            f"{path} is truncated: it has {size:,} bytes of {shard.layout.end:,}; write or copy it"
            " again."
        )
    return shard


def _tensor(file: IO[bytes], path: Path, key: str | None) -> _Shard:
    """Read the header of a safetensors file, and choose the tensor that is meant."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= MOST_HEADER:
            raise ValueError("its header has no length")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        chosen = _chosen(path, header, key)
        about = header[chosen]
        shape, begin = tuple(map(int, about["shape"])), int(about["data_offsets"][0])
        kind = str(about["dtype"])
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not a readable safetensors file; write it again.") from error
    if kind != HALF and kind not in DTYPES:
        raise InputError(f"{path} holds values of type {kind}; convert them to F32 or F16.")
    check_table(shape, f"{path} [{chosen}]", images=kind == "U8")
    dtype = np.dtype("<u2" if kind == HALF else DTYPES[kind])
    return _Shard(path, Layout.contiguous(shape, dtype, 8 + length + begin), kind == HALF)


def _chosen(path: Path, header: dict[str, Any], key: str | None) -> str:
    names = sorted(header)
    if key is None:
        usual = next((k for k in USUAL_KEYS if k in names), None)
        key = names[0] if len(names) == 1 else usual
    if key is None:
        shown = ", ".join(names[:10]) or "none"
        raise InputError(f"{path} has several tensors ({shown}); say which with a key.")
    if key not in names:
        raise InputError(f"{path} has no tensor called {key!r}; it has {', '.join(names[:10])}.")
    return key


def _shape(shard: _Shard) -> str:
    return " x ".join(map(str, shard.layout.shape[1:])) + " values"
