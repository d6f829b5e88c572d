"""Weights of rows: what they mean to a fit, and batches that carry them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from factormix.data.sources import Batch, Rows, WeightableRows, Weights
from factormix.errors import InputError

__all__ = [
    "absolute_weights",
    "check_weightable",
    "count_rows",
    "digest",
    "relative_weights",
    "weighted_batches",
    "weighted_blocks",
]

Weighted = Iterator[tuple[Batch, Weights | None]]

LEAST, MOST = 1e-30, 1e30
"""Weights between which sums over a batch hold in float32; what is smaller counts as zero."""


def relative_weights(weights: Weights | None) -> Weights | None:
    """Scale weights (n,) so that those above zero have the mean one; equal ones say nothing."""
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


def count_rows(rows: Rows, weights: Weights | None) -> int:
    """Count the rows of positive weight."""
    return rows.n_rows if weights is None else int(np.count_nonzero(weights))


def check_weightable(rows: Rows, weights: Weights | None) -> None:
    """Check that rows can be shuffled together with their weights, if there are any."""
    if weights is not None and not isinstance(rows, WeightableRows):
        raise InputError(
            f"X is a {type(rows).__name__} without the method weighted, so sample_weight cannot"
            " follow its rows: give an array, a tensor, or rows that factormix reads."
        )


def weighted_batches(
    rows: Rows, weights: Weights | None, batch_size: int, *, seed: int, epoch: int, start: int = 0
) -> Weighted:
    """Yield rows mixed, (batch_size, d) at a time, with their weights (B,); none of weight zero."""
    if weights is None:
        for batch in rows.shuffled(batch_size, seed=seed, epoch=epoch, start=start):
            yield batch, None
        return
    assert isinstance(rows, WeightableRows)
    yield from rows.weighted(weights, batch_size, seed=seed, epoch=epoch, start=start)


def weighted_blocks(rows: Rows, weights: Weights | None, size: int) -> Weighted:
    """Yield rows in order, (size, d) at a time, with their weights (B,); none of weight zero."""
    if weights is None:
        for block in rows.blocks(size):
            yield block, None
        return
    first, held = 0, list[tuple[Batch, Weights]]()
    for block in rows.blocks(size):
        part = weights[first : first + len(block)]
        first += len(block)
        used = np.flatnonzero(part)
        if not len(used):
            continue
        held.append((block, part) if len(used) == len(part) else (block[used], part[used]))
        if sum(len(part) for _, part in held) >= size:
            kept, part = _joined(held)
            yield kept[:size], part[:size]
            held = [(kept[size:], part[size:])] if len(part) > size else []
    if held:
        yield _joined(held)


def digest(weights: Weights) -> str:
    """Tell weights (n,) from others."""
    return hashlib.sha256(np.ascontiguousarray(weights).data).hexdigest()


def _joined(parts: list[tuple[Batch, Weights]]) -> tuple[Batch, Weights]:
    if len(parts) == 1:
        return parts[0]
    batches, weights = zip(*parts, strict=True)
    join: Any = torch.cat if isinstance(batches[0], Tensor) else np.concatenate
    return join(batches), np.concatenate(weights)
