"""Rows to train on and rows to judge by."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.data.batches import Batch, join
from factormix.data.sources import (
    ArrayRows,
    Rows,
    as_rows,
    checked_rows,
    count_used,
    features_of,
    in_order,
    observed_rows,
    weighted,
)
from factormix.data.sources.checks import CHUNK_BYTES
from factormix.errors import InputError

__all__ = ["Split", "split_rows", "taken_rows"]

SHARE = 0.2
"""Share of the rows that is held out unless the caller says otherwise,"""
MOST = 20_000
"""and the most rows that it may be."""


@dataclass(frozen=True)
class Split:
    """Rows to train on, those held out having the weight zero, and the rows held out."""

    train: Rows
    held_out: Rows | None

    @property
    def n_train(self) -> int:
        """Rows that are trained on."""
        return count_used(self.train)


def split_rows(rows: Rows, held_out: Any, seed: int) -> Split:
    """Split checked rows: by a share, by other rows to judge by, or by the default share.

    Rows are not copied, except for those held out: the others are told by their weights, so that
    a file stays where it is.
    """
    number = isinstance(held_out, numbers.Real) and not isinstance(held_out, bool)
    if held_out is not None and not number:
        try:
            judges = checked_rows(as_rows(held_out))
        except InputError as error:
            raise InputError(f"held_out cannot be used: {error}") from error
        judges = in_order(judges, features_of(rows), "training", "held_out")
        return Split(rows, _telling(judges))
    if held_out is not None and not 0 < held_out < 1:
        raise InputError(
            f"held_out must be a share between 0 and 1, or rows to judge by, not {held_out!r}."
        )
    n = count_used(rows)
    wanted = min(SHARE * n, MOST) if held_out is None else float(held_out) * n
    n_held = max(1, math.floor(wanted))
    if n - n_held < 2:
        raise InputError(
            f"X has n_samples={n}, too few to hold some out: give more rows, or rows to judge by as"
            " held_out."
        )
    weights: NDArray[np.float64] | None = getattr(rows, "weights", None)
    weights = np.ones(rows.n_rows) if weights is None else weights
    used = np.flatnonzero(weights)
    chosen = np.sort(np.random.default_rng([seed, n]).choice(used, n_held, replace=False))
    others = weights.copy()
    others[chosen] = 0
    return Split(weighted(rows, others), _telling(taken_rows(rows, chosen)))


def _telling(rows: Rows) -> Rows:
    """Return rows to judge by in which those without an observed entry count for nothing.

    The density of nothing is one, whatever the mixture.
    """
    seen = observed_rows(rows)
    if seen is None:
        return rows
    given: NDArray[np.float64] | None = getattr(rows, "weights", None)
    weights = seen.astype(np.float64) if given is None else seen * given
    if not weights.any():
        raise InputError(
            "no entry of the rows held out is observed, so that they cannot judge: give more rows,"
            " or others to judge by as held_out."
        )
    return weighted(rows, weights)


def taken_rows(rows: Rows, chosen: NDArray[np.intp]) -> Rows:
    """Copy the chosen rows, by their numbers in order, into memory."""
    parts, first = list[Batch](), 0
    for block in rows.blocks(max(1, CHUNK_BYTES // (8 * rows.n_features))):
        last = first + len(block)
        mine = chosen[np.searchsorted(chosen, first) : np.searchsorted(chosen, last)] - first
        if len(mine):
            parts.append(block.take(mine))
        first = last
    taken, features = join(parts), features_of(rows)
    weights = None if taken.weights is None else np.asarray(taken.weights, dtype=np.float64)
    copied = ArrayRows(taken.rows, weights=weights, feature_names=features.names)
    copied.image_shape = features.image_shape
    return copied.known_finite(complete=getattr(rows, "complete", False))
