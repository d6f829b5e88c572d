"""What others load data with: torch's data sets and loaders, Hugging Face datasets, iterables.

None of these packages is imported here: what was made with one has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.data.arrow import common_dtype, describe_columns, name_features, to_rows
from factormix.data.batches import Batch, Values, join_batches, rebatch
from factormix.data.checks import find_infinite_rows
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Table, check_pass
from factormix.data.sources.shuffle import BUFFER_BYTES
from factormix.data.sources.streams import Stream
from factormix.errors import InputError

__all__ = ["ReplayedRows", "iterate_tables", "load_rows"]

SAMPLES = 256
"""Samples of a torch data set that are put together to a table."""


def load_rows(X: Any) -> ItemRows | ReplayedRows | None:
    """Make rows of a data set, a loader or an iterable of tables; None for anything else."""
    if _is_hugging(X, "Dataset"):
        return ItemRows(_HuggingItems(X))
    if _is_torch(X, "Dataset") and hasattr(X, "__len__") and not _is_torch(X, "IterableDataset"):
        return ItemRows(_TorchItems(X))
    tables = iterate_tables(X)
    return None if tables is None else ReplayedRows(X)


def iterate_tables(X: Any) -> Iterator[Any] | None:
    """Return the tables of an iterable one after the other; None for what is no such thing."""
    if _is_hugging(X, "IterableDataset"):
        return map(_hugging_table, X.with_format("arrow").iter(batch_size=SAMPLES))
    if _is_torch(X, "IterableDataset"):
        return _stacked(iter(X))
    if _is_torch(X, "DataLoader"):
        batches = map(_sample, X)
        return (
            _stacked(batches)
            if X.batch_size is None and X.batch_sampler is None
            else map(_flat_batch, batches)
        )
    return iter(X) if _is_iterable_of_tables(X) else None


class ItemRows(ArrayRows):
    """Serve rows that are taken by their numbers, fully permuted in a shuffled pass.

    Values are checked when they are served.
    """

    def __init__(self, items: _Items) -> None:
        first = items[:1]
        super().__init__(first)
        self.n_rows = len(items)
        self._X: Any = items
        names = items.names
        self.feature_names = None if names is None else tuple(names)
        self.checked = True

    def _served(self, rows: Values, weights: Any) -> Batch:
        batch = super()._served(rows, weights)
        if len(find_infinite_rows(batch.rows)):
            raise InputError(
                "X has an infinite value in a row that was read just now: remove such rows, or fill"
                " in the value, or NaN if it is missing."
            )
        return batch

    def _taken(self, order: NDArray[np.int64], batch_size: int) -> Iterator[Values]:
        for first in range(0, len(order), batch_size):
            yield self._X[order[first : first + batch_size]]


class _Items:
    """What gives rows (m, d) for a slice or an array of numbers."""

    names: Sequence[str] | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, which: slice | NDArray[np.int64]) -> Values:
        numbers = range(len(self))[which] if isinstance(which, slice) else which.tolist()
        return self._rows(list(numbers))

    def _rows(self, numbers: list[int]) -> Values:
        raise NotImplementedError


class _TorchItems(_Items):
    """The samples of a torch data set, (sample) or (sample, label), flattened."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        if not len(self):
            raise InputError("the data set X has no samples: give at least one.")

    def __len__(self) -> int:
        return len(self._dataset)

    def _rows(self, numbers: list[int]) -> Values:
        fetch = getattr(self._dataset, "__getitems__", None)
        samples = fetch(numbers) if fetch else [self._dataset[i] for i in numbers]
        return _stack([_sample(sample) for sample in samples])


class _HuggingItems(_Items):
    """The rows of a Hugging Face data set, through Arrow."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format("arrow")
        if not len(self):
            raise InputError("the data set X has no rows: give at least one.")
        self.names = name_features(self._columns)

    def __len__(self) -> int:
        return len(self._dataset)

    @cached_property
    def _columns(self) -> list[Any]:
        return _hugging_columns(self._dataset[:1])

    def _rows(self, numbers: list[int]) -> Values:
        table, columns = self._dataset[numbers], self._columns
        return to_rows(table, columns, common_dtype(columns), "X", numbers[0])


class ReplayedRows(Table):
    """Serve an iterable of tables (n, d) that begins anew each time, mixed through a buffer.

    The rows are counted in a first pass. The order of a shuffled pass follows from (seed, epoch) if
    the iterable itself comes in the same order every time.
    """

    checked = False

    def __init__(self, tables: Any, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._tables, self.buffer_bytes = tables, buffer_bytes
        stream = self._stream()
        self.n_features, self.dtype = stream.n_features, stream.dtype
        self.feature_names = stream.feature_names
        self.n_rows = sum(len(batch) for batch in stream.blocks(SAMPLES))

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in the order of the iterable, (size, d) at a time."""
        check_pass(size)
        weights, at = self.weights, 0
        for batch in self._stream().blocks(size):
            given = None if weights is None else weights[at : at + len(batch)]
            at += len(batch)
            yield self._served(batch.rows, given)

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the rows of positive weight once, mixed; batches before ``start`` are read over."""
        check_pass(batch_size, start)
        mixed = rebatch(self._buffers(batch_size, [seed, epoch]), batch_size)
        return islice(mixed, start, None)

    def _buffers(self, batch_size: int, entropy: list[int]) -> Iterator[Batch]:
        itemsize = (
            torch.empty(0, dtype=self.dtype).element_size()
            if isinstance(self.dtype, torch.dtype)
            else self.dtype.itemsize
        )
        wanted = max(1, self.buffer_bytes // (self.n_features * itemsize), 2 * batch_size)
        share = -(-self.n_rows // -(-self.n_rows // wanted))
        for number, buffer in enumerate(rebatch(self.blocks(batch_size), share)):
            if buffer.weights is not None:
                buffer = buffer.take(np.flatnonzero(np.asarray(buffer.weights)))
            order = np.random.default_rng([*entropy, number]).permutation(len(buffer))
            if len(order):
                yield join_batches([buffer]).take(order)

    def _stream(self) -> Stream:
        tables = iterate_tables(self._tables)
        assert tables is not None
        return Stream(tables)


def _is_torch(X: Any, name: str) -> bool:
    module = sys.modules.get("torch.utils.data")
    return module is not None and isinstance(X, getattr(module, name))


def _is_hugging(X: Any, name: str) -> bool:
    module = sys.modules.get("datasets")
    kind = getattr(module, name, None)
    return isinstance(kind, type) and isinstance(X, kind)


def _is_iterable_of_tables(X: Any) -> bool:
    """Tell an iterable that is no table itself; of sequences, those of tables (n, d)."""
    tables = ("shape", "__array__", "__array_interface__", "__dataframe__", "columns", "__next__")
    if not isinstance(X, Iterable) or any(hasattr(X, name) for name in tables):
        return False
    if isinstance(X, Sequence):
        return len(X) > 0 and all(len(getattr(one, "shape", ())) == 2 for one in X)
    return not isinstance(X, (Mapping, Set, memoryview))


def _sample(sample: Any) -> Any:
    """Return what is learned from of (x) or (x, label)."""
    return sample[0] if isinstance(sample, (tuple, list)) else sample


def _stacked(samples: Iterator[Any]) -> Iterator[Values]:
    """Put samples, which may have labels, together to tables."""
    while some := [_sample(sample) for sample in islice(samples, SAMPLES)]:
        yield _stack(some)


def _stack(samples: list[Any]) -> Values:
    """Put samples of any shape one below the other, each as a row."""
    try:
        if isinstance(samples[0], torch.Tensor):
            return torch.stack([sample.detach().reshape(-1) for sample in samples])
        return np.stack([np.asarray(sample).reshape(-1) for sample in samples])
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"the samples of X cannot be put together to rows ({error}): give samples of one shape."
        ) from error


def _flat_batch(batch: Any) -> Any:
    """Return a batch of samples of any shape, (n, ...), as a table (n, d)."""
    shape = getattr(batch, "shape", None)
    return batch.reshape(shape[0], -1) if shape is not None and len(shape) > 2 else batch


def _hugging_columns(table: Any) -> list[Any]:
    columns = describe_columns(table.schema, "X", range(len(table.schema)))
    first = {c.name: table.column(j)[0].as_py() for j, c in enumerate(columns)}
    return [
        type(c)(c.name, c.place, c.dtype, len(first[c.name] or ())) if c.width == 0 else c
        for c in columns
    ]


def _hugging_table(table: Any) -> NDArray[Any]:
    columns = _hugging_columns(table)
    return to_rows(table, columns, common_dtype(columns), "X", 0)
