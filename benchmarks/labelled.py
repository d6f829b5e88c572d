"""The trials of the benchmark of classes: a choice on training rows, and the test after it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix import MFAClassifier, datasets
from factormix.studies.harness import Outcome, Settings

__all__ = ["MEASURES", "choose", "judge", "peer"]

Rows = tuple[NDArray[Any], NDArray[Any]]
MEASURES = ("margin", "ratio", "density")
REJECTED = 0.05
"""Share of the least sure by which measures are compared on training rows."""


def choose(settings: Settings, data_folder: str | None) -> Outcome:
    """Train on some of the training rows, and judge by others of them that were held out."""
    (X, y), (X_val, y_val) = _training_parts(settings, data_folder)
    model, seconds = _trained(settings, X, y)
    wrong, errors = model.predict(X_val) != y_val, dict[str, float]()
    for by in MEASURES:
        sure = model.set_params(reject_by=by).confidence(X_val)
        least = np.argsort(sure, kind="stable")[: round(REJECTED * len(sure))]
        errors[by] = float(wrong[least].mean())
    values: dict[str, Any] = {"accuracy": float(1 - wrong.mean()), "errors": errors}
    return Outcome(values | {"sizes": _sizes(model), "seconds": seconds})


def judge(settings: Settings, data_folder: str | None) -> Outcome:
    """Train on all training rows with what was chosen, and look at the test rows, once."""
    X, y = _load(settings, "train", data_folder)
    X_test, y_test = _load(settings, "test", data_folder)
    model, seconds = _trained(settings, X, y)
    predicted = model.predict(X_test)
    arrays = {"wrong": (predicted != y_test).astype(np.uint8)}
    values: dict[str, Any] = {"accuracy": float((predicted == y_test).mean()), "seconds": seconds}
    values |= {"sizes": _sizes(model), "rejected": {}}
    for by in MEASURES:
        model.set_params(reject_by=by)
        arrays[by] = np.asarray(model.confidence(X_test), dtype=np.float64)
        sure = np.asarray(model.confidence(X), dtype=np.float64)
        # What reject=0.01 would do to the test rows.
        values["rejected"][by] = float((arrays[by] < np.quantile(sure, 0.01)).mean())
    return Outcome(values, arrays)


def peer(settings: Settings, data_folder: str | None) -> Outcome:
    """Train one Gaussian per class on principal components, as people do by hand."""
    from sklearn.decomposition import PCA
    from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
    from sklearn.pipeline import make_pipeline

    X, y = _load(settings, "train", data_folder)
    X_test, y_test = _load(settings, "test", data_folder)
    begun = time.perf_counter()
    gaussians = QuadraticDiscriminantAnalysis(reg_param=settings["regularisation"])
    model = make_pipeline(PCA(min(settings["components"], X.shape[1]), random_state=0), gaussians)
    model.fit(X, y)
    seconds = time.perf_counter() - begun
    return Outcome({"accuracy": float(model.score(X_test, y_test)), "seconds": seconds})


def _trained(settings: Settings, X: NDArray[Any], y: NDArray[Any]) -> tuple[MFAClassifier, float]:
    begun = time.perf_counter()
    model = MFAClassifier(
        settings["components"],
        settings["factors"],
        max_precision=1 / settings["floor"],
        max_epochs=settings["epochs"],
        random_state=settings["seed"],
    )
    model.fit(X, y)
    return model, time.perf_counter() - begun


def _sizes(model: MFAClassifier) -> list[list[int]]:
    """Return the numbers of components and factors that each class has chosen."""
    return [[one.n_components, one.n_factors_] for one in model.estimators_ if one is not None]


def _training_parts(settings: Settings, data_folder: str | None) -> tuple[Rows, Rows]:
    """Split the training rows at random: some to train on, some to judge by."""
    X, y = _load(settings, "train", data_folder)
    order = np.random.default_rng(settings["seed"]).permutation(len(X))
    train, val = order[: settings["rows"]], order[settings["rows"] :][: settings["judges"]]
    return (X[train], y[train]), (X[val], y[val])


def _load(settings: Settings, split: str, data_folder: str | None) -> Rows:
    found = datasets.load(settings["data"], split=split, folder=data_folder)
    return np.asarray(found.data, dtype=np.float32), np.asarray(found.labels)
