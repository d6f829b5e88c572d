"""Natural-gradient training: stochastic steps in the geometry of the complete-data model.

These are the options; ``natural_plan.py`` has what a run does with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from factormix.training.solvers.base import Problem
from factormix.training.solvers.natural_plan import NaturalPlan
from factormix.training.solvers.natural_state import NaturalState
from factormix.training.solvers.options import (
    AT_LEAST_ONE,
    BETWEEN,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
    check_options,
)
from factormix.training.solvers.spreading import check_scales

__all__ = ["NaturalGradient", "NaturalPlan", "NaturalState"]

OPTIONS: dict[Range, tuple[str, ...]] = {
    SHARE: ("exponent", "cooling", "forgetting"),
    POSITIVE: ("offset",),
    NOT_NEGATIVE: ("tol",),
    AT_LEAST_ONE: ("widening",),
    BETWEEN: ("unused_weight", "min_eigenvalue"),
    COUNT: ("patience", "seed_rows", "first_components", "scales"),
}


@dataclass(frozen=True)
class NaturalGradient:
    """Train by natural-gradient steps on running statistics, from random values.

    Every schedule is counted in ticks of a batch's rows, so that odd batches do not change it.
    Above 100 components, which have few rows each, noise variances are those that new rows are to
    be expected to have (``core.running.prediction_widths``), but for steps of means and
    covariances, for components in scales, and where rows have missing entries.

    Parameters
    ----------
    exponent, offset : float or None
        The rate of tick t is ``(t + offset) ** -exponent``; None takes 0.55 up to 100 components
        (0.6 on a stream), and 0.7 above. Where factors are more than half of at most 100 features,
        and components more than 100 or in scales, it is 0.5: steps learn from few rows there. On a
        stream, where so many components had to grow, the rate then falls as 1.5 / t from where it
        is, so that all rows count, and what a component was part of before fades.
    forgetting : float or None
        Least rate, for streams that drift: about ``batch_size / forgetting`` rows are remembered.
    cooling : float or None
        Factor by which the rate falls in addition over the last two fifths of all planned passes;
        None takes 0.25 up to 100 components, and 0.5 above; 0.05 where the exponent is 0.5.
    tol, patience : float or None, int
        Stop when the mean log-likelihood per feature of a pass has risen by less than ``tol`` in
        ``patience`` passes. ``tol=0`` goes on to the last epoch; None takes 2e-5, or 1e-4 where a
        pass is one batch.
    seed_rows : int or None
        Rows kept for seeding, at most one pass; None takes 40 per first component, at least 500 and
        at most 10,000.
    first_components : int or None
        Components to begin with: more than K are pruned to K, fewer grow to K. None takes twice K,
        or 5/3 of K from 48 on, where there are rows enough, or K on a stream, but at most 500.
    widening : float
        How the two halves of a component that is split for growth differ. 1: they stand to both
        sides of where it was. Above 1: one is wider by this factor, the other narrower, which suits
        data whose rows differ in how far out they are, such as photographs (1.2).
    scales : int
        Scales that each kind of component comes in, sharing centre and directions: K is a multiple
        of it, and K / scales kinds are trained, at about the cost of so many components. For rows
        of one kind that differ in how far out they are, as patches in contrast or sensor rows in
        loudness; 8 to 13 are useful. Rows must be complete, and all components are looked at. They
        take on their scales once the bound has settled and none is in excess: on a stream after 30
        ticks, until which there are K / scales components.
    unused_weight : float
        A component below this times the average weight is replaced, unless it explains rows that no
        other could.
    min_eigenvalue : float
        Floor of the eigenvalues of M.
    """

    exponent: float | None = None
    offset: float = 5.0
    forgetting: float | None = None
    cooling: float | None = None
    tol: float | None = None
    patience: int = 3
    seed_rows: int | None = None
    first_components: int | None = None
    widening: float = 1.0
    scales: int = 1
    unused_weight: float = 0.1
    min_eigenvalue: float = 1e-6

    name: ClassVar[str] = "natural"
    needs_passes: ClassVar[bool] = False
    state_type: ClassVar[type[NaturalState]] = NaturalState
    default_max_precision: ClassVar[float | None] = None
    min_ticks: ClassVar[int] = 400

    def __post_init__(self) -> None:
        check_options(self, OPTIONS)

    def default_batch_size(self, n_rows: int | None) -> int:
        """Return 1,000 rows, or a few hundred when that would be less than 75 batches.

        Up to 1,000 rows are one batch: nothing is to be gained from a part of them.
        """
        if n_rows is None:
            return 1000
        return n_rows if n_rows <= 1000 else min(1000, max(100, n_rows // 75))

    def default_epochs(self, batches_per_epoch: int) -> int:
        """Return the most passes; a run usually ends before by its own criterion."""
        return max(20, math.ceil(self.min_ticks / batches_per_epoch))

    def plan(self, problem: Problem) -> NaturalPlan:
        """Apply the options to a problem."""
        check_scales(self.scales, problem)
        return NaturalPlan(self, problem)
