"""Marginals, conditionals and imputation, against dense Gaussians in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_normal, norm

from factormix import InputError, PrecisionMixture
from factormix.core.conditionals import Imputer, mixture_quantiles
from factormix.core.parameters import Parameters
from oracles import assert_close, cases, dense_precision, numpy, random_case


def subsets(d: int) -> list[list[int]]:
    """Return every set of features that leaves some out and keeps some."""
    return [list(s) for q in range(1, d) for s in itertools.combinations(range(d), q)]


def dense_conditional(dense, k, o, values):
    """Condition component k densely on features o: mean and covariance of the rest."""
    m = [j for j in range(dense.means.shape[1]) if j not in o]
    Sigma, mu = dense.Sigma[k], dense.means[k]
    gain = np.linalg.solve(Sigma[np.ix_(o, o)], Sigma[np.ix_(o, m)]).T
    covariance = Sigma[np.ix_(m, m)] - gain @ Sigma[np.ix_(o, m)]
    return mu[m] + gain @ (values - mu[o]), covariance


def shares_given(dense, o, values):
    """Compute ``p(k | x_o)``, (K,), by SciPy."""
    log_p = [
        multivariate_normal(mu[o], Sigma[np.ix_(o, o)]).logpdf(values)
        for mu, Sigma in zip(dense.means, dense.Sigma, strict=True)
    ]
    return softmax(np.log(dense.weights) + np.array(log_p))


def covariances(mixture: PrecisionMixture) -> np.ndarray:
    return np.linalg.inv(dense_precision(mixture.precision_diag, mixture.precision_factors))


@settings(max_examples=15)
@given(cases(dtypes=(torch.float64,), max_features=6))
def test_every_marginal_is_the_dense_one(case):
    d, mixture = case.x.shape[1], case.mixture
    for kept in [*subsets(d), list(range(d))]:
        found = mixture.marginal(kept)
        assert_close(found.means, case.dense.means[:, kept], 1e-9)
        expected = case.dense.Sigma[:, kept][:, :, kept]
        np.testing.assert_allclose(covariances(found), expected, rtol=1e-9, atol=1e-9)
        assert_close(found.weights, case.dense.weights / case.dense.weights.sum(), 1e-9)
        # M stays diagonal, and the density is that of the entries that are kept.
        missing = torch.ones_like(case.x, dtype=torch.bool)
        missing[:, kept] = False
        assert_close(found.log_prob(case.x[:, kept]), mixture.log_prob(case.x, missing), 1e-9)


def test_a_marginal_has_its_features_in_the_order_given():
    case = random_case(2, 5, 2, seed=1)
    found = case.mixture.marginal([4, 0, 2])
    expected = case.mixture.marginal([0, 2, 4]).log_prob(case.x[:, [0, 2, 4]])
    torch.testing.assert_close(found.log_prob(case.x[:, [4, 0, 2]]), expected)
    mask = torch.tensor([True, False, True, False, True])
    torch.testing.assert_close(case.mixture.marginal(mask).log_prob(case.x[:, mask]), expected)


@settings(max_examples=15)
@given(cases(dtypes=(torch.float64,), max_features=6))
def test_every_conditional_is_the_dense_one(case):
    d, mixture = case.x.shape[1], case.mixture
    for i, o in enumerate(subsets(d)):
        values = case.points[i % len(case.x)][o]
        found = mixture.condition(o, values)
        assert_close(found.weights, shares_given(case.dense, o, values), 1e-9)
        for k in range(mixture.n_components):
            mean, covariance = dense_conditional(case.dense, k, o, values)
            assert_close(found.means[k], mean, 1e-9)
            np.testing.assert_allclose(covariances(found)[k], covariance, rtol=1e-9, atol=1e-9)


def test_densities_of_parts_multiply_to_that_of_the_whole():
    case = random_case(3, 6, 2, seed=5)
    o, m = [5, 1, 2], [0, 3, 4]
    x = case.x[0]
    joint = case.mixture.log_prob(x[None])
    first = case.mixture.marginal(o).log_prob(x[o][None])
    second = case.mixture.condition(o, x[o]).log_prob(x[m][None])
    torch.testing.assert_close(joint, first + second)


def test_samples_of_a_conditional_have_its_moments():
    case = random_case(2, 4, 1, seed=2)
    found = case.mixture.condition([0, 2], [0.3, -0.4])
    drawn = numpy(found.sample(40_000, generator=torch.Generator().manual_seed(0)))
    weights, means = numpy(found.weights), numpy(found.means)
    mean = weights @ means
    second = np.einsum("k,kij->ij", weights, covariances(found)) + (weights * means.T) @ means
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=0.05)
    np.testing.assert_allclose(np.cov(drawn.T), second - np.outer(mean, mean), rtol=0.1, atol=0.1)


@settings(max_examples=15)
@given(cases(dtypes=(torch.float64,), max_features=6))
def test_imputation_of_every_pattern_is_the_dense_conditional(case):
    d = case.x.shape[1]
    missing = torch.tensor(list(itertools.product([False, True], repeat=d)))
    x = case.x[torch.arange(len(missing)) % len(case.x)]
    imputer = Imputer(Parameters(*(t.detach() for t in case.mixture.precision_form)))
    holes = x.masked_fill(missing, torch.nan)
    mean, std = numpy(imputer.mean(holes, missing)), numpy(imputer.deviation(holes, missing))
    for row, gaps, filled, spread in zip(numpy(x), missing.numpy(), mean, std, strict=True):
        o, m = np.flatnonzero(~gaps), np.flatnonzero(gaps)
        np.testing.assert_array_equal(filled[o], row[o])
        assert (spread[o] == 0).all()
        if not len(m):
            continue
        weights = case.dense.weights / case.dense.weights.sum()
        parts = list(zip(case.dense.means, case.dense.Sigma, strict=True))
        if len(o):
            weights = shares_given(case.dense, o, row[o])
            parts = [dense_conditional(case.dense, k, list(o), row[o]) for k in range(len(weights))]
        means = np.array([mu for mu, _ in parts])
        variances = np.array([np.diag(S) for _, S in parts])
        expected = weights @ means
        np.testing.assert_allclose(filled[m], expected, rtol=1e-9, atol=1e-9)
        variance = weights @ (variances + means**2) - expected**2
        np.testing.assert_allclose(spread[m] ** 2, variance, rtol=1e-8, atol=1e-9)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.floats(0.001, 0.999))
def test_quantiles_of_mixtures_on_the_line(seed, c, level):
    rng = np.random.default_rng(seed)
    weights, means = rng.dirichlet(np.ones(c)), rng.normal(size=c) * 10 ** rng.uniform(-2, 3)
    deviations = 10 ** rng.uniform(-4, 1, size=c)
    found = mixture_quantiles(
        *(torch.from_numpy(a[None]) for a in (weights, means, deviations)), level
    ).item()

    def excess(t):
        return weights @ norm.cdf((t - means) / deviations) - level

    own = norm.ppf(level, means, deviations)
    if own.max() - own.min() > 1e-9:
        expected = brentq(excess, own.min() - 1e-9, own.max() + 1e-9, xtol=1e-12)
        # Where the distribution function is flat, every point of it is a quantile.
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6) or abs(excess(found)) < 1e-9
    else:
        assert found == pytest.approx(own.mean(), rel=1e-6, abs=1e-8)


def test_quantiles_of_missing_entries_are_those_of_the_conditional():
    case = random_case(3, 5, 2, seed=7)
    missing = torch.tensor([[True, False, False, True, False]]).repeat(len(case.x), 1)
    imputer = Imputer(Parameters(*(t.detach() for t in case.mixture.precision_form)))
    low, high = imputer.quantiles(case.x.masked_fill(missing, torch.nan), missing, [0.05, 0.9])
    torch.testing.assert_close(low[~missing], case.x[~missing])
    for i, x in enumerate(case.x):
        given = case.mixture.condition([1, 2, 4], x[[1, 2, 4]])
        for j, place in ((0, 0), (1, 3)):
            one = given.marginal([j])
            deviations = np.sqrt(covariances(one)[:, 0, 0])
            for bound, level in ((low, 0.05), (high, 0.9)):
                below = norm.cdf((float(bound[i, place]) - numpy(one.means)[:, 0]) / deviations)
                assert numpy(one.weights) @ below == pytest.approx(level, abs=1e-7)


def test_draws_have_the_moments_of_the_conditional():
    case = random_case(3, 5, 2, seed=11)
    missing = torch.tensor([[True, True, False, True, False]])
    imputer = Imputer(Parameters(*(t.detach() for t in case.mixture.precision_form)))
    drawn = imputer.draws(
        case.x[:1].masked_fill(missing, torch.nan),
        missing,
        30_000,
        torch.Generator().manual_seed(0),
    )[:, 0]
    torch.testing.assert_close(drawn[:, ~missing[0]], case.x[:1, ~missing[0]].expand(30_000, 2))
    given = case.mixture.condition([2, 4], case.x[0, [2, 4]])
    weights, means = numpy(given.weights), numpy(given.means)
    mean = weights @ means
    second = np.einsum("k,kij->ij", weights, covariances(given)) + (weights * means.T) @ means
    found = numpy(drawn[:, missing[0]])
    scale = np.sqrt(np.diag(second - np.outer(mean, mean)))
    np.testing.assert_allclose(found.mean(axis=0) / scale, mean / scale, atol=0.03)
    covariance = (second - np.outer(mean, mean)) / np.outer(scale, scale)
    np.testing.assert_allclose(np.cov(found.T) / np.outer(scale, scale), covariance, atol=0.05)


def test_a_mixture_in_float32_stays_in_float32():
    case = random_case(2, 4, 1, seed=0, dtype=torch.float32)
    assert case.mixture.marginal([1, 2]).means.dtype == torch.float32
    given = case.mixture.condition([0], [1.0])
    assert given.means.dtype == torch.float32
    assert logsumexp(numpy(given.logits)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "indices", [[], [0, 0], [3], [-1], [0.5], [[0]], torch.zeros(2, dtype=torch.bool)]
)
def test_wrong_features_get_one_sentence(indices):
    mixture = PrecisionMixture(torch.ones(1), torch.zeros(1, 3), torch.ones(1, 3))
    for call in (mixture.marginal, lambda i: mixture.condition(i, [1.0])):
        with pytest.raises(InputError, match="indices must be different whole numbers between 0"):
            call(indices)


def test_wrong_values_get_one_sentence():
    mixture = PrecisionMixture(torch.ones(1), torch.zeros(1, 3), torch.ones(1, 3))
    for values in ([1.0], [1.0, np.nan], [1.0, np.inf], [[1.0, 2.0]]):
        with pytest.raises(InputError, match="values must be 2 finite numbers"):
            mixture.condition([0, 1], values)
    with pytest.raises(InputError, match="all 3 features are given"):
        mixture.condition([0, 1, 2], [1.0, 1.0, 1.0])
