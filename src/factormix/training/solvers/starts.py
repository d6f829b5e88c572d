"""Random starts of a mixture on the rows kept for it, and the choice of the best among several."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.completion import batch_statistics
from factormix.core.parameters import Parameters, factor_major
from factormix.core.running import Running, precision_form
from factormix.core.steps import natural_step
from factormix.core.workspace import Workspace
from factormix.data.batches import Batch
from factormix.training import placement
from factormix.training.processes import Processes
from factormix.training.solvers.base import Problem
from factormix.training.solvers.schedule import Schedule
from factormix.training.solvers.seeding import first_centroids, nearest, spread_running

__all__ = ["Start", "best_start", "random_start", "tried"]

FIRST_VARIANCE = 0.3
"""The bound on variances begins at this share of the variance around the seeds."""
INITIAL_LOADING = 0.3
"""Size of the first random loadings, in standard deviations."""
TRIAL_TICKS = 10
"""Ticks for which each of several random starts is tried."""


class Start(NamedTuple):
    """A mixture to begin with."""

    running: Running
    parameters: Parameters
    first_bound: Tensor
    """(d,), the bound on E to begin with."""

    def divided(self, processes: Processes) -> Start:
        """Return what this process has of the start that the first one has made."""
        if processes.alone:
            return self
        everything = processes.same_tensors([*self.running, *self.parameters, self.first_bound])
        running, parameters = Running(*everything[:3]), Parameters(*everything[3:8])
        if processes.divided:
            placement.settle(processes, len(running.weight))
            running = placement.cut(processes, running)
            parameters = placement.cut(processes, parameters)
        factors = factor_major(parameters.precision_factors)
        return Start(running, parameters._replace(precision_factors=factors), everything[8])


def best_start(
    rows: Batch,
    parts: list[Batch],
    bound: Tensor,
    schedule: Schedule,
    problem: Problem,
    floor: float,
    work: Workspace,
) -> Start:
    """Make ``problem.n_init`` random starts on rows and return the one that explains them best.

    Parts are the same rows in batches. A single start is not tried. ``bound`` (d,) is that on E,
    ``floor`` that of the eigenvalues of M.
    """
    best, highest = None, -math.inf
    for i in range(problem.n_init):
        generator = torch.Generator().manual_seed(problem.seed + 1 + 7919 * i)
        start = random_start(
            rows, schedule.first_components, problem.n_factors, bound, floor, generator
        )
        score = -math.inf
        if problem.n_init > 1:
            score, start = tried(start, parts, schedule, floor, work)
        if best is None or score > highest:
            best, highest = start, score
    assert best is not None
    return best


def random_start(
    rows: Batch,
    n_components: int,
    n_factors: int,
    bound: Tensor,
    floor: float,
    generator: torch.Generator,
) -> Start:
    """Spread centroids over rows and take the variances around them."""
    x, row_weights = rows.tensors()
    row_weights = x.new_ones(len(x)) if row_weights is None else row_weights
    seen = None if rows.missing is None else (~rows.missing).to(x)
    means = first_centroids(x, row_weights, n_components, generator, seen)
    winner = nearest(x, means, seen)
    residuals = (x - means[winner]).square_().mul_(row_weights.unsqueeze(-1))
    count = torch.zeros_like(means[:, 0]).index_add_(0, winner, row_weights)
    each, all_rows = count.unsqueeze(-1), row_weights.sum()
    if seen is not None:
        residuals.mul_(seen)
        counted = seen * row_weights.unsqueeze(-1)
        each, all_rows = torch.zeros_like(means).index_add_(0, winner, counted), counted.sum(dim=0)
    squares = torch.zeros_like(means).index_add_(0, winner, residuals)
    # Five rows' worth of the pooled variance stands in for what few rows cannot tell.
    pooled = squares.sum(dim=0) / all_rows
    # A feature that none of the first rows has begins with the variance of working units.
    pooled = torch.where(all_rows > 0, pooled, 1.0)
    first_bound = torch.minimum(bound, 1 / (FIRST_VARIANCE * pooled).clamp(min=1e-30))
    variances = (squares + 5 * pooled) / (each + 5)
    variances = torch.maximum(variances, 1 / bound)
    weights = (count + 1) / (count + 1).sum()
    running = spread_running(means, variances, weights, n_factors, INITIAL_LOADING, generator)
    return Start(*precision_form(running, bound, floor), first_bound)


def tried(
    start: Start, parts: list[Batch], schedule: Schedule, floor: float, work: Workspace
) -> tuple[float, Start]:
    """Train a start for a few ticks on the rows at hand; return its mean log-likelihood too."""
    running, parameters, first_bound = start
    total = samples = 0.0
    for tick in range(TRIAL_TICKS):
        batch = parts[tick % len(parts)]
        statistics = batch_statistics(parameters, *batch.tensors(), batch.missing, work=work)
        n = float(statistics.n_samples)
        if tick + min(len(parts), TRIAL_TICKS) >= TRIAL_TICKS:
            total, samples = total + float(statistics.log_likelihood), samples + n
        rate = schedule.rate(float(tick))
        running, parameters = natural_step(
            running, parameters, statistics, rate, first_bound, floor
        )
    return total / samples, Start(running, parameters, first_bound)
