"""Checks of class labels, priors and what is rejected.

What a classifier of mixtures can do once it is trained, and how it is stored.

A density for each class: a classifier of mixtures that knows what it has not seen.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.utils.validation import assert_all_finite, check_is_fitted, column_or_1d
from torch import Tensor

from factormix.data.batches import Batch
from factormix.data.checks import (
    check_absolute_weights,
    ensure_finite_rows,
    find_observed_rows,
    to_real_array,
)
from factormix.data.features import Features, describe_features
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows, count_weighted_rows
from factormix.data.sources.convert import as_rows, replace_weights
from factormix.data.units import Scaling
from factormix.defaults import DTYPE, N_INIT, SCALING, SOLVER
from factormix.errors import InputError
from factormix.estimators.fitting import Shared, check_first_columns, draw_sample, with_every_column
from factormix.estimators.mfa import MFA
from factormix.estimators.selection import check_numbers, search_sizes, taken_rows
from factormix.estimators.storage import StoredModel
from factormix.estimators.validation import (
    MIN_SCALE_ROWS,
    Array,
    check_dtype,
    check_options,
    check_positive,
    check_rows,
    check_seed,
    like_input,
    remember_features,
    weighed,
)
from factormix.training.callbacks import Progress
from factormix.training.solvers import NaturalGradient, Solver, from_settings, resolve, to_settings
from factormix.training.solvers.base import check_length
from factormix.training.threads import team

if TYPE_CHECKING:
    pass

__all__ = [
    "ClassifiedMixtures",
    "MFAClassifier",
    "check_priors",
    "check_reject",
    "class_numbers",
    "common_type",
    "first_classes",
    "reject_label_for",
    "seen_labels",
]

Labels = NDArray[Any]
Numbers = NDArray[np.intp]
REJECTED = "rejected"
REJECT_BY = ("margin", "ratio", "density")


def seen_labels(y: Any, n_rows: int) -> Labels:
    """Return the labels (n,) of as many rows."""
    # What other estimators do not need is not loaded with them.
    from sklearn.utils.multiclass import check_classification_targets

    if y is None:
        raise InputError(
            "MFAClassifier requires y to be passed, but the target y is None: give a label for each"
            " row."
        )
    labels = column_or_1d(y.detach().cpu().numpy() if isinstance(y, Tensor) else y, warn=True)
    assert_all_finite(labels, input_name="y")
    check_classification_targets(labels)
    if len(labels) != n_rows:
        raise InputError(
            f"y has {len(labels)} labels and X has {n_rows} rows: give one label for each row."
        )
    return np.asarray(labels)


def first_classes(classes: Any) -> Labels:
    """Return the classes that a stream will have, in order."""
    if classes is None:
        raise InputError(
            "classes must be passed on the first call to partial_fit: give all labels that will"
            " come."
        )
    return np.unique(np.asarray(classes))


def class_numbers(labels: Labels, classes: Labels) -> Numbers:
    """Return the place of each label (n,) among the classes, which are in order."""
    numbers = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    unknown = np.asarray(labels[classes[numbers] != labels])
    if len(unknown):
        raise InputError(
            f"y has the label {unknown.tolist()[0]!r}, which is not among the classes: name all of"
            " them in the first call of partial_fit."
        )
    return np.asarray(numbers, dtype=np.intp)


def check_priors(priors: Any, classes: Labels, masses: NDArray[Any]) -> NDArray[np.float64]:
    """Return the probabilities of the classes: those given, or their shares of the rows."""
    if priors is None:
        return np.asarray(masses / masses.sum(), dtype=np.float64)
    given = np.asarray(to_real_array(priors, "priors"), dtype=np.float64)
    if given.shape != classes.shape or not (given >= 0).all():
        raise InputError(
            f"priors must be {len(classes)} numbers of 0 or more, one for each class in the order"
            f" of classes_ ({', '.join(map(str, classes[:5]))}{', ...' * (len(classes) > 5)})."
        )
    if not math.isclose(given.sum(), 1, abs_tol=1e-6):
        raise InputError(f"priors must sum to 1, not {given.sum():.6g}: divide by their sum.")
    return given


def check_reject(model: MFAClassifier, classes: Labels | None) -> None:
    """Check what is rejected and how that is told, as far as classes are known."""
    share: Any = model.reject
    number = isinstance(share, numbers.Real) and not isinstance(share, bool)
    if not number or not 0 <= share < 1:
        raise InputError(f"reject must be a share from 0 to below 1, not {share!r}.")
    if model.reject_by not in REJECT_BY:
        raise InputError(
            f"reject_by must be one of {', '.join(REJECT_BY)}, not {model.reject_by!r}."
        )
    if share and classes is not None:
        label = reject_label_for(model, classes)
        if np.isin(np.asarray(label, dtype=object), classes.astype(object)):
            raise InputError(
                f"reject_label={label!r} is one of the classes: name another for rejected rows."
            )


def common_type(labels: Labels, other: Labels) -> np.dtype[Any]:
    """Return a type that holds both as they are: numbers stay numbers, and booleans booleans."""
    kinds = {"biuf".find(one.dtype.kind) for one in (labels, other)}
    alike = kinds <= {1, 2, 3} or labels.dtype.kind == other.dtype.kind
    return np.result_type(labels, other) if alike else np.dtype(object)


def reject_label_for(model: MFAClassifier, classes: Labels) -> Any:
    """Return what ``predict`` gives for rejected rows."""
    if model.reject_label is not None:
        return model.reject_label
    return -1 if classes.dtype.kind in "biuf" else REJECTED


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
        limits, seen = np.finfo(np.float64), find_observed_rows(rows)
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
        rows: Rows = ArrayRows(sample.rows).mark_finite()
        levels, seen = np.logaddexp.reduce(self._joint(rows), axis=1), find_observed_rows(rows)
        self.reject_level_ = float(np.max(levels if seen is None else levels[seen]))

    def _set_threshold(self, rows: Rows) -> None:
        """Set the threshold so that the share ``reject`` of rows, checked ones, lies below it."""
        self.reject_threshold_ = -np.inf
        if self.reject:
            sure, seen = self._sure(self._joint(rows), rows), find_observed_rows(rows)
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


CLASS_COMPONENTS = 5
ROWS_PER_COMPONENT = 2
"""A class has no more components than rows for this many each."""
SEED_ROWS_PER_COMPONENT, LEAST_SEED_ROWS = 20, 50
"""Rows of a class that a stream waits for before it seeds the class's components."""
OPTIONS = (
    *("solver", "max_precision", "batch_size", "max_epochs", "n_init"),
    *("random_state", "device", "dtype", "scaling"),
)
"""What classes take over from the classifier."""


class MFAClassifier(ClassifiedMixtures, ClassifierMixin, BaseEstimator):
    """One mixture of factor analyzers for each class, and Bayes' rule.

    All classes share the working units and the noise floors, so that their densities can be
    compared.

    Parameters
    ----------
    n_components, n_factors : int, sequence of int or None
        Size of each class's mixture, as in ``MFA``; a class of few rows has fewer components, one
        for every two rows. Of several numbers, each class gets the best by ``select``.
    priors : array (n_classes,) or None
        Probabilities of the classes, in the order of ``classes_``; None takes their shares of the
        training rows.
    reject : float
        Share of the training rows whose prediction is least sure, and which would be rejected: for
        new rows as unsure as these, and for those of which nothing is observed, ``predict`` gives
        ``reject_label``. ``score`` counts them as wrong.
    reject_by : {"ratio", "margin", "density"}
        What a prediction is sure by. ``"margin"``: the difference of ``log p(x, class)`` between
        the two most probable classes; rejected are rows between classes, which are often wrong.
        ``"ratio"``: the same in relation to how far the row is from the most likely ones; with
        hundreds of features, differences grow with that distance and mean less. ``"density"``:
        ``log p(x)``; rejected are rows unlike all of the training.
    reject_label : object or None
        What ``predict`` gives for rejected rows; None takes -1, or "rejected" where classes are
        texts. Where it is of another kind than the classes, such as -1 beside booleans, predictions
        are an array of objects.
    smoothing : float
        Least noise variance of every component, as a share of the spread that a feature has over
        all classes. More makes classes smoother and less sure. It counts only where
        ``max_precision`` is None.
    solver, max_precision, batch_size, max_epochs, n_init, random_state, device, dtype, scaling
        As in ``MFA``.
    verbose : int
        1 shows a progress bar.

    Attributes
    ----------
    classes_ : array (n_classes,)
    class_prior_ : array (n_classes,)
    estimators_ : list of MFA
        The mixture of each class; None for a class of which ``partial_fit`` has seen no row yet.
    reject_threshold_ : float
        What a prediction must be sure by (see ``confidence``) not to be rejected; minus infinity
        without ``reject``.
    reject_level_ : float
        ``log p(x)`` of the most likely rows of the training, from a sample of it.
    n_features_in_, feature_names_in_, image_shape_
        As in ``MFA``.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from factormix import MFAClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = MFAClassifier(n_components=1, n_factors=2, random_state=0).fit(X, y)
    >>> model.predict([[5.0, 3.4, 1.5, 0.2]])
    array([0])
    >>> model.predict_proba(X).shape
    (150, 3)
    """

    def __init__(
        self,
        n_components: int | Sequence[int] = CLASS_COMPONENTS,
        n_factors: int | Sequence[int] | None = None,
        *,
        priors: Array | None = None,
        reject: float = 0.0,
        reject_by: str = "ratio",
        reject_label: Any = None,
        smoothing: float = 0.1,
        solver: str | Solver[Any] = SOLVER,
        max_precision: float | None = None,
        batch_size: int | None = None,
        max_epochs: int | None = None,
        n_init: int = N_INIT,
        random_state: int | np.random.RandomState | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = DTYPE,
        verbose: int = 0,
        scaling: Scaling = SCALING,
    ) -> None:
        self.n_components = n_components
        self.n_factors = n_factors
        self.priors = priors
        self.reject = reject
        self.reject_by = reject_by
        self.reject_label = reject_label
        self.smoothing = smoothing
        self.solver = solver
        self.max_precision = max_precision
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.n_init = n_init
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.verbose = verbose
        self.scaling = scaling

    @team()
    def fit(self, X: Array | Rows, y: Array, sample_weight: Array | None = None) -> Self:
        """Train a mixture on the rows (n, d) of each class; y (n,) tells the class of each.

        ``sample_weight`` (n,) says how much each row counts, in its class and for the priors.
        """
        template = self._template()
        rows = as_rows(X, sample_weight)
        labels, weights = seen_labels(y, rows.n_rows), _weights(rows)
        used = weights > 0
        classes = np.unique(labels[used])
        numbers = class_numbers(np.where(used, labels, classes[0]), classes)
        masses = np.bincount(numbers, weights, len(classes)).astype(np.float64)
        priors = check_priors(self.priors, classes, masses)
        check_reject(self, classes)
        if used.sum() < 2:
            raise InputError(f"X has n_samples={used.sum()}: give two rows or more, of each class.")
        rows = ensure_finite_rows(rows)
        seed = check_seed(self.random_state)
        template.set_params(random_state=seed)
        sample = with_every_column(rows, draw_sample(rows, seed))
        shared = Shared.estimate(template, sample, 1 / self.smoothing)
        models = list[MFA | None]()
        with ClassBar(len(classes), shown=bool(self.verbose)) as bar:
            for c, label in enumerate(classes.tolist()):
                chosen = np.flatnonzero(used & (numbers == c))
                # A mixture takes two rows, and a single one is as good as two that are the same.
                alone = len(chosen) == 1
                mine = (
                    taken_rows(rows, np.repeat(chosen, 2)) if alone else _class_rows(rows, chosen)
                )
                template.set_params(callbacks=[bar.begin(label)])
                models.append(self._trained(template, X, mine, shared))
        self.classes_, self.class_prior_, self.estimators_ = classes, priors, models
        self._class_masses = masses
        remember_features(self, describe_features(rows))
        self._set_level(sample)
        self._set_threshold(rows)
        return self

    @team()
    def partial_fit(
        self,
        X: Array | Rows,
        y: Array,
        classes: Array | None = None,
        sample_weight: Array | None = None,
    ) -> Self:
        """Take one step per batch of each class's rows (n, d), going on from the model so far.

        The first call needs ``classes``, all that there will be, and sets units and noise floors
        from its rows: give it a hundred or more, of several classes. Weights (n,) are taken as they
        are. Priors follow the rows seen unless they are given, and the threshold of ``reject`` is
        that of the rows of the last call.
        """
        template = self._template(stream=True)
        begun = hasattr(self, "estimators_")
        rows = weighed(as_rows(X, sample_weight), check_absolute_weights)
        rows = check_rows(self, rows, weigh=check_absolute_weights) if begun else rows
        labels, weights = seen_labels(y, rows.n_rows), _weights(rows)
        known = self.classes_ if begun else first_classes(classes)
        if begun and classes is not None and not np.array_equal(np.unique(classes), known):
            raise InputError("classes differ from those of the first call: leave them out.")
        check_reject(self, known)
        numbers, rows = class_numbers(labels, known), ensure_finite_rows(rows)
        masses = np.bincount(numbers, weights, len(known)).astype(np.float64)
        if begun:
            masses += self._class_masses
        priors = check_priors(self.priors, known, masses)
        shared = self._stream_units(template, rows, begun)
        models: list[MFA | None] = self.estimators_ if begun else [None for _ in known]
        for c in np.unique(numbers[weights > 0]).tolist():
            mine = _class_rows(rows, np.flatnonzero((weights > 0) & (numbers == c)))
            models[c] = (models[c] or clone(template))._learn(X, mine, shared=shared)
        if not begun:
            self.classes_, self.estimators_ = known, models
            remember_features(self, describe_features(rows))
        self.class_prior_, self._class_masses = priors, masses
        some = draw_sample(rows, check_seed(self.random_state))
        self._set_level(some)
        self._set_threshold(rows)
        return self

    def _stream_units(self, template: MFA, rows: Rows, begun: bool) -> Shared:
        """Return the units of the classes so far, or begin with those of some rows."""
        if begun:
            return Shared.of(next(one._run for one in self.estimators_ if one is not None))
        n_rows = count_weighted_rows(rows)
        if n_rows < MIN_SCALE_ROWS:
            raise InputError(
                f"X has n_samples={n_rows}, too few for the first call of partial_fit, which"
                f" sets the scale of the data: give it {MIN_SCALE_ROWS} rows or more."
            )
        sample = draw_sample(rows, check_seed(self.random_state))
        check_first_columns(rows, sample)
        return Shared.estimate(template, sample, 1 / self.smoothing)

    def _template(self, *, stream: bool = False) -> MFA:
        """Return an untrained mixture with the options of all classes, which are checked."""
        check_reject(self, None)
        if not check_positive(self.smoothing, "smoothing") <= 1:
            raise InputError(f"smoothing must be at most 1, not {self.smoothing!r}.")
        options = {name: getattr(self, name) for name in OPTIONS}
        several = self._chooses
        if several and stream:
            raise InputError(
                "partial_fit needs one size: give one number as n_components and n_factors."
            )
        size: tuple[Any, Any] = (1, None) if several else (self.n_components, self.n_factors)
        template = MFA(*size, **options)
        check_options(template)
        if several:
            check_numbers(self.n_components, "n_components", 1)
            check_numbers(self.n_factors, "n_factors", 0)
        if stream:
            solver = resolve(self.solver)
            check_length(solver, None)
            if isinstance(solver, NaturalGradient) and solver.seed_rows is None:
                # The rows of a stream are shared out among the classes.
                rows = max(LEAST_SEED_ROWS, SEED_ROWS_PER_COMPONENT * template.n_components)
                template.set_params(solver=replace(solver, seed_rows=rows))
        return template

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    @property
    def _chooses(self) -> bool:
        """Whether classes choose among several sizes."""
        given = (self.n_components, self.n_factors)
        return any(isinstance(n, Iterable) and not isinstance(n, str) for n in given)

    def _trained(self, template: MFA, X: Array | Rows, rows: Rows, shared: Shared) -> MFA:
        """Train the mixture of one class."""
        most = max(1, count_weighted_rows(rows) // ROWS_PER_COMPONENT)
        if self._chooses:
            sizes = check_numbers(self.n_components, "n_components", 1) or [1]
            allowed = sorted({min(K, most) for K in sizes})
            found = search_sizes(X, rows, (allowed, self.n_factors), template, shared=shared)
            if not found.complete:
                raise KeyboardInterrupt
            found.best_estimator_.set_params(callbacks=())
            return found.best_estimator_
        model: MFA = clone(template)
        model.set_params(
            n_components=min(template.n_components, most), callbacks=template.callbacks
        )
        model._fit(X, rows, shared)
        model.set_params(callbacks=())
        return model


def _weights(rows: Rows) -> NDArray[np.float64]:
    """Return the weights of rows (n,), one where there are none."""
    weights = getattr(rows, "weights", None)
    return np.ones(rows.n_rows) if weights is None else np.asarray(weights, dtype=np.float64)


def _class_rows(rows: Rows, chosen: NDArray[np.intp]) -> Rows:
    """Return the rows of the given numbers, without copying more than memory has already."""
    if isinstance(rows, ArrayRows):
        return taken_rows(rows, chosen)
    others = np.zeros(rows.n_rows)
    others[chosen] = _weights(rows)[chosen]
    return replace_weights(rows, others)


class ClassBar:
    """Show on standard error how many classes are done, and the log-likelihood of the latest."""

    FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"

    def __init__(self, n_classes: int, *, shown: bool) -> None:
        self._total, self._shown, self._done = n_classes, shown, -1
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self._shown:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=self._total, bar_format=self.FORMAT, dynamic_ncols=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            if exception[0] is None:
                self._bar.update(self._total - self._bar.n)
            self._bar.close()

    def begin(self, label: Any) -> Callable[[Progress], None]:
        """Turn to another class, and return what watches its training."""
        self._done += 1

        def watch(progress: Progress) -> None:
            if self._bar is not None:
                level = progress.record["log_likelihood"]
                done = self._done + progress.record["step"] / max(progress.steps, 1)
                self._bar.set_postfix_str(f"class {label}, ll={level:.5g}", refresh=False)
                self._bar.update(max(0.0, done - self._bar.n))

        return watch
