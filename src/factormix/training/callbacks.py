"""What can watch a training run: a progress bar, checkpoints on disk, an eye on held-out rows."""

from __future__ import annotations

import copy
import math
import os
import time
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from factormix.data.sources import Features, Rows, as_rows, checked_rows, in_order
from factormix.errors import InputError
from factormix.training.loop import Best, Record
from factormix.training.solvers.options import COUNT, NOT_NEGATIVE, POSITIVE, check_options

if TYPE_CHECKING:
    from factormix.estimators import MFA

__all__ = ["Checkpoint", "EarlyStopping", "Progress", "ProgressBar"]


@dataclass(frozen=True)
class Progress:
    """What a callback is given while training; returning True from the callback ends the
    training.
    """

    model: MFA
    record: Record
    """Where the run stands, as in ``history_``."""
    steps: int
    """Steps planned in all."""
    last: bool = False
    """Whether training ends here: done, stopped by a callback, or interrupted."""


class ProgressBar:
    """Show steps, log-likelihood and the number of components in use on standard error."""

    def __init__(self, done: int = 0) -> None:
        """Begin at ``done`` steps, so that a resumed run estimates its time by its own speed."""
        self._done = done
        self._bar: tqdm[None] | None = None

    def __call__(self, progress: Progress) -> None:
        """Move the bar to where the run stands."""
        if self._bar is None:
            self._bar = tqdm(
                total=progress.steps, initial=self._done, unit="step", dynamic_ncols=True
            )
        record = progress.record
        # While a mixture is pruned or grows, it has more or fewer than were asked for.
        there = record.get("components", progress.model.n_components)
        used = f"{record['components_in_use']:.0f}/{there:.0f}"
        self._bar.set_postfix(ll=f"{record['log_likelihood']:.5g}", used=used, refresh=False)
        self._bar.update(record["step"] - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Checkpoint:
    """Save the model so far every few seconds and when training ends, so that no run is lost.

    A run that was cut off goes on with ``factormix.load(path).resume(X)``.

    Parameters
    ----------
    path : path
        File that is replaced, atomically, each time.
    seconds : float
        Least time between two writes.
    """

    def __init__(self, path: str | os.PathLike[str], seconds: float = 60.0) -> None:
        self.path = Path(path)
        self.seconds = seconds
        self._saved = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """Save when it is time again."""
        if progress.last or time.monotonic() - self._saved >= self.seconds:
            progress.model.save(self.path)
            self._saved = time.monotonic()


@dataclass(eq=False)
class EarlyStopping:
    """End training when held-out rows gain nothing more, and keep the model that suited them best.

    The beginning of a run does not count, while components are still seeded, pruned or grown. A run
    that is interrupted, or ended by another callback, keeps its last model; ``resume`` goes on from
    it, and from what was found so far. ``history_`` has the scores under ``"held_out"``. Before a
    ``Checkpoint`` in the list of callbacks, it has the best model saved at the end.

    Parameters
    ----------
    held_out : array or rows (n, d)
        Rows that are not trained on.
    patience : int
        Looks without a gain after which training ends.
    tol : float
        Rise of the mean log-likelihood per feature that is a gain.
    epochs : float
        Passes between two looks, of which there is at most one for each record of ``history_``.

    Attributes
    ----------
    best_score_ : float
        Mean log-likelihood of the held-out rows under the best model, minus infinity before the
        first look.
    best_epoch_ : float
        When that was.
    """

    held_out: Any = field(repr=False)
    _: KW_ONLY
    patience: int = 3
    tol: float = 1e-5
    epochs: float = 1.0
    best_score_: float = field(default=-math.inf, init=False)
    best_epoch_: float = field(default=math.nan, init=False)
    _rows: Rows = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ranges = {COUNT: ["patience"], NOT_NEGATIVE: ["tol"], POSITIVE: ["epochs"]}
        check_options(self, ranges)
        try:
            self._rows = checked_rows(as_rows(self.held_out))
        except (InputError, TypeError) as error:
            raise type(error)(f"held_out cannot be used: {error}") from error

    def __call__(self, progress: Progress) -> bool:
        """Look at the held-out rows when it is time, and return whether training should end."""
        model, record = progress.model, progress.record
        run = model._run
        rows = self._fitting(model)
        # Only what goes into the history comes after the same step in every run.
        kept = bool(run.history) and run.history[-1] is record and "held_out" not in record
        looked = 0.0 if run.best is None else run.best.looked
        due = record["epoch"] >= looked + self.epochs - 1e-9 and run.plan.settled(run.state)
        if kept and (due or run.finished):
            self._look(model, rows, record)
        if run.best is None:
            self.best_score_, self.best_epoch_ = -math.inf, math.nan
            return False
        self.best_score_, self.best_epoch_ = run.best.score, run.best.epoch
        ended = run.best.waited >= self.patience
        if progress.last and (ended or run.finished):
            run.state, run.stopped, run.best = run.best.state, True, None
        return ended

    def _fitting(self, model: MFA) -> Rows:
        """Return the held-out rows with their columns as the model has them."""
        names = getattr(model, "feature_names_in_", None)
        trained = Features(
            model.n_features_in_, None if names is None else tuple(names), model.image_shape_
        )
        return in_order(self._rows, trained, type(model).__name__, "held_out")

    def _look(self, model: MFA, rows: Rows, record: Record) -> None:
        run, epoch = model._run, record["epoch"]
        score = record["held_out"] = model.score(rows)
        before = -math.inf if run.best is None else run.best.score
        gained = score > before + self.tol * model.n_features_in_
        waited = 0 if run.best is None or gained else run.best.waited + 1
        if run.best is None or score > before:
            run.best = Best(copy.deepcopy(run.state), score, epoch, epoch)
        run.best.looked, run.best.waited = epoch, waited
