"""Figure 1 and the convergence claim: centroids, precisions and loading columns of three classes.

The paper trains K = 25 components with l = 4 on classes 0, 1 and 2, in 15 + 50 epochs from random
values, ten times, and finds that every run converges. Figure 2 draws samples from these models.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import numpy as np
from harness import Outcome, Settings, Trial
from numpy.typing import NDArray
from reproduction_plan import (
    Scale,
    choose_training_rows,
    load_images,
    make_paper_model,
)
from sklearn.metrics import euclidean_distances

from factormix.core.annealing import grid_shape
from factormix.core.inspection import in_use
from factormix.estimators import MFA

CLASSES = [0, 1, 2]
COMPONENTS = {"mnist": (0, 6, 15), "fashion-mnist": (1, 3, 13)}
"""The components that the paper's Figure 2 draws samples from."""

Array = NDArray[np.floating[Any]]


def plan_trials(sets: list[str], scale: Scale, seeds: int) -> list[Trial]:
    """List one training per data set and seed."""
    trials = []
    for seed, dataset in itertools.product(range(seeds), sets):
        settings = {
            "dataset": dataset,
            "classes": CLASSES,
            "n_components": 25,
            "n_factors": 4,
            "max_precision": 20.0,
            "min_eigenvalue": 0.05,
            "seed": seed,
            "rows": scale.rows,
            "steps": scale.steps,
        }
        trials.append(Trial("figure1", f"{dataset}-seed{seed}", settings, run))
    return trials


def run(settings: Settings, data_folder: str | None) -> Outcome:
    """Train one model and measure the paper's claims about it."""
    source = load_images(settings["dataset"], data_folder)
    rows = choose_training_rows(source, settings["classes"], settings)
    start = time.perf_counter()
    model = make_paper_model(settings, len(rows)).fit(rows)
    seconds = time.perf_counter() - start
    model.image_shape_ = tuple(source.image_shape)
    test = source.test[np.isin(source.test_labels, settings["classes"])]
    last = model.history_[-1]
    values = {
        "seconds": seconds,
        "epochs": last["epoch"],
        "test_log_likelihood": model.score(test),
        "components_in_use": last["components_in_use"],
        "sigma": last["sigma"],
        "late_rise": late_rise([entry["log_likelihood"] for entry in model.history_]),
        "history": [
            [entry[name] for name in ("epoch", "log_likelihood", "components_in_use")]
            for entry in model.history_
        ],
        "image_shape": list(source.image_shape),
        "note": source.note,
        **_measure_structure(model),
    }
    return Outcome(values, model=model)


def late_rise(likelihoods: list[float]) -> float:
    """Compute the share of a run's rise in likelihood that fell into its last tenth.

    The first tenth does not count: it only leaves the random start.
    """
    curve = np.asarray(likelihoods)
    tail = curve[max(0, int(0.9 * len(curve)) - 1)]
    whole = curve[-1] - curve[int(0.1 * len(curve))]
    if whole == 0:
        return 0.0
    # A run that has fallen has not levelled off.
    return float((curve[-1] - tail) / whole) if whole > 0 else math.inf


def _measure_structure(model: MFA) -> dict[str, Any]:
    """Measure the order of the grid, the loading columns, the precisions and the samples."""
    used = in_use(np.asarray(model.weights_))
    Gamma, E = np.asarray(model.precision_factors_)[used], np.asarray(model.precision_diag_)[used]
    means, loadings = np.asarray(model.means_), np.asarray(model.loadings_)[used]
    between = _all_pairs(euclidean_distances(means[used]))
    spread = np.sqrt(2 * (loadings**2).sum(axis=(1, 2))).mean()
    return {
        "column_strengths": np.linalg.norm(Gamma, axis=1).mean(axis=0).tolist(),
        "column_cosine": _mean_cosine(Gamma),
        "neighbour_ratio": neighbour_ratio(means),
        "neighbour_chance": neighbour_chance(means),
        "share_18_20": float(((E >= 18) & (E <= 20)).mean()),
        "sample_spread": float(spread / between.mean()) if between.size else 0.0,
    }


def neighbour_ratio(means: Array) -> float:
    """Divide the mean distance between neighbours on the torus grid by the mean of all pairs.

    ``means`` has the shape (K, d).
    """
    apart = euclidean_distances(means)
    return float(apart[_neighbours(len(means))].mean() / _all_pairs(apart).mean())


def _all_pairs(apart: Array) -> Array:
    """Select the distances of different points, once each, from the matrix (n, n)."""
    return apart[np.triu_indices(len(apart), 1)]


def neighbour_chance(means: Array, arrangements: int = 1000) -> float:
    """Estimate how often random arrangements on the grid have neighbours as near as these."""
    first, second = _neighbours(len(means))
    apart = euclidean_distances(means)
    generator = np.random.default_rng(0)
    found = apart[first, second].mean()
    orders = (generator.permutation(len(means)) for _ in range(arrangements))
    nearer = sum(apart[order[first], order[second]].mean() <= found for order in orders)
    return float((nearer + 1) / (arrangements + 1))


def _neighbours(n_components: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """List the pairs of components that touch on the torus grid, to the right and below."""
    grid = np.arange(n_components).reshape(grid_shape(n_components))
    shifted = [np.roll(grid, 1, axis=axis).ravel() for axis in (0, 1)]
    return np.tile(grid.ravel(), 2), np.concatenate(shifted)


def _mean_cosine(Gamma: Array) -> float:
    """Compute the mean absolute cosine between two columns of a component, (K, d, l)."""
    columns = Gamma / np.maximum(np.linalg.norm(Gamma, axis=1, keepdims=True), 1e-12)
    first, second = np.triu_indices(Gamma.shape[2], 1)
    return float(np.abs(columns.transpose(0, 2, 1) @ columns)[:, first, second].mean())
