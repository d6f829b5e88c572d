"""Compare imputation with scikit-learn's, and training with gaps with complete training.

    python benchmarks/missing.py --write-docs      # about a quarter of an hour
    python benchmarks/missing.py --quick           # a try in a minute

Every method on every table is a trial with a result file of its own: a benchmark that was stopped
goes on where it was. The tables of ADBench are read from the folder adbench in FACTORMIX_DATA, and
FashionMNIST from where factormix.datasets finds it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import machine
import problems
from incomplete import images, page, tables

from factormix.files import make_folder, write_whole
from factormix.studies.harness import Store, Trial, read_results, run_trials

ROOT = Path(__file__).resolve().parent.parent
QUICK_TABLES, QUICK_METHODS = ("wine", "diabetes"), (tables.OURS, "mean", "KNNImputer")
SEED = 0


def main() -> None:
    options = parse()
    store = Store(options.output / "trials")
    planned = plan(options)
    if not options.no_run:
        run_trials(planned, store, jobs=1, threads=1, on_finish=tell)
    results = read_results(planned, store)
    described = machine.describe(1, 1, ("factormix", "torch", "numpy", "scikit-learn"))
    command = f"python benchmarks/missing.py --rows {options.rows} --images {options.images}"
    described["command"] = f"`{command} --epochs {options.epochs}`"
    text = page.compose(results, len(planned), described)
    make_folder(options.output)
    write_whole(options.output / "missing.md", text.encode())
    print(f"{options.output / 'missing.md'} has the results of {len(results)} trials.")
    if options.write_docs:
        write_whole(ROOT / "docs" / "benchmarks-missing.md", text.encode())
        print("docs/benchmarks-missing.md is written.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=600, help="most rows of a table (600)")
    parser.add_argument("--images", type=int, default=54000, help="images to learn from (54000)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the images (3)")
    parser.add_argument("--quick", action="store_true", help="two tables, three methods, no images")
    parser.add_argument("--no-run", action="store_true", help="use the results that exist")
    parser.add_argument(
        "--write-docs", action="store_true", help="write docs/benchmarks-missing.md"
    )
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "benchmarks-missing")
    options = parser.parse_args()
    if options.quick and options.write_docs:
        parser.error("--quick is too small for the page in docs: leave out one of the two")
    return options


def plan(options: argparse.Namespace) -> list[Trial]:
    """List all trials; images are left out where they are not at hand."""
    if options.quick:
        return tables.trials(QUICK_TABLES, QUICK_METHODS, 200, SEED)
    pictures = problems.why_missing("fashion-mnist") is None
    methods: Sequence[str] = list(tables.METHODS)
    return [
        *tables.trials(tables.TABLES, methods, options.rows, SEED),
        *(images.trials(options.images, options.epochs, SEED) if pictures else []),
    ]


def tell(trial: Trial, failure: str | None) -> None:
    print(f"{trial.title}: {failure or 'done'}", flush=True)


if __name__ == "__main__":
    main()
