"""What a source of rows is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch

from factormix.data.batches import Batch, Weights
from factormix.errors import InputError

__all__ = ["Rows", "Source", "WeightableRows", "check_pass"]


@runtime_checkable
class Source(Protocol):
    """Describe rows of ``n_features`` numbers that are read in pieces and may never end.

    A source may also have ``feature_names`` (d strings), ``image_shape`` (height, width[, 3]), a
    ``name`` for messages, ``checked``, which is true where no value is infinite, and ``complete``,
    which is true where none is missing (NaN) either.
    """

    @property
    def n_features(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any] | torch.dtype: ...

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, `size` at a time; the last block may be smaller."""
        ...


@runtime_checkable
class Rows(Source, Protocol):
    """Describe a table of numbers, shape (n_rows, n_features), that can be read again and again."""

    @property
    def n_rows(self) -> int: ...

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield all rows once, mixed, in batches; the last batch may be smaller.

        The order follows from (seed, epoch) alone. `start` leaves out that many batches, so that a
        run can go on where it stopped. Rows of weight zero are left out, as if they were not there.
        """
        ...


@runtime_checkable
class WeightableRows(Rows, Protocol):
    """Describe rows that can carry a weight each, ``weights`` (n_rows,) or None."""

    weights: Weights | None

    def with_weights(self, weights: Weights | None) -> Self:
        """Return the same rows with weights (n_rows,) in the source's own order."""
        ...


def check_pass(size: int, start: int = 0) -> None:
    """Check what a pass over rows is asked for."""
    if size < 1:
        raise InputError(f"The batch size is {size}; it must be at least 1.")
    if start < 0:
        raise InputError(f"The batch to start at is {start}; it must be at least 0.")
