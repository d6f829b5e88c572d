"""Rows of Parquet and Arrow files and of folders of them, read where they lie."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from factormix.data.arrow import ArrowColumn, arrow_columns, block, feature_names, numeric_dtype
from factormix.data.batches import Batch, recut
from factormix.data.readers.columns import Column, chosen_columns
from factormix.data.readers.spool import missing_package
from factormix.data.sources import ArrayRows, OnBad, PiecedRows, check_finite
from factormix.errors import InputError

__all__ = ["ARROW_SUFFIXES", "read_arrow"]

ARROW_SUFFIXES = (".parquet", ".arrow", ".feather")
IN_MEMORY = 64 << 20
"""Bytes up to which a table is held in memory, checked and mixed as a whole."""
LANE_BYTES = 256 << 20
"""What the pieces that are open at the same time may need together."""
MOST_LANES = 8
PAGE_BYTES = 1 << 20
"""What a column of an open row group holds, about: a page."""


def read_arrow(
    path: str | Path, columns: Sequence[Column] | None = None, on_bad: OnBad = "stop"
) -> ArrayRows | PiecedRows:
    """Make rows of the numeric columns of a file or folder, without the index of a data frame.

    ``path`` may be an address of any file system that pyarrow knows. A small table is read into
    memory; of a larger one, pieces are read when they are needed.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise missing_package("pyarrow", "Parquet and Arrow files") from error
    name = str(path)
    try:
        files = _files(path, on_bad)
        if not files:
            raise InputError(f"{name} has no file that can be read; write them again.")
        schema = _schema(files)
        places = _places(name, schema, columns)
        described = arrow_columns(schema, name, places)
        described = _measured(files, described)
        dtype = _with_room_for_gaps(files, described, numeric_dtype(described))
        pieces = [piece for file in files for piece in file.pieces(described, dtype)]
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name} cannot be read ({_brief(error)}); write it again.") from error
    if not pieces:
        raise InputError(f"{name} has columns but no rows; give at least one row.")
    count = sum(column.count for column in described)
    rows = PiecedRows(
        pieces,
        count,
        dtype,
        name=Path(name).name,
        feature_names=feature_names(described),
        lanes=_lanes(pieces),
    )
    small = rows.n_rows * count * dtype.itemsize <= IN_MEMORY
    return _in_memory(rows, name) if small else rows


@dataclass
class _File:
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

    def parquet(self) -> Any:
        """Open a Parquet file, whose columns are read through small buffers."""
        import pyarrow.parquet as pq

        source = self.system.open_input_file(self.path)
        return pq.ParquetFile(source, metadata=self.about, pre_buffer=False, buffer_size=1 << 16)

    @property
    def counts(self) -> list[int]:
        """Rows of each piece of the file."""
        if self.kind == "arrow":
            return list(self.about)
        return [self.about.row_group(i).num_rows for i in range(self.about.num_row_groups)]

    def pieces(self, columns: Sequence[ArrowColumn], dtype: np.dtype[Any]) -> list[_ArrowPiece]:
        """Return the pieces that have rows."""
        counts, first, found = self.counts, 0, list[_ArrowPiece]()
        for i, n in enumerate(counts):
            if n:
                found.append(_ArrowPiece(self, i, n, first, columns, dtype))
            first += n
        return found


@dataclass
class _ArrowPiece:
    """A row group of a Parquet file, or a batch of an Arrow file."""

    file: _File
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
        features = sum(column.count for column in self.columns)
        whole = self.n_rows * features * self.dtype.itemsize
        if self.file.kind == "arrow":
            return whole
        # A page as it lies in the file, the same unpacked, and a dictionary of its values.
        return 3 * min(whole, PAGE_BYTES * len(self.columns))

    def chunks(self, size: int, first: int) -> Iterator[NDArray[Any]]:
        """Yield rows (size, d) from chunk number ``first`` on; those before are read over."""
        batches = recut(map(Batch, self._blocks(size)), size)
        for number, batch in enumerate(batches):
            if number >= first:
                yield np.asarray(batch.rows)

    def _blocks(self, size: int) -> Iterator[NDArray[Any]]:
        import pyarrow as pa

        at, names = self.first, [column.name for column in self.columns]
        try:
            for batch in self._batches(size, names):
                yield block(batch, self.columns, self.dtype, self.name, at)
                at += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"{self.name} cannot be read from row {at} on ({_brief(error)}); write it again, or"
                " take it out."
            ) from error
        if at < self.first + self.n_rows:
            raise InputError(f"{self.name} ends at row {at}, before it should; write it again.")

    def _batches(self, size: int, names: list[str]) -> Iterator[Any]:
        import pyarrow as pa

        if self.file.kind == "arrow":
            with self.file.system.open_input_file(self.file.path) as source:
                batch = pa.ipc.open_file(source).get_batch(self.number)
                chosen = batch.select([column.place for column in self.columns])
                for at in range(0, self.n_rows, size):
                    yield chosen.slice(at, size)
            return
        unique = len(set(self.file.schema.names)) == len(self.file.schema.names)
        with self.file.parquet() as file:
            for batch in file.iter_batches(
                size, [self.number], columns=names if unique else None, use_threads=False
            ):
                places = {name: place for place, name in enumerate(batch.schema.names)}
                wanted = (places[c.name] if unique else c.place for c in self.columns)
                yield batch.select(list(wanted))


def _files(path: str | Path, on_bad: OnBad) -> list[_File]:
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
        _File(one, text if whole else text + one.removeprefix(inside), system, kind, not whole)
        for one in paths
    ]
    return [file for file in files if _looked_at(file, on_bad)]


def _looked_at(file: _File, on_bad: OnBad) -> bool:
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


def _schema(files: Sequence[_File]) -> Any:
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
        places: list[int] = chosen_columns(columns, schema.names, len(schema), Path(name)).tolist()
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


def _measured(files: Sequence[_File], columns: list[ArrowColumn]) -> list[ArrowColumn]:
    """Find the length of lists of which the type does not tell, from the first row."""
    if all(column.width != 0 for column in columns):
        return columns
    piece = next((p for file in files for p in file.pieces(columns, np.dtype(float))), None)
    if piece is None:
        raise InputError(f"{files[0].name} has columns but no rows; give at least one row.")
    head = next(piece._batches(1, [column.name for column in columns]))
    return [
        ArrowColumn(c.name, c.place, c.dtype, len(head.column(j)[0].as_py() or ()))
        if c.width == 0
        else c
        for j, c in enumerate(columns)
    ]


def _with_room_for_gaps(
    files: Sequence[_File], columns: Sequence[ArrowColumn], dtype: np.dtype[Any]
) -> np.dtype[Any]:
    """Choose floats for whole numbers of which some are missing, as far as a file tells."""
    if dtype.kind == "f" or not any(_has_gaps(file, columns) for file in files):
        return dtype
    return np.dtype(np.float64)


def _has_gaps(file: _File, columns: Sequence[ArrowColumn]) -> bool:
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


def _batch_gaps(file: _File, number: int, columns: Sequence[ArrowColumn]) -> bool:
    import pyarrow as pa

    with file.system.open_input_file(file.path) as source:
        batch = pa.ipc.open_file(source).get_batch(number)
        return any(batch.column(column.place).null_count for column in columns)


def _lanes(pieces: Sequence[_ArrowPiece]) -> int:
    """Choose how many pieces are read at the same time: many mix well, and each takes memory."""
    largest = max((piece.open_bytes for piece in pieces), default=1)
    return max(1, min(MOST_LANES, LANE_BYTES // max(1, largest)))


def _in_memory(rows: PiecedRows, name: str) -> ArrayRows:
    """Read all rows, and check them."""
    table = np.empty((rows.n_rows, rows.n_features), rows.dtype)
    at = 0
    for batch in rows.blocks(max(1, (4 << 20) // (8 * rows.n_features))):
        table[at : at + len(batch)] = batch.rows
        at += len(batch)
    held = ArrayRows(table, feature_names=rows.feature_names)
    held.name = rows.name
    # The pieces have been checked for infinities; this tells whether anything is missing.
    return held.known_finite(complete=check_finite(held, name))


def _brief(error: Exception) -> str:
    text = str(error).splitlines()
    return text[0].rstrip(". ") if text else type(error).__name__
