"""Weights of rows: what they must be, and what they mean to a fit and to a stream."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from torch import Tensor

from factormix.data.batches import Weights
from factormix.data.values import real_array, real_tensor
from factormix.errors import InputError

__all__ = ["absolute_weights", "check_weights", "digest", "relative_weights"]

LEAST, MOST = 1e-30, 1e30
"""Weights between which sums over a batch hold in float32; what is smaller counts as zero."""


def check_weights(sample_weight: Any, n_rows: int) -> Weights:
    """Return weights of rows as an array (n,): finite, none negative, some positive.

    One number counts for all rows.
    """
    name = "sample_weight"
    if isinstance(sample_weight, Tensor):
        sample_weight = real_tensor(sample_weight, name).detach().cpu().double().numpy()
    given = real_array(sample_weight, name)
    if given.shape not in ((), (n_rows,)):
        raise InputError(
            f"{name} must be one number or have the shape ({n_rows},), a weight for each row of X,"
            f" not {given.shape}."
        )
    weights = np.broadcast_to(np.asarray(given, dtype=np.float64), (n_rows,))
    wrong = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
    if len(wrong):
        raise InputError(
            f"{name} has {weights[wrong[0]]} in row {wrong[0]} (counting from 0): give finite"
            " weights that are not negative; zero leaves a row out."
        )
    if not weights.any():
        raise InputError(f"every {name} is zero: give at least one row a positive weight.")
    return weights


def relative_weights(weights: Weights | None) -> Weights | None:
    """Scale weights (n,) so that those above zero have the mean one; equal weights become None."""
    if weights is None or weights.min() == weights.max():
        return None
    # By the largest first, because a sum of large weights may overflow.
    relative: Weights = weights / weights.max()
    relative[relative < LEAST] = 0
    relative /= relative[relative > 0].mean()
    return relative


def absolute_weights(weights: Weights | None) -> Weights | None:
    """Return weights (n,) as they are, where a step can be taken with them."""
    if weights is None:
        return None
    if not LEAST <= weights.max() <= MOST:
        raise InputError(
            f"the largest sample_weight is {weights.max()}, and partial_fit takes weights as they"
            f" are, which must lie between {LEAST} and {MOST}: multiply all of them by a constant."
        )
    return np.where(weights < LEAST, 0, weights)


def digest(weights: Weights) -> str:
    """Compute a hash that tells weights (n,) from others."""
    return hashlib.sha256(np.ascontiguousarray(weights).data).hexdigest()
