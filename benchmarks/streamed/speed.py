"""Training from files larger than the memory that is allowed, against training from memory."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from factormix import MFA
from factormix.callbacks import Progress
from factormix.data.readers import read_rows
from factormix.studies.harness import Outcome, Settings
from streamed import files

__all__ = ["MEMORY", "run"]

MEMORY = "memory"
"""The source that the others are compared with: an array."""
WARM = 0.2
"""Share of the time of a run that is left out, while the mixture is seeded and pruned."""


def run(settings: Settings, data_folder: str | None) -> Outcome:
    """Train for some seconds, and return rows per second and memory over time."""
    kind, n_rows, d = settings["kind"], settings["rows"], settings["features"]
    scratch = Path(settings["scratch"])
    # Arrow's own allocator reserves a gigabyte beforehand, which counts whether it is used or not.
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    if kind == MEMORY:
        held = min(n_rows, settings["memory_bytes"] // (4 * d))
        rows: Any = np.concatenate(list(files.blocks(held, d)))
    else:
        path = files.write(kind, scratch, n_rows, d)
        if settings["limit"]:
            # What a process may write to in memory, in all: files that are read do not count.
            resource.setrlimit(resource.RLIMIT_DATA, (settings["limit"], settings["limit"]))
        rows = np.load(path, mmap_mode="r") if kind == "memory map" else read_rows(path)
    watch = _Watch(settings["seconds"])
    begun = time.perf_counter()
    with watch:
        MFA(
            settings["components"],
            settings["factors"],
            batch_size=settings["batch_size"],
            max_epochs=settings["epochs"],
            random_state=0,
            callbacks=[watch],
        ).fit(rows)
    speed, first = watch.speed(), watch.first_step(begun)
    memory = np.array(watch.memory, dtype=float)
    return Outcome(
        {"rows_per_second": speed, "seconds_before": first, "peak": float(memory[:, 1].max())},
        {"memory": memory},
    )


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
