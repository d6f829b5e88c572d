"""Rows of numbers, in memory or in a file, read in order or shuffled.

Everything that trains or scores takes its samples from a `Rows`. `rows` makes one of what a caller
has; `factormix.readers.read_rows` makes one of what lies on disk.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.errors import InputError

__all__ = [
    "ArrayRows",
    "Batch",
    "FileRows",
    "Layout",
    "Rows",
    "WeightableRows",
    "Weights",
    "check_finite",
    "npy_layout",
    "rows",
]

Array: TypeAlias = NDArray[Any]
Batch: TypeAlias = Array | torch.Tensor
Weights: TypeAlias = NDArray[np.float64]
"""One number for each row, (n,), on the CPU."""

# A shuffle buffer this large holds thousands of rows and still fits beside any model.
BUFFER_BYTES = 32 << 20
# A buffer takes its rows from this many places of the file, so a file sorted by class is mixed.
BLOCKS_PER_BUFFER = 128
# What is read at once where the order does not matter.
CHUNK_BYTES = 4 << 20


@runtime_checkable
class Rows(Protocol):
    """Describe a table of numbers, shape (n_rows, n_features), that is read in pieces."""

    @property
    def n_rows(self) -> int: ...

    @property
    def n_features(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any] | torch.dtype: ...

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, `size` at a time; the last block may be smaller."""
        ...

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield all rows once, mixed, in batches; the last batch may be smaller.

        The order follows from (seed, epoch) alone. `start` leaves out that many batches, so that a
        run can go on where it stopped.
        """
        ...


@runtime_checkable
class WeightableRows(Rows, Protocol):
    """Describe rows that can be served together with a weight for each."""

    def weighted(
        self, weights: Weights, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[tuple[Batch, Weights]]:
        """Yield batches as `shuffled` does, each with the weights (B,) of its rows.

        `weights` (n_rows,) tells the weight of every row in the source's own order. Rows of weight
        zero are left out, as if they were not there.
        """
        ...


def rows(X: Any) -> Rows:
    """Make rows of `X`, shape (n, d): an array, a memory map, a tensor, or what has `__array__`.

    A memory map, or a view of one, is read through its file, so that memory does not grow with it
    (opened with mode "c", or sliced with steps along its columns, it is read where it is).
    What is already a `Rows` comes back as it is.

    >>> source = rows(np.arange(10.0).reshape(5, 2))
    >>> [len(batch) for batch in source.shuffled(2, seed=0, epoch=0)]
    [2, 2, 1]
    """
    if isinstance(X, torch.Tensor):
        return ArrayRows(X)
    if isinstance(X, Rows):
        return X
    if not hasattr(X, "__array__"):
        raise InputError(
            f"X is a {type(X).__name__}; pass an array, a tensor or rows "
            "(read_rows makes rows of a file)."
        )
    array = np.asanyarray(X)
    return _mapped_rows(array) or ArrayRows(array)


class ArrayRows:
    """Serve the rows of an array or tensor in memory, shape (n, d), without copying it whole."""

    def __init__(self, X: Batch) -> None:
        _check_table(tuple(X.shape), "X")
        self.dtype: np.dtype[Any] | torch.dtype
        if isinstance(X, torch.Tensor):
            if X.is_complex():
                raise InputError("X holds complex numbers; only real numbers can be used.")
            X = X.detach()
            self.dtype = X.dtype
        else:
            _check_dtype(X.dtype, "X")
            self.dtype = _served_dtype(X.dtype)
        self._X = X
        self.n_rows, self.n_features = int(X.shape[0]), int(X.shape[1])

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, (size, d) at a time, as views where possible."""
        _check_pass(size)
        for first in range(0, self.n_rows, size):
            yield self._served(self._X[first : first + size])

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield all rows once in a random permutation, (batch_size, d) at a time."""
        _check_pass(batch_size, start)
        order = np.random.default_rng([seed, epoch]).permutation(self.n_rows)
        yield from self._taken(order[start * batch_size :], batch_size)

    def weighted(
        self, weights: Weights, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[tuple[Batch, Weights]]:
        """Yield batches of the rows of positive weight, with their weights, as if alone."""
        _check_pass(batch_size, start)
        used = np.flatnonzero(weights)
        order = used[np.random.default_rng([seed, epoch]).permutation(len(used))]
        order = order[start * batch_size :]
        firsts = range(0, len(order), batch_size)
        for first, batch in zip(firsts, self._taken(order, batch_size), strict=True):
            yield batch, weights[order[first : first + batch_size]]

    def _taken(self, order: NDArray[np.int64], batch_size: int) -> Iterator[Batch]:
        """Yield the rows of the given numbers, (batch_size, d) at a time."""
        if isinstance(self._X, torch.Tensor):
            # The indices go to the device once, so that no batch waits for a copy.
            on_device = torch.from_numpy(order).to(self._X.device)
            for first in range(0, len(order), batch_size):
                yield self._X.index_select(0, on_device[first : first + batch_size])
            return
        for first in range(0, len(order), batch_size):
            yield self._served(self._X[order[first : first + batch_size]])

    def _served(self, batch: Batch) -> Batch:
        if isinstance(self.dtype, torch.dtype):
            return batch
        return np.asarray(batch, dtype=self.dtype)


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


class FileRows:
    """Serve the rows of a numeric .npy file, reading only what is asked for.

    The file is read by position and never mapped, so that resident memory does not grow with it.
    Both C and Fortran order are read, C order faster. A uint8 array of shape (n, height, width) or
    (n, height, width, 1 or 3) is taken as images and served flat, (n, d), its values unchanged.

    A shuffled pass takes contiguous blocks in random order and mixes the rows of up to
    `BLOCKS_PER_BUFFER` of them at a time, in a buffer of `buffer_bytes` or of two batches if those
    are larger; a file that fits into the buffer is permuted fully.

    Attributes: n_rows, n_features, dtype; `image_shape`, (height, width[, channels]) or None;
    `feature_names`, d strings or None; `name`, the file's name.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout: Layout | None = None,
        name: str | None = None,
        feature_names: tuple[str, ...] | None = None,
        delete: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Open `path`; `layout` tells of a raw file, `delete` removes the file with this object."""
        # A pass may begin after the caller has changed the working folder.
        self._path = Path(path).absolute()
        self.name = self._path.name if name is None else name
        self.feature_names = feature_names
        self._buffer_bytes = buffer_bytes
        self._cleanup = weakref.finalize(self, _remove, self._path, os.getpid())
        if not delete:
            self._cleanup.detach()
        with self._open() as file:
            self._layout = layout or npy_layout(file, self.name)
            size = file.seek(0, os.SEEK_END)
        if size < self._layout.end:
            raise InputError(
                f"{self.name} is truncated: it has {size:,} bytes of {self._layout.end:,}; "
                "write or copy it again."
            )
        self.n_rows, self.n_features = self._layout.shape[0], self._layout.n_features
        self.dtype = _served_dtype(self._layout.dtype)
        self.image_shape = self._layout.image_shape

    def blocks(self, size: int) -> Iterator[Array]:
        """Yield all rows in order, (size, d) at a time."""
        _check_pass(size)
        with self._open() as file:
            for first in range(0, self.n_rows, size):
                block = self._empty(min(size, self.n_rows - first))
                self._read(file, first, block)
                yield block.astype(self.dtype, copy=False)

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Array]:
        """Yield all rows once, mixed, (batch_size, d) at a time; see the class for the order.

        Batches left out by `start` are not read, but for those that share a buffer with the first.
        """
        _check_pass(batch_size, start)
        for batch, _ in self._pass(batch_size, [seed, epoch], start):
            yield batch

    def weighted(
        self, weights: Weights, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[tuple[Array, Weights]]:
        """Yield batches of the rows of positive weight, mixed in the same way, with their weights.

        A file that fits into the buffer gives what it would give without its other rows.
        """
        _check_pass(batch_size, start)
        for batch, parts in self._pass(batch_size, [seed, epoch], start, weights):
            yield batch, np.concatenate(parts)

    def close(self) -> None:
        """Delete the file if it is a temporary copy; else do nothing."""
        self._cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _pass(
        self, batch_size: int, entropy: list[int], start: int, weights: Weights | None = None
    ) -> Iterator[tuple[Array, list[Weights]]]:
        """Yield mixed batches; with weights, rows of positive weight only and theirs in parts."""
        n_rows = self.n_rows if weights is None else int(np.count_nonzero(weights))
        left = max(0, n_rows - start * batch_size)
        batch, parts, filled = self._empty(min(batch_size, left)), list[Weights](), 0
        for buffer, order, weight in self._buffers(
            batch_size, entropy, start * batch_size, weights
        ):
            while len(order):
                taken = order[: len(batch) - filled]
                # With "clip" NumPy writes into the batch directly; every index is in range.
                np.take(buffer, taken, axis=0, out=batch[filled:][: len(taken)], mode="clip")
                if weight is not None:
                    parts.append(weight[taken])
                order, filled = order[len(taken) :], filled + len(taken)
                if filled == len(batch):
                    yield batch.astype(self.dtype, copy=False), parts
                    left -= filled
                    batch, parts, filled = self._empty(min(batch_size, left)), [], 0

    def _buffers(
        self, batch_size: int, entropy: list[int], skip: int, weights: Weights | None
    ) -> Iterator[tuple[Array, NDArray[np.int64], Weights | None]]:
        """Yield (buffer, order to serve its rows in, their weights), but for the first `skip`."""
        in_buffer = max(1, self._buffer_bytes // self._layout.row_bytes, 2 * batch_size)
        size = math.ceil(in_buffer / BLOCKS_PER_BUFFER)
        n_blocks = math.ceil(self.n_rows / size)
        n_buffers = math.ceil(n_blocks / BLOCKS_PER_BUFFER)
        blocks = np.random.default_rng(entropy).permutation(n_blocks)
        # Even shares: a last buffer of few blocks would be mixed badly.
        bounds = [i * n_blocks // n_buffers for i in range(n_buffers + 1)]
        space = self._empty(min(self.n_rows, math.ceil(n_blocks / n_buffers) * size))
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
                filled = 0
                for first, end in pieces:
                    self._read(file, first, space[filled : filled + end - first])
                    filled += end - first
                # A generator of its own, so that the order does not hang on buffers left out.
                order = np.random.default_rng([*entropy, i]).permutation(count)[skip:]
                yield space, order if used is None else used[order], weight
                skip = 0

    def _empty(self, n: int) -> Array:
        return np.empty((n, self._layout.n_features), self._layout.dtype)

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


def check_finite(source: Rows, name: str = "X") -> None:
    """Raise an error that names the first NaN or infinity, reading `source` once, in blocks."""
    dtype = source.dtype
    if not (dtype.is_floating_point if isinstance(dtype, torch.dtype) else dtype.kind == "f"):
        return
    first = 0
    for block in source.blocks(max(1, CHUNK_BYTES // (8 * source.n_features))):
        finite = torch.isfinite(block) if isinstance(block, torch.Tensor) else np.isfinite(block)
        if not finite.all():
            row, column = np.argwhere(~np.array(finite.tolist()))[0].tolist()
            value = "NaN" if math.isnan(block[row, column].item()) else "an infinite value"
            raise InputError(
                f"{name} has {value} in row {first + row}, column {column} (counting from 0); "
                "remove the row or fill the value in."
            )
        first += len(block)


def npy_layout(file: IO[bytes], name: str) -> Layout:
    """Read the header of a .npy stream and check that it tells of a table of real numbers."""
    try:
        # Version 3 exists for structured arrays only, which are turned down in any case.
        one = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if one else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, EOFError, OSError) as error:
        raise InputError(
            f"{name} is not a readable .npy file; write it again with numpy.save."
        ) from error
    _check_dtype(dtype, name)
    _check_table(shape, name, images=dtype == np.uint8)
    layout = Layout.contiguous(shape, dtype, file.tell())
    if not fortran:
        return layout
    # Where each feature, counted in C order, stands among the columns as Fortran order has them.
    columns = np.arange(layout.n_features).reshape(shape[1:], order="F").ravel()
    column_bytes = shape[0] * dtype.itemsize
    return Layout(shape, dtype, layout.offset, dtype.itemsize, columns * column_bytes)


def _mapped_rows(X: Array) -> FileRows | None:
    """Make rows of the file behind a memory-mapped array; None where that cannot be done."""
    owner: Any = X
    while isinstance(owner, np.ndarray) and getattr(owner, "_mmap", None) is None:
        owner = owner.base
    # With mode "c", changes are in memory only and the file does not have them.
    if not isinstance(owner, np.memmap) or owner.filename is None or owner.mode == "c":
        return None
    _check_table(X.shape, "X")
    _check_dtype(X.dtype, "X")
    layout = _mapped_layout(X, owner)
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


def _mapped_layout(X: Array, owner: Any) -> Layout | None:
    """Find a view's place in the file from its address: its offset is that of the whole map."""
    start = owner.offset - owner.offset % mmap.ALLOCATIONGRANULARITY
    offset = start + X.ctypes.data - np.frombuffer(owner._mmap, np.uint8).ctypes.data
    (n, d), (row_stride, column_stride), item = X.shape, X.strides, X.dtype.itemsize
    if (column_stride == item or d == 1) and row_stride >= d * item:
        return Layout((n, d), X.dtype, offset, row_stride)
    if row_stride == item and column_stride >= n * item:
        return Layout((n, d), X.dtype, offset, item, np.arange(d) * column_stride)
    return None


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


def _remove(path: Path, pid: int) -> None:
    # A forked process must not delete what its parent still reads.
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


def _served_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Choose the dtype to serve: torch knows neither swapped bytes nor long doubles."""
    return np.dtype(np.float64) if dtype.char == "g" else dtype.newbyteorder("=")


def _check_dtype(dtype: np.dtype[Any], name: str) -> None:
    if dtype.kind not in "biuf":
        kinds = {"O": "objects", "U": "strings", "S": "strings", "c": "complex numbers"}
        raise InputError(
            f"{name} holds {kinds.get(dtype.kind, f'values of type {dtype}')}; "
            "only real numbers can be used, so convert it first."
        )


def _check_table(shape: tuple[int, ...], name: str, *, images: bool = False) -> None:
    stack = images and (len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3)))
    if len(shape) != 2 and not stack:
        how = "(-1, 1)" if len(shape) < 2 else "(len(X), -1)"
        raise InputError(
            f"{name} has shape {shape}; two dimensions, (rows, columns), are needed: "
            f"try X.reshape{how}."
        )
    if min(shape) < 1:
        raise InputError(f"{name} has shape {shape}, so it is empty; give at least one row.")


def _check_pass(size: int, start: int = 0) -> None:
    if size < 1:
        raise InputError(f"The batch size is {size}; it must be at least 1.")
    if start < 0:
        raise InputError(f"The batch to start at is {start}; it must be at least 0.")
