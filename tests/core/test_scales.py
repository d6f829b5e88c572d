"""Components in several scales, against dense computations in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, multivariate_t
from torch import Tensor

from factormix.core import density, scales
from factormix.core.averages import Averages, StepOptions, natural_step, rotate_averages
from factormix.core.expectation import expected_statistics
from factormix.core.parameters import Parameters, loadings
from factormix.training.solvers.covariance import begin_scales, move_scales_
from mixtures import FLOOR, assert_same_statistics, latent_sums, make_bound

K, D, L, S = 3, 5, 2, 4
BOUND = make_bound(D)


def start(l: int = L, seed: int = 0) -> tuple[Averages, Parameters, Tensor]:
    """Make running averages of a random mixture, its parameters, and weights of all scales."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    weights = random(K, S)
    weights /= weights.sum()
    averages = Averages(4 * random(K, l + 1, D) - 2, random(K, D) + 0.5, weights.sum(dim=1))
    return *rotate_averages(averages, BOUND, FLOOR), weights


def rows(n: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, D, generator=generator, dtype=torch.float64) * 3


def dense_joint(parameters: Parameters, weights: Tensor, x: Tensor) -> np.ndarray:
    """Compute ``log w_ks + log N(x; mu_k, c_s Sigma_k)``, (B, K, S), from covariances."""
    Lambda, mu = loadings(parameters).numpy(), parameters.means.numpy()
    noise, c = 1 / parameters.precision_diag.numpy(), scales.scale_values(S, x).numpy()
    joint = np.empty((len(x), K, S))
    for k in range(K):
        Sigma = np.diag(noise[k]) + Lambda[k] @ Lambda[k].T
        for s in range(S):
            density = multivariate_normal(mu[k], c[s] * Sigma).logpdf(x.numpy())
            joint[:, k, s] = np.log(weights[k, s].item()) + density
    return joint


def test_scales_are_around_one_and_evenly_apart():
    c = scales.scale_values(11, torch.zeros(1, dtype=torch.float64))
    assert c[3] == pytest.approx(1)
    torch.testing.assert_close(c[1:] / c[:-1], torch.full_like(c[1:], scales.STEP))


@pytest.mark.parametrize("n", [40, 4000])
def test_statistics_equal_those_of_the_expanded_mixture_by_inverse_scales(n: int):
    """4,000 rows are summed by pairs of a row and a component, 40 by products."""
    _, parameters, weights = start()
    x, c = rows(n), scales.scale_values(S, weights)
    found = expected_statistics(parameters, x, scales=weights)
    joint = dense_joint(parameters, weights, x)
    total = logsumexp(joint, axis=(1, 2))
    R = torch.from_numpy(np.exp(joint - total[:, None, None]))
    assert found.log_likelihood.item() == pytest.approx(total.sum(), rel=1e-10)
    torch.testing.assert_close(found.scales, R.sum(dim=0), rtol=1e-5, atol=1e-5)
    U = (R / c).sum(dim=2)
    A, B, S_ = latent_sums(found, K)
    torch.testing.assert_close(S_, U.mT @ x.square(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(A[:, 0, 0], U.sum(dim=0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(B[:, 0], U.mT @ x, rtol=1e-5, atol=1e-4)
    # The regression on z of rows that count by U.
    Lambda, P = loadings(parameters), parameters.precision_diag
    for k in range(K):
        covariance = torch.diag(1 / P[k]) + Lambda[k] @ Lambda[k].mT
        z = (x - parameters.means[k]) @ torch.linalg.inv(covariance) @ Lambda[k]
        torch.testing.assert_close(B[k, 1:], (U[:, k, None] * z).mT @ x, rtol=1e-5, atol=1e-4)


def test_sample_weights_count_rows_again():
    _, parameters, weights = start()
    x, counts = rows(50), torch.arange(50) % 3
    once = expected_statistics(parameters, x, counts.to(x), scales=weights)
    again = expected_statistics(parameters, x.repeat_interleave(counts, dim=0), scales=weights)
    assert_same_statistics(once, again, K)


def test_the_expanded_mixture_has_the_density_of_all_scales():
    _, parameters, weights = start()
    x, whole = rows(30), scales.expanded(parameters, weights)
    assert whole.shape == (K * S, D, L)
    found = density.joint_log_prob(x, density.operands(whole))
    expected = dense_joint(parameters, weights, x).reshape(len(x), K * S)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


def test_a_scale_without_rows_is_representable_and_stays():
    _, parameters, weights = start()
    weights[:, 0] = 0
    found = expected_statistics(parameters, rows(40), scales=weights)
    assert found.log_likelihood.isfinite()
    weights = move_scales_(weights, found, 0.5, 1e-8)
    assert (weights > 0).all()
    assert torch.isfinite(scales.expanded(parameters, weights).logits).all()


def test_steps_find_shape_and_scales_of_rows_with_heavy_tails():
    """Student's t with 3 degrees of freedom, of which scales are a mixture."""
    generator = np.random.default_rng(0)
    n = 20_000
    shape = generator.normal(size=(D, D))
    tails = 3 / generator.chisquare(3, size=n)
    x = torch.from_numpy((generator.normal(size=(n, D)) @ shape) * np.sqrt(tails)[:, None])
    likelihoods = {}
    for n_scales in (1, 11):
        Theta = torch.cat([torch.zeros(1, 1, D), torch.randn(1, 4, D)], dim=1).double()
        averages = Averages(Theta, torch.ones(1, D).double() * 5, torch.ones(1).double())
        averages, parameters = rotate_averages(averages, BOUND, FLOOR)
        weights = begin_scales(averages, n_scales, 0.5)
        for _ in range(100):
            found = expected_statistics(parameters, x, scales=weights)
            options = StepOptions(1.0, BOUND, FLOOR, hasten=True)
            averages, parameters = natural_step(averages, parameters, found, options)
            weights = move_scales_(weights, found, 1.0, 1e-8)
        likelihoods[n_scales] = found.log_likelihood.item() / n
    truth = multivariate_t(np.zeros(D), shape.T @ shape, df=3).logpdf(x.numpy()).mean()
    assert likelihoods[11] == pytest.approx(truth, abs=0.01)
    assert likelihoods[1] < truth - 0.2
