"""What tables in memory and in files share: names, weights, and a choice of columns."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.data.batches import Batch, Values, Weights

__all__ = ["Table", "served_dtype"]


class Table:
    """The half of a source that does not depend on where its values lie.

    Attributes: n_rows, n_features, dtype; `name` for messages; `feature_names`, d strings or None;
    `image_shape`, (height, width[, 3]) or None; `weights`, (n_rows,) or None.
    """

    n_rows: int
    n_features: int
    dtype: np.dtype[Any] | torch.dtype
    name: str = "X"
    feature_names: tuple[str, ...] | None = None
    image_shape: tuple[int, ...] | None = None
    weights: Weights | None = None
    _columns: NDArray[np.intp] | None = None
    _origin: Table | None = None

    def with_weights(self, weights: Weights | None) -> Self:
        """Return the same rows with weights (n_rows,)."""
        other = self._copied()
        other.weights = weights
        return other

    def select(self, columns: NDArray[np.intp]) -> Self:
        """Return the same rows with the chosen columns only, in the order given."""
        other = self._copied()
        other._columns = columns if self._columns is None else self._columns[columns]
        other.n_features = len(columns)
        other.image_shape = None
        if self.feature_names is not None:
            other.feature_names = tuple(self.feature_names[j] for j in columns)
        return other

    def _copied(self) -> Self:
        other = copy.copy(self)
        # A temporary file goes with the object that made it, which must outlive its copies.
        other._origin = self
        return other

    def _served(self, rows: Values, weights: Weights | None) -> Batch:
        """Make a batch of rows (B, D) of the table, D being all columns that it has."""
        if self._columns is not None:
            rows = (
                rows.index_select(1, torch.from_numpy(self._columns).to(rows.device))
                if isinstance(rows, torch.Tensor)
                else np.take(rows, self._columns, axis=1)
            )
        if isinstance(rows, np.ndarray) and isinstance(self.dtype, np.dtype):
            rows = rows.astype(self.dtype, copy=False)
        return Batch(rows, weights)


def served_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Choose the dtype to serve: torch knows neither swapped bytes nor long doubles."""
    return np.dtype(np.float64) if dtype.char == "g" else dtype.newbyteorder("=")
