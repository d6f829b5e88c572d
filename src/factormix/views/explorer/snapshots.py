"""Pictures of a model at the moments when training saved it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.errors import InputError
from factormix.views.explorer.arrangement import arrange, grid_shape
from factormix.views.explorer.subject import Subject

__all__ = ["Snapshot", "Snapshots"]

MOST = 60
"""Snapshots that are kept: when there are more, every other one goes."""
SHOWN = 150
"""Components of a snapshot, the heaviest ones."""
BYTES = 400_000
"""Bytes of the pictures of a snapshot."""
CURVE = 600
"""Points of a curve, at most."""


@dataclass(frozen=True)
class Snapshot:
    """The heaviest components of a model at one moment, laid out on a grid."""

    version: int
    facts: dict[str, Any]
    tiles: NDArray[np.uint8]
    weights: NDArray[np.float32]


class Snapshots:
    """Keep a bounded number of snapshots, and the history of the newest model."""

    def __init__(self) -> None:
        self._kept: list[Snapshot] = []
        self._history: list[dict[str, float]] = []
        # The centroids of the newest snapshot, cell by cell: each stays in its place as it forms.
        self._before: NDArray[np.float32] | None = None

    def add(self, version: int, subject: Subject) -> None:
        """Take a snapshot of a model that was just loaded."""
        self._history = list(subject.model.history_)
        heaviest = np.sort(np.argsort(-subject.weights, kind="stable")[:SHOWN])
        rows, cols = grid_shape(len(heaviest))
        order = heaviest[arrange(subject.means[heaviest], rows, cols, self._before)]
        self._before = subject.means[order]
        last = self._history[-1] if self._history else {}
        facts = {
            "version": version,
            "time": time.time(),
            "step": subject.model.n_steps_,
            "epoch": last.get("epoch"),
            "log_likelihood": last.get("log_likelihood"),
            "components": subject.K,
            "in_use": int(subject.in_use.sum()),
            "rows": rows,
            "cols": cols,
            "shown": len(order),
        }
        tiles = subject.display.tiles(subject.means[order], BYTES)
        weights = subject.weights[order].astype(np.float32)
        kept = [*self._kept, Snapshot(version, facts, tiles, weights)]
        # The newest stays whatever is dropped.
        self._kept = kept if len(kept) <= MOST else [*kept[:-1:2], kept[-1]]

    def listed(self) -> list[dict[str, Any]]:
        """Describe all snapshots, oldest first."""
        return [snapshot.facts for snapshot in self._kept]

    def get(self, version: int) -> Snapshot:
        """Return the snapshot of a version."""
        for snapshot in self._kept:
            if snapshot.version == version:
                return snapshot
        raise InputError(f"there is no snapshot {version} any more: take a newer one.")

    def curves(self) -> dict[str, list[float | None]]:
        """Return the history of the training as curves of a bounded number of points."""
        history = self._history
        thinned = history[:: max(1, len(history) // CURVE)]
        thinned += history[-1:] if thinned and thinned[-1] is not history[-1] else []
        names = ("step", "epoch", "log_likelihood", "held_out", "components", "components_in_use")
        return {name: [record.get(name) for record in thinned] for name in names}
