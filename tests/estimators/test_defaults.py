"""The defaults on small tables, constant columns and whole numbers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_iris, load_wine
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import KFold

from factormix import MFA, select
from factormix.estimators.validation import check_options, count_components
from factormix.solvers import CovarianceGradient


@pytest.mark.parametrize(
    ("n_rows", "expected"), [(2, 1), (100, 1), (101, 2), (1000, 10), (10**6, 25), (None, 25)]
)
def test_there_is_a_component_for_every_hundred_rows(n_rows, expected):
    assert count_components(check_options(MFA()), n_rows) == expected
    assert count_components(check_options(MFA(7)), n_rows) == 7
    scales = MFA(solver=CovarianceGradient(scales=5))
    assert count_components(check_options(scales), n_rows) == 5 * expected


@pytest.mark.parametrize("load", [load_iris, load_wine, load_breast_cancer])
def test_the_default_is_no_worse_than_a_gaussian_or_scikit_learn_s_mixture(load):
    X = load().data
    found = []
    for learn, judge in KFold(5, shuffle=True, random_state=0).split(X):
        ours = MFA(random_state=0).fit(X[learn])
        assert ours.n_components_ == len(ours.weights_) == -(-len(learn) // 100)
        peers = [GaussianMixture(K, random_state=0) for K in (1, ours.n_components_)]
        found.append([m.score(X[judge]) for m in (ours, *(p.fit(X[learn]) for p in peers))])
    ours, *others = np.mean(found, axis=0)
    assert ours > max(others)


def test_components_with_too_few_rows_are_warned_of():
    X = load_wine().data
    with pytest.warns(UserWarning, match=r"10 components with 4 .* 178 rows .* n_components=8"):
        MFA(10, 4, max_epochs=1).fit(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MFA(8, 4, max_epochs=1).fit(X)
        MFA(max_epochs=1).fit(X[:20])


@pytest.fixture(scope="module")
def houses() -> np.ndarray:
    rng = np.random.default_rng(0)
    price = 200_000 + 60_500 * rng.normal(size=800)
    area = price / 2000 + 5 * rng.normal(size=800)
    return np.column_stack([price, area, np.full(800, 5.0), rng.integers(1, 6, size=800)])


@pytest.mark.parametrize("scaling", ["global", "feature"])
@pytest.mark.parametrize("solver", ["natural", "em", "sgd"])
def test_a_constant_column_has_a_scale_of_its_own(houses, scaling, solver):
    model = MFA(4, 2, scaling=scaling, solver=solver, random_state=0, max_epochs=20).fit(houses)
    assert np.sqrt(model.noise_variances_[:, 2]).max() < 0.1
    assert np.abs(model.sample(100)[0][:, 2] - 5).max() < 0.5
    usual, changed = houses[:1], houses[:1].copy()
    changed[0, 2] = 100
    assert model.score(changed) < model.score(usual) - 1000
    assert model.explain(changed).ranking()[0, 0] == 2


@pytest.mark.parametrize("size", [(1, 0), (5, 2), (25, 4)])
def test_a_rare_value_of_a_nearly_constant_column_is_unlikely_but_possible(size):
    """Two rows are too few for a component, so the others must not exclude their values."""
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=(1000, 5)), np.zeros(1000)])
    X[:2, 5] = 3.1, 7.7
    model = MFA(*size, random_state=0).fit(X)
    usual, rare = np.zeros((1, 6)), np.zeros((1, 6))
    rare[0, 5] = 5.2
    # The best of one Gaussian: half of the squared distance in deviations of the column.
    distance = 0.5 * (5.2 / X[:, 5].std()) ** 2
    assert -1.1 * distance - 10 < model.score(rare) - model.score(usual) < -20


def test_columns_of_a_category_have_the_floor_of_their_share():
    rng = np.random.default_rng(0)
    town = rng.choice(4, p=[0.6, 0.3, 0.097, 0.003], size=1000)
    X = np.column_stack([rng.normal(size=1000), np.eye(4)[town]])
    model = MFA(random_state=0).fit(X)
    floors = np.minimum(1 / (2 * np.pi), X[:, 1:].var(axis=0))
    assert (model.noise_variances_[:, 1:] > 0.99 * floors).all()


def test_select_is_not_fooled_by_whole_numbers():
    """Spikes on whole numbers gain likelihood without a bound, if the density has none."""
    rng = np.random.default_rng(1)
    rooms = rng.integers(1, 9, size=1500)
    area = 30 * rooms + 10 * rng.normal(size=1500)
    X = np.column_stack([area, rooms, rng.normal(size=1500)])
    found = select(X, [1, 2, 5, 10, 25, 50], estimator=MFA(random_state=0, max_epochs=20))
    # The true density: one of eight whole numbers, and two normal variables.
    truth = -np.log(8) - np.log(10) - np.log(2 * np.pi) - 1
    assert truth - 0.5 < found.best_score_ < truth + 0.15
    assert np.sqrt(found.best_estimator_.noise_variances_[:, 1]).min() > 0.39


def test_the_mass_of_a_whole_number_is_at_most_one():
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.integers(0, 2, size=(400, 3)), rng.integers(0, 10, size=400)])
    for solver in ("natural", "em"):
        model = MFA(30, 0, solver=solver, random_state=0).fit(X.astype(float))
        assert model.score_samples(X.astype(float)).max() <= 0
