"""The protocols of sources and rows, and the code that all sources share."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.data.batches import Batch, Values, Weights, join_batches, take_weightless_row
from factormix.errors import InputError

PASS_ROWS = 4096
"""Rows of a block where single rows are picked out of a whole pass: 16 MiB of 1,024
features in float32."""

T = TypeVar("T")


@runtime_checkable
class Source(Protocol):
    """Describe rows of ``n_features`` numbers that are read in blocks and may never end.

    A source may also have ``feature_names`` (d strings), ``image_shape`` (height, width[, 3]) and a
    ``name`` for messages. ``checked`` is true if no value is infinite, ``complete`` if also no
    value is missing (NaN).
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
    """Describe a table of numbers, shape (n_rows, n_features), that can be read repeatedly."""

    @property
    def n_rows(self) -> int: ...

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield all rows once, shuffled, in batches; the last batch may be smaller.

        The order follows from (seed, epoch) alone. The first `start` batches are left out, so that
        a run can continue where it stopped. Rows of weight zero are left out too.
        """
        ...


class Table:
    """The part of a source that does not depend on where its values are stored.

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
    records: Any = None
    """All columns of the file that the rows were read from, as ``readers.base.Records``."""
    checked: bool = False
    """Whether no value is infinite."""
    complete: bool = False
    """Whether no value is missing either."""
    _columns: NDArray[np.intp] | None = None

    def mark_finite(self, *, complete: bool = False) -> Self:
        """Return the same rows, marked as free of infinities; these rows stay unmarked.

        ``complete`` says that no value is missing either.
        """
        other = copy.copy(self)
        other.checked, other.complete = True, complete
        return other

    def with_weights(self, weights: Weights | None) -> Self:
        """Return the same rows with weights (n_rows,)."""
        other = copy.copy(self)
        other.weights = weights
        return other

    def select(self, columns: NDArray[np.intp]) -> Self:
        """Return the same rows with the chosen columns only, in the order given."""
        other = copy.copy(self)
        other._columns = columns if self._columns is None else self._columns[columns]
        other.n_features = len(columns)
        other.image_shape = None
        if self.feature_names is not None:
            other.feature_names = tuple(self.feature_names[j] for j in columns)
        return other

    def _weights_at(self, where: slice | NDArray[Any]) -> Weights | None:
        return None if self.weights is None else self.weights[where]

    def _make_batch(self, rows: Values, weights: Values | None) -> Batch:
        """Make a batch of rows (B, D) of the table, where D counts all of its columns."""
        if self._columns is not None:
            rows = (
                rows.index_select(1, torch.from_numpy(self._columns).to(rows.device))
                if isinstance(rows, torch.Tensor)
                else np.take(rows, self._columns, axis=1)
            )
        if isinstance(rows, np.ndarray) and isinstance(self.dtype, np.dtype):
            rows = rows.astype(self.dtype, copy=False)
        return Batch(rows, weights)


class ForeignRows(Table):
    """Choose columns or weights of rows, or of a source, that have no methods for it."""

    def __init__(self, source: Any) -> None:
        self._source = source
        for name in (*Table.__annotations__, "n_rows"):
            if not name.startswith("_") and hasattr(source, name):
                setattr(self, name, getattr(source, name))

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, (size, d) at a time."""
        first = 0
        for batch in self._source.blocks(size):
            own = self._weights_at(slice(first, first + len(batch)))
            yield self._make_batch(batch.rows, batch.weights if own is None else own)
            first += len(batch)

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the rows shuffled; see ``Rows``."""
        if self.weights is not getattr(self._source, "weights", None):
            raise InputError(
                f"X is a {type(self._source).__name__} without the method with_weights, so"
                " sample_weight cannot follow its rows: give an array, a tensor, or rows that"
                " factormix reads."
            )
        batches = self._source.shuffled(batch_size, seed=seed, epoch=epoch, start=start)
        return (self._make_batch(batch.rows, batch.weights) for batch in batches)


class BatchShard:
    """Serve shard ``index`` of ``count`` of every batch; all shards together are the batch.

    Rows with a method ``shuffled_shard`` read the shard alone; other rows read the whole batch.
    """

    def __init__(self, rows: Rows, index: int, count: int) -> None:
        self._rows, self._index, self._count = rows, index, count
        self.complete: bool = getattr(rows, "complete", False)

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the shard of each batch; see ``Rows``."""
        order: dict[str, Any] = {"seed": seed, "epoch": epoch, "start": start}
        own = getattr(self._rows, "shuffled_shard", None)
        if own is not None:
            return own(batch_size, shard=(self._index, self._count), **order)  # type: ignore[no-any-return]
        return map(self._take, self._rows.shuffled(batch_size, **order))

    def _take(self, batch: Batch) -> Batch:
        own = batch.take(find_shard(len(batch), self._index, self._count))
        return own if len(own) else take_weightless_row(batch)


def find_shard(n_rows: int, index: int, count: int) -> slice:
    """Return the rows of shard ``index`` of ``count`` among the rows of a batch."""
    return slice(n_rows * index // count, n_rows * (index + 1) // count)


def count_weighted_rows(rows: Rows | Table) -> int:
    """Count the rows of positive weight."""
    weights: Weights | None = getattr(rows, "weights", None)
    return rows.n_rows if weights is None else int(np.count_nonzero(weights))


def take_rows(rows: Rows, numbers: NDArray[np.int64]) -> Batch:
    """Return the rows of the given numbers, (m, d), in the order given.

    Rows with a method ``at`` read these rows alone; other rows are picked out of a whole pass.
    """
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < rows.n_rows:
        raise InputError(f"rows are numbered from 0 to {rows.n_rows - 1}: ask for one of these.")
    if hasattr(rows, "at"):
        found: Batch = rows.at(numbers)
        return found
    parts, places, first = [], [], 0
    for block in rows.blocks(PASS_ROWS):
        here = np.flatnonzero((numbers >= first) & (numbers < first + len(block)))
        parts.append(block.take(numbers[here] - first))
        places.append(here)
        first += len(block)
    return join_batches(parts).take(np.argsort(np.concatenate(places)))


def read_ahead(items: Generator[T], depth: int = 2) -> Iterator[T]:
    """Yield the items of a generator, of which a thread makes the next ``depth`` in advance.

    Items keep their order, and an error is raised in the place where it occurred. When the caller
    stops, the generator is closed and the thread ends.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="factormix-read-ahead")
    end = object()
    # A single thread takes the items one after the other, in the order of the requests.
    coming = deque(pool.submit(next, items, end) for _ in range(depth))
    try:
        while (item := coming.popleft().result()) is not end:
            coming.append(pool.submit(next, items, end))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        items.close()


def check_pass(size: int, start: int = 0) -> None:
    """Check the batch size and the first batch of a pass over rows."""
    if size < 1:
        raise InputError(f"The batch size is {size}; it must be at least 1.")
    if start < 0:
        raise InputError(f"The batch to start at is {start}; it must be at least 0.")


def to_native_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Choose the dtype to serve: torch has neither swapped bytes nor long doubles."""
    return np.dtype(np.float64) if dtype.char == "g" else dtype.newbyteorder("=")
