"""What a batch is: rows, and all that travels with them from a source to a solver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Batch", "Values"]

Values: TypeAlias = NDArray[Any] | Tensor
"""Numbers as a source serves them: a NumPy array or a tensor."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows (B, d) with a weight (B,) for each, or none where all count alike.

    A source serves batches in the units and the dtype of its data; ``Units.to_working`` gives the
    batch of tensors that a solver learns from.
    """

    rows: Values
    weights: Values | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """Return rows and weights of a batch that is known to hold tensors."""
        assert isinstance(self.rows, Tensor)
        assert self.weights is None or isinstance(self.weights, Tensor)
        return self.rows, self.weights

    @property
    def mean_weight(self) -> float:
        """The mean of the weights, one where there are none."""
        if self.weights is None:
            return 1.0
        return float(
            np.mean(self.weights) if isinstance(self.weights, np.ndarray) else self.weights.mean()
        )
