"""Rows of numeric files, read by position, in order or shuffled."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import IO, Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from factormix.data.batches import Batch, Weights, join_batches, take_weightless_row
from factormix.data.sources.base import check_pass, read_ahead, to_native_dtype
from factormix.data.sources.shuffle import (
    BUFFER_BYTES,
    PLACES_PER_BUFFER,
    Buffer,
    BufferedRows,
    draw_shards,
)
from factormix.errors import InputError

Array: TypeAlias = NDArray[Any]


class FileRows(BufferedRows):
    """Serve the rows of a numeric .npy file, reading only the rows in demand.

    The file is read by position and never mapped, so that resident memory does not grow with it.
    Both C and Fortran order are read, C order faster. A uint8 array of shape (n, height, width) or
    (n, height, width, 1 or 3) holds images, which are served flat, (n, d), with unchanged values.

    A shuffled pass takes contiguous blocks in random order and mixes the rows of up to
    `PLACES_PER_BUFFER` of them at a time. The buffer has `buffer_bytes`, or the size of two batches
    if that is larger. A file that fits into the buffer is permuted fully, and rows of weight zero
    do not change the order of the others.
    """

    _fills_slowly = False

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
        """Open `path`; `layout` describes a raw file, `delete` removes it with this object."""
        # A pass may begin after the caller has changed the working folder.
        self._path = Path(path).absolute()
        self.name = self._path.name if name is None else name
        self.feature_names = None if feature_names is None else tuple(feature_names)
        self.weights = weights
        self.buffer_bytes = buffer_bytes
        self._cleanup = weakref.finalize(self, _remove, self._path, os.getpid())
        if not delete:
            self._cleanup.detach()
        with self._open() as file:
            self._layout = layout or read_npy_layout(file, self.name)
            self._layout.check_length(file, self.name)
        self.n_rows, self.n_features = self._layout.shape[0], self._layout.n_features
        self.dtype = to_native_dtype(self._layout.dtype)
        self._row_bytes = self._layout.row_bytes
        self.image_shape = self._layout.image_shape
        # Stamps of the file when it was found to be finite, each with whether it was complete.
        # Copies with other weights share this list.
        self._found_finite: list[tuple[tuple[int, ...], bool]] = []

    @property
    def checked(self) -> bool:
        """Whether the file in its present state is known to hold no infinities."""
        return bool(self._found_finite) and self._found_finite[-1][0] == self._stamp()

    @property
    def complete(self) -> bool:
        """Whether the file in its present state is known to hold finite values only."""
        return self.checked and self._found_finite[-1][1]

    def mark_finite(self, *, complete: bool = False) -> Self:
        """Mark the file as free of infinities until it changes, and return these rows.

        ``complete`` says that no value is missing either.
        """
        self._found_finite.append((self._stamp(), complete))
        return self

    def select(self, columns: NDArray[np.intp]) -> Self:
        """Return the same rows with the chosen columns only, in the order given."""
        other = super().select(columns)
        # A later check of some columns says nothing about the others.
        other._found_finite = self._found_finite[-1:]
        return other

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, (size, d) at a time."""
        check_pass(size)
        with self._open() as file:
            for first in range(0, self.n_rows, size):
                block = self._allocate(min(size, self.n_rows - first))
                self._read(file, first, block)
                yield self._make_batch(block, self._weights_at(slice(first, first + size)))

    def at(self, numbers: NDArray[np.int64]) -> Batch:
        """Read the rows of the given numbers, (m, d), and nothing else of the file."""
        found = self._allocate(len(numbers))
        with self._open() as file:
            for i, number in enumerate(numbers.tolist()):
                self._read(file, number, found[i : i + 1])
        return self._make_batch(found, self._weights_at(numbers))

    def shuffled_shard(
        self, batch_size: int, *, shard: tuple[int, int], seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield one shard, (index, count), of each of the same batches.

        A shard has every count-th block of a buffer, and nothing else of the file is read.
        """
        check_pass(batch_size, start)
        buffers = self._fill_buffers(batch_size, [seed, epoch], start * batch_size, shard)
        spare = self.at(np.zeros(1, np.int64))

        def draw() -> Generator[Batch]:
            for parts in draw_shards(buffers, batch_size):
                batches = list(starmap(self._make_batch, parts))
                yield join_batches(batches) if batches else take_weightless_row(spare)

        return read_ahead(draw())

    def close(self) -> None:
        """Delete the file if it is a temporary copy; else do nothing."""
        self._cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fill_buffers(
        self, batch_size: int, entropy: list[int], skip: int, shard: tuple[int, int] = (0, 1)
    ) -> Generator[Buffer]:
        """Yield one buffer after the other, without the first ``skip`` rows.

        Only the blocks of one shard, (index, count), are read.
        """
        weights, (index, n_shards) = self.weights, shard
        size = math.ceil(self._count_buffer_rows(batch_size) / PLACES_PER_BUFFER)
        n_blocks = math.ceil(self.n_rows / size)
        n_buffers = math.ceil(n_blocks / PLACES_PER_BUFFER)
        blocks = np.random.default_rng(entropy).permutation(n_blocks)
        # Buffers of even size: a last one of few blocks would be mixed badly.
        bounds = [i * n_blocks // n_buffers for i in range(n_buffers + 1)]
        rows = self._allocate(min(self.n_rows, math.ceil(n_blocks / n_buffers) * size))
        with self._open() as file:
            for i in range(n_buffers):
                firsts = np.sort(blocks[bounds[i] : bounds[i + 1]]) * size
                ends = np.minimum(firsts + size, self.n_rows)
                ranges = list(zip(firsts.tolist(), ends.tolist(), strict=True))
                weight, used, count = None, None, int((ends - firsts).sum())
                if weights is not None:
                    weight = np.concatenate([weights[first:end] for first, end in ranges])
                    used = np.flatnonzero(weight)
                    count = len(used)
                if skip >= count:
                    skip -= count
                    continue
                filled, own = 0, np.zeros(len(rows), bool) if n_shards > 1 else None
                for number, (first, end) in enumerate(ranges):
                    part = slice(filled, filled + end - first)
                    if number % n_shards == index:
                        self._read(file, first, rows[part])
                        if own is not None:
                            own[part] = True
                    filled += end - first
                # A generator per buffer, so that the order does not depend on skipped buffers.
                order = np.random.default_rng([*entropy, i]).permutation(count)[skip:]
                yield Buffer(rows, order if used is None else used[order], weight, own)
                skip = 0

    def _allocate(self, n: int) -> Array:
        return np.empty((n, self._layout.n_features), self._layout.dtype)

    def _stamp(self) -> tuple[int, ...]:
        try:
            now = self._path.stat()
        except OSError:
            return ()
        return now.st_ino, now.st_size, now.st_mtime_ns

    def _open(self) -> IO[bytes]:
        try:
            return open(self._path, "rb", buffering=0)
        except OSError as error:
            raise InputError(f"{self._path} cannot be opened: {error.strerror}.") from error

    def _read(self, file: IO[bytes], first: int, out: Array) -> None:
        try:
            self._layout.read(file, first, out)
        except OSError as error:
            raise InputError(f"{self.name} cannot be read: {error}.") from error


def _remove(path: Path, pid: int) -> None:
    # A forked process must not delete a file that its parent still reads.
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


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
    ends = np.empty((2, layout.n_features), layout.dtype)
    try:
        source = FileRows(owner.filename, layout=layout)
        with source._open() as file:
            source._read(file, 0, ends[:1])
            source._read(file, source.n_rows - 1, ends[1:])
    except InputError:
        return None
    # The path may lead to another file by now, while the map still shows the right one.
    return source if ends.tobytes() == X[[0, -1]].tobytes() else None


def _find_memmap_layout(X: Array, owner: Any) -> Layout | None:
    """Find the layout of a view in its file by its address; its offset is the whole map's."""
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
    try:
        # Version 3 exists for structured arrays only, which are refused in any case.
        one = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if one else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, EOFError, OSError) as error:
        raise InputError(
            f"{name} is not a readable .npy file; write it again with numpy.save."
        ) from error
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
        how = "(-1, 1)" if len(shape) < 2 else "(len(X), -1)"
        raise InputError(
            f"{name} has shape {shape}; two dimensions, (rows, columns), are needed: "
            f"try X.reshape{how}."
        )
    if min(shape) < 1:
        raise InputError(f"{name} has shape {shape}, so it is empty; give at least one row.")
