"""Rows of torch data sets and loaders, Hugging Face data sets, and iterables of tables.

None of these packages is imported here: a caller who has such an object has imported its package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.data.arrow import (
    ArrowColumn,
    common_dtype,
    describe_columns,
    measure_lists,
    name_features,
    to_rows,
)
from factormix.data.batches import Batch, Values, rebatch
from factormix.data.checks import find_infinite
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Table, check_pass
from factormix.data.sources.shuffle import BUFFER_BYTES
from factormix.data.sources.streams import Stream
from factormix.errors import InputError

TABLE_SAMPLES = 256
"""Number of samples that are stacked to a table."""


def load_rows(X: Any) -> ItemRows | ReplayedRows | None:
    """Make rows of a data set, a loader or an iterable of tables; None for anything else."""
    if _is_hugging_face(X, "Dataset"):
        return _load_hugging_face(X)
    if _is_torch(X, "Dataset") and hasattr(X, "__len__") and not _is_torch(X, "IterableDataset"):
        return ItemRows(len(X), partial(_read_samples, X))
    return None if iterate_tables(X) is None else ReplayedRows(X)


def iterate_tables(X: Any) -> Iterator[Any] | None:
    """Return the tables of an iterable one after the other; None for anything else."""
    if _is_hugging_face(X, "IterableDataset"):
        return map(_read_arrow_table, X.with_format("arrow").iter(batch_size=TABLE_SAMPLES))
    if _is_torch(X, "IterableDataset"):
        return _stack_all(iter(X))
    if _is_torch(X, "DataLoader"):
        if X.batch_size is None and X.batch_sampler is None:
            return _stack_all(iter(X))
        return map(_flatten_batch, X)
    return iter(X) if _is_iterable_of_tables(X) else None


class ItemRows(ArrayRows):
    """Serve rows that are read by their numbers, fully permuted in a shuffled pass.

    Values are checked when they are served.
    """

    def __init__(
        self, n_rows: int, read: Callable[[list[int]], Values], names: Sequence[str] | None = None
    ) -> None:
        if not n_rows:
            raise InputError("the data set X has no rows: give at least one.")
        super().__init__(read([0]), feature_names=names)
        self.n_rows = n_rows
        self._X: Any = _Items(n_rows, read)
        self.checked = True

    def _make_batch(self, rows: Values, weights: Any) -> Batch:
        batch = super()._make_batch(rows, weights)
        if len(find_infinite(batch.rows)):
            raise InputError(
                "X has an infinite value in a row that was read just now: remove such rows, or fill"
                " in the value, or NaN if it is missing."
            )
        return batch


@dataclass
class _Items:
    """Rows (m, d) for a slice or an array of numbers."""

    n_rows: int
    read: Callable[[list[int]], Values]

    def __getitem__(self, which: slice | NDArray[np.int64]) -> Values:
        numbers = range(self.n_rows)[which] if isinstance(which, slice) else which.tolist()
        return self.read(list(numbers))


def _load_hugging_face(dataset: Any) -> ItemRows:
    """Make rows of a Hugging Face data set, through Arrow."""
    dataset = dataset.with_format("arrow")
    columns = _describe_table(dataset[:1]) if len(dataset) else []
    return ItemRows(len(dataset), partial(_read_arrow, dataset, columns), name_features(columns))


def _read_arrow(dataset: Any, columns: Sequence[ArrowColumn], numbers: list[int]) -> Values:
    return to_rows(dataset[numbers], columns, common_dtype(columns), "X", numbers[0])


def _read_samples(dataset: Any, numbers: list[int]) -> Values:
    fetch = getattr(dataset, "__getitems__", None)
    return _stack(fetch(numbers) if fetch else [dataset[i] for i in numbers])


class ReplayedRows(Table):
    """Serve an iterable of tables (n, d) that begins anew each time, shuffled through a buffer.

    A first pass counts the rows. The order of a shuffled pass follows from (seed, epoch) if the
    iterable itself comes in the same order every time.
    """

    checked = False

    def __init__(self, tables: Any, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._tables, self.buffer_bytes = tables, buffer_bytes
        stream = self._start_stream()
        self.n_features, self.dtype = stream.n_features, stream.dtype
        self.feature_names = stream.feature_names
        self.n_rows = sum(len(batch) for batch in stream.blocks(TABLE_SAMPLES))

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in the order of the iterable, (size, d) at a time."""
        check_pass(size)
        at = 0
        for batch in self._start_stream().blocks(size):
            yield self._make_batch(batch.rows, self._weights_at(slice(at, at + len(batch))))
            at += len(batch)

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the rows of positive weight once, shuffled; batches before ``start`` are read."""
        check_pass(batch_size, start)
        shuffled = rebatch(self._shuffle_buffers(batch_size, [seed, epoch]), batch_size)
        return islice(shuffled, start, None)

    def _shuffle_buffers(self, batch_size: int, entropy: list[int]) -> Iterator[Batch]:
        row_bytes = self.n_features * self.dtype.itemsize
        wanted = max(1, self.buffer_bytes // row_bytes, 2 * batch_size)
        in_buffer = -(-self.n_rows // -(-self.n_rows // wanted))
        for number, buffer in enumerate(rebatch(self.blocks(batch_size), in_buffer)):
            if buffer.weights is not None:
                buffer = buffer.take(np.flatnonzero(np.asarray(buffer.weights)))
            order = np.random.default_rng([*entropy, number]).permutation(len(buffer))
            if len(order):
                yield buffer.take(order)

    def _start_stream(self) -> Stream:
        tables = iterate_tables(self._tables)
        assert tables is not None
        return Stream(tables)


def _is_torch(X: Any, name: str) -> bool:
    module = sys.modules.get("torch.utils.data")
    return module is not None and isinstance(X, getattr(module, name))


def _is_hugging_face(X: Any, name: str) -> bool:
    kind = getattr(sys.modules.get("datasets"), name, None)
    return isinstance(kind, type) and isinstance(X, kind)


def _is_iterable_of_tables(X: Any) -> bool:
    """Return whether X is an iterable but no table itself; a sequence must hold tables (n, d)."""
    tables = ("shape", "__array__", "__array_interface__", "__dataframe__", "columns", "__next__")
    if not isinstance(X, Iterable) or any(hasattr(X, name) for name in tables):
        return False
    if isinstance(X, Sequence):
        return len(X) > 0 and all(len(getattr(one, "shape", ())) == 2 for one in X)
    return not isinstance(X, (Mapping, Set, memoryview))


def _drop_label(sample: Any) -> Any:
    """Return x of (x, label) or (x,), and x itself."""
    return sample[0] if isinstance(sample, (tuple, list)) else sample


def _stack_all(samples: Iterator[Any]) -> Iterator[Values]:
    """Stack samples to tables."""
    while some := list(islice(samples, TABLE_SAMPLES)):
        yield _stack(some)


def _stack(samples: list[Any]) -> Values:
    """Stack samples of any shape without their labels, each flattened to a row."""
    samples = [_drop_label(sample) for sample in samples]
    try:
        if isinstance(samples[0], torch.Tensor):
            return torch.stack([sample.detach().reshape(-1) for sample in samples])
        return np.stack([np.asarray(sample).reshape(-1) for sample in samples])
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"the samples of X cannot be put together to rows ({error}): give samples of one shape."
        ) from error


def _flatten_batch(batch: Any) -> Any:
    """Return a batch of samples of any shape, (n, ...), without labels, as a table (n, d)."""
    batch = _drop_label(batch)
    shape = getattr(batch, "shape", None)
    return batch.reshape(shape[0], -1) if shape is not None and len(shape) > 2 else batch


def _describe_table(table: Any) -> list[ArrowColumn]:
    return measure_lists(describe_columns(table.schema, "X", range(len(table.schema))), table)


def _read_arrow_table(table: Any) -> NDArray[Any]:
    columns = _describe_table(table)
    return to_rows(table, columns, common_dtype(columns), "X", 0)
