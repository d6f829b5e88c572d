"""Rows of .npy, .safetensors and .pt files, of folders of such files, and of .npz archives."""

from __future__ import annotations

import pickle
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from factormix.data.checks import CHUNK_BYTES, check_finite
from factormix.data.readers.base import Choice, create_spool, find_columns, open_spool
from factormix.data.sources.files import FileRows, FileShard, Layout, check_table, read_npy_layout
from factormix.data.sources.shards import ShardedRows
from factormix.errors import InputError, input_error

T = TypeVar("T", FileRows, ShardedRows)

SHARD_SUFFIXES = (".npy", ".safetensors", ".pt")
USUAL_NAMES = ("X", "x", "data", "activations", "embeddings")
"""Names of the array to take from a file that has several."""


def read_npy(path: Path, choice: Choice) -> FileRows:
    """Make rows of a .npy file, which is read in place."""
    return _select_and_check(FileRows(path), path, choice)


def read_npz(path: Path, choice: Choice, key: str | None) -> FileRows:
    """Make rows of the array called `key` in an .npz file, or of the one with a usual name."""
    refusal = f"{path} is not a readable .npz file; write it again with numpy.savez."
    kinds = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
    with input_error(refusal, *kinds), zipfile.ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.endswith(".npy")]
        if not members:
            raise InputError(f"{path} has no arrays in it; write it again with numpy.savez.")
        names = [member.removesuffix(".npy") for member in members]
        key = _choose_array(path, names, key, "array")
        with archive.open(f"{key}.npy") as stream:
            layout = read_npy_layout(stream, f"{path} [{key}]")
        with create_spool() as file, archive.open(f"{key}.npy") as stream:
            shutil.copyfileobj(stream, file, CHUNK_BYTES)
    return _select_and_check(open_spool(file, layout, path), path, choice)


def read_shards(
    files: Sequence[Path], name: str, choice: Choice, key: str | None = None
) -> ShardedRows:
    """Make rows of files of the same width and type, one after the other."""
    shards = [open_shard(file, key) for file in files]
    first = shards[0]
    for shard in shards[1:]:
        if shard.layout.describe_row() != first.layout.describe_row():
            raise InputError(
                f"{shard.name} has rows of {shard.layout.describe_row()}, and {first.name} of"
                f" {first.layout.describe_row()}: shards of one table must agree."
            )
    layout = first.layout
    rows = ShardedRows(
        shards, layout.n_features, layout.dtype, name=name, image_shape=layout.image_shape
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
    if not names:
        raise InputError(f"{path} has no {what}s in it: write it again.")
    shown = ", ".join(names[:10])
    if key is None:
        key = names[0] if len(names) == 1 else next((k for k in USUAL_NAMES if k in names), None)
    if key is None:
        raise InputError(f"{path} has several {what}s ({shown}); say which with a key.")
    if key not in names:
        raise InputError(f"{path} has no {what} called {key!r}; it has {shown}.")
    return key


@dataclass(eq=False)
class _TensorShard(FileShard):
    """A tensor in a .safetensors or .pt file, whose rows are copied as they are needed."""

    key: str = ""
    """Name of a tensor in a safetensors file, which is opened for each read."""
    tensor: torch.Tensor | None = None
    """The mapped tensor of a .pt file."""

    def read(self, first: int, out: NDArray[Any]) -> None:
        """Read rows (m, d), from row ``first`` on."""
        part = slice(first, first + len(out))
        if self.tensor is not None:
            rows = self.tensor[part]
        else:
            with _open_safetensors(self.path) as file:
                rows = file.get_slice(self.key)[part]
        out[:] = _to_array(rows).reshape(out.shape)


def _to_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the values of a tensor; NumPy has no bfloat16, which is served as float32."""
    array: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def open_shard(path: Path, key: str | None) -> FileShard:
    """Find the table of a file, and check that the file has all of it."""
    if path.suffix.lower() == ".npy":
        return FileShard.open_npy(path, str(path))
    is_pt = path.suffix.lower() == ".pt"
    if is_pt:
        key, tensor = _load_pt(path, key)
    else:
        with _open_safetensors(path) as file:
            key = _choose_array(path, sorted(file.keys()), key, "tensor")
            tensor = file.get_tensor(key)
    is_float8 = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    if tensor.is_complex() or tensor.is_quantized or tensor.is_sparse or is_float8:
        raise InputError(f"{path} holds values of type {tensor.dtype}; convert them to float32.")
    name, shape = f"{path} [{key}]" if key else str(path), tuple(tensor.shape)
    check_table(shape, name, images=tensor.dtype == torch.uint8)
    layout = Layout.contiguous(shape, _to_array(tensor[:0]).dtype)
    return _TensorShard(path, layout, str(path), key=key, tensor=tensor if is_pt else None)


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    refusal = f"{path} is truncated or not a safetensors file ({{reason}}); write it again."
    with input_error(refusal, SafetensorError), safe_open(path, framework="pt") as file:
        yield file


def _load_pt(path: Path, key: str | None) -> tuple[str, torch.Tensor]:
    """Map a tensor of a file of ``torch.save``, in which objects other than tensors are refused."""
    remedy = "write a tensor, or a dictionary of tensors, with torch.save."
    cut = f"{path} is truncated or not a file of torch.save; write or copy it again."
    # A file that may not be read fails here.
    path.open("rb").close()
    # In a truncated file, torch seeks to a place before its beginning, which is an OSError.
    with (
        input_error(f"{path} is not a readable file of tensors: {remedy}", pickle.UnpicklingError),
        input_error(cut, RuntimeError, ValueError, EOFError, OSError),
    ):
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Old files have another format, which cannot be mapped.
            found = torch.load(path, map_location="cpu", weights_only=True)
    chosen = ""
    if isinstance(found, dict):
        tensors = {str(k): one for k, one in found.items() if isinstance(one, torch.Tensor)}
        chosen = _choose_array(path, sorted(tensors), key, "tensor")
        found = tensors[chosen]
    if not isinstance(found, torch.Tensor):
        raise InputError(f"{path} holds a {type(found).__name__}: {remedy}")
    return chosen, found.detach()
