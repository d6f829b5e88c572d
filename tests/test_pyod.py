"""The adapter keeps what PyOD asks of its detectors: the checks of their own suite."""

from __future__ import annotations

import importlib
import re
import sys

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less

pytest.importorskip("pyod")
from pyod.models.base import BaseDetector
from pyod.models.knn import KNN
from pyod.utils.data import generate_data
from pyod.utils.utility import standardizer
from scipy.stats import rankdata
from sklearn.base import clone
from sklearn.metrics import roc_auc_score

from factormix import InputError
from factormix.pyod import MFAOD

X_train, X_test, y_train, y_test = generate_data(
    n_train=200, n_test=100, n_features=3, contamination=0.1, random_state=42
)


@pytest.fixture(scope="module", params=[False, True], ids=["contaminated", "novelty"])
def model(request) -> MFAOD:
    return MFAOD(contamination=0.1, novelty=request.param, random_state=0).fit(X_train)


def test_attributes(model):
    assert isinstance(model, BaseDetector)
    for name in ("decision_scores_", "labels_", "threshold_", "_mu", "_sigma"):
        assert getattr(model, name) is not None
    assert model.decision_scores_.shape == (200,)
    assert_array_equal(model.labels_, model.decision_scores_ > model.threshold_)
    assert model.labels_.sum() == 20


def test_scores_are_high_for_outliers(model):
    assert roc_auc_score(y_train, model.decision_scores_) >= 0.95
    scores = model.decision_function(X_test)
    assert scores.shape == (100,)
    assert roc_auc_score(y_test, scores) >= 0.95
    assert_allclose(scores, -model.detector_.score_samples(X_test))


def test_labels_are_zero_and_one(model):
    labels = model.predict(X_test)
    assert_array_equal(np.unique(labels), [0, 1])
    assert_array_equal(labels, model.decision_function(X_test) > model.threshold_)
    labels, confidence = model.predict(X_test, return_confidence=True)
    assert confidence.min() >= 0
    assert confidence.max() <= 1


@pytest.mark.parametrize("method", ["linear", "unify"])
def test_probabilities(model, method):
    found = model.predict_proba(X_test, method=method)
    assert found.min() >= 0
    assert found.max() <= 1
    assert_allclose(found.sum(axis=1), 1)


def test_an_unknown_probability_is_refused(model):
    with pytest.raises(ValueError, match="something"):
        model.predict_proba(X_test, method="something")


def test_ranks(model):
    # Theirs are ranks among the training rows, where several new rows may share one.
    ranks, scores = model._predict_rank(X_test), model.decision_function(X_test)
    assert_allclose(rankdata(ranks), rankdata(scores), atol=3)
    normalised = model._predict_rank(X_test, normalized=True)
    assert_array_less(normalised, 1.01)
    assert_array_less(-0.1, normalised)


def test_fit_predict_and_score():
    fresh = MFAOD(contamination=0.1, random_state=0)
    labels = fresh.fit_predict(X_train)
    assert_array_equal(labels, fresh.labels_)
    fresh.fit_predict_score(X_test, y_test)
    fresh.fit_predict_score(X_test, y_test, scoring="prc_n_score")
    with pytest.raises(NotImplementedError):
        fresh.fit_predict_score(X_test, y_test, scoring="something")


def test_can_be_cloned_and_seen(model):
    copy = clone(model)
    assert copy.get_params() == model.get_params()
    assert not hasattr(copy, "decision_scores_")
    assert "MFAOD(contamination=0.1" in repr(model)


def test_goes_together_with_other_detectors(model):
    other = KNN().fit(X_train)
    both = np.column_stack([d.decision_function(X_test) for d in (model, other)])
    assert roc_auc_score(y_test, standardizer(both).mean(axis=1)) >= 0.95


def test_reasons_sum_to_minus_the_score(model):
    found = model.explain(X_test)
    assert_allclose(found.contributions.sum(axis=1), -model.decision_function(X_test), rtol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.6, -0.1])
def test_contamination_is_checked_by_pyod(share):
    with pytest.raises(ValueError, match="contamination must be in"):
        MFAOD(contamination=share)


def test_invalid_rows_are_refused(model):
    with pytest.raises(InputError, match="infinite"):
        model.decision_function([[np.inf, 0.0, 0.0]])
    with pytest.raises(InputError, match="features"):
        model.predict(X_test[:, :2])


def test_without_pyod_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyod.models.base", None)
    monkeypatch.delitem(sys.modules, "factormix.pyod")
    with pytest.raises(ImportError, match=re.escape('pip install "factormix[pyod]"')):
        importlib.import_module("factormix.pyod")


def test_missing_values_are_allowed(model):
    X = X_train.copy()
    X[::3, 0] = np.nan
    fresh = clone(model).fit(X)
    assert np.isfinite(fresh.decision_scores_).all()
    assert fresh.labels_.sum() == 20
