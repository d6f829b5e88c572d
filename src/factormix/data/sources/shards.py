"""Rows in many shards, such as the row groups of Parquet files or the files of a folder.

A shuffled pass takes the shards in random order, several at a time, chunk by chunk, and mixes the
chunks in a buffer. The next chunks are read in the background, and memory does not grow with the
number of rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from factormix.data.batches import Batch, Weights, rebatch
from factormix.data.checks import find_infinite, is_finite
from factormix.data.sources.base import check_pass, read_ahead, to_native_dtype
from factormix.data.sources.shuffle import BUFFER_BYTES, PLACES_PER_BUFFER, Buffer, BufferedRows
from factormix.errors import InputError

BLOCK_BYTES = 1 << 20
"""Least number of bytes to read at once where rows are read in order."""
CHUNKS_PER_OPEN_SHARD = 2
"""Chunks of each open shard in a buffer, where shards are read from their beginning."""

Fill = Callable[[NDArray[Any]], None]
"""Read the next m rows of a shard into an array, (m, d)."""
Readers = dict[int, tuple[int, Fill]]
"""The next row of each open shard, and the function that reads from there."""


class Chunk(NamedTuple):
    """Rows of a shard, from ``first`` to before ``end``, that are read at once."""

    shard: int
    first: int
    end: int


class Shard(Protocol):
    """Describe some of the rows of a source."""

    @property
    def n_rows(self) -> int: ...

    @property
    def name(self) -> str:
        """The name of the file that the rows belong to, for messages."""
        ...

    @property
    def first(self) -> int:
        """The number of the first row in that file."""
        ...

    @property
    def direct(self) -> bool:
        """Whether rows can be read without the rows before them."""
        ...

    def open(self, first: int) -> Fill:
        """Return a function that reads the next rows, from row ``first`` on, into an array."""
        ...


class ShardedRows(BufferedRows):
    """Serve the rows of many shards one after the other, or shuffled.

    Values are checked when they are served: an infinite one stops the pass with its place.

    Parameters
    ----------
    shards : sequence of Shard
        In the order of their rows.
    n_open : int
        Number of shards to read at the same time where they are read from their beginning.
    buffer_bytes : int
        Size of the shuffle buffer, unless two batches are larger.
    """

    checked = True
    skipped = 0
    """Number of rows that were skipped, see ``skip_damaged``."""
    _skips_damaged = False
    _fills_slowly = True

    def __init__(
        self,
        shards: Sequence[Shard],
        n_features: int,
        dtype: np.dtype[Any],
        *,
        name: str = "X",
        feature_names: Sequence[str] | None = None,
        image_shape: tuple[int, ...] | None = None,
        n_open: int = 1,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._shards = list(shards)
        self._firsts = np.cumsum([0, *(shard.n_rows for shard in shards)])
        self.n_rows, self.n_features = int(self._firsts[-1]), n_features
        self.dtype: np.dtype[Any] = to_native_dtype(dtype)
        self.name, self.image_shape = name, image_shape
        self.feature_names = None if feature_names is None else tuple(feature_names)
        self._row_bytes, self._n_open = n_features * dtype.itemsize, n_open
        self._width, self._dtype = n_features, dtype
        self.buffer_bytes = buffer_bytes
        if not self.n_rows:
            raise InputError(f"{name} has columns but no rows; give at least one row.")

    @property
    def complete(self) -> bool:
        """Whether no value can be missing."""
        return self.dtype.kind != "f"

    def skip_damaged(self) -> Self:
        """Return the same rows, whose ``blocks`` skips and counts rows that cannot be read.

        The rest of a shard after damage is skipped. Infinite values are served, not checked.
        """
        other = self._copy()
        other._skips_damaged, other.checked, other.skipped = True, False, 0
        return other

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, (size, d) at a time."""
        check_pass(size)
        many = size * math.ceil(BLOCK_BYTES / (size * self._row_bytes))
        return rebatch(read_ahead(self._read_in_order(many)), size)

    def _read_in_order(self, size: int) -> Generator[Batch]:
        for i, shard in enumerate(self._shards):
            fill, done = shard.open(0), 0
            try:
                while done < shard.n_rows:
                    rows = np.empty((min(size, shard.n_rows - done), self._width), self._dtype)
                    fill(rows)
                    self._check_finite(rows, shard, done)
                    first = int(self._firsts[i]) + done
                    yield self._make_batch(rows, self._weights_at(slice(first, first + len(rows))))
                    done += len(rows)
            except InputError:
                if not self._skips_damaged:
                    raise
                self.skipped += shard.n_rows - done

    def _fill_buffers(self, batch_size: int, entropy: list[int], skip: int) -> Generator[Buffer]:
        """Yield one buffer after the other, without the first ``skip`` rows."""
        wanted = self._count_buffer_rows(batch_size)
        direct = all(shard.direct for shard in self._shards)
        cuts = PLACES_PER_BUFFER if direct else CHUNKS_PER_OPEN_SHARD * self._n_open
        size = math.ceil(min(wanted, self.n_rows) / cuts)
        # Buffers of even size: a last one of few rows would be mixed badly.
        in_buffer = math.ceil(self.n_rows / math.ceil(self.n_rows / wanted))
        # Two in turn: one is filled while the other is served.
        space = cycle(np.empty((2, min(self.n_rows, in_buffer + size), self._width), self._dtype))
        readers: Readers = {}
        schedule = self._schedule_chunks(size, np.random.default_rng(entropy))
        for number, chunks in enumerate(_group_chunks(schedule, in_buffer)):
            count = sum(map(self._count_weighted, chunks))
            if skip >= count:
                skip -= count
                continue
            rows = next(space)
            weights = self._read_chunks_(rows, chunks, readers)
            # A generator per buffer, so that the order does not depend on skipped buffers.
            order = np.random.default_rng([*entropy, number]).permutation(count)
            yield Buffer(rows, order[skip:], weights)
            skip = 0

    def _read_chunks_(
        self, out: NDArray[Any], chunks: list[Chunk], readers: Readers
    ) -> Weights | None:
        """Read the rows of positive weight of some chunks into a buffer; return their weights."""
        weights, filled = list[Weights](), 0
        for chunk in chunks:
            shard, n = self._shards[chunk.shard], chunk.end - chunk.first
            rows = out[filled : filled + n]
            at, fill = readers.pop(chunk.shard, (-1, None))
            if at != chunk.first or fill is None:
                fill = shard.open(chunk.first)
            fill(rows)
            if chunk.end < shard.n_rows:
                readers[chunk.shard] = chunk.end, fill
            self._check_finite(rows, shard, chunk.first)
            part = self._weights_at(self._find_rows(chunk))
            if part is not None:
                used = np.flatnonzero(part)
                weights.append(part[used])
                if len(used) < n:
                    n = len(used)
                    rows[:n] = rows[used]
            filled += n
        return np.concatenate(weights) if weights else None

    def _count_weighted(self, chunk: Chunk) -> int:
        """Count the rows of positive weight in a chunk."""
        weights = self._weights_at(self._find_rows(chunk))
        return chunk.end - chunk.first if weights is None else int(np.count_nonzero(weights))

    def _schedule_chunks(self, size: int, random: np.random.Generator) -> Iterator[Chunk]:
        """Yield chunks of ``size`` rows in the order in which they are read."""
        runs = list[list[Chunk]]()
        for i, shard in enumerate(self._shards):
            firsts = range(0, shard.n_rows, size)
            chunks = [Chunk(i, first, min(first + size, shard.n_rows)) for first in firsts]
            runs += [[chunk] for chunk in chunks] if shard.direct else [chunks]
        waiting = deque(random.permutation(len(runs)).tolist())
        opened = deque[Iterator[Chunk]]()
        while waiting or opened:
            while waiting and len(opened) < self._n_open:
                opened.append(iter(runs[waiting.popleft()]))
            run = opened.popleft()
            if (chunk := next(run, None)) is not None:
                yield chunk
                opened.append(run)

    def _find_rows(self, chunk: Chunk) -> slice:
        """Find the rows of a chunk in the whole table."""
        first = int(self._firsts[chunk.shard])
        return slice(first + chunk.first, first + chunk.end)

    def _check_finite(self, rows: NDArray[Any], shard: Shard, first: int) -> None:
        """Name the first infinity in rows of a shard, which begin with its row ``first``."""
        if self._skips_damaged or is_finite(rows):
            return
        infinite = find_infinite(rows)
        if len(infinite):
            row, column = infinite[0].tolist()
            names, at = self.feature_names, shard.first + first + row
            where = f"row {at}, column {column} (counting from 0)"
            if names and self._columns is None:
                where = f"row {at} (counting from 0), column {names[column]!r}"
            raise InputError(
                f"{shard.name} has an infinite value in {where}; remove the row or leave the cell"
                " empty (NaN)."
            )


def _group_chunks(schedule: Iterator[Chunk], in_buffer: int) -> Iterator[list[Chunk]]:
    """Cut the schedule into groups of ``in_buffer`` rows or slightly more."""
    chunks, count = list[Chunk](), 0
    for chunk in schedule:
        chunks.append(chunk)
        count += chunk.end - chunk.first
        if count >= in_buffer:
            yield chunks
            chunks, count = [], 0
    if chunks:
        yield chunks
