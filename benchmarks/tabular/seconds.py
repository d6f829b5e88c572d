"""Seconds of small fits, and of one pass over images, alone and beside a busy process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import problems
import torch
from settings import FLOOR, Setting
from sklearn.mixture import GaussianMixture

from factormix import MFA
from factormix.studies.harness import Outcome, Settings, Trial, median
from tabular import data
from tabular.fits import fitted, warm_up

__all__ = ["CONDITIONS", "IMAGES", "busy", "run_pass", "run_small", "small", "trials"]

CONDITIONS: dict[str, tuple[int | None, bool]] = {
    "alone, one thread": (1, False),
    "alone, default threads": (None, False),
    "beside a busy process, default threads": (None, True),
}
"""Threads of the process, None leaving them to torch, and whether another one keeps a core busy."""

IMAGES = Setting("fashion-mnist", 49)
MOST_ROWS, MOST_FEATURES, MOST_COMPONENTS = 1000, 50, 10
FACTORS = 2

SPIN = """
import os, sys, threading
# The end of the parent ends this process too.
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
print("busy", flush=True)
while True:
    pass
"""


def small(tables: Sequence[str], most_rows: int) -> list[str]:
    """Choose the tables of at most 1,000 rows and 50 features."""
    shapes = {name: data.load(name, most_rows).shape for name in tables}
    return [name for name, (n, d) in shapes.items() if n <= MOST_ROWS and d <= MOST_FEATURES]


def trials(
    tables: Sequence[str], components: Sequence[int], repeats: int, images: bool
) -> list[Trial]:
    """List the measurements: small fits, and a pass over the images if they are there."""
    found = []
    for condition, (threads, beside) in CONDITIONS.items():
        settings: dict[str, Any] = {"condition": condition, "threads": threads, "busy": beside}
        sizes = [K for K in components if K <= MOST_COMPONENTS]
        work = {"tables": list(tables), "components": sizes, "repeats": repeats}
        name = condition.replace(",", "").replace(" ", "-")
        found.append(Trial("seconds", f"small-{name}", settings | work, run_small))
        if images:
            found.append(Trial("seconds", f"pass-{name}", settings, run_pass))
    return found


def run_small(settings: Settings, data_folder: str | None = None) -> Outcome:
    """Time fits on small standardised tables, ours and scikit-learn's in turn."""
    warm_up()
    fits = []
    with busy() if settings["busy"] else nullcontext():
        for table in settings["tables"]:
            x, _ = data.fold(data.load(table, MOST_ROWS), "standardised", 0, 5)
            for K in settings["components"]:
                fits.append({"table": table, "components": K, **times(x, K, settings["repeats"])})
    return Outcome({"fits": fits, "torch_threads": torch.get_num_threads()})


def times(x: Any, K: int, repeats: int) -> dict[str, float | None]:
    """Return the median seconds of a fit of each model; None if it fails."""
    makers: dict[str, Any] = {
        "MFA": lambda: MFA(K, min(FACTORS, x.shape[1] - 1), random_state=0),
        "full": lambda: GaussianMixture(K, covariance_type="full", random_state=0),
        "diag": lambda: GaussianMixture(K, covariance_type="diag", random_state=0),
    }
    seconds: dict[str, list[float | None]] = {name: [] for name in makers}
    for _ in range(repeats):
        for name, make in makers.items():
            seconds[name].append(fitted(make, x, x)["seconds"])
    return {
        name: None if None in each else median(value for value in each if value is not None)
        for name, each in seconds.items()
    }


def run_pass(settings: Settings, data_folder: str | None = None) -> Outcome:
    """Time one pass over the images, and score it."""
    warm_up()
    problem = problems.load(IMAGES)
    model = MFA(
        IMAGES.components, IMAGES.factors, max_precision=1 / FLOOR, max_epochs=1, random_state=0
    )
    with busy() if settings["busy"] else nullcontext():
        begun = time.perf_counter()
        model.fit(problem.train)
        seconds = time.perf_counter() - begun
    return Outcome(
        {
            "seconds": seconds,
            "log_likelihood": model.score(problem.held_out),
            "torch_threads": torch.get_num_threads(),
        }
    )


@contextmanager
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """Keep a core busy with a process that does nothing else."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()
