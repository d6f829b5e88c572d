"""What mixtures that are to be compared have in common: units and bounds of their training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from factormix.data.batches import Batch
from factormix.data.columns import Columns
from factormix.data.sources import Rows, Source, check_observed, count_used, never_observed
from factormix.data.units import Units
from factormix.data.weights import digest
from factormix.training.loop import Run
from factormix.training.solvers import resolve

if TYPE_CHECKING:
    from factormix.estimators.mfa import MFA

__all__ = [
    "SCALE_ROWS",
    "Shared",
    "check_first_columns",
    "draw_sample",
    "fingerprint",
    "with_every_column",
]

SCALE_ROWS = 4096
"""Rows that set the working units: enough for a scale, few enough to read before training."""


@dataclass(frozen=True)
class Shared:
    """Working units, and the bound on E in them."""

    units: Units
    bound: Tensor
    """(d,)."""

    @classmethod
    def estimate(cls, model: MFA, sample: Batch, max_precision: float | None = None) -> Self:
        """Choose units and bound by the options of a model, from a sample of rows (n, d).

        Where the model has no bound, ``max_precision`` times the spread of a feature is the most,
        or what the solver says.
        """
        units = Units.estimate(sample, model.scaling)
        default = max_precision or resolve(model.solver).default_max_precision
        return cls(units, units.bound(model.max_precision, default, sample))

    @classmethod
    def of(cls, run: Run) -> Self:
        """Return what a run has."""
        bound = run.problem.max_precision
        assert bound is not None
        return cls(run.units, bound)


def draw_sample(rows: Rows, seed: int) -> Batch:
    """Draw the rows that set the working units."""
    return next(rows.shuffled(min(SCALE_ROWS, count_used(rows)), seed=seed, epoch=0))


def check_first_columns(source: Source, first: Batch) -> None:
    """Check that every column has a value in the first rows of a stream, which set its units."""
    lacking = (~Columns(first).observed).nonzero()
    if len(lacking):
        raise never_observed(source, int(lacking[0]))


def with_every_column(rows: Rows, sample: Batch) -> Batch:
    """Return a sample of rows in which every column has a value, or say which has none."""
    return sample if getattr(rows, "complete", False) else check_observed(rows, sample)


def fingerprint(rows: Rows, sample: Batch) -> str:
    """Identify rows by their number, a hash of a sample of them, and a hash of their weights."""
    content = torch.as_tensor(sample.rows[:256]).detach().cpu().contiguous().numpy().tobytes()
    parts, weights = (
        [str(rows.n_rows), hashlib.sha256(content).hexdigest()],
        getattr(rows, "weights", None),
    )
    return " ".join(parts if weights is None else [*parts, digest(weights)])
