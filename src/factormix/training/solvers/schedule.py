"""When what happens in a run of natural-gradient steps.

Everything is counted in ticks: a tick is as many rows as a full batch has, so that odd batches do
not change a schedule.

What a run of natural-gradient steps takes where its owner left it open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from factormix.core.density import quadratic_forms_pay
from factormix.training.screens import candidates_for
from factormix.training.solvers.base import Problem
from factormix.training.solvers.scales import kinds as kinds_of

if TYPE_CHECKING:
    from factormix.training.solvers.natural import NaturalGradient

__all__ = ["LARGE", "Choices", "Schedule", "first_components"]

LARGE = 500
"""Most components that are seeded one by one; more of them grow by splitting."""
EXCESS, LEAST_EXCESS = 5 / 3, 32
"""Times K, and how many more than K, that a mixture of many begins with: enough to choose from, and
not so many that those which stay have known few rows of their own. Few begin with twice K."""
PRUNE_FROM = 5.0
"""Ticks before the first component in excess goes: what it is good for has to be known."""
PRUNE_TICKS = 35.0
"""Ticks in which the number of components is halved while there are more than K."""
BOUND_TICKS = 30.0
"""Ticks after which the bound on E has its value."""
WHOLE = 3.0
"""How many times faster it goes where a tick is all of the data, so that each tells everything."""
GROWTH = 0.8
"""Share of the first pass in which a mixture grows to its full number of components."""
STREAM_GROWTH, GROWTH_ROWS = 12.0, 1.5
"""Ticks, and rows for each component, in which a mixture grows on a stream: the sooner they are all
there, the less they remember of what they were part of."""
HEALING = 0.15
"""Share of the planned ticks at the end in which no component is replaced any more."""


@dataclass(frozen=True)
class Schedule:
    """Rates, bounds and numbers of components as functions of the ticks since seeding."""

    n_components: int
    """K, the components at the end."""
    first_components: int
    """Components to begin with."""
    tick_rows: int
    batches_per_epoch: int
    """0 for a stream."""
    planned: float
    """Ticks of all passes; infinite for a stream."""
    exponent: float
    offset: float
    cooling: float
    forgetting: float
    later: float | None = None
    """Times that rows count once a mixture has grown on a stream, compared with averages in which
    all rows since then count alike; None for the rate that it had before."""

    @property
    def resizing(self) -> float:
        """Ticks after which there are K components."""
        K, first = self.n_components, self.first_components
        if first >= K:
            ticks = PRUNE_FROM + PRUNE_TICKS / self._haste * math.log2(first / K)
        elif self.batches_per_epoch:
            ticks = max(10.0, GROWTH * self.batches_per_epoch)
        else:
            ticks = max(STREAM_GROWTH, GROWTH_ROWS * K / self.tick_rows)
        # A short run needs time for the components that stay.
        return min(ticks, 0.5 * self.planned)

    @property
    def bound_ticks(self) -> float:
        """Ticks after which the bound on E has its value."""
        usual = BOUND_TICKS if self.first_components >= self.n_components else 20.0
        # A short run has time at its full bound too.
        return min(usual / math.sqrt(self._haste), 0.75 * self.planned)

    @property
    def _haste(self) -> float:
        return WHOLE if self.batches_per_epoch == 1 else 1.0

    @property
    def pass_rows(self) -> float:
        """Rows of a pass over the data; infinite for a stream."""
        return float(self.tick_rows * self.batches_per_epoch) or math.inf

    def rate(self, ticks: float) -> float:
        """Return the share that a tick of rows has in the running averages."""
        rate: float = self._falling(ticks)
        if self.later and ticks > self.resizing:
            # From where it is then on.
            begun = self.later / self._falling(self.resizing)
            rate = self.later / (begun + ticks - self.resizing)
        rate *= self.cooling ** max(0.0, (ticks / self.planned - 0.6) / 0.4)
        # Averages over two passes know all of the data; a slower rate would only be late.
        n = self.batches_per_epoch
        least = 0.5 / n if n > 1 else float(n)
        return max(min(1.0, rate), least, self.forgetting)

    def _falling(self, ticks: float) -> float:
        rate: float = (ticks + self.offset) ** -self.exponent
        return rate

    def looseness(self, ticks: float) -> float:
        """Return how far the bound on E still is from its value, between 1 and 0."""
        return 1 - min(1.0, ticks / max(self.bound_ticks, 1e-9))

    def components(self, ticks: float) -> int:
        """Return how many components there should be."""
        K, first = self.n_components, self.first_components
        if first < K:
            done = min(1.0, ticks / max(self.resizing, 1e-9))
            grown: float = first * (K / first) ** done
            return math.floor(grown + 1e-9)
        begun = min(PRUNE_FROM, 0.5 * self.resizing)
        done = (ticks - begun) / max(self.resizing - begun, 1e-9)
        left: float = first * (K / first) ** min(1.0, max(0.0, done))
        return max(K, round(left))

    def settled(self, ticks: float) -> bool:
        """Tell whether neither the bound nor the number of components changes any more."""
        return ticks >= max(self.bound_ticks, self.resizing)

    def may_replace(self, ticks: float) -> bool:
        """Tell whether there is time left for a new component to find its place."""
        return ticks <= self.planned * (1 - HEALING) - 2


def first_components(n_components: int, n_factors: int, n_rows: int) -> int:
    """Choose how many components to begin with; ``n_rows`` are those of a pass, 0 for a stream."""
    K = n_components
    if not n_rows or K >= LARGE or K == 1:
        return min(K, LARGE)
    first = min(2 * K, max(K + LEAST_EXCESS, int(EXCESS * K)), LARGE)
    # On the grid of neighbours, which should be nearly square.
    side = round(math.sqrt(first))
    # Factors need rows: those of a component in excess would be fitted to chance.
    affordable = n_rows // (10 * (n_factors + 1))
    return max(K, min(side * math.ceil(first / side), affordable))


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
        return self.hastens and quadratic_forms_pay(
            (self.kinds, self.problem.n_features, self.problem.n_factors)
        )

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
