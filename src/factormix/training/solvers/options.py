"""Ranges that the options of solvers must lie in, with the words for what lies outside."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from factormix.errors import InputError

__all__ = [
    "AT_LEAST_ONE", "BETWEEN", "COUNT", "NOT_NEGATIVE", "POSITIVE", "SHARE", "Range",
    "check_options",
]  # fmt: skip


class Range(NamedTuple):
    """The numbers that an option may be."""

    contains: Callable[[Any], bool]
    wanted: str
    """What an option must, in words."""


POSITIVE = Range(lambda v: 0 < v < math.inf, "be positive")
NOT_NEGATIVE = Range(lambda v: 0 <= v < math.inf, "be 0 or more")
SHARE = Range(lambda v: 0 < v <= 1, "lie above 0 and be at most 1")
AT_LEAST_ONE = Range(lambda v: 1 <= v < math.inf, "be 1 or more")
BETWEEN = Range(lambda v: 0 < v < 1, "lie between 0 and 1")
COUNT = Range(
    lambda v: isinstance(v, numbers.Integral) and int(v) >= 1,
    "be a whole number of 1 or more",
)


def check_options(solver: Any, ranges: Mapping[Range, Sequence[str]]) -> None:
    """Refuse an option of a solver that is no number of its range; None passes as a default."""
    defaults = {field.name: field.default for field in dataclasses.fields(solver)}
    for allowed, names in ranges.items():
        for name in names:
            value = getattr(solver, name)
            if value is None and defaults[name] is None:
                continue
            if not (_is_number(value) and allowed.contains(value)):
                raise InputError(f"{name} must {allowed.wanted}, not {_shown(value)}.")


def _is_number(value: object) -> bool:
    """Tell whether a value is a number that a float can hold; bools are none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _shown(value: object) -> str:
    """Show a value in one short line, with its type where it is no plain number or text."""
    text = " ".join(repr(value).split())
    text = text if len(text) <= 60 else f"{text[:57]}..."
    plain = value is None or isinstance(value, numbers.Real | str)
    return text if plain else f"{text} ({type(value).__name__})"
