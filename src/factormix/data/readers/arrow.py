"""Rows of Parquet and Arrow files and of folders of them, read in place.

A shard is a row group of a Parquet file or a record batch of an Arrow file. It is read by columns
and served by rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from factormix.data.arrow import (
    ArrowColumn,
    common_dtype,
    describe_column,
    describe_columns,
    extract_columns,
    measure_lists,
    name_features,
    write_rows,
)
from factormix.data.checks import check_finite, count_chunk_rows
from factormix.data.readers.base import Choice, Records, find_columns, find_ids
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.shards import Fill, ShardedRows
from factormix.data.sources.streams import OnBad
from factormix.errors import InputError, input_error, require_package

ARROW_SUFFIXES = (".parquet", ".arrow", ".feather")
IN_MEMORY_BYTES = 64 << 20
"""Size up to which a table is held in memory, checked and shuffled as a whole: chosen, not
measured."""
OPEN_BYTES = 256 << 20
"""Memory for all shards that are open at the same time: chosen, not measured."""
MOST_OPEN = 8
"""Most shards to have open at the same time: chosen, not measured."""
PAGE_BYTES = 1 << 20
"""Usual size of a page, the part of a column that an open row group holds: pyarrow writes 1 MiB."""
READ_BYTES = 8 << 20
"""Most bytes of a shard to read at once: each read of a column has a fixed cost, and damage costs
all rows of a read. CPU time for 100,000 rows of 784 columns: 2.1 s with 1 MB, 0.95 s with 4 MB,
0.71 s with 8 MB, 0.77 s with 32 MB."""

FRAME_ROWS = 10_000
"""Rows of a data frame of all columns: some megabytes."""
HEAD_ROWS = 1000
"""First rows in which the values of a column that identifies rows are all different: chosen, not
measured."""


def read_arrow(
    name: str,
    choice: Choice,
    on_bad: OnBad = "stop",
    in_memory_bytes: int = IN_MEMORY_BYTES,
) -> ArrayRows | ShardedRows:
    """Make rows of the numeric columns of a file or folder, without the index of a data frame.

    ``name`` is a path, or an address in any file system that pyarrow knows. A small table is read
    into memory; of a larger one, shards are read when they are needed.
    """
    pa = require_package("pyarrow", "data")
    refusal = f"{name} cannot be read ({{reason}}); write it again."
    with input_error(refusal, pa.ArrowException, OSError, ValueError):
        files = _find_files(name, on_bad)
        if not files:
            raise InputError(f"{name} has no file that can be read; write them again.")
        schema = _find_schema(files)
        places, left_out, index = _find_places(name, schema, choice)
        described = describe_columns(schema, name, places)
        described = _measure_lists(files, described)
        dtype = common_dtype(described)
        if dtype.kind != "f" and any(file.has_nulls(described) for file in files):
            dtype = np.dtype(np.float64)
        shards = [shard for file in files for shard in file.list_shards(described, dtype)]
    if not shards:
        raise InputError(f"{name} has columns but no rows; give at least one row.")
    # Many open shards shuffle well, but each takes memory.
    largest = max(1, *(shard.open_bytes for shard in shards))
    rows = ShardedRows(
        shards,
        sum(column.count for column in described),
        dtype,
        name=Path(name).name,
        feature_names=name_features(described),
        n_open=max(1, min(MOST_OPEN, OPEN_BYTES // largest)),
    )
    rows.records = _describe_records(name, files, choice, described, left_out, index)
    small = rows.n_rows * rows.n_features * dtype.itemsize <= in_memory_bytes
    return _read_into_memory(rows, name) if small else rows


def _describe_records(
    name: str,
    files: Sequence[ArrowFile],
    choice: Choice,
    described: Sequence[ArrowColumn],
    left_out: Sequence[int],
    index: Sequence[int],
) -> Records:
    """Describe all columns of the files."""

    def open_frames(columns: Sequence[str]) -> Iterator[Any]:
        for file in files:
            yield from file.read_frames(columns)

    def read_head(column: str) -> Sequence[object]:
        values: Sequence[object] = next(open_frames([column]))[column].tolist()
        return values[:HEAD_ROWS]

    names = tuple(files[0].schema.names)
    ids = find_ids(choice, names, left_out, read_head, name, index)
    features = tuple(column.name for column in described)
    return Records(names, features, ids, open_frames, schema=files[0].schema)


def _read_into_memory(rows: ShardedRows, name: str) -> ArrayRows:
    table = np.empty((rows.n_rows, rows.n_features), rows.dtype)
    at = 0
    for batch in rows.blocks(count_chunk_rows(rows)):
        table[at : at + len(batch)] = batch.rows
        at += len(batch)
    held = ArrayRows(table, feature_names=rows.feature_names)
    held.name, held.records = rows.name, rows.records
    # The shards have been checked for infinities; this finds out whether a value is missing.
    return held.mark_finite(complete=check_finite(held, name))


def _find_files(text: str, on_bad: OnBad) -> list[ArrowFile]:
    """Find the readable files of a folder, or the one file, in the order of names."""
    from pyarrow import fs

    if "://" in text:
        system, root = fs.FileSystem.from_uri(text)
    else:
        system, root = fs.LocalFileSystem(), str(Path(text).absolute())
    info = system.get_file_info(root)
    if info.type == fs.FileType.NotFound:
        raise InputError(f"{text} does not exist; check the path.")
    if info.type == fs.FileType.Directory:
        below = system.get_file_info(fs.FileSelector(root, recursive=True))
        paths = sorted(one.path for one in below if one.is_file and _is_visible(one.path, root))
    else:
        paths = [root]
    paths = [one for one in paths if one.lower().endswith(ARROW_SUFFIXES)]
    parquet = [one for one in paths if one.lower().endswith(".parquet")]
    if not paths:
        raise InputError(f"{text} has no {', '.join(ARROW_SUFFIXES)} files in it.")
    if 0 < len(parquet) < len(paths):
        raise InputError(f"{text} has files of Parquet and of Arrow in it; give one kind.")
    kind: Literal["parquet", "arrow"] = "parquet" if parquet else "arrow"
    in_folder = paths != [root]
    files = list[ArrowFile]()
    for one in paths:
        file = ArrowFile(one, text + one.removeprefix(root), system, kind, in_folder)
        try:
            file.read_metadata()
        except InputError as error:
            if on_bad == "stop" or not in_folder:
                raise
            warnings.warn(f"{file.name} is left out: {error}", stacklevel=4)
            continue
        files.append(file)
    return files


def _is_visible(path: str, root: str) -> bool:
    """Return whether a file is data: writers keep their own notes under names with . or _."""
    return not any(part[:1] in "._" for part in path.removeprefix(root).strip("/").split("/"))


def _find_schema(files: Sequence[ArrowFile]) -> Any:
    """Return the schema that all files share."""
    first = files[0]
    for file in files[1:]:
        if file.schema.names != first.schema.names or file.schema.types != first.schema.types:
            raise InputError(
                f"{file.name} has other columns than {first.name}: write both with the same names"
                " and types, in the same order, or take one of them out."
            )
    return first.schema


def _find_places(name: str, schema: Any, choice: Choice) -> tuple[list[int], list[int], list[int]]:
    """Find the features, the columns without numbers, and the index of a data frame."""
    if not schema.names:
        raise InputError(f"{name} has no columns; write it again.")
    if len(set(schema.names)) < len(schema.names):
        raise InputError(f"{name} has several columns of the same name; name them apart.")
    # The metadata of pandas names the columns of the index; an index that is a range has none.
    named = (schema.pandas_metadata or {}).get("index_columns", [])
    numeric, index = list[bool](), list[int]()
    for j, label in enumerate(schema.names):
        if label in named or label.startswith("__index_level_"):
            index.append(j)
        numeric.append(j not in index and describe_column(schema.field(j), j) is not None)
    places = find_columns(choice, schema.names, len(schema), name, numeric).tolist()
    rest = sorted({j for j in range(len(schema)) if not numeric[j]}.difference(places))
    return places, [j for j in rest if j not in index], [j for j in rest if j in index]


def _measure_lists(files: Sequence[ArrowFile], columns: list[ArrowColumn]) -> list[ArrowColumn]:
    """Take the length of lists from the first row where their type does not give it."""
    if all(column.width != 0 for column in columns):
        return columns
    shards = chain.from_iterable(file.list_shards(columns, np.dtype(float)) for file in files)
    first = next(shards, None)
    return columns if first is None else measure_lists(columns, next(first.read_batches(1)))


@dataclass
class ArrowFile:
    """A Parquet or Arrow file and its metadata."""

    path: str
    name: str
    system: Any
    kind: Literal["parquet", "arrow"]
    in_folder: bool
    metadata: Any = field(repr=False, default=None)
    """Metadata of a Parquet file; the number of rows of each batch of an Arrow file."""
    schema: Any = field(repr=False, default=None)

    def read_metadata(self) -> None:
        """Read the metadata and the schema of the file."""
        import pyarrow as pa

        what = "a readable Parquet file" if self.kind == "parquet" else "a whole Arrow file"
        more = ", or take it out of the folder" if self.in_folder else ""
        refusal = f"{self.name} is not {what}; write it again{more}."
        with input_error(refusal, pa.ArrowException, OSError, ValueError):
            if self.kind == "parquet":
                with self.open_parquet() as file:
                    self.metadata, self.schema = file.metadata, file.schema_arrow
            else:
                with self.open_arrow() as file:
                    batches = map(file.get_batch, range(file.num_record_batches))
                    self.metadata, self.schema = [b.num_rows for b in batches], file.schema

    def open_parquet(self, *, whole: bool = False) -> Any:
        """Open a Parquet file, to read ``whole`` row groups or columns through small buffers."""
        import pyarrow.parquet as pq

        source = self.system.open_input_file(self.path)
        buffer = 0 if whole else 1 << 16
        return pq.ParquetFile(source, metadata=self.metadata, pre_buffer=whole, buffer_size=buffer)

    @contextmanager
    def open_arrow(self) -> Iterator[Any]:
        """Open an Arrow file."""
        import pyarrow as pa

        with self.system.open_input_file(self.path) as source:
            yield pa.ipc.open_file(source)

    def read_frames(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yield data frames of some columns as they are."""
        names = list(columns)
        with self.open_parquet() if self.kind == "parquet" else self.open_arrow() as file:
            if self.kind == "parquet":
                batches = file.iter_batches(FRAME_ROWS, columns=names)
            else:
                batches = map(file.get_batch, range(len(self.metadata)))
            for batch in batches:
                yield batch.select(names).to_pandas(ignore_metadata=True)

    def list_shards(self, columns: Sequence[ArrowColumn], dtype: np.dtype[Any]) -> list[ArrowShard]:
        """Return the shards that have rows."""
        counts = self.metadata
        if self.kind == "parquet":
            groups = map(self.metadata.row_group, range(self.metadata.num_row_groups))
            counts = [group.num_rows for group in groups]
        firsts = np.cumsum([0, *counts]).tolist()
        return [
            ArrowShard(self, i, n, firsts[i], columns, dtype) for i, n in enumerate(counts) if n
        ]

    def has_nulls(self, columns: Sequence[ArrowColumn]) -> bool:
        """Return whether any value of the columns is missing, as far as the file says."""
        if self.kind == "arrow":
            with self.open_arrow() as file:
                batches = map(file.get_batch, range(len(self.metadata)))
                return any(b.column(c.place).null_count for b in batches for c in columns)
        # The path of a list's values begins with the name of its column.
        names = {column.name for column in columns}
        groups = map(self.metadata.row_group, range(self.metadata.num_row_groups))
        parts = (group.column(j) for group in groups for j in range(group.num_columns))
        return any(
            part.statistics is not None and part.statistics.null_count
            for part in parts
            if names & {part.path_in_schema, part.path_in_schema.partition(".")[0]}
        )


@dataclass
class ArrowShard:
    """A row group of a Parquet file, or a record batch of an Arrow file."""

    file: ArrowFile
    number: int
    n_rows: int
    first: int
    """Number of its first row in the file."""
    columns: Sequence[ArrowColumn]
    dtype: np.dtype[Any]
    read_bytes: int = READ_BYTES
    direct: bool = False

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def open_bytes(self) -> int:
        """Approximate memory of the open shard."""
        whole = self.n_rows * self.row_bytes
        if self.file.kind == "arrow":
            return whole
        # A page as it lies in the file, the same unpacked, and a dictionary of its values.
        return 3 * min(whole, PAGE_BYTES * len(self.columns))

    @property
    def row_bytes(self) -> int:
        return sum(column.count for column in self.columns) * self.dtype.itemsize

    def open(self, first: int) -> Fill:
        """Return a function that reads the next rows, from row ``first`` on, into an array.

        The rows before ``first`` are read too.
        """
        return _ShardReader(self, first)

    def read_batches(self, size: int) -> Iterator[Any]:
        """Yield record batches of up to ``size`` rows with the columns in their order."""
        if self.file.kind == "arrow":
            with self.file.open_arrow() as file:
                batch = file.get_batch(self.number)
                batch = batch.select([column.place for column in self.columns])
                for at in range(0, self.n_rows, size):
                    yield batch.slice(at, size)
            return
        chosen = [column.name for column in self.columns]
        if size >= self.n_rows:
            read = self._read_whole(chosen)
            while read:
                yield read.pop(0).select(chosen)
            return
        with self.file.open_parquet() as file:
            batches = file.iter_batches(size, [self.number], columns=chosen, use_threads=False)
            yield from (batch.select(chosen) for batch in batches)

    def _read_whole(self, chosen: list[str]) -> list[Any]:
        # A function of its own, so that the file is closed: an open one keeps its pages, which
        # take as much memory as the rows.
        with self.file.open_parquet(whole=True) as file:
            return list(
                file.iter_batches(self.n_rows, [self.number], columns=chosen, use_threads=False)
            )


class _ShardReader:
    """Read the rows of a shard one after the other into arrays, from row ``skip`` on."""

    def __init__(self, shard: ArrowShard, skip: int) -> None:
        most = min(shard.read_bytes, PAGE_BYTES * len(shard.columns))
        size = min(max(1, most // shard.row_bytes), shard.n_rows)
        self._shard, self._skip, self._batches = shard, skip, shard.read_batches(size)
        self._columns = list[NDArray[Any]]()
        self._at, self._end, self._read = 0, 0, 0
        """The next row and the end of the columns, and the number of rows read from the shard."""

    def __call__(self, out: NDArray[Any]) -> None:
        filled = 0
        while filled < len(out):
            while self._at == self._end:
                self._read_next()
            n = min(self._end - self._at, len(out) - filled)
            part = slice(self._at, self._at + n)
            write_rows([column[part] for column in self._columns], out[filled : filled + n])
            filled, self._at = filled + n, self._at + n
            if self._at == self._end:
                # The memory of these rows is for the next ones.
                self._columns = []

    def _read_next(self) -> None:
        """Read the next columns, or none if all of their rows are skipped."""
        import pyarrow as pa

        shard, first = self._shard, self._shard.first + self._read
        refusal = f"{shard.name} cannot be read from row {first} on ({{reason}}); write it again,"
        with input_error(f"{refusal} or take it out.", pa.ArrowException, OSError):
            batch = next(self._batches, None)
        if batch is None:
            raise InputError(f"{shard.name} ends at row {first}, before it should; write it again.")
        self._read += batch.num_rows
        self._at, self._end = min(self._skip, batch.num_rows), batch.num_rows
        self._skip -= self._at
        if self._at < self._end:
            self._columns = extract_columns(batch, shard.columns, shard.dtype, shard.name, first)
