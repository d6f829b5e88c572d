"""Tables of Arrow as blocks of numbers: which columns there are, and what they hold.

Files of Parquet and Arrow in pieces, which are read by columns and served by rows.

Rows of Parquet and Arrow files and of folders of them, read where they lie.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from factormix.data.arrow import (
    ArrowColumn,
    common_dtype,
    describe_columns,
    extract_columns,
    name_features,
    write_rows,
)
from factormix.data.checks import check_finite
from factormix.data.readers.base import Column, find_columns, missing_package_error
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.shards import Fill, ShardedRows
from factormix.data.sources.streams import OnBad
from factormix.errors import InputError

__all__ = [
    "ARROW_SUFFIXES",
    "ArrowFile",
    "ArrowPiece",
    "brief",
    "read_arrow",
]


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
        return extract_columns(self.batch, piece.columns, piece.dtype, piece.name, self.first)


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
        write_rows(some, out[at : at + len(part)])
        at += len(part)


def brief(error: Exception) -> str:
    """Return the first line of what an error says."""
    text = str(error).splitlines()
    return text[0].rstrip(". ") if text else type(error).__name__


ARROW_SUFFIXES = (".parquet", ".arrow", ".feather")
IN_MEMORY = 64 << 20
"""Bytes up to which a table is held in memory, checked and mixed as a whole."""
LANE_BYTES = 256 << 20
"""What the pieces that are open at the same time may need together."""
MOST_LANES = 8


def read_arrow(
    path: str | Path, columns: Sequence[Column] | None = None, on_bad: OnBad = "stop"
) -> ArrayRows | ShardedRows:
    """Make rows of the numeric columns of a file or folder, without the index of a data frame.

    ``path`` may be an address of any file system that pyarrow knows. A small table is read into
    memory; of a larger one, pieces are read when they are needed.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise missing_package_error("pyarrow", "Parquet and Arrow files") from error
    name = str(path)
    try:
        files = _files(path, on_bad)
        if not files:
            raise InputError(f"{name} has no file that can be read; write them again.")
        schema = _schema(files)
        places = _places(name, schema, columns)
        described = describe_columns(schema, name, places)
        described = _measured(files, described)
        dtype = _with_room_for_gaps(files, described, common_dtype(described))
        pieces = [piece for file in files for piece in file.pieces(described, dtype)]
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name} cannot be read ({brief(error)}); write it again.") from error
    if not pieces:
        raise InputError(f"{name} has columns but no rows; give at least one row.")
    count = sum(column.count for column in described)
    rows = ShardedRows(
        pieces,
        count,
        dtype,
        name=Path(name).name,
        feature_names=name_features(described),
        lanes=_lanes(pieces),
    )
    small = rows.n_rows * count * dtype.itemsize <= IN_MEMORY
    return _in_memory(rows, name) if small else rows


def _files(path: str | Path, on_bad: OnBad) -> list[ArrowFile]:
    """Find the files of a folder that can be read, or the one file, in the order of names."""
    from pyarrow import fs

    text = str(path)
    if "://" in text:
        system, inside = fs.FileSystem.from_uri(text)
    else:
        system, inside = fs.LocalFileSystem(), str(Path(text).absolute())
    info = system.get_file_info(inside)
    if info.type == fs.FileType.NotFound:
        raise InputError(f"{text} does not exist; check the path.")
    if info.type == fs.FileType.Directory:
        below = system.get_file_info(fs.FileSelector(inside, recursive=True))
        paths = sorted(one.path for one in below if one.is_file and _visible(one.path, inside))
    else:
        paths = [inside]
    paths = [one for one in paths if one.lower().endswith(ARROW_SUFFIXES)]
    parquet = [one for one in paths if one.lower().endswith(".parquet")]
    if not paths:
        raise InputError(f"{text} has no {', '.join(ARROW_SUFFIXES)} files in it.")
    if 0 < len(parquet) < len(paths):
        raise InputError(f"{text} has files of Parquet and of Arrow in it; give one kind.")
    kind: Literal["parquet", "arrow"] = "parquet" if parquet else "arrow"
    whole = len(paths) == 1 and paths[0] == inside
    files = [
        ArrowFile(one, text if whole else text + one.removeprefix(inside), system, kind, not whole)
        for one in paths
    ]
    return [file for file in files if _looked_at(file, on_bad)]


def _looked_at(file: ArrowFile, on_bad: OnBad) -> bool:
    """Look at a file, and tell whether it can be read."""
    try:
        file.look()
    except InputError as error:
        if on_bad == "stop" or not file.inside:
            raise
        warnings.warn(f"{file.name} is left out: {error}", stacklevel=5)
        return False
    return True


def _visible(path: str, root: str) -> bool:
    """Tell whether a file is data: writers keep their own notes under names with . or _."""
    return not any(part[:1] in "._" for part in path.removeprefix(root).strip("/").split("/"))


def _schema(files: Sequence[ArrowFile]) -> Any:
    """Return the schema that all files have."""
    first = files[0]
    for file in files[1:]:
        if file.schema.names != first.schema.names or file.schema.types != first.schema.types:
            raise InputError(
                f"{file.name} has other columns than {first.name}: write both with the same names"
                " and types, in the same order, or take one of them out."
            )
    return first.schema


def _places(name: str, schema: Any, columns: Sequence[Column] | None) -> list[int]:
    """Find the chosen columns, or all that are not the index of a data frame."""
    if columns is not None:
        places: list[int] = find_columns(columns, schema.names, len(schema), Path(name)).tolist()
        return places
    # What pandas says of the file names the columns of the index; ranges are descriptions instead.
    index = (schema.pandas_metadata or {}).get("index_columns", [])
    named = {column for column in index if isinstance(column, str)}
    places = [
        j
        for j, label in enumerate(schema.names)
        if label not in named and not label.startswith("__index_level_")
    ]
    if not places:
        raise InputError(f"{name} has no columns; write it again.")
    return places


def _measured(files: Sequence[ArrowFile], columns: list[ArrowColumn]) -> list[ArrowColumn]:
    """Find the length of lists of which the type does not tell, from the first row."""
    if all(column.width != 0 for column in columns):
        return columns
    piece = next((p for file in files for p in file.pieces(columns, np.dtype(float))), None)
    if piece is None:
        raise InputError(f"{files[0].name} has columns but no rows; give at least one row.")
    head = piece.head()
    return [
        ArrowColumn(c.name, c.place, c.dtype, len(head.column(j)[0].as_py() or ()))
        if c.width == 0
        else c
        for j, c in enumerate(columns)
    ]


def _with_room_for_gaps(
    files: Sequence[ArrowFile], columns: Sequence[ArrowColumn], dtype: np.dtype[Any]
) -> np.dtype[Any]:
    """Choose floats for whole numbers of which some are missing, as far as a file tells."""
    if dtype.kind == "f" or not any(_has_gaps(file, columns) for file in files):
        return dtype
    return np.dtype(np.float64)


def _has_gaps(file: ArrowFile, columns: Sequence[ArrowColumn]) -> bool:
    if file.kind == "arrow":
        return any(file.schema.field(column.place).nullable for column in columns) and any(
            _batch_gaps(file, i, columns) for i in range(len(file.about))
        )
    names = {column.name for column in columns}
    for i in range(file.about.num_row_groups):
        group = file.about.row_group(i)
        for j in range(group.num_columns):
            about = group.column(j)
            if about.path_in_schema.partition(".")[0] in names or about.path_in_schema in names:
                statistics = about.statistics
                if statistics is not None and statistics.null_count:
                    return True
    return False


def _batch_gaps(file: ArrowFile, number: int, columns: Sequence[ArrowColumn]) -> bool:
    import pyarrow as pa

    with file.system.open_input_file(file.path) as source:
        batch = pa.ipc.open_file(source).get_batch(number)
        return any(batch.column(column.place).null_count for column in columns)


def _lanes(pieces: Sequence[ArrowPiece]) -> int:
    """Choose how many pieces are read at the same time: many mix well, and each takes memory."""
    largest = max((piece.open_bytes for piece in pieces), default=1)
    return max(1, min(MOST_LANES, LANE_BYTES // max(1, largest)))


def _in_memory(rows: ShardedRows, name: str) -> ArrayRows:
    """Read all rows, and check them."""
    table = np.empty((rows.n_rows, rows.n_features), rows.dtype)
    at = 0
    for batch in rows.blocks(max(1, (4 << 20) // (8 * rows.n_features))):
        table[at : at + len(batch)] = batch.rows
        at += len(batch)
    held = ArrayRows(table, feature_names=rows.feature_names)
    held.name = rows.name
    # The pieces have been checked for infinities; this tells whether anything is missing.
    return held.mark_finite(complete=check_finite(held, name))
