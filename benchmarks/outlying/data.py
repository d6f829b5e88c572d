"""ADBench's tables and image classes as problems of outlier detection."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from factormix import datasets

__all__ = ["available", "contaminated", "held_out_class", "novelty", "standardised", "width"]

Array = NDArray[np.float64]
Labels = NDArray[np.int64]

LEAST_OUTLIERS = 30
"""Outliers that a choice of rows keeps, where there are as many."""


def folder() -> Path:
    return Path(os.environ.get("FACTORMIX_DATA", "data")) / "adbench"


def available() -> list[str]:
    """List the tables, by ADBench's numbers, those without one last."""

    def number(name: str) -> tuple[int, str]:
        head = name.split("_")[0]
        return (int(head) if head.isdigit() else 10**6, name)

    return sorted((path.stem for path in folder().glob("*.npz")), key=number)


def width(name: str) -> int:
    """Return the number of columns of a table."""
    with np.load(folder() / f"{name}.npz", allow_pickle=False) as file:
        return int(file["X"].shape[1])


def load(name: str, most_rows: int, seed: int) -> tuple[Array, Labels]:
    """Load a table (n, d) and its labels, 1 for outliers; a choice by seed of large ones."""
    with np.load(folder() / f"{name}.npz", allow_pickle=False) as file:
        X, y = file["X"], file["y"].astype(np.int64)
    if len(X) > most_rows:
        random = np.random.default_rng(seed)
        outliers = random.permutation(np.flatnonzero(y == 1))
        inliers = random.permutation(np.flatnonzero(y == 0))
        kept = max(round(most_rows * len(outliers) / len(X)), min(LEAST_OUTLIERS, len(outliers)))
        chosen = np.sort(np.concatenate([outliers[:kept], inliers[: most_rows - kept]]))
        X, y = X[chosen], y[chosen]
    return X.astype(np.float64), y


def novelty(name: str, most_rows: int, seed: int) -> tuple[Array, Array, Labels]:
    """Return half of the inliers to train on, and all other rows with their labels to judge."""
    X, y = load(name, most_rows, seed)
    inliers = np.random.default_rng([seed, 1]).permutation(np.flatnonzero(y == 0))
    half = len(inliers) // 2
    rest = np.concatenate([inliers[half:], np.flatnonzero(y == 1)])
    train, judged = standardised(X[inliers[:half]], X[rest])
    return train, judged, y[rest]


def contaminated(name: str, most_rows: int, seed: int) -> tuple[Array, Labels]:
    """Return all rows, in another order for each seed, and their labels."""
    X, y = load(name, most_rows, seed)
    order = np.random.default_rng([seed, 2]).permutation(len(X))
    rows, _ = standardised(X[order], X[:1])
    return rows, y[order]


def held_out_class(
    name: str, digit: int, train_rows: int, judged_rows: int, seed: int
) -> tuple[Array, Array, Labels]:
    """Return training images of all other classes, and test images labelled 1 for this class."""
    others = [label for label in range(10) if label != digit]
    train = datasets.load(name, classes=others).data
    test = datasets.load(name, split="test")
    random = np.random.default_rng([seed, digit])
    chosen = random.permutation(len(train))[:train_rows]
    judged = random.permutation(len(test.data))[:judged_rows]
    labels = (test.labels[judged] == digit).astype(np.int64)
    return (
        np.asarray(train[chosen], dtype=np.float64),
        np.asarray(test.data[judged], dtype=np.float64),
        labels,
    )


def standardised(train: Array, other: Array) -> tuple[Array, Array]:
    """Leave out columns that are constant in training, and standardise the rest by it."""
    kept = (train != train[:1]).any(axis=0)
    mean, deviation = train[:, kept].mean(axis=0), train[:, kept].std(axis=0)
    deviation[deviation == 0] = 1.0
    return (train[:, kept] - mean) / deviation, (other[:, kept] - mean) / deviation
