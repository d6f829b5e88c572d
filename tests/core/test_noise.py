"""Steps under shared noise variances, against EM with dense matrices in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import multivariate_normal
from torch import Tensor

from factormix.core.averages import (
    Averages,
    StepOptions,
    natural_step,
    prediction_widths,
    rotate_averages,
    tied_width,
)
from factormix.core.expectation import expected_statistics
from factormix.core.inspection import n_free_parameters
from factormix.core.noise import Noise
from factormix.core.parameters import Parameters, loadings
from mixtures import FLOOR, draw_rows, make_bound, make_mixture

K, D, L, N = 3, 5, 2, 60
BOUND = make_bound(D)
SHARED = ["tied", "isotropic"]


def start(kind: str, l: int = L, seed: int = 0, k: int = K) -> tuple[Averages, Parameters]:
    """Make running averages of a random mixture with shared noise, and its parameters."""
    generator = torch.Generator().manual_seed(seed)
    Theta = torch.randn(k, l + 1, D, generator=generator, dtype=torch.float64)
    weights = torch.arange(1, k + 1, dtype=torch.float64)
    weights /= weights.sum()
    V = torch.rand(k, D, generator=generator, dtype=torch.float64) + 0.5
    V = Noise(kind).pool(V, weights).clone()
    return rotate_averages(Averages(Theta, V, weights), BOUND, FLOOR)


def wide_rows(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, D, generator=generator, dtype=torch.float64) * torch.arange(1, D + 1)


def dense_em(parameters: Parameters, x: np.ndarray, kind: str) -> tuple[np.ndarray, ...]:
    """Take a step of EM with dense matrices; return weights, means, covariances and noise."""
    mu, Lambda = parameters.means.numpy(), loadings(parameters).numpy()
    variances = 1 / parameters.precision_diag.numpy()
    Sigma = Lambda @ np.swapaxes(Lambda, 1, 2) + variances[:, :, None] * np.eye(D)
    joint = [multivariate_normal(m, S).logpdf(x) for m, S in zip(mu, Sigma, strict=True)]
    R = softmax(np.stack(joint, axis=1) + parameters.log_weights.numpy(), axis=1)
    means, explained, residuals = [], [], []
    for k, r in enumerate(R.T):
        beta = Lambda[k].T @ np.linalg.inv(Sigma[k])
        z = np.column_stack([(x - mu[k]) @ beta.T, np.ones(len(x))])
        A = (r[:, None] * z).T @ z
        A[:L, :L] += r.sum() * (np.eye(L) - beta @ Lambda[k])
        B = (r[:, None] * x).T @ z
        solution = B @ np.linalg.inv(A)
        # The residual variance of each feature, expected over z.
        V = (r @ x**2 - 2 * (solution * B).sum(1) + ((solution @ A) * solution).sum(1)) / r.sum()
        means.append(solution[:, L])
        explained.append(solution[:, :L] @ solution[:, :L].T)
        residuals.append(V)
    weights, V = R.mean(axis=0), np.array(residuals)
    shared = weights @ V if kind == "tied" else V.mean(axis=1, keepdims=True)
    noise = np.broadcast_to(shared, V.shape)
    return weights, np.array(means), np.array(explained) + noise[:, :, None] * np.eye(D), noise


@pytest.mark.parametrize("kind", SHARED)
def test_a_step_of_rate_one_is_dense_em(kind):
    averages, parameters = start(kind)
    x = wide_rows()
    weights, means, covariances, noise = dense_em(parameters, x.numpy(), kind)
    options = StepOptions(1.0, BOUND, FLOOR, expand=False, noise=Noise(kind))
    _, after = natural_step(averages, parameters, expected_statistics(parameters, x), options)
    np.testing.assert_allclose(after.log_weights.exp(), weights, rtol=1e-9)
    np.testing.assert_allclose(after.means, means, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(1 / after.precision_diag, noise, rtol=1e-7)
    Lambda = loadings(after)
    ours = Lambda @ Lambda.mT + (1 / after.precision_diag).diag_embed()
    np.testing.assert_allclose(ours, covariances, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("hasten", [False, True])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("l", [0, 2, 4])
def test_steps_of_rate_one_never_lower_the_likelihood(kind, expand, hasten, l):
    averages, parameters = start(kind, l)
    x, before = wide_rows(), -np.inf
    options = StepOptions(1.0, BOUND, FLOOR, expand=expand, hasten=hasten, noise=Noise(kind))
    for _ in range(40):
        found = expected_statistics(parameters, x)
        assert float(found.log_likelihood) >= before - 1e-9
        before = float(found.log_likelihood)
        averages, parameters = natural_step(averages, parameters, found, options)
        along = 0 if kind == "tied" else 1
        E = parameters.precision_diag
        assert torch.equal(E.amin(dim=along), E.amax(dim=along))


@pytest.mark.parametrize("kind", SHARED)
def test_the_noise_of_many_batches_is_the_mean_of_the_noise_of_each_component(kind):
    """Keeping V at its mean loses nothing, because averages over rows and means commute."""
    generator = torch.Generator().manual_seed(0)
    averages, parameters = start(kind, 0)
    own = averages.V * averages.weight.unsqueeze(1)
    options = StepOptions(0.3, BOUND, FLOOR, noise=Noise(kind))
    for _ in range(3):
        x = 2 * torch.randn(N, D, generator=generator, dtype=torch.float64)
        found = expected_statistics(parameters, x)
        R = parameters.log_weights + torch.stack(
            [
                torch.distributions.Normal(m, E.rsqrt()).log_prob(x).sum(dim=1)
                for m, E in zip(parameters.means, parameters.precision_diag, strict=True)
            ],
            dim=1,
        )
        R = R.softmax(dim=1)
        mu, weight = averages.Theta[:, 0].clone(), averages.weight.clone()
        r = R.mean(dim=0).unsqueeze(1)
        sums, squares = R.mT @ x / N, R.mT @ x.square() / N
        # Squares around the new mean of the old rows and the new ones.
        first = 0.7 * weight.unsqueeze(1) * mu + 0.3 * sums
        second = 0.7 * (own + weight.unsqueeze(1) * mu.square()) + 0.3 * squares
        total = 0.7 * weight.unsqueeze(1) + 0.3 * r
        own = second - first.square() / total
        averages, parameters = natural_step(averages, parameters, found, options)
        expected = own.sum(dim=0) if kind == "tied" else (own / total).mean(dim=1, keepdim=True)
        torch.testing.assert_close(averages.V, expected.expand(K, D))


def test_tied_noise_of_components_that_no_row_touched_follows():
    """Sums of some components give the step that sums of all give."""
    mixture = make_mixture(300, 20, 2)
    weight = mixture.log_weights.exp()
    V = Noise("tied").pool(1 / mixture.precision_diag, weight).clone()
    Theta = torch.cat([mixture.means.unsqueeze(1), loadings(mixture).mT], dim=1)
    bound = make_bound(20)
    averages, parameters = rotate_averages(Averages(Theta, V, weight), bound, FLOOR)
    found = expected_statistics(parameters, draw_rows(parameters, 50))
    assert found.sums.touched is not None
    assert len(found.sums.touched) < 300
    whole = copy.deepcopy(found)
    whole = whole._replace(sums=whole.sums.spread_to_all(300))
    options = StepOptions(0.2, bound, FLOOR, noise=Noise("tied"))
    same = copy.deepcopy((averages, parameters))
    _, expected = natural_step(*same, whole, options)
    _, after = natural_step(averages, parameters, found, options)
    torch.testing.assert_close(after, expected)
    assert torch.equal(after.precision_diag, after.precision_diag[:1].expand(300, 20))


def test_parts_of_the_components_have_the_tied_noise_of_all():
    V = torch.rand(7, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.arange(1.0, 8.0, dtype=torch.float64)
    sums = torch.cat([weight @ V, weight.sum().unsqueeze(0)])
    part = Noise("tied", lambda own: own + (sums - own)).pool(V[:3], weight[:3])
    expected = np.average(V.numpy(), axis=0, weights=weight.numpy())
    np.testing.assert_allclose(part, np.broadcast_to(expected, (3, D)))


def test_the_width_of_tied_noise_is_the_one_of_a_single_component_of_all_rows():
    weight = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    M = torch.rand(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = float(3 + (1 - M).sum())
    width = tied_width(weight, M, 500.0, Noise("tied"))
    assert float(width) == pytest.approx((500 + p) / (500 - p))
    widths = prediction_widths(weight, M, 500.0, Noise("tied", width=width))
    assert widths.tolist() == [float(width)] * 3


def test_isotropic_noise_obeys_the_largest_floor():
    bound = torch.tensor([4.0, 100.0, 25.0])
    assert Noise("isotropic").pool_bound(bound).tolist() == [4.0] * 3
    assert Noise("tied").pool_bound(bound) is bound


def test_free_parameters_count_each_variance_once():
    weights_means_loadings = 6 + 7 * (10 + 10 * 3 - 3)
    for kind, variances in {"component": 70, "tied": 10, "isotropic": 7}.items():
        assert n_free_parameters(7, 10, 3, kind) == weights_means_loadings + variances
