"""Rows of numeric files, read by position, in order or shuffled."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Generator, Iterator, Sequence
from itertools import starmap
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from factormix.data.batches import Batch, Weights, join, weightless
from factormix.data.layouts import (
    Array,
    Layout,
    check_numeric,
    check_table,
    mapped_layout,
    npy_layout,
)
from factormix.data.sources.ahead import read_ahead
from factormix.data.sources.mixing import BUFFER_BYTES, Buffer, mixed, shares
from factormix.data.sources.protocol import check_pass
from factormix.data.sources.table import Table, served_dtype
from factormix.errors import InputError

__all__ = ["FileRows", "mapped_rows"]

# A buffer takes its rows from this many places of the file, so a file sorted by class is mixed.
BLOCKS_PER_BUFFER = 128


class FileRows(Table):
    """Serve the rows of a numeric .npy file, reading only what is asked for.

    The file is read by position and never mapped, so that resident memory does not grow with it.
    Both C and Fortran order are read, C order faster. A uint8 array of shape (n, height, width) or
    (n, height, width, 1 or 3) is taken as images and served flat, (n, d), its values unchanged.

    A shuffled pass takes contiguous blocks in random order and mixes the rows of up to
    `BLOCKS_PER_BUFFER` of them at a time, in a buffer of `buffer_bytes` or of two batches if those
    are larger; a file that fits into the buffer is permuted fully.

    Attributes: n_rows, n_features, dtype; `image_shape`, (height, width[, channels]) or None;
    `feature_names`, d strings or None; `weights`, (n_rows,) or None; `name`, the file's name.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout: Layout | None = None,
        name: str | None = None,
        feature_names: Sequence[str] | None = None,
        weights: Weights | None = None,
        delete: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Open `path`; `layout` describes a raw file, `delete` removes it with this object."""
        # A pass may begin after the caller has changed the working folder.
        self._path = Path(path).absolute()
        self.name = self._path.name if name is None else name
        self.feature_names = None if feature_names is None else tuple(feature_names)
        self.weights = weights
        self._buffer_bytes = buffer_bytes
        self._cleanup = weakref.finalize(self, _remove, self._path, os.getpid())
        if not delete:
            self._cleanup.detach()
        with self._open() as file:
            self._layout = layout or npy_layout(file, self.name)
            size = file.seek(0, os.SEEK_END)
        if size < self._layout.end:
            raise InputError(
                f"{self.name} is truncated: it has {size:,} bytes of {self._layout.end:,}; "
                "write or copy it again."
            )
        self.n_rows, self.n_features = self._layout.shape[0], self._layout.n_features
        self.dtype = served_dtype(self._layout.dtype)
        self.image_shape = self._layout.image_shape
        # Shared by copies with other weights: stamps of the file when it was found to be finite,
        # and whether nothing was missing.
        self._found_finite: list[tuple[tuple[int, ...], bool]] = []

    @property
    def checked(self) -> bool:
        """Whether the file, as it is now, was found to hold no infinities."""
        return bool(self._found_finite) and self._found_finite[-1][0] == self._stamp()

    @property
    def complete(self) -> bool:
        """Whether the file, as it is now, was found to hold finite values only."""
        return self.checked and self._found_finite[-1][1]

    def known_finite(self, *, complete: bool = False) -> Self:
        """Remember that no value is infinite, until the file changes.

        ``complete`` says that nothing is missing either.
        """
        self._found_finite.append((self._stamp(), complete))
        return self

    def select(self, columns: NDArray[np.intp]) -> Self:
        """Return the same rows with the chosen columns only, in the order given."""
        other = super().select(columns)
        # What is found out about some of the columns does not hold for all.
        other._found_finite = self._found_finite[-1:]
        return other

    def blocks(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, (size, d) at a time."""
        check_pass(size)
        with self._open() as file:
            for first in range(0, self.n_rows, size):
                block = self._empty(min(size, self.n_rows - first))
                self._read(file, first, block)
                part = None if self.weights is None else self.weights[first : first + size]
                yield self._served(block, part)

    def at(self, numbers: NDArray[np.int64]) -> Batch:
        """Read the rows of the given numbers, (m, d), and nothing else of the file."""
        found = self._empty(len(numbers))
        with self._open() as file:
            for i, number in enumerate(numbers.tolist()):
                self._read(file, number, found[i : i + 1])
        return self._served(found, None if self.weights is None else self.weights[numbers])

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the rows of positive weight once, mixed; see the class for the order.

        Batches left out by `start` are not read, except those that share a buffer with the first.
        A file that fits into the buffer gives what it would give without its rows of weight zero.
        """
        check_pass(batch_size, start)
        n_rows = self.n_rows if self.weights is None else int(np.count_nonzero(self.weights))
        skip = start * batch_size
        batches = mixed(
            self._buffers(batch_size, [seed, epoch], skip),
            batch_size,
            max(0, n_rows - skip),
            row_bytes=self._layout.row_bytes,
            slow=False,
        )
        return starmap(self._served, batches)

    def shuffled_share(
        self, batch_size: int, *, share: tuple[int, int], seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yield the same batches, of each the rows in one's share of the blocks.

        Of so many shares, the one of a number has every so many-th block, and reads nothing else.
        """
        check_pass(batch_size, start)
        buffers = self._buffers(batch_size, [seed, epoch], start * batch_size, share)
        spare = self.at(np.zeros(1, np.int64))

        def batches() -> Generator[Batch]:
            for parts in shares(buffers, batch_size):
                served = [self._served(*part) for part in parts]
                yield join(served) if served else weightless(spare)

        return read_ahead(batches())

    def close(self) -> None:
        """Delete the file if it is a temporary copy; else do nothing."""
        self._cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _buffers(
        self, batch_size: int, entropy: list[int], skip: int, share: tuple[int, int] = (0, 1)
    ) -> Generator[Buffer]:
        """Yield the rows of one buffer after the other, after the first ``skip`` rows.

        Of the blocks of a buffer, those of a share are read.
        """
        weights = self.weights
        in_buffer = max(1, self._buffer_bytes // self._layout.row_bytes, 2 * batch_size)
        size = math.ceil(in_buffer / BLOCKS_PER_BUFFER)
        n_blocks = math.ceil(self.n_rows / size)
        n_buffers = math.ceil(n_blocks / BLOCKS_PER_BUFFER)
        blocks = np.random.default_rng(entropy).permutation(n_blocks)
        # Even shares: a last buffer of few blocks would be mixed badly.
        bounds = [i * n_blocks // n_buffers for i in range(n_buffers + 1)]
        rows = self._empty(min(self.n_rows, math.ceil(n_blocks / n_buffers) * size))
        with self._open() as file:
            for i in range(n_buffers):
                firsts = np.sort(blocks[bounds[i] : bounds[i + 1]]) * size
                ends = np.minimum(firsts + size, self.n_rows)
                pieces = list(zip(firsts.tolist(), ends.tolist(), strict=True))
                weight, used, count = None, None, int((ends - firsts).sum())
                if weights is not None:
                    weight = np.concatenate([weights[first:end] for first, end in pieces])
                    used = np.flatnonzero(weight)
                    count = len(used)
                if skip >= count:
                    skip -= count
                    continue
                filled, own = 0, np.zeros(len(rows), bool) if share[1] > 1 else None
                for number, (first, end) in enumerate(pieces):
                    part = slice(filled, filled + end - first)
                    if number % share[1] == share[0]:
                        self._read(file, first, rows[part])
                        if own is not None:
                            own[part] = True
                    filled += end - first
                # A generator of its own, so that the order does not depend on buffers left out.
                order = np.random.default_rng([*entropy, i]).permutation(count)[skip:]
                yield Buffer(rows, order if used is None else used[order], weight, own)
                skip = 0

    def _empty(self, n: int) -> Array:
        return np.empty((n, self._layout.n_features), self._layout.dtype)

    def _stamp(self) -> tuple[int, ...]:
        try:
            now = self._path.stat()
        except OSError:
            return ()
        return now.st_ino, now.st_size, now.st_mtime_ns

    def _open(self) -> IO[bytes]:
        try:
            return open(self._path, "rb", buffering=0)
        except OSError as error:
            raise InputError(f"{self._path} cannot be opened: {error.strerror}.") from error

    def _read(self, file: IO[bytes], first: int, out: Array) -> None:
        try:
            self._layout.read(file, first, out)
        except OSError as error:
            raise InputError(f"{self.name} cannot be read: {error}.") from error


def mapped_rows(X: Array) -> FileRows | None:
    """Make rows of the file behind a memory-mapped array; None where that cannot be done."""
    owner: Any = X
    while isinstance(owner, np.ndarray) and getattr(owner, "_mmap", None) is None:
        owner = owner.base
    # With mode "c", changes are in memory only and the file does not have them.
    if not isinstance(owner, np.memmap) or owner.filename is None or owner.mode == "c":
        return None
    check_table(X.shape, "X")
    check_numeric(X.dtype, "X")
    layout = mapped_layout(X, owner)
    if layout is None:
        return None
    if owner.mode != "r":
        owner.flush()
    ends = np.empty((2, layout.n_features), layout.dtype)
    try:
        source = FileRows(owner.filename, layout=layout)
        with source._open() as file:
            source._read(file, 0, ends[:1])
            source._read(file, source.n_rows - 1, ends[1:])
    except InputError:
        return None
    # The path may lead to another file by now, while the map still has the right one.
    return source if ends.tobytes() == X[[0, -1]].tobytes() else None


def _remove(path: Path, pid: int) -> None:
    # A forked process must not delete what its parent still reads.
    if os.getpid() == pid:
        path.unlink(missing_ok=True)
