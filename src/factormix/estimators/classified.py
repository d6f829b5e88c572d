"""What a classifier of mixtures can do once it is trained, and how it is stored."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.data.batches import Batch
from factormix.data.sources import ArrayRows, Features, Rows, observed_rows
from factormix.estimators.labels import common_type, reject_label_for
from factormix.estimators.mfa import MFA
from factormix.estimators.models import StoredModel
from factormix.estimators.validation import (
    Array,
    check_dtype,
    check_rows,
    like_input,
    remember_features,
)
from factormix.training.solvers import from_settings, resolve, to_settings

__all__ = ["ClassifiedMixtures"]

Values = NDArray[np.float64]

LEAST_DISTANCE = 1.0
"""Nats below the most likely rows that every row is taken to be."""


class ClassifiedMixtures(StoredModel):
    """The half of a classifier that needs a trained model and does not change it."""

    classes_: NDArray[Any]
    class_prior_: Values
    estimators_: list[MFA | None]
    reject_threshold_: float
    reject_level_: float
    reject: float
    reject_by: str
    image_shape_: tuple[int, ...] | None
    _class_masses: Values
    """(n_classes,), sums of the weights of the rows seen."""

    def predict(self, X: Array | Rows) -> Any:
        """Return the most probable class of each row of X (n, d), or ``reject_label``, (n,)."""
        rows = self._rows(X)
        joint = self._joint(rows)
        labels = self.classes_[joint.argmax(axis=1)]
        if self.reject:
            sure = self._sure(joint, rows) >= self.reject_threshold_
            label = reject_label_for(self, self.classes_)  # type: ignore[arg-type]
            kind = common_type(labels, np.asarray(label))
            labels = np.where(sure, labels.astype(kind), np.asarray(label, dtype=kind))
        if isinstance(X, Tensor) and labels.dtype.kind in "biuf":
            return torch.from_numpy(labels).to(X.device)
        return labels

    def predict_log_proba(self, X: Array | Rows) -> Any:
        """Compute ``log p(class | x)`` for the rows of X (n, d), shape (n, n_classes)."""
        joint = self._joint(self._rows(X))
        return self._like(joint - np.logaddexp.reduce(joint, axis=1, keepdims=True), X)

    def predict_proba(self, X: Array | Rows) -> Any:
        """Compute ``p(class | x)`` for the rows of X (n, d), shape (n, n_classes)."""
        joint = self._joint(self._rows(X))
        shares = np.exp(joint - joint.max(axis=1, keepdims=True))
        return self._like(shares / shares.sum(axis=1, keepdims=True), X)

    def score_samples(self, X: Array | Rows) -> Any:
        """Compute ``log p(x)`` over all classes for the rows of X (n, d), shape (n,)."""
        return self._like(np.logaddexp.reduce(self._joint(self._rows(X)), axis=1), X)

    def confidence(self, X: Array | Rows) -> Any:
        """Compute what predictions are sure by, (n,), for the rows of X (n, d).

        With ``reject_by="margin"`` it is the difference of ``log p(x, class)`` between the two most
        probable classes, with ``"ratio"`` this difference divided by how far ``log p(x)`` lies
        below ``reject_level_``, and with ``"density"`` it is ``log p(x)``. ``predict`` rejects rows
        below ``reject_threshold_``; one of which nothing is observed is as unsure as can be.
        """
        rows = self._rows(X)
        return self._like(self._sure(self._joint(rows), rows), X)

    def _sure(self, joint: Values, rows: Rows) -> Values:
        """Compute what predictions are sure by, (n,), from ``log p(x, class)``; always finite.

        Where only one class is possible there is no end to how sure a prediction is.
        """
        limits, seen = np.finfo(np.float64), observed_rows(rows)
        sure = np.minimum(self._unbounded(joint), limits.max)
        # The density of nothing is one, and says nothing about the row.
        return sure if seen is None else np.where(seen, sure, limits.min)

    def _unbounded(self, joint: Values) -> Values:
        level = np.asarray(np.logaddexp.reduce(joint, axis=1))
        if self.reject_by == "density":
            return level
        if joint.shape[1] == 1:
            return np.full(len(joint), np.inf)
        second, first = np.partition(joint, -2, axis=1)[:, -2:].T
        if self.reject_by == "margin":
            return np.asarray(first - second)
        # Differences grow with the distance from all classes, and mean less there.
        return np.asarray((first - second) / np.maximum(self.reject_level_ - level, LEAST_DISTANCE))

    def _set_level(self, sample: Batch) -> None:
        """Set the log-density that confidence is told relative to: the highest of some rows."""
        rows: Rows = ArrayRows(sample.rows).known_finite()
        levels, seen = np.logaddexp.reduce(self._joint(rows), axis=1), observed_rows(rows)
        self.reject_level_ = float(np.max(levels if seen is None else levels[seen]))

    def _set_threshold(self, rows: Rows) -> None:
        """Set the threshold so that the share ``reject`` of rows, checked ones, lies below it."""
        self.reject_threshold_ = -np.inf
        if self.reject:
            sure, seen = self._sure(self._joint(rows), rows), observed_rows(rows)
            sure = sure if seen is None else sure[seen]
            self.reject_threshold_ = float(np.quantile(sure, self.reject))

    def _rows(self, X: Array | Rows) -> Rows:
        """Return the rows of X (n, d), which fit the model."""
        check_is_fitted(self)
        return check_rows(self, X)

    def _joint(self, rows: Rows) -> Values:
        """Compute ``log p(x, class)``, (n, n_classes)."""
        joint = np.full((rows.n_rows, len(self.classes_)), -np.inf)
        with np.errstate(divide="ignore"):
            log_priors = np.log(self.class_prior_)
        for c, model in enumerate(self.estimators_):
            if model is not None and log_priors[c] > -np.inf:
                scores: Any = model.score_samples(rows)
                scores = scores.cpu().numpy() if isinstance(scores, Tensor) else scores
                joint[:, c] = scores + log_priors[c]
        return joint

    def _like(self, values: Values, X: Array | Rows) -> Any:
        # In float64 otherwise: float32 would round probabilities near one to one.
        return like_input(torch.from_numpy(values), X) if isinstance(X, Tensor) else values

    def __sklearn_is_fitted__(self) -> bool:
        """Say whether there is a model."""
        return hasattr(self, "estimators_")

    def _pack(self, *, training_state: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        members: list[Any] = []
        for c, model in enumerate(self.estimators_):
            members.append(None)
            if model is not None:
                packed, members[c] = model._pack(training_state=training_state)
                tensors |= {f"{c}.{name}": tensor for name, tensor in packed.items()}
        options = cast(Any, self).get_params(deep=False)
        del options["device"]
        options["solver"] = to_settings(resolve(options["solver"]))
        if not isinstance(options["random_state"], numbers.Integral):
            options["random_state"] = None
        options["dtype"] = str(check_dtype(options["dtype"])).removeprefix("torch.")
        names = getattr(self, "feature_names_in_", None)
        return tensors, {
            "options": {name: _plain(value) for name, value in options.items()},
            "classes": {"labels": self.classes_.tolist(), "dtype": self.classes_.dtype.str},
            "masses": self._class_masses.tolist(),
            "priors": self.class_prior_.tolist(),
            "threshold": None if np.isinf(self.reject_threshold_) else self.reject_threshold_,
            "level": self.reject_level_,
            "feature_names": None if names is None else [str(name) for name in names],
            "image_shape": self.image_shape_,
            "members": members,
        }

    @classmethod
    def _unpack(cls, tensors: Mapping[str, Tensor], settings: dict[str, Any], device: Any) -> Self:
        members: list[MFA | None] = []
        for c, packed in enumerate(settings["members"]):
            own = f"{c}."
            mine = {n.removeprefix(own): t for n, t in tensors.items() if n.startswith(own)}
            members.append(None if packed is None else MFA._unpack(mine, packed, device))
        trained = next(model for model in members if model is not None)
        solver = from_settings(settings["options"].pop("solver"))
        named = solver.name if resolve(solver.name) == solver else solver
        model = cast(Any, cls)(**settings["options"], solver=named, device=device)
        classes = settings["classes"]
        model.classes_ = np.array(classes["labels"], dtype=np.dtype(classes["dtype"]))
        model.class_prior_ = np.array(settings["priors"])
        model._class_masses = np.array(settings["masses"])
        model.estimators_ = members
        threshold = settings["threshold"]
        model.reject_threshold_ = -np.inf if threshold is None else threshold
        model.reject_level_ = settings["level"]
        names, shape = settings["feature_names"], settings["image_shape"]
        count = int(trained.n_features_in_)
        features = Features(count, names and tuple(names), shape and tuple(shape))
        remember_features(model, features)
        return cast(Self, model)


def _plain(value: Any) -> Any:
    """Turn numbers of NumPy and sequences of them into what JSON knows."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | list | tuple | range):
        return [_plain(one) for one in value]
    return value
