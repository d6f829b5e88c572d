"""One call for all experiments: run what is missing, then write tables, pictures and a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from factormix.errors import InputError
from factormix.files import make_folder
from factormix.studies.harness import Store, Trial, read_results, run_trials
from factormix.studies.reproduction import figure1, streaming, table1
from factormix.studies.reproduction.plan import FULL, Scale, found_sets
from factormix.studies.reproduction.report import Page
from factormix.views.report import check_packages

__all__ = ["EXPERIMENTS", "Outputs", "reproduce"]

EXPERIMENTS = ("figure1", "figure2", "table1", "convergence", "svhn", "streaming")


@dataclass(frozen=True)
class Outputs:
    """Say where the report is and what could not be run."""

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
    print_line: Callable[[str], object] = print,
) -> Outputs:
    """Run an experiment's missing trials and write everything into a folder.

    With ``train=False`` nothing is run: the report shows what is finished. ``docs`` names a folder
    for the same report as Markdown, ``reproduction.md`` with its pictures in ``reproduction``.
    """
    wanted = _wanted(experiment)
    _check(folder, scale)
    store = _store(folder, scale)
    found = found_sets(data_folder) if train else _finished_sets(store, scale)
    sets, remarks = _sets(found, wanted, train)
    trials = _trials(wanted, sets, bool(found["svhn"]), scale)
    if not trials:
        fetch = "svhn is not on this machine: run factormix data fetch svhn"
        raise InputError(fetch) if train else _nothing_to_report("run it without --report-only")
    n_trials, n_done = len(trials), len(read_results(trials, store))
    used = dict.fromkeys(trial.settings["dataset"] for trial in trials)
    print_line(f"{n_trials} trials, {n_done} of them finished before; data: {', '.join(used)}")
    failures = run_trials(trials, store, data_folder, jobs) if train else {}
    results = read_results(trials, store)
    if not results:
        reason = next(iter(failures.values()), "run it without --report-only")
        raise _nothing_to_report(reason)
    remarks += [f"The trial {name} failed: {why}" for name, why in failures.items()]
    if len(results) < n_trials:
        remarks.append(f"{n_trials - len(results)} of {n_trials} trials are not finished.")
    # What earlier runs of other experiments left here stays in the report.
    everything = _trials(EXPERIMENTS, sets, bool(found["svhn"]), scale)
    results = read_results([*trials, *everything], store)
    report = Page(folder, store, results, scale, wanted, remarks).build()
    path = report.write(folder / "report.html")
    if docs is not None:
        report.markdown(docs, "reproduction.md", "reproduction")
    return Outputs(path, tuple(remarks), failures)


def _wanted(experiment: str) -> tuple[str, ...]:
    if experiment == "all":
        return EXPERIMENTS
    if experiment not in EXPERIMENTS:
        names = ", ".join((*EXPERIMENTS, "all"))
        raise InputError(f"there is no experiment {experiment!r}: choose one of {names}")
    return (experiment,)


def _check(folder: Path, scale: Scale) -> None:
    check_packages()
    if scale.seeds < 1 or scale.other_seeds < 1:
        raise InputError("the numbers of seeds must be at least 1")
    make_folder(folder)


def _nothing_to_report(reason: str) -> InputError:
    return InputError(f"no trial is finished, so there is nothing to report: {reason}")


def _store(folder: Path, scale: Scale) -> Store:
    """Find the trial files of a scale; reports of two would overwrite each other."""
    name = "trials" if scale.name == "full" else f"trials-{scale.name}"
    for other in sorted(folder.glob("trials*")):
        if other.name != name and other.is_dir() and any(other.iterdir()):
            raise InputError(
                f"{folder} holds a run of another length ({other.name}): give this one a folder of"
                " its own"
            )
    return Store(folder / name)


def _finished_sets(store: Store, scale: Scale) -> dict[str, str]:
    """Tell for each image set of the paper where its results are, and "" if there are none."""
    trials = _trials(EXPERIMENTS, ["mnist", "fashion-mnist", "digits"], True, scale)
    sets = {one["dataset"] for one in read_results(trials, store)}
    names = ("mnist", "fashion-mnist", "svhn", "digits")
    return {name: str(store.folder) if name in sets else "" for name in names}


def _sets(
    found: dict[str, str], wanted: tuple[str, ...], train: bool
) -> tuple[list[str], list[str]]:
    """Choose the image sets to run on or to report, and say which are missing."""
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


def _trials(wanted: tuple[str, ...], sets: list[str], svhn: bool, scale: Scale) -> list[Trial]:
    """List the trials of some experiments; several share Figure 1's trainings."""
    trials: list[Trial] = []
    if {"figure1", "figure2"} & set(wanted):
        trials += figure1.plan(sets, scale, 1)
    if "streaming" in wanted:
        trials += streaming.plan(sets, scale)
    if "svhn" in wanted and svhn:
        trials += table1.plan_svhn(scale)
    if "convergence" in wanted:
        trials += figure1.plan(sets, scale, max(scale.seeds, scale.starts))
    if "table1" in wanted:
        trials += table1.plan(sets, scale)
    return list({(trial.experiment, trial.name): trial for trial in trials}.values())
