"""Imputation of tables: one method on one table is a trial."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestRegressor
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer
from tabular import data

from factormix import MFAImputer
from factormix.studies.harness import Outcome, Settings, Trial

__all__ = ["CHOSEN_ON", "METHODS", "OURS", "TABLES", "trials"]

TABLES = (
    "wine", "diabetes", "breast_cancer", "6_cardio", "10_cover", "22_magic.gamma", "28_pendigits",
    "30_satellite", "32_shuttle", "40_vowels",
)  # fmt: skip
"""The tables that judge."""
CHOSEN_ON = (
    "2_annthyroid", "4_breastw", "12_fault", "14_glass", "18_Ionosphere", "20_letter", "38_thyroid",
    "46_WPBC",
)  # fmt: skip
"""The tables on which the recipe of MFAImputer was chosen; none of them judges."""
MISSING, INTERVAL = 0.3, 0.9
TREES, ROUNDS = 100, 5
"""Trees of a forest, and rounds over the columns, of MissForest."""
OURS = "MFAImputer"

Array = NDArray[np.float64]


def _forests(seed: int) -> IterativeImputer:
    forest = RandomForestRegressor(n_estimators=TREES, random_state=seed, n_jobs=1)
    return IterativeImputer(forest, max_iter=ROUNDS, random_state=seed)


METHODS: dict[str, Callable[[int], Any]] = {
    OURS: lambda seed: MFAImputer(random_state=seed),
    "mean": lambda seed: SimpleImputer(),
    "IterativeImputer": lambda seed: IterativeImputer(random_state=seed),
    "KNNImputer": lambda seed: KNNImputer(),
    "MissForest": _forests,
}


def trials(tables: Sequence[str], methods: Sequence[str], rows: int, seed: int) -> list[Trial]:
    """List every method on every table."""
    return [
        Trial(
            "imputation",
            f"{table}-{method}",
            {"table": table, "method": method, "rows": rows, "seed": seed, **_forest_size(method)},
            run,
        )
        for table in tables
        for method in methods
    ]


def _forest_size(method: str) -> dict[str, int]:
    return {"trees": TREES, "rounds": ROUNDS} if method == "MissForest" else {}


def run(settings: Settings, data_folder: str | None) -> Outcome:
    """Learn from rows with gaps, fill in new rows, and compare with what was taken away."""
    train, new = split(settings["table"], settings["rows"], settings["seed"])
    random = np.random.default_rng(settings["seed"])
    gaps, lost = random.random(train.shape) < MISSING, random.random(new.shape) < MISSING
    learned, given = np.where(gaps, np.nan, train), np.where(lost, np.nan, new)
    begun = time.perf_counter()
    imputer = METHODS[settings["method"]](settings["seed"]).fit(learned)
    filled = imputer.transform(given)
    seconds = time.perf_counter() - begun
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


def split(table: str, rows: int, seed: int) -> tuple[Array, Array]:
    """Return two thirds of a table to learn from and the rest, in units of the former's spread."""
    whole = data.load(table, rows)
    whole = whole[np.random.default_rng(seed).permutation(len(whole))]
    n = len(whole) * 2 // 3
    train, new = whole[:n], whole[n:]
    varying = data.varying(train)
    mean, scale = train.mean(axis=0)[varying], train.std(axis=0)[varying]
    return (train[:, varying] - mean) / scale, (new[:, varying] - mean) / scale
