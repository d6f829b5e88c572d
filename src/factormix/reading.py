"""Public names for reading a model: factors, components, rows, comparison, samples."""

from factormix.estimators.binning import Binned, ndb
from factormix.estimators.comparison import Comparison, compare
from factormix.estimators.reading import (
    NearestRows,
    VarianceExplained,
    Varimax,
    communalities,
    confusion,
    distances,
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
