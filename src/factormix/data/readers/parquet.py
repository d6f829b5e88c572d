"""Rows of Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from factormix.data.layouts import Layout
from factormix.data.readers.columns import Column, chosen_columns
from factormix.data.readers.spool import missing_package, spool, spooled
from factormix.data.sources import FileRows
from factormix.data.sources.checks import CHUNK_BYTES
from factormix.errors import InputError

__all__ = ["read_parquet"]


def read_parquet(path: Path, columns: Sequence[Column] | None) -> FileRows:
    """Make rows of the numeric columns of a Parquet file, without the index of a data frame."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_package("pyarrow", "Parquet files") from error
    try:
        # Column chunks are read through small buffers, so a large row group is not held whole.
        with (
            pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 16) as file,
            spool() as copy,
        ):
            schema = file.schema_arrow
            places = _places(path, schema, columns)
            dtype = _common_dtype(path, [schema.field(j) for j in places])
            n, complete = _copied(path, file, places, dtype, copy)
            if not complete and dtype.kind != "f":
                # Only now is it known that whole numbers have gaps, which floats can have.
                dtype = np.dtype(np.float64)
                copy.seek(0)
                copy.truncate()
                n, _ = _copied(path, file, places, dtype, copy)
            if not n:
                raise InputError(f"{path} has columns but no rows; give at least one row.")
            names = tuple(schema.names[j] for j in places)
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable Parquet file; write it again.") from error
    layout = Layout.contiguous((n, len(names)), dtype)
    return spooled(copy, layout, path, names).known_finite(complete=complete)


def _copied(
    path: Path, file: Any, places: list[int], dtype: np.dtype[Any], copy: IO[bytes]
) -> tuple[int, bool]:
    """Write the columns to a copy, and return the number of rows and whether no value is missing.

    Of whole numbers, nothing more is written after the first that is missing.
    """
    n, complete = 0, True
    for batch in file.iter_batches(max(1, CHUNK_BYTES // (8 * len(file.schema_arrow)))):
        chosen = batch.select(places)
        gaps = any(column.null_count for column in chosen.columns)
        if gaps and dtype.kind != "f":
            return n, False
        block = _block(path, chosen, dtype, n)
        complete &= not (gaps or (dtype.kind == "f" and np.isnan(block).any()))
        copy.write(block.data)
        n += batch.num_rows
    return n, complete


def _places(path: Path, schema: Any, columns: Sequence[Column] | None) -> list[int]:
    """Find the chosen columns, or all that are not the index of a data frame."""
    if columns is not None:
        places: list[int] = chosen_columns(columns, schema.names, len(schema), path).tolist()
        return places
    # What pandas says of the file names the columns of the index; ranges are descriptions instead.
    index = (schema.pandas_metadata or {}).get("index_columns", [])
    named = {column for column in index if isinstance(column, str)}
    places = [
        j
        for j, name in enumerate(schema.names)
        if name not in named and not name.startswith("__index_level_")
    ]
    if not places:
        raise InputError(f"{path} has no columns; write it again.")
    return places


def _common_dtype(path: Path, fields: Sequence[Any]) -> np.dtype[Any]:
    """Choose the smallest dtype that holds the values of all columns."""
    import pyarrow.types as types

    dtypes = []
    for field in fields:
        kind = field.type
        if types.is_decimal(kind):
            dtypes.append(np.dtype(np.float64))
        elif types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            dtypes.append(np.dtype(kind.to_pandas_dtype()))
        else:
            raise InputError(
                f"{path} has a column {field.name!r} of type {kind}; "
                "only numbers can be used, so drop or convert it, or choose other columns."
            )
    return np.result_type(*dtypes)


def _block(path: Path, batch: Any, dtype: np.dtype[Any], first: int) -> NDArray[Any]:
    """Turn a record batch that begins at row `first` into a block, (m, d)."""
    import pyarrow as pa

    block = np.zeros((batch.num_rows, batch.num_columns), dtype)
    for j, column in enumerate(batch.columns):
        number = column
        if pa.types.is_decimal(column.type) or column.null_count:
            number = column.cast(pa.float64())
        block[:, j] = number.to_numpy(zero_copy_only=False)
    bad = np.argwhere(np.isinf(block))
    if len(bad):
        row, j = bad[0].tolist()
        raise InputError(
            f"{path} has an infinite value in row {first + row} (counting from 0), column"
            f" {batch.schema.names[j]!r}; remove the row or leave the cell empty."
        )
    return block
