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
from dataclasses import dataclass, field
from pathlib import Path

from factormix.errors import InputError
from factormix.files import make_folder
from factormix.training.callbacks import Progress, SavingCallback
from factormix.training.solvers.base import check_ranges

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
class Checkpoints(SavingCallback):
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
    # Both are chosen, not measured: a machine that stops costs at most about a minute.
    seconds: float = 60.0
    keep: int = 3
    last_: Path | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_ranges(self, count=["keep"], not_negative=["seconds"])
        self.folder, self._tried = Path(self.folder), time.monotonic()
        self._place = f" in {self.folder}"

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

    def _save(self, progress: Progress) -> None:
        """Save a checkpoint. Only the first process handles folders."""
        folder, communicator = Path(self.folder), progress.run.problem.communicator
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
        self.last_ = folder / name

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
