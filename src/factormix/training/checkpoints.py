"""A folder of numbered checkpoints, of which the newest whole one is where a run goes on.

Every checkpoint is an entry ``checkpoint-NUMBER.safetensors`` of the folder. It is written in a
folder of its own beside them and moved into place when it is whole, so that whatever has such a
name was whole once. Numbers count up and are never used again, not even for one that is damaged."""

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
from factormix.training.distributed.processes import Processes, ProcessLost
from factormix.training.solvers.base import COUNT, NOT_NEGATIVE, check_options

__all__ = ["Checkpoints", "checkpoints_in"]

NAME = re.compile(r"checkpoint-(\d{6,})\.safetensors")
UNFINISHED = ".unfinished"
"""Where a checkpoint is while it is written; what a kill leaves there goes with the next one."""


def checkpoints_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints of a folder, the newest last; none if there is no such folder."""
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

    A run that was killed, or whose machine went away, goes on from the newest one that is whole:
    ``factormix.load(folder).resume(X)`` ends with exactly the model of an undisturbed run. One that
    cannot be written, for lack of space say, is a ``TrainingWarning``: training goes on, those that
    are there stay, and the next time is another try. SIGTERM, where nobody else handles it, ends a
    run after the step under way, and it is saved before the process ends.

    Parameters
    ----------
    folder : path
        Made if it is not there. A new ``fit`` does not go into one that has checkpoints of another.
    seconds : float
        Least time between two checkpoints; there is one at the end in any case.
    keep : int
        Checkpoints that stay; older ones are removed once a newer one is whole.

    Attributes
    ----------
    last_ : path or None
        The last checkpoint that was saved.
    failed_ : bool
        Whether the last try failed.
    """

    folder: str | os.PathLike[str]
    seconds: float = 60.0
    keep: int = 3
    every_process: ClassVar[bool] = True
    """Where processes have some of the components each, they save the model together."""
    last_: Path | None = field(default=None, init=False)
    failed_: bool = field(default=False, init=False)
    _begun: bool = field(default=False, init=False, repr=False)
    _tried: float = field(default_factory=time.monotonic, init=False, repr=False)

    def __post_init__(self) -> None:
        check_options(self, {COUNT: ["keep"], NOT_NEGATIVE: ["seconds"]})
        self.folder = Path(self.folder)

    def begin(self, *, anew: bool) -> None:
        """Make the folder, and check that it has no checkpoints of another run if this one is new.

        Training calls it; called before, it tells of a wrong folder before any long work.
        """
        if self._begun:
            return
        if anew and (there := checkpoints_in(self.folder)):
            raise InputError(
                f"{self.folder} holds checkpoints of an earlier run, the last of them"
                f" {there[-1].name}: resume that run, name another folder, or remove them."
            )
        make_folder(self.folder)
        if not os.access(self.folder, os.W_OK):
            raise InputError(f"cannot write to the folder {self.folder}: choose another one.")
        self._begun = True

    def __call__(self, progress: Progress) -> None:
        """Save when it is time again, and when training ends."""
        processes = progress.run.problem.processes
        if not self._begun:
            anew = progress.begun_at == 0
            processes.together(lambda: self.begin(anew=anew) if processes.first else None)
            self._begun = True
        if processes.same(progress.last or time.monotonic() - self._tried >= self.seconds):
            self._try(progress)

    def _try(self, progress: Progress) -> None:
        processes = progress.run.problem.processes
        try:
            self.last_ = self._save(progress, processes)
            self.failed_ = False
        except ProcessLost:
            raise
        except (InputError, OSError) as error:
            # Said once for each time that it begins to fail, and again at the end.
            if (not self.failed_ or progress.last) and processes.first:
                goes_on = "and the run ends" if progress.last else "and training goes on"
                warnings.warn(
                    f"no checkpoint could be saved in {self.folder}, {goes_on} without it: {error}",
                    TrainingWarning,
                    stacklevel=2,
                )
            self.failed_ = True
        self._tried = time.monotonic()

    def _save(self, progress: Progress, processes: Processes) -> Path:
        """Save a checkpoint; folders are the affair of the first process."""
        folder = Path(self.folder)
        unfinished, first = folder / UNFINISHED, processes.first
        name = processes.together(lambda: self._begin_next(unfinished) if first else "")
        try:
            progress.save(unfinished / name)
            if first:
                os.replace(unfinished / name, folder / name)
        finally:
            if first:
                shutil.rmtree(unfinished, ignore_errors=True)
        if first:
            self._remove_old()
        return folder / name

    def _begin_next(self, unfinished: Path) -> str:
        """Make a place for the next checkpoint, and return its name."""
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(exist_ok=True)
        there = checkpoints_in(self.folder)
        return f"checkpoint-{_number(there[-1]) + 1 if there else 1:06d}.safetensors"

    def _remove_old(self) -> None:
        for old in checkpoints_in(self.folder)[: -self.keep]:
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)


def _number(path: Path) -> int:
    found = NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])
