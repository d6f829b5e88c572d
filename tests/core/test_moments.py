"""Means and variances of mixtures, against the dense computation."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given

from conftest import Case, assert_close, cases
from factormix.core.moments import component_variances, explained_shares, moments

DTYPES = (torch.float64,)


@given(cases(DTYPES))
def test_variances_are_those_of_the_dense_covariance(case: Case) -> None:
    with torch.no_grad():
        found = component_variances(case.mixture.precision_form)
    dense = np.diagonal(case.dense.Sigma, axis1=1, axis2=2)
    assert_close(found, dense, 1e-9)


@given(cases(DTYPES))
def test_moments_are_those_of_the_dense_mixture(case: Case) -> None:
    dense = case.dense
    pi = dense.weights / dense.weights.sum()
    mean = pi @ dense.means
    second = np.diagonal(dense.Sigma, axis1=1, axis2=2) + dense.means**2
    with torch.no_grad():
        found = moments(case.mixture.precision_form)
    assert_close(found.mean, mean, 1e-9)
    assert_close(found.variance, pi @ second - mean**2, 1e-8)


@given(cases(DTYPES))
def test_factors_and_noise_share_the_variance(case: Case) -> None:
    scale = np.linspace(0.5, 2, case.x.shape[1])
    mixture = case.mixture
    with torch.no_grad():
        shares = explained_shares(mixture.precision_form, torch.tensor(scale))
        D = mixture.noise_variances.numpy()
    total = (np.diagonal(case.dense.Sigma, axis1=1, axis2=2) / scale**2).sum(axis=1)
    noise = (D / scale**2).sum(axis=1) / total
    assert (shares >= 0).all()
    assert_close(shares.sum(dim=1), 1 - noise, 1e-8)
