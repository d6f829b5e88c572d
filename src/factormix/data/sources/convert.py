"""Conversion of a caller's data to rows or to a source.

Data sets and loaders of torch and Hugging Face are recognised without importing these packages: a
caller who has such an object has imported its package.
"""

from __future__ import annotations

import os
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
    describe_columns,
    measure_lists,
    name_features,
    to_rows,
)
from factormix.data.batches import Batch, Values, Weights, rebatch
from factormix.data.checks import check_shape, check_weights, find_infinite, to_real_array
from factormix.data.features import check_frame, find_column_names
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import ForeignRows, Rows, Source, Table, check_pass
from factormix.data.sources.files import open_memmap
from factormix.data.sources.shards import BUFFER_BYTES
from factormix.data.sources.streams import Stream
from factormix.errors import InputError, input_error

TABLE_SAMPLES = 256
"""Number of samples that are stacked to a table: chosen, not measured."""


def as_rows(X: Any, sample_weight: Any = None) -> Rows:
    """Make rows of `X`, shape (n, d), that carry the weights `sample_weight` (n,).

    `X` may be an array, a memory map, a tensor, a data frame, anything that NumPy turns into an
    array, a data set of torch or Hugging Face, a torch loader, an iterable of tables that can begin
    again, or rows. A memory map, or a view of one, is read through its file, so that memory does
    not grow with it. A map opened with mode "c", or sliced with steps along its columns, is read in
    place. Values are not checked yet: `ensure_finite_rows` does that.

    >>> import numpy as np
    >>> source = as_rows(np.arange(10.0).reshape(5, 2))
    >>> [len(batch) for batch in source.shuffled(2, seed=0, epoch=0)]
    [2, 2, 1]
    """
    rows = X if isinstance(X, Rows) and not isinstance(X, torch.Tensor) else _convert(X)
    if sample_weight is None:
        return rows
    if getattr(rows, "weights", None) is not None:
        raise InputError(
            "X carries weights of its rows already: leave sample_weight out, or give rows that have"
            " none."
        )
    return replace_weights(rows, check_weights(sample_weight, rows.n_rows))


def as_source(X: Any, sample_weight: Any = None) -> Source:
    """Make a source of `X`: rows as `as_rows` does, or a stream of an iterable over tables."""
    if hasattr(X, "__next__"):
        X = Stream(X)
    elif not isinstance(X, (torch.Tensor, Source)) and sample_weight is None:
        tables = iterate_tables(X)
        X = X if tables is None else Stream(tables)
    if isinstance(X, (torch.Tensor, Rows)) or not isinstance(X, Source):
        return as_rows(X, sample_weight)
    if sample_weight is not None:
        raise InputError(
            "sample_weight needs rows of known number, and X is a stream: let the stream serve"
            " factormix.data.batches.Batch(rows, weights)."
        )
    return X


def replace_weights(rows: Rows, weights: Weights | None) -> Rows:
    """Return the same rows with other weights (n,), or with none."""
    if weights is None and getattr(rows, "weights", None) is None:
        return rows
    table = rows if hasattr(rows, "with_weights") else ForeignRows(rows)
    weighted: Rows = table.with_weights(weights)
    return weighted


def _convert(X: Any) -> Rows:
    if hasattr(X, "__next__") or (isinstance(X, Source) and not isinstance(X, torch.Tensor)):
        raise InputError(
            f"X is a {type(X).__name__}, which can be read once and may never end: only"
            " partial_fit learns from a stream; give an array, or rows that can be read again."
        )
    if isinstance(X, (str, os.PathLike)):
        raise InputError(
            f"X is the path {str(X)!r}, not rows: open it by factormix.data.readers.read_rows, or a"
            " folder of activations by factormix.activations.open_store."
        )
    if isinstance(X, torch.Tensor):
        return ArrayRows(X)
    loaded = load_rows(X)
    if loaded is not None:
        return loaded
    try:
        array = to_real_array(X, "X")
    except (InputError, TypeError):
        check_frame(X)
        raise
    names = find_column_names(X)
    check_shape(array.shape)
    return open_memmap(array) or ArrayRows(array, feature_names=names)


def load_rows(X: Any) -> ItemRows | ReplayedRows | None:
    """Make rows of a data set, a loader or an iterable of tables; None for anything else."""
    if _is_hugging_face(X, "Dataset"):
        table = X.with_format("arrow")
        columns = _describe_table(table[:1]) if len(table) else []
        return ItemRows(len(table), partial(_read_arrow, table, columns), name_features(columns))
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


def _read_arrow(dataset: Any, columns: Sequence[ArrowColumn], numbers: list[int]) -> Values:
    return to_rows(dataset[numbers], columns, numbers[0])


def _read_samples(dataset: Any, numbers: list[int]) -> Values:
    fetch = getattr(dataset, "__getitems__", None)
    return _stack(fetch(numbers) if fetch else [dataset[i] for i in numbers])


class ReplayedRows(Table):
    """Serve an iterable of tables (n, d) that begins anew each time, shuffled through a buffer.

    A first pass counts the rows. The order of a shuffled pass follows from (seed, epoch) if the
    iterable itself comes in the same order every time.
    """

    def __init__(self, tables: Any) -> None:
        self._tables = tables
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
        wanted = max(1, BUFFER_BYTES // row_bytes, 2 * batch_size)
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
    fault = "the samples of X cannot be put together to rows ({reason}): give samples of one shape."
    with input_error(fault, ValueError, RuntimeError):
        if isinstance(samples[0], torch.Tensor):
            return torch.stack([sample.detach().reshape(-1) for sample in samples])
        return np.stack([np.asarray(sample).reshape(-1) for sample in samples])


def _flatten_batch(batch: Any) -> Any:
    """Return a batch of samples of any shape, (n, ...), without labels, as a table (n, d)."""
    batch = _drop_label(batch)
    shape = getattr(batch, "shape", None)
    return batch.reshape(shape[0], -1) if shape is not None and len(shape) > 2 else batch


def _describe_table(table: Any) -> list[ArrowColumn]:
    return measure_lists(describe_columns(table.schema, "X", range(len(table.schema))), table)


def _read_arrow_table(table: Any) -> NDArray[Any]:
    return to_rows(table, _describe_table(table), 0)
