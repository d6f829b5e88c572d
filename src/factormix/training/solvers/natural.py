"""Natural-gradient training: stochastic steps in the geometry of the complete-data model.

A run has three parts. The first rows of the stream are kept until there are enough to seed the
mixture: centroids are annealed on the torus grid by convex steps on small draws from them, and
variances follow. Then every batch moves running averages of the expected statistics by a decreasing
rate, which is an online form of EM; the variance bound starts loose. Meanwhile the number of
components changes: passes over data begin with more than are wanted and lose, one by one, those
whose samples the others explain best; a mixture of very many begins with few and grows. Components
that have lost their samples, and those that are still to come, are made by splitting the heaviest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from factormix.core.density import log_prob, operands
from factormix.core.parameters import Like, Parameters, factor_major
from factormix.core.scratch import reusing
from factormix.core.statistics import (
    Running,
    Statistics,
    expected_statistics,
    natural_step,
    precision_form,
)
from factormix.training.solvers.base import Info, Problem
from factormix.training.solvers.options import (
    BETWEEN,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
    check_options,
)
from factormix.training.solvers.seeding import Seeds, annealed_centroids, nearest, spread_running

__all__ = ["NaturalGradient", "NaturalState"]

LARGE = 500
"""Most components that are seeded one by one; more of them grow by splitting."""
PRUNE_FROM = 5.0
"""Units before the first component in excess goes: its worth has to be known."""
MEMORY = 0.8
"""Share of a running average of the components' worth that is left after a unit."""

OPTIONS: dict[Range, tuple[str, ...]] = {
    SHARE: ("exponent", "cooling", "forgetting", "anneal_rate"),
    POSITIVE: (
        "offset", "anneal_sigma", "prune_units", "growth", "first_variance", "manage_units",
    ),
    NOT_NEGATIVE: ("tol", "initial_loading", "bound_units"),
    BETWEEN: ("unused_weight", "min_eigenvalue"),
    COUNT: ("patience", "seed_rows", "anneal_steps", "anneal_batch", "first_components"),
}  # fmt: skip


@dataclass
class NaturalState:
    """All that changes while training."""

    parameters: Parameters
    running: Running
    max_precision: Tensor
    """(d,)."""
    first_bound: Tensor
    """(d,), the bound on E to begin with."""
    worth: Tensor
    """Running average of what each component is worth, (K,); (0,) unless some are to go."""
    rows: Tensor
    """Rows that are kept for seeding, (n, d); none afterwards."""
    row_weights: Tensor
    """(n,)."""
    epoch_sum: Tensor
    """Sum of the log-likelihoods of this pass, scalar."""
    epoch_samples: Tensor
    seed: int
    n_components: int
    """K when the mixture has grown."""
    first_components: int
    """Components to begin with."""
    unit: int
    """Rows that count as one step in every schedule."""
    batches_per_epoch: int
    """0 for a stream."""
    planned: float
    """Units of all passes; infinite for a stream."""
    resizing: float
    """Units after which there are K components."""
    steps: int = 0
    seeded: bool = False
    samples: float = 0.0
    """Rows learned from since seeding."""
    managed: int = 0
    """Times that unused components were looked for."""
    revived: int = 0
    best: float = -math.inf
    """Best mean log-likelihood of a pass."""
    waited: int = 0
    """Passes since the last gain."""


@dataclass(frozen=True)
class NaturalGradient:
    """Train by natural-gradient steps on running statistics, from random values.

    Every schedule is counted in units of a batch's rows, so that odd batches do not change it.

    Parameters
    ----------
    exponent, offset : float or None
        The rate of unit t is ``(t + offset) ** -exponent``; None takes 0.6 up to 100 components and
        0.7 above.
    forgetting : float or None
        Least rate, for streams that drift: about ``unit / forgetting`` rows are remembered.
    cooling : float
        Factor by which the rate falls in addition over the last two fifths of all planned passes.
    tol, patience : float, int
        Stop when the mean log-likelihood per feature of a pass has risen by less than ``tol`` in
        ``patience`` passes. ``tol=0`` goes on to the last epoch.
    seed_rows : int or None
        Rows kept for seeding, at most one pass; None takes 40 per first component, at least 500 and
        at most 10,000.
    anneal_steps, anneal_batch, anneal_rate, anneal_sigma : int, int, float, float
        Number, rows and rate of the convex steps of the centroids, and last width of the kernel.
    first_components : int or None
        Components to begin with: more than K are pruned to K, fewer grow to K. None takes twice K,
        or K on a stream, but at most 500.
    prune_units : float
        Units in which the number of components is halved while there are more than K; a short run
        takes fewer.
    growth : float
        Share of the first pass in which the mixture grows to its full number of components.
    initial_loading : float
        Size of the first random loadings, in standard deviations.
    first_variance, bound_units : float, float or None
        The variance bound starts at this times the variance around the seeds and reaches its value
        after so many units; None takes 30 units, 20 for a mixture that grows, and at most three
        quarters of a short run.
    manage_units : float
        Units between two looks for unused components.
    unused_weight : float
        A component below this times the average weight is unused.
    min_eigenvalue : float
        Floor of the eigenvalues of M.
    """

    exponent: float | None = None
    offset: float = 5.0
    forgetting: float | None = None
    cooling: float = 0.5
    tol: float = 2e-5
    patience: int = 3
    seed_rows: int | None = None
    anneal_steps: int = 500
    anneal_batch: int = 100
    anneal_rate: float = 0.05
    anneal_sigma: float = 0.2
    first_components: int | None = None
    prune_units: float = 35.0
    growth: float = 0.8
    initial_loading: float = 0.3
    first_variance: float = 0.3
    bound_units: float | None = None
    manage_units: float = 5.0
    unused_weight: float = 0.1
    min_eigenvalue: float = 1e-6

    name: ClassVar[str] = "natural"
    needs_passes: ClassVar[bool] = False
    state_type: ClassVar[type[NaturalState]] = NaturalState
    default_max_precision: ClassVar[float] = 10_000.0
    min_units: ClassVar[int] = 400

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
        return max(20, math.ceil(self.min_units / batches_per_epoch))

    def init(self, problem: Problem) -> NaturalState:
        """Begin with K times the same broad Gaussian; the first rows seed the mixture."""
        K, d, l = problem.n_components, problem.n_features, problem.n_factors
        like: Like = {"device": problem.device, "dtype": problem.dtype}
        bound = problem.bound(self.default_max_precision)
        generator = torch.Generator().manual_seed(problem.seed)
        mean = 0.1 * torch.randn(d, generator=generator, dtype=torch.float64).to(**like)
        means = mean.repeat(K, 1)
        weights = torch.full((K,), 1 / K, **like)
        running = spread_running(means, torch.ones_like(means), weights, l, 0.0, generator)
        unit = problem.batch_size or self.default_batch_size(None)
        per_epoch = problem.batches_per_epoch or 0
        first = self._first_components(K, unit * per_epoch)
        resizing = max(10.0, self.growth * (per_epoch or 50))
        if first >= K:
            resizing = PRUNE_FROM + self.prune_units * math.log2(first / K)
        planned = float(per_epoch * problem.epochs) if problem.epochs else math.inf
        running, parameters = precision_form(running, bound.clamp(max=1), self.min_eigenvalue)
        return NaturalState(
            parameters=parameters,
            running=running,
            max_precision=bound,
            first_bound=bound.clone(),
            worth=torch.empty(0, **like),
            rows=torch.empty(0, d, **like),
            row_weights=torch.empty(0, **like),
            epoch_sum=torch.zeros((), **like),
            epoch_samples=torch.zeros((), **like),
            seed=problem.seed,
            n_components=K,
            first_components=first,
            unit=unit,
            batches_per_epoch=per_epoch,
            planned=planned,
            # A short run needs time for the components that stay.
            resizing=min(resizing, 0.5 * planned),
        )

    def settled(self, state: NaturalState) -> bool:
        """Tell whether there are K components and the variance bound has its value."""
        return state.seeded and self._progress(state, self._beginning(state)) == 1

    @reusing()
    def contribution(
        self, state: NaturalState, x: Tensor, weights: Tensor | None = None
    ) -> Statistics | Seeds:
        """Sum the expected statistics over the samples; before seeding, hand over the rows."""
        if state.seeded:
            excess = len(state.running.weight) > state.n_components
            # By the unit, not by the rows of x: parts of a batch must contribute the same things.
            worth = excess or self._due(state, state.unit)
            return expected_statistics(state.parameters, x, weights, worth=worth)
        weights = x.new_ones(len(x)) if weights is None else weights
        # All components are the same as yet.
        one = Parameters(*(t[:1] for t in state.parameters))
        return Seeds(weights.sum(), weights @ log_prob(x, operands(one)), x, weights)

    def update(
        self, state: NaturalState, contribution: Statistics | Seeds
    ) -> tuple[NaturalState, Info]:
        """Take one natural step, or seed the mixture once there are rows enough."""
        c, state.steps = contribution, state.steps + 1
        log_likelihood = c.log_likelihood / c.n_samples
        state.epoch_sum += c.log_likelihood
        state.epoch_samples += c.n_samples
        if isinstance(c, Seeds):
            state.rows = torch.cat([state.rows, c.rows])
            state.row_weights = torch.cat([state.row_weights, c.weights])
            if len(state.rows) >= self._seed_rows(state) or state.steps == state.batches_per_epoch:
                self._seed(state)
        else:
            self._advance(state, c)
        stop = self._close_epoch(state)
        scalars = {
            "rate": self._rate(state),
            "components": float(len(state.parameters.means)),
            "revived": float(state.revived),
        }
        return state, Info(log_likelihood, scalars, stop, stop)

    def step(
        self, state: NaturalState, x: Tensor, weights: Tensor | None = None
    ) -> tuple[NaturalState, Info]:
        """Take one step on the batch x (B, d), with sample weights (B,)."""
        return self.update(state, self.contribution(state, x, weights))

    def _units(self, state: NaturalState) -> float:
        return state.samples / state.unit

    def _progress(self, state: NaturalState, units: float) -> float:
        return min(1.0, self._units(state) / max(units, 1e-9))

    def _first_components(self, K: int, n_rows: int) -> int:
        """Choose how many components to begin with; ``n_rows`` is 0 for a stream."""
        if self.first_components is not None:
            return int(self.first_components)
        if not n_rows or K >= LARGE or K == 1:
            return min(K, LARGE)
        first = min(2 * K, LARGE)
        # On the grid of neighbours, which should be nearly square.
        side = round(math.sqrt(first))
        return max(K, min(side * math.ceil(first / side), n_rows // 10))

    def _bound_units(self, state: NaturalState) -> float:
        if self.bound_units is not None:
            return self.bound_units
        usual = 30.0 if state.first_components >= state.n_components else 20.0
        # A short run has time at its full bound too.
        return min(usual, 0.75 * state.planned)

    def _beginning(self, state: NaturalState) -> float:
        """Return the units after which neither the bound nor the number of components changes."""
        return max(self._bound_units(state), state.resizing)

    def _bound(self, state: NaturalState) -> Tensor:
        """Return the bound on E, (d,), on its way from the first one to the last."""
        loose = 1 - self._progress(state, self._bound_units(state))
        if loose == 0:
            return state.max_precision
        return state.max_precision * (state.first_bound / state.max_precision) ** loose

    def _seed_rows(self, state: NaturalState) -> int:
        if self.seed_rows is not None:
            return self.seed_rows
        return min(10_000, max(500, 40 * state.first_components))

    def _rate(self, state: NaturalState) -> float:
        exponent = self.exponent or (0.6 if state.n_components <= 100 else 0.7)
        rate: float = (self._units(state) + self.offset) ** -exponent
        rate *= self.cooling ** max(0.0, (self._units(state) / state.planned - 0.6) / 0.4)
        # Averages over two passes know all of the data; a slower rate would only be late.
        n = state.batches_per_epoch
        least = 0.5 / n if n > 1 else float(n)
        return max(min(1.0, rate), least, self.forgetting or 0.0)

    def _due(self, state: NaturalState, more_rows: float = 0.0) -> bool:
        """Tell whether unused components are looked for, now or after some more rows."""
        units = (state.samples + more_rows) / state.unit
        return units >= (state.managed + 1) * self.manage_units

    def _advance(self, state: NaturalState, statistics: Statistics) -> None:
        """Move the running averages, then prune, revive and grow when due."""
        n = float(statistics.n_samples)
        if n == 0:  # every sample weight is zero
            return
        share = n / state.unit
        unit_rate = self._rate(state)
        state.running, state.parameters = natural_step(
            state.running,
            state.parameters,
            statistics,
            1 - (1 - unit_rate) ** share,
            self._bound(state),
            self.min_eigenvalue,
        )
        state.samples += n
        if len(state.running.weight) > state.n_components:
            self._prune(state, statistics.worth / n, share)
            return
        self._grow(state)
        if self._due(state):
            state.managed = int(self._units(state) / self.manage_units)
            self._revive(state, statistics.worth)

    def _close_epoch(self, state: NaturalState) -> bool:
        """At the end of a pass, compare its likelihood with the best and return whether to stop."""
        if not state.batches_per_epoch or state.steps % state.batches_per_epoch:
            return False
        per_feature = (state.epoch_sum / state.epoch_samples).item() / state.max_precision.numel()
        state.epoch_sum.zero_()
        state.epoch_samples.zero_()
        settled = self.settled(state)
        if not settled or per_feature > state.best + self.tol:
            state.best, state.waited = max(state.best, per_feature) if settled else state.best, 0
            return False
        state.waited += 1
        return self.tol > 0 and state.waited >= self.patience

    def _seed(self, state: NaturalState) -> None:
        """Make the first mixture of the rows that were kept, then learn from them."""
        rows, row_weights = state.rows, state.row_weights
        _, d, l = state.parameters.shape
        generator = torch.Generator().manual_seed(state.seed + 1)
        means = annealed_centroids(
            rows,
            row_weights,
            0.1 * torch.randn(state.first_components, d, generator=generator).to(rows),
            generator,
            steps=self.anneal_steps,
            batch=self.anneal_batch,
            rate=self.anneal_rate,
            last_sigma=self.anneal_sigma,
        )
        winner = nearest(rows, means)
        residuals = (rows - means[winner]).square_().mul_(row_weights.unsqueeze(-1))
        count = torch.zeros_like(means[:, 0]).index_add_(0, winner, row_weights)
        squares = torch.zeros_like(means).index_add_(0, winner, residuals)
        # Five rows' worth of the pooled variance stands in for what few rows cannot tell.
        pooled = squares.sum(dim=0) / row_weights.sum()
        state.first_bound = torch.minimum(
            state.max_precision, 1 / (self.first_variance * pooled).clamp(min=1e-30)
        )
        variances = (squares + 5 * pooled) / (count + 5).unsqueeze(-1)
        variances = torch.maximum(variances, 1 / state.max_precision)
        weights = (count + 1) / (count + 1).sum()
        running = spread_running(means, variances, weights, l, self.initial_loading, generator)
        state.running, state.parameters = precision_form(
            running, state.max_precision, self.min_eigenvalue
        )
        state.rows, state.row_weights, state.seeded = (
            rows[:0].clone(),
            row_weights[:0].clone(),
            True,
        )
        parts = zip(*(torch.split(t, state.unit) for t in (rows, row_weights)), strict=True)
        for x, weights in parts:
            contribution = self.contribution(state, x, weights)
            assert isinstance(contribution, Statistics)
            self._advance(state, contribution)

    def _prune(self, state: NaturalState, worth: Tensor, share: float) -> None:
        """Take away the components that are worth least, down to K along the schedule."""
        K, first = state.n_components, state.first_components
        keep = MEMORY**share
        known = len(state.worth) == len(worth)
        state.worth = keep * state.worth + (1 - keep) * worth if known else worth
        begun = min(PRUNE_FROM, 0.5 * state.resizing)
        done = (self._units(state) - begun) / max(state.resizing - begun, 1e-9)
        left = max(K, round(first * (K / first) ** min(1.0, max(0.0, done))))
        if left < len(worth):
            stay = state.worth.topk(left).indices.sort().values
            state.worth = state.worth[stay] if left > K else state.worth[:0].clone()
            Theta, U, weight, *rest = (t[stay] for t in (*state.running, *state.parameters[2:]))
            total = weight.sum()
            self._renew(state, [Theta, U / total, weight / total, *rest])

    def _grow(self, state: NaturalState) -> None:
        """Split the heaviest components, up to K along the schedule."""
        K, k, first = state.n_components, len(state.running.weight), state.first_components
        done = self._progress(state, state.resizing)
        new = int(first * (K / first) ** done + 1e-9) - k if k < K else 0
        if new <= 0:
            return
        tensors = [*state.running, *state.parameters[2:]]
        tensors = [torch.cat([t, t.new_zeros(new, *t.shape[1:])]) for t in tensors]
        split_heaviest(tensors, torch.arange(k, k + new, device=tensors[0].device))
        self._renew(state, tensors)

    def _revive(self, state: NaturalState, worth: Tensor) -> None:
        """Give unused components half of the heaviest, by what they are worth to a batch, (K,).

        A component of few samples that nothing else explains, such as outliers, is left alone.
        """
        weight = state.running.weight
        unused = weight < self.unused_weight * weight.mean()
        if len(worth) == len(weight):
            unused &= worth <= worth.mean()
        target = unused.nonzero()[:, 0]
        if len(target):
            state.revived += len(target)
            tensors = [*state.running, *state.parameters[2:]]
            split_heaviest(tensors, target)
            self._renew(state, tensors)

    def _renew(self, state: NaturalState, tensors: list[Tensor]) -> None:
        """Take Theta, U, weight, E, Gamma and M of another set of components."""
        state.running = Running(*tensors[:3])
        Theta, _, weight = state.running
        E, Gamma, M = tensors[3:]
        logits = weight.clamp(min=torch.finfo(weight.dtype).tiny).log()
        state.parameters = Parameters(logits, Theta[:, 0], E, factor_major(Gamma), M)


def split_heaviest(tensors: list[Tensor], target: Tensor) -> None:
    """Give each target component half of one of the heaviest, in place.

    The tensors are Theta, U, weight, E, Gamma and M. The halves stand half a standard deviation to
    each side along the first loading, or along the noise when there are no factors.
    """
    Theta, U, weight, E = tensors[:4]
    while len(target):
        free = weight.clone()
        free[target] = -1
        # Nothing light is split: its half would be unused again.
        n = min(len(target), int((free >= 0.5 * free.max()).sum()))
        if free.max() < 0:
            return
        source, taken, target = free.topk(n).indices, target[:n], target[n:]
        apart = 0.5 * (Theta[source, 1] if Theta.shape[1] > 1 else E[source].rsqrt())
        weight[source] *= 0.5
        U[source] *= 0.5
        for tensor in tensors:
            tensor[taken] = tensor[source]
        Theta[source, 0] += apart
        Theta[taken, 0] -= apart
