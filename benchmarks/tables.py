"""Compare MFA with scikit-learn's densities on ordinary tables, by held-out likelihood and seconds.

    python benchmarks/tables.py --jobs 2 --write-docs     # about half an hour on two cores
    python benchmarks/tables.py --tables iris,14_glass    # some tables
    python benchmarks/tables.py --quick                   # a try in a minute

Every fold of a table is a trial with a result file of its own: a benchmark that was stopped goes
on where it was. The tables of ADBench are read from the folder adbench in FACTORMIX_DATA.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import machine
import problems
from tabular import data, fits, page, seconds, verdicts

from factormix.files import make_folder, write_whole
from factormix.studies.harness import Result, Store, Table, Trial, read_results, run_trials

ROOT = Path(__file__).resolve().parent.parent

TUNED = (
    "breast_cancer", "diabetes", "iris", "4_breastw", "6_cardio", "12_fault", "16_http",
    "26_optdigits", "34_smtp", "38_thyroid", "42_WBC", "resnet18_CIFAR10_0", "resnet18_SVHN_0",
)  # fmt: skip
"""Tables that the library's defaults were chosen on; all others only judge."""

COMPONENTS = (1, 2, 5, 10, 25, 40)
FACTORS = ("0", "1", "2", "5", "10", fits.LAST)
FOLDS = 5
REPEATS = 3
SEED = 0

QUICK_TABLES = ("iris", "wine")
QUICK_COMPONENTS = (1, 2)
QUICK_FACTORS = ("0", "1")
QUICK_FOLDS = 2


def main() -> None:
    options = parse()
    store = Store(options.output / "trials")
    trials, timings = plan(options), plan_seconds(options)
    if not options.no_run:
        run(trials, timings, store, options)
    results, timed = read_results(trials, store), read_results(timings, store)
    text = compose(results, timed, len(trials) + len(timings), options)
    make_folder(options.output)
    write_whole(options.output / "tables.md", text.encode())
    write_whole(options.output / "tables.csv", fit_table(results).csv().encode())
    print(f"{options.output / 'tables.md'} has the verdicts of {len(results)} folds.")
    if options.write_docs:
        write_whole(ROOT / "docs" / "benchmarks-tables.md", text.encode())
        print("docs/benchmarks-tables.md is written.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = data.available()
    parser.add_argument("--tables", type=lambda t: t.split(","), help=f"some of {', '.join(known)}")
    parser.add_argument("--folds", type=int, default=None, help=f"({FOLDS})")
    parser.add_argument("--components", type=_numbers, metavar="K,K", help="numbers of components")
    parser.add_argument("--rows", type=int, default=2000, help="most rows of a table (2000)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="folds at a time")
    parser.add_argument("--quick", action="store_true", help="two tables and few sizes")
    parser.add_argument("--no-run", action="store_true", help="use the results that exist")
    parser.add_argument("--no-seconds", action="store_true", help="leave out the timings")
    parser.add_argument("--fresh", action="store_true", help="run again what has a result already")
    parser.add_argument("--write-docs", action="store_true", help="write docs/benchmarks-tables.md")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "benchmarks")
    options = parser.parse_args()
    if options.quick and options.write_docs:
        parser.error("--quick is too small for docs/benchmarks-tables.md: leave out one of the two")
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
    shared = {
        "folds": options.folds,
        "rows": options.rows,
        "components": options.components,
        "factors": QUICK_FACTORS if options.quick else FACTORS,
        "seed": SEED,
    }
    return [
        Trial(
            "tables",
            f"{table}-{scaling}-fold{fold}",
            {"table": table, "scaling": scaling, "fold": fold, **shared},
            fits.run,
        )
        for table in options.tables
        for scaling in data.SCALINGS
        for fold in range(options.folds)
    ]


def plan_seconds(options: argparse.Namespace) -> list[Trial]:
    """List the timings."""
    if options.no_seconds:
        return []
    small = seconds.small(options.tables, options.rows)
    if options.quick:
        return seconds.trials(small[:1], QUICK_COMPONENTS[:1], 1, images=False)
    images = problems.why_missing(seconds.IMAGES.dataset) is None
    return seconds.trials(small, options.components, REPEATS, images)


def run(
    trials: Sequence[Trial], timings: Sequence[Trial], store: Store, options: argparse.Namespace
) -> None:
    """Run what has no result yet: folds side by side, timings one after another."""
    if options.fresh:
        for trial in (*trials, *timings):
            store.discard(trial)

    def tell(trial: Trial, failure: str | None) -> None:
        print(f"{trial.title}: {failure or 'done'}", flush=True)

    run_trials(trials, store, jobs=options.jobs, on_finish=tell)
    for trial in timings:
        threads = trial.settings["threads"]
        run_trials([trial], store, jobs=1, threads=threads, fresh=True, on_finish=tell)


def compose(
    results: Sequence[Result], timed: Sequence[Result], planned: int, options: argparse.Namespace
) -> str:
    described = machine.describe(1, options.jobs, ("factormix", "torch", "numpy", "scikit-learn"))
    command = (
        f"python benchmarks/tables.py --rows {options.rows} --folds {options.folds}"
        f" --components {','.join(map(str, options.components))} --jobs {options.jobs}"
    )
    described["command"] = f"`{command}`"
    done, remarks = len(results) + len(timed), []
    if done < planned:
        remarks.append(f"**{planned - done} of {planned} trials are not finished.**")
    if not any(name not in data.SKLEARN for name in options.tables):
        remarks.append("The tables of ADBench are left out.")
    return page.compose(verdicts.tables(results), timed, TUNED, described, remarks)


def fit_table(results: Sequence[Result]) -> Table:
    """List every fit, for other people's analyses."""
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
