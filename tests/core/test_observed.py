"""Densities of rows with missing entries, against dense Gaussians of the observed ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_normal

from conftest import TOLERANCE, LargestTensor, assert_close, cases, numpy, random_case
from factormix import InputError, PrecisionMixture
from factormix.core import missing as missing_module
from factormix.core.missing import exact_observed_joint, observed_joint, observed_operands


def all_patterns(d: int) -> torch.Tensor:
    """Return every mask of d entries, (2^d, d)."""
    return torch.tensor(list(itertools.product([False, True], repeat=d)))


def dense_log_prob(dense, x, missing) -> np.ndarray:
    """Compute ``log p_k(x_o)``, (B, K), row by row, from the rows and columns of Sigma."""
    out = np.zeros((len(x), len(dense.means)))
    for i, k in itertools.product(range(len(x)), range(len(dense.means))):
        o = ~missing[i]
        if o.any():
            Sigma = dense.Sigma[k][np.ix_(o, o)]
            out[i, k] = multivariate_normal(dense.means[k][o], Sigma).logpdf(x[i][o])
    return out


def dense_posterior(mixture, dense, x, missing, k):
    """Condition [z; x_o] densely: means (B, l) and covariances (B, l, l) of z in component k."""
    Lambda = numpy(mixture.loadings)[k]
    l = Lambda.shape[1]
    means, covariances = np.zeros((len(x), l)), np.zeros((len(x), l, l))
    for i, m in enumerate(missing):
        o = ~m
        gain = np.linalg.solve(dense.Sigma[k][np.ix_(o, o)], Lambda[o]).T
        means[i] = gain @ (x[i][o] - dense.means[k][o])
        covariances[i] = np.eye(l) - gain @ Lambda[o]
    return means, covariances


@settings(max_examples=25)
@given(cases(dtypes=(torch.float64,), max_features=6))
def test_every_pattern_has_the_density_of_its_own_marginal(case):
    missing = all_patterns(case.x.shape[1])
    x = case.x[torch.arange(len(missing)) % len(case.x)]
    mixture, points, mask = case.mixture, numpy(x), missing.numpy()
    expected = dense_log_prob(case.dense, points, mask)
    holes = x.masked_fill(missing, torch.nan)
    assert_close(mixture.component_log_prob(holes, missing), expected, 1e-9)
    joint = expected + np.log(case.dense.weights / case.dense.weights.sum())
    assert_close(mixture.log_prob(holes, missing), logsumexp(joint, axis=1), 1e-9)
    assert_close(mixture.responsibilities(holes, missing), softmax(joint, axis=1), 1e-9)
    assert float(mixture.log_prob(holes, missing)[-1].detach()) == pytest.approx(0, abs=1e-12)


@settings(max_examples=25)
@given(cases(dtypes=(torch.float64,), max_features=6))
def test_every_pattern_has_the_latent_posterior_of_what_is_observed(case):
    missing = all_patterns(case.x.shape[1])
    x = case.x[torch.arange(len(missing)) % len(case.x)]
    mixture = case.mixture
    found = mixture.posterior(x.masked_fill(missing, torch.nan), missing)
    for k in range(mixture.n_components):
        means, covariances = dense_posterior(mixture, case.dense, numpy(x), missing.numpy(), k)
        assert_close(found.means[:, k], means, 1e-9)
        assert_close(found.variances[:, k], np.diagonal(covariances, axis1=1, axis2=2), 1e-9)


@given(cases(), st.integers(0, 2**32 - 1))
def test_nothing_missing_is_the_density_of_complete_rows(case, seed):
    mixture, none = case.mixture, torch.zeros_like(case.x, dtype=torch.bool)
    tolerance = TOLERANCE[case.dtype]
    assert_close(mixture.log_prob(case.x, none), mixture.log_prob(case.x), tolerance)
    complete, found = mixture.posterior(case.x), mixture.posterior(case.x, none)
    assert_close(found.means, complete.means, tolerance)
    assert_close(found.variances, complete.variances.expand_as(found.variances), tolerance)


@given(cases(dtypes=(torch.float32,)), st.integers(0, 2**32 - 1))
def test_single_precision_is_near_double(case, seed):
    missing = torch.from_numpy(np.random.default_rng(seed).random(case.x.shape) < 0.4)
    expected = dense_log_prob(case.dense, case.points, missing.numpy())
    assert_close(case.mixture.component_log_prob(case.x, missing), expected, 1e-4)


@pytest.mark.parametrize("largest_share", [0.9, 0.9999])
def test_strong_factors_that_are_not_seen_cost_no_digits_in_float32(largest_share):
    """All of M is needed where the entries that a strong factor lives in are missing."""
    case = random_case(3, 8, 2, seed=3, largest_share=largest_share, dtype=torch.float32)
    missing = torch.zeros_like(case.x, dtype=torch.bool)
    missing[:, 1:] = True
    expected = dense_log_prob(case.dense, case.points, missing.numpy())
    found = numpy(case.mixture.component_log_prob(case.x, missing))
    np.testing.assert_allclose(found, expected, atol=2e-2, rtol=1e-3)


def test_means_far_from_zero_cost_no_digits_in_float32():
    case = random_case(3, 6, 2, seed=0, dtype=torch.float32, offset=1e4, spread=1.0)
    missing = torch.rand(case.x.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    expected = dense_log_prob(case.dense, case.points, missing.numpy())
    assert_close(case.mixture.component_log_prob(case.x, missing), expected, 1e-3)


def test_the_best_component_by_differences_is_the_same_density():
    case = random_case(4, 6, 2, seed=1)
    missing = torch.rand(case.x.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    parameters = case.mixture.precision_form
    ops = observed_operands(parameters)
    expected = observed_joint(case.x, missing, ops)
    assert_close(exact_observed_joint(case.x, missing, parameters, ops), expected, 1e-10)


def test_values_of_missing_entries_are_never_looked_at():
    case = random_case(3, 5, 2, seed=0)
    missing = torch.rand(case.x.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    one = case.mixture.log_prob(case.x.masked_fill(missing, torch.nan), missing)
    other = case.mixture.log_prob(case.x.masked_fill(missing, 1e300), missing)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_gradients_in_x_reach_observed_entries_only():
    case = random_case(3, 5, 2, seed=0)
    missing = torch.rand(case.x.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    mixture, x = case.mixture, case.x.masked_fill(missing, torch.nan).requires_grad_()
    mixture.log_prob(x, missing).sum().backward()
    assert (x.grad[missing] == 0).all()
    assert x.grad[~missing].isfinite().all()
    assert torch.autograd.gradcheck(
        lambda values: mixture.log_prob(values, missing), case.x.clone().requires_grad_()
    )


def test_memory_is_bounded_by_blocks_of_rows(monkeypatch):
    """Nothing of size B x K x d, nor of B x K x l^2 beyond a block, is ever formed."""
    monkeypatch.setattr(missing_module, "BLOCK_ELEMENTS", 2000)
    case = random_case(7, 40, 3, seed=0, n=400)
    mixture, missing = case.mixture, torch.rand(case.x.shape) < 0.3
    with torch.no_grad():
        whole = mixture.log_prob(case.x, missing)
        with LargestTensor() as largest:
            mixture.log_prob(case.x, missing)
    assert largest.numel <= 400 * 40
    monkeypatch.setattr(missing_module, "BLOCK_ELEMENTS", 1 << 22)
    torch.testing.assert_close(mixture.log_prob(case.x, missing), whole)


def test_a_wrong_mask_gets_one_sentence():
    mixture = PrecisionMixture(torch.ones(1), torch.zeros(1, 2), torch.ones(1, 2))
    for mask in (torch.zeros(3, 2), torch.zeros(2, 2, dtype=torch.bool)):
        with pytest.raises(InputError, match="missing must be booleans of the shape"):
            mixture.log_prob(torch.zeros(3, 2), mask)
