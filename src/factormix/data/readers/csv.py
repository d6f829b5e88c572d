"""Rows of .csv files, and whether their first line has the names of the columns."""

from __future__ import annotations

import csv
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from factormix.data.checks import CHUNK_BYTES
from factormix.data.readers.base import Column, create_spool, find_columns, open_spool
from factormix.data.sources.files import FileRows, Layout
from factormix.errors import InputError

MISSING = ("", "nan", "na", "n/a", "#n/a", "<na>", "null", "none")
"""Contents of a cell without a value, in any case."""
HEADER_LINES = 200
"""Lines below the first that decide whether it is a header."""
COUNTING_COLUMNS = 16
"""From this many columns on, a first line that counts 0, 1, 2, ... is the header of a frame."""


def read_csv(
    path: Path,
    columns: Sequence[Column] | None,
    header: bool | None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> FileRows:
    """Make rows of a .csv file; its first line gives the names if it is a header."""
    n, complete = 0, True
    try:
        with open(path, encoding="utf-8-sig") as text, create_spool() as copy:
            chunks = _number_lines(text, chunk_bytes)
            lines = next(chunks, [])
            form = _find_form(
                path, [line for _, line in lines[: HEADER_LINES + 1]], columns, header
            )
            if form.names:
                lines = lines[1:] or next(chunks, [])
            while lines:
                block = form.parse(lines)
                complete &= not np.isnan(block).any()
                copy.write(block.data)
                n += len(lines)
                lines = next(chunks, [])
            if not n:
                raise InputError(f"{path} has names but no rows; give at least one row.")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file in UTF-8; save it as one.") from error
    layout = Layout.contiguous((n, len(form.places)), np.dtype(np.float64))
    names = form.names and tuple(form.names[j] for j in form.places)
    return open_spool(copy, layout, path, names).mark_finite(complete=complete)


def is_missing(cell: str) -> bool:
    """Return whether a cell has no value: it is empty, or a mark such as NA, NaN or null."""
    return cell.lower() in MISSING


def parse_number(cell: str) -> float | None:
    """Return the number in a cell, or None."""
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def _number_lines(text: IO[str], chunk_bytes: int) -> Iterator[list[tuple[int, str]]]:
    """Yield lists of (line number, line) without the blank lines, some bytes at a time."""
    number = 1
    while lines := text.readlines(chunk_bytes):
        numbered = [(i, line) for i, line in enumerate(lines, number) if line.strip()]
        number += len(lines)
        if numbered:
            yield numbered


@dataclass(frozen=True)
class _Form:
    """The form of a .csv file.

    places: the columns to read, among ``width`` columns.
    """

    path: Path
    delimiter: str
    width: int
    names: tuple[str, ...] | None
    places: tuple[int, ...]

    def parse(self, lines: Sequence[tuple[int, str]]) -> NDArray[np.float64]:
        """Parse numbered lines to a block, (len(lines), len(places))."""
        some = self.places != tuple(range(self.width))
        block = self._parse_numbers([line for _, line in lines], some)
        if block is None:
            # NumPy reads "nan" in place of an empty cell or another mark.
            marked = [self._gaps.sub(r"\1nan", line) for _, line in lines]
            block = self._parse_numbers(marked, some)
        # NumPy does not count the columns of a line when it reads only some of them.
        whole = not some or all(
            len(_split(line, self.delimiter)) == self.width for _, line in lines
        )
        expected = (len(lines), len(self.places))
        if block is None or block.shape != expected or not whole or np.isinf(block).any():
            raise self._find_fault(lines)
        return np.ascontiguousarray(block)

    def _parse_numbers(self, lines: Sequence[str], some: bool) -> NDArray[np.float64] | None:
        """Parse lines to a block, or return None where a cell is no number."""
        try:
            return np.loadtxt(
                lines,
                delimiter=self.delimiter,
                comments=None,
                quotechar='"',
                ndmin=2,
                usecols=self.places if some else None,
            )
        except ValueError:
            return None

    @cached_property
    def _gaps(self) -> re.Pattern[str]:
        """Match a cell without a value up to the next delimiter; group 1 is the one before it."""
        mark, words = re.escape(self.delimiter), "|".join(map(re.escape, MISSING))
        return re.compile(
            rf"(^|{mark})[^\S\t]*(?:\"\"|\"?(?:{words})\"?)[^\S\t]*(?={mark}|$)", re.IGNORECASE
        )

    def _find_fault(self, lines: Sequence[tuple[int, str]]) -> InputError:
        """Find the fault in lines that could not be parsed, and build the error about it."""
        for at, line in lines:
            cells = _split(line, self.delimiter)
            if len(cells) != self.width:
                return InputError(
                    f"{self.path} has {len(cells)} columns in line {at}, "
                    f"where {self.width} are expected; give every line the same number."
                )
            for j in self.places:
                cell, value = cells[j], parse_number(cells[j])
                if is_missing(cell) or (value is not None and math.isfinite(value)):
                    continue
                fault = f"an infinite value ({cell})"
                if value is None:
                    fault = f"{cell[:40]!r}, which is not a number,"
                name = f" ({self.names[j]})" if self.names else ""
                return InputError(
                    f"{self.path} has {fault} in line {at}, column {j + 1}{name}; "
                    "every cell must be a finite number with a decimal point, or empty."
                )
        return InputError(f"{self.path} cannot be read as numbers near line {lines[0][0]}.")


def _find_form(
    path: Path, lines: Sequence[str], columns: Sequence[Column] | None, header: bool | None
) -> _Form:
    """Find delimiter and header from the first lines."""
    if not lines:
        raise InputError(f"{path} has only blank lines; write it again.")
    # Numbers have no tabs or semicolons, but may have commas; names may have all of them.
    second = lines[min(1, len(lines) - 1)]
    delimiter = next((mark for mark in "\t;," if mark in second), ",")
    first, *below = (_split(line, delimiter) for line in lines)
    width, names = len(first), None
    if header is None:
        header = _is_header(path, first, [cells for cells in below if len(cells) == width])
    if header:
        first[0] = first[0].removeprefix("#").strip()
        names = tuple(first)
        if not first[0] and width > 1 and columns is None:
            raise InputError(
                f"{path} has a first column without a name, as row numbers have; "
                "name it, write the file without row numbers, or choose columns."
            )
    places = range(width)
    if columns is not None:
        places = find_columns(columns, names, width, path).tolist()
    return _Form(path, delimiter, width, names, tuple(places))


def _split(line: str, delimiter: str) -> list[str]:
    try:
        cells = next(csv.reader([line.strip("\r\n")], delimiter=delimiter))
    except csv.Error:
        return [line]
    return [cell.strip() for cell in cells]


def _is_header(path: Path, first: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Return whether the cells of a first line (d,) are names, given the lines below, each (d,).

    Words are names, and so are whole numbers among them. A line of different whole numbers, such
    as years or 0, 1, 2, holds names if some column below has no whole numbers, so that the two
    differ in kind, or if it counts many columns. If the columns below have whole numbers too, the
    line is a row, with a warning if it looks like names.
    """
    words = [cell for cell in first if cell and parse_number(cell) is None]
    # Marks of missing values are names only among other words.
    if words and all(map(is_missing, words)):
        return False
    numbers = [cell for cell in first if parse_number(cell) is not None]
    if not all(map(_is_plain, numbers)) or len(set(numbers)) < len(numbers):
        return False
    if words:
        return True
    counts = list(map(int, numbers))
    counting = counts == list(range(counts[0], counts[0] + len(counts))) if counts else False
    if len(numbers) < len(first):
        # The index of a data frame has no name above it.
        return counting and "" not in first[1:]
    if counting and counts[0] in (0, 1) and len(counts) >= COUNTING_COLUMNS:
        return True
    columns = list(zip(*below, strict=True))
    if any(map(_is_fractional, columns)):
        return True
    if (counting and len(counts) > 2 and below) or (
        len(below) > 2 and all(map(_is_outside, counts, columns))
    ):
        warnings.warn(
            f"the first line of {path} is taken as a row of numbers, though it may have names"
            f" ({', '.join(first[:3])}, ...): say which it is, by --header or --no-header, or by"
            " header=True or False in Python.",
            stacklevel=2,
        )
    return False


def _is_plain(cell: str) -> bool:
    """Return whether a cell is a whole number written like a name: digits and nothing else."""
    return cell.isascii() and cell.isdigit() and (cell == "0" or cell[0] != "0")


def _is_fractional(cells: Sequence[str]) -> bool:
    """Return whether all values of a column are finite numbers with a decimal point or exponent."""
    cells = [cell for cell in cells if not is_missing(cell)]
    values = [parse_number(cell) for cell in cells]
    whole = (cell.lstrip("+-").isdigit() for cell in cells)
    finite = all(v is not None and math.isfinite(v) for v in values)
    return bool(cells) and finite and not any(whole)


def _is_outside(label: int, cells: Sequence[str]) -> bool:
    """Return whether a number lies beyond all others of its column."""
    known = [value for value in map(parse_number, cells) if value is not None and value == value]
    return bool(known) and not min(known) <= label <= max(known)
