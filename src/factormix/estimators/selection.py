"""Choose the size of a mixture: train several sizes on the same rows and return the best.

``select`` trains every size for a quarter of its steps, evaluates it, and then trains to the end
only the sizes that can still win.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from factormix.core.inspection import components_in_use
from factormix.data.checks import ensure_finite_rows, find_observed_rows, normalize_weights
from factormix.data.features import describe_features, match_columns
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows, count_weighted_rows, take_rows
from factormix.data.sources.convert import as_rows, replace_weights
from factormix.defaults import CRITERIA, MAX_FACTORS, MOST_COMPONENTS
from factormix.errors import InputError, TrainingWarning
from factormix.estimators.fitting import (
    FitsBar,
    WorkingScale,
    check_jobs,
    cover_columns,
    draw_sample,
    run_fits,
)
from factormix.estimators.mfa import MFA
from factormix.estimators.validation import (
    Array,
    check_count,
    check_n_factors,
    check_options,
    check_seed,
    get_weights,
    weigh_rows,
)
from factormix.training.callbacks import Progress
from factormix.training.solvers.base import is_number
from factormix.training.threads import use_threads

Size = tuple[int, Any]
"""Number of components, and number of factors or ``"auto"``."""
Scores = NDArray[np.float64]

COMPONENTS = (1, 2, 5, 10, MOST_COMPONENTS, 50, 100)
FACTORS = (0, 2, 4, 8)
"""Sizes that are tried by default: each about twice the one before."""
TRIED_ROWS_PER_COMPONENT = 20
"""By default, sizes with fewer rows per component are not tried: a mean of 20 rows has an error of
1 / sqrt(20) = 0.22 deviations."""
HELD_OUT_SHARE, MAX_HELD_OUT = 0.2, 20_000
"""Share of the rows that is held out by default, as in five folds, and the maximum number of rows:
a mean of 20,000 scores has an error of 0.7% of their deviation."""
MARKS = (0.25, 0.5)
"""Shares of the planned steps after which a size is evaluated, as in successive halving (Jamieson
and Talwalkar, 2016). All sizes are evaluated at the first mark before any continues."""
MARGIN = 2.0
"""A size may lag behind by this many times the later gain of the best size, plus this many standard
errors of the difference: about 95% of a normal distribution lies within two."""
FAR_RANGES = 20.0
"""Scores this many interquartile ranges below the median are raised to that bound. In a normal
distribution, one score in 10**160 is that low; ``test_one_wild_row_does_not_decide`` shows what the
bound is for."""


def select(
    X: Array | Rows,
    n_components: int | Iterable[int] | None = None,
    n_factors: int | Iterable[int] | Literal["auto"] | None = None,
    *,
    criterion: str = "held_out",
    held_out: float | Array | Rows | None = None,
    estimator: MFA | None = None,
    sample_weight: Array | None = None,
    refit: bool = True,
    stop_hopeless: bool = True,
    verbose: int = 0,
    n_jobs: int | None = None,
) -> Selection:
    """Train mixtures of several sizes on the rows of X (n, d), and choose the best.

    Values are checked once, and all sizes share the split, the working units and the noise floors.
    Ctrl-C ends the search and returns the best size so far, with ``complete=False``.

    Parameters
    ----------
    X : array or rows (n, d)
    n_components, n_factors : int, sequence of int or None
        The sizes to try, in every combination. None takes up to 100 components of 20 rows or more,
        and up to 8 factors. ``n_factors="auto"``, or an ``estimator`` with it, lets components of
        every size choose their ranks.
    criterion : {"held_out", "bic", "aic", "icl"}
        ``"held_out"``: the mean log-likelihood of rows that were not trained on; scores far below
        all others are raised to a bound. The other criteria train on all rows and subtract a
        penalty for parameters: ``"bic"`` finds the smallest mixture that explains the data,
        ``"aic"`` larger ones, ``"icl"`` well separated clusters.
    held_out : float, rows (m, d) or None
        The share of X that is held out, or other rows to evaluate on; None takes a fifth of X, at
        most 20,000 rows.
    estimator : MFA or None
        All other options of the models, such as ``MFA(max_precision=50, random_state=0)``.
    sample_weight : array (n,) or None
        Weights of the rows, in training and in evaluation.
    refit : bool
        Whether the best model is trained again on all rows of X, if some were held out.
    stop_hopeless : bool
        Whether to stop sizes that can no longer win. All sizes are first trained for a quarter of
        their steps. Then, and again at half, a size stops if it lags behind the best by more than
        twice the later gain of the best, plus two standard errors of the difference.
    verbose : int
        1 shows a progress bar with the best value so far.
    n_jobs : int or None
        Number of sizes that are trained at the same time up to the first quarter of their steps,
        each in a thread; with ``stop_hopeless=False``, to their end. None is 1, and -1 one for each
        processor. The result does not depend on it. Callbacks are called from these threads.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from factormix import MFA, select
    >>> found = select(load_iris().data, [1, 3], [0, 2], estimator=MFA(random_state=0))
    >>> found.best_estimator_.n_components == found.best_params_["n_components"]
    True
    """
    if criterion not in CRITERIA:
        raise InputError(f"criterion must be one of {', '.join(CRITERIA)}, not {criterion!r}.")
    if held_out is not None and criterion != "held_out":
        raise InputError(f"held_out is for the criterion 'held_out', not {criterion!r}.")
    estimator = MFA() if estimator is None else estimator
    if not isinstance(estimator, MFA):
        raise InputError(f"estimator must be an MFA, not {type(estimator).__name__}.")
    check_options(estimator)
    if n_factors is None and estimator.n_factors == "auto":
        n_factors = "auto"
    rows, sizes = as_rows(X, sample_weight), (n_components, n_factors)
    check_jobs(n_jobs)
    search = SizeSearch(X, rows, sizes, estimator, criterion, held_out, verbose=verbose)
    found = search.run(refit=refit, stop_hopeless=stop_hopeless, n_jobs=n_jobs)
    if not found.complete:
        done = sum(one.status in ("done", "stopped") for one in found.sizes)
        warnings.warn(
            f"interrupted with {done} sizes done and the others left out: the best so far is kept.",
            TrainingWarning,
            stacklevel=2,
        )
    return found


@dataclass(frozen=True)
class SizeResult:
    """A size that was tried, and its result."""

    n_components: int
    n_factors: int | str
    value: float = math.nan
    """Mean log-likelihood of held-out rows, higher is better; or bic, aic or icl, lower is better.
    """
    difference: float = -math.inf
    """Distance of the value from the best one: zero for the best, negative for all others."""
    error: float | None = None
    """Standard error of the difference, from the same held-out rows; None for other criteria."""
    n_far: int = 0
    """Number of held-out rows that score more than twenty interquartile ranges below the median;
    their scores are raised to that bound. If there are any, try a smaller ``max_precision``.
    """
    log_likelihood: float = math.nan
    """Mean log-likelihood of the last batches of the training."""
    n_parameters: int = 0
    components_in_use: int = 0
    effective_factors: float = math.nan
    """Mean of the effective number of factors, weighted by the weights of the components."""
    seconds: float = 0.0
    status: str = "done"
    """"done"; "stopped" because it could no longer win; "interrupted"; or "failed" with the reason.
    """


@dataclass(frozen=True, repr=False)
class Selection:
    """The result of ``select``.

    Attributes
    ----------
    criterion : str
        ``"held_out"``, ``"bic"``, ``"aic"`` or ``"icl"``.
    sizes : list of SizeResult
        All sizes that were tried, in the order of components and factors.
    best_params_ : dict
        ``n_components`` and ``n_factors`` of the best size.
    best_score_ : float
        Its value of the criterion.
    best_estimator_ : MFA
        The best model, trained again on all rows with ``refit=True``.
    complete : bool
        False if an interrupt left out sizes, or the training on all rows.
    """

    criterion: str
    sizes: list[SizeResult]
    best_size: Size
    best_estimator_: MFA
    complete: bool = True

    @property
    def best(self) -> SizeResult:
        """The best size."""
        return next(s for s in self.sizes if (s.n_components, s.n_factors) == self.best_size)

    @property
    def best_params_(self) -> dict[str, Any]:
        """Options of the best size, as ``MFA`` takes them."""
        return {"n_components": self.best.n_components, "n_factors": self.best.n_factors}

    @property
    def best_score_(self) -> float:
        """The best value of the criterion."""
        return self.best.value

    def records(self) -> list[dict[str, Any]]:
        """Return one dict for each size, ready for JSON, CSV or a data frame."""
        return [
            {
                self.criterion if name == "value" else name: value
                for name, value in asdict(one).items()
            }
            for one in self.sizes
        ]

    def to_frame(self) -> Any:
        """Return the table as a pandas data frame."""
        import pandas as pd

        return pd.DataFrame(self.records())

    def __repr__(self) -> str:
        """Return the best size and its value; ``print`` shows the table of all sizes."""
        K, l = self.best_size
        best = f"n_components={K}, n_factors={l}, {self.criterion}={self.best_score_:.6g}"
        return f"Selection(best: {best}; {len(self.sizes)} sizes)"

    def __str__(self) -> str:
        """Write the table as text; a star marks the best size."""
        titles = ["", "K", "l", self.criterion, "difference", "far out", "parameters", "in use"]
        lines = [[*titles, "factors", "seconds", ""]]
        lines += [_format_cells(one, one is self.best) for one in self.sizes]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(w) for cell, w in zip(line[:-1], widths, strict=False))
            + f"  {line[-1]}".rstrip()
            for line in lines
        )


def _format_cells(one: SizeResult, best: bool) -> list[str]:
    error = "" if one.error is None or best else f" ± {one.error:.2g}"
    return [
        "*" if best else "",
        str(one.n_components),
        str(one.n_factors),
        f"{one.value:.6g}",
        "" if best else f"{one.difference:.4g}{error}",
        "" if one.error is None else str(one.n_far),
        f"{one.n_parameters:,}",
        str(one.components_in_use),
        f"{one.effective_factors:.1f}",
        f"{one.seconds:.1f}",
        "" if one.status == "done" else one.status,
    ]


@dataclass(frozen=True)
class Evaluation:
    """The quality of a model; higher is better."""

    value: float
    scores: Scores | None = None
    """(n,), scores of the rows whose mean the value is; None for other criteria."""
    weights: Scores | None = None
    """(n,), or None for equal weights."""
    n_far: int = 0
    """Number of scores that were raised to the bound."""


class SizeSearch:
    """Train all sizes up to the first mark, and then, best first, the ones that can still win.

    ``rows`` are made from X; without ``scale``, they set the working units. The other arguments are
    as in ``select``.
    """

    def __init__(
        self,
        X: Array | Rows,
        rows: Rows,
        sizes: tuple[Any, Any],
        estimator: MFA,
        criterion: str = CRITERIA[0],
        held_out: float | Array | Rows | None = None,
        *,
        scale: WorkingScale | None = None,
        verbose: int = 0,
    ) -> None:
        self._X, self._given_scale, self._verbose = X, scale, verbose
        self._estimator, self.criterion = estimator, criterion
        seed = check_seed(estimator.random_state)
        self._rows = self._train = ensure_finite_rows(weigh_rows(rows, normalize_weights))
        self._held_out: Rows | None = None
        if criterion == "held_out":
            self._train, self._held_out = split_rows(self._rows, held_out, seed)
        self._sizes = list_sizes(*sizes, count_weighted_rows(self._train), rows.n_features)
        # A clone would have copies of the callbacks, and users look at their own afterwards.
        self._template = clone(estimator).set_params(
            verbose=0, random_state=seed, callbacks=estimator.callbacks
        )
        train = weigh_rows(self._train, normalize_weights)
        self._scale = scale or WorkingScale.estimate(
            check_options(self._template), cover_columns(train, draw_sample(train, seed))
        )
        self._bar = FitsBar({size: step_cost(size) for size in self._sizes}, shown=bool(verbose))
        self._candidates: list[Candidate] = []
        self._lock = threading.Lock()
        self._best: Candidate | None = None
        """The best of the sizes that are done."""
        self._failures: list[SizeResult] = []

    def run(
        self, *, refit: bool = True, stop_hopeless: bool = True, n_jobs: int | None = None
    ) -> Selection:
        """Train all sizes, and the best again on all rows; ``complete`` is False if interrupted."""
        estimator = self._estimator
        with use_threads():
            complete = self._train_sizes(stop_hopeless, n_jobs)
            found = self._list_results(complete)
            if refit and complete and self._held_out is not None:
                model = self._build_model(found.best_size, estimator.callbacks)
                model.set_params(verbose=self._verbose)
                try:
                    model._fit_rows(self._X, self._rows, self._given_scale)
                    found = replace(found, best_estimator_=model)
                except KeyboardInterrupt:
                    found = replace(found, complete=False)
        found.best_estimator_.set_params(
            random_state=estimator.random_state,
            verbose=estimator.verbose,
            callbacks=estimator.callbacks,
        )
        return found

    def _train_sizes(self, stop_hopeless: bool, n_jobs: int | None) -> bool:
        """Train all sizes; return False if an interrupt left some out."""
        try:
            run_fits(partial(self._start, pause=stop_hopeless), self._sizes, n_jobs)
            paused = [one for one in self._candidates if one.status == "interrupted"]
            for candidate in sorted(paused, key=self._rank, reverse=True):
                self._continue(candidate)
            return True
        except KeyboardInterrupt:
            if not self._candidates:
                raise
            return False
        finally:
            self._bar.close()

    def _build_model(self, size: Size, callbacks: Sequence[Any]) -> MFA:
        model: MFA = clone(self._template).set_params(n_components=size[0], n_factors=size[1])
        model.callbacks = callbacks
        return model

    def _start(self, size: Size, stop: Callable[[Progress], object], *, pause: bool) -> None:
        """Train a size, up to the first mark or to its end."""
        candidate = Candidate(size, self)
        callbacks = [*self._template.callbacks, *([candidate] if pause else []), stop]
        model = self._build_model(size, callbacks)
        try:
            model._fit_rows(self._X, self._train, self._scale)
        except InputError as error:
            self._failures.append(SizeResult(*size, status=f"failed: {error}"))
            return
        candidate.model = model
        if not candidate.halted:
            self._finish(candidate)
        candidate.facts = _summarise_model(model)
        self._candidates.append(candidate)

    def _continue(self, candidate: Candidate) -> None:
        """Train a paused size to its end, unless it can no longer win."""
        model, candidate.best, candidate.pauses = candidate.model, self._best, False
        assert model is not None
        candidate.halted = candidate.cannot_win(MARKS[0])
        if not candidate.halted:
            model.resume(self._train)
        if candidate.halted:
            candidate.status, candidate.model = "stopped", None
            self.report(candidate.size, 1.0)
        else:
            self._finish(candidate)
        candidate.facts = _summarise_model(model)

    def _finish(self, candidate: Candidate) -> None:
        """Evaluate a run at its end, and keep its model if it is the best."""
        assert candidate.model is not None
        candidate.course[1.0] = self.evaluate(candidate.model)
        candidate.status = "done"
        with self._lock:
            loser: Candidate | None = candidate
            if self._best is None or self._rank(candidate) > self._rank(self._best):
                self._best, loser = candidate, self._best
            if loser is not None:
                loser.model = None
        self.report(candidate.size, 1.0)

    def _rank(self, candidate: Candidate) -> tuple[float, int]:
        """Return a key that is largest for the best size; among equals, the first is best.

        So the best does not depend on the order in which threads end.
        """
        return candidate.last.value, -self._sizes.index(candidate.size)

    def evaluate(self, model: MFA) -> Evaluation:
        """Evaluate a model; criteria that are better when lower are negated."""
        rows = self._held_out
        if rows is None:
            return Evaluation(-getattr(model, self.criterion)(self._train))
        scores, weights = np.asarray(model.score_samples(rows)), getattr(rows, "weights", None)
        if weights is not None:
            scores, weights = scores[weights > 0], weights[weights > 0]
        scores, n_far = clip_far_scores(scores.astype(np.float64))
        return Evaluation(float(np.average(scores, weights=weights)), scores, weights, n_far)

    def _find_best(self) -> Candidate | None:
        """Return the best size that is done or, before there is one, the best paused size."""
        return self._best or max(self._candidates, key=self._rank, default=None)

    def report(self, size: Size, share: float) -> None:
        """Show the share of a size that is done, and the best size so far."""
        text, best = f"K={size[0]}, l={size[1]}", self._find_best()
        if best is not None:
            value = self._criterion_value(best)
            text += f"; best {value:.6g} with K={best.size[0]}, l={best.size[1]}"
        self._bar.move(size, share, text)

    def _criterion_value(self, candidate: Candidate) -> float:
        """Return the value of the criterion with its usual sign."""
        return candidate.last.value if self._held_out is not None else -candidate.last.value

    def _list_results(self, complete: bool) -> Selection:
        best = self._find_best()
        if best is None or best.model is None:
            one = min(self._failures, key=lambda one: (one.n_components, one.n_factors))
            reason = one.status.removeprefix("failed: ")
            raise InputError(
                f"no size could be trained; with n_components={one.n_components}: {reason}"
            )
        sizes = [*self._failures]
        for candidate in self._candidates:
            end = candidate.last
            sizes.append(
                SizeResult(
                    *candidate.size,
                    value=self._criterion_value(candidate),
                    difference=end.value - best.last.value,
                    error=None if end.scores is None else paired_error(end, best.last),
                    n_far=end.n_far,
                    status=candidate.status,
                    **candidate.facts,
                )
            )
        sizes.sort(key=lambda one: (one.n_components, one.n_factors))
        return Selection(self.criterion, sizes, best.size, best.model, complete)


class Candidate:
    """A size in the search, and its model as long as that may still win.

    As a callback of the training, it evaluates the model at its marks, and ends a run that pauses
    or can no longer win.
    """

    def __init__(self, size: Size, search: SizeSearch) -> None:
        self.size, self._search = size, search
        self.model: MFA | None = None
        self.facts: dict[str, Any] = {}
        self.status = "interrupted"
        """The status of a paused size, unless it continues."""
        self.course: dict[float, Evaluation] = {}
        """Evaluations by the share of the planned steps that was done; 1 is the end."""
        self.best: Candidate | None = None
        """The best size that was done when this one continued."""
        self.pauses = True
        """Whether the run pauses at its next mark."""
        self.halted = False
        """Whether the run was ended before its last step."""

    @property
    def last(self) -> Evaluation:
        """The latest evaluation."""
        return self.course[max(self.course)]

    def __call__(self, progress: Progress) -> bool:
        """Return whether the run should end."""
        done = progress.record["step"] / max(progress.steps, 1)
        self._search.report(self.size, done)
        run = progress.run
        passed = [mark for mark in MARKS if mark <= done and mark not in self.course]
        if progress.last or not passed or not run.plan.settled(run.state):
            return False
        self.course |= dict.fromkeys(passed, self._search.evaluate(progress.model))
        self.halted = self.pauses or self.cannot_win(max(passed))
        return self.halted

    def cannot_win(self, mark: float) -> bool:
        """Return whether it would stay behind even if it gained much more than the best did."""
        if self.best is None:
            return False
        end = self.best.last
        then = self.best.course.get(mark, end)
        gain = max(end.value - then.value, 0.0)
        behind = then.value - self.last.value
        return behind > MARGIN * (gain + paired_error(self.last, end))


def _summarise_model(model: MFA) -> dict[str, Any]:
    weights, effective = (np.asarray(a) for a in (model.weights_, model.effective_factors_))
    return {
        "log_likelihood": float(model.history_[-1]["log_likelihood"]),
        "n_parameters": model.n_parameters_,
        "components_in_use": components_in_use(weights),
        "effective_factors": float(weights @ effective),
        "seconds": round(model.seconds_, 3),
    }


def paired_error(one: Evaluation, other: Evaluation) -> float:
    """Compute the standard error of the difference of two means over the same rows."""
    if one.scores is None or other.scores is None:
        return 0.0
    difference, n = one.scores - other.scores, len(one.scores)
    weights = np.ones(n) if one.weights is None else one.weights
    share = weights / weights.sum()
    variance = float(share @ (difference - share @ difference) ** 2)
    # Kish's effective number of rows.
    effective = 1 / float(share @ share)
    return float(np.sqrt(variance / max(effective - 1, 1)))


def clip_far_scores(scores: Scores) -> tuple[Scores, int]:
    """Raise scores (n,) far below the others to a bound; return them and the number raised.

    A mixture can give a single row a log-likelihood of minus a million, which would dominate the
    mean of all others.
    """
    low, middle, high = np.quantile(scores, (0.25, 0.5, 0.75))
    bound = middle - FAR_RANGES * (high - low)
    return np.maximum(scores, bound), int((scores < bound).sum())


def list_sizes(n_components: Any, n_factors: Any, n_rows: int, n_features: int) -> list[Size]:
    """Return the sizes to try, the fastest first.

    By default, components have 20 rows or more on average, and there are fewer factors than
    features.
    """
    components = check_counts(n_components, "n_components", 1)
    automatic = isinstance(n_factors, str) and n_factors == "auto"
    factors: list[Any] | None = ["auto"] if automatic else check_counts(n_factors, "n_factors", 0)
    if components is None:
        components = [K for K in COMPONENTS if K == 1 or n_rows >= K * TRIED_ROWS_PER_COMPONENT]
    if factors is None:
        some = (0, 1) if n_features == 2 else FACTORS
        factors = [l for l in some if l == 0 or l < n_features]
    for l in [] if automatic else factors:
        check_n_factors(l, n_features)
    least = max(2, *components)
    if n_rows < least:
        raise InputError(
            f"there are {n_rows} rows to learn from, fewer than the {least} that n_components="
            f"{max(components)} needs: try fewer components or give more rows."
        )
    return sorted(product(components, factors), key=step_cost)


def step_cost(size: Size) -> int:
    """Return the relative cost of a step: the width of its matrix products."""
    K, l = size
    return int(K * ((MAX_FACTORS if l == "auto" else l) + 2))


def check_counts(given: Any, name: str, least: int) -> list[int] | None:
    """Return whole numbers, sorted and unique, from one number or several; None stays None."""
    if given is None:
        return None
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    counts = sorted({check_count(one, name, least) for one in (given if several else [given])})
    if not counts:
        raise InputError(f"{name} is empty: give the numbers to try, as in {name}=[5, 10, 20].")
    return counts


def split_rows(rows: Rows, held_out: Any, seed: int) -> tuple[Rows, Rows]:
    """Split checked rows by a share, by default a fifth; or take other rows as held out.

    Return training rows and held-out rows. Only held-out rows are copied. In the training rows they
    have the weight zero, so that a file stays where it is.
    """
    if held_out is not None and not is_number(held_out):
        try:
            others = ensure_finite_rows(as_rows(held_out))
        except InputError as error:
            raise InputError(f"held_out cannot be used: {error}") from error
        others = match_columns(others, describe_features(rows), "training", "held_out")
        return rows, _ignore_empty_rows(others)
    if held_out is not None and not 0 < held_out < 1:
        raise InputError(
            f"held_out must be a share between 0 and 1, or rows to evaluate on, not {held_out!r}."
        )
    n = count_weighted_rows(rows)
    wanted = min(HELD_OUT_SHARE * n, MAX_HELD_OUT) if held_out is None else float(held_out) * n
    n_held_out = max(1, math.floor(wanted))
    if n - n_held_out < 2:
        raise InputError(
            f"X has n_samples={n}, too few to hold some out: give more rows, or rows to evaluate"
            " on as held_out."
        )
    weights = get_weights(rows)
    used = np.flatnonzero(weights)
    chosen = np.sort(np.random.default_rng([seed, n]).choice(used, n_held_out, replace=False))
    weights[chosen] = 0
    return replace_weights(rows, weights), _ignore_empty_rows(copy_rows(rows, chosen))


def _ignore_empty_rows(rows: Rows) -> Rows:
    """Return rows in which the ones without an observed entry have the weight zero.

    Their density is one in every mixture.
    """
    seen = find_observed_rows(rows)
    if seen is None:
        return rows
    weights = seen * get_weights(rows)
    if not weights.any():
        raise InputError(
            "no entry of the rows held out is observed, so they cannot evaluate a model:"
            " give more rows, or others as held_out."
        )
    return replace_weights(rows, weights)


def copy_rows(rows: Rows, numbers: NDArray[np.intp]) -> Rows:
    """Copy the rows of the given numbers into memory."""
    taken, features = take_rows(rows, numbers), describe_features(rows)
    weights = None if taken.weights is None else np.asarray(taken.weights, dtype=np.float64)
    copied = ArrayRows(taken.rows, weights=weights, feature_names=features.names)
    copied.image_shape = features.image_shape
    return copied.mark_finite(complete=getattr(rows, "complete", False))
