"""Measure training from data larger than memory, and streams that go on for a million batches.

    python benchmarks/stream.py --write-docs      # hours, and 30 GB of disk for a while
    python benchmarks/stream.py --quick           # a try in some minutes

Tables are made on the spot, of four times the memory that a process may have (``RLIMIT_DATA``), as
a memory map, a folder of Parquet files and a folder of safetensors shards. Speeds are rows per
second after the beginning of a run, against those of an array that fits into memory. Every
measurement is a trial with a result file of its own: a benchmark that was stopped goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np
from streamed import endless, files, speed

from factormix.files import make_folder, write_whole
from factormix.studies.harness import Result, Store, Table, Trial, read_results, run_trials
from factormix.views.plotting import save_figure
from factormix.views.plotting.style import new_figure, styled

ROOT = Path(__file__).resolve().parent.parent
FULL = {"bytes": 8 << 30, "limit": 2 << 30, "seconds": 60.0, "repeats": 3, "batches": 1_000_000}
QUICK = {"bytes": 160 << 20, "limit": 1 << 30, "seconds": 4.0, "repeats": 1, "batches": 2000}
MODEL = {"features": 256, "components": 49, "factors": 4, "batch_size": 1000, "epochs": 100}
SMALL = {"features": 8, "components": 4, "factors": 2, "batch_size": 32}
ENDLESS = (None, 0.02)
FORGETTING = (None, 0.005, 0.02, 0.1)
WANTED = 0.85
"""Share of the speed from memory that a source is to reach."""


@dataclass(frozen=True)
class Measured:
    """A finished trial with its arrays."""

    result: Result
    arrays: Mapping[str, Any]

    @property
    def trial(self) -> Trial:
        return self.result.trial

    def __getitem__(self, name: str) -> Any:
        return self.result[name]


def main() -> None:
    options = parse()
    store = Store(options.output / "trials")
    trials = plan(options)

    def tell(trial: Trial, failure: str | None) -> None:
        print(f"{trial.title}: {failure or 'done'}", flush=True)

    if not options.no_run:
        n_rows = options.bytes // (4 * MODEL["features"])
        for kind in files.KINDS:
            print(f"{files.write(kind, options.scratch, n_rows, MODEL['features']).name}: written")
        # One at a time and each in its own process: the limit on memory stays with it.
        run_trials(trials, store, jobs=1, threads=1, fresh=True, tell=tell)
    results = [Measured(one, store.arrays(one.trial)) for one in read_results(trials, store)]
    save(results, len(trials), options, options.output / "stream.md", options.output / "figures")
    print((options.output / "stream.md").read_text())
    if options.write_docs:
        docs = ROOT / "docs"
        save(results, len(trials), options, docs / "benchmarks-stream.md", docs / "benchmarks")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in FULL.items():
        parser.add_argument(f"--{name}", type=type(value), help=f"({value})")
    parser.add_argument("--scratch", type=Path, help="folder for the large files")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--no-run", action="store_true", help="use the results that exist")
    parser.add_argument("--write-docs", action="store_true", help="write docs/benchmarks-stream.md")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "benchmarks")
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.scratch = options.scratch or options.output / "scratch"
    return options


def plan(options: argparse.Namespace) -> list[Trial]:
    """List all measurements."""
    shared = {
        **MODEL,
        "rows": options.bytes // (4 * MODEL["features"]),
        "memory_bytes": min(options.bytes, 1 << 30),
        "limit": options.limit,
        "seconds": options.seconds,
        "scratch": str(options.scratch),
    }
    trials = [
        Trial("speed", f"{kind.replace(' ', '-')}-{i}", {"kind": kind, "i": i, **shared}, speed.run)
        for i in range(options.repeats)
        for kind in (speed.MEMORY, *files.KINDS)
    ]
    settings: dict[str, Any]
    for forgetting in ENDLESS:
        settings = {**SMALL, "batches": options.batches, "forgetting": forgetting}
        trials.append(Trial("endless", f"forgetting-{forgetting}", settings, endless.run_endless))
    for forgetting in FORGETTING:
        settings = {**SMALL, "batches": min(options.batches, 20_000), "forgetting": forgetting}
        settings["reach"] = 20.0
        trials.append(Trial("drift", f"forgetting-{forgetting}", settings, endless.run_drift))
    return trials


def save(
    results: Sequence[Measured], planned: int, options: argparse.Namespace, path: Path, folder: Path
) -> None:
    """Write the page, and its pictures into a folder."""
    make_folder(path.parent)
    make_folder(folder)
    described = machine.describe(1, 1, ("factormix", "torch", "numpy", "pyarrow"))
    described["command"] = (
        f"`python benchmarks/stream.py --bytes {options.bytes} --limit {options.limit}"
        f" --seconds {options.seconds:g} --repeats {options.repeats} --batches {options.batches}`"
    )
    parts = ["# Streams and data larger than memory", "Written by `benchmarks/stream.py`."]
    if len(results) < planned:
        parts.append(f"**{planned - len(results)} of {planned} trials are not finished.**")
    draws = {"speed": draw_memory, "endless": draw_endless, "drift": draw_drift}
    for experiment, tell in {"speed": speeds, "endless": endlessly, "drift": drifts}.items():
        some = [one for one in results if one.trial.experiment == experiment]
        if some:
            picture = folder / f"stream-{experiment}.png"
            save_figure(draws[experiment](some), picture)
            parts += [tell(some, options), f"![{experiment}]({folder.name}/{picture.name})"]
    parts.append(machine.fold_of(described))
    write_whole(path, ("\n\n".join(parts) + "\n").encode())


def speeds(results: Sequence[Measured], options: argparse.Namespace) -> str:
    """Compare the sources with memory."""
    by_kind = {
        kind: [one for one in results if one.trial.settings["kind"] == kind]
        for kind in (speed.MEMORY, *files.KINDS)
    }
    base = _median(by_kind[speed.MEMORY], "rows_per_second")
    rows = []
    for kind, some in by_kind.items():
        if some:
            rate = _median(some, "rows_per_second")
            flat = max(_growth(one) for one in some)
            verdict = "" if kind == speed.MEMORY else "yes" if rate >= WANTED * base else "no"
            rows.append([
                kind, f"{rate:,.0f}", f"{100 * rate / base:.0f}%", verdict,
                f"{_median(some, 'seconds_before'):.1f}", f"{_median(some, 'peak') / 2**20:,.0f}",
                f"{flat / 2**20:+,.0f}",
            ])  # fmt: skip
    names = ["source", "rows/s", "of memory", f"at least {WANTED:.0%}", "seconds before"]
    names += ["peak MiB", "growth MiB"]
    text = (
        f"## From {options.bytes / 2**30:.3g} GiB with {options.limit / 2**30:.3g} GiB of"
        f" memory\n\nK = {MODEL['components']}, d = {MODEL['features']}, l = {MODEL['factors']},"
        f" batches of {MODEL['batch_size']}, float32, one thread. The array in memory is at most"
        " 1 GiB and has no limit. *Seconds before* is what opening, checking and the sample take;"
        " *peak* is memory that no file backs; *growth* is that of the last fifth of a run over its"
        " second fifth.\n\n"
    )
    return text + Table("speed", "", names, rows).markdown()


def endlessly(results: Sequence[Measured], options: argparse.Namespace) -> str:
    """Say whether anything grows or breaks."""
    looks = results[0].arrays["looks"]
    tenth = max(1, len(looks) // 10)
    first, last = looks[tenth : 2 * tenth].mean(axis=0), looks[-tenth:].mean(axis=0)
    return (
        f"## {int(looks[-1, 0]):,} batches of partial_fit\n\n"
        f"K = {SMALL['components']}, d = {SMALL['features']}, l = {SMALL['factors']}, batches of"
        f" {SMALL['batch_size']}. From the second tenth of the run to the last: memory"
        f" {first[2] / 2**20:.1f} to {last[2] / 2**20:.1f} MiB, a batch {1e3 * first[1]:.2f} to"
        f" {1e3 * last[1]:.2f} ms, held-out log-likelihood {first[3]:.4f} to {last[3]:.4f} (lowest"
        f" {looks[tenth:, 3].min():.4f}). Invariants that did not hold at {len(looks)} looks:"
        f" {int(looks[:, 4].sum())}."
    )


def drifts(results: Sequence[Measured], options: argparse.Namespace) -> str:
    """Compare rates of forgetting on a stream that wanders."""
    rows = [
        [str(one.trial.settings["forgetting"]), f"{one['last']:.3f}", f"{one['best']:.3f}"]
        for one in results
    ]
    names = ["forgetting", "log-likelihood before learning, last fifth", "of the true density"]
    text = (
        f"## A stream that drifts\n\nClusters stand still for a fifth of"
        f" {results[0].trial.settings['batches']:,} batches and then wander.\n\n"
    )
    return text + Table("drift", "", names, rows).markdown()


@styled
def draw_memory(results: Sequence[Measured]) -> Any:
    """Draw memory over time."""
    figure = new_figure(7, 3.6)
    panel = figure.subplots()
    shown = set()
    for one in results:
        kind = one.trial.settings["kind"]
        if kind not in shown:
            memory = one.arrays["memory"]
            panel.plot(memory[:, 0], memory[:, 1] / 2**20, label=kind)
            shown.add(kind)
    panel.set(xlabel="seconds", ylabel="memory that no file backs, MiB", ylim=(0, None))
    panel.legend()
    panel.grid(True)
    return figure


@styled
def draw_endless(results: Sequence[Measured]) -> Any:
    """Draw memory, time of a batch and likelihood over a long stream."""
    looks = results[0].arrays["looks"]
    figure = new_figure(11, 3.2)
    names = ("a batch, ms", "resident memory, MiB", "held-out log-likelihood")
    for panel, name, column, scale in zip(
        figure.subplots(1, 3), names, (1, 2, 3), (1e3, 2**-20, 1.0), strict=True
    ):
        panel.plot(looks[:, 0], looks[:, column] * scale)
        panel.set(xlabel="batches", title=name)
        if column < 3:
            panel.set_ylim(0, 1.2 * (looks[:, column] * scale).max())
        panel.grid(True)
    return figure


@styled
def draw_drift(results: Sequence[Measured]) -> Any:
    """Draw scores before learning over a stream that wanders."""
    figure = new_figure(7, 3.6)
    panel = figure.subplots()
    for one in results:
        curve = one.arrays["curve"]
        share = np.arange(1, len(curve) + 1) / len(curve)
        panel.plot(share, curve, label=f"forgetting {one.trial.settings['forgetting']}")
    best = results[0]["best"]
    panel.axhline(best, linestyle=":", color="black", label="true density")
    panel.set(xlabel="share of the stream", ylabel="mean score before learning")
    panel.set_ylim(best - 8, best + 1)
    panel.legend()
    panel.grid(True)
    return figure


def _growth(one: Measured) -> float:
    memory = one.arrays["memory"][:, 1]
    fifth = max(1, len(memory) // 5)
    return float(memory[-fifth:].mean() - memory[fifth : 2 * fifth].mean())


def _median(results: Sequence[Measured], name: str) -> float:
    return float(np.median([one[name] for one in results]))


if __name__ == "__main__":
    main()
