"""What the columns of a table are, and how the columns of other tables fit them."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.data.batches import Batch, join_batches
from factormix.data.sources.base import Rows, Source
from factormix.errors import InputError

__all__ = ["Features", "describe_features", "find_column_names", "match_columns", "take_rows"]

PASS_ROWS = 4096
"""Rows of a block, where single rows are picked out of a whole pass."""

S = TypeVar("S", bound=Source)


@dataclass(frozen=True)
class Features:
    """The columns of a table: their number and names, and the shape of rows that are images."""

    count: int
    names: tuple[str, ...] | None = None
    image_shape: tuple[int, ...] | None = None


def describe_features(source: Source) -> Features:
    """Tell what the columns of a source are, as far as the source knows."""
    names, shape = (getattr(source, name, None) for name in ("feature_names", "image_shape"))
    return Features(
        source.n_features,
        None if names is None else tuple(names),
        None if shape is None else tuple(shape),
    )


def find_column_names(X: Any) -> tuple[str, ...] | None:
    """Return the names of the columns of a data frame, (d,); None for what has none.

    Whole numbers are names, as a .csv file of the frame would have them, unless they only count
    the columns from 0.
    """
    labels = list(getattr(X, "columns", ())) if hasattr(X, "shape") else []
    strings = [isinstance(label, str) for label in labels]
    if labels and all(strings):
        return tuple(map(str, labels))
    if any(strings):
        raise InputError(
            "Feature names are only supported if all input features have string names: convert"
            " them by X.columns = X.columns.astype(str)."
        )
    whole = all(isinstance(label, numbers.Integral) for label in labels)
    if not labels or not whole or labels == list(range(len(labels))):
        return None
    return tuple(map(str, labels))


def match_columns(source: S, expected: Features, whose: str, name: str | None = None) -> S:
    """Return a source with its columns as ``expected``, the features of ``whose``.

    The same names in another order are put in order, block by block; other names are an error.
    Rows without names go by position, and so do all rows where no names are expected, except for
    names that are the numbers of the columns.
    """
    found = describe_features(source)
    name = name or str(getattr(source, "name", "X"))
    if found.count != expected.count and not (found.names and expected.names):
        raise InputError(
            f"{name} has {found.count} features, but {whose} is expecting {expected.count} features"
            " as input: give rows of the same kind."
        )
    if None not in (found.image_shape, expected.image_shape) and (
        found.image_shape != expected.image_shape
    ):
        raise InputError(
            f"{name} has images of {_shape(found)}, but {whose} is expecting images of"
            f" {_shape(expected)}: give images of the same shape."
        )
    order = _order(found, expected, name)
    return source if order is None else _selected(source, order)


def take_rows(rows: Rows, numbers: NDArray[np.int64]) -> Batch:
    """Return the rows of the given numbers, (m, d), in the order given.

    Rows with a method ``at`` are asked for these alone; of others, a pass picks them out.
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


def _order(found: Features, expected: Features, name: str) -> NDArray[np.intp] | None:
    """Find the place of each expected column among those found; None where they are in order."""
    names = expected.names
    if found.names is None:
        return None
    if names is None:
        numbered = tuple(map(str, range(expected.count)))
        # Numbers of columns say where each belongs, even if the others had no names.
        if set(found.names) != set(numbered):
            return None
        names = numbered
    if found.names == names:
        return None
    if sorted(found.names) != sorted(names):
        raise InputError(_mismatch(found.names, names, name))
    places = {label: j for j, label in enumerate(found.names)}
    if len(places) < len(names):
        raise InputError(
            f"{name} has several columns of the same name, in another order than those passed"
            " during fit: name them apart, or put them in order."
        )
    return np.array([places[label] for label in names], dtype=np.intp)


def _mismatch(found: Sequence[str], expected: Sequence[str], name: str) -> str:
    missing, unseen = (sorted(set(a) - set(b)) for a, b in ((expected, found), (found, expected)))
    parts = [f"lacks {_listed(missing)}"] if missing else []
    parts += [f"has {_listed(unseen)}, unseen at fit time"] if unseen else []
    parts = parts or ["has some of them more often"]
    return (
        f"The feature names should match those that were passed during fit: {name}"
        f" {' and '.join(parts)}; give the same columns."
    )


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _shape(features: Features) -> str:
    return " x ".join(map(str, features.image_shape or ()))


def _selected(source: S, order: NDArray[np.intp]) -> Any:
    if hasattr(source, "select"):
        return source.select(order)
    return _OrderedRows(source, order) if isinstance(source, Rows) else _Ordered(source, order)


class _Ordered:
    """Serve the columns of a source in another order."""

    image_shape = None

    def __init__(self, source: Any, order: NDArray[np.intp]) -> None:
        self._source, self._order = source, order
        self.n_features, self.dtype = len(order), source.dtype
        self.feature_names = tuple(source.feature_names[j] for j in order)
        self.name = getattr(source, "name", "X")

    def blocks(self, size: int) -> Iterator[Batch]:
        return map(self._ordered, self._source.blocks(size))

    def _ordered(self, batch: Batch) -> Batch:
        order: Any = self._order
        if isinstance(batch.rows, torch.Tensor):
            order = torch.from_numpy(order).to(batch.rows.device)
        return replace(batch, rows=batch.rows[:, order])


class _OrderedRows(_Ordered):
    @property
    def n_rows(self) -> int:
        return int(self._source.n_rows)

    @property
    def weights(self) -> Any:
        return getattr(self._source, "weights", None)

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        batches = self._source.shuffled(batch_size, seed=seed, epoch=epoch, start=start)
        return map(self._ordered, batches)

    def at(self, numbers: NDArray[np.int64]) -> Batch:
        return self._ordered(take_rows(self._source, numbers))
