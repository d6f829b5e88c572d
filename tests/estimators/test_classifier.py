"""The classifier: Bayes' rule over densities, rejection, streams, files, and its conventions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import logsumexp, softmax
from sklearn.base import clone, is_classifier
from sklearn.datasets import load_digits, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.naive_bayes import GaussianNB
from sklearn.utils.estimator_checks import parametrize_with_checks

from densities import exact_scores
from factormix import MFA, InputError, MFAClassifier, load
from factormix.data.readers import read_rows
from factormix.solvers import NaturalGradient

SMALL = {"n_components": 2, "n_factors": 1, "max_epochs": 10}
X, y = load_iris(return_X_y=True)
NAMES = np.array(["setosa", "versicolor", "virginica"])[y]

LIKELIEST = NaturalGradient(predict_variances=False)
"""Maximum likelihood, which does not depend on the number of rows."""
EQUIVALENCE = "check_sample_weight_equivalence_on_dense_data"
START = (
    "Classes of very few rows get fewer components, one for every two rows, and rows of weight two"
    " are one row each; with one component, or in tests/data/test_weights.py, fits agree."
)


STREAM = "it calls partial_fit, and batch EM turns a stream down in one sentence."


def expected_failures(model: MFAClassifier) -> dict[str, str]:
    streams = (
        "check_n_features_in_after_fitting",
        "check_fit_score_takes_y",
        "check_estimators_partial_fit_n_features",
    )
    no_stream = dict.fromkeys(streams, STREAM) if model.solver == "em" else {}
    return no_stream | ({EQUIVALENCE: START} if model.n_components > 1 else {})


@parametrize_with_checks(
    [
        MFAClassifier(1, 1, max_epochs=10, dtype="float64", solver=LIKELIEST),
        MFAClassifier(**SMALL),
        MFAClassifier(**SMALL, solver="em"),
    ],
    expected_failed_checks=expected_failures,
)
def test_scikit_learn_check(estimator, check):
    check(estimator)


def fitted(**options: Any) -> MFAClassifier:
    return MFAClassifier(**{"n_components": 1, "n_factors": 2, "random_state": 0} | options).fit(
        X, y
    )


def test_bayes_rule_over_exact_densities():
    model = fitted(n_components=2, priors=[0.5, 0.2, 0.3])
    joint = np.stack([exact_scores(one, X) for one in model.estimators_], axis=1)
    joint += np.log([0.5, 0.2, 0.3])
    np.testing.assert_allclose(model.predict_proba(X), softmax(joint, axis=1), atol=1e-6)
    np.testing.assert_allclose(model.score_samples(X), logsumexp(joint, axis=1), rtol=1e-4)
    np.testing.assert_array_equal(model.predict(X), joint.argmax(axis=1))
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), model.predict_proba(X))
    assert model.score(X, y) > 0.95
    assert is_classifier(model)


def test_one_diagonal_gaussian_is_naive_bayes():
    """With one component, no factors and hardly any floor it is scikit-learn's GaussianNB."""
    options = {"noise_floor": 1e-7, "random_state": 0, "dtype": "float64"}
    model = MFAClassifier(1, 0, solver=LIKELIEST, **options).fit(X, y)
    peer = GaussianNB(var_smoothing=0).fit(X, y)
    np.testing.assert_allclose(model.predict_proba(X), peer.predict_proba(X), atol=1e-3)
    np.testing.assert_array_equal(model.predict(X), peer.predict(X))
    # By default, variances are those to expect of new rows: 50 rows and one mean of a feature.
    peer.var_ *= 51 / 49
    wider = MFAClassifier(1, 0, **options).fit(X, y)
    np.testing.assert_allclose(wider.predict_proba(X), peer.predict_proba(X), atol=1e-3)


def test_digits_are_classified():
    rows, labels = load_digits(return_X_y=True)
    folds = StratifiedKFold(2, shuffle=True, random_state=0)
    scores = cross_val_score(MFAClassifier(random_state=0), rows, labels, cv=folds)
    naive = cross_val_score(GaussianNB(), rows, labels, cv=folds)
    assert scores.mean() > 0.96 > naive.mean()


def test_works_in_a_grid_search():
    search = GridSearchCV(
        MFAClassifier(n_factors=1, random_state=0, max_epochs=20),
        {"n_components": [1, 3], "noise_floor": [0.01, 0.3]},
        cv=StratifiedKFold(3, shuffle=True, random_state=0),
    ).fit(X, y)
    assert search.best_score_ > 0.9


def test_priors_follow_the_rows_unless_given():
    skewed = np.r_[0:50, 50:60, 100:140]
    model = MFAClassifier(1, 1, random_state=0).fit(X[skewed], y[skewed])
    np.testing.assert_allclose(model.class_prior_, [0.5, 0.1, 0.4])
    weights = np.where(y == 1, 3.0, 1.0)
    np.testing.assert_allclose(
        MFAClassifier(1, 1).fit(X, y, sample_weight=weights).class_prior_, [0.2, 0.6, 0.2]
    )
    none = MFAClassifier(1, 1, priors=[0.5, 0.5, 0]).fit(X, y)
    assert (none.predict_proba(X)[:, 2] == 0).all()
    assert set(none.predict(X)) == {0, 1}
    assert (none.predict_log_proba(X)[:, 2] == -np.inf).all()


def test_rows_of_weight_zero_and_their_classes_do_not_count():
    weights = np.where(y == 1, 0.0, 1.0)
    model = MFAClassifier(1, 1, random_state=0).fit(X, y, sample_weight=weights)
    assert model.classes_.tolist() == [0, 2]
    plain = MFAClassifier(1, 1, random_state=0).fit(X[y != 1], y[y != 1])
    np.testing.assert_array_equal(model.predict(X), plain.predict(X))


@pytest.mark.parametrize("by", ["ratio", "margin", "density"])
def test_rejects_the_share_of_training_rows_that_is_least_sure(by):
    model = fitted(reject=0.1, reject_by=by)
    plain = fitted()
    predicted = model.predict(X)
    rejected = predicted == -1
    assert rejected.sum() == 15
    sure = model.confidence(X)
    assert (sure[rejected] < model.reject_threshold_).all()
    assert (sure[~rejected] >= model.reject_threshold_).all()
    np.testing.assert_array_equal(predicted[~rejected], plain.predict(X)[~rejected])
    np.testing.assert_array_equal(model.predict_proba(X), plain.predict_proba(X))
    wrong = plain.predict(X) != y
    if by != "density":
        top = np.sort(plain.predict_log_proba(X), axis=1)
        gap = top[:, -1] - top[:, -2]
        level = plain.score_samples(X)
        far = np.maximum(level.max() - level, 1) if by == "ratio" else 1.0
        np.testing.assert_allclose(sure, gap / far, rtol=1e-5, atol=1e-6)
        assert wrong[rejected].mean() > wrong.mean()
    else:
        np.testing.assert_allclose(sure, plain.score_samples(X))
        assert model.predict([[50.0, -3.0, 40.0, 8.0]]).tolist() == [-1]
        assert plain.predict([[50.0, -3.0, 40.0, 8.0]])[0] in (0, 1, 2)


def test_labels_of_rejected_rows():
    named = MFAClassifier(1, 2, reject=0.1, random_state=0).fit(X, NAMES)
    assert set(named.predict(X)) == {*NAMES, "rejected"}
    named.set_params(reject_label="a flower that is none of these")
    assert "a flower that is none of these" in set(named.predict(X))
    zero = MFAClassifier(1, 2, reject=0.1, reject_label=7).fit(X, y)
    assert set(zero.predict(X)) == {0, 1, 2, 7}
    with pytest.raises(InputError, match="reject_label=-1 is one of the classes"):
        MFAClassifier(1, 1, reject=0.1).fit(X, y - 1)
    with pytest.raises(InputError, match="reject_label='setosa' is one of the classes"):
        MFAClassifier(1, 1, reject=0.1, reject_label="setosa").fit(X, NAMES)


def test_classes_choose_their_sizes():
    rng = np.random.default_rng(0)
    two = np.concatenate([rng.normal(-6, 1, (200, 3)), rng.normal(6, 1, (200, 3))])
    rows = np.concatenate([two, rng.normal(0, 1, (400, 3))])
    labels = np.repeat([0, 1], 400)
    model = MFAClassifier([1, 2, 20], [0], noise_floor=1e-3, random_state=0).fit(rows, labels)
    assert model.estimators_[0].n_components == 2
    assert model.estimators_[1].n_components == 1
    assert model.score(rows, labels) > 0.99
    with pytest.raises(InputError, match="partial_fit needs one size"):
        MFAClassifier([1, 2]).partial_fit(X, y, classes=[0, 1, 2])


def test_small_classes_have_fewer_components():
    few = np.r_[0:50, 50:53, 100:101]
    model = MFAClassifier(4, 1, random_state=0).fit(X[few], y[few])
    assert [one.n_components for one in model.estimators_] == [4, 1, 1]
    assert model.predict(X[100:101]).tolist() == [2]
    assert np.isfinite(model.predict_proba(X)).all()


def test_all_classes_share_units_and_floors():
    constant = X.copy()
    constant[y == 0, 3] = 0.2
    model = MFAClassifier(1, 1, noise_floor=0.05, random_state=0).fit(constant, y)
    floors = [one.noise_variances_.min(axis=0) for one in model.estimators_]
    spread = constant.var(axis=0).min()
    assert all((floor >= 0.05 * 0.9 * spread).all() for floor in floors)
    # A value that its class never had does not make a row impossible.
    row = constant[:1] + np.array([[0, 0, 0, 0.1]])
    assert model.predict(row).tolist() == [0]


def test_a_stream_learns_as_much_as_a_fit():
    rng = np.random.default_rng(0)
    rows, labels = load_digits(return_X_y=True)
    model = MFAClassifier(2, 2, random_state=0, reject=0.05)
    for part in np.array_split(rng.permutation(len(rows)), 6):
        model.partial_fit(rows[part], labels[part], classes=np.arange(10))
    assert model.score(rows, labels) > 0.85
    assert model.n_features_in_ == 64
    np.testing.assert_allclose(model.class_prior_, np.bincount(labels) / len(labels))
    assert np.isfinite(model.reject_threshold_)


def test_a_stream_keeps_the_names_of_its_first_columns():
    frame = pd.DataFrame(X, columns=list("abcd"))
    model = MFAClassifier(1, 1, random_state=0).partial_fit(frame, y, classes=[0, 1, 2])
    model.partial_fit(torch.from_numpy(X), y)
    assert model.feature_names_in_.tolist() == list("abcd")


def test_a_class_may_come_later_or_never():
    model = MFAClassifier(1, 1, random_state=0)
    model.partial_fit(X[:100], y[:100], classes=[0, 1, 2, 3])
    assert model.estimators_[2] is None
    assert (model.predict_proba(X)[:, 2:] == 0).all()
    model.partial_fit(X[100:], y[100:])
    assert model.estimators_[3] is None
    assert model.score(X, y) > 0.9
    for first, later in zip(model.estimators_[:2], model.estimators_[1:3], strict=True):
        # The later class has the units of the first call.
        assert first._run.units is later._run.units


@pytest.mark.parametrize("labels", [y, NAMES, y == 1, NAMES.astype(object), y - 1.0])
def test_files_keep_everything(labels, tmp_path):
    path = tmp_path / "c.safetensors"
    options = {"reject": 0.1, "reject_label": "?" if labels.dtype.kind in "UO" else 9}
    frame = pd.DataFrame(X, columns=list("abcd"))
    solver = NaturalGradient(exponent=0.7)
    model = MFAClassifier(2, 1, solver=solver, random_state=0, **options).fit(frame, labels)
    model.save(path)
    copy = load(path)
    assert type(copy) is MFAClassifier
    assert copy.get_params() == model.get_params()
    assert copy.classes_.dtype == model.classes_.dtype
    assert copy.feature_names_in_.tolist() == list("abcd")
    assert copy.reject_threshold_ == model.reject_threshold_
    assert copy.reject_level_ == model.reject_level_
    np.testing.assert_array_equal(copy.predict(frame), model.predict(frame))
    np.testing.assert_array_equal(copy.predict_proba(frame), model.predict_proba(frame))


def test_a_stream_goes_on_after_loading(tmp_path):
    path = tmp_path / "c.safetensors"
    model = MFAClassifier(1, 1, random_state=0, priors=[0.2, 0.3, 0.5])
    model.partial_fit(X[:100], y[:100], classes=[0, 1, 2])
    model.save(path)
    copy = load(path)
    assert copy.estimators_[2] is None
    for one in (model, copy):
        one.partial_fit(X, y)
    np.testing.assert_array_equal(copy.predict_proba(X), model.predict_proba(X))
    model.save(path, training_state=False)
    with pytest.raises(InputError, match="saved without its training state"):
        load(path).partial_fit(X, y)


@pytest.mark.parametrize("kind", ["tensor", "frame", "map"])
def test_rows_of_every_kind(kind, tmp_path):
    np.save(tmp_path / "x.npy", X)
    rows = {
        "tensor": torch.from_numpy(X),
        "frame": pd.DataFrame(X, columns=list("abcd")),
        "map": np.load(tmp_path / "x.npy", mmap_mode="r"),
    }[kind]
    labels = torch.from_numpy(y) if kind == "tensor" else pd.Series(y)
    model = MFAClassifier(1, 2, random_state=0).fit(rows, labels)
    predicted, shares = model.predict(rows), model.predict_proba(rows)
    assert isinstance(predicted, torch.Tensor) == (kind == "tensor")
    assert isinstance(shares, torch.Tensor) == (kind == "tensor")
    np.testing.assert_allclose(np.asarray(shares), fitted().predict_proba(X), atol=2e-3)


def test_the_bar_shows_class_and_likelihood(terminal, capsys):
    MFAClassifier(1, 1, verbose=1, random_state=0).fit(X, NAMES)
    shown = capsys.readouterr().err
    assert "100%" in shown
    assert "class virginica, ll=" in shown


BAD: dict[str, tuple[dict[str, Any], Any, Any, str]] = {
    "no labels": ({}, X, None, "requires y to be passed"),
    "few labels": ({}, X, y[:5], "y has 5 labels and X has 150 rows"),
    "numbers as labels": ({}, X, X[:, 0] + 0.123, "Unknown label type"),
    "one row": ({}, X[:1], y[:1], "n_samples=1"),
    "two priors": ({"priors": [0.5, 0.5]}, X, y, "priors must be 3 numbers of 0 or more"),
    "negative priors": ({"priors": [-1, 1, 1]}, X, y, "priors must be 3 numbers of 0 or more"),
    "priors of two": ({"priors": [1, 0.5, 0.5]}, X, y, "priors must sum to 1, not 2"),
    "reject all": ({"reject": 1}, X, y, "reject must be a share from 0 to below 1, not 1"),
    "reject by": (
        {"reject_by": "x"},
        X,
        y,
        "reject_by must be one of margin, ratio, density",
    ),
    "no smoothing": ({"noise_floor": 0}, X, y, "noise_floor must be a positive number"),
    "much smoothing": ({"noise_floor": 2}, X, y, "noise_floor must be at most 1"),
    "size": ({"n_components": 0}, X, y, "n_components must be a whole number"),
    "sizes": ({"n_components": [0, 1]}, X, y, "n_components must be a whole number"),
    "factors": ({"n_factors": 4}, X, y, "n_factors=4 must be smaller than n_features=4"),
    "infinite": ({}, np.where(X > 7, np.inf, X), y, "an infinite value"),
    "solver": ({"solver": "x"}, X, y, "solver must be one of"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_input_is_refused_in_one_sentence(name):
    options, rows, labels, expected = BAD[name]
    with pytest.raises(ValueError, match=expected):
        MFAClassifier(**options).fit(rows, labels)


def test_bad_streams():
    with pytest.raises(InputError, match="classes must be passed on the first call"):
        MFAClassifier().partial_fit(X, y)
    with pytest.raises(InputError, match="label 2, which is not among the classes"):
        MFAClassifier().partial_fit(X, y, classes=[0, 1])
    with pytest.raises(InputError, match="too few for the first call"):
        MFAClassifier().partial_fit(X[:5], y[:5], classes=[0, 1])
    with pytest.raises(InputError, match="classes are not the same as in the first call"):
        MFAClassifier().partial_fit(X, y, classes=[0, 1, 2]).partial_fit(X, y, classes=[0, 1])
    with pytest.raises(InputError, match="needs passes over data of known length"):
        MFAClassifier(solver="em").partial_fit(X, y, classes=[0, 1, 2])


def test_an_unfitted_classifier_says_so(tmp_path):
    for method in ("predict", "predict_proba", "score_samples", "confidence"):
        with pytest.raises(NotFittedError):
            getattr(MFAClassifier(), method)(X)
    with pytest.raises(NotFittedError):
        clone(fitted()).predict(X)
    assert not hasattr(MFAClassifier(), "classes_")


def holes(rows: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    return np.where(np.random.default_rng(seed).random(rows.shape) < share, np.nan, rows)


def test_missing_values_in_training_and_in_new_rows():
    model = MFAClassifier(1, 2, random_state=0, reject=0.05).fit(holes(X, 0.1), y)
    assert model.score(X, y) > 0.85
    shares = model.predict_proba(holes(X, 0.3, seed=1))
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    assert (shares.argmax(axis=1) == y).mean() > 0.85
    # A row without any observed entry is classified by the priors alone.
    np.testing.assert_allclose(model.predict_proba(np.full((1, 4), np.nan))[0], model.class_prior_)


def test_a_column_that_a_class_never_has_does_not_stop_it():
    partial = X.copy()
    partial[y == 2, 1] = np.nan
    model = MFAClassifier(1, 1, random_state=0).fit(partial, y)
    assert np.isfinite(model.predict_proba(X)).all()
    assert (model.predict(partial) == y).mean() > 0.9
    partial[:, 1] = np.nan
    with pytest.raises(InputError, match="no value in column 1"):
        MFAClassifier(1, 1).fit(partial, y)


def test_members_are_ordinary_mixtures():
    member = fitted().estimators_[1]
    assert type(member) is MFA
    drawn, _ = member.sample(50)
    assert (fitted().predict(drawn) == 1).mean() > 0.8


@pytest.mark.parametrize("by", ["ratio", "margin"])
def test_where_one_class_is_possible_nothing_is_between_classes(by, tmp_path):
    options: dict[str, Any] = {"reject": 0.05, "reject_by": by, "random_state": 0, "max_epochs": 5}
    alone = MFAClassifier(2, 1, **options).fit(X, np.zeros(len(X)))
    certain = MFAClassifier(2, 1, priors=[1, 0, 0], **options).fit(X, y)
    first = MFAClassifier(2, 1, **options).partial_fit(X[:50], y[:50], classes=[0, 1, 2])
    for model in (alone, certain, first):
        assert set(model.predict(X)) == {0}
        model.save(tmp_path / "c.safetensors")
        assert set(load(tmp_path / "c.safetensors").predict(X)) == {0}


@pytest.mark.parametrize("by", ["ratio", "margin", "density"])
def test_rows_of_which_nothing_is_observed_are_rejected(by):
    empty = np.full((10, 4), np.nan)
    train, labels = np.concatenate([X, empty]), np.concatenate([y, np.arange(10) % 3])
    model = MFAClassifier(1, 2, reject=0.1, reject_by=by, random_state=0).fit(train, labels)
    assert (model.predict(empty) == -1).all()
    assert (model.confidence(empty) < model.confidence(X).min()).all()
    # They do not count among the rows that the threshold is set by.
    assert (model.predict(X) == -1).sum() == 15
    assert model.reject_level_ == pytest.approx(model.score_samples(X).max())


def test_predictions_beside_a_label_of_another_kind_stay_as_they_are():
    is_first = y == 0
    labels = MFAClassifier(1, 2, reject=0.1, random_state=0).fit(X, is_first).predict(X)
    assert {type(one) for one in labels} == {bool, int}
    accepted = labels != -1
    assert accepted.sum() == 135
    assert (labels[accepted] == is_first[accepted]).mean() > 0.99
    named = MFAClassifier(1, 2, reject=0.1, reject_label="unsure", random_state=0).fit(X, y)
    assert set(named.predict(X)) == {0, 1, 2, "unsure"}
    assert MFAClassifier(1, 2, random_state=0).fit(X, is_first).predict(X).dtype == bool


@pytest.mark.parametrize("n_components", [2, [1, 2]])
def test_the_number_of_jobs_does_not_change_the_mixtures(n_components, tmp_path):
    pd.DataFrame(X).to_parquet(tmp_path / "rows.parquet")
    options = {"n_components": n_components, "n_factors": 1, "max_epochs": 20, "random_state": 0}
    for rows in (X, read_rows(tmp_path / "rows.parquet")):
        one, two = (MFAClassifier(**options, n_jobs=n).fit(rows, NAMES) for n in (None, 2))
        np.testing.assert_array_equal(two.predict_proba(rows), one.predict_proba(rows))
    with pytest.raises(InputError, match="n_jobs must be None, a whole number"):
        MFAClassifier(n_jobs=0).fit(X, NAMES)
