"""Where the values of a table lie in a file, and what a table must be.

Rows of numeric files, read by position, in order or shuffled.
"""

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
from factormix.data.sources.base import Table, check_pass, read_ahead, to_native_dtype
from factormix.data.sources.shuffle import BUFFER_BYTES, Buffer, draw_batches, draw_shards
from factormix.errors import InputError

__all__ = [
    "FileRows",
    "Layout",
    "check_numeric",
    "check_table",
    "find_memmap_layout",
    "open_memmap",
    "read_npy_layout",
]

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """Say where the values of a table lie in a file.

    shape: (n, d), or (n, height, width[, channels]) for images.
    row_stride: bytes from one row to the next.
    columns: None where each row is contiguous; else (d,), the byte offset of every column, where
        each column is (Fortran order).
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

    @property
    def end(self) -> int:
        """The number of bytes that the file must have."""
        last = self.offset + (self.shape[0] - 1) * self.row_stride
        if self.columns is None:
            return last + self.row_bytes
        return last + int(self.columns.max()) + self.dtype.itemsize

    def read(self, file: IO[bytes], first: int, out: Array) -> None:
        """Fill `out`, (m, d) in C order and in the file's dtype, with the rows from `first` on."""
        at = self.offset + first * self.row_stride
        if self.columns is not None:
            turned = np.empty(out.shape[::-1], self.dtype)
            for column, into in zip(self.columns.tolist(), turned, strict=True):
                _read_exactly(file, at + column, into)
            out[...] = turned.T
        elif self.row_stride == self.row_bytes:
            _read_exactly(file, at, out)
        else:
            for i in range(len(out)):
                _read_exactly(file, at + i * self.row_stride, out[i])


def read_npy_layout(file: IO[bytes], name: str) -> Layout:
    """Read the header of a .npy stream and check that it describes a table of real numbers."""
    try:
        # Version 3 exists for structured arrays only, which are turned down in any case.
        one = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if one else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, EOFError, OSError) as error:
        raise InputError(
            f"{name} is not a readable .npy file; write it again with numpy.save."
        ) from error
    check_numeric(dtype, name)
    check_table(shape, name, images=dtype == np.uint8)
    layout = Layout.contiguous(shape, dtype, file.tell())
    if not fortran:
        return layout
    # Where each feature, counted in C order, stands among the columns as Fortran order has them.
    columns = np.arange(layout.n_features).reshape(shape[1:], order="F").ravel()
    column_bytes = shape[0] * dtype.itemsize
    return Layout(shape, dtype, layout.offset, dtype.itemsize, columns * column_bytes)


def find_memmap_layout(X: Array, owner: Any) -> Layout | None:
    """Find where a view lies in the file by its address: its offset is that of the whole map."""
    start = owner.offset - owner.offset % mmap.ALLOCATIONGRANULARITY
    offset = start + X.ctypes.data - np.frombuffer(owner._mmap, np.uint8).ctypes.data
    (n, d), (row_stride, column_stride), item = X.shape, X.strides, X.dtype.itemsize
    if (column_stride == item or d == 1) and row_stride >= d * item:
        return Layout((n, d), X.dtype, offset, row_stride)
    if row_stride == item and column_stride >= n * item:
        return Layout((n, d), X.dtype, offset, item, np.arange(d) * column_stride)
    return None


def check_numeric(dtype: np.dtype[Any], name: str) -> None:
    """Turn down values that are not real numbers."""
    if dtype.kind not in "biuf":
        kinds = {"O": "objects", "U": "strings", "S": "strings", "c": "complex numbers"}
        raise InputError(
            f"{name} holds {kinds.get(dtype.kind, f'values of type {dtype}')}; "
            "only real numbers can be used, so convert it first."
        )


def check_table(shape: tuple[int, ...], name: str, *, images: bool = False) -> None:
    """Turn down what is empty or not a table; a stack of images passes where it is allowed."""
    stack = images and (len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3)))
    if len(shape) != 2 and not stack:
        how = "(-1, 1)" if len(shape) < 2 else "(len(X), -1)"
        raise InputError(
            f"{name} has shape {shape}; two dimensions, (rows, columns), are needed: "
            f"try X.reshape{how}."
        )
    if min(shape) < 1:
        raise InputError(f"{name} has shape {shape}, so it is empty; give at least one row.")


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


# A buffer takes its rows from this many places of the file, so a file sorted by class is mixed.
BLOCKS_PER_BUFFER = 128


class FileRows(Table):
    """Serve the rows of a numeric .npy file, reading only what is asked for.

    The file is read by position and never mapped, so that resident memory does not grow with it.
    Both C and Fortran order are read, C order faster. A uint8 array of shape (n, height, width) or
    (n, height, width, 1 or 3) is taken as images and served flat, (n, d), its values unchanged.

    A shuffled pass takes contiguous blocks in random order and mixes the rows of up to
    `BLOCKS_PER_BUFFER` of them at a time, in a buffer of `buffer_bytes` or of two batches if those
    are larger; a file that fits into the buffer is permuted fully.

    Attributes: n_rows, n_features, dtype; `image_shape`, (height, width[, channels]) or None;
    `feature_names`, d strings or None; `weights`, (n_rows,) or None; `name`, the file's name.
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
        """Open `path`; `layout` describes a raw file, `delete` removes it with this object."""
        # A pass may begin after the caller has changed the working folder.
        self._path = Path(path).absolute()
        self.name = self._path.name if name is None else name
        self.feature_names = None if feature_names is None else tuple(feature_names)
        self.weights = weights
        self._buffer_bytes = buffer_bytes
        self._cleanup = weakref.finalize(self, _remove, self._path, os.getpid())
        if not delete:
            self._cleanup.detach()
        with self._open() as file:
            self._layout = layout or read_npy_layout(file, self.name)
            size = file.seek(0, os.SEEK_END)
        if size < self._layout.end:
            raise InputError(
                f"{self.name} is truncated: it has {size:,} bytes of {self._layout.end:,}; "
                "write or copy it again."
            )
        self.n_rows, self.n_features = self._layout.shape[0], self._layout.n_features
        self.dtype = to_native_dtype(self._layout.dtype)
        self.image_shape = self._layout.image_shape
        # Shared by copies with other weights: stamps of the file when it was found to be finite,
        # and whether nothing was missing.
        self._found_finite: list[tuple[tuple[int, ...], bool]] = []

    @property
    def checked(self) -> bool:
        """Whether the file, as it is now, was found to hold no infinities."""
        return bool(self._found_finite) and self._found_finite[-1][0] == self._stamp()

    @property
    def complete(self) -> bool:
        """Whether the file, as it is now, was found to hold finite values only."""
        return self.checked and self._found_finite[-1][1]

    def mark_finite(self, *, complete: bool = False) -> Self:
        """Remember that no value is infinite, until the file changes.

        ``complete`` says that nothing is missing either.
        """
        self._found_finite.append((self._stamp(), complete))
        return self

    def select(self, columns: NDArray[np.intp]) -> Self:
        """Return the same rows with the chosen columns only, in the order given."""
        other = super().select(columns)
        # What is found out about some of the columns does not hold for all.
        other._found_finite = self._found_finite[-1:]
        return other

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, (size, d) at a time."""
        check_pass(size)
        with self._open() as file:
            for first in range(0, self.n_rows, size):
                block = self._empty(min(size, self.n_rows - first))
                self._read(file, first, block)
                part = None if self.weights is None else self.weights[first : first + size]
                yield self._served(block, part)

    def at(self, numbers: NDArray[np.int64]) -> Batch:
        """Read the rows of the given numbers, (m, d), and nothing else of the file."""
        found = self._empty(len(numbers))
        with self._open() as file:
            for i, number in enumerate(numbers.tolist()):
                self._read(file, number, found[i : i + 1])
        return self._served(found, None if self.weights is None else self.weights[numbers])

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the rows of positive weight once, mixed; see the class for the order.

        Batches left out by `start` are not read, except those that share a buffer with the first.
        A file that fits into the buffer gives what it would give without its rows of weight zero.
        """
        check_pass(batch_size, start)
        n_rows = self.n_rows if self.weights is None else int(np.count_nonzero(self.weights))
        skip = start * batch_size
        batches = draw_batches(
            self._buffers(batch_size, [seed, epoch], skip),
            batch_size,
            max(0, n_rows - skip),
            row_bytes=self._layout.row_bytes,
            slow=False,
        )
        return starmap(self._served, batches)

    def shuffled_shard(
        self, batch_size: int, *, share: tuple[int, int], seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the same batches, of each the rows in one's share of the blocks.

        Of so many shares, the one of a number has every so many-th block, and reads nothing else.
        """
        check_pass(batch_size, start)
        buffers = self._buffers(batch_size, [seed, epoch], start * batch_size, share)
        spare = self.at(np.zeros(1, np.int64))

        def batches() -> Generator[Batch]:
            for parts in draw_shards(buffers, batch_size):
                served = [self._served(*part) for part in parts]
                yield join_batches(served) if served else take_weightless_row(spare)

        return read_ahead(batches())

    def close(self) -> None:
        """Delete the file if it is a temporary copy; else do nothing."""
        self._cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _buffers(
        self, batch_size: int, entropy: list[int], skip: int, share: tuple[int, int] = (0, 1)
    ) -> Generator[Buffer]:
        """Yield the rows of one buffer after the other, after the first ``skip`` rows.

        Of the blocks of a buffer, those of a share are read.
        """
        weights = self.weights
        in_buffer = max(1, self._buffer_bytes // self._layout.row_bytes, 2 * batch_size)
        size = math.ceil(in_buffer / BLOCKS_PER_BUFFER)
        n_blocks = math.ceil(self.n_rows / size)
        n_buffers = math.ceil(n_blocks / BLOCKS_PER_BUFFER)
        blocks = np.random.default_rng(entropy).permutation(n_blocks)
        # Even shares: a last buffer of few blocks would be mixed badly.
        bounds = [i * n_blocks // n_buffers for i in range(n_buffers + 1)]
        rows = self._empty(min(self.n_rows, math.ceil(n_blocks / n_buffers) * size))
        with self._open() as file:
            for i in range(n_buffers):
                firsts = np.sort(blocks[bounds[i] : bounds[i + 1]]) * size
                ends = np.minimum(firsts + size, self.n_rows)
                pieces = list(zip(firsts.tolist(), ends.tolist(), strict=True))
                weight, used, count = None, None, int((ends - firsts).sum())
                if weights is not None:
                    weight = np.concatenate([weights[first:end] for first, end in pieces])
                    used = np.flatnonzero(weight)
                    count = len(used)
                if skip >= count:
                    skip -= count
                    continue
                filled, own = 0, np.zeros(len(rows), bool) if share[1] > 1 else None
                for number, (first, end) in enumerate(pieces):
                    part = slice(filled, filled + end - first)
                    if number % share[1] == share[0]:
                        self._read(file, first, rows[part])
                        if own is not None:
                            own[part] = True
                    filled += end - first
                # A generator of its own, so that the order does not depend on buffers left out.
                order = np.random.default_rng([*entropy, i]).permutation(count)[skip:]
                yield Buffer(rows, order if used is None else used[order], weight, own)
                skip = 0

    def _empty(self, n: int) -> Array:
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


def open_memmap(X: Array) -> FileRows | None:
    """Make rows of the file behind a memory-mapped array; None where that cannot be done."""
    owner: Any = X
    while isinstance(owner, np.ndarray) and getattr(owner, "_mmap", None) is None:
        owner = owner.base
    # With mode "c", changes are in memory only and the file does not have them.
    if not isinstance(owner, np.memmap) or owner.filename is None or owner.mode == "c":
        return None
    check_table(X.shape, "X")
    check_numeric(X.dtype, "X")
    layout = find_memmap_layout(X, owner)
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
    # The path may lead to another file by now, while the map still has the right one.
    return source if ends.tobytes() == X[[0, -1]].tobytes() else None


def _remove(path: Path, pid: int) -> None:
    # A forked process must not delete what its parent still reads.
    if os.getpid() == pid:
        path.unlink(missing_ok=True)
