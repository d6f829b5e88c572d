"""Shuffling through buffers: batches are drawn from one buffer after the other, in advance."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from factormix.data.batches import Batch, Weights
from factormix.data.sources.base import Table, check_pass, count_weighted_rows, read_ahead

BUFFER_BYTES = 32 << 20
"""Size of a shuffle buffer: it holds thousands of rows and still fits beside any model."""
PLACES_PER_BUFFER = 128
"""Places that a buffer takes its rows from where any can be read directly. A file sorted by class
is mixed: of 10 classes, a buffer lacks one with probability 10 * 0.9**128, about 1e-5."""
SMALL_BYTES = 256 << 10
"""Batches below this size are drawn faster than a thread could hand them over."""
AHEAD_BYTES = 16 << 20
"""Size of the batches drawn in advance, to bridge the filling of a buffer."""

RowsAndWeights = tuple[NDArray[Any], Weights | None]


class Buffer(NamedTuple):
    """Rows that are held in memory to be shuffled."""

    rows: NDArray[Any]
    """(m, d), of which some may not be served."""
    order: NDArray[np.int64]
    """Numbers of the rows to serve, shuffled."""
    weights: Weights | None
    """(m,)."""
    own: NDArray[np.bool_] | None = None
    """(m,), true for rows that were read; None if all were."""


class BufferedRows(Table):
    """Rows whose shuffled pass goes through buffers of ``buffer_bytes``, or of two batches."""

    buffer_bytes: int
    _row_bytes: int
    _fills_slowly: bool

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the rows of positive weight once, shuffled; see the class for the order.

        Batches before ``start`` are not read, except those that share a buffer with the first, and
        the beginning of a shard that continues.
        """
        check_pass(batch_size, start)
        skip = start * batch_size
        batches = draw_batches(
            self._fill_buffers(batch_size, [seed, epoch], skip),
            batch_size,
            max(0, count_weighted_rows(self) - skip),
            row_bytes=self._row_bytes,
            slow=self._fills_slowly,
        )
        return starmap(self._make_batch, batches)

    def _fill_buffers(self, batch_size: int, entropy: list[int], skip: int) -> Generator[Buffer]:
        """Yield one buffer after the other, without the first ``skip`` rows."""
        raise NotImplementedError

    def _count_buffer_rows(self, batch_size: int) -> int:
        return max(1, self.buffer_bytes // self._row_bytes, 2 * batch_size)


def draw_batches(
    buffers: Generator[Buffer], batch_size: int, n_rows: int, *, row_bytes: int, slow: bool
) -> Iterator[RowsAndWeights]:
    """Yield the ``n_rows`` rows of buffers and their weights, ``batch_size`` at a time.

    Where filling a buffer is ``slow``, the next one is filled while batches are drawn from the one
    before, which takes space for two buffers. Otherwise one space is enough, and batches drawn in
    advance bridge the filling.
    """
    batch_bytes = batch_size * row_bytes
    batches = _draw(read_ahead(buffers, 1) if slow else buffers, batch_size, n_rows)
    if batch_bytes < SMALL_BYTES:
        return batches
    return read_ahead(batches, 2 if slow else max(2, AHEAD_BYTES // batch_bytes))


def _draw(buffers: Iterator[Buffer], batch_size: int, left: int) -> Generator[RowsAndWeights]:
    with closing(buffers):  # type: ignore[type-var]
        batch, parts, filled = None, list[Weights](), 0
        for rows, order, weights, _ in buffers:
            while len(order):
                if batch is None:
                    batch = np.empty((min(batch_size, left), rows.shape[1]), rows.dtype)
                taken = order[: len(batch) - filled]
                # With "clip" NumPy writes into the batch directly; every index is in range.
                np.take(rows, taken, axis=0, out=batch[filled:][: len(taken)], mode="clip")
                if weights is not None:
                    parts.append(weights[taken])
                order, filled = order[len(taken) :], filled + len(taken)
                if filled == len(batch):
                    yield batch, np.concatenate(parts) if parts else None
                    left -= filled
                    batch, parts, filled = None, [], 0


def draw_shards(buffers: Generator[Buffer], batch_size: int) -> Generator[list[RowsAndWeights]]:
    """Yield, for every batch, the parts of it that were read, with their weights."""
    held, room = list[RowsAndWeights](), batch_size
    for rows, order, weights, own in buffers:
        while len(order):
            taken, order = order[:room], order[room:]
            room -= len(taken)
            mine = taken if own is None else taken[own[taken]]
            if len(mine):
                held.append((rows[mine], None if weights is None else weights[mine]))
            if not room:
                yield held
                held, room = [], batch_size
    if room < batch_size:
        yield held
