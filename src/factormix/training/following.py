"""Working units and bounds that follow a stream.

The first rows of a stream may tell little about what comes: a column may begin to vary, or a scale
may change. So the last rows are kept, and whenever the stream has become twice as long, or has been
forgotten in part, units and bounds are chosen anew from them. What the model has learned is
expressed in the new units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from factormix.data.batches import Batch
from factormix.data.columns import Columns, precise
from factormix.data.units import Scaling, Units
from factormix.errors import InputError
from factormix.training.solvers.base import Change

if TYPE_CHECKING:
    from factormix.training.loop import Run

__all__ = ["Following", "follow"]

MOST_ROWS = 2048
MOST_ELEMENTS = 1 << 22
"""The most that is kept of a stream."""
FACTOR = 2.0
"""Change of scale, or shift measured in scales, from which units are changed."""


@dataclass
class Following:
    """The last rows of a stream, and when they are looked at again."""

    rows: Tensor
    """(n, d), float64, in units of the data, on the CPU."""
    weights: Tensor
    """(n,), weights of these rows."""
    scaling: Scaling
    max_precision: float | None
    """The caller's own bound, in units of the data."""
    next_look: int = 0
    """Rows of the stream after which units are chosen again."""

    @classmethod
    def begin(cls, sample: Batch, scaling: Scaling, max_precision: float | None) -> Following:
        """Follow a stream whose units were set by a sample of its first rows."""
        none = torch.empty(0, sample.rows.shape[1], dtype=torch.float64)
        return cls(none, none.new_empty(0), scaling, max_precision, 2 * len(sample))

    def keep(self, batch: Batch, most: int) -> None:
        """Add a batch to the last rows, of which at most so many are kept."""
        weights = torch.ones(len(batch)) if batch.weights is None else batch.weights
        self.rows = torch.cat([self.rows, precise(batch.rows[-most:])])[-most:]
        self.weights = torch.cat([self.weights, precise(weights[-most:])])[-most:]


def follow(run: Run, batch: Batch) -> None:
    """Take note of a batch, in units of the data, and adapt units and bounds when it is time."""
    following = run.following
    if following is None:
        return
    most = min(MOST_ROWS, max(1, MOST_ELEMENTS // batch.rows.shape[1]))
    # What comes long before the next look would be forgotten by then.
    if run.samples > following.next_look - most:
        following.keep(batch, most)
    if run.samples < following.next_look:
        return
    interval = run.samples
    forgetting = getattr(run.plan.solver, "forgetting", None)
    if forgetting:
        interval = min(interval, int(2 * run.batch_size / forgetting))
    following.next_look = run.samples + interval
    _adapt(run, following)
    following.rows, following.weights = following.rows[:0].clone(), following.weights[:0].clone()


def _adapt(run: Run, following: Following) -> None:
    sample = Batch(following.rows, following.weights)
    # What the last rows do not show stays as it is.
    shown = Columns(sample).observed
    try:
        units = Units.estimate(sample, following.scaling)
        old = run.units
        units = Units(
            torch.where(shown, units.offset, old.offset), torch.where(shown, units.scale, old.scale)
        )
        if _differ(run.units, units):
            _change_units(run, units)
        default = run.plan.solver.default_max_precision
        bound = run.units.bound(following.max_precision, default, sample)
    except InputError:
        # Rows that are all the same tell nothing about scales.
        return
    bound = bound.to(run.state.bound).expand_as(run.state.bound)
    run.state.bound = torch.where(shown.to(bound.device), bound, run.state.bound)


def _differ(old: Units, new: Units) -> bool:
    """Tell whether units are so far apart that a model should change them."""
    ratio = new.scale / old.scale
    shift = (new.offset - old.offset).abs() / torch.maximum(old.scale, new.scale)
    return bool((ratio > FACTOR).any() or (ratio * FACTOR < 1).any() or (shift > FACTOR).any())


def _change_units(run: Run, units: Units) -> None:
    old, run.units = run.units, units
    change = Change((units.offset - old.offset) / old.scale, units.scale / old.scale)
    run.state = run.plan.change_units(run.state, change)
    run.recent = run.recent + run.recent_steps * (units.log_volume - old.log_volume)
