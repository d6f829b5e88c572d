"""``MFAClassifier``: one mixture per class, Bayes' rule, and rejection of uncertain rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, clone
from sklearn.utils.validation import assert_all_finite, column_or_1d
from torch import Tensor

from factormix.data.batches import Batch
from factormix.data.checks import (
    check_absolute_weights,
    ensure_finite_rows,
    find_observed_rows,
    to_real_array,
)
from factormix.data.features import describe_features
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows, count_weighted_rows
from factormix.data.sources.convert import as_rows, replace_weights
from factormix.errors import InputError
from factormix.estimators.fitting import (
    FitsBar,
    WorkingScale,
    check_first_columns,
    check_jobs,
    cover_columns,
    draw_sample,
    run_fits,
)
from factormix.estimators.mfa import MFA, TrainingOptions
from factormix.estimators.selection import SizeSearch, check_counts, copy_rows
from factormix.estimators.storage import (
    Settings,
    StoredModel,
    Tensors,
    name_solver,
    pack_model,
    unpack_model,
)
from factormix.estimators.validation import (
    Array,
    check_enough_for_scale,
    check_options,
    check_positive,
    check_rows,
    check_seed,
    get_weights,
    like_input,
    set_features_,
    weigh_rows,
)
from factormix.training.callbacks import Progress
from factormix.training.serialization import add_prefix, select_prefix
from factormix.training.solvers import NaturalGradient, from_settings
from factormix.training.solvers.base import check_length, is_number
from factormix.training.threads import use_threads

Labels = NDArray[Any]
Values = NDArray[np.float64]

LEAST_ROWS_PER_COMPONENT = 2
"""A class has at most one component for this many rows, the fewest that have a variance."""
SEED_ROWS_PER_COMPONENT, LEAST_SEED_ROWS = 20, 50
"""Rows of a class that a stream waits for before it seeds the components of the class: as many as
``select`` requires of a component, and half of the hundred that ``stream`` starts with."""
MIN_DISTANCE = 1.0
"""Least distance, in nats, of a row from the most likely rows, which ``"ratio"`` divides by: a
factor of e in the density."""
REJECTED = "rejected"
REJECT_BY = ("margin", "ratio", "density")


@dataclass(eq=False, repr=False)
class MFAClassifier(TrainingOptions, ClassifierMixin, StoredModel):
    """One mixture of factor analyzers for each class, and Bayes' rule.

    All classes share the working units and the noise floors, so that their densities can be
    compared.

    Parameters
    ----------
    n_components, n_factors : int, sequence of int or None
        Size of each class's mixture, as in ``MFA``. A class of few rows has at most one component
        for every two rows. If several are given, each class gets the best by ``select``.
    priors : array (n_classes,) or None
        Probabilities of the classes, in the order of ``classes_``; None takes their shares of the
        training rows.
    reject : float
        Share of the training rows that would be rejected, the least confident ones. For new rows
        below the same confidence, and for rows without any observed entry, ``predict`` returns
        ``reject_label``. ``score`` counts them as wrong.
    reject_by : {"ratio", "margin", "density"}
        The measure of confidence. ``"margin"``: the difference of ``log p(x, class)`` between the
        two most probable classes; it rejects rows between classes, which are often wrong.
        ``"ratio"``: the margin divided by the distance of the row from the most likely ones; with
        hundreds of features, margins grow with that distance and mean less. ``"density"``:
        ``log p(x)``; it rejects rows unlike all training rows.
    reject_label : object or None
        The prediction for rejected rows; None takes -1, or "rejected" if classes are strings. If
        its type differs from the classes, such as -1 among booleans, predictions are an array of
        objects.
    noise_floor : float
        Least noise variance of every component, as a share of each feature's variance over all
        classes. A larger one makes classes smoother and less certain. It applies only if
        ``max_precision``, which bounds the same noise in units of the data, is None.
    solver, max_precision, batch_size, max_epochs, n_init, random_state, device, dtype
        As in ``MFA``.
    scaling, noise
        As in ``MFA``.
    verbose : int
        1 shows a progress bar.
    n_jobs : int or None
        Number of classes that ``fit`` trains at the same time, each in a thread; None is 1, and -1
        one for each processor. The result does not depend on it.

    Attributes
    ----------
    classes_ : array (n_classes,)
    class_prior_ : array (n_classes,)
    estimators_ : list of MFA
        The mixture of each class; None for a class without any row in ``partial_fit`` so far.
    reject_threshold_ : float
        The ``confidence`` below which a prediction is rejected; minus infinity without ``reject``.
    reject_level_ : float
        ``log p(x)`` of the most likely row in a sample of the training rows.
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

    n_components: int | Sequence[int] = 5
    n_factors: int | Sequence[int] | None = None
    _: KW_ONLY
    priors: Array | None = None
    reject: float = 0.0
    reject_by: str = "ratio"
    reject_label: Any = None
    noise_floor: float = 0.1
    verbose: int = 0
    n_jobs: int | None = None

    classes_: Labels = field(init=False)
    class_prior_: Values = field(init=False)
    estimators_: list[MFA | None] = field(init=False)
    reject_threshold_: float = field(init=False)
    reject_level_: float = field(init=False)
    _class_masses: Values = field(init=False)
    """(n_classes,), sums of the weights of the rows seen."""

    @use_threads()
    def fit(self, X: Array | Rows, y: Array, sample_weight: Array | None = None) -> Self:
        """Train a mixture on the rows (n, d) of each class; y (n,) has the class of each row.

        ``sample_weight`` (n,) weighs each row, in its class and in the priors.
        """
        template = self._build_template()
        rows = as_rows(X, sample_weight)
        labels, used = _check_labels(y, rows.n_rows), get_weights(rows) > 0
        classes = np.unique(labels[used])
        numbers = _number_labels(np.where(used, labels, classes[0]), classes)
        priors, masses = self._weigh_classes(classes, numbers, rows)
        if used.sum() < 2:
            raise InputError(f"X has n_samples={used.sum()}: give two rows or more, of each class.")
        rows, seed = ensure_finite_rows(rows), check_seed(self.random_state)
        template.set_params(random_state=seed)
        sample = cover_columns(rows, draw_sample(rows, seed))
        scale = WorkingScale.estimate(check_options(template), sample, 1 / self.noise_floor)
        names = classes.tolist()
        bar = FitsBar(dict.fromkeys(names, 1), shown=bool(self.verbose))

        def fit_class(c: int, stop: Callable[[Progress], object]) -> MFA:
            chosen = np.flatnonzero(used & (numbers == c))
            # A mixture needs two rows, and a single one counts as two equal ones.
            single = len(chosen) == 1
            own = copy_rows(rows, np.repeat(chosen, 2)) if single else _keep(rows, chosen)
            callbacks = [bar.follow(names[c], f"class {names[c]}"), stop]
            return self._fit_class(template, callbacks, X, own, scale)

        models = run_fits(fit_class, range(len(names)), self.n_jobs)
        bar.close()
        self.classes_, self.estimators_ = classes, list[MFA | None](models)
        set_features_(self, describe_features(rows))
        self._set_fitted(rows, sample, priors, masses)
        return self

    @use_threads()
    def partial_fit(
        self,
        X: Array | Rows,
        y: Array,
        classes: Array | None = None,
        sample_weight: Array | None = None,
    ) -> Self:
        """Take one step per batch of each class's rows (n, d), starting from the model so far.

        The first call needs ``classes``, all classes of the stream, and sets units and noise floors
        from its rows: give it a hundred or more, of several classes. Weights (n,) are absolute.
        Unless priors are given, they follow the rows seen so far. The threshold of ``reject``
        follows the rows of the last call.
        """
        template = self._build_template(stream=True)
        fitted = hasattr(self, "estimators_")
        rows = weigh_rows(as_rows(X, sample_weight), check_absolute_weights)
        rows = check_rows(self, rows, weigh=check_absolute_weights) if fitted else rows
        labels, used = _check_labels(y, rows.n_rows), get_weights(rows) > 0
        if not fitted and classes is None:
            raise InputError(
                "classes must be passed on the first call to partial_fit: give all labels that will"
                " come."
            )
        known = self.classes_ if fitted else np.unique(np.asarray(classes))
        if fitted and classes is not None and not np.array_equal(np.unique(classes), known):
            raise InputError("classes are not the same as in the first call: leave them out.")
        numbers = _number_labels(labels, known)
        seen = self._class_masses if fitted else 0.0
        priors, masses = self._weigh_classes(known, numbers, rows, seen)
        rows, options = ensure_finite_rows(rows), check_options(template)
        if not fitted:
            check_enough_for_scale(rows, count_weighted_rows(rows), options)
        sample = draw_sample(rows, check_seed(self.random_state))
        if fitted:
            first = next(model for model in self.estimators_ if model is not None)
            scale = WorkingScale.from_run(first._run)
        else:
            check_first_columns(rows, sample)
            scale = WorkingScale.estimate(options, sample, 1 / self.noise_floor)
        models: list[MFA | None] = self.estimators_ if fitted else [None for _ in known]
        for c in np.unique(numbers[used]).tolist():
            own = _keep(rows, np.flatnonzero(used & (numbers == c)))
            models[c] = (models[c] or clone(template))._learn(X, own, scale=scale)
        if not fitted:
            self.classes_, self.estimators_ = known, models
            set_features_(self, describe_features(rows))
        self._set_fitted(rows, sample, priors, masses)
        return self

    def _weigh_classes(
        self, classes: Labels, numbers: NDArray[np.intp], rows: Rows, seen: Values | float = 0.0
    ) -> tuple[Values, Values]:
        """Return the priors of classes, and their masses: sums of weights of the rows seen."""
        masses: Values = np.bincount(numbers, get_weights(rows), len(classes)) + np.asarray(seen)
        self._check_reject(classes)
        return _check_priors(self.priors, classes, masses), masses

    def _set_fitted(self, rows: Rows, sample: Batch, priors: Values, masses: Values) -> None:
        """Set what follows from the mixtures: priors, and the threshold of rejection."""
        self.class_prior_, self._class_masses = priors, masses
        known: Rows = ArrayRows(sample.rows).mark_finite()
        levels = np.logaddexp.reduce(self._joint_log_prob(known), axis=1)
        self.reject_level_ = float(np.max(_of_observed(levels, known)))
        self.reject_threshold_ = -np.inf
        if self.reject:
            sure = self._confidence(self._joint_log_prob(rows), rows)
            self.reject_threshold_ = float(np.quantile(_of_observed(sure, rows), self.reject))

    def predict(self, X: Array | Rows) -> Any:
        """Return the most probable class of each row of X (n, d), or ``reject_label``, (n,)."""
        rows = self._check_rows(X)
        joint = self._joint_log_prob(rows)
        labels = self.classes_[joint.argmax(axis=1)]
        if self.reject:
            sure = self._confidence(joint, rows) >= self.reject_threshold_
            label = self._reject_label(self.classes_)
            kind = _common_type(labels, np.asarray(label))
            labels = np.where(sure, labels.astype(kind), np.asarray(label, dtype=kind))
        if isinstance(X, Tensor) and labels.dtype.kind in "biuf":
            return torch.from_numpy(labels).to(X.device)
        return labels

    def predict_log_proba(self, X: Array | Rows) -> Any:
        """Compute ``log p(class | x)`` for the rows of X (n, d), shape (n, n_classes)."""
        joint = self._joint_log_prob(self._check_rows(X))
        return _like_tensor(joint - np.logaddexp.reduce(joint, axis=1, keepdims=True), X)

    def predict_proba(self, X: Array | Rows) -> Any:
        """Compute ``p(class | x)`` for the rows of X (n, d), shape (n, n_classes)."""
        joint = self._joint_log_prob(self._check_rows(X))
        shares = np.exp(joint - joint.max(axis=1, keepdims=True))
        return _like_tensor(shares / shares.sum(axis=1, keepdims=True), X)

    def score_samples(self, X: Array | Rows) -> Any:
        """Compute ``log p(x)`` over all classes for the rows of X (n, d), shape (n,)."""
        joint = self._joint_log_prob(self._check_rows(X))
        return _like_tensor(np.logaddexp.reduce(joint, axis=1), X)

    def confidence(self, X: Array | Rows) -> Any:
        """Compute the confidence of each prediction, (n,), for the rows of X (n, d).

        With ``reject_by="margin"`` it is the difference of ``log p(x, class)`` between the two most
        probable classes; with ``"ratio"`` this difference divided by the distance of ``log p(x)``
        below ``reject_level_``; with ``"density"`` it is ``log p(x)``. ``predict`` rejects rows
        below ``reject_threshold_``. A row without any observed entry has the lowest confidence.
        """
        rows = self._check_rows(X)
        return _like_tensor(self._confidence(self._joint_log_prob(rows), rows), X)

    def _confidence(self, joint: Values, rows: Rows) -> Values:
        """Compute the confidence, (n,), from ``log p(x, class)``; always finite.

        With only one possible class, it would be infinite.
        """
        level = np.asarray(np.logaddexp.reduce(joint, axis=1))
        if self.reject_by == "density":
            sure = level
        elif joint.shape[1] == 1:
            sure = np.full(len(joint), np.inf)
        else:
            second, first = np.partition(joint, -2, axis=1)[:, -2:].T
            sure = np.asarray(first - second)
            if self.reject_by == "ratio":
                sure = sure / np.maximum(self.reject_level_ - level, MIN_DISTANCE)
        limits, seen = np.finfo(np.float64), find_observed_rows(rows)
        sure = np.minimum(sure, limits.max)
        # The density of a row without any observed entry is one, whatever the class.
        return sure if seen is None else np.where(seen, sure, limits.min)

    def _joint_log_prob(self, rows: Rows) -> Values:
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

    def _build_template(self, *, stream: bool = False) -> MFA:
        """Check all options, and return an untrained mixture with the options of every class."""
        self._check_reject(None)
        check_jobs(self.n_jobs)
        if not check_positive(self.noise_floor, "noise_floor", or_none=False) <= 1:
            raise InputError(f"noise_floor must be at most 1, not {self.noise_floor!r}.")
        if self.n_components is None:
            raise InputError("n_components must be a whole number or several, not None.")
        several = self._has_several_sizes
        if several and stream:
            raise InputError(
                "partial_fit needs one size: give one number as n_components and n_factors."
            )
        size: tuple[Any, Any] = (1, None) if several else (self.n_components, self.n_factors)
        template = MFA(*size, **{f.name: getattr(self, f.name) for f in fields(TrainingOptions)})
        solver = check_options(template).solver
        if several:
            check_counts(self.n_components, "n_components", 1)
            check_counts(self.n_factors, "n_factors", 0)
        if stream:
            check_length(solver, None)
            if isinstance(solver, NaturalGradient) and solver.seed_rows is None:
                # Each class gets only a part of the rows of a stream.
                rows = max(LEAST_SEED_ROWS, SEED_ROWS_PER_COMPONENT * size[0])
                template.set_params(solver=replace(solver, seed_rows=rows))
        return template

    @property
    def _has_several_sizes(self) -> bool:
        given = (self.n_components, self.n_factors)
        return any(isinstance(n, Iterable) and not isinstance(n, str) for n in given)

    def _fit_class(
        self,
        template: MFA,
        callbacks: Sequence[Callable[[Progress], object]],
        X: Array | Rows,
        rows: Rows,
        scale: WorkingScale,
    ) -> MFA:
        """Train the mixture of one class."""
        template = clone(template)
        template.callbacks = callbacks
        most = max(1, count_weighted_rows(rows) // LEAST_ROWS_PER_COMPONENT)
        if self._has_several_sizes:
            sizes = check_counts(self.n_components, "n_components", 1) or [1]
            allowed = sorted({min(K, most) for K in sizes})
            search = SizeSearch(X, rows, (allowed, self.n_factors), template, scale=scale)
            found = search.run()
            if not found.complete:
                raise KeyboardInterrupt
            model = found.best_estimator_
        else:
            K = min(int(template.n_components or 1), most)
            model = template.set_params(n_components=K)
            model._fit_rows(X, rows, scale)
        model.set_params(callbacks=())
        return model

    def _check_reject(self, classes: Labels | None) -> None:
        """Check the options of rejection; the label only once the classes are known."""
        share: Any = self.reject
        if not is_number(share) or not 0 <= share < 1:
            raise InputError(f"reject must be a share from 0 to below 1, not {share!r}.")
        if self.reject_by not in REJECT_BY:
            raise InputError(
                f"reject_by must be one of {', '.join(REJECT_BY)}, not {self.reject_by!r}."
            )
        if share and classes is not None:
            label = self._reject_label(classes)
            if np.isin(np.asarray(label, dtype=object), classes.astype(object)):
                raise InputError(
                    f"reject_label={label!r} is one of the classes: name another for rejected rows."
                )

    def _reject_label(self, classes: Labels) -> Any:
        if self.reject_label is not None:
            return self.reject_label
        return -1 if classes.dtype.kind in "biuf" else REJECTED

    def _pack(self, *, training_state: bool) -> tuple[Tensors, Settings]:
        tensors: dict[str, Tensor] = {}
        members: list[Any] = []
        for c, model in enumerate(self.estimators_):
            members.append(None)
            if model is not None:
                packed, members[c] = pack_model(model, training_state=training_state)
                tensors |= add_prefix(f"{c}.", packed)
        return tensors, {
            "classes": {"labels": self.classes_.tolist(), "dtype": self.classes_.dtype.str},
            "masses": self._class_masses.tolist(),
            "priors": self.class_prior_.tolist(),
            "threshold": None if np.isinf(self.reject_threshold_) else self.reject_threshold_,
            "level": self.reject_level_,
            "members": members,
        }

    def _unpack_(self, tensors: Tensors, settings: Settings) -> int:
        solver = settings["options"]["solver"]
        self.solver = solver if isinstance(solver, str) else name_solver(from_settings(solver))
        classes, threshold = settings["classes"], settings["threshold"]
        self.classes_ = np.array(classes["labels"], dtype=np.dtype(classes["dtype"]))
        self.class_prior_ = np.array(settings["priors"])
        self._class_masses = np.array(settings["masses"])
        self.reject_threshold_ = -np.inf if threshold is None else threshold
        self.reject_level_ = settings["level"]
        self.estimators_ = [
            packed and unpack_model(MFA, select_prefix(f"{c}.", tensors), packed, self.device)
            for c, packed in enumerate(settings["members"])
        ]
        return next(model.n_features_in_ for model in self.estimators_ if model is not None)


def _check_labels(y: Any, n_rows: int) -> Labels:
    """Check that there are as many labels (n,) as rows, and return them."""
    # Imported here, because no other estimator needs it.
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


def _number_labels(labels: Labels, classes: Labels) -> NDArray[np.intp]:
    """Return the place of each label (n,) among the classes, which are in order."""
    numbers = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    unknown = np.asarray(labels[classes[numbers] != labels])
    if len(unknown):
        raise InputError(
            f"y has the label {unknown.tolist()[0]!r}, which is not among the classes: name all of"
            " them in the first call of partial_fit."
        )
    return np.asarray(numbers, dtype=np.intp)


def _check_priors(priors: Any, classes: Labels, masses: Values) -> Values:
    """Return the given probabilities of the classes, or their shares of the rows."""
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


def _common_type(labels: Labels, other: Labels) -> np.dtype[Any]:
    """Return a type that holds both as they are: numbers stay numbers, and booleans booleans."""
    kinds = {"biuf".find(one.dtype.kind) for one in (labels, other)}
    alike = kinds <= {1, 2, 3} or labels.dtype.kind == other.dtype.kind
    return np.result_type(labels, other) if alike else np.dtype(object)


def _like_tensor(values: Values, X: Array | Rows) -> Any:
    # Arrays stay in float64, because float32 would round probabilities near one to one.
    return like_input(torch.from_numpy(values), X) if isinstance(X, Tensor) else values


def _of_observed(values: Values, rows: Rows) -> Values:
    """Return the values (n,) of rows that have any observed entry."""
    seen = find_observed_rows(rows)
    return values if seen is None else values[seen]


def _keep(rows: Rows, chosen: NDArray[np.intp]) -> Rows:
    """Return the rows of the given numbers; copy them only if they are in memory already."""
    if isinstance(rows, ArrayRows):
        return copy_rows(rows, chosen)
    weights = np.zeros(rows.n_rows)
    weights[chosen] = get_weights(rows)[chosen]
    return replace_weights(rows, weights)
