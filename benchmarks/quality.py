"""Train the same mixtures by every method; draw held-out likelihood against time and passes.

    python benchmarks/quality.py                       # everything: hours
    python benchmarks/quality.py --dataset mnist --components 49 --methods natural,em
    python benchmarks/quality.py --quick               # a try in a minute

Every run of a method from a seed is a trial with its own result file, so a benchmark that was
interrupted continues where it stopped. Tables, pictures and CSV files are written after every
setting; --write-docs writes docs/benchmarks.md from them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common import DOCS, describe_machine, make_parser, parse_options
from harness import Store, Trial, run_trials
from quality_methods import DEFAULT_METHODS, METHODS, explain_missing_method, run_method
from quality_page import (
    Result,
    compose_page,
    draw_setting,
    group_results,
    list_targets,
    read_result,
    tabulate_curves,
    tabulate_targets,
    tabulate_trials,
)
from quality_problems import (
    DATASETS,
    QUICK_SETTINGS,
    SETTINGS,
    Setting,
    build_plan,
    explain_missing_data,
    read_setting,
)

from factormix.files import make_folder, write_whole

NATURAL_SEEDS = 10
"""Seeds of the natural solver in settings with a target for components in use."""
QUICK_BUDGET = 2.0


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    trials, missing = plan(options)
    for text in missing:
        print(text)
    store = Store(options.output / "trials")
    names = dict.fromkeys(read_setting(trial.settings).name for trial in trials)
    settings = [s for s in chosen_settings(options) if s.name in names]
    done: list[Result] = []
    for setting in settings:
        chosen = [t for t in trials if read_setting(t.settings).name == setting.name]
        if not options.no_run:
            run(chosen, store, options)
        done += [found for trial in chosen if (found := read_result(store, trial)) is not None]
        report(settings, done, missing, options)
    print(f"{options.output / 'benchmarks.md'} has the tables of {len(done)} results.")
    if options.write_docs:
        draw(settings, done, DOCS / "benchmarks")
        compose(settings, done, missing, options, DOCS / "benchmarks.md")
        print(f"docs/benchmarks.md is written from {len(done)} results.")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = list(dict.fromkeys(s.dataset for s in (*SETTINGS, *QUICK_SETTINGS)))
    parser = make_parser(__doc__, "docs/benchmarks.md")
    parser.add_argument("--dataset", type=_list, help=f"some of {', '.join(names)}")
    parser.add_argument("--components", type=lambda t: [int(k) for k in _list(t)], metavar="K")
    parser.add_argument("--methods", type=_list, help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--seeds", type=int, default=None, help="default: 3; 1 with --quick")
    parser.add_argument(
        "--natural-seeds",
        type=int,
        default=None,
        help=f"natural solver on MNIST and FashionMNIST up to K = 400; default {NATURAL_SEEDS}",
    )
    parser.add_argument(
        "--budget", type=float, default=None, help="seconds of training for a peer; default 120"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; default 1")
    parser.add_argument("--no-run", action="store_true", help="use the results that exist")
    parser.add_argument("--fresh", action="store_true", help="run again what has a result already")
    options = parse_options(parser, arguments)
    for given, known in ((options.dataset, names), (options.methods, list(METHODS))):
        for name in given or ():
            if name not in known:
                parser.error(f"{name} is not one of {', '.join(known)}")
    options.budget = options.budget or (QUICK_BUDGET if options.quick else 120.0)
    options.seeds = options.seeds or (1 if options.quick else 3)
    options.natural_seeds = options.natural_seeds or (1 if options.quick else NATURAL_SEEDS)
    return options


def plan(options: argparse.Namespace) -> tuple[list[Trial], list[str]]:
    """Return the trials to run, and a sentence on each method and data set that is left out."""
    methods = options.methods or DEFAULT_METHODS
    missing = {name: why for name in methods if (why := explain_missing_method(name)) is not None}
    words = [f"{METHODS[name].label} is left out: {why}." for name, why in missing.items()]
    chosen, trials = chosen_settings(options), []
    for name in dict.fromkeys(s.dataset for s in chosen):
        why = explain_missing_data(name)
        if why is not None:
            # The reason names folders of this machine: it is printed, but not written to the page.
            print(why)
            words.append(f"{DATASETS[name]} is left out: its files were not found.")
            chosen = [s for s in chosen if s.dataset != name]
    for setting in chosen:
        for method in methods:
            if method in missing or (setting.only and method not in setting.only):
                continue
            for seed in range(seeds(setting, method, options)):
                trials.append(trial(setting, method, seed, options))
    return trials, words


def trial(setting: Setting, method: str, seed: int, options: argparse.Namespace) -> Trial:
    settings = build_plan(
        setting, method, seed, options.budget, options.threads, options.jobs, options.quick
    )
    return Trial("quality", f"{setting.name}-{method}-seed{seed}", settings, run_method)


def chosen_settings(options: argparse.Namespace) -> list[Setting]:
    known = QUICK_SETTINGS if options.quick else SETTINGS
    wanted = options.dataset or (
        [known[0].dataset] if options.quick else [s.dataset for s in known]
    )
    chosen = [s for s in known if s.dataset in wanted]
    if options.components is None:
        return chosen
    at_size = [s for s in chosen if s.components in options.components]
    # Any other size gets the plan of the first setting of its data set.
    for name in dict.fromkeys(s.dataset for s in chosen):
        have = {s.components for s in chosen if s.dataset == name}
        first = next(s for s in chosen if s.dataset == name)
        at_size += [
            replace(first, components=k, only=None) for k in options.components if k not in have
        ]
    return at_size


def seeds(setting: Setting, method: str, options: argparse.Namespace) -> int:
    counted = setting.dataset in ("mnist", "fashion-mnist") and setting.components <= 400
    if method == "natural" and counted:
        return max(int(options.seeds), int(options.natural_seeds))
    return int(options.seeds)


def run(trials: Sequence[Trial], store: Store, options: argparse.Namespace) -> None:
    """Run the trials without a result, each in its own process."""
    for one in trials:
        known = read_result(store, one)
        # A failure may be the machine's fault: it is tried again.
        if options.fresh or known is None or known.status == "failed":
            store.discard(one)

    def print_outcome(one: Trial, failure: str | None) -> None:
        known = read_result(store, one)
        text = f"no result, {failure}" if known is None else describe_outcome(known)
        method, seed = METHODS[one.settings["method"]].label, one.settings["seed"]
        name = read_setting(one.settings).name
        print(f"{name:20} {method:28} seed {seed}: {text}", flush=True)

    run_trials(
        trials,
        store,
        jobs=options.jobs,
        threads=options.threads,
        fresh=True,
        on_finish=print_outcome,
    )


def describe_outcome(result: Result) -> str:
    if not result.points:
        return result.message
    last = result.points[-1]
    text = f"{last.log_likelihood:9.1f} after {last.seconds:6.1f} s, {last.passes:.3g} passes"
    return f"{text}; {result.message}" if result.message else text


def report(
    settings: Sequence[Setting],
    done: Sequence[Result],
    missing: Sequence[str],
    options: argparse.Namespace,
) -> None:
    """Write tables and pictures of all results so far."""
    folder: Path = options.output
    lines = [
        line for s in settings for line in list_targets(s, group_results(done).get(s.name, {}))
    ]
    make_folder(folder)
    for table in (
        tabulate_trials(done),
        tabulate_curves(done),
        tabulate_targets(lines),
    ):
        # Bold is for the page alone.
        write_whole(folder / f"{table.name}.csv", table.csv().replace("**", "").encode())
    draw(settings, done, folder / "figures")
    compose(settings, done, missing, options, folder / "benchmarks.md", pictures="figures")


def draw(settings: Sequence[Setting], done: Sequence[Result], folder: Path) -> None:
    groups = group_results(done)
    for setting in settings:
        if any(g.trained for g in groups.get(setting.name, {}).values()):
            draw_setting(setting, groups[setting.name], folder / f"{setting.name}.png")


def compose(
    settings: Sequence[Setting],
    done: Sequence[Result],
    missing: Sequence[str],
    options: argparse.Namespace,
    path: Path,
    *,
    pictures: str = "benchmarks",
) -> None:
    groups = group_results(done)
    # A setting that has not run has no targets yet.
    lines = [line for s in settings if s.name in groups for line in list_targets(s, groups[s.name])]
    shown = {
        name: f"{pictures}/{name}.png"
        for name, of_setting in groups.items()
        if any(g.trained for g in of_setting.values())
    }
    description = describe_machine(options.threads, options.jobs)
    description["budget of a peer"] = (
        f"{options.budget:.0f} s of training, three times as much with hundreds of components"
    )
    description["command"] = (
        f"`python benchmarks/quality.py --threads {options.threads} --jobs {options.jobs}"
        f" --budget {options.budget:.0f}`"
    )
    text = compose_page(settings, groups, lines, description, shown, missing)
    write_whole(path, text.encode())


def _list(text: str) -> list[str]:
    return [part for part in text.replace(" ", "").split(",") if part]


if __name__ == "__main__":
    main()
