"""The choice of a size: mixtures of several sizes on the same rows, and the best of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import clone

from factormix.core.usage import components_in_use
from factormix.data.sources import Rows, as_rows, checked_rows
from factormix.data.weights import relative_weights
from factormix.defaults import CRITERIA
from factormix.errors import InputError, TrainingWarning
from factormix.estimators.grids import Size, SizesBar, grid
from factormix.estimators.mfa import MFA
from factormix.estimators.options import check_options
from factormix.estimators.race import FIRST, Course, Judgement, Runner, beaten, paired_error, tamed
from factormix.estimators.selection import Selection, Trained
from factormix.estimators.sharing import Shared, draw_sample, with_every_column
from factormix.estimators.splits import Split, split_rows
from factormix.estimators.validation import Array, check_seed, weighed
from factormix.training.threads import team

__all__ = ["search_sizes", "select"]

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
    rows = checked_rows(weighed(rows, relative_weights))
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
        train = weighed(split.train, relative_weights)
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
