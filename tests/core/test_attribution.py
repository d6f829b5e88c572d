"""Scores, their splits over features and conditionals of features, against dense Gaussians."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_normal
from torch.utils._python_dispatch import TorchDispatchMode

from factormix import InputError, PrecisionMixture
from factormix.core import attribution, density
from factormix.core.missing import PreparedMixture, RowBlock
from factormix.core.parameters import Parameters, change_units
from oracles import Case, Dense, LargestTensor, assert_close, cases, random_case


def block_of(case: Case, missing: torch.Tensor | None = None) -> RowBlock:
    return RowBlock(PreparedMixture(case.mixture.precision_form), case.x, missing)


@given(cases(dtypes=(torch.float64,)))
def test_contributions_sum_to_every_score(case):
    block = block_of(case)
    for name in attribution.SCORES:
        split = attribution.contributions(name, block)
        assert split.shape == case.x.shape
        assert_close(split.sum(dim=1), attribution.score(name, block), 1e-9)


@given(cases(dtypes=(torch.float64,)))
def test_the_split_is_that_of_noise_and_latent_code(case):
    """Both posterior means by dense conditioning: e = D P xt, and Lambda z = xt - e."""
    best = case.dense.joint_log_prob(case.points).argmax(axis=1)
    xt = case.points - case.dense.means[best]
    E, Gamma = case.dense.E[best], case.dense.Gamma[best]
    e = np.einsum("bij,bj->bi", case.dense.P[best], xt) / E
    code = np.einsum("bil,bl->bi", Gamma, np.einsum("bjl,bj->bl", Gamma, e))
    expected = -(E * e**2 + xt * code)
    assert_close(attribution.contributions("mahalanobis", block_of(case)), expected, 1e-9)


def test_an_unknown_score_is_refused():
    case = random_case(2, 3, 1)
    gaps = torch.zeros(case.x.shape, dtype=torch.bool)
    for compute in (attribution.score, attribution.contributions):
        for block in (block_of(case), block_of(case, gaps)):
            with pytest.raises(InputError, match="there is no score 'likelihood': choose one of"):
                compute("likelihood", block)


def test_features_that_are_independent_contribute_their_own_log_densities():
    mu, E = torch.tensor([[1.0, -2.0]]).double(), torch.tensor([[4.0, 4.0]]).double()
    parameters = Parameters(
        torch.zeros(1).double(), mu, E, torch.zeros(1, 2, 0).double(), torch.zeros(1, 0).double()
    )
    x = torch.tensor([[3.0, -2.5]]).double()
    split = attribution.contributions("log_likelihood", RowBlock(PreparedMixture(parameters), x))
    expected = [multivariate_normal(m, 0.25).logpdf(v) for m, v in ((1.0, 3.0), (-2.0, -2.5))]
    assert_close(split, np.array([expected]), 1e-12)


def conditional(dense: Dense, x: np.ndarray, j: int) -> tuple[float, float]:
    """Condition a mixture densely on all entries of x (d,) but j: mean and variance."""
    others = [i for i in range(len(x)) if i != j]
    means, variances, joint = [], [], []
    for weight, mu, S in zip(dense.weights, dense.means, dense.Sigma, strict=True):
        inner = S[np.ix_(others, others)]
        gain = np.linalg.solve(inner, S[others, j]) if others else np.zeros(0)
        means.append(mu[j] + gain @ (x[others] - mu[others]))
        variances.append(S[j, j] - gain @ S[others, j])
        density_ = multivariate_normal(mu[others], inner).logpdf(x[others]) if others else 0.0
        joint.append(np.log(weight) + density_)
    R, m = softmax(joint), np.array(means)
    mean = R @ m
    return mean, R @ (np.array(variances) + (m - mean) ** 2)


@given(cases(dtypes=(torch.float64,), max_features=6))
def test_conditionals_are_those_of_the_dense_mixture(case):
    found = attribution.conditionals(block_of(case))
    expected = np.array(
        [[conditional(case.dense, x, j) for j in range(len(x))] for x in case.points]
    )
    mean, deviation = expected[..., 0], np.sqrt(expected[..., 1])
    assert_close(found.expected, mean, 1e-8)
    assert_close(found.deviation, deviation, 1e-8)
    assert_close(found.z_score, (case.points - mean) / deviation, 1e-7)


def test_a_feature_has_no_vote_on_the_component_that_judges_it():
    """Two clusters that differ in the first column; the last is as in the other cluster."""
    means = torch.tensor([[0.0, 0.0], [10.0, 10.0]]).double()
    ones = torch.ones(2, 2).double()
    parameters = Parameters(
        torch.zeros(2).double(),
        means,
        ones,
        torch.zeros(2, 2, 0).double(),
        torch.zeros(2, 0).double(),
    )
    found = attribution.conditionals(
        RowBlock(PreparedMixture(parameters), torch.tensor([[0.5, 9.0]]).double())
    )
    assert found.expected[0, 1].item() == pytest.approx(0.0, abs=1e-3)
    assert found.z_score[0, 1].item() == pytest.approx(9.0, abs=1e-2)


def test_counts_add_the_prediction_error_of_least_squares():
    """The deviation is that of a regression on the other columns, for new rows far and near."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 3)) @ rng.normal(size=(3, 3))
    values, vectors = np.linalg.eigh(np.linalg.inv(np.cov(X.T, bias=True)))
    Gamma = vectors[:, :-1] * np.sqrt(values[-1] - values[:-1])
    E = np.full((1, 3), values[-1])
    arguments = (np.ones(1), X.mean(axis=0)[None], E, Gamma[None])
    mixture = PrecisionMixture(*(torch.from_numpy(a) for a in arguments))
    new = np.concatenate([X[:3], 30 * X[3:6]])
    parameters, counts = mixture.precision_form, torch.tensor([40.0])
    block = RowBlock(PreparedMixture(parameters), torch.from_numpy(new))
    found = attribution.conditionals(block, counts)
    # The last column is not used where it is missing.
    gaps = torch.tensor([False, False, True]).expand(6, 3)
    partial = attribution.conditionals(block._replace(missing=gaps), counts)
    for j, others, deviation in [
        (0, [1, 2], found.deviation),
        (2, [0, 1], found.deviation),
        (0, [1], partial.deviation),
        (2, [0, 1], partial.deviation),
    ]:
        A, at = (np.column_stack([np.ones(len(Z)), Z[:, others]]) for Z in (X, new))
        residual = X[:, j] - A @ np.linalg.lstsq(A, X[:, j], rcond=None)[0]
        leverage = (at * np.linalg.solve(A.T @ A, at.T).T).sum(axis=1)
        expected = np.sqrt((residual**2).mean() * (1 + leverage))
        np.testing.assert_allclose(deviation[:, j].detach(), expected, rtol=1e-9)


def test_digits_survive_offsets_far_from_zero():
    case = random_case(3, 5, 2, seed=1)
    near = block_of(case)
    moved = change_units(
        case.mixture.precision_form, torch.full((5,), 1e6).double(), torch.ones(()).double()
    )
    far = RowBlock(PreparedMixture(moved), case.x + 1e6)
    for name in attribution.SCORES:
        found, expected = (attribution.contributions(name, block) for block in (far, near))
        assert_close(found, expected, 1e-6)
    a, b = (attribution.conditionals(block) for block in (near, far))
    assert_close(b.z_score, a.z_score, 1e-6)
    assert_close(b.expected - 1e6, a.expected, 1e-6)


def test_a_precision_that_rounding_has_eaten_stays_positive():
    """One factor explains the first feature alone: E_1 and |Gamma_1|^2 agree in all digits."""
    E = torch.full((1, 3), 1e8, dtype=torch.float32)
    Gamma = torch.zeros(1, 3, 1)
    Gamma[0, 0, 0] = 1e4
    M = torch.full((1, 1), 1e-6)
    parameters = Parameters(torch.zeros(1), torch.zeros(1, 3), E, Gamma, M)
    mixture = PreparedMixture(parameters)
    # The determinant of M from its diagonal: that of the rounded matrix is zero.
    mixture.ops = density.operands(parameters, diagonal=True)
    block = RowBlock(mixture, torch.zeros(1, 3))
    deviation = attribution.conditionals(block).deviation
    assert deviation[0].tolist() == pytest.approx([0.1, 1e-4, 1e-4])


def test_nothing_of_rows_times_components_times_features_is_formed():
    case = random_case(20, 30, 2, n=40)
    block = block_of(case)
    with LargestTensor() as largest, torch.no_grad():
        attribution.conditionals(block)
        for name in attribution.SCORES:
            attribution.contributions(name, block)
    assert largest.numel < 40 * 20 * 30, largest.operation


class Operations(TorchDispatchMode):
    """Count the operations inside the block."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_one_row_of_many_features_needs_no_more_operations_than_one_of_few():
    counted = []
    for d in (8, 200):
        case = random_case(7, d, 2, n=1)
        block = block_of(case)
        with Operations() as operations, torch.no_grad():
            attribution.conditionals(block)
        counted.append(operations.count)
    assert counted[0] == counted[1]


@torch.no_grad()
def test_features_in_one_block_are_as_in_many():
    case = random_case(5, 23, 3, n=40)
    block = block_of(case)
    together = attribution.conditionals(block)
    for i, x in enumerate(case.x):
        alone = attribution.conditionals(block._replace(x=x[None]))
        for one, all_ in zip(alone, together, strict=True):
            assert_close(one[0], all_[i].numpy(), 1e-9)


@pytest.mark.parametrize(
    ("B", "K", "d"), [(1, 400, 3072), (1000, 49, 784), (40, 20, 30), (1, 1, 1)]
)
def test_blocks_of_features_cover_all_and_stay_small(B: int, K: int, d: int):
    blocks = list(attribution.feature_blocks(B, K, d))
    assert [j for block in blocks for j in range(d)[block]] == list(range(d))
    widest = max(len(range(d)[block]) for block in blocks)
    assert widest == 1 or B * K * widest <= min(max(B, K) * d, attribution.FEATURE_ELEMENTS)


@given(cases(dtypes=(torch.float64,)))
def test_every_score_is_what_its_name_says(case):
    block, x, dense = block_of(case), case.points, case.dense
    joint = dense.joint_log_prob(x)
    xt = x - dense.means[joint.argmax(axis=1)]
    P, E = dense.P[joint.argmax(axis=1)], dense.E[joint.argmax(axis=1)]
    Gamma = dense.Gamma[joint.argmax(axis=1)]
    inside = np.stack(
        [
            # Least squares in the metric E, on the span of E^-1 Gamma: where the loadings point.
            span @ np.linalg.lstsq(np.sqrt(e)[:, None] * span, np.sqrt(e) * row, rcond=1e-9)[0]
            for row, e, span in zip(xt, E, Gamma / E[:, :, None], strict=True)
        ]
    )
    expected = {
        "log_likelihood": dense.log_prob(x),
        "best_component": joint.max(axis=1),
        "mahalanobis": -np.einsum("bi,bij,bj->b", xt, P, xt),
        "reconstruction": -(E * (xt - inside) ** 2).sum(axis=1),
    }
    assert set(expected) == set(attribution.SCORES)
    for name, values in expected.items():
        assert_close(attribution.score(name, block), values, 1e-9)


@given(st.floats(-1e6, 1e6, allow_subnormal=False))
def test_compression_keeps_order_and_sign(value):
    u = torch.tensor([value, value + 1e-3], dtype=torch.float64)
    low, high = attribution.compressed(u).tolist()
    assert low < high
    assert attribution.compressed(u)[0].sign() == u[0].sign()
    assert_close(attribution.compression_slope(u) * u, attribution.compressed(u), 1e-9)


def test_compression_has_slope_one_at_zero():
    assert attribution.compression_slope(torch.zeros(1)).item() == 1.0
    assert attribution.compressed(torch.tensor([np.e - 1])).item() == pytest.approx(1.0)


def test_no_score_forms_rows_times_components_times_features():
    case = random_case(20, 30, 2, n=40)
    block = block_of(case)
    with LargestTensor() as largest, torch.no_grad():
        for name in attribution.SCORES:
            attribution.score(name, block)
    assert largest.numel < 40 * 20 * 30, largest.operation


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
    missing = with_gaps(case, seed)
    block = block_of(case, missing)
    for name in attribution.SCORES:
        split = attribution.contributions(name, block)
        found = attribution.score(name, block)
        empty = missing.all(dim=1)
        assert_close(split.sum(dim=1)[~empty], found[~empty], 1e-8)
        assert (split[missing] == 0).all()
    for row, gaps in zip(case.points, missing.numpy(), strict=True):
        joint, o = marginal_joint(case, row, ~gaps), ~gaps
        one = block._replace(x=torch.tensor(row)[None], missing=torch.tensor(gaps)[None])
        if o.any():
            assert_close(attribution.score("log_likelihood", one), [logsumexp(joint)], 1e-8)
            assert_close(attribution.score("best_component", one), [joint.max()], 1e-8)
            k = joint.argmax()
            xt = (row - case.dense.means[k])[o]
            distance = xt @ np.linalg.solve(case.dense.Sigma[k][np.ix_(o, o)], xt)
            assert_close(attribution.score("mahalanobis", one), [-distance], 1e-8)


@given(cases(dtypes=(torch.float64,), max_features=5), st.integers(0, 2**16))
def test_peaks_are_densities_of_the_dense_marginal_at_its_mean(case, seed):
    missing, dense = with_gaps(case, seed), case.dense
    found = block_of(case, missing).peaks()
    for row, o in enumerate(~missing.numpy()):
        if o.any():
            expected = [
                multivariate_normal(mu[o], S[np.ix_(o, o)]).logpdf(mu[o])
                for mu, S in zip(dense.means, dense.Sigma, strict=True)
            ]
            assert_close(found[row], np.array(expected), 1e-8)


@given(cases(dtypes=(torch.float64,), max_features=5), st.integers(0, 2**16))
def test_conditionals_are_those_of_the_dense_marginal(case, seed):
    missing = with_gaps(case, seed)
    found = attribution.conditionals(block_of(case, missing))
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
    block, partial = block_of(case), block_of(case, none)
    for name in attribution.SCORES:
        whole = attribution.contributions(name, block)
        assert_close(attribution.contributions(name, partial), whole, 1e-7)
    found = attribution.conditionals(partial)
    for one, other in zip(found, attribution.conditionals(block), strict=True):
        assert_close(one, other, 1e-7)
