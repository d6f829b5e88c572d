"""Tables of Arrow as blocks of numbers: which columns there are, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.errors import InputError

__all__ = ["ArrowColumn", "arrow_columns", "block", "feature_names", "numeric_dtype"]


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


def arrow_columns(schema: Any, name: str, places: Sequence[int]) -> list[ArrowColumn]:
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


def numeric_dtype(columns: Sequence[ArrowColumn]) -> np.dtype[Any]:
    """Choose the smallest dtype that holds the values of all columns."""
    dtype: np.dtype[Any] = np.result_type(*(column.dtype for column in columns))
    return dtype


def feature_names(columns: Sequence[ArrowColumn]) -> tuple[str, ...] | None:
    """Name the features: a column of lists has one for each entry, and alone it needs no names."""
    if len(columns) == 1 and columns[0].width is not None:
        return None
    names = list[str]()
    for column in columns:
        entries = range(column.count)
        names += [column.name] if column.width is None else [f"{column.name}[{k}]" for k in entries]
    return tuple(names)


def block(
    table: Any, columns: Sequence[ArrowColumn], dtype: np.dtype[Any], name: str, first: int
) -> NDArray[Any]:
    """Turn a table or record batch that begins at row ``first`` into a block, (m, d).

    Its columns are those described, in their order. A cell without a value is NaN.
    """
    if all(column.width is None for column in columns):
        # Columns lie one after the other in memory: one copy turns them all at once.
        turned = np.empty((len(columns), table.num_rows), dtype)
        for j, column in enumerate(columns):
            turned[j] = _numbers(table.column(j), column, dtype, name, first)
        return _transposed(turned)
    parts = [
        _numbers(table.column(j), column, dtype, name, first).reshape(table.num_rows, column.count)
        for j, column in enumerate(columns)
    ]
    whole = parts[0] if len(parts) == 1 else np.hstack(parts)
    return np.ascontiguousarray(whole, dtype=dtype)


def _transposed(columns: NDArray[Any]) -> NDArray[Any]:
    """Return columns (d, m) as rows (m, d); torch copies by tiles, several times as fast."""
    if columns.dtype.kind not in "fiu" or columns.dtype.name in ("uint16", "uint32", "uint64"):
        return np.ascontiguousarray(columns.T)
    return torch.from_numpy(columns).t().contiguous().numpy()


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
