"""Show how the time of a step and the peak memory grow with N, d, l and K.

    python benchmarks/scale.py                # about ten minutes, and 8 GB of disk for a while
    python benchmarks/scale.py --quick        # a try in a minute

Each measurement runs in a process of its own. One of the sizes K, d, l varies at a time; for N,
one pass is made over memory-mapped files of growing size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
import machine
import numpy as np

from factormix.files import make_folder, write_whole
from factormix.solvers import SOLVERS
from factormix.studies.harness import Table, folded

ROOT = Path(__file__).resolve().parent.parent
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


@dataclass(frozen=True)
class Row:
    """A measurement."""

    solver: str
    varied: str
    """K, d, l or N."""
    value: int
    seconds: float
    """Of a step; of a pass for N."""
    memory: int
    """Bytes above a bare start; in all for N."""


def main() -> None:
    options = parse()
    solvers = [name for name in options.solvers if name in SOLVERS]
    for name in options.solvers:
        if name not in SOLVERS:
            print(f"the solver {name!r} is left out: factormix has none of that name here.")
    rows = [row for name in solvers for row in measure_steps(name, options)]
    rows += measure_passes(solvers, options)
    text = compose(rows, options, "figures")
    print(text)
    save(rows, options, options.output / "scale.md", options.output / "figures", "figures")
    if options.write_docs:
        docs = ROOT / "docs"
        save(rows, options, docs / "benchmarks-scale.md", docs / "benchmarks", "benchmarks")
        print("docs/benchmarks-scale.md is written.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--solvers", type=lambda t: t.split(","), default=["natural", "sgd"])
    parser.add_argument("--repeats", type=int, default=None, help="steps per median; default 15")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--scratch", type=Path, help="folder for the large files")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--write-docs", action="store_true", help="write docs/benchmarks-scale.md")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "benchmarks")
    options = parser.parse_args()
    if options.quick and options.write_docs:
        parser.error("--quick is too small for docs/benchmarks-scale.md: leave out one of the two")
    options.repeats = options.repeats or (3 if options.quick else 15)
    options.base = QUICK_BASE if options.quick else BASE
    options.varied = QUICK_VARIED if options.quick else VARIED
    options.file_bytes = QUICK_FILE_BYTES if options.quick else FILE_BYTES
    return options


def measure_steps(solver: str, options: argparse.Namespace) -> Iterator[Row]:
    """Time a step and take its memory, with one size varied at a time."""
    for varied, values in options.varied.items():
        for value in values:
            size = options.base | {varied: value}
            found = measure(
                {"task": "step", "solver": solver, "repeats": options.repeats, **size}, options
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
                found = measure(task, options)
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
        for begun in range(0, total, block_rows):
            file.write(block[: total - begun].data)


def measure(task: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = os.environ | dict.fromkeys(threads, str(options.threads))
    script = str(Path(__file__).with_name("growth.py"))
    described = json.dumps(task | {"threads": options.threads})
    done = subprocess.run(
        [sys.executable, script, described],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def exponent(rows: Sequence[Row]) -> float:
    """Return the slope of log time against log size over the upper half of the sizes; the size of
    l is l + 2, as in the cost of a step.
    """
    first, last = rows[(len(rows) - 1) // 2], rows[-1]
    if first.value == last.value:
        return math.nan
    sizes = [r.value + 2 * (r.varied == "l") for r in (first, last)]
    return math.log(last.seconds / first.seconds) / math.log(sizes[1] / sizes[0])


def compose(rows: Sequence[Row], options: argparse.Namespace, pictures: str) -> str:
    """Compose the page."""
    solvers = list(dict.fromkeys(r.solver for r in rows))
    parts = ["# Benchmarks: scale", INTRODUCTION, "## Verdict", verdict(rows, options, solvers)]
    for varied in options.varied:
        fixed = ", ".join(f"{k} = {v}" for k, v in options.base.items() if k != varied)
        parts += [f"## Growth with {NAMES[varied]}", f"{fixed}, with B the rows of a batch."]
        parts.append(f"![Time of a step against {varied}]({pictures}/scale-{varied}.png)")
        parts.append(folded("Numbers", step_table(rows, varied, solvers, options)))
    parts += ["## Growth with rows N", pass_text(options)]
    parts.append(f"![Peak memory against N]({pictures}/scale-N.png)")
    parts.append(folded("Numbers", pass_table(rows, solvers)))
    parts.append(machine.fold_of(machine.describe(options.threads)))
    return "\n\n".join(parts) + "\n"


def verdict(rows: Sequence[Row], options: argparse.Namespace, solvers: Sequence[str]) -> str:
    """Say in a list what the time and the memory grow with."""
    lines = []
    for varied in options.varied:
        of = "l + 2" if varied == "l" else varied
        slopes = ", ".join(f"{s} {exponent(select(rows, s, varied)):.2f}" for s in solvers)
        lines.append(f"- Power of {of} that the time grows with over the upper half: {slopes}.")
    lines += [f"- {memory_line(select(rows, solver, 'N'))}" for solver in solvers]
    return "\n".join(lines)


def select(rows: Sequence[Row], solver: str, varied: str) -> list[Row]:
    return [r for r in rows if r.solver == solver and r.varied == varied]


def step_table(
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


def pass_text(options: argparse.Namespace) -> str:
    size = ", ".join(f"{k} = {v}" for k, v in PASS.items())
    return f"One pass over a memory-mapped file of float32 rows, d = {options.base['d']}, {size}."


def pass_table(rows: Sequence[Row], solvers: Sequence[str]) -> str:
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


def memory_line(rows: Sequence[Row]) -> str:
    """Compare the peak memory of the largest file with that of the smallest."""
    ratio = rows[-1].memory / rows[0].memory
    met = abs(ratio - 1) <= MEMORY_TOLERANCE
    return (
        f"Peak memory of `{rows[0].solver}` with {rows[-1].value / rows[0].value:.0f} times the"
        f" rows: {ratio:.3f} times as much; target within {MEMORY_TOLERANCE:.0%}:"
        f" {'met' if met else '**not met**'}."
    )


def save(
    rows: Sequence[Row], options: argparse.Namespace, page: Path, folder: Path, pictures: str
) -> None:
    """Write the page, its pictures and, beside the page's results, a CSV file."""
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
        figures.draw_lines("Time of a step", labels, lines_drawn, folder / f"scale-{varied}.png")
    memory = {
        s: (
            [r.value for r in select(rows, s, "N")],
            [r.memory / 2**20 for r in select(rows, s, "N")],
        )
        for s in solvers
    }
    labels = ("rows N", "peak memory, MiB")
    figures.draw_lines("Peak memory", labels, memory, folder / "scale-N.png", log=False)


INTRODUCTION = """The time of a training step, and the memory of the process, as the data and the
mixture grow. `python benchmarks/scale.py` repeats it. Times are medians; the memory of a step is
what the process held at most above what it held before the mixture was made. The matrix products
of a step take `4 d K (l + 2)` floating-point operations per row, and the parameters
`K d (l + 2)` numbers."""


if __name__ == "__main__":
    main()
