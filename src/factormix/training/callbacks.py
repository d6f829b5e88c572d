"""Callbacks of a training run.

They show progress, save checkpoints, stop early by held-out rows, and write records to a file of
JSON lines or to TensorBoard.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
import time
import warnings
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from factormix.data.checks import ensure_finite_rows
from factormix.data.features import Features, match_columns
from factormix.data.sources.base import Rows
from factormix.data.sources.convert import as_rows
from factormix.defaults import PATIENCE
from factormix.errors import InputError, TrainingWarning
from factormix.files import write_whole
from factormix.training.distributed.communicator import RankLost
from factormix.training.evaluation import mean_log_likelihood
from factormix.training.run import Best, Record, Run
from factormix.training.solvers.base import check_ranges

if TYPE_CHECKING:
    from tqdm.auto import tqdm


@dataclass(frozen=True)
class Progress:
    """The argument of a callback. A callback that returns True ends the training."""

    model: Any
    """The estimator with the model so far: it scores, samples and saves."""
    record: Record
    """The newest figures of the run, as in ``history_``."""
    run: Run = field(repr=False)
    """The run itself, in working units. A callback that changes it changes the training."""
    features: Features = field(repr=False)
    """The columns of the training rows."""
    last: bool = False
    """Whether training ends here: done, stopped by a callback, or interrupted."""
    steps_before: int = 0
    """Steps done before this call of ``fit`` or ``resume``: 0 for a new run."""

    @property
    def steps(self) -> int:
        """Total number of planned steps."""
        return self.run.planned_steps

    @property
    def recorded(self) -> bool:
        """Whether the record is in ``history_``, which has the same steps in every run."""
        return any(record is self.record for record in reversed(self.run.history))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the model; several ranks that hold parts of it write together."""
        if self.run.problem.communicator.saves:
            self.model.save(path)


def draw_bar(*, shown: bool = True, **options: Any) -> tqdm[None]:
    """Return a bar on a terminal or in a notebook; nothing is drawn into a file or a log."""
    # Slow to import, because notebooks get a bar of their own.
    from tqdm.auto import tqdm

    # In a notebook the bar is a widget, and standard error is no terminal.
    usual = False if "ipykernel" in sys.modules else None
    return tqdm(dynamic_ncols=True, disable=usual if shown else True, **options)


class ProgressBar:
    """Show steps, log-likelihood and the number of components in use on standard error."""

    def __init__(self, done: int = 0) -> None:
        """Start at ``done`` steps, so that a resumed run estimates its time by its own speed."""
        self._done = done
        self._bar: tqdm[None] | None = None

    def __call__(self, progress: Progress) -> None:
        """Move the bar to the current step."""
        if self._bar is None:
            self._bar = draw_bar(total=progress.steps, initial=self._done, unit="step")
        record = progress.record
        if "bits_per_dim" in record:
            shown = {"bits": f"{record['bits_per_dim']:.4f}"}
        else:
            # A mixture that grows or is pruned has fewer or more components than requested.
            n_components = record.get("components", len(progress.run.state.logits))
            used = f"{record['components_in_use']:.0f}/{n_components:.0f}"
            shown = {"ll": f"{record['log_likelihood']:.5g}", "used": used}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(record["step"] - self._bar.n)

    def close(self) -> None:
        """End the bar and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class SavingCallback:
    """Save the model every few seconds and when training ends; a subclass says where."""

    every_process: ClassVar[bool] = True
    """Processes that hold some of the components each save the model together."""
    seconds: float
    failed_: bool = False
    _opened: bool = False
    _tried: float
    _place: str = ""
    """The place of the checkpoint in a warning."""
    _end_may_fail: ClassVar[bool] = True
    """Whether training ends with a warning if the end could not be saved, else with an error."""

    def open(self, *, new_run: bool) -> None:
        """Refuse a wrong place before it costs a whole run."""
        raise NotImplementedError

    def _save(self, progress: Progress) -> None:
        raise NotImplementedError

    def __call__(self, progress: Progress) -> None:
        """Save if enough time has passed, and when training ends."""
        communicator, new_run = progress.run.problem.communicator, progress.steps_before == 0
        if not self._opened:
            communicator.run_together(
                lambda: self.open(new_run=new_run) if communicator.is_first else None
            )
            self._opened = True
        due = progress.last or time.monotonic() - self._tried >= self.seconds
        if not communicator.broadcast(due):
            return
        try:
            self._save(progress)
            self.failed_ = False
        except RankLost:
            raise
        except (InputError, OSError) as error:
            if progress.last and not self._end_may_fail:
                raise
            # Warn once when saving starts to fail, and again at the end.
            if (not self.failed_ or progress.last) and communicator.is_first:
                goes_on = "and the run ends" if progress.last else "and training goes on"
                warnings.warn(
                    f"no checkpoint could be saved{self._place}, {goes_on} without it: {error}",
                    TrainingWarning,
                    stacklevel=2,
                )
            self.failed_ = True
        self._tried = time.monotonic()


class Checkpoint(SavingCallback):
    """Save the model every few seconds and when training ends, so that no run is lost.

    ``factormix.load(path).resume(X)`` continues an interrupted run. If the file cannot be written,
    for example because the disk is full, training goes on with a ``TrainingWarning`` and tries
    again later. At the end of training it is an error.

    Parameters
    ----------
    path : path
        File that each write replaces atomically.
    seconds : float
        Minimum time between two writes.
    """

    _end_may_fail = False

    def __init__(self, path: str | os.PathLike[str], seconds: float = 60.0) -> None:
        self.path, self.seconds, self._tried = Path(path), seconds, time.monotonic()

    def open(self, *, new_run: bool) -> None:
        """Refuse a path in a folder that does not exist."""
        _check_parent(self.path)

    def _save(self, progress: Progress) -> None:
        progress.save(self.path)


@dataclass(eq=False)
class EarlyStopping:
    """End training when the score of held-out rows stops rising, and keep the best model.

    The first phases of a run do not count, while components are seeded, pruned or grown. A run that
    is interrupted, or ended by another callback, keeps its last model, and ``resume`` goes on from
    there with the best score so far. ``history_`` has the scores under ``"held_out"``. If it comes
    before a ``Checkpoint`` in the list of callbacks, the best model is saved at the end.

    Parameters
    ----------
    held_out : array or rows (n, d)
        Rows that are not trained on.
    patience : int
        Evaluations without a gain after which training ends.
    tol : float
        Rise of the mean log-likelihood per feature that counts as a gain.
    epochs : float
        Passes between two evaluations. There is at most one for each record of ``history_``.

    Attributes
    ----------
    best_score_ : float
        Mean log-likelihood of the held-out rows under the best model, minus infinity before the
        first evaluation.
    best_epoch_ : float
        Epoch of the best model.
    """

    held_out: Any = field(repr=False)
    _: KW_ONLY
    patience: int = PATIENCE
    # Half of the least gain of a pass in ``Schedule.tol``: chosen, not measured, as is ``epochs``.
    tol: float = 1e-5
    epochs: float = 1.0
    every_process: ClassVar[bool] = True
    """Each process keeps the best model so far, or its components of it."""
    best_score_: float = field(default=-math.inf, init=False)
    best_epoch_: float = field(default=math.nan, init=False)
    _rows: Rows = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, count=["patience"], not_negative=["tol"], positive=["epochs"])
        try:
            self._rows = ensure_finite_rows(as_rows(self.held_out))
        except (InputError, TypeError) as error:
            raise type(error)(f"held_out cannot be used: {error}") from error

    def __call__(self, progress: Progress) -> bool:
        """Score the held-out rows when due, and return whether training should end."""
        record, run = progress.record, progress.run
        whose = type(progress.model).__name__
        rows = match_columns(self._rows, progress.features, whose, "held_out")
        last_look = 0.0 if run.best is None else run.best.last_look
        due = record["epoch"] >= last_look + self.epochs - 1e-9 and run.plan.settled(run.state)
        if progress.recorded and "held_out" not in record and (due or run.finished):
            self._score(run, record, rows)
        if run.best is None:
            self.best_score_, self.best_epoch_ = -math.inf, math.nan
            return False
        self.best_score_, self.best_epoch_ = run.best.score, run.best.epoch
        ended = run.best.waited >= self.patience
        if progress.last and (ended or run.finished):
            run.state, run.stopped, run.best = run.best.state, True, None
        return ended

    def _score(self, run: Run, record: Record, rows: Rows) -> None:
        epoch = record["epoch"]
        communicator = run.problem.communicator
        score = mean_log_likelihood(run.parameters, run.units, rows, communicator=communicator)
        score = record["held_out"] = communicator.broadcast(score)
        before = -math.inf if run.best is None else run.best.score
        gained = score > before + self.tol * run.problem.n_features
        waited = 0 if run.best is None or gained else run.best.waited + 1
        if run.best is None or score > before:
            run.best = Best(copy.deepcopy(run.state), score, epoch, epoch)
        run.best.last_look, run.best.waited = epoch, waited


@dataclass(eq=False)
class JSONLines:
    """Append every record of ``history_`` to a file, as one line of JSON.

    A resumed run continues its file, after the lines of steps that it repeats are removed. A new
    run refuses a file that exists. A full disk is a ``TrainingWarning``, and the lines that could
    not be written are tried again.

    Parameters
    ----------
    path : path
        If the callback comes after ``EarlyStopping`` in the list, the file has the held-out scores
        too.
    """

    path: str | os.PathLike[str]
    _started: bool = field(default=False, init=False, repr=False)
    _step: float = field(default=0, init=False, repr=False)
    _failed: bool = field(default=False, init=False, repr=False)

    def __call__(self, progress: Progress) -> None:
        """Write the new records."""
        if not self._started:
            self._start(progress.steps_before)
        new = _new_records(progress, self._step)
        if not new:
            return
        try:
            self._append("".join(json.dumps(record) + "\n" for record in new).encode())
            self._step, self._failed = new[-1]["step"], False
        except OSError as error:
            if not self._failed:
                warnings.warn(
                    f"{self.path} cannot be written ({error.strerror}), and training goes on: make"
                    " room, and the missing lines follow.",
                    TrainingWarning,
                    stacklevel=2,
                )
            self._failed = True

    def _start(self, steps_before: int) -> None:
        path = Path(self.path)
        if path.is_dir():
            raise InputError(f"{path} is a folder: give the path of a file.")
        _check_parent(path)
        if path.exists():
            if steps_before == 0:
                raise InputError(
                    f"{path} exists already, from another run: remove it or choose another path."
                )
            self._remove_later_lines(path, steps_before)
        self._started = True

    def _remove_later_lines(self, path: Path, step: int) -> None:
        """Remove the lines of later steps, and a line that is cut off."""
        lines = list[str]()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                if float(record["step"]) > step:
                    break
                self._step = record["step"]
            except (ValueError, KeyError, TypeError):
                break
            lines.append(line + "\n")
        write_whole(path, "".join(lines).encode())

    def _append(self, data: bytes) -> None:
        """Write all of the data or nothing."""
        with open(self.path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(data) != len(data):
                    raise OSError(28, "No space left on device")
            except OSError:
                os.truncate(file.fileno(), size)
                raise


class TensorBoard:
    """Write every number of ``history_`` to a folder that TensorBoard shows.

    ``tensorboard --logdir FOLDER`` shows it. A resumed run continues its curves. Needs the extra
    ``tensorboard``.

    Parameters
    ----------
    folder : path
        One folder for each run. TensorBoard compares the folders inside a folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                'TensorBoard needs tensorboard: pip install "factormix[tensorboard]"'
            ) from error
        self.folder = Path(folder)
        # Its signature has no types.
        self._make_writer: Any = SummaryWriter
        self._writer: Any = None
        self._step: float = 0

    def __call__(self, progress: Progress) -> None:
        """Write the new records."""
        if self._writer is None:
            self._step = progress.steps_before
            purge_step = progress.steps_before + 1 if progress.steps_before else None
            self._writer = self._make_writer(os.fspath(self.folder), purge_step=purge_step)
        for record in _new_records(progress, self._step):
            for name, value in record.items():
                if name != "step":
                    self._writer.add_scalar(name, value, int(record["step"]))
            self._step = record["step"]
        if progress.last:
            self._writer.close()
            self._writer = None


def _check_parent(path: Path) -> None:
    """Refuse a path in a folder that does not exist before it costs a whole run."""
    if not path.parent.is_dir():
        raise InputError(
            f"the folder {path.parent} does not exist: create it or choose another path."
        )


def _new_records(progress: Progress, step: float) -> list[Record]:
    """Return the records of ``history_`` after a step.

    The newest record waits for the next one or for the end: other callbacks may still add to it.
    """
    history = progress.run.history if progress.last else progress.run.history[:-1]
    return [record for record in history if record["step"] > step]
