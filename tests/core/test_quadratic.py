"""Log-densities and sums by products of two features, against dense computations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from torch import Tensor

from conftest import LargestTensor, dense_precision
from factormix.core import density, expectation, quadratic
from factormix.core.arrays import Workspace
from factormix.core.expectation import expected_statistics
from factormix.core.parameters import Parameters
from many import brute, drawn, many

K, D, L = 80, 12, 9


def mixture(spread: float = 3.0, dtype: torch.dtype = torch.float64) -> Parameters:
    return many(K=K, d=D, l=L, spread=spread, dtype=dtype)


def dense_log_prob(parameters: Parameters, x: Tensor) -> np.ndarray:
    """Compute ``log p_k(x)``, (B, K), from covariances."""
    mu = parameters.means.double().numpy()
    P = dense_precision(parameters.precision_diag.double(), parameters.precision_factors.double())
    covariances = np.linalg.inv(P)
    return np.stack(
        [multivariate_normal(mu[k], covariances[k]).logpdf(x.double().numpy()) for k in range(K)],
        axis=1,
    )


def test_it_is_for_few_features_with_factors_for_more_than_half_of_them():
    assert quadratic.pays((800, 63, 50))
    assert quadratic.pays((K, D, L))
    assert not quadratic.pays((800, 63, 20))
    assert not quadratic.pays((800, 784, 500))
    assert not quadratic.pays((5, 63, 50))


@pytest.mark.parametrize("work", [None, Workspace()])
def test_products_are_those_of_two_features_each(work: Workspace | None):
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = quadratic.feature_products(x, work)
    expected = [x[:, i] * x[:, j] for i in range(4) for j in range(i + 1)]
    assert torch.equal(found, torch.stack(expected, dim=1))


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-3)])
def test_log_densities_are_those_of_dense_gaussians(centre, dtype, tolerance):
    parameters = mixture(dtype=dtype)
    x = drawn(parameters, 50)
    ops = density.operands(parameters, centre=centre, without_y=True)
    assert ops.forms is not None
    found = density.component_log_prob(x, ops)
    expected = dense_log_prob(parameters, x)
    assert found.dtype == dtype
    best = expected.argmax(axis=1)
    rows = np.arange(len(x))
    np.testing.assert_allclose(found.numpy()[rows, best], expected[rows, best], atol=tolerance)
    np.testing.assert_allclose(
        density.log_prob(x, ops),
        logsumexp(expected + parameters.log_weights.numpy(), axis=1),
        atol=tolerance,
    )


def test_log_densities_have_the_gradients_of_those_by_y():
    parameters = mixture()
    x = drawn(parameters, 9)
    gradients = []
    for without_y in (False, True):
        leaves = [t.clone().requires_grad_() for t in (*parameters[1:4], x)]
        used = parameters._replace(
            means=leaves[0], precision_diag=leaves[1], precision_factors=leaves[2]
        )
        ops = density.operands(used, without_y=without_y)
        gradients.append(torch.autograd.grad(density.log_prob(leaves[3], ops).sum(), leaves))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("spread", [3.0, 0.02])
def test_sums_of_a_batch_are_those_of_all_pairs(spread, weighted):
    """Means far apart leave few pairs that matter; means close together leave all of them."""
    parameters = mixture(spread)
    x = drawn(parameters, 300)
    times = np.arange(300) % 3 if weighted else np.ones(300)
    weights = torch.from_numpy(times).double() if weighted else None
    found = expected_statistics(parameters, x, weights, work=Workspace()).whole(K)
    for ours, theirs in zip(found[2:5], brute(parameters, x, times), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-3)
    parts = [
        expected_statistics(parameters, part, some, finish=False)
        for part, some in zip(
            torch.split(x, 200),
            (None, None) if weights is None else torch.split(weights, 200),
            strict=True,
        )
    ]
    later = parts[0].joined(parts[1]).finished(parameters).whole(K)
    for ours, theirs in zip(later[2:5], found[2:5], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-3)


def test_components_that_no_row_touched_have_no_sums():
    parameters = mixture(spread=8.0)
    x = drawn(parameters, 150)[:20].repeat(10, 1)
    found = expected_statistics(parameters, x)
    assert found.touched is not None
    assert len(found.touched) < K
    for ours, theirs in zip(found.whole(K)[2:5], brute(parameters, x, np.ones(200)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-3)


def test_nothing_has_y_of_every_row_and_component():
    parameters = mixture()
    x = drawn(parameters, 2000)
    with LargestTensor() as largest:
        expected_statistics(parameters, x)
    assert largest.numel <= max(len(x) * K, len(x) * D * (D + 1) / 2)


def test_products_of_a_large_batch_are_formed_in_parts(monkeypatch: pytest.MonkeyPatch):
    parameters = mixture()
    x, weights = drawn(parameters, 900), torch.arange(900).remainder(3).double()
    whole = expected_statistics(parameters, x, weights)
    monkeypatch.setattr(expectation, "PRODUCT_ELEMENTS", 200 * D * (D + 1) // 2)
    with LargestTensor() as largest:
        found = expected_statistics(parameters, x, weights)
    assert largest.numel < len(x) * D * (D + 1) / 2
    torch.testing.assert_close(found.n_samples, whole.n_samples)
    torch.testing.assert_close(found.log_likelihood, whole.log_likelihood)
    for ours, theirs in zip(found.whole(K)[2:5], whole.whole(K)[2:5], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
