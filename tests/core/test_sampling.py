"""Samples have the moments of the model; the bounds are five standard errors of each statistic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from factormix.core.density import decode, sample
from oracles import numpy, random_case

N = 20_000
SIGMAS = 5


def check_mean(x: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> None:
    error = np.sqrt(np.diag(covariance) / len(x))
    assert (np.abs(x.mean(axis=0) - mean) <= SIGMAS * error + 1e-9).all()


def check_covariance(x: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> None:
    """The standard error of a Gaussian's sample covariance follows from Isserlis' theorem."""
    computed = (x - mean).T @ (x - mean) / len(x)
    variances = np.diag(covariance)
    error = np.sqrt((np.outer(variances, variances) + covariance**2) / len(x))
    assert (np.abs(computed - covariance) <= SIGMAS * error + 1e-9).all()


@pytest.mark.parametrize("l", [0, 1, 3])
@pytest.mark.parametrize("noise", [True, False])
def test_samples_of_a_component_have_its_mean_and_covariance(l, noise, generator):
    case = random_case(3, 5, l)
    mixture = case.mixture
    Lambda = numpy(mixture.loadings)
    for k in range(3):
        covariance = case.dense.Sigma[k] if noise else Lambda[k] @ Lambda[k].T
        x = mixture.sample(N, component=k, noise=noise, generator=generator)
        assert x.shape == (N, 5)
        assert x.dtype == torch.float64
        check_mean(numpy(x), case.dense.means[k], covariance)
        check_covariance(numpy(x), case.dense.means[k], covariance)


def test_samples_without_noise_lie_in_the_span_of_the_loadings(generator):
    case = random_case(2, 6, 2, largest_share=0.9, seed=3)
    mixture = case.mixture
    for k in range(2):
        x = mixture.sample(50, component=k, noise=False, generator=generator) - mixture.means[k]
        basis = torch.linalg.qr(mixture.loadings[k]).Q
        assert (x - x @ basis @ basis.mT).abs().max() < 1e-12


def test_components_are_drawn_by_their_weights(generator):
    case = random_case(5, 3, 2)
    x, components = sample(case.mixture.precision_form, N, generator=generator)
    p = case.dense.weights / case.dense.weights.sum()
    counts = np.bincount(components.numpy(), minlength=5)
    assert (np.abs(counts - N * p) <= SIGMAS * np.sqrt(N * p * (1 - p))).all()
    for k in np.flatnonzero(counts > 100):
        own = numpy(x[components == k])
        check_mean(own, case.dense.means[k], case.dense.Sigma[k])
        check_covariance(own, case.dense.means[k], case.dense.Sigma[k])


def test_samples_of_the_mixture_have_its_mean(generator):
    case = random_case(4, 4, 2)
    p = case.dense.weights / case.dense.weights.sum()
    mean = p @ case.dense.means
    apart = case.dense.means - mean
    covariance = np.einsum("k,kij->ij", p, case.dense.Sigma + apart[:, :, None] * apart[:, None, :])
    check_mean(numpy(case.mixture.sample(N, generator=generator)), mean, covariance)


def test_the_mean_log_density_of_samples_is_minus_the_entropy(generator):
    """For a Gaussian, ``-log p`` of a sample has variance d/2 around the entropy."""
    d = 6
    case = random_case(2, d, 3)
    for k in range(2):
        x = case.mixture.sample(N, component=k, generator=generator)
        entropy = 0.5 * (d * np.log(2 * np.pi * np.e) + np.linalg.slogdet(case.dense.Sigma[k])[1])
        mean = case.mixture.component_log_prob(x)[:, k].mean().item()
        assert abs(mean + entropy) <= SIGMAS * np.sqrt(d / 2 / N)


def test_a_seed_fixes_the_samples():
    mixture = random_case(3, 4, 2).mixture
    first, again, other = (
        mixture.sample(10, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(4)
    unseeded = mixture.sample(10)
    torch.manual_seed(4)
    assert torch.equal(mixture.sample(10), unseeded)


def test_samples_carry_no_graph_and_none_is_fine():
    mixture = random_case(3, 4, 2, dtype=torch.float32).mixture
    drawn = mixture.sample(2)
    assert not drawn.requires_grad
    assert drawn.dtype == torch.float32
    assert mixture.sample(0).shape == (0, 4)
    assert mixture.sample(0, component=1, noise=False).shape == (0, 4)


def test_decode_is_the_generative_mean(generator):
    mixture = random_case(3, 4, 2).mixture
    values = mixture.precision_form
    z = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    components = torch.randint(3, (20,), generator=generator)
    means = mixture.means.detach().clone()
    decoded = decode(values, z, components).detach()
    for row, code, k in zip(decoded, z, components, strict=True):
        expected = numpy(means[k]) + numpy(mixture.loadings[k]) @ numpy(code)
        np.testing.assert_allclose(numpy(row), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(mixture.means, means), "the means themselves stay as they are"
    diagonal = random_case(3, 4, 0).mixture
    decoded = decode(diagonal.precision_form, torch.zeros(20, 0), components)
    assert torch.equal(decoded, diagonal.means[components])
