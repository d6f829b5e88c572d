"""What a batch is: rows, and all that travels with them from a source to a solver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Batch",
    "Values",
    "Weights",
    "drop_zero_weights",
    "join_batches",
    "mask_missing",
    "rebatch",
    "take_weightless_row",
]

Values: TypeAlias = NDArray[Any] | Tensor
"""Numbers as a source serves them: a NumPy array or a tensor."""
Weights: TypeAlias = NDArray[np.float64]
"""One number for each row, (n,), on the CPU."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows (B, d) with a weight (B,) for each, or none where all count alike.

    A source serves batches in the units and the dtype of its data, with NaN for what is missing;
    ``Units.to_working`` gives the batch of tensors that a solver learns from, in which ``missing``
    tells. Each field has one entry for each row, or is None.
    """

    rows: Values
    weights: Values | None = None
    missing: Tensor | None = None
    """(B, d), true for entries that are missing, whose values are 0; None where none is."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """Return rows and weights of a batch that is known to hold tensors."""
        assert isinstance(self.rows, Tensor)
        assert self.weights is None or isinstance(self.weights, Tensor)
        return self.rows, self.weights

    def rows_with_nan(self) -> Tensor:
        """Return rows of tensors with NaN for what is missing."""
        rows, _ = self.tensors()
        return rows if self.missing is None else rows.masked_fill(self.missing, torch.nan)

    @property
    def mean_weight(self) -> float:
        """The mean of the weights, one where there are none."""
        if self.weights is None:
            return 1.0
        return float(
            np.mean(self.weights) if isinstance(self.weights, np.ndarray) else self.weights.mean()
        )

    def take(self, chosen: slice | NDArray[np.intp]) -> Batch:
        """Return the chosen rows with all that belongs to them."""
        parts: Any = (None if part is None else part[chosen] for part in _parts(self))
        return Batch(*parts)


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Put batches that have the same fields one below the other."""
    if len(batches) == 1:
        return batches[0]
    columns = zip(*map(_parts, batches), strict=True)
    joined: Any = (None if parts[0] is None else _concatenated(parts) for parts in columns)
    return Batch(*joined)


def mask_missing(rows: Tensor, weights: Tensor | None = None) -> Batch:
    """Make a batch of tensors from rows (B, d) with NaN for what is missing."""
    gaps = rows.isnan()
    if not gaps.any():
        return Batch(rows, weights)
    return Batch(rows.masked_fill(gaps, 0), weights, gaps)


def take_weightless_row(batch: Batch) -> Batch:
    """Return the first row of a batch without any weight: a share where there is nothing left."""
    return Batch(batch.rows[:1], np.zeros(1))


def rebatch(batches: Iterable[Batch], size: int) -> Iterator[Batch]:
    """Serve the same rows ``size`` at a time; the last batch may be smaller."""
    held, count = list[Batch](), 0
    for batch in batches:
        if not held and len(batch) == size:
            yield batch
            continue
        held.append(batch)
        count += len(batch)
        if count >= size:
            whole, full = join_batches(held), count - count % size
            for first in range(0, full, size):
                yield whole.take(slice(first, first + size))
            held, count = [whole.take(slice(full, None))] if full < count else [], count - full
    if held:
        yield join_batches(held)


def drop_zero_weights(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Leave out rows of weight zero, and batches that have no others."""
    for batch in batches:
        if batch.weights is None:
            yield batch
            continue
        chosen = np.flatnonzero(np.asarray(batch.weights))
        if len(chosen):
            yield batch if len(chosen) == len(batch) else batch.take(chosen)


def _parts(batch: Batch) -> tuple[Any, ...]:
    return tuple(getattr(batch, field.name) for field in fields(batch))


def _concatenated(parts: Sequence[Any]) -> Any:
    return torch.cat(list(parts)) if isinstance(parts[0], Tensor) else np.concatenate(parts)
