"""Wiener filters, compared with dense Gaussians in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from factormix.core.parameters import covariances, from_generative
from factormix.core.wiener import add_noise, filter_rows

S = 0.3


@pytest.mark.parametrize(("K", "l"), [(1, 0), (3, 2), (70, 5)])
def test_the_filter_is_the_conditional_mean_of_a_dense_gaussian(K, l):
    rng, d = np.random.default_rng(0), 6
    means, loadings = rng.normal(size=(K, d)), rng.normal(size=(K, d, l))
    noise, logits = rng.uniform(0.1, 1, (K, d)), rng.normal(size=K)
    clean = from_generative(*map(torch.from_numpy, (logits, means, loadings, noise)))
    noisy = add_noise(clean, S)
    sigma = loadings @ loadings.transpose(0, 2, 1) + noise[:, :, None] * np.eye(d)
    np.testing.assert_allclose(covariances(noisy).numpy(), sigma + S * np.eye(d), atol=1e-12)
    y = 2 * rng.normal(size=(50, d))
    found = filter_rows(torch.from_numpy(y), noisy, S).numpy()
    joint = np.stack(
        [
            logits[k] + multivariate_normal(means[k], sigma[k] + S * np.eye(d)).logpdf(y)
            for k in range(K)
        ]
    )
    for row, k, result in zip(y, joint.argmax(axis=0), found, strict=True):
        expected = means[k] + sigma[k] @ np.linalg.solve(sigma[k] + S * np.eye(d), row - means[k])
        np.testing.assert_allclose(result, expected, atol=1e-10)
