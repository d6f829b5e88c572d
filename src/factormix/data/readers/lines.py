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
from factormix.data.readers.tables import find_delimiter, is_missing, name_columns, parse_number
from factormix.errors import InputError

LineFormat = Literal["csv", "json"]


class LineReader:
    """Parse lines to rows (d,) with the expected columns, in their order.

    The first line decides the format: JSON if it begins with ``{`` or ``[``, or else CSV, with the
    names of the columns if it has words in it, and with the delimiter that is most frequent in it.
    Numbers between semicolons may have a decimal comma. A JSON line is an object with a value for
    each name, or an array. Empty cells, NA, null and absent names are missing values (NaN).
    """

    def __init__(
        self, expected: Features, kind: LineFormat | None = None, name: str = "the text"
    ) -> None:
        self._expected, self._kind, self._name = expected, kind, name
        self._width, self._order = expected.count, list(range(expected.count))
        self._is_first, self._delimiter = True, ","
        self._names, self._cells = list[str](), list[Any]()
        """The names of all columns, if they are known, and their cells in the last row."""
        self.line = 0
        """Number of lines read so far, including blank ones and the header."""

    def row(self, text: str) -> NDArray[np.float64] | None:
        """Parse a line; None for a blank one and for a header."""
        self.line += 1
        text = text.strip("\r\n")
        if self._is_first:
            text = text.removeprefix("\ufeff")
        if not text.strip():
            return None
        self._kind = self._kind or ("json" if text.lstrip()[0] in "[{" else "csv")
        is_first, self._is_first = self._is_first, False
        if self._kind == "json":
            return self._parse_json(text)
        try:
            if is_first:
                self._delimiter = find_delimiter([text])
            reader = csv.reader([text], delimiter=self._delimiter, skipinitialspace=True)
            cells = [cell.strip() for cell in next(reader)]
        except csv.Error as error:
            raise self._error("is not a line of CSV: end each row with a new line") from error
        if is_first and text.lstrip().startswith("#") and not self._may_name(cells):
            self._is_first = True
            return None
        words = (cell for cell in cells if self._number(cell) is None and not is_missing(cell))
        if is_first and any(words):
            self._take_header(cells)
            return None
        return self._parse_cells(cells)

    def named_cells(self) -> dict[str, str]:
        """Return the text in each named column of the last row, the expected and all others."""
        return {
            name: cell if isinstance(cell, str) else "" if cell is None else json.dumps(cell)
            for name, cell in zip(self._names, self._cells, strict=False)
        }

    def _number(self, cell: str) -> float | None:
        return parse_number(cell, "," if self._delimiter == ";" and "," in cell else ".")

    def _may_name(self, cells: Sequence[str]) -> bool:
        """Return whether cells may be the names of the expected columns, and not a comment."""
        names = self._expected.names
        return len(cells) == self._width if names is None else set(names) <= {*name_columns(cells)}

    def _take_header(self, cells: Sequence[str]) -> None:
        """Find the expected columns among the cells of a header."""
        names = name_columns(cells)
        self._names = list(names)
        expected = self._expected.names
        if expected is None:
            self._check_count(len(names), self._expected.count)
            return
        lacking = [name for name in expected if name not in names]
        if lacking:
            raise self._error(
                f"has no column {lacking[0]!r}, which the model has: give the columns of the"
                " training"
            )
        self._width, self._order = len(names), [list(names).index(name) for name in expected]

    def _parse_cells(self, cells: Sequence[str]) -> NDArray[np.float64]:
        self._check_count(len(cells), self._width)
        self._cells = list(cells)
        row = list[float]()
        for cell in (cells[j] for j in self._order):
            value = math.nan if is_missing(cell) else self._number(cell)
            if value is None:
                raise self._error(
                    f"has {cell[:40]!r}, which is not a number: give numbers such as 1.5, or leave"
                    " the cell empty"
                )
            row.append(value)
        return self._check_finite(row)

    def _parse_json(self, text: str) -> NDArray[np.float64]:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise self._error("is not a line of JSON") from error
        self._names, self._cells = [], []
        if isinstance(value, dict):
            self._names, self._cells = list(value), list(value.values())
            names = self._expected.names or [str(j) for j in range(self._expected.count)]
            if not any(name in value for name in names):
                raise self._error(f"has no value of {names[0]!r} or any other column")
            value = [value.get(name) for name in names]
        if not isinstance(value, list):
            raise self._error("is neither an object nor an array")
        self._check_count(len(value), self._expected.count)
        return self._check_finite([self._parse_entry(one) for one in value])

    def _parse_entry(self, value: Any) -> float:
        if value is None:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(f"has {str(value)[:40]!r}, which is not a number")
        try:
            return float(value)
        except OverflowError:
            return math.inf

    def _check_finite(self, row: list[float]) -> NDArray[np.float64]:
        if any(map(math.isinf, row)):
            raise self._error("has an infinite value")
        return np.array(row, dtype=np.float64)

    def _check_count(self, found: int, expected: int) -> None:
        if found != expected:
            raise self._error(
                f"has {found} values, where {expected} are expected: give a header, the columns of"
                " the model, and no line breaks within a cell"
            )

    def _error(self, what: str) -> InputError:
        return InputError(f"line {self.line} of {self._name} {what}.")
