"""One call for all experiments: run what is missing, then write tables, pictures and a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from factormix.errors import InputError
from factormix.studies.reproduction import figure1, streaming, table1
from factormix.studies.reproduction.page import Page
from factormix.studies.reproduction.plan import FULL, Scale, found_sets
from factormix.studies.reproduction.results import read_results
from factormix.studies.reproduction.units import Store, Unit, run_units

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
    say: Callable[[str], object] = print,
) -> Outputs:
    """Run an experiment's missing units and write everything into a folder.

    With ``train=False`` nothing is run: the report shows what is finished. ``docs`` names a folder
    for the same report as Markdown, ``reproduction.md`` with its pictures in ``reproduction``.
    """
    wanted = _wanted(experiment)
    _check(folder, scale)
    store = _store(folder, scale)
    found = found_sets(data_folder) if train else _finished_sets(store, scale)
    sets, remarks = _sets(found, wanted, train)
    units = _units(wanted, sets, bool(found["svhn"]), scale)
    if not units:
        fetch = "svhn is not on this machine: run factormix data fetch svhn"
        raise InputError(fetch) if train else _nothing_to_report("run it without --report-only")
    n_units, n_done = len(units), len(read_results(units, store))
    used = dict.fromkeys(unit.settings["dataset"] for unit in units)
    say(f"{n_units} units, {n_done} of them finished before; data: {', '.join(used)}")
    failures = run_units(units, store, data_folder, jobs) if train else {}
    results = read_results(units, store)
    if not results:
        reason = next(iter(failures.values()), "run it without --report-only")
        raise _nothing_to_report(reason)
    remarks += [f"The unit {name} failed: {why}" for name, why in failures.items()]
    if len(results) < n_units:
        remarks.append(f"{n_units - len(results)} of {n_units} units are not finished.")
    # What earlier runs of other experiments left here stays in the report.
    everything = _units(EXPERIMENTS, sets, bool(found["svhn"]), scale)
    results = read_results([*units, *everything], store)
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
    if find_spec("matplotlib") is None:
        raise InputError('pictures need matplotlib: run pip install "factormix[plots]"')
    if scale.seeds < 1 or scale.other_seeds < 1:
        raise InputError("the numbers of seeds must be at least 1")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}") from error


def _nothing_to_report(reason: str) -> InputError:
    return InputError(f"no unit is finished, so there is nothing to report: {reason}")


def _store(folder: Path, scale: Scale) -> Store:
    """Find the unit files of a scale; reports of two would overwrite each other."""
    name = "units" if scale.name == "full" else f"units-{scale.name}"
    for other in sorted(folder.glob("units*")):
        if other.name != name and other.is_dir() and any(other.iterdir()):
            raise InputError(
                f"{folder} holds a run of another length ({other.name}): give this one a folder of"
                " its own"
            )
    return Store(folder / name)


def _finished_sets(store: Store, scale: Scale) -> dict[str, str]:
    """Tell for each image set of the paper where its results are, and "" if there are none."""
    units = _units(EXPERIMENTS, ["mnist", "fashion-mnist", "digits"], True, scale)
    sets = {one["dataset"] for one in read_results(units, store)}
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


def _units(wanted: tuple[str, ...], sets: list[str], svhn: bool, scale: Scale) -> list[Unit]:
    """List the units of some experiments; several share Figure 1's trainings."""
    units: list[Unit] = []
    if {"figure1", "figure2"} & set(wanted):
        units += figure1.plan(sets, scale, 1)
    if "streaming" in wanted:
        units += streaming.plan(sets, scale)
    if "svhn" in wanted and svhn:
        units += table1.plan_svhn(scale)
    if "convergence" in wanted:
        units += figure1.plan(sets, scale, max(scale.seeds, scale.starts))
    if "table1" in wanted:
        units += table1.plan(sets, scale)
    return list({(unit.experiment, unit.name): unit for unit in units}.values())
