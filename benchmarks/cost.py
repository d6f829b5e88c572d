"""Measure the cost of a step, check the cost model at other sizes, and predict large runs by it.

    python benchmarks/cost.py --write-docs        # minutes; writes docs/scale.md
    python benchmarks/cost.py --quick             # a try in seconds

The model has a constant for each kind of work. The constants are fitted to steps of some sizes and
compared with steps of four others. Times are processor seconds in one thread, which other work on
the machine disturbs little. Every size is a trial in its own process.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import DOCS, describe_machine, fold_description, make_parser, parse_options, peak_memory
from harness import (
    Outcome,
    Settings,
    Store,
    Table,
    Trial,
    read_results,
    run_trials,
)
from many_trials import FLOOR, RATE, draw_rows, make_mixture
from scipy.optimize import nnls

from factormix.core.arrays import Workspace
from factormix.core.averages import StepOptions, natural_step, rotate_averages
from factormix.core.expectation import FEW_FEATURES, expected_statistics
from factormix.core.screening import CandidateSearch, make_screen, update_screen_
from factormix.core.statistics import Tuning
from factormix.files import make_folder, write_whole

NAMES = ("K", "d", "l", "B")
DENSE = (
    (100, 256, 4, 1000),
    (400, 256, 4, 1000),
    (100, 1024, 4, 1000),
    (100, 256, 10, 1000),
    (400, 512, 4, 250),
    (1600, 256, 4, 500),
)
DENSE_CHECKS = (
    (200, 512, 6, 2000),
    (800, 512, 10, 1000),
    (400, 2048, 10, 1000),
    (1600, 1024, 4, 1000),
)
FEW = (
    (1600, 256, 4, 4000),
    (6400, 256, 4, 4000),
    (1600, 1024, 4, 2000),
    (1600, 256, 10, 4000),
    (6400, 512, 4, 1000),
    (12800, 128, 4, 4000),
)
FEW_CHECKS = (
    (3200, 512, 4, 4000),
    (3200, 1024, 10, 2000),
    (12800, 256, 4, 2000),
    (6400, 768, 6, 4000),
)
QUICK = ((20, 16, 2, 200), (40, 16, 2, 100), (20, 32, 2, 200), (20, 16, 4, 200))
CANDIDATES = 192
"""Components evaluated for each block of rows, in the model and in its measurements."""
LARGE = {"K": 32_000, "d": 4096, "l": 10}
ROWS = 10**9


@dataclass(frozen=True)
class Cluster:
    """Processes that train together. Numbers of other machines are assumptions."""

    name: str
    ranks: int
    speed: float
    """Multiple of the speed of one thread here, in products and in memory alike."""
    network: float
    """Bytes per second that a rank sends and receives."""
    disk: float
    """Bytes per second that a rank reads."""
    batch: int
    """Rows of a step over all ranks."""


CLUSTERS = (
    Cluster("this machine, 2 processes", 2, 1, 2e9, 1e9, 4000),
    Cluster("32 machines of 32 such cores, 10 Gbit/s", 32, 32, 1.25e9, 5e8, 16_000),
    Cluster("8 GPUs of 100 times a core, one machine", 8, 100, 2e11, 2e9, 16_000),
    Cluster("64 GPUs of 100 times a core, 200 Gbit/s", 64, 100, 2.5e10, 1e9, 64_000),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    store = Store(options.output / "cost")
    sizes = {
        ("dense", "fit"): QUICK if options.quick else DENSE,
        ("dense", "check"): QUICK if options.quick else DENSE_CHECKS,
        ("few", "fit"): QUICK if options.quick else FEW,
        ("few", "check"): QUICK if options.quick else FEW_CHECKS,
    }
    repeats = 2 if options.quick else options.repeats
    trials = {
        key: [plan_trial(key[0], size, repeats) for size in some] for key, some in sizes.items()
    }
    if not options.no_run:
        everything = [one for some in trials.values() for one in some]
        failed = run_trials(everything, store, jobs=1, threads=1, fresh=not options.quick)
        if failed:
            raise SystemExit(f"these sizes failed: {failed}")
    found = {key: _read(store, some) for key, some in trials.items()}
    page = compose(found, repeats)
    print(page)
    make_folder(options.output)
    write_whole(options.output / "scale-costs.md", page.encode())
    if options.write_docs:
        write_whole(DOCS / "scale.md", page.encode())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "docs/scale.md")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each size; the median")
    parser.add_argument("--no-run", action="store_true", help="use the results that exist")
    options = parse_options(parser, arguments)
    return options


def plan_trial(kind: str, size: Sequence[int], repeats: int) -> Trial:
    """Plan the measurement of one size."""
    settings = {**dict(zip(NAMES, size, strict=True)), "kind": kind, "repeats": repeats}
    return Trial(kind, "-".join(map(str, size)), settings, time_step)


def _read(store: Store, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return settings and values of trials, an empty list unless all are finished."""
    results = read_results(trials, store)
    if len(results) < len(trials):
        return []
    return [{**result.trial.settings, **result.values} for result in results]


@torch.inference_mode()
def time_step(settings: Settings, data_folder: str | None) -> Outcome:
    """Time natural steps by all components or by few, and measure the memory of the process."""
    K, d, l, B = (settings[name] for name in NAMES)
    bound, work, state = torch.full((d,), 1e3), Workspace(), list[Any]()
    before = peak_memory()
    state[:] = rotate_averages(make_mixture(K, d, l), bound, FLOOR)
    x = draw_rows(state[1], B, 1)
    few = None
    if settings["kind"] == "few":
        few = CandidateSearch(make_screen(state[1]), min(CANDIDATES, K // 2))
    seconds, touched = [], K
    for i in range(settings["repeats"] + 1):
        start = time.process_time()
        if few is None:
            # All pairs of a row and a component: every step is the same work.
            dense = Tuning(pair_cost=math.inf)
            statistics_ = expected_statistics(state[1], x, work=work, tuning=dense)
        else:
            statistics_ = expected_statistics(state[1], x, search=few, work=work)
        state[:] = natural_step(*state, statistics_, StepOptions(RATE, bound, FLOOR))
        if few is not None:
            update_screen_(few.screen, state[1], statistics_.sums.touched)
        if i:
            seconds.append(time.process_time() - start)
        touched = K if statistics_.sums.touched is None else len(statistics_.sums.touched)
    values = {"seconds": statistics.median(seconds), "touched": touched}
    # Tiny sizes may fit into memory that the process holds already: count a page at least.
    return Outcome(values | {"memory": max(resource.getpagesize(), peak_memory() - before)})


def count_work(one: dict[str, Any]) -> dict[str, float]:
    """Count the work of a step by kind: the multipliers of the constants."""
    K, d, l, B = (one[name] for name in NAMES)
    if one["kind"] == "dense":
        return {
            "products": 4.0 * B * d * K * (l + 2),
            "elements": float(B * K * (l + 2)),
            "parameters": float(K * d * (l + 2)),
        }
    C, T = min(CANDIDATES, K // 2), one.get("touched", min(K, B))
    return {
        "products": 2.0 * B * d * C * (l + 2),
        "screen": float(B * K),
        "parameters": float(T * d * (l + 2)),
        "components": float(K * d),
    }


def count_memory(one: dict[str, Any]) -> dict[str, float]:
    """Count the bytes of a step, by kind."""
    K, d, l, B = (one[name] for name in NAMES)
    counts = {"fixed": 2.0**20, "parameters": 4.0 * K * d * (l + 2), "rows": 4.0 * B * d}
    if one["kind"] == "dense":
        return counts | {"pairs": 4.0 * _count_block_rows(K, d, l, B) * K * (l + 2)}
    T = one.get("touched", min(K, B))
    return counts | {"touched": 4.0 * T * d * (l + 2), "screened": 4.0 * B * K}


def _count_block_rows(K: int, d: int, l: int, B: int) -> int:
    """Count the rows of a block: ``expected_statistics`` computes a batch in blocks."""
    elements, most = B * K * (l + 1), Tuning().responsibilities
    if d > FEW_FEATURES or elements <= most:
        return B
    return min(B, max(64, math.ceil(B / math.ceil(elements / most))))


def fit_constants(some: Sequence[dict[str, Any]], counts: Any, value: str) -> dict[str, float]:
    """Fit non-negative constants by least squares of relative errors."""
    names = list(counts(some[0]))
    table = np.array([[counts(one)[name] / one[value] for name in names] for one in some])
    scale = table.max(axis=0)
    found, _ = nnls(table / scale, np.ones(len(some)))
    return dict(zip(names, found / scale, strict=True))


def predict(constants: dict[str, float], counts: dict[str, float]) -> float:
    """Apply the model: sum constants times counts."""
    return sum(constants[name] * count for name, count in counts.items())


def predict_pass(
    cluster: Cluster, kind: str, constants: dict[str, float], memory: dict[str, float]
) -> dict[str, float]:
    """Predict one pass over all rows, with the components distributed over all ranks."""
    K, d = LARGE["K"] // cluster.ranks, LARGE["d"]
    one = {**LARGE, "K": K, "B": cluster.batch, "kind": kind}
    if kind == "few":
        # Candidates come from all components: each rank evaluates its share of them.
        counts = count_work(one | {"touched": min(K, cluster.batch)})
        counts["products"] *= min(1.0, CANDIDATES / cluster.ranks / min(CANDIDATES, K // 2))
    else:
        counts = count_work(one)
    steps = ROWS / cluster.batch
    compute = steps * predict(constants, counts) / cluster.speed
    # Four numbers of each row to each other rank; every rank reads all rows.
    exchanged = steps * cluster.batch * 16 * (cluster.ranks - 1)
    return {
        "compute": compute,
        "exchange": exchanged / cluster.network,
        "read": ROWS * d * 2 / cluster.disk,
        "by_data": steps * 2 * 4 * LARGE["K"] * d * (LARGE["l"] + 2) / cluster.network,
        "memory": predict(memory, count_memory(one)),
    }


def compose(found: dict[tuple[str, str], list[dict[str, Any]]], repeats: int) -> str:
    """Compose the page."""
    parts = [INTRODUCTION]
    constants, memory = {}, {}
    for kind, title in TITLES.items():
        fits = found[kind, "fit"]
        if not fits or not found[kind, "check"]:
            parts += [f"## {title}", f"{EXPLAINED[kind]} **Its constants are not measured yet.**"]
            continue
        constants[kind] = fit_constants(fits, count_work, "seconds")
        memory[kind] = fit_constants(fits, count_memory, "memory")
        parts += [f"## {title}", EXPLAINED[kind], _constants(constants[kind], memory[kind])]
        checks = found[kind, "check"]
        parts.append("Compared with four sizes that the constants were not fitted to:")
        parts.append(_checked(checks, constants[kind], memory[kind]))
    parts += ["## Reading and exchange", EXCHANGED]
    parts += [PREDICTION, _predictions(constants, memory)]
    parts.append(fold_description({**describe_machine(1), "steps of each size": str(repeats)}))
    return "\n\n".join(parts) + "\n"


def _constants(times: dict[str, float], memory: dict[str, float]) -> str:
    rows = [[UNITS[name], f"{value:.3g}"] for name, value in times.items()]
    if times.get("products"):
        rows.append(["the same in GFLOP/s of the products", f"{1e-9 / times['products']:.0f}"])
    rows += [[f"memory, {MEMORY[name]}", f"{value:.2f}"] for name, value in memory.items()]
    return Table("constants", "", ["what", "constant"], rows).markdown()


def _checked(
    checks: Sequence[dict[str, Any]], times: dict[str, float], memory: dict[str, float]
) -> str:
    rows = []
    for one in checks:
        seconds, bytes_ = predict(times, count_work(one)), predict(memory, count_memory(one))
        rows.append([
            *(f"{one[name]:,}" for name in NAMES), f"{1e3 * one['seconds']:,.0f}",
            f"{1e3 * seconds:,.0f}", f"{seconds / one['seconds']:.2f}",
            f"{one['memory'] / 2**20:,.0f}", f"{bytes_ / one['memory']:.2f}",
        ])  # fmt: skip
    head = [*NAMES, "step, ms", "model, ms", "model / step", "memory, MiB", "model / memory"]
    return Table("checks", "", head, rows).markdown()


def _predictions(
    constants: dict[str, dict[str, float]], memory: dict[str, dict[str, float]]
) -> str:
    rows = []
    for cluster in CLUSTERS:
        for kind, title in (("dense", "all"), ("few", f"{CANDIDATES} candidates")):
            if kind not in constants:
                continue
            one = predict_pass(cluster, kind, constants[kind], memory[kind])
            rows.append([
                cluster.name, title, f"{cluster.batch:,}", _time(one["compute"]),
                _time(one["exchange"]), _time(one["read"]), _time(one["by_data"]),
                f"{one['memory'] / 2**30:.1f}",
            ])  # fmt: skip
    head = ["cluster", "components evaluated", "batch", "computing", "exchanging", "reading"]
    head += ["exchanging if divided by data", "GiB per rank"]
    return Table("predictions", "", head, rows).markdown()


def _time(seconds: float) -> str:
    for unit, size in (("years", 365 * 86400), ("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


TITLES = {"dense": "A step by all components", "few": "A step by few of many components"}
UNITS = {
    "products": "s per floating-point operation of the products",
    "elements": "s per number of `B K (l + 2)`: densities, responsibilities, latent means",
    "parameters": "s per number of `K d (l + 2)` that the update writes",
    "screen": "s per pair of a row and a component that is screened",
    "components": "s per number of `K d`: weights, and the upkeep of the screen",
}
MEMORY = {
    "fixed": "MiB of the libraries, for all sizes",
    "parameters": "copies of `K d (l + 2)` numbers: parameters, averages, statistics",
    "rows": "copies of `B d` numbers: rows and their squares",
    "pairs": "copies of `b K (l + 2)` numbers: densities of b rows at once",
    "touched": "copies of `T d (l + 2)` numbers: the updated components",
    "screened": "copies of `B K` numbers: the ranks of the screen",
}
INTRODUCTION = """# What a run costs

A model of the cost of training with the solver `natural`: operations, bytes read, bytes exchanged
and memory per process. `python benchmarks/cost.py --write-docs` measures its constants in one
thread, compares it with other sizes, and writes this page. K components, d features, l factors,
batches of B rows, R processes; numbers are float32."""
EXPLAINED = {
    "dense": """Every row is evaluated against every component (`candidates=None`), and every pair
is summed. The products of the densities and of the statistics take `4 B d K (l + 2)` operations.
The memory is the rise of the process to its peak: parameters, running averages and statistics of
`K d (l + 2)` numbers each, the rows, and some numbers for each pair.""",
    "few": f"""With `candidates`, a screen on 16 directions ranks all components, each row is
evaluated against C = {CANDIDATES} of them, and only the T components that some row touched are
updated. The products take about `2 B d C (l + 2)` operations. Rows and mixture are random here, and
T is measured.""",
}
EXCHANGED = """A pass reads every row once: `N d` numbers, in the dtype of the file (float16 is two
bytes). `.npy` files are also read once before training, to look for infinite values.

- **Divided by data**, each process sums the statistics of its part of the components, updates them
  and sends them to the others. Each process sends and receives less than twice
  `K (d (l + 2) + (l + 1)^2)` numbers, for any B. If a batch touches only some of the components, K
  is their number.
- **Divided by component**, each process sends every other process two numbers for each row, or four
  while the use of components is watched: at most `16 B (R - 1)` bytes a step, for any K, d and l.

Dividing components divides the memory per process by R; dividing data does not."""
PREDICTION = f"""## A prediction: K = {LARGE["K"]:,}, d = {LARGE["d"]:,}, l = {LARGE["l"]}

**None of this was run.** It is the model above, for one pass over {ROWS:,} rows with the components
divided over all processes, with the constants of this machine and these assumptions: every rank has
the stated multiple of the speed of one thread here, in products and in memory alike; 2 GB/s between
processes of one machine and 200 GB/s between GPUs of one machine; each rank reads all rows, in
float16, at 0.5 to 2 GB/s. The parameters are {LARGE["K"] * LARGE["d"] * 12 / 1e9:.2f} billion
numbers. At best, reading and exchanging overlap with computing. The last column but one shows why
components are divided here, and not data. With candidates, the model assumes a mixture as easy to
screen as the measured one, and that each rank evaluates its share of the candidates."""


if __name__ == "__main__":
    main()
