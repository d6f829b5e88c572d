"""Batch EM from a k-means start: the classical, exact reference.

A pass over the data is one iteration: the statistics of its batches are added up, and the last
batch takes the step. The first passes are Lloyd iterations of k-means from k-means++ centroids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import Workspace
from factormix.core.averages import Averages, StepOptions, natural_step, rotate_averages
from factormix.core.expectation import expected_statistics
from factormix.core.parameters import Parameters
from factormix.core.ranks import count_ranks
from factormix.core.statistics import LatentSums, Statistics
from factormix.data.batches import Batch, mask_missing
from factormix.defaults import NOISE_MODELS
from factormix.errors import InputError
from factormix.training.distributed.communicator import SINGLE, Communicator
from factormix.training.solvers.base import (
    PRECISION,
    Change,
    Info,
    Problem,
    SolverOptions,
    State,
    add,
    check_length,
    check_ranges,
)
from factormix.training.solvers.components import keep_supported
from factormix.training.solvers.seeding import (
    Seeds,
    half_distances,
    spread_averages,
    spread_centroids,
)

FIRST_RANKING = 20
"""Passes before the first look at ranks, half of them EM by default, in which random loadings find
their directions."""
TRIAL_PASSES = 5
"""Steps of Lloyd's algorithm on the first rows for each of several random starts: half as many as
follow on all rows; chosen, not measured."""


class ClusterTotals(NamedTuple):
    """Sums over the rows nearest to each of the means."""

    n_samples: Tensor
    log_likelihood: Tensor
    counts: Tensor
    """Rows, (K,)."""
    sums: Tensor
    """``sum x``, (K, d)."""
    seen: Tensor
    """Entries that were not missing, (K, d)."""
    squares: Tensor
    """``sum x^2``, (K, d)."""

    @classmethod
    def empty(cls, like: Tensor) -> ClusterTotals:
        """Return sums of no rows, for means like ``like`` (K, d)."""
        zero, none = like.new_zeros(()), torch.zeros_like(like)
        return cls(zero, zero.clone(), like.new_zeros(len(like)), none, none.clone(), none.clone())


class EMTotals(NamedTuple):
    """Sums of the complete-data statistics over the rows of a pass, as in `LatentSums`."""

    n_samples: Tensor
    log_likelihood: Tensor
    A: Tensor
    B: Tensor
    S: Tensor

    @classmethod
    def empty(cls, parameters: Parameters) -> EMTotals:
        """Return sums of no rows."""
        K, d, l = parameters.shape
        zeros = parameters.means.new_zeros
        return cls(zeros(()), zeros(()), zeros(K, l + 1, l + 1), zeros(K, l + 1, d), zeros(K, d))

    @property
    def statistics(self) -> Statistics:
        """The same sums as the statistics of a batch."""
        return Statistics(*self[:2], LatentSums(None, *self[2:]))

    def add(self, batch: Statistics) -> EMTotals:
        """Add the statistics of a batch."""
        total = self.statistics.add(batch)
        assert isinstance(total.sums, LatentSums)
        return EMTotals(*total[:2], *total.sums.tensors.values())


@dataclass
class EMState(State):
    """Everything that changes in training."""

    parameters: Parameters
    averages: Averages
    clusters: ClusterTotals
    """Sums of this pass so far, while k-means runs."""
    totals: EMTotals
    """Sums of this pass so far, of EM."""
    rows: Tensor
    """Rows collected for the first centroids, (n, d), with NaN for missing entries."""
    row_weights: Tensor
    """(n,)."""
    steps: int = 0
    seeded: bool = False
    kmeans_left: int = 0
    """Remaining passes of k-means; EM begins at 0."""
    best: float = -math.inf
    converged: bool = False


@dataclass(frozen=True, repr=False)
class EM(SolverOptions):
    """Train by batch expectation-maximisation from a k-means start.

    Parameters
    ----------
    kmeans_passes : int
        Passes of Lloyd's algorithm before the first EM iteration.
    tol : float
        Stop when the mean log-likelihood per feature rises by less than this in one iteration.
        With 0, train to the last epoch.
    iterations : int
        EM iterations unless the estimator sets a number of epochs.
    seed_rows : int
        Rows from which the first centroids are chosen, at least ten for each component.
    initial_loading : float
        Size of the first random loadings, in standard deviations.
    min_eigenvalue : float
        Floor of the eigenvalues of M.
    """

    # The last two are the natural solver's, the others chosen, not measured.
    kmeans_passes: int = 10
    tol: float = 1e-5
    iterations: int = 50
    seed_rows: int = 2000
    initial_loading: float = 0.3
    min_eigenvalue: float = 1e-6

    name: ClassVar[str] = "em"
    needs_passes: ClassVar[bool] = True
    noise_models: ClassVar[tuple[str, ...]] = NOISE_MODELS
    chooses_ranks: ClassVar[bool] = True
    state_type: ClassVar[type[EMState]] = EMState
    default_max_precision: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            count=("kmeans_passes", "iterations", "seed_rows"),
            not_negative=("tol", "initial_loading"),
            between=("min_eigenvalue",),
        )

    def default_batch_size(self, n_rows: int | None) -> int:
        """Return the rows of a batch, which do not change the result."""
        return 1000

    def default_epochs(self, batches_per_epoch: int) -> int:
        """Return the number of passes of k-means and EM together."""
        return self.kmeans_passes + self.iterations

    def plan(self, problem: Problem) -> EMPlan:
        """Apply the options to a problem."""
        return EMPlan(self, problem)


@dataclass(frozen=True)
class EMPlan:
    """A run of batch EM on a problem."""

    solver: EM
    problem: Problem
    steps_by_owner: ClassVar[bool] = False
    work: Workspace = field(default_factory=Workspace, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_length(self.solver, self.problem.batches_per_epoch)

    @cached_property
    def _bound(self) -> Tensor:
        return self.problem.bound(PRECISION)

    def init(self) -> EMState:
        """Start with broad Gaussians near the origin; the first pass finds the centroids."""
        problem, solver = self.problem, self.solver
        (K, d, l), like = problem.shape, problem.like
        generator = torch.Generator().manual_seed(problem.seed)
        means = 0.1 * torch.randn(K, d, generator=generator, dtype=torch.float64).to(**like)
        weights = torch.full((K,), 1 / K, **like)
        averages = spread_averages(
            means, torch.ones_like(means), weights, l, solver.initial_loading, generator
        )
        averages, parameters = rotate_averages(
            averages, self._bound.clamp(max=1), solver.min_eigenvalue
        )
        averages = problem.communicator.components.cut(averages)
        parameters = problem.communicator.components.cut(parameters)
        return EMState(
            parameters=parameters,
            averages=averages,
            clusters=ClusterTotals.empty(parameters.means),
            totals=EMTotals.empty(parameters),
            rows=means[:0].clone(),
            row_weights=weights[:0].clone(),
            # The rows nearest to given means are summed once, for the variances around them.
            kmeans_left=solver.kmeans_passes if problem.means is None else 1,
        )

    def settled(self, state: EMState) -> bool:
        """Return whether k-means is over."""
        return state.kmeans_left == 0

    def contribution(self, state: EMState, batch: Batch) -> Statistics | ClusterTotals | Seeds:
        """Sum the statistics of EM or k-means over rows; the first batches return their rows."""
        x, weights = batch.tensors()
        if state.kmeans_left == 0:
            exchange = self.problem.communicator.components.exchange
            return expected_statistics(
                state.parameters, x, weights, batch.missing, work=self.work, exchange=exchange
            )
        found = sum_clusters(state.parameters.means, batch, self.problem.communicator)
        if state.seeded:
            return found
        row_weights = x.new_ones(len(x)) if weights is None else weights
        return Seeds(found.n_samples, found.log_likelihood, batch.rows_with_nan(), row_weights)

    def update(
        self, state: EMState, contribution: Statistics | ClusterTotals | Seeds
    ) -> tuple[EMState, Info]:
        """Add a batch to the sums of the pass; after its last batch, take the step."""
        c, state.steps = contribution, state.steps + 1
        log_likelihood = c.log_likelihood / c.n_samples
        last = state.steps % (self.problem.batches_per_epoch or 1) == 0
        if isinstance(c, Seeds):
            state.rows = torch.cat([state.rows, c.rows])
            state.row_weights = torch.cat([state.row_weights, c.weights])
            if last or len(state.rows) >= max(
                self.solver.seed_rows, 10 * self.problem.n_components
            ):
                self._seed(state)
        elif isinstance(c, ClusterTotals):
            state.clusters = add(state.clusters, c)
        else:
            state.totals = state.totals.add(c)
        if last:
            self._iterate(state)
        scalars = {"kmeans_left": float(state.kmeans_left)}
        stop = state.converged and self.solver.tol > 0
        return state, Info(log_likelihood, scalars, state.converged, stop)

    def change_units(self, state: EMState, units: Change) -> EMState:
        """Refuse: units change only on a stream, and batch EM needs passes."""
        raise InputError("the solver 'em' cannot follow a stream: use the solver 'natural'.")

    def begin_fit_(self, state: EMState) -> None:
        """Forget the sums of the last pass, and the best likelihood of a pass."""
        state.clusters = ClusterTotals.empty(state.parameters.means)
        state.totals = EMTotals.empty(state.parameters)
        state.steps, state.best, state.converged = 0, -math.inf, False

    def _seed(self, state: EMState) -> None:
        """Choose the first centroids from the collected rows, and sum those rows."""
        rows, weights = state.rows, state.row_weights
        whole = mask_missing(rows, weights)
        tries = [self._centroids(whole, i) for i in range(self.problem.n_init)]
        totals = [sum_clusters(means, whole) for means in tries]
        best = max(range(len(tries)), key=lambda i: float(totals[i].log_likelihood))
        communicator = self.problem.communicator
        (means,) = communicator.broadcast_tensors([tries[best]])
        means = communicator.components.select(means)
        state.parameters = state.parameters._replace(means=means)
        state.clusters = totals[best]
        if not communicator.has_all_components:
            state.clusters = sum_clusters(means, whole, communicator)
        state.rows, state.row_weights = rows[:0].clone(), weights[:0].clone()
        state.seeded = True

    def _centroids(self, batch: Batch, i: int) -> Tensor:
        """Draw centroids (K, d) from rows (n, d); with several starts, improve each a little."""
        generator = torch.Generator().manual_seed(self.problem.seed + 1 + 7919 * i)
        rows, weights = batch.tensors()
        assert weights is not None
        seen = None if batch.missing is None else (~batch.missing).to(rows)
        if self.problem.means is not None:
            return self.problem.means.to(rows)
        means = spread_centroids(rows, weights, self.problem.n_components, generator, seen)
        for _ in range(TRIAL_PASSES if self.problem.n_init > 1 else 0):
            means = _move_means(means, sum_clusters(means, batch))
        return means

    def _iterate(self, state: EMState) -> None:
        if state.kmeans_left:
            state.kmeans_left -= 1
            self._move_centroids(state, state.clusters)
            state.clusters = ClusterTotals.empty(state.parameters.means)
        else:
            totals = state.totals
            per_feature = float(totals.log_likelihood / totals.n_samples) / totals.S.shape[1]
            state.converged = per_feature < state.best + self.solver.tol
            state.best = max(state.best, per_feature)
            state.averages, state.parameters = natural_step(
                state.averages,
                state.parameters,
                totals.statistics,
                StepOptions(
                    1.0,
                    self._bound,
                    self.solver.min_eigenvalue,
                    expand=False,
                    n_components=self.problem.n_components,
                    noise=self.problem.noise_model,
                ),
            )
            if self.problem.choose_ranks:
                self._choose_ranks(state, float(totals.n_samples))
            state.totals = EMTotals.empty(state.parameters)

    def _choose_ranks(self, state: EMState, n_rows: float) -> None:
        """Switch off factors without support, when passes have doubled and at the end.

        A run that has converged goes on with the factors that are left.
        """
        problem, per_epoch = self.problem, self.problem.batches_per_epoch or 1
        looks, rest = divmod(state.steps, per_epoch * FIRST_RANKING)
        last = state.converged or state.steps == per_epoch * (problem.epochs or 0)
        if not last and (rest or looks.bit_count() != 1):
            return
        before = count_ranks(state.parameters).sum()
        state.averages, state.parameters = keep_supported(
            state.averages,
            state.parameters,
            n_rows,
            (self._bound, self.solver.min_eigenvalue),
            problem.noise_model,
            problem.communicator,
            last=last,
            widen=False,
        )
        fewer = problem.communicator.components.sum(before - count_ranks(state.parameters).sum())
        if fewer > 0:
            state.converged, state.best = False, -math.inf

    def _move_centroids(self, state: EMState, totals: ClusterTotals) -> None:
        """Take a step of Lloyd's algorithm; after the last one, begin EM from the clusters."""
        sums, seen = totals.sums, totals.seen
        centres = _move_means(state.parameters.means, totals)
        # Given means stay, and only variances and weights come from the rows nearest to them.
        means = centres if self.problem.means is None else state.parameters.means
        state.parameters = state.parameters._replace(means=means)
        if state.kmeans_left:
            return
        generator = torch.Generator().manual_seed(self.problem.seed + 2)
        communicator, K = self.problem.communicator, self.problem.n_components
        spread = totals.squares.sum(dim=0) - (centres * sums).sum(dim=0)
        spread, counted = communicator.components.sum(torch.stack([spread, seen.sum(dim=0)]))
        pooled = spread / counted.clamp(min=1e-12)
        squares = (totals.squares - centres * sums).clamp(min=0)
        # The pooled variance counts as one more row, for clusters of a single row.
        variances = (squares + pooled.clamp(min=0)) / (seen + 1)
        variances = torch.maximum(variances, 1 / self._bound)
        weights = totals.counts + 1
        averages = spread_averages(
            means,
            variances,
            weights / communicator.components.sum(weights.sum()),
            state.parameters.shape[2],
            self.solver.initial_loading,
            generator,
            part=(communicator.components.local_slice, K),
        )
        averages.V.copy_(self.problem.noise_model.pool(averages.V, averages.weight))
        state.averages, state.parameters = rotate_averages(
            averages, self._bound, self.solver.min_eigenvalue
        )


def sum_clusters(means: Tensor, batch: Batch, communicator: Communicator = SINGLE) -> ClusterTotals:
    """Sum ``1``, x and x^2 over the rows (B, d) nearest to each of the means (K, d).

    The log-likelihood is for a unit Gaussian around the nearest mean. Missing entries count in none
    of the sums. Other processes may have other means.
    """
    K, d = means.shape
    x, weights = batch.tensors()
    seen = None if batch.missing is None else (~batch.missing).to(x)
    distances = half_distances(x, means, seen)
    winner = distances.argmin(dim=1)
    R = torch.nn.functional.one_hot(winner, K).to(x)
    nearest_here = communicator.components.is_nearest(distances.amin(dim=1))
    if nearest_here is not None:
        R.mul_(nearest_here.unsqueeze(1))
    if weights is not None:
        R.mul_(weights.unsqueeze(1))
    squares = x.square()
    count, sums, second = R.sum(dim=0), R.mT @ x, R.mT @ squares
    each = count.unsqueeze(-1).expand(K, d) if seen is None else R.mT @ seen
    inertia = second.sum() - 2 * (sums * means).sum() + (each * means.square()).sum()
    log_likelihood = -0.5 * (inertia + each.sum() * math.log(2 * math.pi))
    n, log_likelihood = communicator.components.sum(torch.stack([count.sum(), log_likelihood]))
    return ClusterTotals(n, log_likelihood, count, sums, each.contiguous(), second)


def _move_means(means: Tensor, totals: ClusterTotals) -> Tensor:
    """Return the means (K, d) of the rows that were counted; a mean without rows stays."""
    seen = totals.seen
    return torch.where(seen > 0, totals.sums / seen.clamp(min=1e-12), means)
