"""One measurement of scale.py, in a process of its own: the time of a step or a pass, and memory.

    python benchmarks/growth.py '{"task": "step", "solver": "sgd", "K": 49, ...}'

Prints one line of JSON. A process for each measurement gives each its own peak of memory.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from machine import peak_memory

from factormix import MFA
from factormix.data.batches import Batch
from factormix.solvers import Problem, resolve
from factormix.training.solvers import step

__all__ = ["measure_pass", "measure_step"]

EPOCH_BATCHES = 10
"""A short pass, so that a mixture that grows or is pruned has soon the number it is to have."""
MOST_WARM_STEPS = 100


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options.pop("threads"))
    tasks: dict[str, Any] = {"step": measure_step, "pass": measure_pass}
    print(json.dumps(tasks[options.pop("task")](**options)))


@torch.no_grad()
def measure_step(
    solver: str, K: int, d: int, l: int, B: int, repeats: int, max_precision: float = 20.0
) -> dict[str, float]:
    """Return the median seconds of a step on B rows, and the memory above that of a bare start."""
    method = resolve(solver)
    batches = torch.rand(3, B, d, generator=torch.Generator().manual_seed(0))
    before = peak_memory()
    problem = Problem(
        K,
        d,
        l,
        torch.full((d,), max_precision),
        batches_per_epoch=EPOCH_BATCHES,
        epochs=1000,
    )
    plan: Any = method.plan(problem)
    state = plan.init()
    warm = 0
    while warm < 2 * EPOCH_BATCHES or (len(state.parameters.means) != K and warm < MOST_WARM_STEPS):
        state, _ = step(plan, state, Batch(batches[warm % 3]))
        warm += 1
    times = []
    for i in range(repeats):
        begun = time.perf_counter()
        state, _ = step(plan, state, Batch(batches[i % 3]))
        times.append(time.perf_counter() - begun)
    return {
        "seconds": statistics.median(times),
        "memory": peak_memory() - before,
        "components": len(state.parameters.means),
    }


def measure_pass(solver: str, path: str, K: int, l: int, B: int, seed: int = 0) -> dict[str, float]:
    """Return the seconds of one pass over a memory-mapped file, and the peak memory."""
    x = np.load(path, mmap_mode="r")
    begun = time.perf_counter()
    MFA(K, l, solver=solver, batch_size=B, max_epochs=1, random_state=seed).fit(x)
    return {
        "seconds": time.perf_counter() - begun,
        "memory": peak_memory(),
        "rows": len(x),
    }


if __name__ == "__main__":
    main()
