"""Statistics of a batch, against dense computations and sums over all pairs in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from factormix.core.arrays import Workspace
from factormix.core.expectation import expected_statistics
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters, loadings
from factormix.core.statistics import (
    LatentSums,
    Pairs,
    ProductSums,
    ProjectionSums,
    Tuning,
    sum_pairs,
)
from mixtures import assert_same_statistics, draw_rows, latent_sums, make_mixture, sum_all_pairs
from oracles import LargestTensor

K, D, L, N = 3, 5, 2, 60
SUMS = {
    "by pairs": {"K": 300},
    "by dense products": {"K": 120, "spread": 0.02},
    "by products of features": {"K": 80, "d": 12, "l": 9},
    "by products of features, dense": {"K": 80, "d": 12, "l": 9, "spread": 0.02},
}
"""Mixtures for each way of summing a batch."""


def small_mixture(l: int = L) -> Parameters:
    """Make a mixture of three components that overlap."""
    return make_mixture(K=K, d=D, l=l, spread=1.0)


def wide_rows() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, D, generator=generator, dtype=torch.float64) * 1.5


def dense_statistics(parameters: Parameters, x: Tensor) -> tuple[np.ndarray, ...]:
    """Compute the log-likelihood, A, B and S from d x d covariances, component by component."""
    pi = parameters.log_weights.exp().numpy()
    Lambda, mu = loadings(parameters).numpy(), parameters.means.numpy()
    noise = 1 / parameters.precision_diag.numpy()
    X, l = x.numpy(), Lambda.shape[2]
    Sigma = [np.diag(noise[k]) + Lambda[k] @ Lambda[k].T for k in range(K)]
    joint = np.stack(
        [pi[k] * multivariate_normal(mu[k], Sigma[k]).pdf(X) for k in range(K)], axis=1
    )
    R = joint / joint.sum(axis=1, keepdims=True)
    A, B = np.zeros((K, l + 1, l + 1)), np.zeros((K, l + 1, D))
    for k in range(K):
        gain = Lambda[k].T @ np.linalg.inv(Sigma[k])
        covariance = np.eye(l) - gain @ Lambda[k]
        one_z = np.concatenate([np.ones((len(X), 1)), (X - mu[k]) @ gain.T], axis=1)
        A[k] = (R[:, k, None] * one_z).T @ one_z
        A[k, 1:, 1:] += R[:, k].sum() * covariance
        B[k] = (R[:, k, None] * one_z).T @ X
    return np.log(joint.sum(axis=1)).sum(), A, B, R.T @ X**2


@pytest.mark.parametrize("l", [0, 1, 2, 3])
def test_statistics_equal_dense_ones(l):
    parameters, x = small_mixture(l), wide_rows()
    found = expected_statistics(parameters, x)
    assert float(found.n_samples) == N
    ours = (found.log_likelihood, *latent_sums(found, K))
    for one, other in zip(ours, dense_statistics(parameters, x), strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-9, atol=1e-9)


def test_weights_count_as_repetitions():
    parameters, x = small_mixture(), wide_rows()
    times, candidates = torch.arange(N) % 3, torch.tensor([True, True, False])
    weighted = expected_statistics(parameters, x, times.double(), candidates=candidates)
    repeated = x.repeat_interleave(times, dim=0)
    assert_same_statistics(
        weighted, expected_statistics(parameters, repeated, candidates=candidates), K
    )


def test_statistics_of_parts_add_up():
    parameters, x = small_mixture(), wide_rows()
    candidates = torch.tensor([True, True, False])
    whole, first, second = (
        expected_statistics(parameters, part, candidates=candidates) for part in (x, x[:13], x[13:])
    )
    assert_same_statistics(first.add(second), whole, K)


def test_removal_losses_are_the_likelihood_that_rows_lose():
    parameters, x = small_mixture(), 10 * wide_rows()
    times = (torch.arange(N) % 3).double()
    candidates = torch.tensor([True, False, True])
    removal = expected_statistics(parameters, x, times, candidates=candidates).removal
    assert removal is not None
    mixture = PrecisionMixture.from_parameters(parameters)
    winner = mixture.responsibilities(x).argmax(dim=1)

    def loss_without(removed: list[int], k: int) -> float:
        """Compute the loss of the rows that component k explains best."""
        rest = [j for j in range(K) if j not in removed]
        left = PrecisionMixture.from_parameters(Parameters(*(t[rest] for t in parameters)))
        # The remaining weights add up to less than one.
        without = left.log_prob(x) + parameters.log_weights[rest].logsumexp(dim=0)
        return ((mixture.log_prob(x) - without)[winner == k] @ times[winner == k]).item()

    for k in range(K):
        assert float(removal[0][k]) == pytest.approx(loss_without([k], k), rel=0.02, abs=0.5)
    for k in (0, 2):
        expected = loss_without([0, 2], k)
        assert float(removal[1][k]) == pytest.approx(expected, rel=0.02, abs=0.5)
    assert removal[1][1] == 0


def test_twins_cost_much_together_where_each_costs_little_alone():
    twins = Parameters(*(t[[0, 1, 2, 2]] for t in make_mixture(K=K, d=D, l=L, spread=5.0)))
    x = twins.means[2:3] + 0.1 * wide_rows()[:20]
    candidates = torch.tensor([False, False, True, True])
    removal = expected_statistics(twins, x, candidates=candidates).removal
    assert removal is not None
    assert removal[0][2:].sum() < 1.0 * len(x)
    assert removal[1].sum() > 2 * removal[0][2:].sum()


@pytest.mark.parametrize("l", [0, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_pairs_that_matter_give_the_sums_over_all_pairs(l, weighted):
    parameters = make_mixture(K=300, l=l)
    x = draw_rows(parameters, 100)
    times = np.arange(100) % 3 if weighted else np.ones(100)
    weights = torch.from_numpy(times).double() if weighted else None
    found = expected_statistics(parameters, x, weights)
    assert found.sums.touched is not None, "most of 300 components have no row of 100"
    assert float(found.n_samples) == times.sum()
    expected = sum_all_pairs(parameters, x, times)
    for ours, theirs in zip(latent_sums(found, 300), expected, strict=True):
        # Each pair that is left out has less than a millionth of a row.
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6 * times.sum())


def test_where_many_pairs_matter_none_is_left_out():
    parameters = make_mixture(K=120, spread=0.02)
    x = draw_rows(parameters, 200)
    found = expected_statistics(parameters, x)
    assert found.sums.touched is None
    expected = sum_all_pairs(parameters, x, np.ones(200))
    for ours, theirs in zip(latent_sums(found, 120), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("spread", [3.0, 0.02])
def test_products_of_features_give_the_sums_over_all_pairs(spread, weighted):
    """Means far apart leave few pairs that matter; means close together leave all of them."""
    parameters = make_mixture(K=80, d=12, l=9, spread=spread)
    x = draw_rows(parameters, 300)
    times = np.arange(300) % 3 if weighted else np.ones(300)
    weights = torch.from_numpy(times).double() if weighted else None
    found = expected_statistics(parameters, x, weights, work=Workspace())
    expected = sum_all_pairs(parameters, x, times)
    for ours, theirs in zip(latent_sums(found, 80), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-3)


def test_components_that_no_row_touches_have_no_sums():
    parameters = make_mixture(K=80, d=12, l=9, spread=8.0)
    x = draw_rows(parameters, 150)[:20].repeat(10, 1)
    found = expected_statistics(parameters, x)
    assert found.sums.touched is not None
    assert len(found.sums.touched) < 80
    expected = sum_all_pairs(parameters, x, np.ones(200))
    for ours, theirs in zip(latent_sums(found, 80), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-3)


def test_rows_are_taken_in_parts_where_features_are_few():
    """With many factors, the projections of all rows would cost more than the products."""
    parameters = make_mixture(K=200, d=40, l=15)
    x = draw_rows(parameters, 600)
    with LargestTensor() as largest:
        found = expected_statistics(parameters, x, convert=False)
    assert isinstance(found.sums, ProjectionSums)
    assert largest.numel < 600 * 200 * 15 / 1.5
    found = found._replace(sums=found.sums.to_latent(parameters))
    expected = sum_all_pairs(parameters, x, np.ones(600))
    for ours, theirs in zip(latent_sums(found, 200), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-3)


def test_products_of_features_need_no_projections_of_every_row():
    parameters = make_mixture(K=80, d=12, l=9)
    x = draw_rows(parameters, 2000)
    with LargestTensor() as largest:
        expected_statistics(parameters, x)
    assert largest.numel <= max(2000 * 80, 2000 * 12 * 13 / 2)


def test_products_of_a_large_batch_are_formed_in_parts():
    parameters = make_mixture(K=80, d=12, l=9)
    x, weights = draw_rows(parameters, 900), torch.arange(900).remainder(3).double()
    whole = expected_statistics(parameters, x, weights)
    tuning = Tuning(products=200 * 12 * 13 // 2)
    with LargestTensor() as largest:
        found = expected_statistics(parameters, x, weights, tuning=tuning)
    assert largest.numel < len(x) * 12 * 13 / 2
    for ours, theirs in zip(found.totals, whole.totals, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(latent_sums(found, 80), latent_sums(whole, 80), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("way", list(SUMS))
def test_sums_can_be_converted_after_they_are_added(way):
    parameters = make_mixture(**SUMS[way])
    x = draw_rows(parameters, 300)
    parts = [expected_statistics(parameters, part, convert=False) for part in torch.split(x, 180)]
    total = parts[0].add(parts[1])
    assert isinstance(total.sums, ProductSums if "features" in way else ProjectionSums)
    assert (total.sums.touched is None) == ("dense" in way or "features" in way)
    latent = total.sums.to_latent(parameters)
    assert isinstance(latent, LatentSums)
    assert latent.to_latent(parameters) is latent
    ours = latent_sums(total._replace(sums=latent), len(parameters.means))
    for one, other in zip(ours, sum_all_pairs(parameters, x, np.ones(300)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-3)


def test_sums_of_some_components_add_to_sums_of_others_and_of_all():
    parameters = make_mixture(K=400)
    x = draw_rows(parameters, 240)
    parts = [expected_statistics(parameters, part).sums for part in torch.split(x, 80)]
    touched = [part.touched for part in parts]
    assert all(numbers is not None for numbers in touched)
    spread = [part.spread_to_all(400) for part in parts]
    expected = {name: sum(part.tensors[name] for part in spread) for name in spread[0].tensors}
    some = parts[0].add(parts[1]).add(parts[2])
    assert some.touched is not None
    assert some.touched.tolist() == sorted(set(torch.cat(touched).tolist()))
    mixed = spread[0].add(parts[1]).add(spread[2])
    assert mixed.touched is None
    for found in (some.spread_to_all(400), mixed):
        for name, tensor in found.tensors.items():
            torch.testing.assert_close(tensor, expected[name])


def test_pairs_are_summed_by_component():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    rows, components = torch.tensor([3, 1, 1, 9, 3]), torch.tensor([5, 2, 5, 2, 7])
    shares = torch.rand(5, generator=generator, dtype=torch.float64)
    Y = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    pairs = Pairs(rows, components, shares, Y)
    touched, *sums = sum_pairs(pairs, x, x.square())
    assert touched.tolist() == [2, 5, 7]
    first, B, S = sums
    for i, k in enumerate([2, 5, 7]):
        own = components == k
        one_y = torch.cat([torch.ones(int(own.sum()), 1).double(), Y[own]], dim=1)
        weighted = one_y * shares[own, None]
        torch.testing.assert_close(first[i], weighted.sum(dim=0))
        torch.testing.assert_close(B[i], weighted.mT @ x[rows[own]])
        torch.testing.assert_close(S[i], shares[own] @ x[rows[own]].square())
    touched, *of_all = sum_pairs(pairs, x, x.square(), 9)
    assert touched is None
    for every, some in zip(of_all, sums, strict=True):
        assert len(every) == 9
        assert torch.equal(every[[2, 5, 7]], some)
        assert not every[[0, 1, 3, 4, 6, 8]].any()
