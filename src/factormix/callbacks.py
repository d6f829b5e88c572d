"""What can watch a training run: a progress bar, and checkpoints on disk."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from factormix.training import Record

if TYPE_CHECKING:
    from factormix.estimators import MFA

__all__ = ["Checkpoint", "Progress", "ProgressBar"]


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
