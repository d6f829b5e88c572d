"""Densities and statistics of rows with missing entries, against dense Gaussians."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_normal

from factormix import InputError, PrecisionMixture
from factormix.core import missing as missing_module
from factormix.core.averages import Averages, StepOptions, natural_step
from factormix.core.expectation import expected_statistics
from factormix.core.missing import (
    PreparedMixture,
    RowBlock,
    correct_observed,
    observed_components,
    observed_operands,
    regression,
    sum_all_incomplete,
    sum_incomplete_pairs,
)
from factormix.core.parameters import Parameters, from_generative, noise_variances
from factormix.core.statistics import DEFAULT_TUNING, LEAST_SHARE, Tuning, find_pairs
from mixtures import assert_same_statistics, name_tensors
from oracles import TOLERANCE, LargestTensor, assert_close, cases, numpy, random_case


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


def test_components_by_differences_have_the_same_density():
    case = random_case(4, 6, 2, seed=1)
    missing = torch.rand(case.x.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    parameters = case.mixture.precision_form
    ops = observed_operands(parameters)
    expected = observed_components(case.x, missing, ops)
    every = torch.arange(4)
    found = correct_observed(expected.clone(), case.x, missing, parameters, ops, every)
    assert_close(found, expected, 1e-10)


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


@torch.no_grad()
def test_memory_is_bounded_by_blocks_of_rows():
    """Nothing of size B x K x d, nor of B x K x l^2 beyond a block, is ever formed."""
    case = random_case(7, 40, 3, seed=0, n=400)
    missing, ops = torch.rand(case.x.shape) < 0.3, observed_operands(case.mixture.precision_form)
    with LargestTensor() as largest:
        parts = observed_components(case.x, missing, ops, elements=2000)
    assert largest.numel <= 400 * 40
    torch.testing.assert_close(parts, observed_components(case.x, missing, ops))


def test_a_wrong_mask_gets_one_sentence():
    mixture = PrecisionMixture(torch.ones(1), torch.zeros(1, 2), torch.ones(1, 2))
    for mask in (torch.zeros(3, 2), torch.zeros(2, 2, dtype=torch.bool)):
        with pytest.raises(InputError, match="missing must be booleans of the shape"):
            mixture.log_prob(torch.zeros(3, 2), mask)


def gaps_of(x: torch.Tensor, seed: int, share: float = 0.4) -> torch.Tensor:
    """Draw a mask of missing entries; the first row is complete and the last one empty."""
    missing = torch.from_numpy(np.random.default_rng(seed).random(x.shape) < share)
    missing[0], missing[-1] = False, True
    return missing


def dense_statistics(parameters: Parameters, x, missing, weights) -> dict[str, np.ndarray]:
    """Compute A, B, S and the log-likelihood row by row from the joint Gaussian of [z; x]."""
    pi = numpy(parameters.log_weights.exp())
    Theta, D = numpy(regression(parameters)), numpy(noise_variances(parameters.precision_diag))
    K, l, d = len(pi), Theta.shape[1] - 1, Theta.shape[2]
    A, B, S = np.zeros((K, l + 1, l + 1)), np.zeros((K, l + 1, d)), np.zeros((K, d))
    total = 0.0
    for row, gaps, weight in zip(x, missing, weights, strict=True):
        o = ~gaps
        joint, moments = np.empty(K), []
        for k in range(K):
            mu, Lambda = Theta[k, 0], Theta[k, 1:].T
            Sigma = Lambda @ Lambda.T + np.diag(D[k])
            # Everything that is not observed: [z; x_m], given x_o.
            full = np.block([[np.eye(l), Lambda.T], [Lambda, Sigma]])
            mean = np.concatenate([np.zeros(l), mu])
            seen = np.concatenate([np.zeros(l, bool), o])
            gain = np.linalg.solve(full[np.ix_(seen, seen)], full[seen]).T
            expected = mean + gain @ (row[o] - mu[o])
            covariance = full - gain @ full[seen]
            one = np.concatenate([[1.0], expected])
            second = np.outer(one, one)
            second[1:, 1:] += covariance
            moments.append(second)
            inner = full[np.ix_(seen, seen)]
            rest = row[o] - mu[o]
            log_p = -0.5 * (
                o.sum() * np.log(2 * np.pi)
                + np.linalg.slogdet(inner)[1]
                + rest @ np.linalg.solve(inner, rest)
            )
            joint[k] = np.log(pi[k]) + log_p
        largest = joint.max()
        share = np.exp(joint - largest)
        total += weight * (largest + np.log(share.sum()))
        for k, r in enumerate(weight * share / share.sum()):
            A[k] += r * moments[k][: l + 1, : l + 1]
            B[k] += r * moments[k][: l + 1, l + 1 :]
            S[k] += r * np.diag(moments[k])[l + 1 :]
    return {"A": A, "B": B, "S": S, "log_likelihood": np.array(total)}


@settings(max_examples=20)
@given(cases(dtypes=(torch.float64,), max_features=6), st.integers(0, 2**32 - 1), st.booleans())
def test_statistics_are_those_of_the_dense_conditional(case, seed, weighted):
    missing = gaps_of(case.x, seed)
    weights = torch.rand(len(case.x), dtype=torch.float64) + 0.1 if weighted else None
    parameters = Parameters(*(t.detach() for t in case.mixture.precision_form))
    x = case.x.masked_fill(missing, 0)
    found = expected_statistics(parameters, x, weights, missing)
    each = np.ones(len(x)) if weights is None else weights.numpy()
    expected = dense_statistics(parameters, case.points, missing.numpy(), each)
    ours = found.sums.tensors | {"log_likelihood": found.log_likelihood}
    for name, values in expected.items():
        assert_close(ours[name], values, 1e-8)
    assert float(found.n_samples) == pytest.approx(each.sum())


@settings(max_examples=20)
@given(cases(dtypes=(torch.float64,), max_features=6), st.integers(0, 2**32 - 1))
def test_statistics_give_the_gradient_of_the_marginal_likelihood(case, seed):
    """Fisher: with ``G = B - A Theta``, d/dTheta is E G, and d/dD follows from S."""
    missing = gaps_of(case.x, seed)
    start = Parameters(*(t.detach() for t in case.mixture.precision_form))
    Theta = regression(start).requires_grad_()
    D = noise_variances(start.precision_diag).clone().requires_grad_()
    logits = start.logits.clone().requires_grad_()
    E, Lambda = 1 / D, Theta[:, 1:].mT
    # Without the rotation that makes M diagonal, which has no gradient where eigenvalues meet.
    L = torch.eye(Lambda.shape[2]) + Lambda.mT @ (E.unsqueeze(-1) * Lambda)
    root = torch.linalg.cholesky(L)
    Gamma = torch.linalg.solve_triangular(root, (E.unsqueeze(-1) * Lambda).mT, upper=False).mT
    parameters = Parameters(logits, Theta[:, 0], E, Gamma, start.latent_variances)
    block = RowBlock(PreparedMixture(parameters, centre=False), case.x, missing)
    likelihood = block.joint().logsumexp(dim=1).sum()
    d_Theta, d_D, d_logits = torch.autograd.grad(likelihood, (Theta, D, logits))
    with torch.no_grad():
        s = expected_statistics(start, case.x.masked_fill(missing, 0), None, missing)
        pi = start.log_weights.exp()
        A, B, S = s.sums.tensors.values()
        G = B - A @ Theta
        squares = S - (2 * Theta * B).sum(dim=1) + (Theta * (A @ Theta)).sum(dim=1)
        r = A[:, 0, 0]
        assert_close(d_Theta, G / D.unsqueeze(1), 1e-7)
        assert_close(d_D, 0.5 * (squares / D - r.unsqueeze(-1)) / D, 1e-7)
        assert_close(d_logits, r - s.n_samples * pi, 1e-7)


@given(cases(), st.integers(0, 2**32 - 1))
def test_complete_rows_have_the_statistics_they_always_had(case, seed):
    parameters = Parameters(*(t.detach() for t in case.mixture.precision_form))
    expected = expected_statistics(parameters, case.x)
    none = torch.zeros_like(case.x, dtype=torch.bool)
    for missing in (None, none):
        found = expected_statistics(parameters, case.x, None, missing)
        pairs = zip(name_tensors(found).items(), name_tensors(expected).items(), strict=True)
        for (name, one), (same_name, other) in pairs:
            assert name == same_name
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@given(st.integers(0, 2**32 - 1))
def test_statistics_of_parts_add_up(seed):
    case = random_case(3, 5, 2, seed=seed % 1000, n=12)
    missing = gaps_of(case.x, seed)
    parameters = Parameters(*(t.detach() for t in case.mixture.precision_form))
    x, candidates = case.x.masked_fill(missing, 0), torch.tensor([True, False, True])
    whole = expected_statistics(parameters, x, None, missing, candidates=candidates)
    parts = [
        expected_statistics(parameters, x[i], None, missing[i], candidates=candidates)
        for i in (slice(0, 5), slice(5, 12))
    ]
    assert_same_statistics(parts[0].add(parts[1]), whole, 3)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("l", [0, 2])
def test_em_never_lowers_the_observed_likelihood(share, l):
    case = random_case(3, 6, l, seed=4, n=300)
    missing = gaps_of(case.x, 1, share)
    x, generator = case.x.masked_fill(missing, 0), torch.Generator().manual_seed(0)
    start = x[torch.randperm(300, generator=generator)[:3]]
    loadings = 0.3 * torch.randn(3, 6, l, generator=generator, dtype=torch.float64)
    Theta = torch.cat([start.unsqueeze(1), loadings.mT], dim=1)
    averages = Averages(Theta, torch.full((3, 6), 1 / 3).double(), torch.full((3,), 1 / 3).double())
    parameters = from_generative(averages.weight.log(), start, loadings, torch.ones(3, 6).double())
    bound, likelihoods = torch.full((6,), 1e4).double(), []
    averages = averages._replace(Theta=regression(parameters).clone())
    options = StepOptions(1.0, bound, 1e-9, expand=False)
    for _ in range(30):
        s = expected_statistics(parameters, x, None, missing)
        likelihoods.append(float(s.log_likelihood))
        averages, parameters = natural_step(averages, parameters, s, options)
    rises = np.diff(likelihoods)
    assert rises.min() > -1e-8
    assert rises[:5].sum() > 1


def test_memory_of_statistics_is_bounded():
    """Blocks of rows bound B x K x l^2, blocks of components bound K x l^2 x d."""
    case = random_case(6, 30, 3, seed=0, n=500)
    missing = gaps_of(case.x, 0, 0.3)
    parameters = Parameters(*(t.detach() for t in case.mixture.precision_form))
    x = case.x.masked_fill(missing, 0)
    whole = expected_statistics(parameters, x, None, missing)
    tuning = Tuning(latent=6 * 16 * 50, lacking=2 * 10 * 30)
    with LargestTensor() as largest:
        parts = expected_statistics(parameters, x, None, missing, tuning=tuning)
    # The batch itself, and nothing larger.
    assert largest.numel <= 500 * 30
    assert_same_statistics(parts, whole, 6)


def test_sums_over_the_pairs_that_matter_are_those_over_all():
    case = random_case(40, 6, 3, spread=30.0, n=60)
    parameters = Parameters(*(t.detach() for t in case.mixture.precision_form))
    missing = gaps_of(case.x, 3)
    missing[-1, :3] = False
    x, Theta = case.x.masked_fill(missing, 0), regression(parameters)
    ops = missing_module.observed_operands(parameters, centre=False, diagonal=True)
    factored = missing_module.factor_observed(x, missing, ops)
    R = torch.softmax(factored.log_prob + ops.ops.log_weights, dim=1)
    R = torch.where(R > LEAST_SHARE, R, 0)
    found = find_pairs(R)
    # Components of no, one and several rows, and too few pairs for a product of all.
    assert DEFAULT_TUNING.pairs_pay(len(found), R.numel())
    assert {0, 1} < set(torch.bincount(found[:, 1], minlength=40).tolist())
    few = sum_incomplete_pairs(parameters, Theta, x, missing, R, factored, found)
    every = sum_all_incomplete(parameters, Theta, x, missing, R, factored)
    for name, some in few.tensors.items():
        assert_close(some, every.tensors[name], 1e-11)
    total = expected_statistics(parameters, x, None, missing)
    assert_close(total.sums.tensors["B"], every.B, 1e-4)
