"""Natural-gradient training: stochastic steps in the geometry of the complete-data model.

A run has three parts. The first rows of the stream are kept until there are enough to seed the
mixture: centroids are annealed on the torus grid by convex steps on small draws from them, and
variances follow. Then every batch moves running averages of the expected statistics by a decreasing
rate, which is an online form of EM; the variance bound starts loose. Meanwhile components that have
lost their samples, and those that are still to come when there are many, are made by splitting the
heaviest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from factormix.errors import InputError
from factormix.parameters import Like, Parameters, factor_major
from factormix.scratch import reusing
from factormix.solvers.base import Info, Problem
from factormix.solvers.seeding import Seeds, annealed_centroids, nearest, spread_running
from factormix.statistics import (
    Running,
    Statistics,
    expected_statistics,
    natural_step,
    precision_form_,
)

__all__ = ["NaturalGradient", "NaturalState"]


@dataclass
class NaturalState:
    """All that changes while training."""

    parameters: Parameters
    running: Running
    max_precision: Tensor
    """(d,)."""
    first_bound: Tensor
    """(d,), the bound on E to begin with."""
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
    unit: int
    """Rows that count as one step in every schedule."""
    batches_per_epoch: int
    """0 for a stream."""
    growth: float
    """Units over which the mixture grows."""
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
    tol, patience : float, int
        Stop when the mean log-likelihood per feature of a pass has risen by less than ``tol`` in
        ``patience`` passes. ``tol=0`` goes on to the last epoch.
    seed_rows : int or None
        Rows kept for seeding, at most one pass; None takes 200 per first component, 50 on a stream,
        at least 500 and at most 10,000.
    anneal_steps, anneal_batch, anneal_rate, anneal_sigma : int, int, float, float
        Number, rows and rate of the convex steps of the centroids, and last width of the kernel.
    first_components : int or None
        Components to begin with; the others come by splitting. None takes all up to 400, else 400.
    growth : float
        Share of the first pass in which the mixture grows to its full number of components.
    initial_loading : float
        Size of the first random loadings, in standard deviations.
    first_temper, temper_units : float, float or None
        Responsibilities start at this power, one by default, and reach one after so many units;
        None takes 40 units, 20 for a mixture that grows.
    first_variance, bound_units : float, float or None
        The variance bound starts at this times the variance around the seeds and reaches its value
        after so many units; None takes 30 units, 20 for a mixture that grows.
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
    tol: float = 2e-5
    patience: int = 3
    seed_rows: int | None = None
    anneal_steps: int = 1000
    anneal_batch: int = 100
    anneal_rate: float = 0.05
    anneal_sigma: float = 0.2
    first_components: int | None = None
    growth: float = 0.8
    initial_loading: float = 0.3
    first_temper: float = 1.0
    temper_units: float | None = None
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
        for name in ("offset", "first_temper", "first_variance", "anneal_rate", "anneal_sigma"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be positive, not {getattr(self, name)}.")
        if not 0 < self.min_eigenvalue < 1:
            raise InputError(f"min_eigenvalue must lie between 0 and 1, not {self.min_eigenvalue}.")
        if self.forgetting is not None and not 0 < self.forgetting <= 1:
            raise InputError(
                f"forgetting must lie between 0 and 1 or be None, not {self.forgetting}."
            )

    def default_batch_size(self, n_rows: int | None) -> int:
        """Return 1,000 rows, or a few hundred when that would be less than ten batches.

        Up to 1,000 rows are one batch: nothing is to be gained from a part of them.
        """
        if n_rows is None or n_rows >= 10_000:
            return 1000
        return n_rows if n_rows <= 1000 else max(100, n_rows // 10)

    def default_epochs(self, batches_per_epoch: int) -> int:
        """Return the most passes; a run usually ends before by its own criterion."""
        return max(20, math.ceil(self.min_units / batches_per_epoch))

    def init(self, problem: Problem) -> NaturalState:
        """Begin with one broad Gaussian at the origin; the first rows seed the mixture."""
        K, d, l = problem.n_components, problem.n_features, problem.n_factors
        like: Like = {"device": problem.device, "dtype": problem.dtype}
        first = min(K, self.first_components or 400)
        bound = problem.bound(self.default_max_precision)
        generator = torch.Generator().manual_seed(problem.seed)
        means = 0.1 * torch.randn(first, d, generator=generator, dtype=torch.float64).to(**like)
        weights = torch.full((first,), 1 / first, **like)
        running = spread_running(
            means, torch.ones_like(means), weights, l, self.initial_loading, generator
        )
        unit = problem.batch_size or self.default_batch_size(None)
        per_epoch = problem.batches_per_epoch or 0
        return NaturalState(
            parameters=precision_form_(running, bound.clamp(max=1), self.min_eigenvalue),
            running=running,
            max_precision=bound,
            first_bound=bound.clone(),
            rows=torch.empty(0, d, **like),
            row_weights=torch.empty(0, **like),
            epoch_sum=torch.zeros((), **like),
            epoch_samples=torch.zeros((), **like),
            seed=problem.seed,
            n_components=K,
            first_components=first,
            unit=unit,
            batches_per_epoch=per_epoch,
            growth=max(10.0, self.growth * (per_epoch or 50)),
        )

    @reusing()
    def contribution(
        self, state: NaturalState, x: Tensor, weights: Tensor | None = None
    ) -> Statistics | Seeds:
        """Sum the expected statistics over the samples; before seeding, hand over the rows."""
        temper = self.first_temper ** (1 - self._progress(state, self._temper_units(state)))
        statistics = expected_statistics(state.parameters, x, weights, temper)
        if state.seeded:
            return statistics
        return Seeds(*statistics[:2], x, x.new_ones(len(x)) if weights is None else weights)

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

    def _temper_units(self, state: NaturalState) -> float:
        if self.temper_units is not None:
            return self.temper_units
        return 40.0 if state.first_components == state.n_components else 20.0

    def _bound_units(self, state: NaturalState) -> float:
        if self.bound_units is not None:
            return self.bound_units
        return 30.0 if state.first_components == state.n_components else 20.0

    def _seed_rows(self, state: NaturalState) -> int:
        if self.seed_rows is not None:
            return self.seed_rows
        each = 200 if state.batches_per_epoch else 50
        return min(10_000, max(500, each * state.first_components))

    def _rate(self, state: NaturalState) -> float:
        exponent = self.exponent or (0.6 if state.n_components <= 100 else 0.7)
        rate: float = (self._units(state) + self.offset) ** -exponent
        # Averages over two passes know all of the data; a slower rate would only be late.
        passes = {0: 0.0, 1: 1.0}.get(state.batches_per_epoch)
        least = 0.5 / state.batches_per_epoch if passes is None else passes
        return max(min(1.0, rate), least, self.forgetting or 0.0)

    def _advance(self, state: NaturalState, statistics: Statistics) -> None:
        """Move the running averages, then revive and grow when due."""
        n = float(statistics.n_samples)
        if n == 0:  # every sample weight is zero
            return
        rate = 1 - (1 - self._rate(state)) ** (n / state.unit)
        loose = 1 - self._progress(state, self._bound_units(state))
        bound = state.max_precision * (state.first_bound / state.max_precision) ** loose
        state.running, state.parameters = natural_step(
            state.running, state.parameters, statistics, rate, bound, self.min_eigenvalue
        )
        state.samples += n
        if self._units(state) >= (state.managed + 1) * self.manage_units:
            state.managed = int(self._units(state) / self.manage_units)
            self._manage(state)

    def _close_epoch(self, state: NaturalState) -> bool:
        """At the end of a pass, compare its likelihood with the best and return whether to stop."""
        if not state.batches_per_epoch or state.steps % state.batches_per_epoch:
            return False
        per_feature = (state.epoch_sum / state.epoch_samples).item() / state.max_precision.numel()
        state.epoch_sum.zero_()
        state.epoch_samples.zero_()
        settled = self._progress(state, max(self._temper_units(state), state.growth)) == 1
        if not settled or per_feature > state.best + self.tol:
            state.best, state.waited = max(state.best, per_feature) if settled else state.best, 0
            return False
        state.waited += 1
        return self.tol > 0 and state.waited >= self.patience

    def _seed(self, state: NaturalState) -> None:
        """Make the first mixture of the rows that were kept, then learn from them."""
        rows, row_weights = state.rows, state.row_weights
        l = state.parameters.shape[2]
        generator = torch.Generator().manual_seed(state.seed + 1)
        means = annealed_centroids(
            rows,
            row_weights,
            state.parameters.means.clone(),
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
        state.running = spread_running(
            means, variances, weights, l, self.initial_loading, generator
        )
        state.parameters = precision_form_(state.running, state.max_precision, self.min_eigenvalue)
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

    def _manage(self, state: NaturalState) -> None:
        """Revive the unused components and grow towards K, both by splitting the heaviest."""
        running = state.running
        K, k = state.n_components, len(running.A)
        weight = running.A[:, -1, -1]
        unused = (weight < self.unused_weight / k * weight.sum()).nonzero()[:, 0]
        done = self._progress(state, state.growth)
        first = state.first_components
        new = max(0, int(first * (K / first) ** done + 1e-9) - k)
        if not len(unused) and not new:
            return
        state.revived += len(unused)
        tensors = [*running, *state.parameters[2:]]
        if new:
            tensors = [torch.cat([t, t.new_zeros(new, *t.shape[1:])]) for t in tensors]
        target = torch.cat([unused, torch.arange(k, k + new, device=weight.device)])
        split_heaviest(tensors, target)
        state.running = Running(*tensors[:3])
        Theta, _, A = state.running
        E, Gamma, M = tensors[3:]
        logits = A[:, -1, -1].clamp(min=torch.finfo(A.dtype).tiny).log()
        state.parameters = Parameters(logits, Theta[:, -1], E, factor_major(Gamma), M)


def split_heaviest(tensors: list[Tensor], target: Tensor) -> None:
    """Give each target component half of one of the heaviest, in place.

    The tensors are Theta, U, A, E, Gamma and M. The halves stand half a standard deviation to each
    side along the first loading, or along the noise when there are no factors.
    """
    Theta, U, A, E = tensors[:4]
    while len(target):
        weight = A[:, -1, -1].clone()
        weight[target] = -1
        n = min(len(target), len(weight) - len(target))
        if n <= 0:
            return
        source, taken, target = weight.topk(n).indices, target[:n], target[n:]
        apart = 0.5 * (Theta[source, 0] if Theta.shape[1] > 1 else E[source].rsqrt())
        A[source] *= 0.5
        U[source] *= 0.5
        for tensor in tensors:
            tensor[taken] = tensor[source]
        Theta[source, -1] += apart
        Theta[taken, -1] -= apart
