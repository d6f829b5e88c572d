"""Wiener filters, compared with dense Gaussians in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import multivariate_normal, ortho_group

from factormix.core import wiener
from factormix.core.parameters import from_generative, loadings
from factormix.core.scales import expanded, scale_values
from factormix.core.wiener import diagonalise_covariances, filter_groups, filter_rows

S = 0.3


def _make_mixture(K: int, d: int, l: int):
    rng = np.random.default_rng(0)
    means, Lambda = rng.normal(size=(K, d)), rng.normal(size=(K, d, l))
    noise, logits = rng.uniform(0.1, 1, (K, d)), rng.normal(size=K)
    mixture = from_generative(*map(torch.from_numpy, (logits, means, Lambda, noise)))
    sigmas = Lambda @ Lambda.transpose(0, 2, 1) + noise[..., None] * np.eye(d)
    return mixture, logits, means, sigmas


def _check(found, kept, y, log_weights, means, sigmas, noise):
    """Compare with the conditional mean of the most probable dense Gaussian."""
    I = np.eye(y.shape[1])
    joint = np.stack(
        [
            w + multivariate_normal(m, s + noise * I).logpdf(y)
            for w, m, s in zip(log_weights, means, sigmas, strict=True)
        ]
    )
    assert len(set(joint.argmax(axis=0))) > 1 or len(means) == 1
    for row, k, result, share in zip(y, joint.argmax(axis=0), found, kept, strict=True):
        wiener = sigmas[k] @ np.linalg.inv(sigmas[k] + noise * I)
        np.testing.assert_allclose(result, means[k] + wiener @ (row - means[k]), atol=1e-10)
        np.testing.assert_allclose(share, np.trace(wiener), atol=1e-10)


@pytest.mark.parametrize(("K", "l"), [(1, 0), (3, 2), (70, 5)])
def test_the_filter_is_the_conditional_mean_of_a_dense_gaussian(K, l):
    clean, logits, means, sigmas = _make_mixture(K, 6, l)
    y = 2 * np.random.default_rng(1).normal(size=(50, 6))
    eigen = diagonalise_covariances(clean, torch.eye(6, dtype=torch.float64))
    found, kept = filter_rows(torch.from_numpy(y), eigen, S)
    _check(found.numpy(), kept.numpy(), y, logits, means, sigmas, S)


def test_kinds_in_scales_are_filtered_as_the_mixture_of_all():
    shape, _, means, sigmas = _make_mixture(3, 5, 2)
    weights = np.random.default_rng(2).uniform(0.1, 1, (3, 4))
    eigen = diagonalise_covariances(
        expanded(shape, torch.from_numpy(weights)), torch.eye(5, dtype=torch.float64), scales=4
    )
    c = scale_values(4, eigen.means).numpy()
    y = 2 * np.random.default_rng(1).normal(size=(50, 5))
    found, kept = filter_rows(torch.from_numpy(y), eigen, S)
    every = (sigmas[:, None] * c[:, None, None]).reshape(-1, 5, 5)
    _check(found.numpy(), kept.numpy(), y, np.log(weights).ravel(), means.repeat(4, 0), every, S)


def test_noise_is_taken_out_and_a_basis_gives_the_marginal():
    clean, logits, means, sigmas = _make_mixture(4, 6, 3)
    D = 1 / clean.precision_diag + S
    noisy = from_generative(clean.logits, clean.means, loadings(clean), D)
    basis = ortho_group.rvs(6, random_state=0)[:, :4]
    eigen = diagonalise_covariances(noisy, torch.from_numpy(basis), noise=S)
    y = 2 * np.random.default_rng(1).normal(size=(50, 4))
    found, kept = filter_rows(torch.from_numpy(y), eigen, S)
    marginal = basis.T @ sigmas @ basis
    _check(found.numpy(), kept.numpy(), y, logits, means @ basis, marginal, S)


def test_adapted_weights_are_those_of_dense_em():
    clean, logits, means, sigmas = _make_mixture(3, 6, 2)
    # Rows of one component, of which the mixture expects few.
    logits = np.array([2.0, 2.0, -2.0])
    clean = clean._replace(logits=torch.from_numpy(logits))
    rng = np.random.default_rng(1)
    noisy = [s + S * np.eye(6) for s in sigmas]
    y = np.concatenate(
        [rng.multivariate_normal(means[k], noisy[k], n) for k, n in ((0, 4), (2, 40))]
    )
    eigen = diagonalise_covariances(clean, torch.eye(6, dtype=torch.float64))
    found, kept = filter_rows(torch.from_numpy(y), eigen, S, adapt=True)
    densities = np.stack(
        [multivariate_normal(m, s).logpdf(y) for m, s in zip(means, noisy, strict=True)]
    )
    old = new = softmax(logits)
    for _ in range(wiener.ROUNDS):
        R = softmax(np.log(new)[:, None] + densities, axis=0)
        new = (1 - wiener.OWN_SHARE) * R.mean(axis=1) + wiener.OWN_SHARE * old
    assert new[2] > 0.8 > 0.1 > old[2]
    _check(found.numpy(), kept.numpy(), y, np.log(new), means, sigmas, S)


@pytest.mark.parametrize(("scale", "atol"), [(1, 1e-9), (1e5, 0.3)])
def test_groups_are_filtered_by_their_own_gaussians(scale, atol):
    rng = np.random.default_rng(0)
    known = scale * rng.normal(size=(4, 7, 9)) + rng.normal(size=(4, 1, 9))
    y = known + rng.normal(size=known.shape)
    found, kept = filter_groups(*(torch.from_numpy(t) for t in (y, known)))
    for group, rows, result, n in zip(known, y, found, kept, strict=True):
        mu, Sigma = group.mean(axis=0), np.cov(group.T)
        wiener = Sigma @ np.linalg.inv(Sigma + np.eye(9))
        np.testing.assert_allclose(result, mu + (rows - mu) @ wiener.T, atol=atol)
        assert float(n) == pytest.approx(np.trace(wiener), rel=1e-3)


def test_a_component_without_weight_stays_without():
    clean, _, means, _ = _make_mixture(3, 6, 2)
    logits = np.array([0.0, 0.0, -500.0])
    clean = clean._replace(logits=torch.from_numpy(logits))
    y = means[2] + np.random.default_rng(1).normal(size=(50, 6))
    eigen = diagonalise_covariances(clean, torch.eye(6, dtype=torch.float64))
    eigen = eigen._replace(**{name: t.float() for name, t in eigen._asdict().items()})
    found, _ = filter_rows(torch.from_numpy(y).float(), eigen, S, adapt=True)
    assert torch.isfinite(found).all()
