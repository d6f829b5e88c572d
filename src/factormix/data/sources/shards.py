"""Rows in shards, such as one file, the files of a folder, or the row groups of Parquet files.

A shuffled pass reads chunks of rows in random order and mixes them in a buffer. The next buffer is
filled in the background, and memory does not grow with the number of rows.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import chain, cycle
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from factormix.data.batches import Batch, Weights, join_batches, rebatch
from factormix.data.checks import find_infinite, is_finite
from factormix.data.sources.base import Table, check_pass, read_ahead, to_native_dtype
from factormix.errors import InputError

BUFFER_BYTES = 32 << 20
"""Size of a shuffle buffer: it holds thousands of rows and still fits beside any model."""
PLACES_PER_BUFFER = 128
"""Places that a buffer takes its rows from where any can be read directly. A file sorted by class
is mixed: of 10 classes, a buffer lacks one with probability 10 * 0.9**128, about 1e-5."""
CHUNKS_PER_OPEN_SHARD = 2
"""Chunks of each open shard in a buffer, where shards are read from their beginning:
the fewest with which rows of more than one place of a shard are mixed."""
BLOCK_BYTES = 1 << 20
"""Least number of bytes to read at once where rows are read in order: chosen, not measured."""

Fill = Callable[[NDArray[Any]], None]
"""Read the next m rows of a shard into an array, (m, d)."""


class Chunk(NamedTuple):
    """Rows of a shard, from ``first`` to before ``end``, that are read at once."""

    shard: int
    first: int
    end: int


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


class ShardedRows(Table):
    """Serve the rows of shards one after the other, or shuffled.

    Values are checked when they are served: an infinite one stops the pass with its place. Rows of
    weight zero do not change the order of the others.

    Parameters
    ----------
    shards : sequence of Shard
        In the order of their rows.
    n_open : int
        Number of shards to read at the same time where they are read from their beginning.
    buffer_bytes : int
        Size of the shuffle buffer, unless two batches are larger.
    """

    skipped = 0
    """Number of rows that were skipped, see ``skip_damaged``."""
    _skips_damaged = False

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
        self.checked, self.complete = True, self.dtype.kind != "f"
        if not self.n_rows:
            raise InputError(f"{name} has columns but no rows; give at least one row.")

    def skip_damaged(self) -> Self:
        """Return the same rows, whose ``blocks`` skips and counts rows that cannot be read.

        The rest of a shard after damage is skipped. Infinite values are served, not checked.
        """
        other = copy.copy(self)
        other._skips_damaged, other.checked, other.skipped = True, False, 0
        return other

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, (size, d) at a time."""
        check_pass(size)
        many = size * math.ceil(BLOCK_BYTES / (size * self._row_bytes))
        return rebatch(read_ahead(self._read_in_order(many)), size)

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the rows of positive weight once, shuffled; see the class for the order.

        Batches before ``start`` are not read, except those that share a buffer with the first, and
        the beginning of a shard that continues.
        """
        check_pass(batch_size, start)
        buffers = self._fill_buffers(batch_size, [seed, epoch], start * batch_size)
        return map(join_batches, self._draw(buffers, batch_size))

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

    def _fill_buffers(
        self, batch_size: int, entropy: list[int], skip: int, part: tuple[int, int] = (0, 1)
    ) -> Generator[Buffer]:
        """Yield one buffer after the other, without the first ``skip`` rows.

        With ``part``, (index, count), only every count-th chunk is read, starting with chunk
        ``index``.
        """
        wanted = max(1, self.buffer_bytes // self._row_bytes, 2 * batch_size)
        groups = self._plan_buffers(wanted, np.random.default_rng(entropy))
        most = max(sum(chunk.end - chunk.first for chunk in chunks) for chunks in groups)
        # Two in turn: one is filled while the other is served.
        space = cycle(np.empty((min(2, len(groups)), most, self._width), self._dtype))
        readers: dict[int, tuple[int, Fill]] = {}
        for number, chunks in enumerate(groups):
            count, weights, used = sum(chunk.end - chunk.first for chunk in chunks), None, None
            if self.weights is not None:
                starts = [int(self._firsts[chunk.shard]) for chunk in chunks]
                parts = zip(starts, chunks, strict=True)
                weights = np.concatenate([self.weights[s + c.first : s + c.end] for s, c in parts])
                used = np.flatnonzero(weights)
                count = len(used)
            if skip >= count:
                skip -= count
                continue
            rows, own, filled = next(space), np.zeros(most, bool), 0
            for i, chunk in enumerate(chunks):
                here = slice(filled, filled + chunk.end - chunk.first)
                if i % part[1] == part[0]:
                    self._read_chunk(chunk, rows[here], readers)
                    own[here] = True
                filled = here.stop
            # A generator per buffer, so that the order does not depend on skipped buffers.
            order = np.random.default_rng([*entropy, number]).permutation(count)[skip:]
            order = order if used is None else used[order]
            yield Buffer(rows, order, weights, own if part[1] > 1 else None)
            skip = 0

    def _plan_buffers(self, wanted: int, random: np.random.Generator) -> list[list[Chunk]]:
        """Return the chunks of each buffer, which has about ``wanted`` rows, in random order.

        Buffers are of even size: a last one of few rows would be mixed badly.
        """
        if all(shard.direct for shard in self._shards):
            runs = self._cut(math.ceil(wanted / PLACES_PER_BUFFER))
            chunks = list(chain.from_iterable(runs))
            n = math.ceil(len(chunks) / PLACES_PER_BUFFER)
            order, total = random.permutation(len(chunks)), len(chunks)
            bounds = [i * total // n for i in range(n + 1)]
            return [
                [chunks[j] for j in np.sort(order[bounds[i] : bounds[i + 1]])] for i in range(n)
            ]
        in_buffer = math.ceil(self.n_rows / math.ceil(self.n_rows / wanted))
        size = math.ceil(min(wanted, self.n_rows) / (CHUNKS_PER_OPEN_SHARD * self._n_open))
        groups, count = [list[Chunk]()], 0
        for chunk in self._take_turns(self._cut(size), random):
            if count >= in_buffer:
                groups.append([])
                count = 0
            groups[-1].append(chunk)
            count += chunk.end - chunk.first
        return groups

    def _cut(self, size: int) -> list[list[Chunk]]:
        """Cut each shard into chunks of ``size`` rows."""
        return [
            [Chunk(i, at, min(at + size, shard.n_rows)) for at in range(0, shard.n_rows, size)]
            for i, shard in enumerate(self._shards)
        ]

    def _take_turns(self, runs: list[list[Chunk]], random: np.random.Generator) -> Iterator[Chunk]:
        """Yield the chunks of shards in random order, of several shards in turn."""
        waiting = deque(random.permutation(len(runs)).tolist())
        opened = deque[Iterator[Chunk]]()
        while waiting or opened:
            while waiting and len(opened) < self._n_open:
                opened.append(iter(runs[waiting.popleft()]))
            run = opened.popleft()
            if (chunk := next(run, None)) is not None:
                yield chunk
                opened.append(run)

    def _read_chunk(
        self, chunk: Chunk, out: NDArray[Any], readers: dict[int, tuple[int, Fill]]
    ) -> None:
        """Read a chunk; ``readers`` has the next row and the reader of each open shard."""
        shard = self._shards[chunk.shard]
        at, fill = readers.pop(chunk.shard, (-1, None))
        if at != chunk.first or fill is None:
            fill = shard.open(chunk.first)
        fill(out)
        if chunk.end < shard.n_rows:
            readers[chunk.shard] = chunk.end, fill
        self._check_finite(out, shard, chunk.first)

    def _draw(self, buffers: Generator[Buffer], batch_size: int) -> Generator[list[Batch]]:
        """Yield, for every batch, the parts of it that were read."""
        held, room = list[Batch](), batch_size
        with closing(read_ahead(buffers, 1)) as filled:  # type: ignore[type-var]
            for rows, order, weights, own in filled:
                while len(order):
                    taken, order = order[:room], order[room:]
                    room -= len(taken)
                    mine = taken if own is None else taken[own[taken]]
                    if len(mine):
                        some = None if weights is None else weights[mine]
                        held.append(self._make_batch(rows.take(mine, axis=0), some))
                    if not room:
                        yield held
                        held, room = [], batch_size
        if room < batch_size:
            yield held

    def _check_finite(self, rows: NDArray[Any], shard: Shard, first: int) -> None:
        """Name the first infinity in rows of a shard, which begin with its row ``first``."""
        rows = rows if self._columns is None else rows[:, self._columns]
        if self._skips_damaged or is_finite(rows):
            return
        infinite = find_infinite(rows)
        if len(infinite):
            row, column = infinite[0].tolist()
            names, at = self.feature_names, shard.first + first + row
            where = f"row {at}, column {column} (counting from 0)"
            if names:
                where = f"row {at} (counting from 0), column {names[column]!r}"
            raise InputError(
                f"{shard.name} has an infinite value in {where}; remove the row or leave the cell"
                " empty (NaN)."
            )
        if self.complete:
            raise InputError(f"{shard.name} has changed since it was checked: open it again.")
