"""Rows of numbers, in memory or in a file, read in order or shuffled.

Everything that trains or scores takes its samples from a `Rows`. `rows` makes one of what a caller
has; `factormix.data.readers.read_rows` makes one of what lies on disk.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.data.layouts import Layout, check_numeric, check_table, mapped_layout, npy_layout
from factormix.errors import InputError

__all__ = [
    "ArrayRows",
    "Batch",
    "FileRows",
    "Rows",
    "WeightableRows",
    "Weights",
    "check_finite",
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
        check_table(tuple(X.shape), "X")
        self.dtype: np.dtype[Any] | torch.dtype
        if isinstance(X, torch.Tensor):
            if X.is_complex():
                raise InputError("X holds complex numbers; only real numbers can be used.")
            X = X.detach()
            self.dtype = X.dtype
        else:
            check_numeric(X.dtype, "X")
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


def _mapped_rows(X: Array) -> FileRows | None:
    """Make rows of the file behind a memory-mapped array; None where that cannot be done."""
    owner: Any = X
    while isinstance(owner, np.ndarray) and getattr(owner, "_mmap", None) is None:
        owner = owner.base
    # With mode "c", changes are in memory only and the file does not have them.
    if not isinstance(owner, np.memmap) or owner.filename is None or owner.mode == "c":
        return None
    check_table(X.shape, "X")
    check_numeric(X.dtype, "X")
    layout = mapped_layout(X, owner)
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


def _served_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Choose the dtype to serve: torch knows neither swapped bytes nor long doubles."""
    return np.dtype(np.float64) if dtype.char == "g" else dtype.newbyteorder("=")


def _check_pass(size: int, start: int = 0) -> None:
    if size < 1:
        raise InputError(f"The batch size is {size}; it must be at least 1.")
    if start < 0:
        raise InputError(f"The batch to start at is {start}; it must be at least 0.")
