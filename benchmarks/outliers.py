"""Compare the outlier detector with PyOD's on ADBench's tables, and on images of a new class.

    python benchmarks/outliers.py --jobs 2 --write-docs         # about an hour on two cores
    python benchmarks/outliers.py --tables 14_glass,42_WBC      # some tables
    python benchmarks/outliers.py --quick                       # a try in a minute

Every fit is a trial with a result file of its own: a benchmark that was stopped goes on where it
was. The tables are read from the folder adbench in FACTORMIX_DATA, the peers are in the extra
``pyod``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import machine
from outlying import data, page
from outlying.trials import (
    OURS,
    PEERS,
    SHOWN,
    WIDEST,
    picture_of,
    run_images,
    run_ours,
    run_patches,
    run_peer,
)

from factormix.files import make_folder, write_whole
from factormix.studies.harness import Result, Store, Table, Trial, read_results, run_trials

ROOT = Path(__file__).resolve().parent.parent

MODES = ("novelty", "contaminated")
SEEDS = 3
ROWS = 4000
DATASETS = ("mnist", "fashion-mnist")
IMAGE_METHODS = (OURS, "MFA", "KNN", "IForest", "PCA")
TRAIN_ROWS, JUDGED_ROWS = 2000, 2000
PATCH_ROWS = 20_000


def main() -> None:
    options = parse()
    store = Store(options.output / "trials")
    # What is slowest by far is done last.
    trials = sorted(
        [*plan(options), *plan_images(options)],
        key=lambda trial: trial.settings.get("method") == "MCD",
    )
    if not options.no_run:
        run_trials(trials, store, jobs=options.jobs, on_finish=tell)
    results = read_results(trials, store)
    text = compose(results, len(trials), options)
    make_folder(options.output)
    write_whole(options.output / "outliers.md", text.encode())
    write_whole(options.output / "outliers.csv", result_table(results).csv().encode())
    print(f"{options.output / 'outliers.md'} has the verdicts of {len(results)} fits.")
    if options.write_docs:
        write_whole(ROOT / "docs" / "benchmarks-outliers.md", text.encode())
        draw_patches(trials, store)
        print("docs/benchmarks-outliers.md is written.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = data.available()
    parser.add_argument("--tables", type=lambda t: t.split(","), help=f"some of {', '.join(known)}")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"({SEEDS})")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"most rows of a table ({ROWS})")
    parser.add_argument("--no-images", action="store_true", help="tables alone")
    parser.add_argument("--quick", action="store_true", help="two tables, one seed, no images")
    parser.add_argument("--no-run", action="store_true", help="use the results that exist")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="fits at a time")
    parser.add_argument("--write-docs", action="store_true", help="write the page in docs")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "outliers")
    options = parser.parse_args()
    if options.quick and options.write_docs:
        parser.error("--quick is too small for the page in docs: leave out one of the two")
    for name in options.tables or ():
        if name not in known:
            parser.error(f"{name} is not one of {', '.join(known)}")
    if not known:
        parser.error("there are no tables: set FACTORMIX_DATA to a folder that has adbench in it")
    if options.quick:
        options.tables, options.seeds = options.tables or known[:2], 1
        options.no_images, options.rows = True, min(options.rows, 500)
    options.tables = options.tables or known
    return options


def plan(options: argparse.Namespace) -> list[Trial]:
    """List the fits on tables, seed by seed: what is done first covers all tables."""
    found, widths = [], {table: data.width(table) for table in options.tables}
    for seed in range(options.seeds):
        for mode in MODES:
            for table in options.tables:
                key = {"mode": mode, "table": table, "seed": seed, "rows": options.rows}
                name = f"{mode}-{table}-{seed}"
                found.append(Trial("ours", name, key, run_ours))
                found += [
                    Trial("peers", f"{name}-{method}", {**key, "method": method}, run_peer)
                    for method in PEERS
                    if widths[table] <= WIDEST.get(method, widths[table])
                ]
    return found


def plan_images(options: argparse.Namespace) -> list[Trial]:
    """List the classes that are held out, and the patches that are to be found."""
    if options.no_images:
        return []
    sizes = {"train_rows": TRAIN_ROWS, "judged_rows": JUDGED_ROWS, "seed": 0}
    classes = [
        Trial(
            "images",
            f"{dataset}-{digit}-{method}",
            {"dataset": dataset, "class": digit, "method": method, **sizes},
            run_images,
        )
        for dataset in DATASETS
        for digit in range(10)
        for method in IMAGE_METHODS
    ]
    patches = {"train_rows": PATCH_ROWS, "judged_rows": 500, "seed": 0, "shown": SHOWN}
    return [Trial("patches", "mnist", patches, run_patches), *classes]


def draw_patches(trials: Sequence[Trial], store: Store) -> None:
    """Draw the picture of docs/outliers.md, if its trial is finished."""
    from factormix.plotting import plot_reasons, save_figure

    for trial in trials:
        if trial.experiment == "patches" and store.read(trial):
            figure = plot_reasons(picture_of(store.arrays(trial)))
            save_figure(figure, ROOT / "docs" / "images" / "reasons.png")


def tell(trial: Trial, failure: str | None) -> None:
    print(f"{trial.title}: {failure or 'done'}", flush=True)


def compose(results: Sequence[Result], planned: int, options: argparse.Namespace) -> str:
    packages = ("factormix", "torch", "numpy", "scikit-learn", "pyod")
    described = machine.describe(1, options.jobs, packages)
    command = f"python benchmarks/outliers.py --rows {options.rows} --seeds {options.seeds}"
    described["command"] = f"`{command} --jobs {options.jobs}`"
    remarks = []
    if len(results) < planned:
        remarks.append(f"**{planned - len(results)} of {planned} fits are not finished.**")
    return page.compose(results, described, remarks, options.rows)


def result_table(results: Sequence[Result]) -> Table:
    """List every area, for other people's analyses."""
    rows: list[list[str | int | float | None]] = []
    for one in results:
        settings = one.trial.settings
        if one.trial.experiment == "patches":
            continue
        where = settings.get("table") or f"{settings['dataset']} class {settings['class']}"
        found = one.values["auc"]
        named = found if isinstance(found, dict) else {settings["method"]: found}
        for name, auc in named.items():
            method = name if one.trial.experiment != "ours" else f"{OURS}: {name}"
            mode = settings.get("mode", "novelty")
            rows.append([mode, where, settings["seed"], method, auc, one.values["seconds"]])
    return Table("areas", "", ["mode", "table", "seed", "method", "auc", "seconds"], rows)


if __name__ == "__main__":
    main()
