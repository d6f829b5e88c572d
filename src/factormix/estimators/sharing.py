"""What mixtures that are to be compared have in common: units and bounds of their training."""

from __future__ import annotations

from dataclasses import dataclass

from factormix.data.batches import Batch
from factormix.data.sources import Rows, count_used

__all__ = ["SCALE_ROWS", "Shared", "draw_sample"]

SCALE_ROWS = 4096
"""Rows that set the working units: enough for a scale, few enough to read before training."""


@dataclass(frozen=True)
class Shared:
    """Rows from which working units and bounds on E follow."""

    sample: Batch
    """Rows (n, d), with weights (n,) above zero or none."""
    max_precision: float | None = None
    """Bound on E times the spread of a feature; None leaves it to the solver."""


def draw_sample(rows: Rows, seed: int) -> Batch:
    """Draw the rows that set the working units."""
    return next(rows.shuffled(min(SCALE_ROWS, count_used(rows)), seed=seed, epoch=0))
