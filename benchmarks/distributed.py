"""Time training steps of two processes against one, and measure their communication.

    python benchmarks/distributed.py [--repeats 3] [--steps 120] [--write-docs]

Every process has one thread. Runs of one and of two processes alternate, on the same rows, batches
and seed. Times are medians over the later steps of a run, and then over the runs. Rows are
FashionMNIST if FACTORMIX_DATA has it, and random rows of the same size otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import DOCS, describe_machine, fold_description, peak_memory
from harness import Table

PAGE = DOCS / "benchmarks-distributed.md"
CASES: dict[str, dict[str, Any]] = {
    "by data": {"K": 800, "B": 4000, "mesh": "data", "candidates": None},
    "by component": {"K": 800, "B": 1000, "mesh": "components", "candidates": None},
    "by component, screened": {"K": 800, "B": 1000, "mesh": "components", "candidates": "auto"},
}
FACTORS, SEED_ROWS, GOAL = 4, 1000, 1.7


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=120)
    arguments.add_argument("--case", action="append", choices=CASES)
    arguments.add_argument("--write-docs", action="store_true")
    arguments.add_argument("--worker", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.worker:
        train_in_process(json.loads(options.worker))
        return
    rows, data = [], make_rows()
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "rows.npy", data)
        for name in options.case or CASES:
            rows.append(compare_runs(name, options, Path(folder)))
            print("  ".join(map(str, rows[-1])), flush=True)
    if options.write_docs:
        write_page(rows, options)


def make_rows() -> Any:
    """Return rows (60000, 784) in [0, 1]."""
    if os.environ.get("FACTORMIX_DATA"):
        from factormix.datasets import load

        return load("fashion-mnist").data
    random = np.random.default_rng(0)
    codes = random.normal(size=(60_000, 20)) @ random.normal(size=(20, 784))
    noise = 0.1 * random.normal(size=codes.shape)
    return (1 / (1 + np.exp(-codes / 4)) + noise).astype(np.float32)


def compare_runs(name: str, options: argparse.Namespace, folder: Path) -> tuple[str, ...]:
    """Run one and two processes in turn, and return a row of the table."""
    case = CASES[name] | {"steps": options.steps, "folder": str(folder)}
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(options.repeats):
        for n in found:
            found[n].append(launch(n, case))
    one, two = (
        {key: statistics.median(run[key] for run in found[n]) for key in found[n][0]} for n in found
    )
    ratios = [a["step"] / b["step"] for a, b in zip(found[1], found[2], strict=True)]
    apart = abs(one["likelihood"] - two["likelihood"]) / abs(one["likelihood"])
    return (
        name,
        f"{case['K']}",
        f"{case['B']:,}",
        f"{one['step'] * 1e3:.0f}",
        f"{two['step'] * 1e3:.0f}",
        f"{one['step'] / two['step']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{two['communication']:.1%}",
        f"{one['processor'] * 1e3:.0f} / {two['processor'] * 1e3:.0f}"
        f" ({one['processor'] / two['processor']:.2f})",
        f"{two['bytes'] / 2**20:.2f}",
        f"{one['memory'] / 2**20:.0f} / {two['memory'] / 2**20:.0f}",
        f"{apart:.0e}",
    )


def launch(n: int, case: dict[str, Any]) -> dict[str, float]:
    """Run n processes and return the results of the first."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    task = json.dumps(case)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*start, __file__, "--worker", task], check=True, env=environment)
    found: dict[str, float] = json.loads((Path(case["folder"]) / "found.json").read_text())
    return found


def train_in_process(case: dict[str, Any]) -> None:
    """Train in one of the processes, and write the figures of the later steps to a file."""
    from factormix import MFA
    from factormix.solvers import NaturalGradient

    table = np.load(Path(case["folder"]) / "rows.npy", mmap_mode="r")
    rows = np.array(table)
    before = peak_memory()
    seen: list[dict[str, float]] = []
    K, steps = case["K"], case["steps"]

    def watch(progress: Any) -> bool:
        seen.append(dict(progress.record) | {"processor": time.process_time()})
        return progress.record["step"] >= steps

    watch.every_process = True  # type: ignore[attr-defined]
    model = MFA(
        K,
        FACTORS,
        solver=NaturalGradient(first_components=K, seed_rows=SEED_ROWS, tol=0),
        batch_size=case["B"],
        max_precision=400,
        random_state=0,
        mesh=case["mesh"] if int(os.environ["WORLD_SIZE"]) > 1 else None,
        candidates=case["candidates"],
        callbacks=[watch],
    )
    model.fit(rows)
    if os.environ["RANK"] == "0":
        found = summarise(seen, steps) | {"memory": float(peak_memory() - before)}
        (Path(case["folder"]) / "found.json").write_text(json.dumps(found))


def summarise(seen: list[dict[str, float]], steps: int) -> dict[str, float]:
    """Return the median step, and shares of the time, over the last two fifths of a run."""
    late = [record for record in seen if record["step"] >= 0.6 * steps]
    pairs = [(a, b) for a, b in itertools.pairwise(late) if b["step"] > a["step"]]
    times = [(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairs]
    first, last = late[0], late[-1]
    taken, n = last["seconds"] - first["seconds"], last["step"] - first["step"]
    rise = {
        name: last.get(name, 0) - first.get(name, 0) for name in ("communication", "bytes_sent")
    }
    return {
        "step": statistics.median(times),
        "communication": rise["communication"] / taken,
        "bytes": rise["bytes_sent"] / n,
        "processor": (last["processor"] - first["processor"]) / n,
        "likelihood": seen[-1]["log_likelihood"],
    }


def write_page(rows: list[tuple[str, ...]], options: argparse.Namespace) -> None:
    """Write the page."""
    command = f"python benchmarks/distributed.py --repeats {options.repeats}" + (
        f" --steps {options.steps} --write-docs"
    )
    head = (
        "division", "K", "batch", "one process, ms a step", "two processes, ms a step",
        "times as fast (of single runs)", "share of time in messages",
        "processor time of a process, ms a step: one / two",
        "MiB sent by a process a step", "memory of a run, MiB: one / two", "likelihood apart",
    )  # fmt: skip
    shown = Table("distributed", "", head, rows)
    reached = [row[0] for row in rows if float(row[5].split()[0]) >= GOAL]
    missed = [row[0] for row in rows if row[0] not in reached]
    goal = f"the goal, {GOAL} times the speed of one,"
    verdict = f"Two processes reach {goal} {' and '.join(reached)}."
    verdict = verdict if reached else f"Two processes miss {goal} in all divisions."
    if missed and reached:
        verdict += f" They miss it {' and '.join(missed)}."
    description = describe_machine(1, 2, ("factormix", "torch", "numpy"))
    description["command"] = f"`{command}`"
    PAGE.write_text(
        f"""# Benchmarks: several processes

How much faster two processes train than one, on one machine with one thread each: a natural step
on FashionMNIST (784 features) with {FACTORS} factors, medians of {options.repeats} alternating
runs. `benchmarks/distributed.py` measures it; [Many processes](processes.md) explains their use.

{verdict}

{shown.markdown()}

Times cover the last two fifths of {options.steps} steps, when all components exist and the bound on
their precisions is final. Time in messages is the time in which a process sends, receives or waits
for the other one. Processor time does not count waiting: it shows the gain of two processes on an
idle machine with instant messages. By data, a process sends its sums for the components that the
other one updates, and the components that it has updated itself. By component, it sends a few
numbers for each row. Memory is the peak of a process, beyond the rows and the libraries.
"Likelihood apart" is the relative difference of the last record of `history_` between one process
and two. It is not zero because sums are made in another order, and because a screen depends on
which rows and components are together.

Nothing here was measured on several machines or on GPUs.

{fold_description(description)}
""",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
