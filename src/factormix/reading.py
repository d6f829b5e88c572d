"""Public names for reading a model: factors, components, rows, comparison, samples."""

from factormix.estimators.inspection import (
    Binned,
    Comparison,
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
    "Binned",
    "Comparison",
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
