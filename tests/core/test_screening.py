"""Screens: the marginal that ranks components, the blocks, and what is evaluated in the end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from torch import Tensor

from factormix.core.arrays import Workspace
from factormix.core.density import joint_operands, log_normaliser, project
from factormix.core.expectation import expected_statistics
from factormix.core.parameters import Parameters, from_generative
from factormix.core.screening import (
    CandidateSearch,
    Screen,
    find_directions,
    make_screen,
    make_shortlists,
    table_size,
    update_screen_,
)
from mixtures import draw_rows, latent_sums, make_mixture
from oracles import dense_precision, numpy


def covariances(parameters: Parameters) -> np.ndarray:
    return np.linalg.inv(dense_precision(parameters.precision_diag, parameters.precision_factors))


def full(parameters: Parameters, x: torch.Tensor) -> torch.Tensor:
    """Compute ``log pi_k + log p_k`` of all components, (B, K)."""
    return project(x, joint_operands(parameters))[0]


def test_directions_are_those_of_the_largest_variance_over_noise():
    parameters = make_mixture(K=40, d=24)
    origin, W = find_directions(parameters, iterations=60)
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


def test_the_table_ranks_by_the_marginal_density():
    parameters = make_mixture(K=30, d=24)
    screen = make_screen(parameters, ridge=0.0)
    x = draw_rows(parameters, 16)
    marginal = marginals(parameters, screen, x, 16) + numpy(parameters.log_weights)
    # A row alone is a block: what it chooses are its own best.
    for n in range(16):
        chosen = make_shortlists(x[n : n + 1], screen, parameters.log_weights, 7).components[0]
        assert chosen.tolist() == sorted(np.argsort(-marginal[n])[:7].tolist())


def test_a_screen_is_updated_for_some_components():
    before, after = make_mixture(K=50), make_mixture(K=50, seed=3)
    screen, new = make_screen(before), make_screen(after)
    some = torch.tensor([3, 17, 40])
    same_view = screen._replace(table=new.table.clone())
    update_screen_(screen, after, some)
    update_screen_(same_view, after)
    torch.testing.assert_close(screen.table[some], same_view.table[some])
    torch.testing.assert_close(screen.constant[some], new.constant[some])
    torch.testing.assert_close(screen.Gamma_mu[some], new.Gamma_mu[some])
    others = torch.ones(50).bool()
    others[some] = False
    torch.testing.assert_close(screen.table[others], make_screen(before).table[others])


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 100, 300, 1000, 2500])
def test_every_row_lies_in_one_block(n):
    parameters = make_mixture(K=60)
    lists = make_shortlists(
        draw_rows(parameters, n), make_screen(parameters), parameters.log_weights, 9
    )
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
    parameters = make_mixture(K=60)
    screen = make_screen(parameters)
    lists = make_shortlists(draw_rows(parameters, n), screen, parameters.log_weights, C)
    counts = [len(few) for few in lists.components]
    assert counts == sorted(counts)
    assert max(counts) <= 60
    assert np.mean(counts) == pytest.approx(min(C, 60), rel=0.05)
    if n == 3000 and C < 30:
        assert max(counts) > 3 * min(counts)


def test_blocks_that_need_more_get_more():
    """Half of the components lie close together: the same number for all would lose more."""
    parameters = make_mixture(K=600, d=40)
    near = parameters.means.clone()
    near[:300] *= 0.2
    parameters = from_generative(
        parameters.logits, near, near.new_zeros(600, 40, 0), 1 / parameters.precision_diag
    )
    x = draw_rows(parameters, 3000)
    exact = log_normaliser(full(parameters, x))[0]
    search = CandidateSearch(make_screen(parameters), 120)
    unequal = (exact - search.find_best(x, parameters).log_prob).mean()
    lists = make_shortlists(x, search.screen, parameters.log_weights, 120, unequal=1.0)
    joint = full(parameters, x)
    equal = torch.cat(
        [
            exact[rows] - joint[rows][:, chosen].logsumexp(dim=1)
            for block, chosen in zip(lists.rows, lists.components, strict=True)
            for rows in [block[block < len(x)]]
        ]
    ).mean()
    assert unequal < 0.7 * equal


@pytest.mark.parametrize("l", [0, 2])
@pytest.mark.parametrize("n", [1, 50, 700])
def test_what_is_let_through_is_evaluated_exactly(n, l):
    """With all components let through, everything is as without a screen."""
    parameters = make_mixture(K=80, l=l)
    x, search = draw_rows(parameters, n), CandidateSearch(make_screen(parameters), 80)
    joint, Y = project(x, joint_operands(parameters))
    found = search.find_best(x, parameters)
    torch.testing.assert_close(found.log_prob, log_normaliser(joint)[0])
    best = joint.argmax(dim=1)
    assert torch.equal(found.component, best)
    torch.testing.assert_close(found.Y, Y[torch.arange(n), best])


@pytest.mark.parametrize("weighted", [False, True])
def test_statistics_through_a_wide_screen_are_those_of_all(weighted):
    parameters = make_mixture(K=150)
    x = draw_rows(parameters, 333)
    weights = torch.arange(333).remainder(3).double() if weighted else None
    candidates = torch.arange(150) % 5 == 0
    search = CandidateSearch(make_screen(parameters), 150)
    ours = expected_statistics(
        parameters, x, weights, search=search, candidates=candidates, n_probes=16
    )
    theirs = expected_statistics(parameters, x, weights, candidates=candidates)
    for one, other in zip(ours._replace(screening=None).totals, theirs.totals, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(latent_sums(ours, 150), latent_sums(theirs, 150), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-4)
    assert ours.screening is not None
    assert float(ours.screening[0]) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("K", "numbers"), [(400, (4, 12, 40)), (5000, (60, 120, 600))])
def test_few_candidates_lose_little_and_the_estimate_is_right(K, numbers):
    parameters = make_mixture(K=K, d=20, l=1, spread=2.0, dtype=torch.float32)
    x = draw_rows(parameters, 1200)
    exact = log_normaliser(full(parameters, x))[0]
    for n_candidates in numbers:
        search = CandidateSearch(make_screen(parameters), n_candidates)
        scores = search.find_best(x, parameters).log_prob
        assert (scores <= exact + 1e-3).all(), "what is left out can only be missing"
        truth = (exact - scores).double().mean().item()
        lost = expected_statistics(parameters, x, search=search, n_probes=600).screening
        assert lost is not None
        estimate = float(lost[0] / lost[1])
        # Half of the rows tell what all of them lose.
        spread = float((exact - scores).double().std()) / np.sqrt(600)
        assert abs(estimate - truth) < 4 * spread + 1e-3
    assert truth < 0.05
    assert (
        truth
        < 0.01 * (exact - search._replace(n_candidates=2).find_best(x, parameters).log_prob).mean()
    )


def test_a_component_far_from_all_others_is_found_by_its_rows():
    """It is far along a feature in which nothing else varies, and very light."""
    parameters = make_mixture(K=400, d=40, l=0)
    logits, mu, E, _, _ = (t.clone() for t in parameters)
    mu[:, -1], E[:, -1] = 0.0, 25.0
    logits[123], mu[123, -1] = logits.min() - 5, 40.0
    variances, none = E.reciprocal(), E.new_zeros(400, 40, 0)
    parameters = from_generative(logits, mu, none, variances)
    generator = torch.Generator().manual_seed(0)
    own = mu[123] + variances[123].sqrt() * torch.randn(6, 40, generator=generator).double()
    x = torch.cat([draw_rows(parameters, 2000), own])
    found = CandidateSearch(make_screen(parameters), 24).find_best(x, parameters)
    assert (found.component[-6:] == 123).all()
    exact = log_normaliser(full(parameters, x))[0]
    torch.testing.assert_close(found.log_prob[-6:], exact[-6:])


def test_rows_far_out_and_equal_rows_are_sorted_too():
    parameters = make_mixture(K=100, dtype=torch.float32)
    x = draw_rows(parameters, 300)
    x[::7] = x[0]
    x[5] = 1e6
    found = CandidateSearch(make_screen(parameters), 30).find_best(x, parameters)
    exact = log_normaliser(full(parameters, x))[0]
    assert found.log_prob.isfinite().all()
    assert float((exact - found.log_prob)[torch.arange(300) != 5].mean()) < 0.1


def test_what_rows_lose_without_some_components():
    parameters = make_mixture(K=90)
    x, gone = draw_rows(parameters, 200), torch.arange(90) % 4 == 0
    joint = numpy(full(parameters, x))
    expected = logsumexp(joint, axis=1) - logsumexp(joint[:, ~gone.numpy()], axis=1)
    ours, without = (
        CandidateSearch(make_screen(parameters), 90).compare_without(x, parameters, gone).unbind(1)
    )
    ours = ours - without
    np.testing.assert_allclose(ours, expected, rtol=1e-8, atol=1e-8)


def test_components_of_a_block_may_be_gathered_in_parts():
    parameters = make_mixture(K=400)
    x, search = draw_rows(parameters, 300), CandidateSearch(make_screen(parameters), 120)
    gone = torch.arange(400) % 7 == 0

    def results(search: CandidateSearch) -> list[Tensor]:
        work = Workspace()
        found = expected_statistics(parameters, x, search=search, n_probes=20, work=work)
        assert found.screening is not None
        totals = [
            found.log_likelihood,
            *latent_sums(found, 400),
            found.screening,
            *search.find_best(x, parameters, work),
        ]
        return [*totals, search.compare_without(x, parameters, gone, work)]

    by_owner = search._replace(gathered_elements=1000, probe_elements=1000)
    for ours, theirs in zip(results(by_owner), results(search), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_screen_is_small():
    assert table_size(784) == 153
    assert table_size(3) == 10
