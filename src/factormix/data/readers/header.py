"""Whether the first line of a table has the names of its columns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

__all__ = ["MISSING", "is_header", "is_missing", "number"]

MISSING = ("", "nan", "na", "n/a", "#n/a", "<na>", "null", "none")
"""What stands in a cell without a value, in whatever case."""

COUNTING = 16
"""From this many columns, a first line that counts 0, 1, 2, ... is that of a data frame."""


def is_header(path: Path, first: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Tell whether the cells of a first line (d,) are names, from the lines below, each (d,).

    Words are names, and so are whole numbers among them. A line of different whole numbers, such
    as years or 0, 1, 2, holds names if some column below has no whole numbers, so that the two
    differ in kind, or if it counts many columns. Where the columns below have whole numbers too,
    the line is a row, with a warning if it looks like names.
    """
    words = [cell for cell in first if cell and number(cell) is None]
    # Without any other word, marks of missing values are no names.
    if words and all(map(is_missing, words)):
        return False
    numbers = [cell for cell in first if number(cell) is not None]
    if not all(map(_plain, numbers)) or len(set(numbers)) < len(numbers):
        return False
    if words:
        return True
    counts = list(map(int, numbers))
    counting = counts == list(range(counts[0], counts[0] + len(counts))) if counts else False
    if len(numbers) < len(first):
        # The index of a data frame has no name above it.
        return counting and "" not in first[1:]
    if counting and counts[0] in (0, 1) and len(counts) >= COUNTING:
        return True
    columns = list(zip(*below, strict=True))
    if any(map(_fractional, columns)):
        return True
    if (counting and len(counts) > 2 and below) or (
        len(below) > 2 and all(map(_outside, counts, columns))
    ):
        warnings.warn(
            f"the first line of {path} is taken as a row of numbers, though it may have names"
            f" ({', '.join(first[:3])}, ...): say which it is, by --header or --no-header, or by"
            " header=True or False in Python.",
            stacklevel=2,
        )
    return False


def is_missing(cell: str) -> bool:
    """Tell whether a cell has no value: it is empty, or a mark such as NA, NaN or null."""
    return cell.lower() in MISSING


def number(cell: str) -> float | None:
    """Return the number that a cell holds, or None."""
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def _plain(cell: str) -> bool:
    """Tell whether a cell is a whole number as one writes a name: digits and nothing else."""
    return cell.isascii() and cell.isdigit() and (cell == "0" or cell[0] != "0")


def _fractional(cells: Sequence[str]) -> bool:
    """Tell whether every cell of a column is a finite number with a decimal point or exponent.

    Cells without a value tell nothing.
    """
    cells = [cell for cell in cells if not is_missing(cell)]
    values = [number(cell) for cell in cells]
    whole = (cell.lstrip("+-").isdigit() for cell in cells)
    finite = all(v is not None and math.isfinite(v) for v in values)
    return bool(cells) and finite and not any(whole)


def _outside(label: int, cells: Sequence[str]) -> bool:
    """Tell whether a number lies beyond all others of its column."""
    known = [value for value in map(number, cells) if value is not None and value == value]
    return bool(known) and not min(known) <= label <= max(known)
