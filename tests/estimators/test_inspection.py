"""Reading a model: factors, components, the rows they stand for, comparison and bins."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.datasets import load_wine
from sklearn.exceptions import NotFittedError

import factormix
from clusters import X, fitted
from factormix import MFA, InputError, inspection
from factormix.training.evaluation import SCORE_ELEMENTS


@pytest.fixture(scope="module")
def model() -> MFA:
    return fitted(solver="natural", max_epochs=60)


def covariances(model: MFA) -> np.ndarray:
    Lambda, D = model.loadings_, model.noise_variances_
    return Lambda @ np.swapaxes(Lambda, 1, 2) + D[:, :, None] * np.eye(D.shape[1])


def component_scores(model: MFA, rows: np.ndarray) -> np.ndarray:
    pairs = zip(model.means_, covariances(model), strict=True)
    return np.stack([multivariate_normal(m, S).logpdf(rows) for m, S in pairs], axis=1)


def test_varimax_is_the_same_density(model):
    view = inspection.varimax(model)
    Lambda = view.loadings_
    np.testing.assert_allclose(
        Lambda @ np.swapaxes(Lambda, 1, 2),
        model.loadings_ @ np.swapaxes(model.loadings_, 1, 2),
        atol=1e-5,
    )
    codes, best = view.transform(X), model.predict(X)
    # A code and its loadings, both rotated, give the same row.
    turned = np.einsum("nl,ndl->nd", codes, Lambda[best])
    plain = np.einsum("nl,ndl->nd", model.transform(X), model.loadings_[best])
    np.testing.assert_allclose(turned, plain, atol=1e-4)


def test_variance_explained_sums_to_one(model):
    found = inspection.variance_explained(model)
    assert sum(found[:3]) == pytest.approx(1)
    total = np.trace(covariances(model), axis1=1, axis2=2)
    noise = model.noise_variances_.sum(axis=1)
    np.testing.assert_allclose(found.per_factor.sum(axis=1), 1 - noise / total, atol=1e-6)
    # Three centres far apart hold most of the variance of these rows.
    assert found.between == pytest.approx(X.reshape(3, 150, 6).mean(axis=1).var(axis=0).sum()
                                          / X.var(axis=0).sum(), abs=0.02)  # fmt: skip


def test_standardised_variance_does_not_depend_on_units():
    raw = load_wine().data
    options = {"n_components": 2, "n_factors": 2, "random_state": 0, "scaling": "feature"}
    one = MFA(**options, dtype="float64").fit(raw)
    other = MFA(**options, dtype="float64").fit(raw * 10.0 ** np.arange(-6, 7))
    standardised = [inspection.variance_explained(m, standardised=True) for m in (one, other)]
    np.testing.assert_allclose(standardised[0][:3], standardised[1][:3], rtol=1e-3)
    raw_shares = inspection.variance_explained(one)
    assert raw_shares.between != pytest.approx(standardised[0].between, 0.05)


def test_communalities(model):
    diagonal = np.diagonal(covariances(model), axis1=1, axis2=2)
    np.testing.assert_allclose(
        inspection.communalities(model), 1 - model.noise_variances_ / diagonal, atol=1e-5
    )


def test_nearest_rows_are_the_best_rows_of_a_component(model):
    scores, best = component_scores(model, X), model.predict(X)
    found = inspection.nearest_rows(model, X, 7)
    assert found.rows.shape == (3, 7)
    for k in range(3):
        own = np.flatnonzero(best == k)
        expected = own[np.argsort(-scores[own, k])][:7]
        assert found.rows[k].tolist() == expected.tolist()
        np.testing.assert_allclose(found.log_likelihoods[k], scores[expected, k], atol=1e-2)


def test_nearest_rows_over_several_blocks(model):
    n = SCORE_ELEMENTS // (6 + 3 * 3) + 1000
    rows = np.random.default_rng(0).normal(size=(n, 6)) + X[np.arange(n) % len(X)]
    found = inspection.nearest_rows(model, rows, 5)
    scores, best = component_scores(model, rows), model.predict(rows)
    for k in range(3):
        own = np.flatnonzero(best == k)
        assert set(found.rows[k]) == set(own[np.argsort(-scores[own, k])][:5])


def test_rows_of_other_components_follow_if_there_are_few(model):
    few = X[[0, 1, 200, 400]]
    found = inspection.nearest_rows(model, few, 10)
    assert found.rows.shape == (3, 4)
    best = model.predict(few)
    for k in range(3):
        mine = (best == k).sum()
        assert set(found.rows[k][:mine]) == set(np.flatnonzero(best == k))
    assert (found.log_likelihoods > -1e6).all()


def test_overlaps_and_distances(model):
    close = inspection.overlaps(model)
    np.testing.assert_allclose(np.diag(close), 1, atol=1e-6)
    np.testing.assert_allclose(close, close.T, atol=1e-9)
    np.testing.assert_allclose(close, np.exp(-inspection.distances(model)))
    other = fitted(n_components=2, solver="natural")
    assert inspection.overlaps(model, other).shape == (3, 2)


def test_confusion_counts_responsibilities(model):
    joint = component_scores(model, X) + np.log(model.weights_)
    R = np.exp(joint - joint.max(axis=1, keepdims=True))
    R /= R.sum(axis=1, keepdims=True)
    best = R.argmax(axis=1)
    expected = np.stack([R[best == k].mean(axis=0) for k in range(3)])
    found = inspection.confusion(model, X)
    np.testing.assert_allclose(found, expected, atol=1e-3)
    np.testing.assert_allclose(found.sum(axis=1), 1)
    assert np.isnan(inspection.confusion(model, X[:5])).any()


def test_comparison_of_single_gaussians_equals_the_formulas():
    """KL by samples against the closed form, and the difference against SciPy's scores."""
    first, second = MFA(1, 1, random_state=0).fit(X[:150]), MFA(1, 2, random_state=0).fit(X[:300])
    found = inspection.compare(first, second, X[:200], n_samples=20_000)
    (m0, S0), (m1, S1) = ((m.means_[0], covariances(m)[0]) for m in (first, second))
    inverse = np.linalg.inv(S1)
    x = m1 - m0
    volumes = np.linalg.slogdet(S1)[1] - np.linalg.slogdet(S0)[1]
    exact = (np.trace(inverse @ S0) + x @ inverse @ x - 6 + volumes) / 2
    assert abs(found.divergence.mean - exact) < 5 * found.divergence.error
    assert found.reverse.mean > 0
    scores = [multivariate_normal(m, S).logpdf(X[:200]) for m, S in ((m0, S0), (m1, S1))]
    gap = scores[0] - scores[1]
    assert found.difference.mean == pytest.approx(gap.mean(), rel=1e-3)
    assert found.difference.error == pytest.approx(gap.std(ddof=1) / np.sqrt(200), rel=1e-3)


def test_a_model_matches_itself_in_another_order(model):
    found = inspection.compare(model, model)
    assert [(m.first, m.second) for m in found.matches] == [(k, k) for k in range(3)]
    assert all(m.overlap == pytest.approx(1, abs=1e-6) for m in found.matches)
    assert found.divergence.mean == pytest.approx(0, abs=1e-9)
    assert found.difference is None
    again = fitted(solver="natural", max_epochs=60, random_state=7)
    pairs = inspection.compare(model, again).matches
    for pair in pairs:
        np.testing.assert_allclose(model.means_[pair.first], again.means_[pair.second], atol=0.3)
    assert {pair.second for pair in pairs} == {0, 1, 2}


def test_comparison_of_other_sizes_matches_the_smaller(model):
    two = fitted(n_components=2, solver="natural")
    assert len(inspection.compare(model, two, n_samples=100).matches) == 2
    assert len(inspection.compare(two, model, n_samples=100).matches) == 2


def test_models_that_cannot_be_compared(model):
    with pytest.raises(InputError, match="first model has 6 features and the second 3"):
        inspection.compare(model, fitted(X[:, :3]))
    named = [
        fitted(pd.DataFrame(X, columns=list(names)), max_epochs=1) for names in ("abcdef", "fedcba")
    ]
    with pytest.raises(InputError, match="in another order"):
        inspection.compare(*named)
    with pytest.raises(InputError, match="n_samples must be a whole number of at least 2"):
        inspection.compare(model, model, n_samples=1)


def test_bins_of_the_same_distribution_hardly_differ():
    rng = np.random.default_rng(0)
    rows, same = rng.normal(size=(6000, 4)), rng.normal(size=(6000, 4))
    found = inspection.ndb(rows, same, 40)
    assert found.n_bins == 40
    assert found.n_different <= 8
    assert found.proportions.sum() == pytest.approx(1)
    assert (np.diff(found.proportions) <= 0).all()
    assert found.centres.shape == (40, 4)


def test_bins_find_a_mode_that_is_missing():
    found = inspection.ndb(X, X[:300], 9)
    missing = found.sample_proportions == 0
    assert found.proportions[missing].sum() == pytest.approx(1 / 3, abs=0.05)
    assert found.different[missing].all()
    assert found.share == found.n_different / 9
    assert found.divergence > 0.1


def test_samples_of_a_good_model_differ_in_fewer_bins(model):
    bad = MFA(1, 0, random_state=0).fit(X)
    good, poor = (inspection.ndb(X, m.sample(2000)[0], 20) for m in (model, bad))
    assert good.n_different < poor.n_different
    assert good.divergence < poor.divergence


def test_bad_bins():
    with pytest.raises(InputError, match="X has 6 features and samples have 3"):
        inspection.ndb(X, X[:, :3])
    with pytest.raises(InputError, match="lower n_bins"):
        inspection.ndb(X[:50], X)
    with pytest.raises(InputError, match="alpha must lie between 0 and 1"):
        inspection.ndb(X, X, 5, alpha=1.5)
    with pytest.raises(InputError, match="samples has missing values"):
        inspection.ndb(X, np.full((5, 6), np.nan), 5)


def test_tensors_are_read_as_well():
    rows = torch.from_numpy(X)
    model = fitted(rows, solver="natural")
    assert inspection.nearest_rows(model, rows).rows.shape == (3, 5)
    assert inspection.varimax(model).transform(rows).shape == (450, 2)
    assert inspection.ndb(rows, model.sample(200)[0], 5).n_bins == 5


def test_rows_with_missing_values_are_refused_in_one_sentence(model):
    partial = np.where(X > 3, np.nan, X)
    for read in (inspection.nearest_rows, inspection.confusion):
        with pytest.raises(InputError, match=r"missing values \(NaN\).*fill them in with impute"):
            read(model, partial)


@pytest.mark.parametrize(
    "read",
    [
        inspection.varimax,
        inspection.variance_explained,
        inspection.communalities,
        inspection.overlaps,
        lambda model: inspection.confusion(model, X),
        lambda model: inspection.nearest_rows(model, X),
        lambda model: inspection.compare(model, model),
    ],
)
def test_an_unfitted_model_says_so(read):
    with pytest.raises(NotFittedError):
        read(MFA())


def test_other_kinds_of_models_are_refused_in_one_sentence():
    rows = np.random.default_rng(0).normal(size=(40, 3))
    labels = np.arange(40) % 2
    classes = factormix.MFAClassifier(1, 1, max_epochs=2, random_state=0).fit(rows, labels)
    mixture = factormix.MFA(1, 1, max_epochs=2, random_state=0).fit(rows)
    for call in (
        lambda: inspection.varimax(classes),
        lambda: inspection.nearest_rows(classes, rows),
        lambda: inspection.overlaps(mixture, "x"),
        lambda: inspection.compare(mixture, classes, rows),
    ):
        with pytest.raises(factormix.InputError, match="a fitted MFA is needed here, not"):
            call()
    with pytest.raises(factormix.InputError, match="estimator must be an MFA, not MFAClassifier"):
        factormix.select(rows, [1], [1], estimator=classes)
