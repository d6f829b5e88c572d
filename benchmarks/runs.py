"""One run of a method, as a trial of the harness in a process of its own.

A fresh process gives every method the same clean memory and lets a method that does not come back
within its time be left behind.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import threading
from typing import Any

import torch
from curves import BudgetUsedError, Recorder
from machine import peak_memory
from methods import METHODS
from models import components_in_use, matched_share
from problems import Problem, load
from settings import setting_of

from factormix.studies.harness import Outcome, Settings

__all__ = ["run"]

MEMORY_SHARE = 0.9
"""Share of the machine's memory that the methods of all runs at a time may take before they get a
MemoryError.
"""


def run(settings: Settings, data_folder: str | None = None) -> Outcome:
    """Train by the method of a plan until it ends or its time is over, and describe its curve."""
    limit_memory(MEMORY_SHARE / settings["jobs"])
    problem = load(setting_of(settings), quick=settings["quick"])
    warm_up()
    recorder = Recorder(torch.from_numpy(problem.held_out), settings["limit"])
    # Lightning leaves files where it runs.
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            status, message = watched(settings, problem, recorder)
        finally:
            os.chdir("/")
    return Outcome(values(problem, recorder, status, message))


def watched(settings: Settings, problem: Problem, recorder: Recorder) -> tuple[str, str]:
    """Train in a thread, and leave it behind when it does not come back to a checkpoint in time."""
    ended: list[tuple[str, str]] = []
    training = threading.Thread(
        target=lambda: ended.append(train(settings, problem, recorder)), daemon=True
    )
    training.start()
    # A little more: a method that is about to finish an iteration may do so.
    while training.is_alive() and recorder.clock.seconds < 1.1 * recorder.limit:
        training.join(0.1)
    if ended:
        return ended[0]
    if recorder.points:
        return "stopped", f"stopped after {recorder.limit:.0f} s, within an iteration"
    return "unfinished", f"did not finish in {recorder.limit:.0f} s"


def train(settings: Settings, problem: Problem, recorder: Recorder) -> tuple[str, str]:
    """Train, and say how it ended."""
    try:
        method = METHODS[settings["method"]]
        method.train(problem, setting_of(settings), settings["seed"], recorder)
    except BudgetUsedError:
        return "stopped", f"stopped after {recorder.limit:.0f} s"
    except MemoryError:
        return "failed", "ran out of memory"
    except Exception as error:
        if "memory" in str(error).lower():
            return "failed", "ran out of memory"
        text = " ".join(str(error).split())
        return "failed", f"{type(error).__name__}: {text[:200]}"
    return "finished", ""


def values(problem: Problem, recorder: Recorder, status: str, message: str) -> dict[str, Any]:
    """Gather what is kept of a run."""
    model, truth = recorder.model, problem.truth
    return {
        "status": status,
        "message": message,
        "points": [list(point) for point in recorder.points],
        "seconds": recorder.clock.seconds,
        "components_in_use": None if model is None else components_in_use(model),
        "matched": None if model is None or truth is None else matched_share(model, truth),
        "true_log_likelihood": None if truth is None else truth.score(recorder.held_out),
        "rows": len(problem.train),
        "features": problem.train.shape[1],
        "held_out_rows": len(problem.held_out),
        "peak_memory": peak_memory(),
    }


def warm_up() -> None:
    """Wake the threads of the matrix products, which the first method would pay for."""
    x = torch.rand(500, 500)
    for _ in range(3):
        x = (x @ x).softmax(dim=1)


def limit_memory(share: float) -> None:
    """Let a method that asks for too much fail by itself rather than take the machine down."""
    if sys.platform == "linux":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        resource.setrlimit(resource.RLIMIT_DATA, (int(share * total),) * 2)
