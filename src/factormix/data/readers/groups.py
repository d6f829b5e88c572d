"""Files of Parquet and Arrow in pieces, which are read by columns and served by rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from factormix.data.arrow import ArrowColumn, numbers, write
from factormix.data.sources import Fill
from factormix.errors import InputError

__all__ = ["ArrowFile", "ArrowPiece", "brief"]

PAGE_BYTES = 1 << 20
"""What a column of an open row group holds, about: a page."""
READ_BYTES = 32 << 20
"""What is read of a piece at once, at most: each time that a column is read takes its time."""


@dataclass
class ArrowFile:
    """A file of a folder, opened once for what it says of itself."""

    path: str
    name: str
    system: Any
    kind: Literal["parquet", "arrow"]
    inside: bool
    """Whether it is one of a folder."""
    about: Any = field(repr=False, default=None)
    """Metadata of a Parquet file; the rows of each batch of an Arrow file."""
    schema: Any = field(repr=False, default=None)

    def look(self) -> None:
        """Read what the file says of itself."""
        import pyarrow as pa

        try:
            if self.kind == "parquet":
                with self.parquet() as file:
                    self.about, self.schema = file.metadata, file.schema_arrow
            else:
                with self.system.open_input_file(self.path) as source:
                    reader = pa.ipc.open_file(source)
                    batches = range(reader.num_record_batches)
                    self.about = [reader.get_batch(i).num_rows for i in batches]
                    self.schema = reader.schema
        except (pa.ArrowException, OSError, ValueError) as error:
            what = "a readable Parquet file" if self.kind == "parquet" else "a whole Arrow file"
            more = ", or take it out of the folder" if self.inside else ""
            raise InputError(f"{self.name} is not {what}; write it again{more}.") from error

    def parquet(self, *, whole: bool = False) -> Any:
        """Open a Parquet file, to read ``whole`` row groups or columns through small buffers."""
        import pyarrow.parquet as pq

        source = self.system.open_input_file(self.path)
        buffer = 0 if whole else 1 << 16
        return pq.ParquetFile(source, metadata=self.about, pre_buffer=whole, buffer_size=buffer)

    @cached_property
    def unique(self) -> bool:
        """Whether no two columns have the same name."""
        return len(set(self.schema.names)) == len(self.schema.names)

    @property
    def counts(self) -> list[int]:
        """Rows of each piece of the file."""
        if self.kind == "arrow":
            return list(self.about)
        return [self.about.row_group(i).num_rows for i in range(self.about.num_row_groups)]

    def pieces(self, columns: Sequence[ArrowColumn], dtype: np.dtype[Any]) -> list[ArrowPiece]:
        """Return the pieces that have rows."""
        counts, first, found = self.counts, 0, list[ArrowPiece]()
        for i, n in enumerate(counts):
            if n:
                found.append(ArrowPiece(self, i, n, first, columns, dtype))
            first += n
        return found


@dataclass
class ArrowPiece:
    """A row group of a Parquet file, or a batch of an Arrow file."""

    file: ArrowFile
    number: int
    n_rows: int
    first: int
    """Number of its first row in the file."""
    columns: Sequence[ArrowColumn]
    dtype: np.dtype[Any]
    direct: bool = False

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def open_bytes(self) -> int:
        """About what it takes to have the piece open."""
        whole = self.n_rows * self._features * self.dtype.itemsize
        if self.file.kind == "arrow":
            return whole
        # A page as it lies in the file, the same unpacked, and a dictionary of its values.
        return 3 * min(whole, PAGE_BYTES * len(self.columns))

    def chunks(self, size: int, first: int) -> Iterator[NDArray[Any]]:
        """Yield rows (size, d) from chunk number ``first`` on; those before are read over."""
        for parts in _recut(self._read(size), size, first):
            rows = np.empty((sum(map(len, parts)), self._features), self.dtype)
            _write(parts, rows)
            yield rows

    def fills(self, size: int, first: int) -> Iterator[Fill]:
        """Yield what writes each chunk from number ``first`` on."""
        most = min(READ_BYTES, PAGE_BYTES * len(self.columns))
        read = self._read(max(1, most // (self._features * self.dtype.itemsize)))
        return (partial(_write, parts) for parts in _recut(read, size, first))

    def head(self) -> Any:
        """Return the first row, as a record batch of the columns."""
        return next(self._batches(1))

    @property
    def _features(self) -> int:
        return sum(column.count for column in self.columns)

    def _read(self, size: int) -> Iterator[_Part]:
        import pyarrow as pa

        at = self.first
        try:
            for batch in self._batches(min(size, self.n_rows)):
                part = _Part(_Decoded(batch, self, at), 0, batch.num_rows)
                at += batch.num_rows
                # Nothing here holds on to rows that were used: their memory is for the next.
                del batch
                yield part
                del part
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"{self.name} cannot be read from row {at} on ({brief(error)}); write it again, or"
                " take it out."
            ) from error
        if at < self.first + self.n_rows:
            raise InputError(f"{self.name} ends at row {at}, before it should; write it again.")

    def _batches(self, size: int) -> Iterator[Any]:
        import pyarrow as pa

        if self.file.kind == "arrow":
            with self.file.system.open_input_file(self.file.path) as source:
                batch = pa.ipc.open_file(source).get_batch(self.number)
                batch = batch.select([column.place for column in self.columns])
                for at in range(0, self.n_rows, size):
                    yield batch.slice(at, size)
            return
        chosen = [column.name for column in self.columns] if self.file.unique else None
        if size >= self.n_rows:
            # Read and closed: an open file keeps its pages, as much memory as what was read.
            read = self._whole(chosen)
            while read:
                yield self._selected(read.pop(0))
            return
        with self.file.parquet() as file:
            some = file.iter_batches(size, [self.number], columns=chosen, use_threads=False)
            yield from map(self._selected, some)

    def _whole(self, chosen: list[str] | None) -> list[Any]:
        """Read a row group at once."""
        with self.file.parquet(whole=True) as file:
            return list(
                file.iter_batches(self.n_rows, [self.number], columns=chosen, use_threads=False)
            )

    def _selected(self, batch: Any) -> Any:
        """Return the columns in their order, found by name, or by place where names repeat."""
        if not self.file.unique:
            return batch.select([column.place for column in self.columns])
        places = {name: place for place, name in enumerate(batch.schema.names)}
        return batch.select([places[column.name] for column in self.columns])


@dataclass
class _Decoded:
    """Rows as they were read: columns, which are turned into rows where these are needed."""

    batch: Any
    piece: ArrowPiece
    first: int

    @cached_property
    def numbers(self) -> list[NDArray[Any]]:
        piece = self.piece
        return numbers(self.batch, piece.columns, piece.dtype, piece.name, self.first)


class _Part(NamedTuple):
    """Some of the rows that were read together."""

    decoded: _Decoded
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def _recut(read: Iterator[_Part], size: int, first: int) -> Iterator[list[_Part]]:
    """Yield the parts of chunks of ``size`` rows each, from chunk number ``first`` on."""
    held, count, number = list[_Part](), 0, 0
    for decoded, start, end in read:
        while start < end:
            cut = min(end, start + size - count)
            held.append(_Part(decoded, start, cut))
            start, count = cut, count + cut - start
            if count == size:
                chunk, held, count, number = held, [], 0, number + 1
                if number > first:
                    yield chunk
                del chunk
        del decoded
    if held and number >= first:
        yield held


def _write(parts: Sequence[_Part], out: NDArray[Any]) -> None:
    """Write the rows of parts one below the other into ``out``, (m, d)."""
    at = 0
    for part in parts:
        some = [column[part.first : part.end] for column in part.decoded.numbers]
        write(some, out[at : at + len(part)])
        at += len(part)


def brief(error: Exception) -> str:
    """Return the first line of what an error says."""
    text = str(error).splitlines()
    return text[0].rstrip(". ") if text else type(error).__name__
