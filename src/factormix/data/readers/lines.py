"""Rows that come as lines of text, one after the other: CSV or JSON lines."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from factormix.data.features import Features
from factormix.data.readers.csv import is_missing, number
from factormix.errors import InputError

__all__ = ["LineFormat", "LineReader"]

LineFormat = Literal["csv", "json"]


class LineReader:
    """Turn lines into rows (d,) whose columns are those that are expected, in their order.

    The first line tells what the lines are: JSON, if it begins with ``{`` or ``[``, or else CSV,
    with the names of the columns if it has words in it. A JSON line is an object with a value for
    each name, or an array. Empty cells, NA, null and names that are not there are missing (NaN).
    """

    def __init__(
        self, expected: Features, kind: LineFormat | None = None, name: str = "the text"
    ) -> None:
        self._expected, self._kind, self._first, self._name = expected, kind, True, name
        self._order: NDArray[np.intp] | None = None
        self.line = 0
        """Lines that were read, blank ones and the header included."""

    def row(self, text: str) -> NDArray[np.float64] | None:
        """Read a line; None for a blank one and for a header."""
        self.line += 1
        text = text.strip("\r\n")
        if self._first:
            text = text.removeprefix("\ufeff")
        if not text.strip():
            return None
        self._kind = self._kind or ("json" if text.lstrip()[0] in "[{" else "csv")
        first, self._first = self._first, False
        if self._kind == "json":
            return self._json(text)
        cells = [cell.strip() for cell in next(csv.reader([text], skipinitialspace=True))]
        if first and self._is_header(cells):
            self._order = self._places(cells)
            return None
        return self._numbers(cells, self._width)

    @property
    def _width(self) -> int:
        return self._expected.count if self._order is None else self._given

    def _is_header(self, cells: Sequence[str]) -> bool:
        return any(number(cell) is None and not is_missing(cell) for cell in cells)

    def _places(self, names: Sequence[str]) -> NDArray[np.intp]:
        """Find the expected columns among the names of a header."""
        self._given = len(names)
        expected = self._expected.names
        if expected is None:
            if len(names) != self._expected.count:
                raise self._complaint(self._counted(len(names), self._expected.count))
            return np.arange(len(names))
        lacking = [name for name in expected if name not in names]
        if lacking:
            raise self._complaint(f"has no column {lacking[0]!r}, which the model has")
        return np.array([list(names).index(name) for name in expected])

    def _numbers(self, cells: Sequence[str], width: int) -> NDArray[np.float64]:
        if len(cells) != width:
            raise self._complaint(self._counted(len(cells), width))
        chosen = cells if self._order is None else [cells[j] for j in self._order]
        values = [math.nan if is_missing(cell) else number(cell) for cell in chosen]
        for cell, value in zip(chosen, values, strict=True):
            if value is None:
                raise self._complaint(f"has {cell[:40]!r}, which is not a number")
        return self._finite(np.array(values, dtype=np.float64))

    def _json(self, text: str) -> NDArray[np.float64]:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise self._complaint("is not a line of JSON") from error
        if isinstance(value, dict):
            names = self._expected.names or [str(j) for j in range(self._expected.count)]
            if not any(name in value for name in names):
                raise self._complaint(f"has no value of {names[0]!r} or any other column")
            value = [value.get(name) for name in names]
        if not isinstance(value, list):
            raise self._complaint("is neither an object nor an array")
        if len(value) != self._expected.count:
            raise self._complaint(self._counted(len(value), self._expected.count))
        return self._finite(np.array([self._entry(one) for one in value], dtype=np.float64))

    def _entry(self, value: Any) -> float:
        if value is None:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._complaint(f"has {str(value)[:40]!r}, which is not a number")
        return float(value)

    def _finite(self, row: NDArray[np.float64]) -> NDArray[np.float64]:
        if np.isinf(row).any():
            raise self._complaint("has an infinite value")
        return row

    def _counted(self, found: int, expected: int) -> str:
        return f"has {found} values, where {expected} are expected"

    def _complaint(self, what: str) -> InputError:
        return InputError(f"line {self.line} of {self._name} {what}.")
