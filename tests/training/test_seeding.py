"""Random starts, and the choice of the best of several."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from factormix.core.arrays import Workspace
from factormix.core.density import log_prob, operands
from factormix.data.batches import Batch
from factormix.solvers import EM, NaturalGradient, Problem
from factormix.training.solvers import step
from factormix.training.solvers.em import TRIAL_PASSES
from factormix.training.solvers.schedule import Schedule
from factormix.training.solvers.seeding import best_start, random_start, try_start

K, D, L = 6, 3, 1
FLOOR = 1e-6


def rows(seed: int = 0, n: int = 300) -> Tensor:
    """Draw rows (n, d) around as many centres as there are components."""
    generator = torch.Generator().manual_seed(seed)
    centres = 6 * torch.randn(K, D, generator=generator)
    which = torch.randint(K, (n,), generator=generator)
    return centres[which] + torch.randn(n, D, generator=generator)


def problem(**options: int) -> Problem:
    length = {"batches_per_epoch": 1, "epochs": 100, "batch_size": 300}
    return Problem(K, D, L, torch.tensor(100.0), **length | options)  # type: ignore[arg-type]


def make_schedule() -> Schedule:
    return NaturalGradient(first_components=K).plan(problem()).schedule


@pytest.mark.parametrize("weighted", [False, True])
def test_a_start_has_the_variances_around_its_centroids(weighted):
    x = rows()
    weights = torch.rand(300, generator=torch.Generator().manual_seed(1)) if weighted else None
    bound = torch.full((D,), 100.0)
    schedule, generator = make_schedule(), torch.Generator().manual_seed(0)
    start = random_start(Batch(x, weights), schedule, problem(), bound, FLOOR, generator)
    count = torch.ones(300) if weights is None else weights
    winner = torch.cdist(x, start.parameters.means).argmin(dim=1)
    apart = (x - start.parameters.means[winner]).square()
    pooled = (count.unsqueeze(1) * apart).sum(dim=0) / count.sum()
    for k in range(K):
        mine, n = winner == k, count[winner == k].sum()
        squares = (count[mine].unsqueeze(1) * apart[mine]).sum(dim=0)
        expected = (squares + 5 * pooled) / (n + 5)
        torch.testing.assert_close(start.averages.V[k], expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(start.first_bound, (1 / (0.3 * pooled)).clamp(max=100.0))
    assert float(start.averages.weight.sum()) == pytest.approx(1)


def test_a_trial_makes_a_start_better_and_says_how_good_it_is():
    x = rows()
    schedule, generator = make_schedule(), torch.Generator().manual_seed(0)
    bound = torch.full((D,), 100.0)
    start = random_start(Batch(x), schedule, problem(), bound, FLOOR, generator)
    before = log_prob(x, operands(start.parameters)).mean()
    score, after = try_start(start, [Batch(x)], schedule, problem(), FLOOR, Workspace())
    assert score > before
    # The score is that of the last tick before its step.
    assert log_prob(x, operands(after.parameters)).mean() >= score - 1e-3


@pytest.mark.parametrize("seed", range(4))
def test_natural_begins_with_the_best_of_its_starts(seed):
    x, bound, work = rows(seed), torch.full((D,), 100.0), Workspace()
    schedule = make_schedule()

    def chosen(n_init: int, first: int = 0) -> Tensor:
        # The i-th start of one seed is the first of another.
        given = problem(n_init=n_init, seed=7919 * first)
        start = best_start(Batch(x), [Batch(x)], bound, schedule, given, FLOOR, work)
        if n_init == 1:  # which is not tried
            start = try_start(start, [Batch(x)], schedule, given, FLOOR, work)[1]
        return log_prob(x, operands(start.parameters)).mean()

    scores = [float(chosen(1, i)) for i in range(5)]
    assert len(set(scores)) > 1
    assert float(chosen(5)) == pytest.approx(max(scores), abs=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_em_begins_with_the_best_of_its_starts(seed):
    """A start of several is moved a little first, as the passes of k-means move a single one."""
    x = Batch(rows(seed))
    solver = EM(kmeans_passes=TRIAL_PASSES + 5)

    def likelihoods(n_init: int, first: int = 0) -> list[float]:
        plan = solver.plan(problem(n_init=n_init, seed=7919 * first))
        state, seen = plan.init(), []
        for _ in range(TRIAL_PASSES + 3):
            state, info = step(plan, state, x)
            seen.append(float(info.log_likelihood))
        return seen

    singles = [likelihoods(1, i) for i in range(5)]
    best = max(singles, key=lambda seen: seen[TRIAL_PASSES + 1])
    assert likelihoods(5)[1] == pytest.approx(best[TRIAL_PASSES + 2], rel=1e-5)
    assert math.isfinite(best[-1])
