"""Results of trials, grouped by setting and method, with medians."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from curves import Point

from factormix.studies.harness import Store, Trial, median

__all__ = ["Group", "Result", "group", "read"]


@dataclass(frozen=True)
class Result:
    """What one trial gave."""

    plan: dict[str, Any]
    status: str
    """finished, stopped (by its budget, with a model), unfinished (without one) or failed."""
    message: str
    points: list[Point]
    seconds: float
    components_in_use: int | None
    matched: float | None
    true_log_likelihood: float | None
    rows: int
    features: int
    held_out_rows: int
    peak_memory: int


def read(store: Store, trial: Trial) -> Result | None:
    """Read the result of a trial; None if it has none."""
    values = store.read(trial)
    try:
        points = [Point(*point) for point in (values or {})["points"]]
        return Result(**{**(values or {}), "plan": dict(trial.settings), "points": points})
    except (TypeError, KeyError):
        return None


@dataclass(frozen=True)
class Group:
    """The results of a method on a setting, one for each seed."""

    method: str
    results: list[Result]

    @property
    def trained(self) -> list[Result]:
        """The results that have a model."""
        return [r for r in self.results if r.points]

    @property
    def log_likelihood(self) -> float:
        """Median of the final held-out mean log-likelihoods; NaN without a model."""
        return self.median(lambda r: r.points[-1].log_likelihood)

    @property
    def seconds(self) -> float:
        """Median of the seconds at the final checkpoints."""
        return self.median(lambda r: r.points[-1].seconds)

    @property
    def message(self) -> str:
        """What is to be said beside the numbers."""
        texts = Counter(r.message for r in self.results if r.message)
        n = len(self.results)
        return "; ".join(f"{t} ({m} of {n} seeds)" if m < n else t for t, m in texts.items())

    def median(self, value: Callable[[Result], float]) -> float:
        """Return the median over the seeds that have a model."""
        return median(value(r) for r in self.trained)

    def first_at(self, reached: Callable[[Point], bool]) -> float:
        """Return the median seconds of the first checkpoint for which something holds."""
        return median(
            min((p.seconds for p in r.points if reached(p)), default=math.inf) for r in self.trained
        )

    def at_passes(self, passes: float) -> tuple[float, float]:
        """Return the median log-likelihood and seconds of the last checkpoint within so many
        passes.
        """
        within = [[p for p in r.points if p.passes <= passes + 1e-6] for r in self.trained]
        last = [points[-1] for points in within if points]
        return median(p.log_likelihood for p in last), median(p.seconds for p in last)


def group(results: Iterable[Result]) -> dict[str, dict[str, Group]]:
    """Arrange results by the name of the setting and by method, in the order they come."""
    arranged: dict[str, dict[str, Group]] = {}
    for result in results:
        setting = f"{result.plan['dataset']}-k{result.plan['components']}"
        method = result.plan["method"]
        groups = arranged.setdefault(setting, {})
        groups.setdefault(method, Group(method, [])).results.append(result)
    return arranged
