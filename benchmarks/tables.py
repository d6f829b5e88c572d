"""Compare MFA with scikit-learn's densities on ordinary tables, by held-out likelihood and seconds.

    python benchmarks/tables.py --jobs 2 --write-docs     # about half an hour on two cores
    python benchmarks/tables.py --tables iris,14_glass    # some tables
    python benchmarks/tables.py --quick                   # a try in a minute

Every fold of a table is a trial with its own result file, so a benchmark that was interrupted
continues where it stopped. ADBench's tables are read from the folder adbench in FACTORMIX_DATA.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from common import DOCS, describe_machine, make_parser, parse_options, print_trial
from harness import Result, Settings, Store, Table, Trial, read_results, run_trials
from quality_problems import explain_missing_data
from tables_page import compose_page, gather_tables
from tables_trials import (
    IMAGES,
    LAST,
    SCALINGS,
    SKLEARN,
    choose_small,
    list_tables,
    plan_timings,
    run_fold,
    run_unbounded,
)

from factormix.files import make_folder, write_whole

TUNED = (
    "breast_cancer", "diabetes", "iris", "4_breastw", "6_cardio", "12_fault", "16_http",
    "26_optdigits", "34_smtp", "38_thyroid", "42_WBC", "resnet18_CIFAR10_0", "resnet18_SVHN_0",
)  # fmt: skip
"""Tables that the library's defaults were chosen on; all others are for testing."""

DISCRETE = ("diabetes", "4_breastw", "20_letter", "42_WBC")
"""Tables on which the page of defaults finds `GaussianMixture` ahead."""

COMPONENTS = (1, 2, 5, 10, 25, 40)
FACTORS = ("0", "1", "2", "5", "10", LAST)
FOLDS = 5
REPEATS = 3
SEED = 0

QUICK_TABLES = ("iris", "wine")
QUICK_COMPONENTS = (1, 2)
QUICK_FACTORS = ("0", "1")
QUICK_FOLDS = 2


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    store = Store(options.output / "trials")
    trials, unbounded, timings = plan(options), plan_unbounded(options), plan_seconds(options)
    if not options.no_run:
        run([*trials, *unbounded], timings, store, options)
    results, free, timed = (read_results(each, store) for each in (trials, unbounded, timings))
    planned = len(trials) + len(unbounded) + len(timings)
    text = compose(results, free, timed, planned, options)
    make_folder(options.output)
    write_whole(options.output / "tables.md", text.encode())
    write_whole(options.output / "tables.csv", tabulate_fits(results).csv().encode())
    print(f"{options.output / 'tables.md'} has the verdicts of {len(results)} folds.")
    if options.write_docs:
        write_whole(DOCS / "benchmarks-tables.md", text.encode())
        print("docs/benchmarks-tables.md is written.")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "docs/benchmarks-tables.md")
    known = list_tables()
    parser.add_argument("--tables", type=lambda t: t.split(","), help=f"some of {', '.join(known)}")
    parser.add_argument("--folds", type=int, default=None, help=f"({FOLDS})")
    parser.add_argument("--components", type=_numbers, metavar="K,K", help="numbers of components")
    parser.add_argument("--rows", type=int, default=2000, help="most rows of a table (2000)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="folds at a time")
    parser.add_argument("--no-run", action="store_true", help="use the results that exist")
    parser.add_argument("--no-seconds", action="store_true", help="leave out the timings")
    parser.add_argument("--fresh", action="store_true", help="run again what has a result already")
    options = parse_options(parser, arguments)
    for name in options.tables or ():
        if name not in known:
            parser.error(f"{name} is not one of {', '.join(known)}")
    quick = options.quick
    options.tables = options.tables or (list(QUICK_TABLES) if quick else known)
    options.folds = options.folds or (QUICK_FOLDS if quick else FOLDS)
    options.components = options.components or (QUICK_COMPONENTS if quick else COMPONENTS)
    if options.folds < 2 or min(options.components) < 1:
        parser.error("give at least 2 folds and at least 1 component")
    return options


def plan(options: argparse.Namespace) -> list[Trial]:
    """List the folds of all tables, raw and standardised."""
    return [
        Trial("tables", f"{table}-{scaling}-fold{settings['fold']}", settings, run_fold)
        for table in options.tables
        for scaling in SCALINGS
        for settings in list_folds(options, table, scaling)
    ]


def plan_unbounded(options: argparse.Namespace) -> list[Trial]:
    """List the folds of standardised tables of few values, on which no step bounds the density."""
    return [
        Trial("unbounded", f"{table}-fold{settings['fold']}", settings, run_unbounded)
        for table in options.tables
        if table in DISCRETE
        for settings in list_folds(options, table, "standardised")
    ]


def list_folds(options: argparse.Namespace, table: str, scaling: str) -> list[Settings]:
    """List the settings of all folds of a table."""
    shared = {
        "table": table,
        "scaling": scaling,
        "folds": options.folds,
        "rows": options.rows,
        "components": options.components,
        "factors": QUICK_FACTORS if options.quick else FACTORS,
        "seed": SEED,
    }
    return [{"fold": fold, **shared} for fold in range(options.folds)]


def plan_seconds(options: argparse.Namespace) -> list[Trial]:
    """List the timings."""
    if options.no_seconds:
        return []
    small = choose_small(options.tables, options.rows)
    if options.quick:
        return plan_timings(small[:1], QUICK_COMPONENTS[:1], 1, images=False)
    images = explain_missing_data(IMAGES.dataset) is None
    return plan_timings(small, options.components, REPEATS, images)


def run(
    trials: Sequence[Trial], timings: Sequence[Trial], store: Store, options: argparse.Namespace
) -> None:
    """Run the trials without a result: folds in parallel, timings one after another."""
    if options.fresh:
        for trial in (*trials, *timings):
            store.discard(trial)

    run_trials(trials, store, jobs=options.jobs, on_finish=print_trial)
    for trial in timings:
        threads = trial.settings["threads"]
        run_trials([trial], store, jobs=1, threads=threads, fresh=True, on_finish=print_trial)


def compose(
    results: Sequence[Result],
    unbounded: Sequence[Result],
    timed: Sequence[Result],
    planned: int,
    options: argparse.Namespace,
) -> str:
    description = describe_machine(1, options.jobs, ("factormix", "torch", "numpy", "scikit-learn"))
    command = (
        f"python benchmarks/tables.py --rows {options.rows} --folds {options.folds}"
        f" --components {','.join(map(str, options.components))} --jobs {options.jobs}"
    )
    description["command"] = f"`{command}`"
    done, remarks = len(results) + len(unbounded) + len(timed), []
    if done < planned:
        remarks.append(f"**{planned - done} of {planned} trials are not finished.**")
    if not any(name not in SKLEARN for name in options.tables):
        remarks.append("The tables of ADBench are left out.")
    return compose_page(gather_tables(results), unbounded, timed, TUNED, description, remarks)


def tabulate_fits(results: Sequence[Result]) -> Table:
    """Tabulate every fit, for further analysis."""
    columns = ["table", "scaling", "fold", "features", "training_rows"]
    names = ["model", "components", "factors", "score", "seconds", "failure"]
    rows = [
        [*(one[key] for key in columns), *(fit.get(name) for name in names)]
        for one in results
        for fit in one["fits"]
    ]
    return Table("fits", "", [*columns, *names], rows)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()
