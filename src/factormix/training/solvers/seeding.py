"""The first mixture: rows kept from the start of the data, centroids, and first averages.

Several random starts can be tried on the same rows; the best one goes on.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from factormix.core.annealing import COLLAPSED, smoothing_kernel, torus_distances
from factormix.core.arrays import Workspace
from factormix.core.averages import Averages, StepOptions, natural_step, rotate_averages
from factormix.core.expectation import expected_statistics
from factormix.core.noise import Noise
from factormix.core.parameters import Parameters, factor_major
from factormix.data.batches import Batch
from factormix.training.distributed.communicator import Communicator
from factormix.training.solvers.base import Problem
from factormix.training.solvers.schedule import Schedule, Seeding


class Seeds(NamedTuple):
    """The contribution of a batch before the mixture is seeded: its rows."""

    n_samples: Tensor
    log_likelihood: Tensor
    rows: Tensor
    """(B, d), NaN where an entry is missing."""
    weights: Tensor
    """(B,), sample weights."""

    def add(self, other: Self) -> Self:
        """Concatenate the rows of two contributions."""
        return type(self)(
            self.n_samples + other.n_samples,
            self.log_likelihood + other.log_likelihood,
            torch.cat([self.rows, other.rows]),
            torch.cat([self.weights, other.weights]),
        )


def half_distances(x: Tensor, means: Tensor, seen: Tensor | None) -> Tensor:
    """Compute half of ``|x - mu|^2 - |x|^2`` for rows x (B, d) and means mu (K, d): (B, K).

    With ``seen`` (B, d), 1 for observed entries and 0 for others, only the former count; x is 0 in
    the others, as everywhere in this file.
    """
    if seen is not None:
        return torch.addmm(0.5 * (seen @ means.square().mT), x, means.mT, alpha=-1)
    return torch.addmm(0.5 * means.square().sum(dim=1), x, means.mT, alpha=-1)


def sweep_centroids(
    rows: Tensor, weights: Tensor, means: Tensor, seeding: Seeding, seen: Tensor | None = None
) -> Tensor:
    """Spread means (K, d) over rows (n, d) by looking at all of them under a narrowing kernel.

    Each mean becomes the mean of the rows, weighted by its share in them and by their weights (n,);
    a mean without a share stays. With ``seen`` (n, d), each feature has shares of its own.
    """
    counted = weights.unsqueeze(-1) if seen is None else seen * weights.unsqueeze(-1)
    K = len(means)
    distances = torus_distances(K).to(means)
    for sigma in _narrow_sigma(K, seeding.sweeps, seeding.last_sigma):
        winner = half_distances(rows, means, seen).argmin(dim=1)
        sums = torch.zeros_like(means).index_add_(0, winner, rows * weights.unsqueeze(-1))
        share = counted.new_zeros(K, counted.shape[1]).index_add_(0, winner, counted)
        if sigma >= COLLAPSED:
            kernel = smoothing_kernel(distances, sigma)
            sums, share = kernel @ sums, kernel @ share
        means = torch.where(share > 1e-12, sums / share.clamp(min=1e-12), means)
    return means


def anneal_centroids(
    rows: Tensor,
    weights: Tensor,
    means: Tensor,
    generator: torch.Generator,
    seeding: Seeding,
    seen: Tensor | None = None,
) -> Tensor:
    """Spread means (K, d) over rows (n, d) by convex steps under a kernel that narrows.

    Rows are drawn by their weights (n,). Each mean moves by ``eta (mean of its share - mean)`` with
    ``eta = 1 - (1 - rate)^share``. With ``seen`` (n, d), each feature has shares of its own.
    """
    (n, d), K = rows.shape, len(means)
    steps, batch = seeding.steps, seeding.step_rows
    basis = None
    # The means never leave the span of the rows and of where they began. Its basis takes about
    # 4 d (n + K)^2 operations, at a quarter of the speed, the steps 4 d K for each row drawn.
    if seen is None and 2 * (n + K) <= d and 4 * (n + K) ** 2 <= steps * batch * K:
        basis, coordinates = torch.linalg.qr(torch.cat([rows, means]).mT)
        rows, means = coordinates.mT.contiguous().split([n, K])
    distances = torus_distances(K).to(means)
    sigmas = _narrow_sigma(K, steps, seeding.last_sigma)
    chances = weights.to("cpu", torch.float64)
    draws = torch.multinomial(chances, steps * batch, replacement=True, generator=generator)
    for sigma, drawn in zip(sigmas, draws.to(rows.device).view(steps, batch), strict=True):
        x, looked = rows[drawn], None if seen is None else seen[drawn]
        winner = half_distances(x, means, looked).argmin(dim=1)
        if sigma < COLLAPSED:
            R = torch.nn.functional.one_hot(winner, K).to(x)
        else:
            R = smoothing_kernel(distances, sigma)[winner]
        share = R.sum(dim=0).unsqueeze(-1) if looked is None else R.mT @ looked
        eta = 1 - (1 - seeding.step_rate) ** share
        means += eta * ((R.mT @ x) / share.clamp(min=1e-12) - means)
    return means if basis is None else means @ basis.mT


def _narrow_sigma(n_components: int, steps: int, last: float) -> list[float]:
    """Return the widths of the kernel, from the paper's first one down to the last."""
    first = 0.25 * math.sqrt(2 * n_components)
    narrowing = min(1.0, last / first)
    return [first * narrowing ** (t / max(1, steps - 1)) for t in range(steps)]


def spread_centroids(
    rows: Tensor,
    weights: Tensor,
    n_components: int,
    generator: torch.Generator,
    seen: Tensor | None = None,
) -> Tensor:
    """Choose rows (n, d) as centroids (K, d), each far from those before it (k-means++).

    With ``seen`` (n, d), distances are means over the entries that two rows share. Where the row of
    a centroid lacks a feature, the centroid has the mean of this feature.
    """
    if seen is not None:
        mean = (rows * weights.unsqueeze(-1)).sum(dim=0) / (weights @ seen).clamp(min=1e-12)
        rows = torch.where(seen > 0, rows, mean)
    chances = weights.to("cpu", torch.float64)
    chosen = [int(torch.multinomial(chances, 1, generator=generator))]
    distances = torch.full_like(chances, torch.inf)
    for _ in range(n_components - 1):
        apart = (rows - rows[chosen[-1]]).square()
        if seen is not None:
            shared = seen * seen[chosen[-1]]
            apart = apart * shared / shared.sum(dim=1, keepdim=True).clamp(min=1)
        distances = torch.minimum(distances, apart.sum(dim=1).to("cpu", torch.float64))
        likely = distances * chances
        # Rows that are all equal leave nothing but their weights to choose by.
        likely = likely if likely.sum() > 0 else chances
        chosen.append(int(torch.multinomial(likely, 1, generator=generator)))
    return rows[torch.tensor(chosen, device=rows.device)]


def spread_averages(
    means: Tensor,
    variances: Tensor,
    weights: Tensor,
    n_factors: int,
    loading: float,
    generator: torch.Generator,
    part: tuple[slice, int] | None = None,
) -> Averages:
    """Make averages of means and variances (K, d) and weights (K,), with random loadings.

    ``loading`` is the size of the loadings in standard deviations. ``part`` gives the place of
    these components and the number of all, so that every process draws the same loadings.
    """
    place, K = part or (slice(None), len(means))
    d = means.shape[1]
    noise = torch.randn(K, n_factors, d, generator=generator, dtype=torch.float64)[place].to(means)
    loadings = noise.mul_(loading).mul_(variances.sqrt().unsqueeze(1))
    return Averages(
        torch.cat([means.unsqueeze(1), loadings], dim=1),
        variances.clone(),
        weights.clone(),
    )


class Start(NamedTuple):
    """A mixture to begin with."""

    averages: Averages
    parameters: Parameters
    first_bound: Tensor
    """(d,), the bound on E to begin with."""

    def distribute(self, communicator: Communicator) -> Start:
        """Return the part of this process in the start of the first process."""
        if communicator.is_single:
            return self
        everything = communicator.broadcast_tensors(
            [*self.averages, *self.parameters, self.first_bound]
        )
        averages, parameters = Averages(*everything[:3]), Parameters(*everything[3:8])
        communicator.components.assign(len(averages.weight))
        averages = communicator.components.cut(averages)
        parameters = communicator.components.cut(parameters)
        factors = factor_major(parameters.precision_factors)
        return Start(averages, parameters._replace(precision_factors=factors), everything[8])


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

    Parts are the same rows in batches. A single start is not tried. ``bound`` (d,) is the bound on
    E, ``floor`` the least eigenvalue of M.
    """
    best, highest = None, -math.inf
    for i in range(problem.n_init):
        generator = torch.Generator().manual_seed(problem.seed + 1 + 7919 * i)
        start = random_start(rows, schedule, problem, bound, floor, generator)
        score = -math.inf
        if problem.n_init > 1:
            score, start = try_start(start, parts, schedule, problem, floor, work)
        if best is None or score > highest:
            best, highest = start, score
    assert best is not None
    return best


def random_start(
    rows: Batch,
    schedule: Schedule,
    problem: Problem,
    bound: Tensor,
    floor: float,
    generator: torch.Generator,
) -> Start:
    """Spread centroids over rows, or take the given means, and the variances around them."""
    seeding, n_components = schedule.seeding, schedule.first_components
    # Each process has all components here.
    noise = Noise(problem.noise)
    x, row_weights = rows.tensors()
    row_weights = x.new_ones(len(x)) if row_weights is None else row_weights
    seen = None if rows.missing is None else (~rows.missing).to(x)
    if problem.means is not None:
        means = problem.means.to(x)
    else:
        means = 0.1 * torch.randn(n_components, x.shape[1], generator=generator).to(x)
        if seeding.sweeping_pays(len(x)):
            means = sweep_centroids(x, row_weights, means, seeding, seen)
        else:
            means = anneal_centroids(x, row_weights, means, generator, seeding, seen)
    winner = half_distances(x, means, seen).argmin(dim=1)
    residuals = (x - means[winner]).square_().mul_(row_weights.unsqueeze(-1))
    count = torch.zeros_like(means[:, 0]).index_add_(0, winner, row_weights)
    each, all_rows = count.unsqueeze(-1), row_weights.sum()
    if seen is not None:
        residuals.mul_(seen)
        counted = seen * row_weights.unsqueeze(-1)
        each, all_rows = torch.zeros_like(means).index_add_(0, winner, counted), counted.sum(dim=0)
    squares = torch.zeros_like(means).index_add_(0, winner, residuals)
    pooled = squares.sum(dim=0) / all_rows
    # A feature that none of the first rows has begins with the variance of working units.
    pooled = torch.where(all_rows > 0, pooled, 1.0)
    shared = noise.pool(pooled.unsqueeze(0), pooled.new_ones(1)).squeeze(0)
    first_bound = torch.minimum(bound, 1 / (seeding.first_variance * shared).clamp(min=1e-30))
    prior = seeding.pooled_rows
    variances = (squares + prior * pooled) / (each + prior)
    variances = torch.maximum(variances, 1 / bound)
    weights = (count + 1) / (count + 1).sum()
    averages = spread_averages(
        means, variances, weights, problem.n_factors, seeding.loading, generator
    )
    averages.V.copy_(noise.pool(averages.V, averages.weight))
    return Start(*rotate_averages(averages, bound, floor), first_bound)


def try_start(
    start: Start,
    parts: list[Batch],
    schedule: Schedule,
    problem: Problem,
    floor: float,
    work: Workspace,
) -> tuple[float, Start]:
    """Train a start for a few ticks on the rows at hand; also return its mean log-likelihood."""
    (averages, parameters, first_bound), ticks = start, schedule.seeding.trial_ticks
    total = samples = 0.0
    for tick in range(ticks):
        batch = parts[tick % len(parts)]
        statistics = expected_statistics(parameters, *batch.tensors(), batch.missing, work=work)
        n = float(statistics.n_samples)
        if tick + min(len(parts), ticks) >= ticks:
            total, samples = total + float(statistics.log_likelihood), samples + n
        rate, noise = schedule.rate(float(tick)), Noise(problem.noise)
        options = StepOptions(rate, first_bound, floor, noise=noise)
        averages, parameters = natural_step(averages, parameters, statistics, options)
    return total / samples, Start(averages, parameters, first_bound)
