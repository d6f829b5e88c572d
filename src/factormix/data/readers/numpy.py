"""Rows of .npy, .safetensors and .pt files, of folders of such files, and of .npz archives."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.data.checks import CHUNK_BYTES, check_finite
from factormix.data.readers.base import Choice, create_spool, find_columns, open_spool
from factormix.data.sources.files import FileRows, FileShard, Layout, check_table, read_npy_layout
from factormix.data.sources.shards import ShardedRows
from factormix.errors import InputError

T = TypeVar("T", FileRows, ShardedRows)

SHARD_SUFFIXES = (".npy", ".safetensors", ".pt")
USUAL_NAMES = ("X", "x", "data", "activations", "embeddings")
"""Names of the array to take from a file that has several."""
SAFETENSORS_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "U16": "<u2",
    "U32": "<u4",
    "BOOL": "?",
}
"""NumPy has no BF16: such numbers are read as the upper halves of float32."""
MOST_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file, as the format defines it."""


def read_npy(path: Path, choice: Choice) -> FileRows:
    """Make rows of a .npy file, which is read in place."""
    return _select_and_check(FileRows(path), path, choice)


def read_npz(path: Path, choice: Choice, key: str | None) -> FileRows:
    """Make rows of the array called `key` in an .npz file, or of the one with a usual name."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if name.endswith(".npy")]
            if not members:
                raise InputError(f"{path} has no arrays in it; write it again with numpy.savez.")
            names = [member.removesuffix(".npy") for member in members]
            key = _choose_array(path, names, key, "array")
            with archive.open(f"{key}.npy") as stream:
                layout = read_npy_layout(stream, f"{path} [{key}]")
            with create_spool() as file, archive.open(f"{key}.npy") as stream:
                shutil.copyfileobj(stream, file, CHUNK_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(
            f"{path} is not a readable .npz file; write it again with numpy.savez."
        ) from error
    return _select_and_check(open_spool(file, layout, path), path, choice)


def read_shards(
    files: Sequence[Path], name: str, choice: Choice, key: str | None = None
) -> ShardedRows:
    """Make rows of files of the same width and type, one after the other."""
    if key is not None and files[0].suffix.lower() == ".npy":
        raise InputError(f"A key was given, but {name} holds .npy files; leave the key out.")
    shards = [open_shard(file, key) for file in files]
    first = shards[0]
    for shard in shards[1:]:
        if shard.layout.shape[1:] != first.layout.shape[1:] or shard.kind != first.kind:
            raise InputError(
                f"{shard.name} has rows of {shard.describe_row()}, and {first.name} of"
                f" {first.describe_row()}: shards of one table must agree."
            )
    dtype = np.dtype(np.float32) if first.is_bfloat16 else first.layout.dtype
    rows = ShardedRows(
        shards, first.layout.n_features, dtype, name=name, image_shape=first.layout.image_shape
    )
    return _select(rows, choice, name)


def _select_and_check(rows: FileRows, path: Path, choice: Choice) -> FileRows:
    """Choose columns and check their values."""
    rows = _select(rows, choice, path)
    return rows.mark_finite(complete=check_finite(rows, str(path)))


def _select(rows: T, choice: Choice, name: str | Path) -> T:
    """Choose columns; images keep their shape if all are taken."""
    places = find_columns(choice, None, rows.n_features, name)
    every = np.array_equal(places, np.arange(rows.n_features))
    return rows if every else rows.select(places)


def _choose_array(path: Path, names: Sequence[str], key: str | None, what: str) -> str:
    """Choose an array of a file by its key, or the only one, or one with a usual name."""
    shown = ", ".join(names[:10]) or "none"
    if key is None:
        key = names[0] if len(names) == 1 else next((k for k in USUAL_NAMES if k in names), None)
    if key is None:
        raise InputError(f"{path} has several {what}s ({shown}); say which with a key.")
    if key not in names:
        raise InputError(f"{path} has no {what} called {key!r}; it has {shown}.")
    return key


@dataclass(eq=False)
class _TorchShard(FileShard):
    """A tensor in a .pt file, which is mapped and copied row by row."""

    tensor: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))

    def read(self, first: int, out: NDArray[Any]) -> None:
        """Read rows (m, d), from row ``first`` on."""
        rows = self.tensor[first : first + len(out)]
        out[:] = (rows.float() if self.is_bfloat16 else rows).numpy().reshape(out.shape)


def open_shard(path: Path, key: str | None) -> FileShard:
    """Find the table of a file, and check that the file has all of it."""
    if path.suffix.lower() == ".pt":
        return _open_pt(path, key)
    if path.suffix.lower() == ".npy":
        return FileShard.open_npy(path, str(path))
    with open(path, "rb", buffering=0) as file:
        shard = _open_safetensors(file, path, key)
        shard.layout.check_length(file, str(path))
    return shard


def _open_safetensors(file: IO[bytes], path: Path, key: str | None) -> FileShard:
    """Read the header of a safetensors file, and choose a tensor."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= MOST_HEADER_BYTES:
            raise ValueError("its header has no length")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        chosen = _choose_array(path, sorted(header), key, "tensor")
        about = header[chosen]
        shape, begin = tuple(map(int, about["shape"])), int(about["data_offsets"][0])
        kind = str(about["dtype"])
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a readable safetensors file; write it again.") from error
    if kind not in SAFETENSORS_DTYPES:
        raise InputError(f"{path} holds values of type {kind}; convert them to F32 or F16.")
    check_table(shape, f"{path} [{chosen}]", images=kind == "U8")
    dtype = np.dtype(SAFETENSORS_DTYPES[kind])
    layout = Layout.contiguous(shape, dtype, 8 + length + begin)
    return FileShard(path, layout, str(path), kind == "BF16")


def _open_pt(path: Path, key: str | None) -> _TorchShard:
    """Read a file of ``torch.save`` without any objects but tensors, and choose a tensor."""
    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Old files have another format, which cannot be mapped.
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} is not a readable file of tensors: write a tensor, or a dictionary of tensors,"
            " with torch.save."
        ) from error
    except (RuntimeError, ValueError, EOFError) as error:
        raise InputError(
            f"{path} is truncated or not a file of torch.save; write or copy it again."
        ) from error
    chosen = ""
    if isinstance(found, dict):
        tensors = {str(k): one for k, one in found.items() if isinstance(one, torch.Tensor)}
        chosen = _choose_array(path, sorted(tensors), key, "tensor")
        found = tensors[chosen]
    if not isinstance(found, torch.Tensor):
        raise InputError(
            f"{path} holds a {type(found).__name__}: write a tensor, or a dictionary of tensors,"
            " with torch.save."
        )
    is_bfloat16 = found.dtype == torch.bfloat16
    if found.is_complex() or found.is_quantized or found.is_sparse:
        raise InputError(f"{path} holds values of type {found.dtype}; convert them to float32.")
    name = f"{path} [{chosen}]" if chosen else str(path)
    check_table(tuple(found.shape), name, images=found.dtype == torch.uint8)
    dtype = np.dtype("<u2") if is_bfloat16 else found[:0].numpy().dtype
    layout = Layout.contiguous(tuple(found.shape), dtype)
    return _TorchShard(path, layout, str(path), is_bfloat16, tensor=found.detach())
