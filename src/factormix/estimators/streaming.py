"""Evaluate, then train: score every batch of a stream before it is learned."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.data.batches import Batch, Values, join_batches
from factormix.data.checks import ensure_finite_blocks
from factormix.data.features import describe_features, match_columns
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Source
from factormix.data.sources.convert import as_source, iterate_tables
from factormix.data.sources.shards import ShardedRows
from factormix.data.sources.streams import OnBad, Stream
from factormix.errors import InputError
from factormix.estimators.alerts import Alerts, check_rate
from factormix.estimators.fitting import SCALE_ROWS
from factormix.estimators.mfa import MFA
from factormix.estimators.validation import check_count, fitted_features
from factormix.training.callbacks import Progress
from factormix.training.loop import REPORT_SECONDS
from factormix.training.run import Following, record
from factormix.training.solvers import resolve

FIRST_ROWS = 100
"""An untrained model starts with at least this many rows."""


@dataclass(frozen=True, repr=False)
class Scored:
    """A batch of a stream, scored by the model before it learned the batch."""

    rows: Values
    """(B, d), as the source served them."""
    scores: NDArray[np.float64]
    """(B,), log-likelihoods; NaN before there is a model."""
    components: NDArray[np.int64]
    """(B,), the most probable component of each row; -1 before there is a model."""
    first: int
    """Number of the first of these rows in the stream, not counting skipped rows."""
    skipped: int
    """Number of rows skipped so far."""
    alerts: NDArray[np.bool_]
    """(B,), which rows are too unlikely; none without ``alert``."""

    def __repr__(self) -> str:
        """Return the place of the rows in the stream, and how many there are."""
        return f"Scored(n_rows={len(self.scores)}, first={self.first}, skipped={self.skipped})"


def stream(
    model: MFA,
    source: Any,
    *,
    batch_size: int | None = None,
    start: int = 0,
    on_bad: OnBad = "stop",
    alert: float | None = None,
    learn_alerts: bool = False,
    callback_seconds: float = REPORT_SECONDS,
) -> Iterator[Scored]:
    """Yield the scores of each batch of a source under the model so far, then learn the batch.

    A batch is learned when the next one is requested, so that a model saved in between has learned
    exactly the batches before. Ctrl-C waits for the end of a step.

    Parameters
    ----------
    model : MFA
        Trained or not. An untrained model starts with the first hundred rows or more, which have
        no scores.
    source : array, iterable of tables or any other source for ``partial_fit``
        It may never end.
    batch_size : int or None
        Number of rows that are scored and learned at once. None takes the batch size of the model.
    start : int
        Number of rows at the beginning of the source to leave out, not counting skipped rows:
        ``model.position_`` continues an interrupted run.
    on_bad : {"stop", "skip"}
        How to treat rows with infinite values, tables of another width, damaged files and iterators
        that raise: stop with an error that names their place, or skip and count them.
    alert : float or None
        Mark rows in ``alerts`` that score as low as this share of ordinary rows, and do not learn
        them. If the scores of the other rows fall as well, none are learned until they
        recover, unless the solver forgets: see ``factormix.estimators.alerts``. None learns all.
    learn_alerts : bool
        Learn all rows, even with ``alert``.
    callback_seconds : float
        Seconds between two calls of the model's callbacks, which are also called at the end.

    Examples
    --------
    >>> import numpy as np
    >>> from factormix import MFA, stream
    >>> rows = np.random.default_rng(0).normal(size=(1000, 3))
    >>> model = MFA(2, 1, random_state=0)
    >>> sum(len(part.scores) for part in stream(model, rows, batch_size=100))
    1000
    >>> model.n_steps_
    10
    """
    if not isinstance(model, MFA):
        raise InputError(f"stream trains an MFA, not a {type(model).__name__}: give it one.")
    check_count(start, "start", 0)
    if alert is not None:
        check_rate(alert, "alert")
    fitted = hasattr(model, "_run")
    if batch_size is not None:
        size = check_count(batch_size, "batch_size", 1)
    elif fitted:
        size = model.batch_size_
    else:
        size = int(model.batch_size or resolve(model.solver).default_batch_size(None))
    served, skipping = _open_source(model, source, size, on_bad)
    if fitted:
        follow_stream(model)
        if alert is not None and model.planned_epochs_ is not None:
            model.alert_threshold(alert)
    reports = _Reports(model, callback_seconds)
    judge = _Judge(model, alert, learn_alerts)
    return _score_then_learn(model, served, skipping, size, start, reports, judge)


def follow_stream(model: MFA, forgetting: float | None = None) -> None:
    """Let units and bounds of a trained model follow a stream, and the model forget old rows."""
    model._check_can_learn()
    run = model._run
    if forgetting is not None:
        solver: Any = run.plan.solver
        if not hasattr(solver, "forgetting"):
            raise InputError(f"the solver {solver.name!r} does not forget: leave forgetting out.")
        run.plan = dataclasses.replace(solver, forgetting=forgetting).plan(run.problem)
    if run.following is None:
        none = torch.empty(0, run.problem.n_features, dtype=torch.float64)
        scaling, bound = model.scaling, model.max_precision
        look = run.samples + SCALE_ROWS
        run.following = Following(none, none.new_empty(0), scaling, bound, look)


def _open_source(model: MFA, X: Any, size: int, on_bad: OnBad) -> tuple[Source, list[Any]]:
    """Return a source with the columns of the model, which skips bad rows if asked to.

    Also return the parts of the source that count ``skipped`` rows.
    """
    if not isinstance(X, (torch.Tensor, Source)):
        tables = X if hasattr(X, "__next__") else iterate_tables(X)
        if tables is None and on_bad == "skip":
            tables = iter([X])
        if tables is not None:
            X = Stream(tables, on_bad)
    source = as_source(X)
    if hasattr(model, "_run"):
        source = match_columns(source, fitted_features(model), type(model).__name__)
    if isinstance(source, Stream):
        return source, [source]
    if on_bad == "stop":
        return source, []
    parts = [source := source.skip_damaged()] if isinstance(source, ShardedRows) else []
    stream = Stream(source.blocks(size), on_bad)
    stream.feature_names = describe_features(source).names
    return stream, [stream, *parts]


def _score_then_learn(
    model: MFA,
    source: Source,
    skipping: list[Any],
    size: int,
    start: int,
    reports: _Reports,
    judge: _Judge,
) -> Iterator[Scored]:
    position, waiting = 0, list[Batch]()
    try:
        for batch in ensure_finite_blocks(source, size):
            first, position = position, position + len(batch)
            if position <= start:
                continue
            batch = batch.take(slice(max(0, start - first), None))
            skipped = sum(part.skipped for part in skipping)
            scored = judge.score(batch, max(first, start), skipped)
            yield scored
            waiting.append(judge.choose_rows(batch, scored))
            if not hasattr(model, "_run") and sum(map(len, waiting)) < FIRST_ROWS:
                continue
            _learn_batches(model, waiting, source, position)
            waiting = []
            if reports.call_when_due():
                return
        if waiting:
            _learn_batches(model, waiting, source, position)
    finally:
        reports.call_at_end()


def _learn_batches(model: MFA, batches: list[Batch], source: Source, position: int) -> None:
    """Learn batches of a stream, up to the row ``position``."""
    batch = join_batches(batches)
    if len(batch):
        rows = ArrayRows(batch.rows, feature_names=describe_features(source).names)
        weights = None if batch.weights is None else np.asarray(batch.weights)
        model.partial_fit(rows.mark_finite(), sample_weight=weights)
    model._run.position = position


class _Judge:
    """Score the batches of a stream, and choose the rows to learn."""

    def __init__(self, model: MFA, alert: float | None, learn_alerts: bool) -> None:
        self._model, self._rate, self._learn_alerts = model, alert, learn_alerts
        self._alerts: Alerts | None = None

    def score(self, batch: Batch, first: int, skipped: int) -> Scored:
        """Score a batch by the model so far."""
        marks = np.zeros(len(batch), dtype=bool)
        if not hasattr(self._model, "_run"):
            scores, components = np.full(len(batch), np.nan), np.full(len(batch), -1)
            return Scored(batch.rows, scores, components, first, skipped, marks)
        rows = ArrayRows(batch.rows).mark_finite()
        scores, components = map(np.asarray, self._model.score_and_predict(rows))
        if self._rate is not None:
            if self._alerts is None:
                self._alerts = Alerts(self._model._run, self._rate, learn_alerts=self._learn_alerts)
            marks = self._alerts.mark(batch.rows, scores, components)
        return Scored(batch.rows, scores.astype(float), components, first, skipped, marks)

    def choose_rows(self, batch: Batch, scored: Scored) -> Batch:
        """Return the rows of a scored batch that the model should learn."""
        if self._alerts is None:
            return batch
        if not self._alerts.settle():
            return batch.take(slice(0))
        return batch if self._learn_alerts else batch.take(np.flatnonzero(~scored.alerts))


class _Reports:
    """Call the callbacks of a model every few seconds, and at the end."""

    def __init__(self, model: MFA, seconds: float) -> None:
        self._model, self._seconds, self._last = model, seconds, time.monotonic()
        self._first_step = model._run.steps if hasattr(model, "_run") else 0

    def call_when_due(self) -> bool:
        """Call the callbacks if it is time, and return whether one of them ends the stream."""
        if not self._model.callbacks or time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return self._call(last=False)

    def call_at_end(self) -> None:
        """Call the callbacks for the last time, if any step was taken."""
        if hasattr(self._model, "_run") and self._model._run.steps > self._first_step:
            self._call(last=True)

    def _call(self, *, last: bool) -> bool:
        model, run = self._model, self._model._run
        entry = record(run, keep=False) if run.recent_steps or not run.history else run.history[-1]
        progress = Progress(model, entry, run, fitted_features(model), last, self._first_step)
        return True in [callback(progress) for callback in model.callbacks]
