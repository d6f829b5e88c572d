"""What a run of natural-gradient steps takes where its owner left it open."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from factormix.core.quadratic import pays
from factormix.training.solvers.base import Problem
from factormix.training.solvers.schedule import Schedule, first_components
from factormix.training.solvers.screens import candidates_for
from factormix.training.solvers.spreading import kinds as kinds_of

if TYPE_CHECKING:
    from factormix.training.solvers.natural import NaturalGradient

__all__ = ["Choices"]

MANY = 100
"""Components above which the rates of many are used."""
LATER = 1.5
"""Times that rows count on a stream once a mixture has grown, compared with averages in which all
count alike. Very many components have few rows each, so that all should count, but those of before
a component had its place are not its own: of these, some t ** -1.5 is left by the time that so many
times the rows of the growth have come."""
NARROWING = 0.6
"""That of the halves of a split on a stream. It is what a Gaussian that is cut in two has of its
deviation across the cut; its halves would stand 0.8 deviations to each side, but 0.5, as elsewhere,
is better on images. Where rows are passed over, halves have time to learn all that."""
FACTOR_SHARE = 0.25
"""Factors for each feature from which a mixture of many hastens its variances."""


@dataclass(frozen=True)
class Choices:
    """Rates, sizes and kinds of steps of a solver on a problem."""

    solver: NaturalGradient
    problem: Problem

    @cached_property
    def schedule(self) -> Schedule:
        """When what happens."""
        solver, problem = self.solver, self.problem
        K, per_epoch = self.kinds, problem.batches_per_epoch or 0
        first = solver.first_components or first_components(
            K, problem.n_factors, self.tick_rows * per_epoch
        )
        return Schedule(
            n_components=K,
            first_components=first,
            tick_rows=self.tick_rows,
            batches_per_epoch=per_epoch,
            planned=float(per_epoch * problem.epochs) if problem.epochs else math.inf,
            exponent=solver.exponent or self._exponent,
            offset=solver.offset,
            cooling=solver.cooling or self._cooling,
            forgetting=solver.forgetting or 0.0,
            later=None if solver.exponent or per_epoch or first >= K else LATER,
        )

    @property
    def kinds(self) -> int:
        """Components that are trained, each in all scales."""
        return kinds_of(self.problem.n_components, self.solver.scales)

    @property
    def narrowing(self) -> float:
        """Times that the loading across which a growing component is cut is as long afterwards."""
        return 1.0 if self.problem.batches_per_epoch else NARROWING

    @property
    def hastens(self) -> bool:
        """Whether factors are so many that variances would lag behind."""
        many = self.kinds > MANY or self.solver.scales > 1
        return many and self.problem.n_factors >= FACTOR_SHARE * self.problem.n_features

    @property
    def widens(self) -> bool:
        """Whether components may have so few rows that their variances are to be those of new ones.

        Direct steps know of rows by the thousand.
        """
        return self.kinds > MANY and self.solver.scales == 1 and not self.direct

    @property
    def direct(self) -> bool:
        """Whether steps of complete rows are those of means and covariances: these learn fast."""
        if self.screens or self.problem.processes.divided:
            return False
        return self.hastens and pays((self.kinds, self.problem.n_features, self.problem.n_factors))

    @property
    def _cooling(self) -> float:
        if self.direct:
            return 0.05
        return 0.25 if self.kinds <= MANY else 0.5

    @property
    def _exponent(self) -> float:
        if self.direct:
            return 0.5
        if self.kinds > MANY:
            return 0.7
        # A stream has no last passes in which a fast rate cools down.
        return 0.55 if self.problem.batches_per_epoch else 0.6

    @property
    def tick_rows(self) -> int:
        """Rows of a tick, in which schedules count."""
        return self.problem.batch_size or self.solver.default_batch_size(None)

    @cached_property
    def seed_rows(self) -> int:
        """Rows that are kept for seeding."""
        if self.solver.seed_rows is not None:
            return self.solver.seed_rows
        return min(10_000, max(500, 40 * self.schedule.first_components))

    @property
    def tol(self) -> float:
        """What a pass has to add to the mean log-likelihood of a feature."""
        if self.solver.tol is not None:
            return self.solver.tol
        return 1e-4 if self.problem.batches_per_epoch == 1 else 2e-5

    @property
    def screens(self) -> bool:
        """Whether there may be a screen at some time of the run."""
        p = self.problem
        shape = p.n_components, p.n_features, p.n_factors
        return self.solver.scales == 1 and candidates_for(p.candidates, shape, training=True) > 0
