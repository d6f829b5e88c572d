"""Inspect a fitted mixture: factors, components, typical rows, comparison with another model.

The functions live in ``factormix.estimators.inspection``.
"""

from factormix.estimators.inspection import (
    BinnedProportions,
    Comparison,
    Estimate,
    Match,
    NearestRows,
    VarianceExplained,
    Varimax,
    communalities,
    compare,
    confusion,
    distances,
    ndb,
    nearest_rows,
    overlaps,
    variance_explained,
    varimax,
)

__all__ = [
    "BinnedProportions",
    "Comparison",
    "Estimate",
    "Match",
    "NearestRows",
    "VarianceExplained",
    "Varimax",
    "communalities",
    "compare",
    "confusion",
    "distances",
    "ndb",
    "nearest_rows",
    "overlaps",
    "variance_explained",
    "varimax",
]
