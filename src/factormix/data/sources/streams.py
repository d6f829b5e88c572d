"""Rows that come one after the other, once, and may never end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch

from factormix.data.batches import Batch, drop_zero_weights, join_batches, rebatch
from factormix.data.checks import ensure_finite_blocks, find_infinite_rows, to_real_array
from factormix.data.features import describe_features, find_column_names, match_columns
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Source, check_pass
from factormix.errors import InputError

__all__ = ["OnBad", "PeekedSource", "Stream"]


OnBad = Literal["stop", "skip"]
MOST_FAILURES = 10
"""Failures of an iterator, one right after the other, after which it is given up."""


class Stream:
    """Serve the tables (n, d) of an iterable, such as a generator, one after the other.

    A table is an array, a tensor, a data frame or a `Batch`, which may carry weights. The first
    one says what the columns are: a later frame has its columns put in the same order.

    Parameters
    ----------
    tables : iterable
    on_bad : {"stop", "skip"}
        What to do about rows with infinite values, tables of another width, and an iterator that
        raises: stop, with the position, or skip and count them.

    Attributes
    ----------
    position : int
        Rows that were taken from the iterable, those that were skipped included.
    skipped : int
        Rows that were skipped; a failure of the iterator counts as one.
    """

    def __init__(self, tables: Iterable[Any], on_bad: OnBad = "stop") -> None:
        if on_bad not in ("stop", "skip"):
            raise InputError(f"on_bad must be 'stop' or 'skip', not {on_bad!r}.")
        self._tables, self._on_bad = iter(tables), on_bad
        self.position = self.skipped = 0
        first = next(self._taken(), None)
        if first is None:
            raise InputError("the stream X ends before its first row: give at least one.")
        self._first: ArrayRows | None = first
        self._weighted = first.weights is not None
        self.n_features, self.dtype = first.n_features, first.dtype
        self.feature_names, self.image_shape = first.feature_names, None

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield the rows that have not been served yet, (size, d) at a time."""
        check_pass(size)
        return rebatch(self._served(), size)

    def _served(self) -> Iterator[Batch]:
        first, self._first = self._first, None
        for rows in self._taken() if first is None else chain([first], self._taken()):
            try:
                ordered = self._fitting(rows)
            except InputError as error:
                self._bad(rows.n_rows, error)
                continue
            for batch in ordered.blocks(rows.n_rows):
                good = self._finite(batch) if self._on_bad == "skip" else batch
                if len(good):
                    yield good
            self.position += rows.n_rows

    def _taken(self) -> Iterator[ArrayRows]:
        """Take one table after the other from the iterable."""
        failures, failed = 0, None
        while True:
            try:
                table = next(self._tables)
            except StopIteration:
                if failed is None:
                    return
                # A generator that has raised is over: to end here in silence would be wrong.
                raise failed from None
            except Exception as error:
                failures, failed = failures + 1, error
                error.add_note(f"after {self.position} rows of the stream X")
                if self._on_bad == "stop" or failures == MOST_FAILURES:
                    raise
                self.skipped += 1
                continue
            failures, failed = 0, None
            try:
                rows = _rows(table)
            except (InputError, TypeError) as error:
                self._bad(_length(table), error)
                continue
            yield rows

    def _fitting(self, rows: ArrayRows) -> Any:
        """Return a table with its columns as those of the first, if it is of the same kind."""
        ordered = match_columns(rows, describe_features(self), "the stream")
        if (rows.weights is not None) != self._weighted or (
            isinstance(rows.dtype, torch.dtype) != isinstance(self.dtype, torch.dtype)
        ):
            raise InputError(
                "the tables of the stream X differ in kind: give arrays or tensors, and"
                " weights with all of them or with none."
            )
        return ordered

    def _bad(self, n_rows: int, error: Exception) -> None:
        """Count rows that cannot be used, or say where they are."""
        if self._on_bad == "stop":
            where = f"after {self.position} rows of the stream: " if self.position else ""
            raise type(error)(f"{where}{error}") from error
        self.position += n_rows
        self.skipped += n_rows

    def _finite(self, batch: Batch) -> Batch:
        """Leave out rows that have infinite values, and count them."""
        bad = find_infinite_rows(batch.rows)
        self.skipped += len(bad)
        return batch.take(np.delete(np.arange(len(batch)), bad)) if len(bad) else batch


class PeekedSource:
    """Serve a source, its values checked, whose first rows of positive weight are looked at first.

    ``first`` has ``count`` of them, or all if there are fewer; ``blocks`` serves them again. No
    more than ``size`` rows are asked for at once, so that later ones are served as they come.
    """

    checked = True

    def __init__(self, source: Source, size: int, count: int) -> None:
        self.n_features, self.dtype = source.n_features, source.dtype
        self._batches, self._ahead = (
            drop_zero_weights(ensure_finite_blocks(source, size)),
            list[Batch](),
        )
        while sum(map(len, self._ahead)) < count and (batch := next(self._batches, None)):
            self._ahead.append(batch)
        if not self._ahead:
            raise InputError("no row of the stream X has a positive weight: give at least one.")
        self.first = join_batches(self._ahead).take(slice(0, count))

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield the rows that have not been served yet, (size, d) at a time."""
        check_pass(size)
        ahead, self._ahead = self._ahead, []
        return rebatch(chain(ahead, self._batches), size)


def _length(table: Any) -> int:
    """Count the rows of what is no table, for want of better as one."""
    shape = tuple(getattr(table, "shape", ()))
    return int(shape[0]) if shape[1:] else 1


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
    names = find_column_names(table)
    return ArrayRows(to_real_array(table, "X"), weights=weights, feature_names=names)
