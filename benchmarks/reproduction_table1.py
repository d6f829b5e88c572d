"""Table I and SVHN: detection of a class that training never saw, by its likelihood.

The paper trains K = 49 components on classes 0 to 8 and reports the AUC of class 9, for a GMM
(l = 0) and an MFA (l = 4). Here every class is held out in turn. The table has a row for each
choice that the paper leaves open: the bound on E (20, or 400 if it bounds the root), the score
(log-sum-exp or the largest component, both from one training) and the floor of M's eigenvalues. No
setting was chosen by looking at outliers. SVHN is run the same way with K = 25.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
from harness import Outcome, Settings, Trial
from numpy.typing import ArrayLike, NDArray
from reproduction_plan import (
    Scale,
    choose_training_rows,
    load_images,
    make_paper_model,
)
from sklearn.metrics import roc_auc_score

from factormix.errors import InputError

MAIN_CLASSES = (9, 0)
"""The paper's class, and the class of the authors' public scripts for a sister model."""

FLOOR_SEEDS = 3
"""Maximum seeds of the variant with another floor: a smaller question than the bound."""

MODELS = {"GMM": 0, "MFA": 4}
"""Number of factors of each model."""

SCORES = tuple(itertools.product(("log-sum-exp", "max-component"), ("thresholds", "rank")))
"""Scores, and the ways to integrate."""

Vector = NDArray[np.floating[Any]]

PAPER = {
    ("mnist", "GMM"): 0.901,
    ("mnist", "MFA"): 0.922,
    ("fashion-mnist", "GMM"): 0.837,
    ("fashion-mnist", "MFA"): 0.853,
}

VARIANTS = {
    "E ≤ 20": {"max_precision": 20.0, "min_eigenvalue": 0.05},
    "E ≤ 400": {"max_precision": 400.0, "min_eigenvalue": 0.05},
    "E ≤ 20, M ≥ 0.01": {"max_precision": 20.0, "min_eigenvalue": 0.01},
}


def plan_trials(sets: list[str], scale: Scale) -> list[Trial]:
    """List the trainings, the paper's case first, so that an early stop leaves the main rows."""
    cases = _cases(scale)
    return [
        _trial("table1", dataset, model, variant, held_out, seed, 49, scale)
        for (variant, held_out, seed), dataset, model in itertools.product(cases, sets, MODELS)
        # A GMM has no M.
        if model == "MFA" or "M ≥" not in variant
    ]


def plan_svhn(scale: Scale) -> list[Trial]:
    """List the trainings on SVHN."""
    return [
        _trial("svhn", "svhn", model, "E ≤ 20", held_out, seed, 25, scale)
        for seed, held_out, model in itertools.product(
            range(min(3, scale.seeds)), MAIN_CLASSES, MODELS
        )
    ]


def _cases(scale: Scale) -> list[tuple[str, int, int]]:
    """List (variant, held-out class, seed) in the order of importance."""
    others = [c for c in range(10) if c not in MAIN_CLASSES]
    bound, wide, floor = VARIANTS
    seeds = range(1, scale.seeds)
    cases = [(v, c, 0) for v in VARIANTS for c in MAIN_CLASSES]
    cases += [(bound, c, s) for s in range(scale.other_seeds) for c in others]
    cases += [(bound, c, s) for s in seeds for c in MAIN_CLASSES]
    if scale.variants:
        cases += [(wide, c, s) for s in range(scale.other_seeds) for c in others]
    cases += [(wide, c, s) for s in seeds for c in MAIN_CLASSES]
    return cases + [(floor, c, s) for s in seeds[: FLOOR_SEEDS - 1] for c in MAIN_CLASSES]


def _trial(
    experiment: str,
    dataset: str,
    model: str,
    variant: str,
    held_out: int,
    seed: int,
    n_components: int,
    scale: Scale,
) -> Trial:
    settings = {
        "dataset": dataset,
        "model": model,
        "variant": variant,
        "held_out": held_out,
        "n_components": n_components,
        "n_factors": MODELS[model],
        **VARIANTS[variant],
        "seed": seed,
        "rows": scale.rows,
        "steps": scale.steps,
    }
    bound, floor = VARIANTS[variant]["max_precision"], VARIANTS[variant]["min_eigenvalue"]
    name = f"{dataset}-{model.lower()}-E{bound:g}-M{floor:g}-without{held_out}-seed{seed}"
    return Trial(experiment, name, settings, run)


def run(settings: Settings, data_folder: str | None) -> Outcome:
    """Train without one class and measure how well its test images are detected."""
    source = load_images(settings["dataset"], data_folder)
    held_out = settings["held_out"]
    classes = [c for c in range(10) if c != held_out]
    rows = choose_training_rows(source, classes, settings)
    start = time.perf_counter()
    model = make_paper_model(settings, len(rows)).fit(rows)
    seconds = time.perf_counter() - start
    likelihood = np.asarray(model.score_samples(source.test), dtype=np.float64)
    # max_k [log pi_k + log p_k(x)] is log p(x) + log max_k p(k | x).
    largest = likelihood + np.log(np.asarray(model.predict_proba(source.test)).max(axis=1))
    inlier = source.test_labels != held_out
    scores = {"log-sum-exp": likelihood, "max-component": largest}
    values = {
        "seconds": seconds,
        "epochs": model.history_[-1]["epoch"],
        "n_rows": len(rows),
        "components_in_use": model.history_[-1]["components_in_use"],
        "test_log_likelihood": float(likelihood[inlier].mean()),
        "auc": {
            name: {
                "rank": float(roc_auc_score(inlier, score)),
                "thresholds": threshold_auc(score[inlier], score[~inlier]),
            }
            for name, score in scores.items()
        },
        "image_shape": list(source.image_shape),
        "note": source.note,
    }
    model.image_shape_ = tuple(source.image_shape)
    arrays = {"scores": likelihood.astype(np.float32), "inlier": inlier.astype(np.uint8)}
    drawn = settings["dataset"] == "svhn" and settings["seed"] == 0
    return Outcome(values, arrays, model if drawn else None)


def threshold_curve(
    inliers: ArrayLike, outliers: ArrayLike, n_thresholds: int = 100
) -> tuple[Vector, Vector]:
    """Compute the shares of inliers kept and of outliers rejected, (n,) each.

    The thresholds are equidistant between the lowest and the highest score; a row is kept if its
    score is not below the threshold.
    """
    high, low = (
        np.sort(_check_scores(inliers, "inliers")),
        np.sort(_check_scores(outliers, "outliers")),
    )
    first, last = min(high[0], low[0]), max(high[-1], low[-1])
    thresholds = np.linspace(first, last, n_thresholds)
    kept = 1 - np.searchsorted(high, thresholds, side="left") / len(high)
    rejected = np.searchsorted(low, thresholds, side="left") / len(low)
    return kept, rejected


def threshold_auc(inliers: ArrayLike, outliers: ArrayLike, n_thresholds: int = 100) -> float:
    """Compute the paper's AUC: the trapezoid area under rejected against kept.

    The curve ends at the highest score, where some rows are still kept. So the area of few scores,
    or of many ties, falls short of the exact one, as it does when most thresholds lie between one
    extreme score and the others.
    """
    kept, rejected = threshold_curve(inliers, outliers, n_thresholds)
    return float(np.sum((kept[:-1] - kept[1:]) * (rejected[:-1] + rejected[1:]) / 2))


def _check_scores(values: ArrayLike, name: str) -> Vector:
    scores: Vector = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not len(scores) or not np.isfinite(scores).all():
        raise InputError(
            f"the scores of the {name} must be one or more finite numbers, shape (n,): leave out"
            " the others."
        )
    return scores
