"""Corners of the numbers: a fit is refused in one sentence, or its scores are those it shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from factormix import MFA, PrecisionMixture
from factormix.errors import InputError
from oracles import Dense

ROUNDINGS = 4
"""Roundings of a value or a mean: two in working units, one in those of the data, one in a sum."""


def draw_corner(kind: str, n: int, d: int, rng: np.random.Generator) -> np.ndarray:
    """Draw rows (n, d) at a corner of the numbers."""
    X = rng.normal(size=(n, d))
    if kind == "Cauchy":
        return rng.standard_cauchy(size=(n, d))
    if kind == "int64":
        return rng.integers(2**53, 2**63 - 1, size=(n, d)) * rng.choice([-1, 1], size=d)
    if kind == "outlier":
        X[n // 2, d // 2] = 10.0 ** rng.uniform(3, 20)
    elif kind == "far outlier":
        X[n // 2, d // 2] = 10.0 ** rng.uniform(20, 300)
    elif kind == "constant":
        X[:, rng.random(d) < 0.6] = rng.normal()
    elif kind == "tiny":
        X *= 10.0 ** rng.uniform(-300, -10)
    elif kind == "large":
        X *= 10.0 ** rng.uniform(10, 307)
    elif kind == "mixed":
        X *= 10.0 ** rng.uniform(-30, 30, size=d)
    elif kind == "duplicates":
        X = X[rng.integers(max(1, n // 20), size=n)]
    elif kind == "offset":
        X += 10.0 ** rng.uniform(2, 12)
    return X


KINDS = (
    "Cauchy",
    "int64",
    "outlier",
    "far outlier",
    "constant",
    "tiny",
    "large",
    "mixed",
    "duplicates",
    "offset",
)


def bound_scores(model: MFA, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bound log-densities (n,) of rows (n, d) from below and above, in extended precision.

    The density is that of the parameters which a model shows, by differences ``x - mu``. The bounds
    are its values where each entry of x and mu is moved by ``ROUNDINGS``: no computation in float64
    can know more.
    """
    mixture = model.mixture_
    pi, mu, E, Gamma = (
        t.numpy().astype(np.longdouble)
        for t in (mixture.weights, mixture.means, mixture.precision_diag, mixture.precision_factors)
    )
    offset = model._run.units.offset.numpy()
    eps, X = ROUNDINGS * np.finfo(np.float64).eps, X.astype(np.longdouble)
    (n, d), (K, _, l) = X.shape, Gamma.shape
    joint, moved = np.empty((n, K), np.longdouble), np.empty((n, K), np.longdouble)
    for k in range(K):
        V = Gamma[k] / np.sqrt(E[k])[:, None]
        pivots, M = [], np.eye(l, dtype=np.longdouble) - V.T @ V
        while len(M):
            # Elimination, because LAPACK has no extended precision.
            pivots.append(M[0, 0])
            M = M[1:, 1:] - np.outer(M[1:, 0], M[0, 1:]) / M[0, 0]
        xt = (X - mu[k]) * np.sqrt(E[k])
        size = np.maximum(np.maximum(np.abs(X), np.abs(mu[k])), np.abs(offset))
        step = eps * size * np.sqrt(E[k])
        moved[:, k] = (np.abs(xt) * step + step**2 / 2).sum(axis=1)
        squares = (xt**2).sum(axis=1) - ((xt @ V) ** 2).sum(axis=1)
        volume = np.log(E[k]).sum() + np.log(np.array(pivots)).sum() - d * np.log(2 * np.pi)
        with np.errstate(divide="ignore"):
            joint[:, k] = np.log(pi[k]) + 0.5 * (volume - squares)
    return tuple(np.float64(np.logaddexp.reduce(j, axis=1)) for j in (joint - moved, joint + moved))


def assert_same_density(scores: np.ndarray, low: np.ndarray, high: np.ndarray, d: int) -> None:
    """Check scores (n,) against bounds: to 0.002 a feature, and six digits."""
    assert np.isfinite(scores).all()
    allowed = 2e-3 * d + 1e-6 * np.maximum(np.abs(low), np.abs(high))
    beyond = np.maximum(low - scores, scores - high)
    worst = (beyond - allowed).argmax()
    assert (beyond <= allowed).all(), (scores[worst], low[worst], high[worst])


def check_corner(X: np.ndarray, K: int, l: int, **options: object) -> bool:
    """Fit rows (n, d), and check scores and parameters; return whether the fit was refused."""
    refusal, model = "", MFA(K, l, random_state=0, **options)
    try:
        model.fit(X)
    except InputError as error:
        refusal = str(error)
    if refusal:
        assert refusal.endswith(".")
        assert "\n" not in refusal
        return True
    assert (model.noise_variances_ > 0).all()
    assert np.isfinite(model.noise_variances_).all()
    rows = X.astype(np.float64)
    bounds = bound_scores(model, rows)
    assert_same_density(np.float64(model.score_samples(X)), *bounds, X.shape[1])
    assert_same_density(model.mixture_.log_prob(rows).numpy(), *bounds, X.shape[1])
    return False


@settings(max_examples=250)
@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(4, 150),
    d=st.integers(1, 20),
    K=st.integers(1, 7),
    l=st.integers(0, 2),
    seed=st.integers(0, 2**31),
    solver=st.sampled_from(["natural", "em", "sgd", "covariance"]),
    dtype=st.sampled_from(["float32", "float64"]),
    scaling=st.sampled_from(["global", "feature", None]),
)
def test_a_corner_is_refused_or_scored_as_the_mixture_says(
    kind, n, d, K, l, seed, solver, dtype, scaling
):
    X = draw_corner(kind, n, d, np.random.default_rng(seed))
    options = {"solver": solver, "dtype": dtype, "scaling": scaling, "max_epochs": 5}
    check_corner(X, min(K, n), min(l, d - 1), **options)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "shape", "K", "l", "options"),
    [
        ("Cauchy", (120, 1), 7, 0, {"dtype": "float64", "scaling": None}),
        ("Cauchy", (120, 3), 7, 2, {"dtype": "float32", "solver": "em"}),
        ("outlier", (120, 20), 7, 2, {"dtype": "float64"}),
        ("far outlier", (120, 20), 7, 2, {"dtype": "float64"}),
        ("constant", (120, 3), 3, 1, {"solver": "sgd", "max_epochs": 100}),
        ("large", (120, 3), 2, 1, {"dtype": "float64", "solver": "em", "scaling": None}),
    ],
)
def test_a_long_fit_at_a_corner_is_scored_as_the_mixture_says(kind, shape, K, l, options, seed):
    check_corner(draw_corner(kind, *shape, np.random.default_rng(seed)), K, l, **options)


@pytest.mark.parametrize("solver", ["natural", "em", "sgd", "covariance"])
def test_huge_integers_need_float64_or_a_scale(solver):
    X = draw_corner("int64", 120, 3, np.random.default_rng(0))
    with pytest.raises(InputError, match=r"use dtype='float64', use scaling='feature'"):
        MFA(2, 1, dtype="float32", scaling=None, solver=solver).fit(X)
    for options in ({"dtype": "float64", "scaling": None}, {"scaling": "feature"}):
        assert not check_corner(X, 2, 1, solver=solver, max_epochs=5, **options)


def test_values_too_small_for_their_precision_are_refused():
    X = 1e-155 * np.random.default_rng(0).normal(size=(50, 2))
    with pytest.raises(InputError, match="multiply X by a constant"):
        MFA(2, 1).fit(X)
    assert not check_corner(1e20 * X, 2, 1)


def test_a_mixture_with_a_far_mean_is_right_with_and_without_gaps():
    """The far mean is far in one feature, and the gaps are in another."""
    rng = np.random.default_rng(0)
    means = np.array([[0.0, 0.0, 0.0], [0.1, 0.2, 0.3], [1e9, 1.0, 2.0]])
    E, Gamma = np.full((3, 3), 1e4), rng.normal(scale=30, size=(3, 3, 1))
    dense = Dense(np.ones(3), means, E, Gamma)
    mixture = PrecisionMixture(*map(torch.from_numpy, (np.ones(3), means, E, Gamma)))
    X = means[rng.integers(3, size=30)] + 0.01 * rng.normal(size=(30, 3))
    np.testing.assert_allclose(mixture.log_prob(X), dense.log_prob(X), rtol=1e-9, atol=1e-6)
    densities = [
        multivariate_normal(m[:2], S[:2, :2]).logpdf(X[:, :2])
        for m, S in zip(means, dense.Sigma, strict=True)
    ]
    expected = logsumexp(np.stack(densities), axis=0) - np.log(3)
    X[:, 2] = np.nan
    np.testing.assert_allclose(mixture.log_prob(X), expected, rtol=1e-9, atol=1e-6)
