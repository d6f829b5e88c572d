"""Screens: the marginal that ranks components, the blocks, and what is evaluated in the end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from torch import Tensor

from conftest import dense_precision, numpy
from factormix.core import screening
from factormix.core import screening as lists_of
from factormix.core.arrays import Workspace
from factormix.core.density import joint_operands, log_normaliser, project
from factormix.core.expectation import expected_statistics
from factormix.core.parameters import Parameters, from_generative
from factormix.core.screening import (
    Few,
    Screen,
    directions,
    follow,
    screen_of,
    screened_statistics,
    shortlists,
    table_size,
)
from many import drawn, many


def covariances(parameters: Parameters) -> np.ndarray:
    return np.linalg.inv(dense_precision(parameters.precision_diag, parameters.precision_factors))


def full(parameters: Parameters, x: torch.Tensor) -> torch.Tensor:
    """Compute ``log pi_k + log p_k`` of all components, (B, K)."""
    return project(x, joint_operands(parameters))[0]


def test_directions_are_those_of_the_largest_variance_over_noise():
    parameters = many(K=40, d=24)
    origin, W = directions(parameters, iterations=60)
    pi, mu = numpy(parameters.log_weights.exp()), numpy(parameters.means)
    np.testing.assert_allclose(origin, pi @ mu)
    centred = mu - pi @ mu
    total = np.einsum("k,kde->de", pi, covariances(parameters)) + centred.T @ (
        pi[:, None] * centred
    )
    scale = np.sqrt(pi @ (1 / numpy(parameters.precision_diag)))
    _, vectors = np.linalg.eigh(total / np.outer(scale, scale))
    first = vectors[:, -16:] / scale[:, None]
    # The same subspace: ours is a combination of theirs.
    left = numpy(W) - first @ np.linalg.lstsq(first, numpy(W), rcond=None)[0]
    assert np.abs(left).max() < 1e-2 * np.abs(numpy(W)).max()


def marginals(parameters: Parameters, screen: Screen, x: Tensor, p: int) -> np.ndarray:
    """Compute the log-densities (B, K) of rows on the first p directions, from covariances."""
    W, origin = numpy(screen.directions)[:, :p], numpy(screen.origin)
    Sigma, mu, z = covariances(parameters), numpy(parameters.means), (numpy(x) - origin) @ W
    found = [
        multivariate_normal((m - origin) @ W, W.T @ covariance @ W).logpdf(z)
        for m, covariance in zip(mu, Sigma, strict=True)
    ]
    return np.stack(found, axis=1)


def test_the_table_ranks_by_the_marginal_density(monkeypatch):
    monkeypatch.setattr(screening, "RIDGE", 0.0)
    parameters = many(K=30, d=24)
    screen = screen_of(parameters)
    x = drawn(parameters, 16)
    marginal = marginals(parameters, screen, x, 16) + numpy(parameters.log_weights)
    # A row alone is a block: what it chooses are its own best.
    for n in range(16):
        chosen = shortlists(x[n : n + 1], screen, parameters.log_weights, 7).components[0]
        assert chosen.tolist() == sorted(np.argsort(-marginal[n])[:7].tolist())


def test_a_screen_follows_the_components_that_it_is_told_of():
    before, after = many(K=50), many(K=50, seed=3)
    screen, new = screen_of(before), screen_of(after)
    some = torch.tensor([3, 17, 40])
    same_view = screen._replace(table=new.table.clone())
    follow(screen, after, some)
    follow(same_view, after)
    torch.testing.assert_close(screen.table[some], same_view.table[some])
    torch.testing.assert_close(screen.constant[some], new.constant[some])
    torch.testing.assert_close(screen.Gamma_mu[some], new.Gamma_mu[some])
    others = torch.ones(50).bool()
    others[some] = False
    torch.testing.assert_close(screen.table[others], screen_of(before).table[others])


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 100, 300, 1000, 2500])
def test_every_row_lies_in_one_block(n):
    parameters = many(K=60)
    lists = shortlists(drawn(parameters, n), screen_of(parameters), parameters.log_weights, 9)
    rows = lists.rows.flatten()
    assert sorted(rows[rows < n].tolist()) == list(range(n))
    assert len(rows) < 1.5 * n
    counts = [len(set(chosen.tolist())) for chosen in lists.components]
    assert counts == [len(chosen) for chosen in lists.components]
    assert len(counts) == len(lists.rows)
    assert np.mean(counts) == pytest.approx(9, abs=0.5)


@pytest.mark.parametrize("n", [1, 40, 3000])
@pytest.mark.parametrize("C", [5, 30, 59, 60, 80])
def test_blocks_get_as_many_candidates_as_are_asked_for_on_average(C, n):
    """And each of them all components, where all are asked for."""
    parameters = many(K=60)
    screen = screen_of(parameters)
    lists = shortlists(drawn(parameters, n), screen, parameters.log_weights, C)
    counts = [len(few) for few in lists.components]
    assert counts == sorted(counts)
    assert max(counts) <= 60
    assert np.mean(counts) == pytest.approx(min(C, 60), rel=0.05)
    if n == 3000 and C < 30:
        assert max(counts) > 3 * min(counts)


def test_blocks_that_need_more_get_more():
    """Half of the components lie close together: the same number for all would lose more."""
    parameters = many(K=600, d=40)
    near = parameters.means.clone()
    near[:300] *= 0.2
    parameters = from_generative(
        parameters.logits, near, near.new_zeros(600, 40, 0), 1 / parameters.precision_diag
    )
    x = drawn(parameters, 3000)
    exact = log_normaliser(full(parameters, x))[0]
    few = Few(screen_of(parameters), 120)
    unequal = (exact - few.best(x, parameters).log_prob).mean()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists_of, "UNEQUAL", 1.0)
        equal = (exact - few.best(x, parameters).log_prob).mean()
    assert unequal < 0.7 * equal


@pytest.mark.parametrize("l", [0, 2])
@pytest.mark.parametrize("n", [1, 50, 700])
def test_what_is_let_through_is_evaluated_exactly(n, l):
    """With all components let through, everything is as without a screen."""
    parameters = many(K=80, l=l)
    x, few = drawn(parameters, n), Few(screen_of(parameters), 80)
    joint, Y = project(x, joint_operands(parameters))
    found = few.best(x, parameters)
    torch.testing.assert_close(found.log_prob, log_normaliser(joint)[0])
    best = joint.argmax(dim=1)
    assert torch.equal(found.component, best)
    torch.testing.assert_close(found.Y, Y[torch.arange(n), best])


@pytest.mark.parametrize("weighted", [False, True])
def test_statistics_through_a_wide_screen_are_those_of_all(weighted):
    parameters = many(K=150)
    x = drawn(parameters, 333)
    weights = torch.arange(333).remainder(3).double() if weighted else None
    candidates = torch.arange(150) % 5 == 0
    few = Few(screen_of(parameters), 150)
    ours = screened_statistics(parameters, x, weights, few=few, candidates=candidates, n_probes=16)
    theirs = expected_statistics(parameters, x, weights, candidates=candidates)
    for name in ("n_samples", "log_likelihood", "loss_alone", "loss_together"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
    for one, other in zip(ours.whole(150)[2:5], theirs.whole(150)[2:5], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-4)
    assert ours.missed is not None
    assert float(ours.missed[0]) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("K", "numbers"), [(400, (4, 12, 40)), (5000, (60, 120, 600))])
def test_few_candidates_lose_little_and_the_estimate_tells_the_truth(K, numbers):
    parameters = many(K=K, d=20, l=1, spread=2.0, dtype=torch.float32)
    x = drawn(parameters, 1200)
    exact = log_normaliser(full(parameters, x))[0]
    for n_candidates in numbers:
        few = Few(screen_of(parameters), n_candidates)
        scores = few.best(x, parameters).log_prob
        assert (scores <= exact + 1e-3).all(), "what is left out can only be missing"
        truth = (exact - scores).double().mean().item()
        told = screened_statistics(parameters, x, few=few, n_probes=600).missed
        assert told is not None
        estimate = float(told[0] / told[1])
        # Half of the rows tell what all of them lose.
        spread = float((exact - scores).double().std()) / np.sqrt(600)
        assert abs(estimate - truth) < 4 * spread + 1e-3
    assert truth < 0.05
    assert truth < 0.01 * (exact - few._replace(n_candidates=2).best(x, parameters).log_prob).mean()


def test_a_component_far_from_all_others_is_found_by_its_rows():
    """It is far along a feature in which nothing else varies, and very light."""
    parameters = many(K=400, d=40, l=0)
    logits, mu, E, _, _ = (t.clone() for t in parameters)
    mu[:, -1], E[:, -1] = 0.0, 25.0
    logits[123], mu[123, -1] = logits.min() - 5, 40.0
    variances, none = E.reciprocal(), E.new_zeros(400, 40, 0)
    parameters = from_generative(logits, mu, none, variances)
    generator = torch.Generator().manual_seed(0)
    own = mu[123] + variances[123].sqrt() * torch.randn(6, 40, generator=generator).double()
    x = torch.cat([drawn(parameters, 2000), own])
    found = Few(screen_of(parameters), 24).best(x, parameters)
    assert (found.component[-6:] == 123).all()
    exact = log_normaliser(full(parameters, x))[0]
    torch.testing.assert_close(found.log_prob[-6:], exact[-6:])


def test_rows_far_out_and_equal_rows_are_sorted_too():
    parameters = many(K=100, dtype=torch.float32)
    x = drawn(parameters, 300)
    x[::7] = x[0]
    x[5] = 1e6
    found = Few(screen_of(parameters), 30).best(x, parameters)
    exact = log_normaliser(full(parameters, x))[0]
    assert found.log_prob.isfinite().all()
    assert float((exact - found.log_prob)[torch.arange(300) != 5].mean()) < 0.1


def test_what_rows_lose_without_some_components():
    parameters = many(K=90)
    x, gone = drawn(parameters, 200), torch.arange(90) % 4 == 0
    joint = numpy(full(parameters, x))
    expected = logsumexp(joint, axis=1) - logsumexp(joint[:, ~gone.numpy()], axis=1)
    ours, without = Few(screen_of(parameters), 90).with_and_without(x, parameters, gone).unbind(1)
    ours = ours - without
    np.testing.assert_allclose(ours, expected, rtol=1e-8, atol=1e-8)


def test_components_of_a_block_may_be_gathered_in_parts(monkeypatch):
    parameters = many(K=400)
    x, few = drawn(parameters, 300), Few(screen_of(parameters), 120)
    gone = torch.arange(400) % 7 == 0

    def results() -> list[Tensor]:
        work = Workspace()
        found = screened_statistics(parameters, x, few=few, n_probes=20, work=work)
        assert found.missed is not None
        told = [found.log_likelihood, *found[2:5], found.missed, *few.best(x, parameters, work)]
        return [*told, few.with_and_without(x, parameters, gone, work)]

    together = results()
    monkeypatch.setattr(screening, "GATHERED", 1000)
    monkeypatch.setattr(screening, "PROBED", 1000)
    for ours, theirs in zip(results(), together, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_screen_is_small():
    assert table_size(784) == 153
    assert table_size(3) == 10
