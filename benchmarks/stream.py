"""Measure training from data larger than memory, and on streams of a million batches.

    python benchmarks/stream.py --write-docs      # an hour or more, and 34 GB of disk
    python benchmarks/stream.py --only speed      # one of speed, endless and drift
    python benchmarks/stream.py --quick           # a try in some minutes

The script writes tables of four times the memory that a process may use: a memory map, folders of
Parquet files and a folder of safetensors shards. A control group limits the memory, and counts the
pages of files that the kernel caches too. Speeds are rows per second after the start of a run, and
are compared with an array that fits into memory. Every measurement is a trial with its own result
file, so a benchmark that was interrupted continues where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import DOCS, describe_machine, fold_description, make_parser, parse_options, print_trial
from harness import Result, Store, Table, Trial, read_results, run_trials
from stream_trials import KINDS, MEMORY, run_drift, run_endless, run_speed, write_rows

from factormix.files import make_folder, write_whole
from factormix.views.plotting import save_figure
from factormix.views.plotting.drawing import new_figure, styled

FULL = {"bytes": 8 << 30, "limit": 2 << 30, "seconds": 20.0, "repeats": 1, "batches": 1_000_000}
QUICK = {"bytes": 160 << 20, "limit": 1 << 30, "seconds": 4.0, "repeats": 1, "batches": 2000}
MODEL = {"features": 256, "factors": 4, "batch_size": 1000, "epochs": 100}
COMPONENTS = (200, 49)
"""A realistic and a light load; all five sources run with each."""
THREADS = (None, 1)
"""Threads of training: all cores, which reading then shares, or one."""
SMALL = {"features": 8, "components": 4, "factors": 2, "batch_size": 32}
ENDLESS = (None, 0.02)
FORGETTING = (None, 0.005, 0.02, 0.1)
EXPERIMENTS = ("speed", "endless", "drift")
WANTED = 0.85
"""Share of the speed from memory that is the target of a source."""
LEVEL = 1.1
"""Largest ratio of the end of a long run to its start at which memory and time count as level."""


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


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    store = Store(options.output / "trials")
    trials = plan(options)

    if not options.no_run:
        if "speed" in options.only:
            n_rows, d = options.bytes // (4 * MODEL["features"]), MODEL["features"]
            for kind in KINDS:
                print(f"{write_rows(kind, options.scratch, n_rows, d).name}: written", flush=True)
        for threads in THREADS:
            some = [one for one in trials if one.settings.get("threads", 1) == threads]
            # One at a time, each in its own process: the limit on memory belongs to the process.
            chosen = [one for one in some if one.experiment in options.only]
            run_trials(chosen, store, jobs=1, threads=threads, fresh=True, on_finish=print_trial)
    results = [Measured(one, store.arrays(one.trial)) for one in read_results(trials, store)]
    save(results, len(trials), options, options.output / "stream.md", options.output / "figures")
    print((options.output / "stream.md").read_text())
    if options.write_docs:
        save(results, len(trials), options, DOCS / "benchmarks-stream.md", DOCS / "benchmarks")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "docs/benchmarks-stream.md")
    for name, value in FULL.items():
        parser.add_argument(f"--{name}", type=type(value), help=f"({value})")
    parser.add_argument("--scratch", type=Path, help="folder for the large files")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS)
    parser.add_argument("--no-run", action="store_true", help="use the results that exist")
    options = parse_options(parser, arguments)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.scratch = options.scratch or options.output / "scratch"
    options.components = COMPONENTS
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
    trials = list[Trial]()
    for i, threads, components, kind in product(
        range(options.repeats), THREADS, options.components, (MEMORY, *KINDS)
    ):
        own = {"kind": kind, "i": i, "threads": threads, "components": components}
        name = f"{kind.replace(' ', '-')}-{components}-{threads or 'all'}-{i}"
        trials.append(Trial("speed", name, {**shared, **own}, run_speed))
    settings: dict[str, Any]
    for forgetting in ENDLESS:
        settings = {**SMALL, "batches": options.batches, "forgetting": forgetting}
        trials.append(Trial("endless", f"forgetting-{forgetting}", settings, run_endless))
    for forgetting in FORGETTING:
        settings = {**SMALL, "batches": min(options.batches, 20_000), "forgetting": forgetting}
        settings["reach"] = 100.0
        trials.append(Trial("drift", f"forgetting-{forgetting}", settings, run_drift))
    return trials


def save(
    results: Sequence[Measured], planned: int, options: argparse.Namespace, path: Path, folder: Path
) -> None:
    """Write the page, and its pictures into a folder."""
    make_folder(path.parent)
    make_folder(folder)
    description = describe_machine(1, 1, ("factormix", "torch", "numpy", "pyarrow"))
    description["command"] = (
        f"`python benchmarks/stream.py --bytes {options.bytes} --limit {options.limit}"
        f" --seconds {options.seconds:g} --repeats {options.repeats} --batches {options.batches}`"
    )
    parts = ["# Streams and data larger than memory", "Written by `benchmarks/stream.py`."]
    if len(results) < planned:
        parts.append(f"**{planned - len(results)} of {planned} trials are not finished.**")
    draws = {"speed": draw_memory, "endless": draw_endless, "drift": draw_drift}
    describes = {"speed": describe_speed, "endless": describe_endless, "drift": describe_drift}
    for experiment, describe in describes.items():
        some = [one for one in results if one.trial.experiment == experiment]
        if some:
            picture = folder / f"stream-{experiment}.png"
            save_figure(draws[experiment](some, options), picture)
            parts += [describe(some, options), f"![{experiment}]({folder.name}/{picture.name})"]
    parts.append(fold_description(description))
    write_whole(path, ("\n\n".join(parts) + "\n").encode())


def describe_speed(results: Sequence[Measured], options: argparse.Namespace) -> str:
    """Compare the sources with memory."""
    rows = []
    for components, threads in product(options.components, THREADS):
        by_kind = {
            kind: [one for one in results if _matches(one, kind, components, threads)]
            for kind in (MEMORY, *KINDS)
        }
        if by_kind[MEMORY]:
            rows += _compare_sources(by_kind, [str(components), str(threads or "all")])
    names = ["K", "threads", "source", "rows/s", "of memory", f"at least {WANTED:.0%}"]
    names += ["seconds before", "peak MiB", "growth MiB"]
    how = {one["limited_by"] for one in results} - {"none"}
    charged = max((one["charged"] for one in results if one["charged"] > 0), default=0.0)
    text = (
        f"## From {options.bytes / 2**30:.3g} GiB with {options.limit / 2**30:.3g} GiB of"
        f" memory\n\nd = {MODEL['features']}, l = {MODEL['factors']}, batches of"
        f" {MODEL['batch_size']}, float32, {options.seconds:g} seconds each. Memory is limited by:"
        f" {', '.join(sorted(how)) or 'nothing'}. A control group also counts the pages of files"
        f" that the kernel caches (at most {charged / 2**20:,.0f} MiB were charged); no page was"
        " cached at the start of a run. The array in memory is at most 1 GiB and has no limit."
        " *Seconds before* is the time for opening, checking and sampling. *Peak* is memory that"
        " no file backs. *Growth* is the rise from the second fifth of the training to the last."
        " With all threads, reading and training share the cores.\n\n"
    )
    return text + judge_speed(rows) + Table("speed", "", names, rows).markdown()


def judge_speed(rows: Sequence[Sequence[str]]) -> str:
    """Name the sources that are too slow, and the largest growth of memory."""
    judged = [row for row in rows if row[5]]
    if not judged:
        return ""
    slow = [f"{row[2]} (K = {row[0]}, {row[1]} threads: {row[4]})" for row in judged
            if row[5] == "no"]  # fmt: skip
    reached = f"{len(judged) - len(slow)} of {len(judged)} runs from files reach {WANTED:.0%} of"
    missed = f"; not {', '.join(slow)}" if slow else ""
    most = max(float(row[-1].replace(",", "")) for row in judged)
    grew = f"Memory grows by {most:.1f} MiB at most" if most > 0 else "Memory grows nowhere"
    return f"**{reached} the speed from memory{missed}.** {grew}.\n\n"


def _matches(one: Measured, kind: str, components: int, threads: int | None) -> bool:
    settings = one.trial.settings
    wanted = {"kind": kind, "components": components, "threads": threads}
    return all(settings[name] == value for name, value in wanted.items())


def _compare_sources(by_kind: Mapping[str, Sequence[Measured]], head: list[str]) -> list[list[str]]:
    """Make a row for each source, relative to the speed from memory."""
    base, rows = _median(by_kind[MEMORY], "rows_per_second"), []
    for kind, some in by_kind.items():
        if some:
            rate = _median(some, "rows_per_second")
            flat = max(_memory_growth(one) for one in some)
            verdict = "" if kind == MEMORY else "yes" if rate >= WANTED * base else "no"
            rows.append([
                *head, kind, f"{rate:,.0f}", f"{100 * rate / base:.0f}%", verdict,
                f"{_median(some, 'seconds_before'):.1f}", f"{_median(some, 'peak') / 2**20:,.0f}",
                f"{flat / 2**20:+,.1f}",
            ])  # fmt: skip
    return rows


def describe_endless(results: Sequence[Measured], options: argparse.Namespace) -> str:
    """Report whether memory or time grows, or an invariant breaks."""
    rows, verdicts = [], list[str]()
    for one in results:
        looks = one.arrays["looks"]
        tenth = max(1, len(looks) // 10)
        first, last = looks[tenth : 2 * tenth].mean(axis=0), looks[-tenth:].mean(axis=0)
        rows.append([
            str(one.trial.settings["forgetting"]),
            f"{first[2] / 2**20:.1f} to {last[2] / 2**20:.1f}",
            f"{1e3 * first[1]:.2f} to {1e3 * last[1]:.2f}",
            f"{first[3]:.3f} to {last[3]:.3f}",
            f"{looks[tenth:, 3].min():.3f} to {looks[tenth:, 3].max():.3f}",
            f"{int(looks[:, 4].sum())} of {6 * len(looks)}",
        ])  # fmt: skip
        level = {"memory": last[2] / first[2], "the time of a call": last[1] / first[1]}
        grown = [f"{name} grew {ratio:.2f} times" for name, ratio in level.items() if ratio > LEVEL]
        if looks[:, 4].any():
            grown.append("invariants broke")
        held = ", ".join(grown) or "memory and time are level, and no invariant broke"
        verdicts.append(f"forgetting {one.trial.settings['forgetting']}: {held}")
    names = ["forgetting", "memory, MiB", "a call, ms of CPU", "held-out log-likelihood"]
    names += ["its range", "invariants that broke"]
    text = (
        f"## {int(looks[-1, 0]):,} batches of partial_fit\n\n"
        f"K = {SMALL['components']}, d = {SMALL['features']}, l = {SMALL['factors']}, a call for"
        f" each batch of {SMALL['batch_size']} rows, on a stream that does not change. Figures go"
        " from the second tenth of the run to the last. The model is checked a hundred times: all"
        " numbers are finite, E is positive and within its bound, which one column reaches, weights"
        " are positive and sum to one, M is diagonal, between 0 and 1, and the history is"
        " bounded.\n\n"
    )
    verdict = f"**With {'; with '.join(verdicts)}.**\n\n"
    return text + verdict + Table("endless", "", names, rows).markdown()


def describe_drift(results: Sequence[Measured], options: argparse.Namespace) -> str:
    """Compare rates of forgetting on a stream that wanders."""
    rows = [
        [str(one.trial.settings["forgetting"]), f"{one['last']:.3f}", f"{one['best']:.3f}"]
        for one in results
    ]
    names = ["forgetting", "log-likelihood before learning, last fifth", "of the true density"]
    text = (
        f"## A stream that drifts\n\nClusters stay in place for a fifth of"
        f" {results[0].trial.settings['batches']:,} batches and then wander.\n\n"
    )
    behind = {str(one.trial.settings["forgetting"]): one["best"] - one["last"] for one in results}
    nearest = min(behind, key=lambda name: behind[name])
    verdict = f"**Forgetting {nearest} is nearest to the true density, {behind[nearest]:.3f} below"
    if "None" in behind and nearest != "None":
        verdict += f"; without forgetting the model falls behind by {behind['None']:.3f}"
    return text + verdict + ".**\n\n" + Table("drift", "", names, rows).markdown()


@styled
def draw_memory(results: Sequence[Measured], options: argparse.Namespace) -> Any:
    """Draw memory over time, for the first run of each mixture with all threads."""
    figure = new_figure(10, 3.6)
    panels = figure.subplots(1, len(options.components), sharey=True)
    for panel, components in zip(panels, options.components, strict=True):
        for kind in (MEMORY, *KINDS):
            one = next((o for o in results if _matches(o, kind, components, THREADS[0])), None)
            # The array itself would hide all other lines.
            if one is not None and kind != MEMORY:
                memory = one.arrays["memory"]
                panel.plot(memory[:, 0], memory[:, 1] / 2**20, label=kind)
        panel.set(xlabel="seconds", title=f"K = {components}", ylim=(0, None))
        panel.grid(True)
    panels[0].set_ylabel("memory that no file backs, MiB")
    panels[0].legend()
    return figure


@styled
def draw_endless(results: Sequence[Measured], options: argparse.Namespace) -> Any:
    """Draw memory, time of a batch and likelihood over a long stream."""
    figure = new_figure(11, 3.2)
    names = ("a call, ms of CPU", "resident memory, MiB", "held-out log-likelihood")
    for panel, name, column, scale in zip(
        figure.subplots(1, 3), names, (1, 2, 3), (1e3, 2**-20, 1.0), strict=True
    ):
        for one in results:
            looks, forgetting = one.arrays["looks"], one.trial.settings["forgetting"]
            panel.plot(looks[:, 0], looks[:, column] * scale, label=f"forgetting {forgetting}")
        panel.set(xlabel="batches", title=name)
        if column < 3:
            panel.set_ylim(0, 1.2 * panel.get_ylim()[1])
        panel.grid(True)
    panel.legend()
    return figure


@styled
def draw_drift(results: Sequence[Measured], options: argparse.Namespace) -> Any:
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
    # The scores of the first batches would hide all others.
    lowest = min(
        float(one.arrays["curve"][len(one.arrays["curve"]) // 20 :].min()) for one in results
    )
    panel.set_ylim(1.1 * lowest - 0.1 * best, best + 0.2 * (best - lowest))
    panel.legend()
    panel.grid(True)
    return figure


def _memory_growth(one: Measured) -> float:
    memory = one.arrays["memory"]
    # A memory map is checked before training takes memory.
    memory = memory[memory[:, 0] > one["seconds_before"]][:, 1]
    if len(memory) < 2:
        return 0.0
    fifth = max(1, len(memory) // 5)
    return float(memory[-fifth:].mean() - memory[fifth : 2 * fifth].mean())


def _median(results: Sequence[Measured], name: str) -> float:
    return float(np.median([one[name] for one in results]))


if __name__ == "__main__":
    main()
