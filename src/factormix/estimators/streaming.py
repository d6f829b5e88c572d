"""Evaluate, then train: a stream of which every batch is scored before it is learned."""

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
from factormix.data.sources.convert import as_source
from factormix.data.sources.loaders import iterate_tables
from factormix.data.sources.shards import ShardedRows
from factormix.data.sources.streams import OnBad, Stream
from factormix.errors import InputError
from factormix.estimators.fitting import SCALE_ROWS
from factormix.estimators.mfa import MFA
from factormix.estimators.validation import check_count, trained_features
from factormix.training.callbacks import Progress
from factormix.training.loop import TICK_SECONDS
from factormix.training.run import Following, record
from factormix.training.solvers import resolve

__all__ = ["Scored", "follow_stream", "stream"]

FIRST_ROWS = 100
"""Rows from which a model that is not trained yet begins, at least."""


@dataclass(frozen=True)
class Scored:
    """A batch of a stream with the scores of the model that had not learned it yet."""

    rows: Values
    """(B, d), as the source served them."""
    scores: NDArray[np.float64]
    """(B,), log-likelihoods; NaN before there is a model."""
    components: NDArray[np.int64]
    """(B,), the most probable component of each row; -1 before there is a model."""
    first: int
    """Number of the first of these rows in the stream, not counting any that were skipped."""
    skipped: int
    """Rows that were skipped so far."""


def stream(
    model: MFA,
    source: Any,
    *,
    batch_size: int | None = None,
    start: int = 0,
    on_bad: OnBad = "stop",
) -> Iterator[Scored]:
    """Yield for each batch of a source the scores of the model so far, and then learn the batch.

    The batch is learned when the next one is asked for, so that a model saved in between has
    learned just what came before. Ctrl-C waits for the end of a step. The model's callbacks are
    called about twice a second and at the end, as in ``fit``.

    Parameters
    ----------
    model : MFA
        Trained or not. One that is not begins with the first hundred rows or more, which have no
        scores.
    source : array, iterable of tables or whatever ``partial_fit`` learns from
        It may never end.
    batch_size : int or None
        Rows that are scored and learned at once. None: as many as the model takes for a step.
    start : int
        Rows of the source that are left out, not counting any that are skipped: with
        ``model.position_`` a run that was cut off goes on where it stood.
    on_bad : {"stop", "skip"}
        What to do about rows with infinite values, tables of another width, files that cannot be
        read on and iterators that raise: stop with their place, or skip and count them.

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
    fitted = hasattr(model, "_run")
    size = _size(model, batch_size)
    served = _served(model, source, size, on_bad, fitted)
    if fitted:
        follow_stream(model)
    return _evaluated(model, served, size, start)


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


class _Skips:
    """Count what the parts of a source have skipped."""

    def __init__(self, source: Source, *parts: Any) -> None:
        self.source, self._parts = source, parts

    @property
    def count(self) -> int:
        return sum(part.skipped for part in self._parts)


def _size(model: MFA, batch_size: int | None) -> int:
    if batch_size is not None:
        return check_count(batch_size, "batch_size", 1)
    if hasattr(model, "_run"):
        return model._run.batch_size
    return int(model.batch_size or resolve(model.solver).default_batch_size(None))


def _served(model: MFA, X: Any, size: int, on_bad: OnBad, fitted: bool) -> _Skips:
    """Make a source whose columns fit the model, and which skips what is bad if it is asked to."""
    if not isinstance(X, (torch.Tensor, Source)):
        tables = X if hasattr(X, "__next__") else iterate_tables(X)
        if tables is None and on_bad == "skip":
            tables = iter([X])
        if tables is not None:
            X = Stream(tables, on_bad)
    source = as_source(X)
    if fitted:
        source = match_columns(source, trained_features(model), type(model).__name__)
    if isinstance(source, Stream):
        return _Skips(source, source)
    if on_bad == "stop":
        return _Skips(source)
    parts = [source := source.skip_damaged()] if isinstance(source, ShardedRows) else []
    stream = Stream(source.blocks(size), on_bad)
    stream.feature_names = describe_features(source).names
    return _Skips(stream, stream, *parts)


def _evaluated(model: MFA, served: _Skips, size: int, start: int) -> Iterator[Scored]:
    watching = _Watching(model)
    position, held = 0, list[Batch]()
    try:
        for batch in ensure_finite_blocks(served.source, size):
            first, position = position, position + len(batch)
            if position <= start:
                continue
            batch = batch.take(slice(max(0, start - first), None))
            yield _scored(model, batch, max(first, start), served.count)
            held.append(batch)
            if not hasattr(model, "_run") and sum(map(len, held)) < FIRST_ROWS:
                continue
            _learn(model, held, served.source)
            model._run.position = position
            if watching.stop():
                return
        if held:
            _learn(model, held, served.source)
            model._run.position = position
    finally:
        watching.end()


def _learn(model: MFA, held: list[Batch], source: Source) -> None:
    """Take the steps of the batches that are held, and let go of them."""
    batch = join_batches(held)
    held.clear()
    rows = ArrayRows(batch.rows, feature_names=describe_features(source).names)
    weights = None if batch.weights is None else np.asarray(batch.weights)
    model.partial_fit(rows.mark_finite(), sample_weight=weights)


def _scored(model: MFA, batch: Batch, first: int, skipped: int) -> Scored:
    if hasattr(model, "_run"):
        rows = ArrayRows(batch.rows).mark_finite()
        scores, components = model.score_and_predict(rows)
        scores, components = np.asarray(scores, float), np.asarray(components)
    else:
        scores, components = np.full(len(batch), np.nan), np.full(len(batch), -1)
    return Scored(batch.rows, scores, components, first, skipped)


class _Watching:
    """Call the callbacks of a model about twice a second, and at the end."""

    def __init__(self, model: MFA) -> None:
        self._model, self._told = model, time.monotonic()
        self._begun_at = model._run.steps if hasattr(model, "_run") else 0

    def stop(self) -> bool:
        """Tell the callbacks when it is time, and whether one of them ends the stream."""
        if not self._model.callbacks or time.monotonic() - self._told < TICK_SECONDS:
            return False
        self._told = time.monotonic()
        return self._tell(last=False)

    def end(self) -> None:
        """Tell the callbacks that the stream has ended."""
        if hasattr(self._model, "_run") and self._model._run.steps > self._begun_at:
            self._tell(last=True)

    def _tell(self, *, last: bool) -> bool:
        model, run = self._model, self._model._run
        entry = record(run, keep=False) if run.recent_steps or not run.history else run.history[-1]
        progress = Progress(model, entry, run, trained_features(model), last, self._begun_at)
        return True in [watcher(progress) for watcher in model.callbacks]
