"""What a source of rows is.

A share of every batch, for one of several processes that read the same rows.

Reading ahead: what comes next is fetched while somebody works on what is there.

What tables in memory and in files share: names, weights, and a choice of columns.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.data.batches import Batch, Values, Weights, take_weightless_row
from factormix.errors import InputError

__all__ = [
    "BatchShard",
    "Rows",
    "Source",
    "Table",
    "WeightableRows",
    "check_pass",
    "read_ahead",
    "take_shard",
    "to_native_dtype",
]


@runtime_checkable
class Source(Protocol):
    """Describe rows of ``n_features`` numbers that are read in pieces and may never end.

    A source may also have ``feature_names`` (d strings), ``image_shape`` (height, width[, 3]), a
    ``name`` for messages, ``checked``, which is true where no value is infinite, and ``complete``,
    which is true where none is missing (NaN) either.
    """

    @property
    def n_features(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any] | torch.dtype: ...

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, `size` at a time; the last block may be smaller."""
        ...


@runtime_checkable
class Rows(Source, Protocol):
    """Describe a table of numbers, shape (n_rows, n_features), that can be read again and again."""

    @property
    def n_rows(self) -> int: ...

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield all rows once, mixed, in batches; the last batch may be smaller.

        The order follows from (seed, epoch) alone. `start` leaves out that many batches, so that a
        run can go on where it stopped. Rows of weight zero are left out, as if they were not there.
        """
        ...


@runtime_checkable
class WeightableRows(Rows, Protocol):
    """Describe rows that can carry a weight each, ``weights`` (n_rows,) or None."""

    weights: Weights | None

    def with_weights(self, weights: Weights | None) -> Self:
        """Return the same rows with weights (n_rows,) in the source's own order."""
        ...


def check_pass(size: int, start: int = 0) -> None:
    """Check what a pass over rows is asked for."""
    if size < 1:
        raise InputError(f"The batch size is {size}; it must be at least 1.")
    if start < 0:
        raise InputError(f"The batch to start at is {start}; it must be at least 0.")


class BatchShard:
    """Serve one of ``count`` shares of every batch, the rows of all shares being the batch.

    Rows that know how to read a share alone do so; of others, the rest is read and left out.
    """

    def __init__(self, rows: Rows, index: int, count: int) -> None:
        self._rows, self._index, self._count = rows, index, count
        self.complete: bool = getattr(rows, "complete", False)

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the share of each batch; see ``Rows``."""
        order: dict[str, Any] = {"seed": seed, "epoch": epoch, "start": start}
        own = getattr(self._rows, "shuffled_shard", None)
        if own is not None:
            return own(batch_size, share=(self._index, self._count), **order)  # type: ignore[no-any-return]
        batches = self._rows.shuffled(batch_size, **order)
        return (take_shard(batch, self._index, self._count) for batch in batches)


def take_shard(batch: Batch, index: int, count: int) -> Batch:
    """Return one of the shares of a batch; where there are too few rows, one without weight."""
    first, end = (len(batch) * i // count for i in (index, index + 1))
    if end > first:
        return batch.take(slice(first, end))
    return take_weightless_row(batch)


T = TypeVar("T")


def read_ahead(items: Generator[T], depth: int = 2) -> Iterator[T]:
    """Yield what a generator yields, ``depth`` items of which are made in a thread beforehand.

    The order is that of the generator, and what it raises is raised in its place. The generator is
    closed, and the thread gone, when the caller has had enough.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="factormix-read-ahead")
    end = object()
    # A single thread takes them one after the other, in the order in which they are asked for.
    coming = deque(pool.submit(next, items, end) for _ in range(depth))
    try:
        while (item := coming.popleft().result()) is not end:
            coming.append(pool.submit(next, items, end))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        items.close()


class Table:
    """The half of a source that does not depend on where its values lie.

    Attributes: n_rows, n_features, dtype; `name` for messages; `feature_names`, d strings or None;
    `image_shape`, (height, width[, 3]) or None; `weights`, (n_rows,) or None.
    """

    n_rows: int
    n_features: int
    dtype: np.dtype[Any] | torch.dtype
    name: str = "X"
    feature_names: tuple[str, ...] | None = None
    image_shape: tuple[int, ...] | None = None
    weights: Weights | None = None
    _columns: NDArray[np.intp] | None = None
    _origin: Table | None = None

    def with_weights(self, weights: Weights | None) -> Self:
        """Return the same rows with weights (n_rows,)."""
        other = self._copied()
        other.weights = weights
        return other

    def select(self, columns: NDArray[np.intp]) -> Self:
        """Return the same rows with the chosen columns only, in the order given."""
        other = self._copied()
        other._columns = columns if self._columns is None else self._columns[columns]
        other.n_features = len(columns)
        other.image_shape = None
        if self.feature_names is not None:
            other.feature_names = tuple(self.feature_names[j] for j in columns)
        return other

    def _copied(self) -> Self:
        other = copy.copy(self)
        # A temporary file goes with the object that made it, which must outlive its copies.
        other._origin = self
        return other

    def _served(self, rows: Values, weights: Weights | None) -> Batch:
        """Make a batch of rows (B, D) of the table, D being all columns that it has."""
        if self._columns is not None:
            rows = (
                rows.index_select(1, torch.from_numpy(self._columns).to(rows.device))
                if isinstance(rows, torch.Tensor)
                else np.take(rows, self._columns, axis=1)
            )
        if isinstance(rows, np.ndarray) and isinstance(self.dtype, np.dtype):
            rows = rows.astype(self.dtype, copy=False)
        return Batch(rows, weights)


def to_native_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Choose the dtype to serve: torch knows neither swapped bytes nor long doubles."""
    return np.dtype(np.float64) if dtype.char == "g" else dtype.newbyteorder("=")
