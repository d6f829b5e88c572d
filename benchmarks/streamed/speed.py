"""Training from files larger than the memory that is allowed, against training from memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from factormix import MFA
from factormix.callbacks import Progress
from factormix.data.readers import read_rows
from factormix.solvers import NaturalGradient
from factormix.studies.harness import Outcome, Settings
from streamed import files, limits

__all__ = ["MEMORY", "run"]

MEMORY = "memory"
"""The source that the others are compared with: an array."""
WARM = 0.2
"""Share of the time of a run that is left out, while the mixture is seeded and pruned."""


def run(settings: Settings, data_folder: str | None) -> Outcome:
    """Train for some seconds, and return rows per second and memory over time."""
    kind, n_rows, d = settings["kind"], settings["rows"], settings["features"]
    if kind == MEMORY:
        held = min(n_rows, settings["memory_bytes"] // (4 * d))
        array = np.concatenate(list(files.blocks(held, d)))
        return _trained(settings, array, limits.Limited("none"))
    path = files.write(kind, Path(settings["scratch"]), n_rows, d)
    # What was kept of them while they were written would be charged to nobody.
    limits.forget_files(path)
    with limits.limited(settings["limit"]) as limit:
        rows = np.load(path, mmap_mode="r") if kind == "memory map" else read_rows(path)
        return _trained(settings, rows, limit)


def _trained(settings: Settings, rows: Any, limit: limits.Limited) -> Outcome:
    watch, K = _Watch(settings["seconds"]), settings["components"]
    begun = time.perf_counter()
    with watch:
        MFA(
            K,
            settings["factors"],
            batch_size=settings["batch_size"],
            max_epochs=settings["epochs"],
            # As many at all times, and all of them evaluated: every step is the same work.
            solver=NaturalGradient(first_components=K),
            candidates=None,
            random_state=0,
            callbacks=[watch],
        ).fit(rows)
    memory = np.array(watch.memory, dtype=float)
    values = {
        "rows_per_second": watch.speed(),
        "seconds_before": watch.first_step(begun),
        "peak": float(memory[:, 1].max()),
        "charged": limit.peak(),
        "limited_by": limit.how,
    }
    return Outcome(values, {"memory": memory})


class _Watch:
    """Watch a run: when it was where, and how much memory the process holds."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._begun = seconds, time.perf_counter()
        self._seen = list[tuple[float, float]]()
        self.memory = list[tuple[float, float]]()
        self._stop = threading.Event()

    def __enter__(self) -> _Watch:
        self._begun = time.perf_counter()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            self.memory.append((time.perf_counter() - self._begun, _held()))

    def __call__(self, progress: Progress) -> bool:
        now = time.perf_counter()
        self._seen.append((now, progress.record["samples"]))
        return now - self._seen[0][0] > self._seconds

    def first_step(self, begun: float) -> float:
        """Return the seconds before training began: opening, checking and seeding."""
        return self._seen[0][0] - begun

    def speed(self) -> float:
        """Return the rows per second after the beginning."""
        start = self._seen[0][0] + WARM * self._seconds
        seen = [one for one in self._seen if one[0] >= start]
        if seen[0][1] == seen[-1][1]:
            # Too short a run to leave its beginning out.
            seen = self._seen
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def _held() -> float:
    """Return the bytes of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return float(line.split()[1]) * 1024
    return 0.0
