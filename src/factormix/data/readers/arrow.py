"""Rows of Parquet and Arrow files and of folders of them, read where they lie."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from factormix.data.arrow import ArrowColumn, arrow_columns, feature_names, numeric_dtype
from factormix.data.readers.columns import Column, chosen_columns
from factormix.data.readers.groups import ArrowFile, ArrowPiece, brief
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
        raise InputError(f"{name} cannot be read ({brief(error)}); write it again.") from error
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
