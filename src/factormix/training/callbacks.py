"""What can watch a training run: a progress bar, checkpoints on disk, an eye on held-out rows.

What writes a run down while it lasts: a file of JSON lines, or TensorBoard.
"""

from __future__ import annotations

import copy
import json
import math
import os
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
from factormix.training.distributed.processes import ProcessLost
from factormix.training.evaluation import divided_mean, mean_log_likelihood
from factormix.training.run import Best, Record, Run
from factormix.training.solvers.base import COUNT, NOT_NEGATIVE, POSITIVE, check_options

if TYPE_CHECKING:
    from tqdm.auto import tqdm

__all__ = ["Checkpoint", "EarlyStopping", "JSONLines", "Progress", "ProgressBar", "TensorBoard"]


@dataclass(frozen=True)
class Progress:
    """Hold what a callback is given; a callback that returns True ends the training."""

    model: Any
    """The estimator, which holds the model so far: it scores, samples and saves."""
    record: Record
    """Where the run stands, as in ``history_``."""
    run: Run
    """The run itself, in working units. A callback that changes it changes the training."""
    features: Features
    """The columns of the rows that are learned from."""
    last: bool = False
    """Whether training ends here: done, stopped by a callback, or interrupted."""
    begun_at: int = 0
    """Steps that were done when this call of ``fit`` or ``resume`` began: 0 for a new run."""

    @property
    def steps(self) -> int:
        """Steps planned in all."""
        return self.run.planned_steps

    @property
    def kept(self) -> bool:
        """Whether the record has gone into ``history_``, after the same steps in every run."""
        return any(one is self.record for one in reversed(self.run.history))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the model: the first process does, or all that have some of the components."""
        processes = self.run.problem.processes
        if processes.first or processes.divided:
            self.model.save(path)


class ProgressBar:
    """Show steps, log-likelihood and the number of components in use on standard error."""

    def __init__(self, done: int = 0) -> None:
        """Begin at ``done`` steps, so that a resumed run estimates its time by its own speed."""
        self._done = done
        self._bar: tqdm[None] | None = None

    def __call__(self, progress: Progress) -> None:
        """Move the bar to where the run stands."""
        if self._bar is None:
            # Notebooks get a bar of their own kind, which takes long to import.
            from tqdm.auto import tqdm

            self._bar = tqdm(
                total=progress.steps, initial=self._done, unit="step", dynamic_ncols=True
            )
        record = progress.record
        # While a mixture is pruned or grows, it has more or fewer than were asked for.
        there = record.get("components", len(progress.run.state.logits))
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

    A run that was cut off goes on with ``factormix.load(path).resume(X)``. A file that cannot be
    written on the way, for lack of space say, is a ``TrainingWarning``: training goes on, and the
    next time is another try. At the end it is an error.

    Parameters
    ----------
    path : path
        File that is replaced, atomically, each time.
    seconds : float
        Least time between two writes.
    """

    every_process = True
    """Where processes have some of the components each, they save the model together."""

    def __init__(self, path: str | os.PathLike[str], seconds: float = 60.0) -> None:
        self.path = Path(path)
        self.seconds = seconds
        self._tried = time.monotonic()
        self._failed = False
        self._begun = False

    def __call__(self, progress: Progress) -> None:
        """Save when it is time again."""
        processes = progress.run.problem.processes
        if not self._begun:
            processes.together(lambda: self._begin() if processes.first else None)
            self._begun = True
        if progress.last:
            progress.save(self.path)
        elif processes.same(time.monotonic() - self._tried >= self.seconds):
            self._try(progress)

    def _begin(self) -> None:
        if not self.path.parent.is_dir():
            # A folder that never was is a slip of the pen: it should not cost a whole run.
            raise InputError(
                f"the folder {self.path.parent} does not exist: create it or choose another path."
            )

    def _try(self, progress: Progress) -> None:
        try:
            progress.save(self.path)
            self._failed = False
        except ProcessLost:
            raise
        except (InputError, OSError) as error:
            if not self._failed and progress.run.problem.processes.first:
                warnings.warn(
                    f"no checkpoint could be saved, and training goes on without one: {error}",
                    TrainingWarning,
                    stacklevel=2,
                )
            self._failed = True
        self._tried = time.monotonic()


@dataclass(eq=False)
class EarlyStopping:
    """End training when held-out rows gain nothing more, and keep the model that suited them best.

    The beginning of a run does not count, while components are still seeded, pruned or grown. A run
    that is interrupted, or ended by another callback, keeps its last model; ``resume`` goes on from
    it, and from what was found so far. ``history_`` has the scores under ``"held_out"``. Placed
    before a ``Checkpoint`` in the list of callbacks, it has the best model saved at the end.

    Parameters
    ----------
    held_out : array or rows (n, d)
        Rows that are not trained on.
    patience : int
        Looks without a gain after which training ends.
    tol : float
        Rise of the mean log-likelihood per feature that counts as a gain.
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
    patience: int = PATIENCE
    tol: float = 1e-5
    epochs: float = 1.0
    every_process: ClassVar[bool] = True
    """Each process keeps the best model so far, or its part of it."""
    best_score_: float = field(default=-math.inf, init=False)
    best_epoch_: float = field(default=math.nan, init=False)
    _rows: Rows = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ranges = {COUNT: ["patience"], NOT_NEGATIVE: ["tol"], POSITIVE: ["epochs"]}
        check_options(self, ranges)
        try:
            self._rows = ensure_finite_rows(as_rows(self.held_out))
        except (InputError, TypeError) as error:
            raise type(error)(f"held_out cannot be used: {error}") from error

    def __call__(self, progress: Progress) -> bool:
        """Look at the held-out rows when it is time, and return whether training should end."""
        record, run = progress.record, progress.run
        whose = type(progress.model).__name__
        rows = match_columns(self._rows, progress.features, whose, "held_out")
        last_look = 0.0 if run.best is None else run.best.last_look
        due = record["epoch"] >= last_look + self.epochs - 1e-9 and run.plan.settled(run.state)
        if progress.kept and "held_out" not in record and (due or run.finished):
            self._look(run, record, rows)
        if run.best is None:
            self.best_score_, self.best_epoch_ = -math.inf, math.nan
            return False
        self.best_score_, self.best_epoch_ = run.best.score, run.best.epoch
        ended = run.best.waited >= self.patience
        if progress.last and (ended or run.finished):
            run.state, run.stopped, run.best = run.best.state, True, None
        return ended

    def _look(self, run: Run, record: Record, rows: Rows) -> None:
        epoch = record["epoch"]
        processes = run.problem.processes
        if processes.divided:
            score = divided_mean(processes, run.parameters, run.units, rows)
        else:
            score = mean_log_likelihood(run.parameters, run.units, rows)
        score = record["held_out"] = processes.same(score)
        before = -math.inf if run.best is None else run.best.score
        gained = score > before + self.tol * run.problem.n_features
        waited = 0 if run.best is None or gained else run.best.waited + 1
        if run.best is None or score > before:
            run.best = Best(copy.deepcopy(run.state), score, epoch, epoch)
        run.best.last_look, run.best.waited = epoch, waited


@dataclass(eq=False)
class JSONLines:
    """Write every record of ``history_`` to a file, a line of JSON for each, as it comes.

    A run that is resumed goes on with the file: lines of steps that are taken again are removed
    first. A new run does not go into a file that is there. A disk that is full is a
    ``TrainingWarning``, and what could not be written is tried again.

    Parameters
    ----------
    path : path
        Placed after ``EarlyStopping`` in the list of callbacks, it has the held-out scores too.
    """

    path: str | os.PathLike[str]
    _begun: bool = field(default=False, init=False, repr=False)
    _step: float = field(default=0, init=False, repr=False)
    _failed: bool = field(default=False, init=False, repr=False)

    def __call__(self, progress: Progress) -> None:
        """Write the records that are new."""
        if not self._begun:
            self._begin(progress.begun_at)
        new = new_records(progress, self._step)
        if not new:
            return
        try:
            self._append("".join(json.dumps(record) + "\n" for record in new).encode())
            self._step, self._failed = new[-1]["step"], False
        except OSError as error:
            if not self._failed:
                warnings.warn(
                    f"{self.path} cannot be written ({error.strerror}), and training goes on: make"
                    " room, and what is missing follows.",
                    TrainingWarning,
                    stacklevel=2,
                )
            self._failed = True

    def _begin(self, begun_at: int) -> None:
        path = Path(self.path)
        if path.is_dir():
            raise InputError(f"{path} is a folder: give the path of a file.")
        if not path.parent.is_dir():
            raise InputError(
                f"the folder {path.parent} does not exist: create it or choose another path."
            )
        if path.exists():
            if begun_at == 0:
                raise InputError(
                    f"{path} is there already, from another run: remove it or choose another path."
                )
            self._keep_until(path, begun_at)
        self._begun = True

    def _keep_until(self, path: Path, step: int) -> None:
        """Leave out lines of later steps, and one that was cut off."""
        kept = list[str]()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                if float(record["step"]) > step:
                    break
                self._step = record["step"]
            except (ValueError, KeyError, TypeError):
                break
            kept.append(line + "\n")
        write_whole(path, "".join(kept).encode())

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

    ``tensorboard --logdir FOLDER`` shows it. A run that is resumed goes on with its curves. Needs
    the extra ``tensorboard``.

    Parameters
    ----------
    folder : path
        One for each run; TensorBoard compares the folders of a folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                'TensorBoard needs tensorboard: pip install "factormix[tensorboard]"'
            ) from error
        self.folder = Path(folder)
        self._make: Any = SummaryWriter
        self._writer: Any = None
        self._step: float = 0

    def __call__(self, progress: Progress) -> None:
        """Write the records that are new."""
        if self._writer is None:
            self._step = progress.begun_at
            again = progress.begun_at + 1 if progress.begun_at else None
            # Its own signature carries no types.
            self._writer = self._make(os.fspath(self.folder), purge_step=again)
        for record in new_records(progress, self._step):
            for name, value in record.items():
                if name != "step":
                    self._writer.add_scalar(name, value, int(record["step"]))
            self._step = record["step"]
        if progress.last:
            self._writer.close()
            self._writer = None


def new_records(progress: Progress, step: float) -> list[Record]:
    """Return the records of the history after a step, in their order.

    The newest one waits for the next, or for the end: other callbacks may still add to it.
    """
    history = progress.run.history if progress.last else progress.run.history[:-1]
    return [record for record in history if record["step"] > step]
