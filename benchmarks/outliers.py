"""Compare the outlier detector with PyOD's on ADBench's tables, and on images of a new class.

    python benchmarks/outliers.py --jobs 2 --write-docs         # about an hour on two cores
    python benchmarks/outliers.py --tables 14_glass,42_WBC      # some tables
    python benchmarks/outliers.py --quick                       # a try in a minute

Every fit is a trial with its own result file, so a benchmark that was interrupted continues where
it stopped. The tables are read from the folder adbench in FACTORMIX_DATA. The peers are in the
extra ``pyod``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from common import (
    DOCS,
    describe_machine,
    list_adbench,
    make_parser,
    parse_options,
    print_trial,
)
from harness import Result, Store, Table, Trial, read_results, run_trials
from outliers_page import compose_page
from outliers_trials import (
    OURS,
    PEERS,
    SHOWN,
    WIDEST,
    count_columns,
    rebuild_explanation,
    run_images,
    run_ours,
    run_patches,
    run_peer,
)

from factormix.files import make_folder, write_whole

MODES = ("novelty", "contaminated")
SEEDS = 3
ROWS = 4000
DATASETS = ("mnist", "fashion-mnist")
IMAGE_METHODS = (OURS, "MFA", "KNN", "IForest", "PCA")
TRAIN_ROWS, JUDGED_ROWS = 2000, 2000
PATCH_ROWS = 20_000


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    store = Store(options.output / "trials")
    # The slowest method by far runs last.
    trials = sorted(
        [*plan(options), *plan_images(options)],
        key=lambda trial: trial.settings.get("method") == "MCD",
    )
    if not options.no_run:
        run_trials(trials, store, jobs=options.jobs, on_finish=print_trial)
    results = read_results(trials, store)
    text = compose(results, len(trials), options)
    make_folder(options.output)
    write_whole(options.output / "outliers.md", text.encode())
    write_whole(options.output / "outliers.csv", tabulate_areas(results).csv().encode())
    print(f"{options.output / 'outliers.md'} has the verdicts of {len(results)} fits.")
    if options.write_docs:
        write_whole(DOCS / "benchmarks-outliers.md", text.encode())
        draw_patches(trials, store)
        print("docs/benchmarks-outliers.md is written.")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "docs/benchmarks-outliers.md")
    known = list_adbench()
    parser.add_argument("--tables", type=lambda t: t.split(","), help=f"some of {', '.join(known)}")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"({SEEDS})")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"most rows of a table ({ROWS})")
    parser.add_argument("--no-images", action="store_true", help="tables alone")
    parser.add_argument("--no-run", action="store_true", help="use the results that exist")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="fits at a time")
    options = parse_options(parser, arguments)
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
    """List the fits on tables, seed by seed, so that the first ones cover all tables."""
    found, widths = [], {table: count_columns(table) for table in options.tables}
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
    """List the held-out image classes, and the search for patches."""
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
    """Draw the picture in docs/outliers.md, if its trial is finished."""
    from factormix.plotting import plot_reasons, save_figure

    for trial in trials:
        if trial.experiment == "patches" and store.read(trial):
            figure = plot_reasons(rebuild_explanation(store.arrays(trial)))
            save_figure(figure, DOCS / "images" / "reasons.png")


def compose(results: Sequence[Result], planned: int, options: argparse.Namespace) -> str:
    packages = ("factormix", "torch", "numpy", "scikit-learn", "pyod")
    description = describe_machine(1, options.jobs, packages)
    command = f"python benchmarks/outliers.py --rows {options.rows} --seeds {options.seeds}"
    description["command"] = f"`{command} --jobs {options.jobs}`"
    remarks = []
    if len(results) < planned:
        remarks.append(f"**{planned - len(results)} of {planned} fits are not finished.**")
    return compose_page(results, description, remarks, options.rows)


def tabulate_areas(results: Sequence[Result]) -> Table:
    """Tabulate every area under the curve, for further analysis."""
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
