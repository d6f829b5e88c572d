"""Rows that come one after the other, once, and may never end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch

from factormix.data.batches import Batch, join, recut, used
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.checks import checked_blocks
from factormix.data.sources.features import features_of, in_order, label_names
from factormix.data.sources.protocol import Source, check_pass
from factormix.data.values import real_array
from factormix.errors import InputError

__all__ = ["Peeked", "Stream"]


class Stream:
    """Serve the tables (n, d) of an iterable, such as a generator, one after the other.

    A table is an array, a tensor, a data frame or a `Batch`, which may carry weights. The first
    one says what the columns are: a later frame has its columns put in the same order.
    """

    def __init__(self, tables: Iterable[Any]) -> None:
        self._tables = iter(tables)
        try:
            first = _rows(next(self._tables))
        except StopIteration:
            raise InputError("the stream X ends before its first row: give at least one.") from None
        self._first: ArrayRows | None = first
        self._weighted = first.weights is not None
        self.n_features, self.dtype = first.n_features, first.dtype
        self.feature_names, self.image_shape = first.feature_names, None

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield the rows that have not been served yet, (size, d) at a time."""
        check_pass(size)
        return recut(self._served(), size)

    def _served(self) -> Iterator[Batch]:
        first, self._first = self._first, None
        tables = map(_rows, self._tables)
        for rows in tables if first is None else chain([first], tables):
            ordered: Any = in_order(rows, features_of(self), "the stream")
            if (rows.weights is not None) != self._weighted or (
                isinstance(rows.dtype, torch.dtype) != isinstance(self.dtype, torch.dtype)
            ):
                raise InputError(
                    "the tables of the stream X differ in kind: give arrays or tensors, and"
                    " weights with all of them or with none."
                )
            yield from ordered.blocks(rows.n_rows)


class Peeked:
    """Serve a source, its values checked, whose first rows of positive weight are looked at first.

    ``first`` has ``count`` of them, or all if there are fewer; ``blocks`` serves them again. No
    more than ``size`` rows are asked for at once, so that later ones are served as they come.
    """

    checked = True

    def __init__(self, source: Source, size: int, count: int) -> None:
        self.n_features, self.dtype = source.n_features, source.dtype
        self._batches, self._ahead = used(checked_blocks(source, size)), list[Batch]()
        while sum(map(len, self._ahead)) < count and (batch := next(self._batches, None)):
            self._ahead.append(batch)
        if not self._ahead:
            raise InputError("no row of the stream X has a positive weight: give at least one.")
        self.first = join(self._ahead).take(slice(0, count))

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield the rows that have not been served yet, (size, d) at a time."""
        check_pass(size)
        ahead, self._ahead = self._ahead, []
        return recut(chain(ahead, self._batches), size)


def _rows(table: Any) -> ArrayRows:
    weights = None
    if isinstance(table, Batch):
        if table.weights is not None:
            weights = np.asarray(table.weights, dtype=np.float64)
            if weights.shape != (len(table),) or not ((weights >= 0) & (weights < np.inf)).all():
                raise InputError(
                    "a batch of the stream X has wrong weights: give one for each row, finite and"
                    " not negative."
                )
        table = table.rows
    if isinstance(table, torch.Tensor):
        return ArrayRows(table, weights=weights)
    names = label_names(table)
    return ArrayRows(real_array(table, "X"), weights=weights, feature_names=names)
