"""Held-out likelihood against time: the clock, the recorder of checkpoints, and curves of
several seeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from models import Model
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BudgetUsedError", "Clock", "Point", "Recorder", "median_curve"]

GROWTH = 1.3
"""Passes since the first checkpoint grow by this factor from one to the next."""
FIRST_CHECKPOINT = 0.02
DENSE_PASSES = 5
"""Up to here there is a checkpoint at every whole pass as well."""


class BudgetUsedError(Exception):
    """Raised by a checkpoint when the time of a method is over."""


class DivergedError(Exception):
    """Raised by a checkpoint when the held-out likelihood is no finite number."""


class Point(NamedTuple):
    """A checkpoint."""

    seconds: float
    passes: float
    log_likelihood: float


class Clock:
    """Seconds of training: it stands still while a model is evaluated."""

    def __init__(self) -> None:
        self._done = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        since = self._since
        return self._done + (0.0 if since is None else time.perf_counter() - since)

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._done, self._since = self.seconds, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()


@dataclass
class Recorder:
    """Take checkpoints of a method while it trains."""

    held_out: Tensor
    """(n, d)."""
    limit: float
    """Seconds of training after which a checkpoint raises BudgetUsedError."""
    clock: Clock = field(default_factory=Clock)
    points: list[Point] = field(default_factory=list)
    model: Model | None = None
    """The model of the last point."""
    _due: float = 0.0

    def checkpoint(
        self,
        passes: float,
        make: Callable[[], Model],
        *,
        step: float = 0.0,
        now: bool = False,
        last: bool = False,
    ) -> None:
        """Evaluate the model if it is time to, and end training if its time is over.

        ``passes`` counts how often the training rows have been read; ``step`` is how much of a
        pass lies between two calls, and ``now`` asks for a checkpoint that is not due. The time of
        this call does not count. The ``last`` one never ends training, which is over.
        """
        wanted = now or last or passes + step / 2 >= self._due
        if not wanted and self.clock.seconds < self.limit:
            return
        with self.clock.paused():
            if not (self.points and self.points[-1].passes == passes):
                self._evaluate(passes, make())
            self._due = _next_due(passes, start=math.floor(self.points[0].passes))
            if self.clock.seconds >= self.limit and not last:
                raise BudgetUsedError

    def _evaluate(self, passes: float, model: Model) -> None:
        score = model.score(self.held_out)
        if not math.isfinite(score):
            raise DivergedError(f"the held-out log-likelihood is {score} after {passes:.3g} passes")
        self.model = model
        self.points.append(Point(self.clock.seconds, passes, score))


def _next_due(passes: float, start: int) -> float:
    """Return the passes of the next checkpoint: geometric since the start, and whole at first."""
    done = passes - start
    growing = max(FIRST_CHECKPOINT, done * GROWTH)
    whole = math.floor(done + 1e-9) + 1
    return start + (min(growing, whole) if whole <= DENSE_PASSES else growing)


def median_curve(
    runs: Sequence[Sequence[Point]], axis: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return x and the median over the runs of the likelihood known at x.

    Each run holds its last checkpoint's value until the next one, and for good after its last. The
    curve begins where all runs have a model and ends with the longest.
    """
    runs = [run for run in runs if run]
    if not runs:
        return np.empty(0), np.empty(0)
    starts = max(getattr(run[0], axis) for run in runs)
    x = np.unique([getattr(p, axis) for run in runs for p in run])
    x = x[x >= starts]
    values = []
    for run in runs:
        at = np.searchsorted([getattr(p, axis) for p in run], x, side="right") - 1
        values.append(np.array([p.log_likelihood for p in run])[at])
    return x, np.median(values, axis=0)
