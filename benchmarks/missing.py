"""Compare our imputation with scikit-learn's, and training with missing entries with complete rows.

    python benchmarks/missing.py --write-docs      # about five minutes of one core
    python benchmarks/missing.py --quick           # a try in a minute

Every method on every table is a trial with its own result file, so a benchmark that was interrupted
continues where it stopped. ADBench's tables are read from the folder adbench in FACTORMIX_DATA, and
FashionMNIST from wherever factormix.datasets finds it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from common import DOCS, describe_machine, fold_description, make_parser, parse_options, print_trial
from harness import (
    Outcome,
    Result,
    Settings,
    Store,
    Table,
    Trial,
    read_results,
    run_trials,
)
from numpy.typing import NDArray
from quality_problems import explain_missing_data
from sklearn.ensemble import RandomForestRegressor
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer
from tables_trials import find_varying, load_table

from factormix import MFA, MFAImputer, datasets
from factormix.files import make_folder, write_whole
from factormix.solvers import NaturalGradient

SEED = 0
MISSING, INTERVAL = 0.3, 0.9
OURS = "MFAImputer"
TABLES = (
    "wine", "diabetes", "breast_cancer", "6_cardio", "10_cover", "22_magic.gamma", "28_pendigits",
    "30_satellite", "32_shuttle", "40_vowels",
)  # fmt: skip
"""The tables of the comparison."""
TUNING_TABLES = (
    "2_annthyroid", "4_breastw", "12_fault", "14_glass", "18_Ionosphere", "20_letter", "38_thyroid",
    "46_WPBC",
)  # fmt: skip
"""The tables that the recipe of MFAImputer was chosen on; none is in the comparison."""
TREES, ROUNDS = 100, 5
"""Trees of a forest, and rounds over the columns, of MissForest."""
IMAGE_KINDS = ("complete", "30% missing", "filled with the mean")
QUICK_TABLES, QUICK_METHODS = ("wine", "diabetes"), (OURS, "mean", "KNNImputer")

Array = NDArray[np.float64]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    store = Store(options.output / "trials")
    planned = plan(options)
    if not options.no_run:
        run_trials(planned, store, jobs=1, threads=1, on_finish=print_trial)
    results = read_results(planned, store)
    description = describe_machine(1, 1, ("factormix", "torch", "numpy", "scikit-learn"))
    command = f"python benchmarks/missing.py --rows {options.rows} --images {options.images}"
    description["command"] = f"`{command} --epochs {options.epochs}`"
    text = compose_page(results, len(planned), description)
    make_folder(options.output)
    write_whole(options.output / "missing.md", text.encode())
    print(f"{options.output / 'missing.md'} has the results of {len(results)} trials.")
    if options.write_docs:
        write_whole(DOCS / "benchmarks-missing.md", text.encode())
        print("docs/benchmarks-missing.md is written.")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, "docs/benchmarks-missing.md")
    parser.add_argument("--rows", type=int, default=600, help="most rows of a table (600)")
    parser.add_argument("--images", type=int, default=54000, help="images to learn from (54000)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the images (3)")
    parser.add_argument("--no-run", action="store_true", help="use the results that exist")
    options = parse_options(parser, arguments)
    return options


def plan(options: argparse.Namespace) -> list[Trial]:
    """List all trials; images need FashionMNIST."""
    if options.quick:
        return plan_imputation(QUICK_TABLES, QUICK_METHODS, 200, SEED)
    pictures = explain_missing_data("fashion-mnist") is None
    methods: Sequence[str] = list(METHODS)
    return [
        *plan_imputation(TABLES, methods, options.rows, SEED),
        *(plan_images(options.images, options.epochs, SEED) if pictures else []),
    ]


def _make_missforest(seed: int) -> IterativeImputer:
    forest = RandomForestRegressor(n_estimators=TREES, random_state=seed, n_jobs=1)
    return IterativeImputer(forest, max_iter=ROUNDS, random_state=seed)


METHODS: dict[str, Callable[[int], Any]] = {
    OURS: lambda seed: MFAImputer(random_state=seed),
    "mean": lambda seed: SimpleImputer(),
    "IterativeImputer": lambda seed: IterativeImputer(random_state=seed),
    "KNNImputer": lambda seed: KNNImputer(),
    "MissForest": _make_missforest,
}


def plan_imputation(
    tables: Sequence[str], methods: Sequence[str], rows: int, seed: int
) -> list[Trial]:
    """List every method on every table."""
    return [
        Trial(
            "imputation",
            f"{table}-{method}",
            {"table": table, "method": method, "rows": rows, "seed": seed, **_forest_size(method)},
            run_imputation,
        )
        for table in tables
        for method in methods
    ]


def _forest_size(method: str) -> dict[str, int]:
    return {"trees": TREES, "rounds": ROUNDS} if method == "MissForest" else {}


def run_imputation(settings: Settings, data_folder: str | None) -> Outcome:
    """Train on rows with missing entries, impute new rows, and compare with the true entries."""
    train, new = split_table(settings["table"], settings["rows"], settings["seed"])
    random = np.random.default_rng(settings["seed"])
    gaps, lost = random.random(train.shape) < MISSING, random.random(new.shape) < MISSING
    learned, given = np.where(gaps, np.nan, train), np.where(lost, np.nan, new)
    start = time.process_time()
    imputer = METHODS[settings["method"]](settings["seed"]).fit(learned)
    filled = imputer.transform(given)
    seconds = time.process_time() - start
    values = {
        "rmse": float(np.sqrt(np.mean((filled - new)[lost] ** 2))),
        "seconds": seconds,
        "features": train.shape[1],
        "training_rows": len(train),
    }
    if settings["method"] == OURS:
        found = imputer.impute(given, interval=INTERVAL)
        held = (new >= found.lower) & (new <= found.upper)
        values |= {"held": int(held[lost].sum()), "missing": int(lost.sum())}
    return Outcome(values)


def split_table(table: str, rows: int, seed: int) -> tuple[Array, Array]:
    """Split a table into two thirds to train on and new rows, both standardised by the former."""
    whole = load_table(table, rows)
    whole = whole[np.random.default_rng(seed).permutation(len(whole))]
    n = len(whole) * 2 // 3
    train, new = whole[:n], whole[n:]
    varying = find_varying(train)
    mean, scale = train.mean(axis=0)[varying], train.std(axis=0)[varying]
    return (train[:, varying] - mean) / scale, (new[:, varying] - mean) / scale


def plan_images(rows: int, epochs: int, seed: int) -> list[Trial]:
    """List the trainings on images."""
    shared = {"rows": rows, "epochs": epochs, "seed": seed, "components": 49, "factors": 4}
    return [
        Trial("images", f"fashion-{i}", {"kind": kind, **shared}, run_images)
        for i, kind in enumerate(IMAGE_KINDS)
    ]


def run_images(settings: Settings, data_folder: str | None) -> Outcome:
    """Train on classes 0 to 8 of FashionMNIST, and score complete held-out images."""
    classes = list(range(9))
    train = datasets.load("fashion-mnist", split="train", classes=classes).data
    test = datasets.load("fashion-mnist", split="test", classes=classes).data
    random = np.random.default_rng(settings["seed"])
    images = np.asarray(train, dtype=np.float32)
    images = images[random.permutation(len(images))[: settings["rows"]]]
    if settings["kind"] != IMAGE_KINDS[0]:
        images[random.random(images.shape) < MISSING] = np.nan
    if settings["kind"] == IMAGE_KINDS[2]:
        images = np.where(np.isnan(images), np.nanmean(images, axis=0), images)
    start = time.process_time()
    model = MFA(
        settings["components"],
        settings["factors"],
        solver=NaturalGradient(tol=0),
        max_epochs=settings["epochs"],
        batch_size=1000,
        # The same noise floor for all three, so that they can learn the same densities.
        max_precision=400.0,
        random_state=settings["seed"],
    ).fit(images)
    seconds = time.process_time() - start
    return Outcome({"score": model.score(test), "seconds": seconds, "training_rows": len(images)})


def compose_page(results: Sequence[Result], planned: int, description: Mapping[str, str]) -> str:
    """Compose the page from the finished trials."""
    filled = [one for one in results if one.trial.experiment == "imputation"]
    trained = {one["kind"]: one for one in results if one.trial.experiment == "images"}
    parts = [
        "# Benchmarks: missing values",
        "",
        "Imputation of tables by `MFAImputer` beside scikit-learn's imputers, and training on",
        "images with 30% of the entries missing. `python benchmarks/missing.py --write-docs`",
        "repeats it; it reads ADBench's files from the folder `adbench` in `FACTORMIX_DATA`.",
        "",
    ]
    if len(results) < planned:
        parts += [f"**{planned - len(results)} of {planned} trials are not finished.**", ""]
    if filled:
        parts += _compose_imputation(filled)
    if len(trained) == len(IMAGE_KINDS):
        parts += _compose_images(trained)
    return "\n".join([*parts, fold_description(description)]) + "\n"


def _compose_imputation(results: Sequence[Result]) -> list[str]:
    found = {(one["table"], one["method"]): one for one in results}
    methods = [m for m in METHODS if any(method == m for _, method in found)]
    names = [
        t
        for t in dict.fromkeys(table for table, _ in found)
        if all((t, m) in found for m in methods)
    ]
    if not names:
        return []
    error = {m: np.array([found[t, m]["rmse"] for t in names]) for m in methods}
    seconds = {m: np.array([found[t, m]["seconds"] for t in names]) for m in methods}
    ours = OURS
    others = [m for m in methods if m != ours]
    below = all(error[ours].mean() < error[m].mean() for m in others)
    best = min(error[m].mean() for m in others)
    lines = [
        "## Imputation",
        "",
        f"- The mean error of `{ours}` is {'below' if below else '**not** below'} the errors of all"
        f" others: {error[ours].mean():.3f} against {best:.3f} for the best of them.",
    ]
    if "MissForest" in methods:
        faster = seconds["MissForest"].sum() / seconds[ours].sum()
        lines.append(
            f"- It takes {1 / faster:.3f} times as long as MissForest ({faster:.0f} times faster)."
        )
    held = sum(found[t, ours]["held"] for t in names)
    missing = sum(found[t, ours]["missing"] for t in names)
    each = [found[t, ours]["held"] / found[t, ours]["missing"] for t in names]
    return [
        *lines,
        f"- Its 90% intervals hold {held / missing:.1%} of the {missing:,} entries, between"
        f" {min(each):.1%} and {max(each):.1%} by table"
        f" ({', '.join(f'{t} {share:.1%}' for t, share in zip(names, each, strict=True))}).",
        "",
        f"{len(names)} tables of at most {found[names[0], ours]['rows']} rows each; from ADBench,"
        " inliers only. Two thirds of the rows are for training, and one third are new rows; in"
        " both, 30% of the entries are missing at random. The error is the root of the mean squared"
        " difference between imputed and true entries of the new rows, in standard deviations of"
        " the training rows. Seconds are processor seconds of training and imputation together, in"
        f" one thread. MissForest is `IterativeImputer` with forests of {TREES} trees and {ROUNDS}"
        " rounds. Its time is"
        " proportional to both: with half of the trees it would take about half as long."
        " All else has its defaults. The recipe of `MFAImputer` was chosen on"
        f" {', '.join(TUNING_TABLES)}, none of which is among these.",
        "",
        Table(
            "errors",
            "",
            ["table", "rows", "columns", *methods],
            [
                [
                    t,
                    int(found[t, ours]["training_rows"]),
                    int(found[t, ours]["features"]),
                    *(
                        _mark(found[t, m]["rmse"], [found[t, n]["rmse"] for n in methods])
                        for m in methods
                    ),
                ]
                for t in names
            ]
            + [
                ["**mean error**", "", "", *(f"**{error[m].mean():.3f}**" for m in methods)],
                ["mean rank", "", "", *(f"{_mean_rank(error, m):.1f}" for m in methods)],
                ["mean seconds", "", "", *(f"{seconds[m].mean():.2f}" for m in methods)],
            ],
        ).markdown(),
        "",
    ]


def _mark(value: float, all_of_them: Sequence[float]) -> str:
    text = f"{value:.3f}"
    return f"**{text}**" if value == min(all_of_them) else text


def _mean_rank(error: Mapping[str, np.ndarray], method: str) -> float:
    stacked = np.stack(list(error.values()))
    place = list(error).index(method)
    return float((1 + (stacked < stacked[place]).sum(axis=0)).mean())


def _compose_images(trained: Mapping[str, Result]) -> list[str]:
    complete, gaps, mean = (trained[kind] for kind in IMAGE_KINDS)
    lost = (complete["score"] - gaps["score"]) / abs(complete["score"])
    worse = (complete["score"] - mean["score"]) / abs(complete["score"])
    rows = [
        [kind, f"{trained[kind]['score']:.1f}", f"{trained[kind]['seconds']:.0f}"]
        for kind in IMAGE_KINDS
    ]
    return [
        "## Training with missing entries",
        "",
        f"- With 30% of the entries missing, training comes within {lost:.2%} of complete training"
        f" ({'at most' if lost <= 0.02 else '**more than**'} 2%).",
        f"- With the mean of each pixel in their place, it stays {worse:.0%} below.",
        "",
        f"FashionMNIST, classes 0-8, {complete['training_rows']:,} images, K ="
        f" {complete['components']}, l = {complete['factors']}, {complete['epochs']} passes each,"
        " `max_precision=400`, one seed; held-out mean log-likelihood of the complete test images.",
        "",
        Table(
            "images", "", ["training rows", "held-out log-likelihood", "processor seconds"], rows
        ).markdown(),
        "",
    ]


if __name__ == "__main__":
    main()
