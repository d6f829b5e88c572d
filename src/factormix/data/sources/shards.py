"""Rows that lie in many pieces, such as the row groups of Parquet files or the shards of a folder.

A shuffled pass takes the pieces in random order, several at a time, chunk by chunk, and mixes the
chunks in a buffer; memory does not grow with the number of rows. What comes next is read in the
background."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import cycle, starmap
from typing import Any, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from factormix.data.batches import Batch, Weights, rebatch
from factormix.data.sources.base import Table, check_pass, read_ahead, to_native_dtype
from factormix.data.sources.shuffle import BUFFER_BYTES, Buffer, draw_batches
from factormix.errors import InputError

__all__ = ["Fill", "Shard", "ShardedRows"]

BLOCK_BYTES = 1 << 20
"""What is read at once, at least, where rows are read in order."""
CHUNKS_PER_BUFFER = 128
"""Places that the rows of a buffer come from, where any place can be read at once."""
CHUNKS_PER_LANE = 2
"""Chunks of each open piece in a buffer, where pieces are read from their beginning."""

Fill = Callable[[NDArray[Any]], None]
"""Writes the rows of a chunk into a space for them, (m, d)."""
Readers = dict[int, tuple[int, Iterator[Fill]]]
"""Pieces that are open, each with the number of its next chunk."""


class Shard(Protocol):
    """Describe some of the rows of a source, which are read in chunks."""

    @property
    def n_rows(self) -> int: ...

    @property
    def name(self) -> str:
        """What its rows belong to, for messages."""
        ...

    @property
    def first(self) -> int:
        """Number of its first row in that."""
        ...

    @property
    def direct(self) -> bool:
        """Whether a chunk can be read without those before it."""
        ...

    def chunks(self, size: int, first: int) -> Iterator[NDArray[Any]]:
        """Yield rows (size, d), all that there are from chunk number ``first`` on."""
        ...


class DirectPiece(Shard, Protocol):
    """Describe a piece of which any rows can be read."""

    def fill(self, first: int, out: NDArray[Any]) -> None:
        """Read rows from number ``first`` on into ``out``, (m, d)."""
        ...


class SerialPiece(Shard, Protocol):
    """Describe a piece that is read from its beginning."""

    def fills(self, size: int, first: int) -> Iterator[Fill]:
        """Yield for each chunk, from number ``first`` on, what writes it where it is needed."""
        ...


class ShardedRows(Table):
    """Serve the rows of many pieces one after the other, or mixed.

    Values are checked when they are served: an infinite one stops the pass with its place.

    Parameters
    ----------
    pieces : sequence of Piece
        In the order of their rows. A choice of them serves a share of the rows.
    lanes : int
        Pieces that are read at the same time where they are read from their beginning.
    buffer_bytes : int
        What the shuffle buffer holds, unless two batches are more.
    """

    checked = True
    skipped = 0
    """Rows that were skipped, where that was asked for."""
    _tolerant = False

    def __init__(
        self,
        pieces: Sequence[Shard],
        n_features: int,
        dtype: np.dtype[Any],
        *,
        name: str = "X",
        feature_names: Sequence[str] | None = None,
        image_shape: tuple[int, ...] | None = None,
        lanes: int = 1,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._pieces = list(pieces)
        self._firsts = np.cumsum([0, *(piece.n_rows for piece in pieces)])
        self.n_rows, self.n_features = int(self._firsts[-1]), n_features
        self.dtype: np.dtype[Any] = to_native_dtype(dtype)
        self.name, self.image_shape = name, image_shape
        self.feature_names = None if feature_names is None else tuple(feature_names)
        self._row_bytes, self._lanes = n_features * dtype.itemsize, lanes
        self._width, self._dtype = n_features, dtype
        self.buffer_bytes = buffer_bytes
        if not self.n_rows:
            raise InputError(f"{name} has columns but no rows; give at least one row.")

    @property
    def complete(self) -> bool:
        """Whether no value can be missing."""
        return self.dtype.kind != "f"

    def skip_damaged(self) -> Self:
        """Return the same rows, of which ``blocks`` skips and counts what cannot be read.

        What is left of a piece after damage is skipped; infinite values are served as they are.
        """
        other = self._copied()
        other._tolerant, other.checked, other.skipped = True, False, 0
        return other

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, (size, d) at a time."""
        check_pass(size)
        # Much at once, however little is asked for at a time.
        many = size * math.ceil(BLOCK_BYTES / (size * self._row_bytes))
        return rebatch(read_ahead(self._in_order(many)), size)

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the rows of positive weight once, mixed; see the module for the order.

        What is left out by ``start`` is not read, except for the beginning of a piece that goes on.
        """
        check_pass(batch_size, start)
        n_rows = self.n_rows if self.weights is None else int(np.count_nonzero(self.weights))
        skip = start * batch_size
        batches = draw_batches(
            self._buffers(batch_size, [seed, epoch], skip),
            batch_size,
            max(0, n_rows - skip),
            row_bytes=self._row_bytes,
            slow=True,
        )
        return starmap(self._served, batches)

    def _in_order(self, size: int) -> Generator[Batch]:
        for i, piece in enumerate(self._pieces):
            done = 0
            try:
                for j, rows in enumerate(piece.chunks(size, 0)):
                    yield self._batch(rows, i, j * size)
                    done += len(rows)
            except InputError:
                if not self._tolerant:
                    raise
                self.skipped += piece.n_rows - done

    def _buffers(self, batch_size: int, entropy: list[int], skip: int) -> Generator[Buffer]:
        """Yield the rows of one buffer after the other, after the first ``skip`` rows."""
        wanted = max(1, self.buffer_bytes // self._row_bytes, 2 * batch_size)
        direct = all(piece.direct for piece in self._pieces)
        cuts = CHUNKS_PER_BUFFER if direct else CHUNKS_PER_LANE * self._lanes
        size = math.ceil(min(wanted, self.n_rows) / cuts)
        # Even shares: a last buffer of few rows would be mixed badly.
        share = math.ceil(self.n_rows / math.ceil(self.n_rows / wanted))
        # Two in turn: one is filled while the other is served.
        space = cycle(np.empty((2, min(self.n_rows, share + size), self._width), self._dtype))
        readers: Readers = {}
        schedule = self._schedule(size, np.random.default_rng(entropy))
        for number, places in enumerate(self._shares(schedule, size, share)):
            count = sum(self._count(i, j, size) for i, j in places)
            if skip >= count:
                skip -= count
                continue
            rows = next(space)
            weights = self._filled(readers, places, size, rows)
            # A generator of its own, so that the order does not depend on buffers left out.
            order = np.random.default_rng([*entropy, number]).permutation(count)
            yield Buffer(rows, order[skip:], weights)
            skip = 0

    def _schedule(self, size: int, random: np.random.Generator) -> Iterator[tuple[int, int]]:
        """Yield pieces and numbers of chunks in the order in which they are read."""
        runs = list[tuple[int, int, int]]()
        for i, piece in enumerate(self._pieces):
            n = math.ceil(piece.n_rows / size)
            runs += [(i, j, j + 1) for j in range(n)] if piece.direct else [(i, 0, n)]
        waiting = deque(random.permutation(len(runs)).tolist())
        lanes = deque[tuple[int, Iterator[int]]]()
        while waiting or lanes:
            while waiting and len(lanes) < self._lanes:
                i, first, end = runs[waiting.popleft()]
                lanes.append((i, iter(range(first, end))))
            i, numbers = lanes.popleft()
            if (j := next(numbers, None)) is not None:
                yield i, j
                lanes.append((i, numbers))

    def _shares(
        self, schedule: Iterator[tuple[int, int]], size: int, share: int
    ) -> Iterator[list[tuple[int, int]]]:
        """Cut the schedule into buffers of about as many rows each."""
        places, rows = list[tuple[int, int]](), 0
        for i, j in schedule:
            places.append((i, j))
            rows += min(size, self._pieces[i].n_rows - j * size)
            if rows >= share:
                yield places
                places, rows = [], 0
        if places:
            yield places

    def _count(self, i: int, j: int, size: int) -> int:
        """Count the rows of positive weight in a chunk."""
        rows = min(size, self._pieces[i].n_rows - j * size)
        if self.weights is None:
            return rows
        first = int(self._firsts[i]) + j * size
        return int(np.count_nonzero(self.weights[first : first + rows]))

    def _filled(
        self, readers: Readers, places: list[tuple[int, int]], size: int, out: NDArray[Any]
    ) -> Weights | None:
        """Read the rows of positive weight of some chunks into a buffer; return the weights."""
        weights, filled = list[Weights](), 0
        for i, j in places:
            n = min(size, self._pieces[i].n_rows - j * size)
            rows = out[filled : filled + n]
            self._read(readers, i, j, size, rows)
            if self.weights is not None:
                at = int(self._firsts[i]) + j * size
                used = np.flatnonzero(self.weights[at : at + n])
                weights.append(self.weights[at : at + n][used])
                if len(used) < n:
                    rows[: len(used)] = rows[used]
                    n = len(used)
            filled += n
        return np.concatenate(weights) if weights else None

    def _read(self, readers: Readers, i: int, j: int, size: int, out: NDArray[Any]) -> None:
        """Read a chunk into a space, (m, d), going on in a piece that is open."""
        piece = self._pieces[i]
        if piece.direct:
            cast(DirectPiece, piece).fill(j * size, out)
        else:
            at, reader = readers.pop(i, (-1, iter(())))
            reader = reader if at == j else cast(SerialPiece, piece).fills(size, j)
            next(reader)(out)
            if (j + 1) * size < piece.n_rows:
                readers[i] = j + 1, reader
        self._check(out, i, j * size)

    def _batch(self, rows: NDArray[Any], i: int, first: int) -> Batch:
        """Make a batch of rows of a piece, the first of which is number ``first`` in it."""
        self._check(rows, i, first)
        weights: Weights | None = None
        if self.weights is not None:
            at = int(self._firsts[i]) + first
            weights = self.weights[at : at + len(rows)]
        return self._served(rows, weights)

    def _check(self, rows: NDArray[Any], i: int, first: int) -> None:
        """Look for infinite values in rows of a piece, the first of which is number ``first``."""
        if rows.dtype.kind != "f" or self._tolerant:
            return
        # A sum is finite only if all of its terms are, and costs less than a look at each; it may
        # be too large for its type, which a second look clears up.
        dtype = np.float64 if rows.dtype.itemsize < 4 else rows.dtype
        with np.errstate(over="ignore", invalid="ignore"):
            total = rows.sum(dtype=dtype)
        if not np.isfinite(total):
            self._complain(rows, self._pieces[i], first)

    def _complain(self, rows: NDArray[Any], piece: Shard, first: int) -> None:
        found = np.argwhere(np.isinf(rows))
        if len(found):
            row, column = found[0].tolist()
            names, at = self.feature_names, piece.first + first + row
            where = f"row {at}, column {column} (counting from 0)"
            if names and self._columns is None:
                where = f"row {at} (counting from 0), column {names[column]!r}"
            raise InputError(
                f"{piece.name} has an infinite value in {where}; remove the row or leave the cell"
                " empty (NaN)."
            )
