"""A choice of columns, by name or by number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from factormix.errors import InputError

__all__ = ["Column", "chosen_columns"]

Column = str | int
"""A name, or a number from 0; a string that is not the name of a column may be such a number."""


def chosen_columns(
    columns: Sequence[Column], names: Sequence[str] | None, width: int, path: Path
) -> NDArray[np.intp]:
    """Find the positions of the chosen columns among ``width``, which may have names."""
    if not columns:
        raise InputError(f"No columns of {path} were chosen; name at least one.")
    places = [_place(column, names, width, path) for column in columns]
    if len(set(places)) < len(places):
        raise InputError(f"A column of {path} was chosen twice; name each one once.")
    return np.array(places, dtype=np.intp)


def _place(column: Column, names: Sequence[str] | None, width: int, path: Path) -> int:
    if isinstance(column, str) and names is not None and column in names:
        if list(names).count(column) > 1:
            raise InputError(f"{path} has several columns called {column!r}; choose by number.")
        return list(names).index(column)
    number = str(column)
    if number.isascii() and number.isdigit() and int(number) < width:
        return int(number)
    there = f"it has {', '.join(names[:10])}" if names else "it has no names"
    more = " and others" if names and len(names) > 10 else ""
    raise InputError(
        f"{path} has no column {column!r}; {there}{more}, and numbers count from 0 to {width - 1}."
    )
