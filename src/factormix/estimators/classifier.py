"""A density for each class: a classifier of mixtures that knows what it has not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, clone

from factormix.data.sources import (
    ArrayRows,
    Rows,
    as_rows,
    checked_rows,
    count_used,
    features_of,
    weighted,
)
from factormix.data.units import Scaling
from factormix.data.weights import absolute_weights
from factormix.defaults import DTYPE, N_INIT, SCALING, SOLVER
from factormix.errors import InputError
from factormix.estimators.classified import ClassifiedMixtures
from factormix.estimators.grids import check_numbers
from factormix.estimators.labels import (
    check_priors,
    check_reject,
    class_numbers,
    first_classes,
    seen_labels,
)
from factormix.estimators.mfa import MFA
from factormix.estimators.options import check_options
from factormix.estimators.search import search_sizes
from factormix.estimators.sharing import (
    Shared,
    check_first_columns,
    draw_sample,
    with_every_column,
)
from factormix.estimators.splits import taken_rows
from factormix.estimators.validation import (
    MIN_SCALE_ROWS,
    Array,
    check_positive,
    check_rows,
    check_seed,
    remember_features,
    weighed,
)
from factormix.training.callbacks import Progress
from factormix.training.solvers import NaturalGradient, Solver, resolve
from factormix.training.solvers.base import check_length
from factormix.training.threads import team

__all__ = ["MFAClassifier"]

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
        rows = checked_rows(rows)
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
        remember_features(self, features_of(rows))
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
        rows = weighed(as_rows(X, sample_weight), absolute_weights)
        rows = check_rows(self, rows, weigh=absolute_weights) if begun else rows
        labels, weights = seen_labels(y, rows.n_rows), _weights(rows)
        known = self.classes_ if begun else first_classes(classes)
        if begun and classes is not None and not np.array_equal(np.unique(classes), known):
            raise InputError("classes differ from those of the first call: leave them out.")
        check_reject(self, known)
        numbers, rows = class_numbers(labels, known), checked_rows(rows)
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
            remember_features(self, features_of(rows))
        self.class_prior_, self._class_masses = priors, masses
        some = draw_sample(rows, check_seed(self.random_state))
        self._set_level(some)
        self._set_threshold(rows)
        return self

    def _stream_units(self, template: MFA, rows: Rows, begun: bool) -> Shared:
        """Return the units of the classes so far, or begin with those of some rows."""
        if begun:
            return Shared.of(next(one._run for one in self.estimators_ if one is not None))
        if count_used(rows) < MIN_SCALE_ROWS:
            raise InputError(
                f"X has n_samples={count_used(rows)}, too few for the first call of partial_fit,"
                f" which sets the scale of the data: give it {MIN_SCALE_ROWS} rows or more."
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
        most = max(1, count_used(rows) // ROWS_PER_COMPONENT)
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
    return weighted(rows, others)


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
