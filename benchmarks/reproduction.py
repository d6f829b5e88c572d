"""The paper's experiments, run again, and a verdict on each of its claims.

    python benchmarks/reproduction.py                        # everything: 6.5 hours of one core
    python benchmarks/reproduction.py --quick -o quick       # a try
    python benchmarks/reproduction.py table1 --seeds 5       # one experiment
    python benchmarks/reproduction.py --seeds 5 --report-only --write-docs docs

Each experiment is a module that plans its trials and runs one of them through the public interface.
Every finished training is a file in the output folder, so the same command continues an interrupted
run. Nothing is downloaded; without MNIST and FashionMNIST the experiments run on the digits of
scikit-learn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import reproduction_figure1 as figure1
import reproduction_streaming as streaming
import reproduction_table1 as table1
from common import ROOT
from harness import Store, Trial, read_results, run_trials
from reproduction_plan import FULL, QUICK, Scale, find_sets
from reproduction_report import ReproductionReport

from factormix.errors import InputError
from factormix.files import make_folder

EXPERIMENTS = ("figure1", "figure2", "table1", "convergence", "svhn", "streaming")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    scale = QUICK if options.quick else FULL
    seeds = scale.seeds if options.seeds is None else options.seeds
    scale = replace(scale, seeds=seeds, other_seeds=options.other_seeds)
    if options.steps is not None:
        scale = replace(scale, name=f"{scale.name}-{options.steps}-steps", steps=options.steps)
    try:
        outputs = reproduce(
            options.output,
            options.experiment,
            scale,
            data_folder=options.data,
            jobs=options.jobs,
            train=not options.report_only,
            docs=options.write_docs,
        )
    except KeyboardInterrupt:
        print("Interrupted: the same command continues where it stopped.")
        return 130
    except (InputError, OSError) as error:
        print(f"reproduction: {error}", file=sys.stderr)
        return 2
    for line in (*outputs.remarks, f"Report: {outputs.report}"):
        print(line)
    return 1 if outputs.failures else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", nargs="?", default="all", help=", ".join(EXPERIMENTS))
    parser.add_argument(
        "-o", "--output", type=Path, default=ROOT / "build" / "reproduction", help="folder"
    )
    parser.add_argument("--seeds", type=int, help="random starts: 10, or 1 with --quick")
    parser.add_argument(
        "--other-seeds", type=int, default=1, help="for held-out classes other than 9 and 0"
    )
    parser.add_argument("--quick", action="store_true", help="few steps on few images, as a check")
    parser.add_argument("--steps", type=int, help="steps per training, instead of 15 + 50 epochs")
    parser.add_argument("--data", help="folder to search first for image sets")
    parser.add_argument("--jobs", type=int, help="number of processes, one per core by default")
    parser.add_argument("--report-only", action="store_true", help="train nothing")
    parser.add_argument(
        "--write-docs", type=Path, metavar="FOLDER", help="also write reproduction.md here"
    )
    options = parser.parse_args(arguments)
    for name in ("seeds", "other_seeds", "steps", "jobs"):
        number = getattr(options, name)
        if number is not None and number < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {number}")
    return options


@dataclass(frozen=True)
class Outputs:
    """The path of the report, remarks on missing data and unfinished trials, and failures."""

    report: Path
    remarks: tuple[str, ...]
    failures: dict[str, str]


def reproduce(
    folder: Path,
    experiment: str = "all",
    scale: Scale = FULL,
    *,
    data_folder: str | None = None,
    jobs: int | None = None,
    train: bool = True,
    docs: Path | None = None,
) -> Outputs:
    """Run an experiment's missing trials and write everything into a folder.

    With ``train=False`` nothing is run: the report shows the finished trials. ``docs`` names a
    folder for the same report as Markdown, ``reproduction.md`` with pictures in ``reproduction``.
    """
    if experiment not in (*EXPERIMENTS, "all"):
        names = ", ".join((*EXPERIMENTS, "all"))
        raise InputError(f"there is no experiment {experiment!r}: choose one of {names}")
    wanted = EXPERIMENTS if experiment == "all" else (experiment,)
    make_folder(folder)
    store = _open_store(folder, scale)
    found = find_sets(data_folder) if train else _find_finished_sets(store, scale)
    sets, remarks = _choose_sets(found, wanted, train)
    trials = _plan_trials(wanted, sets, bool(found["svhn"]), scale)
    if not trials and train:
        raise InputError("svhn is not on this machine: run factormix data fetch svhn")
    n_trials, n_done = len(trials), len(read_results(trials, store))
    if n_done or train:
        used = dict.fromkeys(trial.settings["dataset"] for trial in trials)
        print(f"{n_trials} trials, {n_done} of them finished before; data: {', '.join(used)}")
    failures = run_trials(trials, store, data_folder, jobs) if train else {}
    results = read_results(trials, store)
    if not results:
        reason = next(iter(failures.values()), "run it without --report-only")
        raise InputError(f"no trial is finished, so there is nothing to report: {reason}")
    remarks += [f"The trial {name} failed: {why}" for name, why in failures.items()]
    if len(results) < n_trials:
        remarks.append(f"{n_trials - len(results)} of {n_trials} trials are not finished.")
    # Results of other experiments in this folder stay in the report.
    everything = _plan_trials(EXPERIMENTS, sets, bool(found["svhn"]), scale)
    results = read_results([*trials, *everything], store)
    page = ReproductionReport(folder, store, results, scale, wanted, remarks).build()
    path = page.write(folder / "report.md", "pictures")
    if docs is not None:
        page.write(docs / "reproduction.md", "reproduction")
    return Outputs(path, tuple(remarks), failures)


def _open_store(folder: Path, scale: Scale) -> Store:
    """Return the store of a scale; the reports of two scales would overwrite each other."""
    name = "trials" if scale.name == "full" else f"trials-{scale.name}"
    for other in sorted(folder.glob("trials*")):
        if other.name != name and other.is_dir() and any(other.iterdir()):
            raise InputError(
                f"{folder} holds a run of another length ({other.name}): give this one a folder of"
                " its own"
            )
    return Store(folder / name)


def _find_finished_sets(store: Store, scale: Scale) -> dict[str, str]:
    """Return where the results of each image set are, "" if there are none."""
    trials = _plan_trials(EXPERIMENTS, ["mnist", "fashion-mnist", "digits"], True, scale)
    sets = {one["dataset"] for one in read_results(trials, store)}
    names = ("mnist", "fashion-mnist", "svhn", "digits")
    return {name: str(store.folder) if name in sets else "" for name in names}


def _choose_sets(
    found: dict[str, str], wanted: tuple[str, ...], train: bool
) -> tuple[list[str], list[str]]:
    """Choose the image sets to run on or to report, with remarks on missing ones."""
    sets = [name for name in ("mnist", "fashion-mnist") if found[name]]
    asked = () if wanted == ("svhn",) else ("mnist", "fashion-mnist")
    missing = [name for name in asked if not found[name]]
    if not found["svhn"] and "svhn" in wanted:
        missing.append("svhn")
    remarks = [
        f"{name} was not found on this machine and could not be run:"
        f" `factormix data fetch {name}` brings it."
        if train
        else f"Nothing is finished yet on {name}."
        for name in missing
    ]
    if not sets and asked and (train or found["digits"]):
        sets = ["digits"]
        remarks.append(
            "The experiments ran on the 8 x 8 digits that come with scikit-learn instead. The"
            " paper has no numbers for them."
        )
    return sets, remarks


def _plan_trials(wanted: tuple[str, ...], sets: list[str], svhn: bool, scale: Scale) -> list[Trial]:
    """List the trials of some experiments; several share Figure 1's trainings."""
    trials: list[Trial] = []
    if {"figure1", "figure2"} & set(wanted):
        trials += figure1.plan_trials(sets, scale, 1)
    if "streaming" in wanted:
        trials += streaming.plan_trials(sets, scale)
    if "svhn" in wanted and svhn:
        trials += table1.plan_svhn(scale)
    if "convergence" in wanted:
        trials += figure1.plan_trials(sets, scale, max(scale.seeds, scale.starts))
    if "table1" in wanted:
        trials += table1.plan_trials(sets, scale)
    return list({(trial.experiment, trial.name): trial for trial in trials}.values())


if __name__ == "__main__":
    sys.exit(main())
