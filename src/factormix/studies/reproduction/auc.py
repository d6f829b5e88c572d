"""How well a score tells inliers from outliers, by the paper's own measure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from factormix.errors import InputError

__all__ = ["threshold_auc", "threshold_curve"]

Vector = NDArray[np.floating[Any]]


def threshold_curve(
    inliers: ArrayLike, outliers: ArrayLike, n_thresholds: int = 100
) -> tuple[Vector, Vector]:
    """Compute the shares of inliers kept and of outliers rejected, (n,) each.

    The thresholds are equidistant between the lowest and the highest score; a row is kept when its
    score is not below the threshold.
    """
    high, low = np.sort(_scores(inliers, "inliers")), np.sort(_scores(outliers, "outliers"))
    first, last = min(high[0], low[0]), max(high[-1], low[-1])
    thresholds = np.linspace(first, last, n_thresholds)
    kept = 1 - np.searchsorted(high, thresholds, side="left") / len(high)
    rejected = np.searchsorted(low, thresholds, side="left") / len(low)
    return kept, rejected


def threshold_auc(inliers: ArrayLike, outliers: ArrayLike, n_thresholds: int = 100) -> float:
    """Compute the paper's AUC: the trapezoid area under rejected against kept.

    The curve ends at the highest score and is not drawn on to where nothing is kept, so that the
    area of few scores, or of many ties, falls short of the exact one. So does one score far out,
    between which and the others most thresholds lie.
    """
    kept, rejected = threshold_curve(inliers, outliers, n_thresholds)
    return float(np.sum((kept[:-1] - kept[1:]) * (rejected[:-1] + rejected[1:]) / 2))


def _scores(values: ArrayLike, name: str) -> Vector:
    scores: Vector = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not len(scores) or not np.isfinite(scores).all():
        raise InputError(f"the scores of the {name} must be one or more finite numbers, shape (n,)")
    return scores
