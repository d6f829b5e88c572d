"""Show how the time of a step and the peak memory grow with N, d, l and K.

    python benchmarks/scale.py                # about ten minutes, and 8 GB of disk for a while
    python benchmarks/scale.py --quick        # a try in a minute

Each measurement runs in its own process, which gives it its own peak of memory. One of the sizes K,
d and l varies at a time. For N, training makes one pass over memory-mapped files of growing size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    DOCS,
    describe_machine,
    draw_lines,
    fold_description,
    make_parser,
    parse_options,
    peak_memory,
)
from harness import Table
from pages import markdown_fold

from factormix import MFA
from factormix.data.batches import Batch
from factormix.files import make_folder, write_whole
from factormix.solvers import SOLVERS, Problem, resolve
from factormix.training.solvers import step

BASE = {"K": 49, "d": 784, "l": 4, "B": 1000}
VARIED = {
    "K": (25, 49, 100, 200, 400, 800),
    "d": (196, 392, 784, 1568, 3136),
    "l": (0, 1, 2, 4, 8, 16),
}
NAMES = {"K": "components K", "d": "features d", "l": "factors l"}
FILE_BYTES = tuple(gigabytes << 30 for gigabytes in (1, 2, 4, 8))
PASS = {"K": 16, "l": 4, "B": 1000}
MEMORY_TOLERANCE = 0.05

QUICK_BASE = {"K": 6, "d": 20, "l": 2, "B": 100}
QUICK_VARIED = {"K": (3, 6), "d": (20,), "l": (2,)}
QUICK_FILE_BYTES = (1 << 21, 1 << 23)

EPOCH_BATCHES = 10
"""A short pass, so that a mixture soon grows or shrinks to its final number of components."""
MOST_WARM_STEPS = 100


@dataclass(frozen=True)
class Row:
    """A measurement."""

    solver: str
    varied: str
    """K, d, l or N."""
    value: int
    seconds: float
    """Of a step, or of a pass for N."""
    memory: int
    """Bytes above a bare start, or the whole peak for N."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.measure:
        measure(json.loads(options.measure))
        return
    solvers = [name for name in options.solvers if name in SOLVERS]
    for name in options.solvers:
        if name not in SOLVERS:
            print(f"the solver {name!r} is left out: factormix has no solver of that name.")
    rows = [row for name in solvers for row in measure_steps(name, options)]
    rows += measure_passes(solvers, options)
    text = compose(rows, options, "figures")
    print(text)
    save_page(rows, options, options.output / "scale.md", options.output / "figures", "figures")
    if options.write_docs:
        save_page(rows, options, DOCS / "benchmarks-scale.md", DOCS / "benchmarks", "benchmarks")
        print("docs/benchmarks-scale.md is written.")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "docs/benchmarks-scale.md")
    parser.add_argument("--solvers", type=lambda t: t.split(","), default=["natural", "sgd"])
    parser.add_argument("--repeats", type=int, default=None, help="steps per median; default 15")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--scratch", type=Path, help="folder for the large files")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parse_options(parser, arguments)
    options.repeats = options.repeats or (3 if options.quick else 15)
    options.base = QUICK_BASE if options.quick else BASE
    options.varied = QUICK_VARIED if options.quick else VARIED
    options.file_bytes = QUICK_FILE_BYTES if options.quick else FILE_BYTES
    return options


def measure_steps(solver: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure time and memory of a step, with one size varied at a time."""
    for varied, values in options.varied.items():
        for value in values:
            size = options.base | {varied: value}
            found = run_measurement(
                {"task": "step", "solver": solver, "repeats": options.repeats, **size},
                options.threads,
            )
            if found["components"] != size["K"]:
                print(f"{solver}, {varied} = {value}: {found['components']} of {size['K']} grown.")
            yield Row(solver, varied, value, found["seconds"], int(found["memory"]))


def measure_passes(solvers: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """Train for one pass over files of growing size."""
    rows = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        for size in options.file_bytes:
            path = Path(scratch) / "rows.npy"
            write_rows(path, size, options.base["d"])
            for solver in solvers:
                task: dict[str, Any] = {"task": "pass", "solver": solver, "path": str(path), **PASS}
                found = run_measurement(task, options.threads)
                rows.append(
                    Row(solver, "N", int(found["rows"]), found["seconds"], int(found["memory"]))
                )
            path.unlink()
    return rows


def write_rows(path: Path, size: int, n_features: int) -> None:
    """Write an .npy file of about ``size`` bytes: blocks of clustered random rows, repeated."""
    rng = np.random.default_rng(0)
    total = size // (4 * n_features)
    centres = rng.random((16, n_features))
    block_rows = min(total, 1 + (1 << 26) // (4 * n_features))
    block = centres[rng.integers(16, size=block_rows)] + 0.1 * rng.normal(
        size=(block_rows, n_features)
    )
    block = block.astype(np.float32)
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (total, n_features)}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, total, block_rows):
            file.write(block[: total - start].data)


def run_measurement(task: dict[str, Any], threads: int) -> dict[str, float]:
    """Run one measurement in its own process."""
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = os.environ | dict.fromkeys(variables, str(threads))
    measurement = json.dumps(task | {"threads": threads})
    done = subprocess.run(
        [sys.executable, __file__, "--measure", measurement],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def fit_exponent(rows: Sequence[Row]) -> float:
    """Return the slope of log time against log size over the upper half of the sizes.

    The size of l is l + 2, as in the cost of a step.
    """
    first, last = rows[(len(rows) - 1) // 2], rows[-1]
    if first.value == last.value:
        return math.nan
    sizes = [r.value + 2 * (r.varied == "l") for r in (first, last)]
    return math.log(last.seconds / first.seconds) / math.log(sizes[1] / sizes[0])


def compose(rows: Sequence[Row], options: argparse.Namespace, pictures: str) -> str:
    """Compose the page."""
    solvers = list(dict.fromkeys(r.solver for r in rows))
    parts = ["# Benchmarks: scale", INTRODUCTION, "## Verdict", judge(rows, options, solvers)]
    for varied in options.varied:
        fixed = ", ".join(f"{k} = {v}" for k, v in options.base.items() if k != varied)
        parts += [f"## Growth with {NAMES[varied]}", f"{fixed}, with B the rows of a batch."]
        parts.append(f"![Time of a step against {varied}]({pictures}/scale-{varied}.png)")
        parts.append(markdown_fold("Numbers", tabulate_steps(rows, varied, solvers, options)))
    parts += ["## Growth with rows N", describe_pass(options)]
    parts.append(f"![Peak memory against N]({pictures}/scale-N.png)")
    parts.append(markdown_fold("Numbers", tabulate_passes(rows, solvers)))
    parts.append(fold_description(describe_machine(options.threads)))
    return "\n\n".join(parts) + "\n"


def judge(rows: Sequence[Row], options: argparse.Namespace, solvers: Sequence[str]) -> str:
    """List the powers that the time grows with, and the growth of memory."""
    lines = []
    for varied in options.varied:
        of = "l + 2" if varied == "l" else varied
        slopes = ", ".join(f"{s} {fit_exponent(select(rows, s, varied)):.2f}" for s in solvers)
        lines.append(f"- Over the upper half, time grows with this power of {of}: {slopes}.")
    lines += [f"- {judge_memory(select(rows, solver, 'N'))}" for solver in solvers]
    return "\n".join(lines)


def select(rows: Sequence[Row], solver: str, varied: str) -> list[Row]:
    return [r for r in rows if r.solver == solver and r.varied == varied]


def tabulate_steps(
    rows: Sequence[Row], varied: str, solvers: Sequence[str], options: argparse.Namespace
) -> str:
    lines = []
    for value in options.varied[varied]:
        size = options.base | {varied: value}
        products = 4 * size["d"] * size["K"] * (size["l"] + 2) * size["B"]
        parameters = 4 * size["K"] * size["d"] * (size["l"] + 2)
        line = [f"{value}", f"{products / 1e9:.2f}", f"{parameters / 2**20:.1f}"]
        for solver in solvers:
            row = next(r for r in select(rows, solver, varied) if r.value == value)
            rate = products / row.seconds / 1e9
            line += [f"{row.seconds * 1e3:.2f}", f"{rate:.0f}", f"{row.memory / 2**20:.0f}"]
        lines.append(line)
    head = [varied, "GFLOP of a step", "parameters, MiB"]
    for solver in solvers:
        head += [f"{solver}, ms", "GFLOP/s", "memory, MiB"]
    return Table("growth", "", head, lines).markdown()


def describe_pass(options: argparse.Namespace) -> str:
    size = ", ".join(f"{k} = {v}" for k, v in PASS.items())
    return f"One pass over a memory-mapped file of float32 rows, d = {options.base['d']}, {size}."


def tabulate_passes(rows: Sequence[Row], solvers: Sequence[str]) -> str:
    lines = []
    for value in dict.fromkeys(r.value for r in rows if r.varied == "N"):
        line = [f"{value:,}"]
        for solver in solvers:
            row = next(r for r in select(rows, solver, "N") if r.value == value)
            speed = value / row.seconds
            line += [f"{row.seconds:.1f}", f"{speed:,.0f}", f"{row.memory / 2**20:.1f}"]
        lines.append(line)
    head = ["N"]
    for solver in solvers:
        head += [f"{solver}, s", "rows/s", "peak memory, MiB"]
    return Table("growth", "", head, lines).markdown()


def judge_memory(rows: Sequence[Row]) -> str:
    """Compare the peak memories for the largest file and the smallest."""
    ratio = rows[-1].memory / rows[0].memory
    met = abs(ratio - 1) <= MEMORY_TOLERANCE
    return (
        f"Peak memory of `{rows[0].solver}` with {rows[-1].value / rows[0].value:.0f} times the"
        f" rows: {ratio:.3f} times as much; target within {MEMORY_TOLERANCE:.0%}:"
        f" {'met' if met else '**not met**'}."
    )


def save_page(
    rows: Sequence[Row], options: argparse.Namespace, page: Path, folder: Path, pictures: str
) -> None:
    """Write the page, its pictures and, in the folder of the results, a CSV file."""
    make_folder(page.parent)
    write_whole(page, compose(rows, options, pictures).encode())
    if page.parent == options.output:
        columns = ("solver", "varied", "value", "seconds", "memory")
        cells = [[getattr(r, name) for name in columns] for r in rows]
        write_whole(options.output / "scale.csv", Table("scale", "", columns, cells).csv().encode())
    solvers = list(dict.fromkeys(r.solver for r in rows))
    for varied, name in NAMES.items():
        lines_drawn = {
            s: ([r.value for r in found], [r.seconds * 1e3 for r in found])
            for s in solvers
            if (found := [r for r in select(rows, s, varied) if r.value > 0])
        }
        labels = (name, "milliseconds of a step")
        draw_lines("Time of a step", labels, lines_drawn, folder / f"scale-{varied}.png")
    memory = {
        s: (
            [r.value for r in select(rows, s, "N")],
            [r.memory / 2**20 for r in select(rows, s, "N")],
        )
        for s in solvers
    }
    labels = ("rows N", "peak memory, MiB")
    draw_lines("Peak memory", labels, memory, folder / "scale-N.png", log=False)


INTRODUCTION = """The time of a training step, and the memory of the process, as the data and the
mixture grow. `python benchmarks/scale.py` repeats it. Times are medians. The memory of a step is
the rise of the process's memory from before the mixture was made to its peak. The matrix products
of a step take `4 d K (l + 2)` floating-point operations per row, and the parameters `K d (l + 2)`
numbers."""


def measure(task: dict[str, Any]) -> None:
    """Print one measurement as a line of JSON."""
    torch.set_num_threads(task.pop("threads"))
    measures: dict[str, Any] = {"step": measure_step, "pass": measure_pass}
    print(json.dumps(measures[task.pop("task")](**task)))


@torch.no_grad()
def measure_step(
    solver: str, K: int, d: int, l: int, B: int, repeats: int, max_precision: float = 20.0
) -> dict[str, float]:
    """Return the median seconds of a step on B rows, and the memory above a bare start."""
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
        start = time.perf_counter()
        state, _ = step(plan, state, Batch(batches[i % 3]))
        times.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(times),
        "memory": peak_memory() - before,
        "components": len(state.parameters.means),
    }


def measure_pass(solver: str, path: str, K: int, l: int, B: int, seed: int = 0) -> dict[str, float]:
    """Return the seconds of one pass over a memory-mapped file, and the peak memory."""
    x = np.load(path, mmap_mode="r")
    start = time.perf_counter()
    MFA(K, l, solver=solver, batch_size=B, max_epochs=1, random_state=seed).fit(x)
    return {
        "seconds": time.perf_counter() - start,
        "memory": peak_memory(),
        "rows": len(x),
    }


if __name__ == "__main__":
    main()
