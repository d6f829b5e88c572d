"""The results of trials on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.files import make_folder, replacing, write_whole
from factormix.studies.harness.trials import Outcome, Settings, Trial

__all__ = ["Result", "Store", "read_results"]

_ARRAYS, _MODEL = ".arrays.safetensors", ".safetensors"


class Store:
    """Keep the result files of trials in a folder.

    The JSON file of a trial is written last and whole: where it is, the trial is finished.
    """

    def __init__(self, folder: Path) -> None:
        # A trial may change the working directory of its process.
        self.folder = folder.absolute()

    def path(self, trial: Trial, suffix: str = ".json") -> Path:
        """Return the path of one of a trial's files."""
        return self.folder / trial.experiment / f"{trial.name}{suffix}"

    def read(self, trial: Trial) -> dict[str, Any] | None:
        """Return a finished trial's values, None if it has to be run (again)."""
        try:
            content = json.loads(self.path(trial).read_text())
        except (OSError, ValueError):
            return None
        # A file of other settings is the result of another plan.
        if not isinstance(content, dict) or content.get("settings") != _plain(trial.settings):
            return None
        values = content.get("values")
        whole = isinstance(values, dict) and bool(values) and self._has(trial, content)
        return values if whole else None

    def _has(self, trial: Trial, content: Mapping[str, Any]) -> bool:
        """Tell whether the files that a trial left beside its values are there and readable."""
        from safetensors import SafetensorError, safe_open

        for suffix in content.get("files", []):
            try:
                with safe_open(self.path(trial, suffix), framework="np") as file:
                    file.keys()
            except (OSError, SafetensorError):
                return False
        return True

    def arrays(self, trial: Trial) -> dict[str, NDArray[Any]]:
        """Return the arrays that a trial left."""
        from safetensors.numpy import load_file

        return dict(load_file(self.path(trial, _ARRAYS)))

    def model_path(self, trial: Trial) -> Path | None:
        """Return the path of the model that a trial left, None if it left none."""
        path = self.path(trial, _MODEL)
        return path if path.exists() else None

    def write(self, trial: Trial, outcome: Outcome) -> None:
        """Write a trial's files, the one that says it is finished last."""
        path = self.path(trial)
        make_folder(path.parent)
        if outcome.arrays:
            from safetensors.numpy import save_file

            contiguous = {name: np.ascontiguousarray(a) for name, a in outcome.arrays.items()}
            with replacing(self.path(trial, _ARRAYS)) as temporary:
                save_file(contiguous, temporary)
        if outcome.model is not None:
            outcome.model.save(self.path(trial, _MODEL), training_state=False)
        files = [_ARRAYS] * bool(outcome.arrays) + [_MODEL] * (outcome.model is not None)
        content = {"settings": _plain(trial.settings), "values": outcome.values, "files": files}
        write_whole(path, json.dumps(content, indent=1).encode())

    def discard(self, trial: Trial) -> None:
        """Forget a result, so that the trial is run again."""
        self.path(trial).unlink(missing_ok=True)


@dataclass(frozen=True)
class Result:
    """Hold a finished trial and its values."""

    trial: Trial
    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return a setting or a value."""
        settings = self.trial.settings
        return settings[name] if name in settings else self.values[name]


def read_results(trials: Iterable[Trial], store: Store) -> list[Result]:
    """Read the values of all trials that are finished, once each."""
    found = {trial.title: (trial, store.read(trial)) for trial in trials}
    return [Result(trial, values) for trial, values in found.values() if values is not None]


def _plain(settings: Settings) -> Any:
    """Bring settings to what JSON makes of them, for comparison."""
    return json.loads(json.dumps(dict(settings)))
