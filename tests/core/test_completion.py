"""Statistics of rows with missing entries: what training sums, against autograd and dense EM."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import LargestTensor, assert_close, cases, numpy, random_case
from factormix.core import missing as missing_module
from factormix.core import pairs
from factormix.core.averages import Running, natural_step
from factormix.core.expectation import expected_statistics
from factormix.core.missing import batch_statistics, regression
from factormix.core.parameters import Parameters, from_generative, noise_variances


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
    found = batch_statistics(parameters, x, weights, missing)
    each = np.ones(len(x)) if weights is None else weights.numpy()
    expected = dense_statistics(parameters, case.points, missing.numpy(), each)
    for name, values in expected.items():
        assert_close(getattr(found, name), values, 1e-8)
    assert float(found.n_samples) == pytest.approx(each.sum())


@settings(max_examples=20)
@given(cases(dtypes=(torch.float64,), max_features=6), st.integers(0, 2**32 - 1))
def test_the_gradient_of_the_marginal_likelihood_is_what_the_statistics_say(case, seed):
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
    ops = missing_module.observed_operands(parameters, centre=False)
    likelihood = missing_module.observed_joint(case.x, missing, ops).logsumexp(dim=1).sum()
    d_Theta, d_D, d_logits = torch.autograd.grad(likelihood, (Theta, D, logits))
    with torch.no_grad():
        s = batch_statistics(start, case.x.masked_fill(missing, 0), None, missing)
        pi = start.log_weights.exp()
        G = s.B - s.A @ Theta
        squares = s.S - (2 * Theta * s.B).sum(dim=1) + (Theta * (s.A @ Theta)).sum(dim=1)
        r = s.A[:, 0, 0]
        assert_close(d_Theta, G / D.unsqueeze(1), 1e-7)
        assert_close(d_D, 0.5 * (squares / D - r.unsqueeze(-1)) / D, 1e-7)
        assert_close(d_logits, r - s.n_samples * pi, 1e-7)


@given(cases(), st.integers(0, 2**32 - 1))
def test_complete_rows_have_the_statistics_they_always_had(case, seed):
    parameters = Parameters(*(t.detach() for t in case.mixture.precision_form))
    expected = expected_statistics(parameters, case.x)
    none = torch.zeros_like(case.x, dtype=torch.bool)
    for missing in (None, none):
        found = batch_statistics(parameters, case.x, None, missing)
        for one, other in zip(found[:7], expected[:7], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@given(st.integers(0, 2**32 - 1))
def test_statistics_of_parts_add_up(seed):
    case = random_case(3, 5, 2, seed=seed % 1000, n=12)
    missing = gaps_of(case.x, seed)
    parameters = Parameters(*(t.detach() for t in case.mixture.precision_form))
    x, candidates = case.x.masked_fill(missing, 0), torch.tensor([True, False, True])
    whole = batch_statistics(parameters, x, None, missing, candidates=candidates)
    parts = [
        batch_statistics(parameters, x[i], None, missing[i], candidates=candidates)
        for i in (slice(0, 5), slice(5, 12))
    ]
    for total, summed in zip(whole[:7], parts[0].joined(parts[1])[:7], strict=True):
        torch.testing.assert_close(total, summed)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("l", [0, 2])
def test_em_never_lowers_the_observed_likelihood(share, l):
    case = random_case(3, 6, l, seed=4, n=300)
    missing = gaps_of(case.x, 1, share)
    x, generator = case.x.masked_fill(missing, 0), torch.Generator().manual_seed(0)
    start = x[torch.randperm(300, generator=generator)[:3]]
    loadings = 0.3 * torch.randn(3, 6, l, generator=generator, dtype=torch.float64)
    Theta = torch.cat([start.unsqueeze(1), loadings.mT], dim=1)
    running = Running(Theta, torch.full((3, 6), 1 / 3).double(), torch.full((3,), 1 / 3).double())
    parameters = from_generative(running.weight.log(), start, loadings, torch.ones(3, 6).double())
    bound, likelihoods = torch.full((6,), 1e4).double(), []
    running = running._replace(Theta=regression(parameters).clone())
    for _ in range(30):
        s = batch_statistics(parameters, x, None, missing)
        likelihoods.append(float(s.log_likelihood))
        running, parameters = natural_step(running, parameters, s, 1.0, bound, 1e-9, expand=False)
    rises = np.diff(likelihoods)
    assert rises.min() > -1e-8
    assert rises[:5].sum() > 1


def test_memory_is_bounded(monkeypatch):
    """Blocks of rows bound B x K x l^2, blocks of components bound K x l^2 x d."""
    case = random_case(6, 30, 3, seed=0, n=500)
    missing = gaps_of(case.x, 0, 0.3)
    parameters = Parameters(*(t.detach() for t in case.mixture.precision_form))
    x = case.x.masked_fill(missing, 0)
    whole = batch_statistics(parameters, x, None, missing)
    monkeypatch.setattr(missing_module, "BLOCK_ELEMENTS", 6 * 16 * 50)
    monkeypatch.setattr(missing_module, "SUM_ELEMENTS", 2 * 10 * 30)
    with LargestTensor() as largest:
        parts = batch_statistics(parameters, x, None, missing)
    # The batch itself, and nothing larger.
    assert largest.numel <= 500 * 30
    for one, other in itertools.zip_longest(whole, parts):
        torch.testing.assert_close(one, other)


def test_sums_over_the_pairs_that_matter_are_those_over_all():
    case = random_case(40, 6, 3, spread=30.0, n=60)
    parameters = Parameters(*(t.detach() for t in case.mixture.precision_form))
    missing = gaps_of(case.x, 3)
    missing[-1, :3] = False
    x, Theta = case.x.masked_fill(missing, 0), regression(parameters)
    ops = missing_module.observed_operands(parameters, centre=False, diagonal=True)
    factored = missing_module.factor_observed(x, missing, ops)
    R = torch.softmax(factored.log_prob + ops.ops.log_weights, dim=1)
    R = torch.where(R > pairs.LEAST_SHARE, R, 0)
    found = pairs.significant(R)
    # Components of no, one and several rows, and too few pairs for a product of all.
    assert pairs.pays(len(found), R.numel())
    assert {0, 1} < set(torch.bincount(found[:, 1], minlength=40).tolist())
    few = missing_module.paired_sums(parameters, Theta, x, missing, R, factored, found)
    projected = missing_module.project_observed(x, missing, ops)
    every = missing_module.completed_sums(parameters, Theta, x, missing, R, projected)
    for some, all_of in zip(few, every, strict=True):
        assert_close(some, all_of, 1e-11)
    total = batch_statistics(parameters, x, None, missing)
    assert_close(total.B, every.B, 1e-4)
