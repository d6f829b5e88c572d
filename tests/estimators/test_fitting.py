"""Fits on ordinary tables with mixtures of every size: none fails, and scores are correct."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import datasets
from sklearn.preprocessing import StandardScaler

from densities import assert_honest
from factormix import MFA

COMPONENTS = (1, 2, 5, 10, 25, 40)
FACTORS = (0, 1, 2, 5, 10)
NAMES = ("iris", "wine", "breast_cancer", "diabetes", "linnerud", "digits")
ADBENCH = sorted(Path(os.environ.get("FACTORMIX_DATA", "nowhere"), "adbench").glob("*.npz"))

both_solvers = pytest.mark.parametrize("solver", ["natural", "em"])
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])
both_scales = pytest.mark.parametrize("standardised", [False, True], ids=["raw", "standardised"])


def table(name: str, rows: int) -> np.ndarray:
    """Load at most ``rows`` rows of a table of scikit-learn, without constant columns."""
    X = np.asarray(getattr(datasets, f"load_{name}")().data, dtype=np.float64)
    return varying(X[np.random.default_rng(0).permutation(len(X))[:rows]])


def varying(X: np.ndarray) -> np.ndarray:
    return X[:, X.std(axis=0) > 0]


def sizes(X: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield every size of mixture that the table allows."""
    for K, l in itertools.product(COMPONENTS, FACTORS):
        if l < X.shape[1] and len(X) >= K:
            yield K, l


def fit_all(X: np.ndarray, seeds: Iterable[int], **options: object) -> None:
    """Fit every size that the table allows, and check the scores."""
    for (K, l), seed in itertools.product(sizes(X), seeds):
        assert_honest(MFA(K, l, random_state=seed, **options).fit(X), X)


@pytest.mark.parametrize("name", NAMES)
def test_no_size_of_mixture_fails_on_a_table(name):
    """Sizes take turns in solver, dtype and scale; the slow test below has all combinations."""
    # More rows than these only take longer.
    raw = table(name, 150)
    standardised = StandardScaler().fit_transform(raw)
    turns = itertools.cycle(
        itertools.product(("natural", "em"), ("float32", "float64"), (raw, standardised))
    )
    for (K, l), (solver, dtype, X) in zip(sizes(raw), turns, strict=False):
        assert_honest(MFA(K, l, solver=solver, dtype=dtype, random_state=0).fit(X), X)


@pytest.mark.slow
@both_scales
@both_solvers
@both_dtypes
@pytest.mark.parametrize("name", NAMES)
def test_no_combination_fails_on_a_table(name, solver, dtype, standardised):
    X = table(name, 150)
    X = StandardScaler().fit_transform(X) if standardised else X
    fit_all(X, range(3), solver=solver, dtype=dtype)


@pytest.mark.slow
@both_scales
@both_solvers
@both_dtypes
@pytest.mark.parametrize("path", ADBENCH, ids=lambda path: path.stem)
def test_no_size_of_mixture_fails_on_an_outlier_table(path, solver, dtype, standardised):
    with np.load(path) as file:
        X = file["X"][file["y"] == 0].astype(np.float64)
    X = varying(X[np.random.default_rng(0).permutation(len(X))[:300]])
    X = StandardScaler().fit_transform(X) if standardised else X
    fit_all(X[:, :100], range(3), solver=solver, dtype=dtype)


def draw_table(kind: str, n: int, d: int, rng: np.random.Generator) -> np.ndarray:
    """Draw rows (n, d) of a kind found in real tables."""
    X = rng.normal(size=(n, d))
    if kind == "duplicates":
        X = X[rng.integers(max(2, n // 10), size=n)]
    elif kind == "rank-deficient":
        X = X[:, : max(1, d // 2)] @ rng.normal(size=(max(1, d // 2), d))
    elif kind == "one-hot":
        X = np.eye(d)[rng.integers(d, size=n)]
    elif kind == "integers":
        X = np.round(2 * X)
    elif kind == "heavy tails":
        X = rng.standard_cauchy(size=(n, d))
    elif kind == "one wild cell":
        X[n // 2, d // 2] = 10.0 ** rng.integers(3, 13)
    elif kind == "raw units":
        X = 10.0 ** rng.integers(-6, 7, size=d) * (X + rng.integers(0, 1000, size=d))
    if (X[0] == X).all():
        # Of equal rows nothing is learned.
        X[0] += 1
    return X


KINDS = (
    "normal",
    "duplicates",
    "rank-deficient",
    "one-hot",
    "integers",
    "heavy tails",
    "one wild cell",
    "raw units",
)


@settings(max_examples=30)
@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(4, 150),
    d=st.integers(2, 12),
    K=st.integers(1, 12),
    l=st.integers(0, 11),
    seed=st.integers(0, 2**31),
    solver=st.sampled_from(["natural", "em"]),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_no_drawn_table_fails(kind, n, d, K, l, seed, solver, dtype):
    """Some tables have fewer rows than factors."""
    X = draw_table(kind, n, d, np.random.default_rng(seed))
    if (X.std(axis=0) == 0).all():
        return
    model = MFA(min(K, n), min(l, d - 1), random_state=seed, solver=solver, dtype=dtype).fit(X)
    assert_honest(model, X)


@pytest.mark.parametrize("seed", range(6))
def test_a_rare_cluster_keeps_a_component(seed):
    X = np.random.default_rng(0).normal(size=(3000, 5))
    X[:15] += 50
    scores = MFA(5, 2, random_state=seed).fit(X).score_samples(X)
    assert scores.mean() > -7.2
    assert scores[:15].mean() > -13


@pytest.mark.parametrize("wild", [1e5, 1e6, 1e12])
@both_dtypes
def test_one_wild_cell_leaves_the_other_rows_their_scores(wild, dtype):
    X = datasets.load_iris().data.copy()
    others = np.arange(len(X)) != 7
    clean = MFA(3, 2, random_state=0, dtype=dtype).fit(X[others]).score(X[others])
    X[7, 2] = wild
    model = MFA(4, 2, random_state=0, dtype=dtype).fit(X)
    assert_honest(model, X[others])
    assert model.score(X[others]) > clean - 0.5
    assert np.isfinite(model.score_samples(X)).all()


def test_an_unsupported_factor_is_exactly_zero():
    """Rows of independent columns have no factor, and rows of one direction have one."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(500, 1)) @ rng.normal(size=(1, 8)) + 0.1 * rng.normal(size=(500, 8))
    model = MFA(1, 5, solver="em", max_epochs=3000, random_state=0).fit(X)
    sizes = np.linalg.norm(model.loadings_[0], axis=0)
    assert sizes[0] > 0.5
    tiny = sizes[(sizes > 0) & (sizes < 1e-4)]
    assert len(tiny) == 0


def test_a_good_start_is_found_with_many_factors():
    """Surplus components must not leave the others with factors of too few rows."""
    X = StandardScaler().fit_transform(datasets.load_breast_cancer().data)
    rows = np.random.default_rng(0).permutation(len(X))
    train, test = X[rows[:455]], X[rows[455:]]
    ours = [MFA(2, 15, random_state=s).fit(train).score(test) for s in range(3)]
    em = [MFA(2, 15, solver="em", random_state=s).fit(train).score(test) for s in range(3)]
    assert np.median(ours) > np.median(em) - 0.5


@both_solvers
def test_several_starts_are_no_worse_than_one(solver):
    X = StandardScaler().fit_transform(datasets.load_breast_cancer().data)
    one, several = (
        [MFA(5, 2, solver=solver, n_init=n, random_state=s).fit(X).score(X) for s in range(3)]
        for n in (1, 5)
    )
    assert np.mean(several) > np.mean(one) - 0.05
    assert min(several) >= min(one) - 0.05
