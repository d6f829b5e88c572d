"""Run one unit of the benchmark in a process of its own and write its result.

    python benchmarks/unit.py UNIT.json RESULT.json

A process for each unit gives every method the same clean memory and lets a method that does not
come back within its time be ended.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from curves import BudgetUsedError, Recorder
from machine import peak_memory
from methods import METHODS
from models import components_in_use, matched_share
from problems import Problem, load
from settings import Setting, Unit

from factormix.files import replacing

__all__ = ["decode", "encode", "main"]

MEMORY_SHARE = 0.9
"""Share of the machine's memory that the methods of all runs at a time may take before they get a
MemoryError.
"""


def encode(unit: Unit) -> str:
    """Describe a unit as JSON."""
    return json.dumps(unit, default=vars)


def decode(text: str) -> Unit:
    """Make the unit that ``encode`` described."""
    values = json.loads(text)
    return Unit(**(values | {"setting": Setting(**values["setting"])}))


def main() -> None:
    unit, target = decode(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    limit_memory(MEMORY_SHARE / unit.jobs)
    torch.set_num_threads(unit.threads)
    problem = load(unit.setting, quick=unit.quick)
    warm_up()
    recorder = Recorder(torch.from_numpy(problem.held_out), unit.limit)
    lock = threading.Lock()
    watch_time(unit, problem, recorder, target, lock)
    status, message = run(unit, problem, recorder)
    # Held to the end: the process is over before the watch could write as well.
    lock.acquire()
    write(target, result(unit, problem, recorder, status, message))
    leave()


def run(unit: Unit, problem: Problem, recorder: Recorder) -> tuple[str, str]:
    """Train, and say how it ended."""
    try:
        METHODS[unit.method].train(problem, unit, recorder)
    except BudgetUsedError:
        return "stopped", f"stopped after {unit.limit:.0f} s"
    except MemoryError:
        return "failed", "ran out of memory"
    except Exception as error:
        if "memory" in str(error).lower():
            return "failed", "ran out of memory"
        text = " ".join(str(error).split())
        return "failed", f"{type(error).__name__}: {text[:200]}"
    return "finished", ""


def watch_time(
    unit: Unit, problem: Problem, recorder: Recorder, target: Path, lock: threading.Lock
) -> None:
    """End the process when training does not come back to a checkpoint within its time."""

    def watch() -> None:
        # A little more: a method that is about to finish an iteration may do so.
        while recorder.clock.seconds < 1.1 * unit.limit:
            time.sleep(0.1)
        lock.acquire()
        message = f"did not finish in {unit.limit:.0f} s"
        if recorder.points:
            message = f"stopped after {unit.limit:.0f} s, within an iteration"
        status = "stopped" if recorder.points else "unfinished"
        write(target, result(unit, problem, recorder, status, message))
        leave()

    threading.Thread(target=watch, daemon=True).start()


def result(
    unit: Unit, problem: Problem, recorder: Recorder, status: str, message: str
) -> dict[str, Any]:
    model, truth = recorder.model, problem.truth
    return {
        "plan": unit.plan,
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


def write(target: Path, content: dict[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        Path(temporary).write_text(json.dumps(content, indent=1) + "\n")


def leave() -> None:
    """End at once: some peers leave threads behind that would keep the process waiting."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


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


if __name__ == "__main__":
    main()
