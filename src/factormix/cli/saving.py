"""Where ``factormix train`` keeps a run while it lasts: its model, or numbered checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factormix.cli.console import complain, note, parse_seconds, undisturbed
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.estimators import MFA

__all__ = ["Saving"]


class Saving:
    """Save a run every now and then, find it again, and tell where it is when it is stopped."""

    def __init__(
        self, output: Path, folder: Path | None, every: str | None, keep: int | None
    ) -> None:
        from factormix.training.callbacks import Checkpoint
        from factormix.training.snapshots import Checkpoints

        self._output, self._folder = output, folder
        self.arguments = ["--checkpoint", str(folder)] if folder else []
        self.arguments += [f"--every={every}"] if every else []
        self.arguments += [f"--keep={keep}"] if keep else []
        self._checkpoints: Checkpoints | None = None
        if folder is None:
            for option, value in {"--every": every, "--keep": keep}.items():
                if value is not None:
                    raise InputError(
                        f"{option} is about checkpoints: say where they go by --checkpoint."
                    )
            self.watcher: Callable[[Any], object] = Checkpoint(output)
            return
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file: give a folder for the checkpoints.")
        seconds = 60.0 if every is None else parse_seconds(every, "--every")
        self._checkpoints = Checkpoints(folder, seconds, 3 if keep is None else keep)
        self.watcher = self._checkpoints

    def begin(self, resume: bool) -> Path | None:
        """Find the model or folder where a run stands that is to go on; None for a new run."""
        begun = self._begun() if resume else None
        if self._checkpoints is not None:
            self._checkpoints.begin(anew=begun is None)
        return begun

    def _begun(self) -> Path | None:
        from factormix.training.snapshots import checkpoints_in

        if self._folder is None:
            return self._output
        if checkpoints_in(self._folder):
            return self._folder
        if self._output.exists():
            return self._output
        note(f"{self._folder} has no checkpoints yet, and the run begins")
        return None

    def stop(self, model: MFA, again: str, *, at_once: bool) -> None:
        """Save a run that was stopped, where that is left to do, and say how to go on."""
        if at_once:
            complain(f"stopped at once, and {self._folder or self._output} is as it was saved last")
        elif self._checkpoints is None:
            with undisturbed():
                model.save(self._output)
            complain(f"stopped, with the model so far in {self._output}; go on with: {again}")
        else:
            self._tell(self._checkpoints.failed_, again)

    def _tell(self, failed: bool, again: str) -> None:
        """Say which checkpoint a stopped run has."""
        from factormix.training.snapshots import checkpoints_in

        assert self._folder is not None
        there = checkpoints_in(self._folder)
        if not there:
            complain(f"stopped, and nothing could be saved in {self._folder}: make room there")
        else:
            which = f"with no more than {there[-1]} saved" if failed else f"and saved {there[-1]}"
            complain(f"stopped, {which}; go on with: {again}")
