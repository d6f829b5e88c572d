"""Several numbers as one: means with deviations, and medians."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

__all__ = ["Spread", "median", "spread"]


@dataclass(frozen=True)
class Spread:
    """Hold mean, standard deviation and number of some runs."""

    mean: float
    deviation: float
    n: int

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """Write mean ± deviation (runs)."""
        mean = f"{scale * self.mean:.{digits}f}"
        if self.n == 1:
            return f"{mean} (1)"
        return f"{mean} ± {scale * self.deviation:.{digits}f} ({self.n})"

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 for a single run, which has none to show."""
        return self.deviation / math.sqrt(self.n)


def spread(values: Iterable[float]) -> Spread | None:
    """Summarise some runs (sample standard deviation), None if there are none."""
    array = np.array(list(values), dtype=np.float64)
    if not len(array):
        return None
    deviation = float(array.std(ddof=1)) if len(array) > 1 else 0.0
    return Spread(float(array.mean()), deviation, len(array))


def median(values: Iterable[float]) -> float:
    """Return the median; NaN if there are no values."""
    known = list(values)
    return statistics.median(known) if known else math.nan
