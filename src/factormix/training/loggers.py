"""What writes a run down while it lasts: a file of JSON lines, or TensorBoard."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from factormix.errors import InputError, TrainingWarning
from factormix.files import write_whole
from factormix.training.callbacks import Progress
from factormix.training.loop import Record

__all__ = ["JSONLines", "TensorBoard"]


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
