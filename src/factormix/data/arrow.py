"""Tables of Arrow as blocks of numbers: which columns there are, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.errors import InputError

__all__ = [
    "ArrowColumn",
    "common_dtype",
    "describe_columns",
    "extract_columns",
    "name_features",
    "to_rows",
    "write_rows",
]

TOGETHER = 4
"""Columns whose numbers are moved together where columns become rows."""
TURNED_BYTES = 2 << 20
"""What becomes rows at once, so that a cache holds it; and rows, so that calls are few."""
TURNED_ROWS = 512


@dataclass(frozen=True)
class ArrowColumn:
    """A column of numbers, or of lists of ``width`` numbers each."""

    name: str
    place: int
    """Among the columns of the table."""
    dtype: np.dtype[Any]
    width: int | None = None
    """None for plain numbers; 0 for lists whose length only their values tell."""

    @property
    def count(self) -> int:
        """Features that the column has."""
        return 1 if self.width is None else self.width


def describe_columns(schema: Any, name: str, places: Sequence[int]) -> list[ArrowColumn]:
    """Describe the chosen columns of a schema, or say which of them holds no numbers."""
    import pyarrow.types as types

    found = list[ArrowColumn]()
    for j in places:
        field, kind, width = schema.field(j), schema.field(j).type, None
        if types.is_fixed_size_list(kind):
            kind, width = kind.value_type, kind.list_size
        elif types.is_list(kind) or types.is_large_list(kind):
            kind, width = kind.value_type, 0
        if types.is_decimal(kind):
            dtype = np.dtype(np.float64)
        elif types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            dtype = np.dtype(kind.to_pandas_dtype())
        else:
            raise InputError(
                f"{name} has a column {field.name!r} of type {field.type}; only numbers can be"
                " used, so drop or convert it, or choose other columns."
            )
        found.append(ArrowColumn(field.name, j, dtype, width))
    return found


def common_dtype(columns: Sequence[ArrowColumn]) -> np.dtype[Any]:
    """Choose the smallest dtype that holds the values of all columns."""
    dtype: np.dtype[Any] = np.result_type(*(column.dtype for column in columns))
    return dtype


def name_features(columns: Sequence[ArrowColumn]) -> tuple[str, ...] | None:
    """Name the features: a column of lists has one for each entry, and alone it needs no names."""
    if len(columns) == 1 and columns[0].width is not None:
        return None
    names = list[str]()
    for column in columns:
        entries = range(column.count)
        names += [column.name] if column.width is None else [f"{column.name}[{k}]" for k in entries]
    return tuple(names)


def to_rows(
    table: Any, columns: Sequence[ArrowColumn], dtype: np.dtype[Any], name: str, first: int
) -> NDArray[Any]:
    """Turn a table or record batch that begins at row ``first`` into a block, (m, d).

    Its columns are those described, in their order. A cell without a value is NaN.
    """
    rows = np.empty((len(table), sum(column.count for column in columns)), dtype)
    write_rows(extract_columns(table, columns, dtype, name, first), rows)
    return rows


def extract_columns(
    table: Any, columns: Sequence[ArrowColumn], dtype: np.dtype[Any], name: str, first: int
) -> list[NDArray[Any]]:
    """Return the numbers of each column, (m,) or (m, width), where they lie if that can be.

    The arguments are those of ``block``, and a cell that ``dtype`` cannot hold is an error here.
    """
    found = list[NDArray[Any]]()
    for j, column in enumerate(columns):
        values = _numbers(table.column(j), column, dtype, name, first)
        shape = (len(table),) if column.width is None else (len(table), column.width)
        found.append(values.reshape(shape))
    return found


def write_rows(columns: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
    """Write columns (m,) or (m, width) side by side into rows ``out``, (m, d), in C order."""
    if all(column.ndim == 1 for column in columns):
        whole = len(columns) - len(columns) % TOGETHER
        _turn(columns[:whole], out[:, :whole])
        for j in range(whole, len(columns)):
            out[:, j] = columns[j]
        return
    at = 0
    for column in columns:
        width = 1 if column.ndim == 1 else column.shape[1]
        out[:, at : at + width] = column.reshape(len(out), width)
        at += width


def _turn(columns: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
    """Write columns (m,), a multiple of ``TOGETHER`` of them, as rows (m, d).

    A number at a time, each would go to another line of the cache. So some columns are put
    together first, in a space that the cache holds, and their numbers moved as one.
    """
    if not columns or not len(out):
        return
    most = max(TURNED_ROWS, TURNED_BYTES // (len(columns) * out.itemsize))
    # One place more than needed: lines at distances of a power of two share few places of a cache.
    shape = len(columns) // TOGETHER, min(most, len(out)) + 1, TOGETHER
    space, joined = np.empty(shape, out.dtype), np.dtype((np.void, TOGETHER * out.itemsize))
    turned, target = space.view(joined)[:, :, 0].T, out.view(joined)
    for first in range(0, len(out), most):
        n = min(most, len(out) - first)
        for j, column in enumerate(columns):
            space[j // TOGETHER, :n, j % TOGETHER] = column[first : first + n]
        target[first : first + n] = turned[:n]


def _numbers(
    values: Any, column: ArrowColumn, dtype: np.dtype[Any], name: str, first: int
) -> NDArray[Any]:
    """Return the numbers of a column, of lists one after the other, NaN for those without value."""
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if column.width is not None:
        values = _flat(values, column.width, name, column.name, first)
    if pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    if values.null_count and dtype.kind != "f":
        row = int(np.flatnonzero(np.asarray(values.is_null()))[0]) // max(1, column.count)
        raise InputError(
            f"{name} has an empty cell in row {first + row} (counting from 0), column"
            f" {column.name!r}, whose values are whole numbers: convert the column to floats."
        )
    if values.null_count:
        values = values.cast(pa.float64()) if pa.types.is_integer(values.type) else values
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.uint8()).cast(pa.float64())
    array: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array


def _flat(values: Any, width: int, name: str, column: str, first: int) -> Any:
    """Return the entries of lists that all have the same length, one after the other."""
    import pyarrow.compute as pc

    lengths = pc.list_value_length(values)
    wrong = np.flatnonzero(np.asarray(pc.fill_null(pc.not_equal(lengths, width), True)))
    if len(wrong):
        row = int(wrong[0])
        found = lengths[row].as_py()
        what = "no list" if found is None else f"a list of {found} entries"
        raise InputError(
            f"{name} has {what} in row {first + row} (counting from 0), column {column!r}, where"
            f" {width} are expected; remove the row."
        )
    return values.flatten()
