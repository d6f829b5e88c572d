"""Rows of arrays and tensors in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.data.batches import Batch, Values, Weights, take_weightless_row
from factormix.data.checks import check_real_tensor, check_shape, to_real_array
from factormix.data.sources.base import Table, check_pass, find_shard, to_native_dtype


class ArrayRows(Table):
    """Serve the rows of an array or tensor in memory, shape (n, d), without copying it whole."""

    def __init__(
        self,
        X: Values,
        *,
        weights: Weights | None = None,
        feature_names: Sequence[str] | None = None,
    ) -> None:
        if isinstance(X, torch.Tensor):
            X = check_real_tensor(X, "X").detach()
            self.dtype = X.dtype
        else:
            X = to_real_array(X, "X")
            self.dtype = to_native_dtype(X.dtype)
        check_shape(tuple(X.shape))
        self._X = X
        self.n_rows, self.n_features = int(X.shape[0]), int(X.shape[1])
        self.weights = weights
        self.feature_names = None if feature_names is None else tuple(feature_names)

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, (size, d) at a time, as views where possible."""
        check_pass(size)
        for first in range(0, self.n_rows, size):
            part = slice(first, first + size)
            yield self._make_batch(self._X[part], self._weights_at(part))

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the rows of positive weight once, permuted, (batch_size, d) at a time."""
        return self.shuffled_shard(batch_size, shard=(0, 1), seed=seed, epoch=epoch, start=start)

    def shuffled_shard(
        self, batch_size: int, *, shard: tuple[int, int], seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield one shard, (index, count), of each of the same batches."""
        check_pass(batch_size, start)
        rows = np.arange(self.n_rows) if self.weights is None else np.flatnonzero(self.weights)
        order = rows[np.random.default_rng([seed, epoch]).permutation(len(rows))]
        # The numbers go to the device once, so that no batch waits for a copy.
        on_device = self._to_device(order)
        for first in range(start * batch_size, len(order), batch_size):
            own = find_shard(min(batch_size, len(order) - first), *shard)
            part = slice(first + own.start, first + own.stop)
            if own.start < own.stop:
                yield self._make_batch(self._pick(on_device[part]), self._weights_at(order[part]))
            else:
                yield take_weightless_row(self.at(order[first : first + 1]))

    def at(self, numbers: NDArray[np.int64]) -> Batch:
        """Return the rows of the given numbers, (m, d)."""
        return self._make_batch(self._pick(self._to_device(numbers)), self._weights_at(numbers))

    def _to_device(self, numbers: NDArray[np.int64]) -> Values:
        if isinstance(self._X, torch.Tensor):
            return torch.from_numpy(numbers).to(self._X.device)
        return numbers

    def _pick(self, numbers: Any) -> Values:
        """Return the rows of the given numbers, which are on the device of the rows."""
        if isinstance(self._X, torch.Tensor):
            return self._X.index_select(0, numbers)
        rows: Values = self._X[numbers]
        return rows
