"""What the choice of a size found: a table of sizes, and the best model.

Grids of sizes: which numbers of components and of factors are tried.

Rows to train on and rows to judge by.

A race between mixtures: each is judged on its way, and those that cannot win any more stop.

The choice of a size: mixtures of several sizes on the same rows, and the best of them.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from factormix.core.inspection import components_in_use
from factormix.data.batches import Batch, join_batches
from factormix.data.checks import (
    count_chunk_rows,
    ensure_finite_rows,
    find_observed_rows,
    normalize_weights,
)
from factormix.data.features import describe_features, match_columns
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows, count_weighted_rows
from factormix.data.sources.convert import as_rows, replace_weights
from factormix.defaults import CRITERIA, N_COMPONENTS
from factormix.errors import InputError, TrainingWarning
from factormix.estimators.fitting import Shared, draw_sample, with_every_column
from factormix.estimators.mfa import MFA
from factormix.estimators.validation import (
    Array,
    check_count,
    check_options,
    check_seed,
    factors_for,
    weighed,
)
from factormix.training.callbacks import Progress
from factormix.training.threads import team

if TYPE_CHECKING:
    from tqdm.auto import tqdm

__all__ = [
    "FIRST",
    "Course",
    "Judgement",
    "Runner",
    "Selection",
    "Size",
    "SizesBar",
    "Split",
    "Trained",
    "beaten",
    "check_numbers",
    "cost",
    "grid",
    "paired_error",
    "search_sizes",
    "select",
    "split_rows",
    "taken_rows",
    "tamed",
]


@dataclass(frozen=True)
class Trained:
    """A size that was tried, and what came of it."""

    n_components: int
    n_factors: int
    value: float
    """Mean log-likelihood of held-out rows, the higher the better; or bic, aic or icl, the lower
    the better.
    """
    difference: float
    """How far the value is from the best one: zero for the best, and negative for all others."""
    error: float | None
    """Standard error of the difference, from the same held-out rows; None for other criteria."""
    n_far: int
    """Held-out rows that score far below all others, more than twenty ranges of the middle half
    below the median: they count as that far, and no more. If there are some, a smaller
    ``max_precision`` may be better.
    """
    log_likelihood: float
    """Mean log-likelihood of the last batches of the training."""
    n_parameters: int
    components_in_use: int
    effective_factors: float
    """Mean of the effective number of factors of the components, by their weights."""
    seconds: float
    status: str
    """"done"; "stopped", if it lay so far behind that it was not trained to the end; "interrupted";
    or "failed" with the reason.
    """

    @classmethod
    def failed(cls, size: tuple[int, int], reason: str) -> Trained:
        """Describe a size that could not be trained."""
        nan = math.nan
        return cls(*size, nan, -math.inf, None, 0, nan, 0, 0, nan, 0.0, f"failed: {reason}")


@dataclass(frozen=True)
class Selection:
    """What ``select`` found.

    Attributes
    ----------
    criterion : str
        ``"held_out"``, ``"bic"``, ``"aic"`` or ``"icl"``.
    sizes : list of Trained
        All sizes that were tried, in the order of components and factors.
    best_params_ : dict
        ``n_components`` and ``n_factors`` of the best size.
    best_score_ : float
        Its value of the criterion.
    best_estimator_ : MFA
        The best model: trained again on all rows with ``refit=True``, else as it was judged.
    complete : bool
        False where an interrupt left sizes out, or the training on all rows.
    """

    criterion: str
    sizes: list[Trained]
    best_size: tuple[int, int]
    best_estimator_: MFA = field(repr=False)
    complete: bool = True

    @property
    def best(self) -> Trained:
        """The best size."""
        return next(s for s in self.sizes if (s.n_components, s.n_factors) == self.best_size)

    @property
    def best_params_(self) -> dict[str, int]:
        """Options of the best size, as ``MFA`` takes them."""
        return {"n_components": self.best.n_components, "n_factors": self.best.n_factors}

    @property
    def best_score_(self) -> float:
        """The best value of the criterion."""
        return self.best.value

    def records(self) -> list[dict[str, Any]]:
        """Return one dict for each size, ready for JSON, CSV or a data frame."""
        name = self.criterion
        return [
            {
                "n_components": one.n_components,
                "n_factors": one.n_factors,
                name: one.value,
                "difference": one.difference,
                "error": one.error,
                "n_far": one.n_far,
                "log_likelihood": one.log_likelihood,
                "n_parameters": one.n_parameters,
                "components_in_use": one.components_in_use,
                "effective_factors": one.effective_factors,
                "seconds": one.seconds,
                "status": one.status,
            }
            for one in self.sizes
        ]

    def to_frame(self) -> Any:
        """Return the table as a pandas data frame."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_frame needs pandas: run `pip install pandas`") from error
        return pandas.DataFrame(self.records())

    def __str__(self) -> str:
        """Write the table as text; a star marks the best size."""
        titles = ["", "K", "l", self.criterion, "difference", "far out", "parameters", "in use"]
        lines = [[*titles, "factors", "seconds", ""]]
        lines += [_cells(one, one is self.best) for one in self.sizes]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(w) for cell, w in zip(line[:-1], widths, strict=False))
            + f"  {line[-1]}".rstrip()
            for line in lines
        )


def _cells(one: Trained, best: bool) -> list[str]:
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


COMPONENTS = (1, 2, 5, 10, N_COMPONENTS, 50, 100)
ROWS_PER_COMPONENT = 20
"""Rows below which a component is not tried unless it is asked for."""
FACTORS = (0, 2, 4, 8)

Size = tuple[int, int]
"""Number of components and number of factors."""


def grid(n_components: Any, n_factors: Any, n_rows: int, n_features: int) -> list[Size]:
    """Return the sizes to try, those that train fastest first.

    ``n_rows`` and ``n_features`` are those that there are to learn from. Where nothing is given,
    components have 20 rows or more on average, and there are fewer factors than features.
    """
    components = check_numbers(n_components, "n_components", 1)
    factors = check_numbers(n_factors, "n_factors", 0)
    if components is None:
        components = [K for K in COMPONENTS if K == 1 or n_rows >= K * ROWS_PER_COMPONENT]
    if factors is None:
        few = (0, 1) if n_features == 2 else FACTORS
        factors = [l for l in few if l == 0 or l < n_features]
    for l in factors:
        factors_for(l, n_features)
    least = max(2, *components)
    if n_rows < least:
        raise InputError(
            f"there are {n_rows} rows to learn from, fewer than the {least} that n_components="
            f"{max(components)} needs: try fewer components or give more rows."
        )
    return sorted(product(components, factors), key=cost)


def cost(size: Size) -> int:
    """Return the relative cost of a step: the width of its matrix products."""
    K, l = size
    return K * (l + 2)


def check_numbers(given: Any, name: str, least: int) -> list[int] | None:
    """Return whole numbers in order and without repetition; one number stands for itself."""
    if given is None:
        return None
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    numbers = sorted({check_count(one, name, least) for one in (given if several else [given])})
    if not numbers:
        raise InputError(f"{name} is empty: give the numbers to try, as in {name}=[5, 10, 20].")
    return numbers


class SizesBar:
    """Show on standard error how much of a search is done, and the best so far."""

    FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"

    def __init__(self, sizes: list[Size], shown: bool) -> None:
        self._costs, self._shown = {size: cost(size) for size in sizes}, shown
        self._shares = dict.fromkeys(sizes, 0.0)
        self._size: Size | None = None
        self._bar: tqdm[None] | None = None

    def begin(self, size: Size, best: str) -> None:
        """Turn to a size; the one before is done with for now."""
        if self._shown and self._bar is None:
            from tqdm.auto import tqdm

            total = sum(self._costs.values())
            self._bar = tqdm(total=total, bar_format=self.FORMAT, dynamic_ncols=True)
        self._size = size
        if self._bar is not None:
            now = f"K={size[0]}, l={size[1]} of {len(self._costs)} sizes"
            self._bar.set_postfix_str(f"{now}; {best}" if best else now)

    def move(self, share: float) -> None:
        """Say how much of a size is done."""
        if self._bar is not None and self._size is not None:
            self._shares[self._size] = share
            done = sum(self._costs[size] * part for size, part in self._shares.items())
            self._bar.update(max(0.0, done - self._bar.n))

    def close(self, best: str) -> None:
        """Leave the bar with the best of all."""
        if self._bar is not None:
            self._bar.set_postfix_str(best)
            self._bar.close()


SHARE = 0.2
"""Share of the rows that is held out unless the caller says otherwise,"""
MOST = 20_000
"""and the most rows that it may be."""


@dataclass(frozen=True)
class Split:
    """Rows to train on, those held out having the weight zero, and the rows held out."""

    train: Rows
    held_out: Rows | None

    @property
    def n_train(self) -> int:
        """Rows that are trained on."""
        return count_weighted_rows(self.train)


def split_rows(rows: Rows, held_out: Any, seed: int) -> Split:
    """Split checked rows: by a share, by other rows to judge by, or by the default share.

    Rows are not copied, except for those held out: the others are told by their weights, so that
    a file stays where it is.
    """
    number = isinstance(held_out, numbers.Real) and not isinstance(held_out, bool)
    if held_out is not None and not number:
        try:
            judges = ensure_finite_rows(as_rows(held_out))
        except InputError as error:
            raise InputError(f"held_out cannot be used: {error}") from error
        judges = match_columns(judges, describe_features(rows), "training", "held_out")
        return Split(rows, _telling(judges))
    if held_out is not None and not 0 < held_out < 1:
        raise InputError(
            f"held_out must be a share between 0 and 1, or rows to judge by, not {held_out!r}."
        )
    n = count_weighted_rows(rows)
    wanted = min(SHARE * n, MOST) if held_out is None else float(held_out) * n
    n_held = max(1, math.floor(wanted))
    if n - n_held < 2:
        raise InputError(
            f"X has n_samples={n}, too few to hold some out: give more rows, or rows to judge by as"
            " held_out."
        )
    weights: NDArray[np.float64] | None = getattr(rows, "weights", None)
    weights = np.ones(rows.n_rows) if weights is None else weights
    used = np.flatnonzero(weights)
    chosen = np.sort(np.random.default_rng([seed, n]).choice(used, n_held, replace=False))
    others = weights.copy()
    others[chosen] = 0
    return Split(replace_weights(rows, others), _telling(taken_rows(rows, chosen)))


def _telling(rows: Rows) -> Rows:
    """Return rows to judge by in which those without an observed entry count for nothing.

    The density of nothing is one, whatever the mixture.
    """
    seen = find_observed_rows(rows)
    if seen is None:
        return rows
    given: NDArray[np.float64] | None = getattr(rows, "weights", None)
    weights = seen.astype(np.float64) if given is None else seen * given
    if not weights.any():
        raise InputError(
            "no entry of the rows held out is observed, so that they cannot judge: give more rows,"
            " or others to judge by as held_out."
        )
    return replace_weights(rows, weights)


def taken_rows(rows: Rows, chosen: NDArray[np.intp]) -> Rows:
    """Copy the chosen rows, by their numbers in order, into memory."""
    parts, first = list[Batch](), 0
    for block in rows.blocks(count_chunk_rows(rows)):
        last = first + len(block)
        mine = chosen[np.searchsorted(chosen, first) : np.searchsorted(chosen, last)] - first
        if len(mine):
            parts.append(block.take(mine))
        first = last
    taken, features = join_batches(parts), describe_features(rows)
    weights = None if taken.weights is None else np.asarray(taken.weights, dtype=np.float64)
    copied = ArrayRows(taken.rows, weights=weights, feature_names=features.names)
    copied.image_shape = features.image_shape
    return copied.mark_finite(complete=getattr(rows, "complete", False))


FIRST = 0.25
"""Share of the planned steps after which all runs are judged before any goes on."""
MARKS = (FIRST, 0.5)
"""Shares of the planned steps after which a run is judged on its way."""
SLACK = 2.0
"""How many times the later gain of the best a run may lie behind it."""
ERRORS = 2.0
"""How many standard errors of the difference it may lie behind in addition."""
REACH = 20.0
"""Ranges of the middle half below the median from which on a row scores no lower."""

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Judgement:
    """How good a model is; higher is better."""

    value: float
    scores: Scores | None = None
    """(n,), scores of the rows whose mean the value is, if it is one."""
    weights: Scores | None = None
    """(n,), or None where the rows count alike."""
    n_far: int = 0
    """Rows whose scores were raised to what counts as far out."""


@dataclass
class Course:
    """How a model was judged on its way and at the end."""

    marks: dict[float, Judgement] = field(default_factory=dict)
    end: Judgement | None = None

    @property
    def last(self) -> Judgement:
        """The latest judgement."""
        return self.marks[max(self.marks)] if self.end is None else self.end

    def at(self, mark: float) -> Judgement:
        """Return the judgement at a mark, or the latest if the run ended before."""
        return self.marks.get(mark, self.last)


def tamed(scores: Scores) -> tuple[Scores, int]:
    """Return scores (n,) without wild values, and how many these were.

    A mixture can give one row a log-likelihood of minus a million, and the mean of all others would
    count for nothing beside it. So rows far below the others count as far out, and no more.
    """
    low, middle, high = np.quantile(scores, (0.25, 0.5, 0.75))
    bound = middle - REACH * (high - low)
    return np.maximum(scores, bound), int((scores < bound).sum())


def paired_error(one: Judgement, other: Judgement) -> float:
    """Compute the standard error of the difference of two means over the same rows."""
    if one.scores is None or other.scores is None:
        return 0.0
    difference, n = one.scores - other.scores, len(one.scores)
    weights = np.ones(n) if one.weights is None else one.weights
    share = weights / weights.sum()
    spread = float(share @ (difference - share @ difference) ** 2)
    # By the number of equal rows that would be as certain (Kish).
    equal = 1 / float(share @ share)
    return float(np.sqrt(spread / max(equal - 1, 1)))


def beaten(found: Judgement, best: Course, mark: float) -> bool:
    """Tell whether a run would stay behind even if it gained much more than the best did."""
    end, then = best.last, best.at(mark)
    gain = max(end.value - then.value, 0.0)
    behind = then.value - found.value
    return behind > SLACK * gain + ERRORS * paired_error(found, end)


class Runner:
    """Watch one run: judge it at the marks, and end it when the best cannot be reached."""

    def __init__(self, judge: Callable[[Any], Judgement], seen: Callable[[float], object]) -> None:
        """``seen`` is told the share of the run that is done."""
        self.course = Course()
        self.pauses = True
        """Whether the run is to pause at its next mark."""
        self.best: Course | None = None
        """The course of the best model so far."""
        self.halted = False
        """Whether the run was ended on its way."""
        self._judge, self._seen = judge, seen

    def __call__(self, progress: Progress) -> bool:
        """Return whether the run should end."""
        done = progress.record["step"] / max(progress.steps, 1)
        self._seen(done)
        run, marks = progress.run, self.course.marks
        passed = [mark for mark in MARKS if mark <= done and mark not in marks]
        if progress.last or not passed or not run.plan.settled(run.state):
            return False
        found = self._judge(progress.model)
        marks.update(dict.fromkeys(passed, found))
        lost = self.best is not None and beaten(found, self.best, max(passed))
        self.halted = self.pauses or lost
        return self.halted


PAUSED = "interrupted"
"""What becomes of a size whose training was begun, unless it goes on."""


def select(
    X: Array | Rows,
    n_components: int | Iterable[int] | None = None,
    n_factors: int | Iterable[int] | None = None,
    *,
    criterion: str = "held_out",
    held_out: float | Array | Rows | None = None,
    estimator: MFA | None = None,
    sample_weight: Array | None = None,
    refit: bool = True,
    stop_hopeless: bool = True,
    verbose: int = 0,
) -> Selection:
    """Train mixtures of several sizes on the rows of X (n, d), and choose the best.

    Values are checked once, and all sizes share the split, the working units and the noise floors.
    Ctrl-C ends the search, and what was found so far is returned, with ``complete=False``.

    Parameters
    ----------
    X : array or rows (n, d)
    n_components, n_factors : int, sequence of int or None
        What is tried, in every combination. None takes up to 100 components of 20 rows or more,
        and up to 8 factors.
    criterion : {"held_out", "bic", "aic", "icl"}
        ``"held_out"``: the mean log-likelihood of rows that were not trained on, of which those
        that score far below all others count as far out and no more. The others train on all rows
        and pay for parameters: ``"bic"`` finds the smallest mixture that explains the data,
        ``"aic"`` larger ones, ``"icl"`` well separated clusters.
    held_out : float, rows (m, d) or None
        The share of X that is held out, or other rows to judge by; None takes a fifth of X, at most
        20,000 rows.
    estimator : MFA or None
        All other options of the models, such as ``MFA(max_precision=50, random_state=0)``.
    sample_weight : array (n,) or None
        How much each row counts, in training and in judging.
    refit : bool
        Whether the best model is trained again on all rows of X, where some were held out.
    stop_hopeless : bool
        Whether all sizes are first trained for a quarter of their steps, and those stopped, there
        or at half, which lie further behind the best than twice what that one gained from there on,
        and two standard errors of the difference.
    verbose : int
        1 shows a progress bar with the best value so far.

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
    found = search_sizes(
        X,
        as_rows(X, sample_weight),
        (n_components, n_factors),
        estimator,
        criterion=criterion,
        held_out=held_out,
        refit=refit,
        stop_hopeless=stop_hopeless,
        verbose=verbose,
    )
    if not found.complete:
        done = sum(one.status in ("done", "stopped") for one in found.sizes)
        warnings.warn(
            f"interrupted with {done} sizes done and the others left out: the best so far is kept.",
            TrainingWarning,
            stacklevel=2,
        )
    return found


def search_sizes(
    X: Array | Rows,
    rows: Rows,
    sizes: tuple[Any, Any],
    estimator: MFA,
    *,
    criterion: str = CRITERIA[0],
    held_out: float | Array | Rows | None = None,
    refit: bool = True,
    stop_hopeless: bool = True,
    verbose: int = 0,
    shared: Shared | None = None,
) -> Selection:
    """Choose a size for rows that come from X, as ``select`` does, in units of their own or others.

    An interrupt is told by ``complete`` alone.
    """
    seed = check_seed(estimator.random_state)
    rows = ensure_finite_rows(weighed(rows, normalize_weights))
    split = split_rows(rows, held_out, seed) if criterion == "held_out" else Split(rows, None)
    tried = grid(*sizes, split.n_train, rows.n_features)
    # A clone would have copies of the callbacks, which users look at afterwards.
    template = clone(estimator).set_params(
        verbose=0, random_state=seed, callbacks=estimator.callbacks
    )
    bar = SizesBar(tried, bool(verbose))
    search = _Search(X, split, criterion, template, bar, shared)
    with team():
        found = search.selection(search.run(tried, stop_hopeless))
        if refit and found.complete and split.held_out is not None:
            whole = clone(template).set_params(**found.best_params_)
            whole.set_params(verbose=verbose, callbacks=estimator.callbacks)
            found = _refitted(found, whole, X, rows, shared)
    found.best_estimator_.set_params(
        random_state=estimator.random_state,
        verbose=estimator.verbose,
        callbacks=estimator.callbacks,
    )
    return found


def _refitted(
    found: Selection, model: MFA, X: Array | Rows, rows: Rows, shared: Shared | None
) -> Selection:
    """Train the best size on all rows; an interrupt leaves the model of the search."""
    try:
        return replace(found, best_estimator_=model._fit(X, rows, shared))
    except KeyboardInterrupt:
        return replace(found, complete=False)


class _Candidate:
    """A size, how it was judged, and its model while that may still be of use."""

    def __init__(self, size: Size, runner: Runner, model: MFA) -> None:
        self.size, self.runner = size, runner
        self.model: MFA | None = model
        self.facts: dict[str, Any] = {}
        self.status = PAUSED

    @property
    def course(self) -> Course:
        return self.runner.course

    @property
    def value(self) -> float:
        return self.course.last.value


class _Search:
    """Train all sizes up to the first mark, and then, the best ahead, those that may still win."""

    def __init__(
        self,
        X: Array | Rows,
        split: Split,
        criterion: str,
        template: MFA,
        bar: SizesBar,
        shared: Shared | None,
    ) -> None:
        self._X, self._split, self._criterion = X, split, criterion
        self._template, self._bar = template, bar
        train = weighed(split.train, normalize_weights)
        sample = draw_sample(train, check_seed(template.random_state))
        self._shared = shared or Shared.estimate(template, with_every_column(train, sample))
        self._tried: list[_Candidate] = []
        self._best: _Candidate | None = None
        self._failures: dict[Size, str] = {}

    def run(self, sizes: list[Size], racing: bool) -> bool:
        """Train all sizes; return False if an interrupt left some out."""
        try:
            for size in sizes:
                self._begin(size, racing)
            paused = [one for one in self._tried if one.status == PAUSED]
            for candidate in sorted(paused, key=lambda one: one.value, reverse=True):
                self._continue(candidate)
            return True
        except KeyboardInterrupt:
            if not self._tried:
                raise
            return False
        finally:
            self._bar.close(self._told())

    def _begin(self, size: Size, racing: bool) -> None:
        """Train a size: up to the first mark in a race, else to its end."""
        self._bar.begin(size, self._told())
        runner = Runner(self._judge, self._bar.move)
        model: MFA = clone(self._template).set_params(n_components=size[0], n_factors=size[1])
        watchers = [runner] if racing else []
        model.set_params(callbacks=[*self._template.callbacks, *watchers])
        try:
            model._fit(self._X, self._split.train, self._shared)
        except InputError as error:
            self._failures[size] = str(error)
            return
        candidate = _Candidate(size, runner, model)
        if not runner.halted:
            self._finish(candidate)
        candidate.facts = _facts(model)
        self._tried.append(candidate)

    def _continue(self, candidate: _Candidate) -> None:
        """Train a size that was paused to its end, unless it cannot win any more."""
        self._bar.begin(candidate.size, self._told())
        runner, model = candidate.runner, candidate.model
        assert model is not None
        runner.pauses, runner.halted = False, False
        if self._best is not None:
            runner.best = self._best.course
            runner.halted = beaten(candidate.course.last, runner.best, FIRST)
        if not runner.halted:
            model.resume(self._split.train)
        if runner.halted:
            candidate.status, candidate.model = "stopped", None
            self._bar.move(1.0)
        else:
            self._finish(candidate)
        candidate.facts = _facts(model)

    def _finish(self, candidate: _Candidate) -> None:
        """Judge a run at its end, and keep its model if it is the best."""
        assert candidate.model is not None
        candidate.course.end = self._judge(candidate.model)
        candidate.status = "done"
        self._bar.move(1.0)
        if self._best is None or candidate.value > self._best.value:
            if self._best is not None:
                self._best.model = None
            self._best = candidate
        else:
            candidate.model = None

    def _judge(self, model: MFA) -> Judgement:
        """Judge a model; criteria that are better when lower are negated."""
        rows = self._split.held_out
        if rows is None:
            return Judgement(-getattr(model, self._criterion)(self._split.train))
        scores, weights = np.asarray(model.score_samples(rows)), getattr(rows, "weights", None)
        if weights is not None:
            scores, weights = scores[weights > 0], weights[weights > 0]
        scores, n_far = tamed(scores.astype(np.float64))
        return Judgement(float(np.average(scores, weights=weights)), scores, weights, n_far)

    def _leader(self) -> _Candidate | None:
        """Return the best that is done or, before there is one, the best on its way."""
        return self._best or max(self._tried, key=lambda one: one.value, default=None)

    def _told(self) -> str:
        """Tell the best so far in a few words."""
        best = self._leader()
        if best is None:
            return ""
        return f"best {self._shown(best):.6g} with K={best.size[0]}, l={best.size[1]}"

    def _shown(self, tried: _Candidate) -> float:
        """Return the value of the criterion as users know it."""
        return tried.value if self._split.held_out is not None else -tried.value

    def selection(self, complete: bool) -> Selection:
        """Gather what was found."""
        best = self._leader()
        if best is None or best.model is None:
            size, reason = next(iter(self._failures.items()))
            raise InputError(f"no size could be trained; with {size[0]} components: {reason}")
        sizes = [self._trained(tried, best) for tried in self._tried]
        sizes += [Trained.failed(size, reason) for size, reason in self._failures.items()]
        sizes.sort(key=lambda one: (one.n_components, one.n_factors))
        return Selection(self._criterion, sizes, best.size, best.model, complete)

    def _trained(self, tried: _Candidate, best: _Candidate) -> Trained:
        end, top = tried.course.last, best.course.last
        error = None if end.scores is None else paired_error(end, top)
        difference = end.value - top.value
        return Trained(
            *tried.size,
            value=self._shown(tried),
            difference=difference,
            error=error,
            n_far=end.n_far,
            status=tried.status,
            **tried.facts,
        )


def _facts(model: MFA) -> dict[str, Any]:
    weights, effective = (np.asarray(a) for a in (model.weights_, model.effective_factors_))
    return {
        "log_likelihood": float(model.history_[-1]["log_likelihood"]),
        "n_parameters": model.n_parameters_,
        "components_in_use": components_in_use(weights),
        "effective_factors": float(weights @ effective),
        "seconds": round(model.seconds_, 3),
    }
