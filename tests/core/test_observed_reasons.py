"""Reasons of rows with missing entries: those of the dense marginal over what is observed."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_normal

from factormix.core import attribution, density
from factormix.core.attribution import observed_conditionals, observed_contributions, observed_score
from factormix.core.missing import observed_operands
from oracles import Case, assert_close, cases


def with_gaps(case: Case, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random(case.x.shape) < 0.4)


def marginal_joint(case: Case, x: np.ndarray, o: np.ndarray) -> np.ndarray:
    """Compute ``log pi_k + log p_k(x_o)``, (K,), by SciPy."""
    dense = case.dense
    pi = np.log(dense.weights / dense.weights.sum())
    if not o.any():
        return pi
    return pi + [
        multivariate_normal(mu[o], S[np.ix_(o, o)]).logpdf(x[o])
        for mu, S in zip(dense.means, dense.Sigma, strict=True)
    ]


@given(cases(dtypes=(torch.float64,), max_features=6), st.integers(0, 2**16))
def test_scores_are_those_of_the_marginal_and_contributions_sum_to_them(case, seed):
    missing, known = with_gaps(case, seed), observed_operands(case.mixture.precision_form)
    for name in attribution.SCORES:
        split = observed_contributions(name, case.x, missing, known)
        found = observed_score(name, case.x, missing, known)
        empty = missing.all(dim=1)
        assert_close(split.sum(dim=1)[~empty], found[~empty], 1e-8)
        assert (split[missing] == 0).all()
    for row, gaps in zip(case.points, missing.numpy(), strict=True):
        joint, o = marginal_joint(case, row, ~gaps), ~gaps
        one = (torch.tensor(row)[None], torch.tensor(gaps)[None], known)
        if o.any():
            assert_close(observed_score("log_likelihood", *one), [logsumexp(joint)], 1e-8)
            assert_close(observed_score("best_component", *one), [joint.max()], 1e-8)
            k = joint.argmax()
            xt = (row - case.dense.means[k])[o]
            distance = xt @ np.linalg.solve(case.dense.Sigma[k][np.ix_(o, o)], xt)
            assert_close(observed_score("mahalanobis", *one), [-distance], 1e-8)


@given(cases(dtypes=(torch.float64,), max_features=5), st.integers(0, 2**16))
def test_conditionals_are_those_of_the_dense_marginal(case, seed):
    missing = with_gaps(case, seed)
    found = observed_conditionals(case.x, missing, observed_operands(case.mixture.precision_form))
    for row, (x, gaps) in enumerate(zip(case.points, missing.numpy(), strict=True)):
        for j in range(len(x)):
            o = ~gaps
            o[j] = False
            R, means, variances = softmax(marginal_joint(case, x, o)), [], []
            for mu, S in zip(case.dense.means, case.dense.Sigma, strict=True):
                gain = np.linalg.solve(S[np.ix_(o, o)], S[o, j]) if o.any() else np.zeros(0)
                means.append(mu[j] + gain @ (x[o] - mu[o]))
                variances.append(S[j, j] - gain @ S[o, j])
            m = np.array(means)
            deviation = np.sqrt(R @ (np.array(variances) + (m - R @ m) ** 2))
            assert_close(found.expected[row, j], R @ m, 1e-7)
            assert_close(found.deviation[row, j], deviation, 1e-7)
            gaps = missing[row].numpy()
            if gaps[j]:
                assert found.z_score[row, j].isnan()
            else:
                assert_close(found.z_score[row, j], (x[j] - R @ m) / deviation, 1e-6)


@given(cases(dtypes=(torch.float64,)))
def test_a_complete_row_has_the_reasons_of_a_complete_row(case):
    none = torch.zeros(case.x.shape, dtype=torch.bool)
    known = observed_operands(case.mixture.precision_form)
    ops = density.operands(case.mixture.precision_form)
    for name in attribution.SCORES:
        whole = attribution.contributions(name, case.x, ops)
        assert_close(observed_contributions(name, case.x, none, known), whole, 1e-7)
    found = observed_conditionals(case.x, none, known)
    for one, other in zip(found, attribution.conditionals(case.x, ops), strict=True):
        assert_close(one, other, 1e-7)
