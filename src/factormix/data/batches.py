"""Batches: rows with their weights and missing entries, on the way from a source to a solver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values: TypeAlias = NDArray[Any] | Tensor
"""Numbers as a source serves them: a NumPy array or a tensor."""
Weights: TypeAlias = NDArray[np.float64]
"""One weight per row, (n,), on the CPU."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows (B, d) with a weight (B,) each, or no weights where all rows count alike.

    A source serves batches in the units and the dtype of its data, with NaN for missing entries.
    ``Units.to_working`` turns them into the tensors that a solver learns from, with ``missing``
    instead of NaN. Each field has one entry per row, or is None.
    """

    rows: Values
    weights: Values | None = None
    missing: Tensor | None = None
    """(B, d), true for missing entries, whose values are 0; None where no entry is missing."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """Return rows and weights of a batch that is known to hold tensors."""
        assert isinstance(self.rows, Tensor)
        assert self.weights is None or isinstance(self.weights, Tensor)
        return self.rows, self.weights

    def rows_with_nan(self) -> Tensor:
        """Return the rows of a batch of tensors with NaN for missing entries."""
        rows, _ = self.tensors()
        return rows if self.missing is None else rows.masked_fill(self.missing, torch.nan)

    @property
    def mean_weight(self) -> float:
        """The mean of the weights, 1 where there are none."""
        return 1.0 if self.weights is None else float(self.weights.mean())

    def take(self, chosen: slice | NDArray[np.intp]) -> Batch:
        """Return the chosen rows with their weights and missing entries."""
        parts: Any = (None if part is None else part[chosen] for part in _fields(self))
        return Batch(*parts)


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches that have the same fields."""
    if len(batches) == 1:
        return batches[0]
    joined = list[Any]()
    for parts in zip(*map(_fields, batches), strict=True):
        join = torch.cat if isinstance(parts[0], Tensor) else np.concatenate
        joined.append(None if parts[0] is None else join(parts))
    return Batch(*joined)


def mask_missing(rows: Tensor, weights: Tensor | None = None) -> Batch:
    """Make a batch of tensors from rows (B, d) with NaN for missing entries."""
    missing = rows.isnan()
    if not missing.any():
        return Batch(rows, weights)
    return Batch(rows.masked_fill(missing, 0), weights, missing)


def take_weightless_row(batch: Batch) -> Batch:
    """Return the first row, with weight zero: the shard of a rank that gets no row of a batch."""
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
    """Leave out rows of weight zero, and batches that consist of such rows."""
    for batch in batches:
        if batch.weights is None:
            yield batch
            continue
        chosen = np.flatnonzero(np.asarray(batch.weights))
        if len(chosen):
            yield batch if len(chosen) == len(batch) else batch.take(chosen)


def _fields(batch: Batch) -> tuple[Any, ...]:
    return tuple(getattr(batch, field.name) for field in fields(batch))
