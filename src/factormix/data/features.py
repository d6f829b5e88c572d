"""The columns of a table, and how to bring the columns of another table into the same order."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from factormix.data.sources.base import ForeignRows, Source
from factormix.errors import InputError

S = TypeVar("S", bound=Source)


@dataclass(frozen=True)
class Features:
    """The columns of a table: their number and names, and the shape of rows that are images."""

    count: int
    names: tuple[str, ...] | None = None
    image_shape: tuple[int, ...] | None = None


def describe_features(source: Source) -> Features:
    """Describe the columns of a source, as far as the source knows them."""
    names, shape = (getattr(source, name, None) for name in ("feature_names", "image_shape"))
    return Features(
        source.n_features,
        None if names is None else tuple(names),
        None if shape is None else tuple(shape),
    )


def find_column_names(X: Any) -> tuple[str, ...] | None:
    """Return the column names of a data frame, (d,), or None where there are none.

    Whole numbers are names, as in a .csv file of the frame, unless they count the columns from 0.
    """
    labels = list(getattr(X, "columns", ())) if hasattr(X, "shape") else []
    strings = [isinstance(label, str) for label in labels]
    if any(strings) and not all(strings):
        raise InputError(
            "Feature names are only supported if all input features have string names: convert"
            " them by X.columns = X.columns.astype(str)."
        )
    whole = all(isinstance(label, numbers.Integral) for label in labels)
    if not any(strings) and (not whole or labels == list(range(len(labels)))):
        return None
    return tuple(map(str, labels))


def take_known_columns(X: Any, names: Sequence[str] | None) -> Any:
    """Return the columns of these names if X is a data frame that has more, or else X."""
    if names is None or not hasattr(X, "select_dtypes"):
        return X
    numbers = {str(label): j for j, label in enumerate(X.columns)}
    more = len(X.columns) > len(names) and set(names) <= set(numbers)
    return X.iloc[:, [numbers[name] for name in names]] if more else X


def check_frame(X: Any) -> None:
    """Name the columns of a data frame that do not hold numbers."""
    others = X.select_dtypes(exclude=["number", "bool"]) if hasattr(X, "select_dtypes") else None
    if others is not None and len(others.columns):
        raise InputError(
            f"X has columns that are not numeric: {list_names(list(others.columns))}; leave them"
            " out by X.select_dtypes(['number', 'bool']), or encode categories by"
            " pandas.get_dummies(X)."
        )


def match_columns(source: S, expected: Features, whose: str, name: str | None = None) -> S:
    """Return a source with its columns as ``expected``, the features of ``whose``.

    Columns are matched by name, and the other columns of the source are ignored. A missing name is
    an error. Rows without names go by position. If no names are expected, all rows go by position,
    unless the names of their columns are 0, 1, 2, ... in some order: each name is then the position
    of its column.
    """
    found = describe_features(source)
    name = name or str(getattr(source, "name", "X"))
    if found.count != expected.count and not (found.names and expected.names):
        raise InputError(
            f"{name} has {found.count} features, but {whose} is expecting {expected.count} features"
            " as input: give rows of the same kind."
        )
    shape, expected_shape = found.image_shape, expected.image_shape
    if shape is not None and expected_shape is not None and shape != expected_shape:
        raise InputError(
            f"{name} has images of {_format_shape(shape)}, but {whose} is expecting images of"
            f" {_format_shape(expected_shape)}: give images of the same shape."
        )
    order = _find_order(found, expected, name)
    if order is None:
        return source
    table: Any = source if hasattr(source, "select") else ForeignRows(source)
    ordered: S = table.select(order)
    return ordered


def _find_order(found: Features, expected: Features, name: str) -> NDArray[np.intp] | None:
    """Find the place of each expected column among those found; None if they are in order."""
    names = expected.names
    if found.names is None:
        return None
    if names is None:
        names = tuple(map(str, range(expected.count)))
        if set(found.names) != set(names):
            return None
    if found.names == names:
        return None
    here, wanted = set(found.names), set(names)
    missing, unseen = list_names(sorted(wanted - here)), list_names(sorted(here - wanted))
    if missing:
        also = f" and has {unseen}, unseen at fit time" if unseen else ""
        raise InputError(
            "The feature names should match those that were passed during fit:"
            f" {name} lacks {missing}{also}; give the same columns."
        )
    places = {label: j for j, label in enumerate(found.names)}
    if len(places) < len(found.names):
        raise InputError(
            f"{name} has several columns of the same name, in another order than those passed"
            " during fit: name them apart, or put them in order."
        )
    return np.array([places[label] for label in names], dtype=np.intp)


def list_names(names: Sequence[str]) -> str:
    """Write the first five names, and the number of the others."""
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _format_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
