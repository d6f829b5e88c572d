"""Conversion of a caller's data to rows or to a source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from factormix.data.batches import Batch, Weights
from factormix.data.checks import check_shape, check_weights, to_real_array
from factormix.data.features import find_column_names
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows, Source
from factormix.data.sources.files import open_memmap
from factormix.data.sources.loaders import iterate_tables, load_rows
from factormix.data.sources.streams import Stream
from factormix.errors import InputError


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
    if hasattr(rows, "with_weights"):
        weighted: Rows = rows.with_weights(weights)
        return weighted
    assert weights is not None
    return _WeightedInOrder(rows, weights)


def _convert(X: Any) -> Rows:
    if hasattr(X, "__next__") or (isinstance(X, Source) and not isinstance(X, torch.Tensor)):
        raise InputError(
            f"X is a {type(X).__name__}, which can be read once and may never end: only"
            " partial_fit learns from a stream; give an array, or rows that can be read again."
        )
    if isinstance(X, torch.Tensor):
        return ArrayRows(X)
    loaded = load_rows(X)
    if loaded is not None:
        return loaded
    array, names = to_real_array(X, "X"), find_column_names(X)
    check_shape(array.shape)
    return open_memmap(array) or ArrayRows(array, feature_names=names)


class _WeightedInOrder:
    """Add weights to the blocks of rows that have no method ``with_weights``."""

    def __init__(self, rows: Rows, weights: Weights) -> None:
        self._rows, self.weights = rows, weights
        self.n_rows, self.n_features, self.dtype = rows.n_rows, rows.n_features, rows.dtype
        self.feature_names = getattr(rows, "feature_names", None)
        self.image_shape = getattr(rows, "image_shape", None)

    def blocks(self, size: int) -> Iterator[Batch]:
        first = 0
        for batch in self._rows.blocks(size):
            yield Batch(batch.rows, self.weights[first : first + len(batch)])
            first += len(batch)

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        raise InputError(
            f"X is a {type(self._rows).__name__} without the method with_weights, so sample_weight"
            " cannot follow its rows: give an array, a tensor, or rows that factormix reads."
        )

    def with_weights(self, weights: Weights | None) -> Rows:
        return replace_weights(self._rows, weights)
