"""Screens: the marginal that ranks components, and what is evaluated in the end."""

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
    gather_products,
    make_screen,
    pair_products,
    score_one_gaussian,
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
    chosen = CandidateSearch(screen, 7).rank(x, parameters.log_weights, 7)
    assert chosen.tolist() == np.argsort(-marginal, axis=1)[:, :7].tolist()


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


@pytest.mark.parametrize("products", [pair_products, gather_products])
def test_products_of_pairs_are_elements_of_the_whole_product(products):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 9, generator=generator, dtype=torch.float64) for n in (5, 7))
    wanted = torch.rand(5, 7, generator=generator) < 0.4
    wanted[2] = False
    bounds = torch.cat([torch.zeros(1).long(), wanted.sum(dim=1).cumsum(0)])
    found = products(left, right, bounds, wanted.nonzero()[:, 1])
    torch.testing.assert_close(found, (left @ right.mT)[wanted])


@pytest.mark.parametrize("l", [0, 3])
def test_each_row_is_evaluated_against_its_own_candidates(l):
    """Whichever rows come along with it."""
    parameters = make_mixture(K=60, l=l)
    x, search = draw_rows(parameters, 50), CandidateSearch(make_screen(parameters), 9)
    log_weights = parameters.log_weights
    block = search.evaluate(x, x.square(), parameters, log_weights)
    joint, Y = project(x, joint_operands(parameters))
    assert block.components.tolist() == search.rank(x, log_weights, 9).tolist()
    torch.testing.assert_close(block.joint, joint.gather(1, block.components))
    rows = torch.arange(50).unsqueeze(1)
    torch.testing.assert_close(block.Y, Y[rows, block.components])
    alone = search.evaluate(x[7:8], x[7:8].square(), parameters, log_weights)
    assert alone.components.tolist() == block.components[7:8].tolist()
    torch.testing.assert_close(alone.joint, block.joint[7:8])


def test_one_gaussian_has_the_covariance_of_the_mixture():
    """With as many directions as features, all of it; with fewer, more than its variances."""
    for d in (8, 40):
        parameters = make_mixture(K=30, d=d)
        pi, mu = numpy(parameters.log_weights.exp()), numpy(parameters.means)
        centred = mu - pi @ mu
        total = np.einsum("k,kde->de", pi, covariances(parameters)) + centred.T @ (
            pi[:, None] * centred
        )

        def score(covariance: np.ndarray, d: int = d) -> float:
            return -0.5 * (d * np.log(2 * np.pi * np.e) + np.linalg.slogdet(covariance)[1])

        base = float(score_one_gaussian(parameters, find_directions(parameters)[1]))
        if d == 8:
            assert base == pytest.approx(score(total), rel=1e-6)
        else:
            assert score(np.diag(np.diag(total))) < base < score(total)


def test_probes_estimate_the_loss_of_each_number_of_candidates():
    parameters, counts = make_mixture(K=90, spread=0.7), (1, 4, 20)
    x, weights = draw_rows(parameters, 64), torch.arange(64).remainder(3).double()
    search = CandidateSearch(make_screen(parameters), 30, counts)
    found = expected_statistics(parameters, x, weights, search=search, n_probes=64).screening
    joint, w = numpy(full(parameters, x)), weights.numpy()
    order = search.rank(x, parameters.log_weights, 20).numpy()
    few = np.take_along_axis(joint, order, axis=1)
    every = logsumexp(joint, axis=1)
    losses = [w @ (every - logsumexp(few[:, :n], axis=1)) for n in counts]
    expected = [*losses, w @ (every - float(search.screen.base)), w.sum()]
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)
    assert losses[0] > losses[1] > losses[2] > 0


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
        estimate = float(lost[0] / lost[-1])
        # Half of the rows show what all of them lose.
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


def test_rows_far_out_are_evaluated_too():
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


def test_rows_are_ranked_and_components_evaluated_in_parts():
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

    in_parts = search._replace(rank_elements=4000, pair_elements=4000, part_elements=1000)
    for ours, theirs in zip(results(in_parts), results(search), strict=True):
        torch.testing.assert_close(ours, theirs)
    # Most parts of the components have no candidate of a row alone.
    one, alone = (some._replace(n_candidates=3) for some in (search, in_parts))
    for ours, theirs in zip(
        alone.find_best(x[:1], parameters), one.find_best(x[:1], parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_screen_is_small():
    assert table_size(784) == 153
    assert table_size(3) == 10
