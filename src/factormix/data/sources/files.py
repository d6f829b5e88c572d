"""Rows of numeric files, read by position, in order or shuffled."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from factormix.data.batches import Batch, Weights, join_batches, take_weightless_row
from factormix.data.sources.base import check_pass
from factormix.data.sources.shards import BUFFER_BYTES, Fill, ShardedRows
from factormix.errors import InputError, input_error

Array: TypeAlias = NDArray[Any]


class FileRows(ShardedRows):
    """Serve the rows of a numeric file, .npy or raw, reading only the rows in demand.

    The file is read by position and never mapped, so that resident memory does not grow with it.
    Both C and Fortran order are read, C order faster. A uint8 array of shape (n, height, width) or
    (n, height, width, 1 or 3) holds images, which are served flat, (n, d), with unchanged values.

    A shuffled pass takes contiguous blocks in random order and mixes the rows of up to
    `PLACES_PER_BUFFER` of them at a time. A file that fits into the buffer is permuted fully.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout: Layout | None = None,
        name: str | None = None,
        feature_names: Sequence[str] | None = None,
        weights: Weights | None = None,
        delete: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Open `path`; `layout` describes a raw file, `delete` removes it with these rows."""
        # A pass may begin after the caller has changed the working folder.
        shard = FileShard.open_npy(Path(path).absolute(), name or str(path), layout)
        layout = shard.layout
        super().__init__(
            [shard],
            layout.n_features,
            layout.dtype,
            name=Path(name or path).name,
            feature_names=feature_names,
            image_shape=layout.image_shape,
            buffer_bytes=buffer_bytes,
        )
        self.weights, self.checked = weights, False
        if delete:
            weakref.finalize(shard, _remove, shard.path, os.getpid())

    def at(self, numbers: NDArray[np.int64]) -> Batch:
        """Read the rows of the given numbers, (m, d), and nothing else of the file."""
        found = np.empty((len(numbers), self._width), self._dtype)
        for i, number in enumerate(numbers.tolist()):
            self._shards[0].open(number)(found[i : i + 1])
        return self._make_batch(found, self._weights_at(numbers))

    def shuffled_shard(
        self, batch_size: int, *, shard: tuple[int, int], seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield one shard, (index, count), of each of the same batches.

        A shard has every count-th block of a buffer, and nothing else of the file is read.
        """
        check_pass(batch_size, start)
        buffers = self._fill_buffers(batch_size, [seed, epoch], start * batch_size, shard)
        spare = take_weightless_row(self.at(np.zeros(1, np.int64)))
        return (join_batches(parts or [spare]) for parts in self._draw(buffers, batch_size))


def _remove(path: Path, pid: int) -> None:
    # A forked process must not delete a file that its parent still reads.
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


@dataclass(eq=False)
class FileShard:
    """The table of a file, of which any rows can be read."""

    path: Path
    layout: Layout
    name: str
    first: int = 0
    direct: bool = True

    @classmethod
    def open_npy(cls, path: Path, name: str, layout: Layout | None = None) -> FileShard:
        """Open a .npy file or, with a layout, a raw one, and check that the file has all of it."""
        refusal = input_error(f"{path} cannot be opened: {{reason}}.", OSError)
        with refusal, open(path, "rb", buffering=0) as file:
            layout = layout or read_npy_layout(file, name)
            layout.check_length(file, name)
        return cls(path, layout, name)

    @property
    def n_rows(self) -> int:
        return self.layout.shape[0]

    def open(self, first: int) -> Fill:
        """Return a function that reads the next rows, from row ``first`` on, into an array."""

        def fill(out: Array) -> None:
            nonlocal first
            self.read(first, out)
            first += len(out)

        return fill

    def read(self, first: int, out: Array) -> None:
        """Read rows (m, d), from row ``first`` on."""
        refusal = input_error(f"{self.name} cannot be read: {{reason}}.", OSError)
        with refusal, open(self.path, "rb", buffering=0) as file:
            self.layout.read(file, first, out)


def open_memmap(X: Array) -> FileRows | None:
    """Make rows of the file behind a memory-mapped table; None if the file does not show it."""
    owner: Any = X
    while isinstance(owner, np.ndarray) and getattr(owner, "_mmap", None) is None:
        owner = owner.base
    # With mode "c", changes stay in memory and the file does not have them.
    if not isinstance(owner, np.memmap) or owner.filename is None or owner.mode == "c":
        return None
    layout = _find_memmap_layout(X, owner)
    if layout is None:
        return None
    if owner.mode != "r":
        owner.flush()
    try:
        rows = FileRows(owner.filename, layout=layout)
        ends = rows.at(np.array([0, rows.n_rows - 1])).rows
    except InputError:
        return None
    # The path may lead to another file by now, while the map still shows the right one.
    return rows if np.array_equal(ends, X[[0, -1]], equal_nan=True) else None


def _find_memmap_layout(X: Array, owner: Any) -> Layout | None:
    """Find the layout of a view in its file by its address; its ``offset`` is for the whole map."""
    start = owner.offset - owner.offset % mmap.ALLOCATIONGRANULARITY
    offset = start + X.ctypes.data - np.frombuffer(owner._mmap, np.uint8).ctypes.data
    (n, d), (row_stride, column_stride), item = X.shape, X.strides, X.dtype.itemsize
    if (column_stride == item or d == 1) and row_stride >= d * item:
        return Layout((n, d), X.dtype, offset, row_stride)
    if row_stride == item and column_stride >= n * item:
        return Layout((n, d), X.dtype, offset, item, np.arange(d) * column_stride)
    return None


@dataclass(frozen=True)
class Layout:
    """The place of a table's values in a file.

    shape: (n, d), or (n, height, width[, channels]) for images.
    row_stride: bytes from one row to the next.
    columns: None where each row is contiguous; in Fortran order, the byte offset of every column,
        (d,).
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    row_stride: int
    columns: NDArray[np.int64] | None = None

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0) -> Layout:
        """Describe an array in C order that begins at byte `offset`."""
        return cls(shape, dtype, offset, math.prod(shape[1:]) * dtype.itemsize)

    @property
    def n_features(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        return self.n_features * self.dtype.itemsize

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        if len(self.shape) == 2:
            return None
        return self.shape[1:3] if self.shape[3:] == (1,) else self.shape[1:]

    def describe_row(self) -> str:
        """Write the shape and type of a row."""
        return " x ".join(map(str, self.shape[1:])) + f" values, {self.dtype}"

    def check_length(self, file: IO[bytes], name: str) -> None:
        """Check that a file has all bytes of the table."""
        end = self.offset + (self.shape[0] - 1) * self.row_stride
        if self.columns is None:
            end += self.row_bytes
        else:
            end += int(self.columns.max()) + self.dtype.itemsize
        size = file.seek(0, os.SEEK_END)
        if size < end:
            raise InputError(
                f"{name} is truncated: it has {size:,} bytes of {end:,}; write or copy it again."
            )

    def read(self, file: IO[bytes], first: int, out: Array) -> None:
        """Fill `out`, (m, d) in C order and in the file's dtype, with the rows from `first` on."""
        at = self.offset + first * self.row_stride
        if self.columns is not None:
            transposed = np.empty(out.shape[::-1], self.dtype)
            for column, into in zip(self.columns.tolist(), transposed, strict=True):
                _read_exactly(file, at + column, into)
            out[...] = transposed.T
        elif self.row_stride == self.row_bytes:
            _read_exactly(file, at, out)
        else:
            for i in range(len(out)):
                _read_exactly(file, at + i * self.row_stride, out[i])


def _read_exactly(file: IO[bytes], at: int, out: Array) -> None:
    """Fill the contiguous array `out` with the bytes from position `at` on."""
    view = out.reshape(-1).view(np.uint8).data
    file.seek(at)
    while len(view):
        # One call reads 2 GB at most.
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise OSError("it is shorter than it was when it was opened")
        view = view[count:]


def read_npy_layout(file: IO[bytes], name: str) -> Layout:
    """Read the header of a .npy stream and check that it describes a table of real numbers."""
    refusal = f"{name} is not a readable .npy file; write it again with numpy.save."
    with input_error(refusal, ValueError, EOFError, OSError):
        # Version 3 exists for structured arrays only, which are refused in any case.
        one = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if one else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    if dtype.kind not in "biuf":
        kinds = {"O": "objects", "U": "strings", "S": "strings", "c": "complex numbers"}
        raise InputError(
            f"{name} holds {kinds.get(dtype.kind, f'values of type {dtype}')}; "
            "only real numbers can be used, so convert it first."
        )
    check_table(shape, name, images=dtype == np.uint8)
    layout = Layout.contiguous(shape, dtype, file.tell())
    if not fortran:
        return layout
    # The place of each feature, counted in C order, among the columns in Fortran order.
    columns = np.arange(layout.n_features).reshape(shape[1:], order="F").ravel()
    column_bytes = shape[0] * dtype.itemsize
    return Layout(shape, dtype, layout.offset, dtype.itemsize, columns * column_bytes)


def check_table(shape: tuple[int, ...], name: str, *, images: bool = False) -> None:
    """Check that a shape is a table with rows; `images` also allows a stack of images."""
    stack = images and (len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3)))
    if len(shape) != 2 and not stack:
        how = "X.reshape(-1, 1)" if len(shape) < 2 else "X.reshape(len(X), -1)"
        if len(shape) == 3:
            how += f", or X.reshape(-1, {shape[-1]}) for activations (sequences, tokens, features)"
        raise InputError(
            f"{name} has shape {shape}; two dimensions, (rows, columns), are needed: try {how}."
        )
    if min(shape) < 1:
        raise InputError(f"{name} has shape {shape}, so it is empty; give at least one row.")
