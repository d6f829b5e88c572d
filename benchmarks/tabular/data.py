"""Ordinary tables: where they come from, and their folds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.model_selection import KFold
from sklearn.preprocessing import StandardScaler

__all__ = ["SCALINGS", "available", "fold", "load"]

Array = NDArray[np.float64]

SCALINGS = ("standardised", "raw")

SKLEARN: dict[str, Callable[[], Any]] = {
    "iris": datasets.load_iris,
    "wine": datasets.load_wine,
    "breast_cancer": datasets.load_breast_cancer,
    "diabetes": datasets.load_diabetes,
    "digits": datasets.load_digits,
    "linnerud": datasets.load_linnerud,
}
"""The tables that scikit-learn brings along."""


def available() -> list[str]:
    """List the tables of scikit-learn and those in the folder ``adbench`` of the data."""
    return [*SKLEARN, *sorted((path.stem for path in _folder().glob("*.npz")), key=_number)]


def load(name: str, most_rows: int) -> Array:
    """Load a table (n, d): inliers only, a fixed choice of rows, no column that is constant."""
    if name in SKLEARN:
        rows = SKLEARN[name]().data
    else:
        with np.load(_folder() / f"{name}.npz", allow_pickle=False) as file:
            rows = file["X"][file["y"] == 0]
    if len(rows) > most_rows:
        chosen = np.random.default_rng(0).permutation(len(rows))[:most_rows]
        rows = rows[np.sort(chosen)]
    rows = np.asarray(rows, dtype=np.float64)
    return rows[:, varying(rows)]


def fold(rows: Array, scaling: str, number: int, folds: int) -> tuple[Array, Array]:
    """Return the training rows and the held-out rows of a fold.

    Columns that are constant in the training rows are dropped, whoever is to be trained on them.
    """
    splits = KFold(folds, shuffle=True, random_state=0).split(rows)
    learn, judge = list(splits)[number]
    kept = varying(rows[learn])
    train, held_out = rows[learn][:, kept], rows[judge][:, kept]
    if scaling == "raw":
        return train, held_out
    scaler = StandardScaler().fit(train)
    return scaler.transform(train), scaler.transform(held_out)


def varying(rows: Array) -> NDArray[np.bool_]:
    """Tell which columns of rows (n, d) have more than one value, (d,)."""
    return np.asarray((rows != rows[:1]).any(axis=0))


def discrete(rows: Array) -> int:
    """Count the columns with at most 20 values, or with one value in a quarter of the rows."""
    counts = [np.unique(column, return_counts=True)[1] for column in rows.T]
    return sum(bool(len(each) <= 20 or each.max() >= len(rows) / 4) for each in counts)


def dependent(rows: Array) -> int:
    """Count the columns that are linear combinations of the others, to eight digits."""
    correlation = np.corrcoef(rows, rowvar=False)
    return int((np.linalg.eigvalsh(np.atleast_2d(correlation)) < 1e-8).sum())


def _folder() -> Path:
    return Path(os.environ.get("FACTORMIX_DATA", "data")) / "adbench"


def _number(name: str) -> tuple[int, str]:
    """Sort ADBench's tables by their numbers, those without one last."""
    head = name.split("_")[0]
    return (int(head) if head.isdigit() else 10**6, name)
