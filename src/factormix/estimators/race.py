"""A race between mixtures: each is judged on its way, and those that cannot win any more stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.training.callbacks import Progress

__all__ = ["FIRST", "Course", "Judgement", "Runner", "beaten", "paired_error", "tamed"]

FIRST = 0.25
"""Share of the planned steps after which all runs are judged before any goes on."""
MARKS = (FIRST, 0.5)
"""Shares of the planned steps after which a run is judged on its way."""
SLACK = 2.0
"""How many times the later gain of the best a run may lie behind it."""
ERRORS = 2.0
"""How many standard errors of the difference it may lie behind in addition."""
REACH = 20.0
"""Ranges of the middle half below the median from which on a row scores no lower."""

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Judgement:
    """How good a model is; higher is better."""

    value: float
    scores: Scores | None = None
    """(n,), scores of the rows whose mean the value is, if it is one."""
    weights: Scores | None = None
    """(n,), or None where the rows count alike."""
    n_far: int = 0
    """Rows whose scores were raised to what counts as far out."""


@dataclass
class Course:
    """How a model was judged on its way and at the end."""

    marks: dict[float, Judgement] = field(default_factory=dict)
    end: Judgement | None = None

    @property
    def last(self) -> Judgement:
        """The latest judgement."""
        return self.marks[max(self.marks)] if self.end is None else self.end

    def at(self, mark: float) -> Judgement:
        """Return the judgement at a mark, or the latest if the run ended before."""
        return self.marks.get(mark, self.last)


def tamed(scores: Scores) -> tuple[Scores, int]:
    """Return scores (n,) without wild values, and how many these were.

    A mixture can give one row a log-likelihood of minus a million, and the mean of all others would
    count for nothing beside it. So rows far below the others count as far out, and no more.
    """
    low, middle, high = np.quantile(scores, (0.25, 0.5, 0.75))
    bound = middle - REACH * (high - low)
    return np.maximum(scores, bound), int((scores < bound).sum())


def paired_error(one: Judgement, other: Judgement) -> float:
    """Compute the standard error of the difference of two means over the same rows."""
    if one.scores is None or other.scores is None:
        return 0.0
    difference, n = one.scores - other.scores, len(one.scores)
    weights = np.ones(n) if one.weights is None else one.weights
    share = weights / weights.sum()
    spread = float(share @ (difference - share @ difference) ** 2)
    # By the number of equal rows that would be as certain (Kish).
    equal = 1 / float(share @ share)
    return float(np.sqrt(spread / max(equal - 1, 1)))


def beaten(found: Judgement, best: Course, mark: float) -> bool:
    """Tell whether a run would stay behind even if it gained much more than the best did."""
    end, then = best.last, best.at(mark)
    gain = max(end.value - then.value, 0.0)
    behind = then.value - found.value
    return behind > SLACK * gain + ERRORS * paired_error(found, end)


class Runner:
    """Watch one run: judge it at the marks, and end it when the best cannot be reached."""

    def __init__(self, judge: Callable[[Any], Judgement], seen: Callable[[float], object]) -> None:
        """``seen`` is told the share of the run that is done."""
        self.course = Course()
        self.pauses = True
        """Whether the run is to pause at its next mark."""
        self.best: Course | None = None
        """The course of the best model so far."""
        self.halted = False
        """Whether the run was ended on its way."""
        self._judge, self._seen = judge, seen

    def __call__(self, progress: Progress) -> bool:
        """Return whether the run should end."""
        done = progress.record["step"] / max(progress.steps, 1)
        self._seen(done)
        run, marks = progress.run, self.course.marks
        passed = [mark for mark in MARKS if mark <= done and mark not in marks]
        if progress.last or not passed or not run.plan.settled(run.state):
            return False
        found = self._judge(progress.model)
        marks.update(dict.fromkeys(passed, found))
        lost = self.best is not None and beaten(found, self.best, max(passed))
        self.halted = self.pauses or lost
        return self.halted
