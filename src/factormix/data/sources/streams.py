"""Rows that come once, one after the other, and may never end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch

from factormix.data.batches import Batch, drop_zero_weights, join_batches, rebatch
from factormix.data.checks import ensure_finite_blocks, find_infinite, to_real_array
from factormix.data.features import describe_features, find_column_names, match_columns
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Source, check_pass
from factormix.errors import InputError

OnBad = Literal["stop", "skip"]
MOST_FAILURES = 10
"""Number of consecutive failures of an iterator after which the stream gives up: chosen, not
measured."""


class Stream:
    """Serve the tables (n, d) of an iterable, such as a generator, one after the other.

    A table is an array, a tensor, a data frame or a `Batch`, which may carry weights. The first
    table defines the columns: a later frame has its columns put in the same order.

    Parameters
    ----------
    tables : iterable
    on_bad : {"stop", "skip"}
        How to handle rows with infinite values, tables of another width, and an iterator that
        raises: stop and report the position, or skip and count them.

    Attributes
    ----------
    position : int
        Number of rows taken from the iterable, including skipped ones.
    skipped : int
        Number of skipped rows; a failure of the iterator counts as one.
    """

    def __init__(self, tables: Iterable[Any], on_bad: OnBad = "stop") -> None:
        if on_bad not in ("stop", "skip"):
            raise InputError(f"on_bad must be 'stop' or 'skip', not {on_bad!r}.")
        self._tables, self._on_bad = iter(tables), on_bad
        self.position = self.skipped = 0
        first = next(self._take_tables(), None)
        if first is None:
            raise InputError("the stream X ends before its first row: give at least one.")
        self._first: ArrayRows | None = first
        self._weighted = first.weights is not None
        self.n_features, self.dtype = first.n_features, first.dtype
        self.feature_names, self.image_shape = first.feature_names, None

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield the rows that have not been served yet, (size, d) at a time."""
        check_pass(size)
        return rebatch(self._serve(), size)

    def _serve(self) -> Iterator[Batch]:
        first, self._first = self._first, None
        for rows in self._take_tables() if first is None else chain([first], self._take_tables()):
            try:
                ordered = self._match(rows)
            except InputError as error:
                self._reject(rows.n_rows, error)
                continue
            for batch in ordered.blocks(rows.n_rows):
                good = self._drop_infinite(batch) if self._on_bad == "skip" else batch
                if len(good):
                    yield good
            self.position += rows.n_rows

    def _take_tables(self) -> Iterator[ArrayRows]:
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
                rows = _convert_table(table)
            except (InputError, TypeError) as error:
                shape = tuple(getattr(table, "shape", ()))
                self._reject(int(shape[0]) if len(shape) > 1 else 1, error)
                continue
            yield rows

    def _match(self, rows: ArrayRows) -> ArrayRows:
        """Return a table with its columns in the order of the first, if it is of the same kind."""
        ordered = match_columns(rows, describe_features(self), "the stream")
        if (rows.weights is not None) != self._weighted or (
            isinstance(rows.dtype, torch.dtype) != isinstance(self.dtype, torch.dtype)
        ):
            raise InputError(
                "the tables of the stream X differ in kind: give arrays or tensors, and"
                " weights with all of them or with none."
            )
        return ordered

    def _reject(self, n_rows: int, error: Exception) -> None:
        """Count rows that cannot be used, or raise the error with their position."""
        if self._on_bad == "stop":
            where = f"after {self.position} rows of the stream: " if self.position else ""
            raise type(error)(f"{where}{error}") from error
        self.position += n_rows
        self.skipped += n_rows

    def _drop_infinite(self, batch: Batch) -> Batch:
        bad = np.unique(find_infinite(batch.rows)[:, 0])
        self.skipped += len(bad)
        return batch.take(np.delete(np.arange(len(batch)), bad)) if len(bad) else batch


def _convert_table(table: Any) -> ArrayRows:
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


class PeekedSource:
    """Serve a source with checked values, whose first rows are known in advance.

    ``first`` has the first ``count`` rows of positive weight, or all if there are fewer; ``blocks``
    serves them again. The source is asked for at most ``size`` rows at once, so that later rows
    are served as they come.
    """

    checked = True

    def __init__(self, source: Source, size: int, count: int) -> None:
        self.n_features, self.dtype = source.n_features, source.dtype
        self._batches = drop_zero_weights(ensure_finite_blocks(source, size))
        self._ahead = list[Batch]()
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
