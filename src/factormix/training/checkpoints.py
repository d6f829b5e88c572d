"""A folder of numbered checkpoints. A run continues from the newest complete one.

Every checkpoint is an entry ``checkpoint-NUMBER.safetensors`` of the folder. It is written in a
subfolder and moved into place when it is complete, so that every entry with such a name was
complete once. Numbers count up and are never used again, not even the number of a damaged one.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from factormix.errors import InputError, TrainingWarning
from factormix.files import make_folder
from factormix.training.callbacks import Progress
from factormix.training.distributed.communicator import Communicator, RankLost
from factormix.training.solvers.base import check_options

NAME = re.compile(r"checkpoint-(\d{6,})\.safetensors")
UNFINISHED = ".unfinished"
"""Subfolder in which a checkpoint is written; the next one removes what a kill leaves there."""


def checkpoints_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints of a folder, newest last; none if the folder does not exist."""
    try:
        found = [path for path in Path(folder).iterdir() if NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(
            f"the folder of checkpoints {folder} cannot be read ({error.strerror}): give a folder."
        ) from error
    return sorted(found, key=_number)


@dataclass(eq=False)
class Checkpoints:
    """Save numbered checkpoints of a run in a folder, and keep the last few.

    After a crash, ``factormix.load(folder).resume(X)`` continues from the newest complete
    checkpoint and ends with exactly the model of an uninterrupted run. If a checkpoint cannot be
    written, for example because the disk is full, training goes on with a ``TrainingWarning``,
    earlier checkpoints stay, and the next one is tried. SIGTERM, unless the program handles it,
    ends a run after the current step, and the run is saved before the process ends.

    Parameters
    ----------
    folder : path
        Created if it does not exist. A new ``fit`` refuses a folder with checkpoints.
    seconds : float
        Minimum time between two checkpoints. The end of a run is always saved.
    keep : int
        Number of checkpoints that stay. Older ones are removed once a newer one is complete.

    Attributes
    ----------
    last_ : path or None
        The last saved checkpoint.
    failed_ : bool
        Whether the last attempt failed.
    """

    folder: str | os.PathLike[str]
    seconds: float = 60.0
    keep: int = 3
    every_process: ClassVar[bool] = True
    """Processes that hold some of the components each save the model together."""
    last_: Path | None = field(default=None, init=False)
    failed_: bool = field(default=False, init=False)
    _opened: bool = field(default=False, init=False, repr=False)
    _tried: float = field(default_factory=time.monotonic, init=False, repr=False)

    def __post_init__(self) -> None:
        check_options(self, count=["keep"], not_negative=["seconds"])
        self.folder = Path(self.folder)

    def open(self, *, new_run: bool) -> None:
        """Create the folder, and refuse one with checkpoints of another run if this run is new.

        Training calls it. Call it earlier to find a wrong folder before any long work.
        """
        if self._opened:
            return
        if new_run and (existing := checkpoints_in(self.folder)):
            raise InputError(
                f"{self.folder} holds checkpoints of an earlier run, the last of them"
                f" {existing[-1].name}: resume that run, name another folder, or remove them."
            )
        make_folder(self.folder)
        if not os.access(self.folder, os.W_OK):
            raise InputError(f"cannot write to the folder {self.folder}: choose another one.")
        self._opened = True

    def __call__(self, progress: Progress) -> None:
        """Save if enough time has passed, and when training ends."""
        communicator = progress.run.problem.communicator
        if not self._opened:
            new_run = progress.steps_before == 0
            communicator.run_together(
                lambda: self.open(new_run=new_run) if communicator.is_first else None
            )
            self._opened = True
        if communicator.broadcast(progress.last or time.monotonic() - self._tried >= self.seconds):
            self._try_to_save(progress)

    def _try_to_save(self, progress: Progress) -> None:
        communicator = progress.run.problem.communicator
        try:
            self.last_ = self._save(progress, communicator)
            self.failed_ = False
        except RankLost:
            raise
        except (InputError, OSError) as error:
            # Warn once when saving starts to fail, and again at the end.
            if (not self.failed_ or progress.last) and communicator.is_first:
                goes_on = "and the run ends" if progress.last else "and training goes on"
                warnings.warn(
                    f"no checkpoint could be saved in {self.folder}, {goes_on} without it: {error}",
                    TrainingWarning,
                    stacklevel=2,
                )
            self.failed_ = True
        self._tried = time.monotonic()

    def _save(self, progress: Progress, communicator: Communicator) -> Path:
        """Save a checkpoint. Only the first process handles folders."""
        folder = Path(self.folder)
        unfinished, first = folder / UNFINISHED, communicator.is_first
        name = communicator.run_together(lambda: self._prepare_next(unfinished) if first else "")
        try:
            progress.save(unfinished / name)
            if first:
                os.replace(unfinished / name, folder / name)
        finally:
            if first:
                shutil.rmtree(unfinished, ignore_errors=True)
        for old in checkpoints_in(folder)[: -self.keep] if first else ():
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        return folder / name

    def _prepare_next(self, unfinished: Path) -> str:
        """Create an empty subfolder for the next checkpoint, and return its name."""
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(exist_ok=True)
        existing = checkpoints_in(self.folder)
        return f"checkpoint-{_number(existing[-1]) + 1 if existing else 1:06d}.safetensors"


def _number(path: Path) -> int:
    found = NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])
