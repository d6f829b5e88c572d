"""Checks that all values of a source are finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from factormix.data.batches import Batch, Values
from factormix.data.sources.protocol import Rows, Source
from factormix.errors import InputError

__all__ = ["CHUNK_BYTES", "check_finite", "checked_blocks", "checked_rows"]

CHUNK_BYTES = 4 << 20
"""What is read at once where the order does not matter."""


def checked_rows(source: Rows, name: str = "X") -> Rows:
    """Return rows that are known to be finite, reading them once if nobody has checked them yet."""
    if getattr(source, "checked", False):
        return source
    check_finite(source, name)
    mark = getattr(source, "known_finite", None)
    return source if mark is None else mark()


def check_finite(source: Rows, name: str = "X") -> None:
    """Raise an error that names the first NaN or infinity, reading `source` once, in blocks."""
    dtype = source.dtype
    if dtype.is_floating_point if isinstance(dtype, torch.dtype) else dtype.kind == "f":
        size = max(1, CHUNK_BYTES // (8 * source.n_features))
        for _ in _finite(source.blocks(size), name):
            pass


def checked_blocks(source: Source, size: int, name: str = "X") -> Iterator[Batch]:
    """Yield the blocks of a source, checking them on the way if nobody has checked them yet."""
    known = getattr(source, "checked", False)
    return source.blocks(size) if known else _finite(source.blocks(size), name)


def _finite(batches: Iterator[Batch], name: str) -> Iterator[Batch]:
    first = 0
    for batch in batches:
        bad = _first_bad(batch.rows)
        if bad is not None:
            (row, column), value = bad, batch.rows[bad].item()
            raise InputError(
                f"{name} has {'NaN' if math.isnan(value) else 'an infinite value'} in row"
                f" {first + row}, column {column} (counting from 0); remove the row or fill the"
                " value in."
            )
        yield batch
        first += len(batch)


def _first_bad(rows: Values) -> tuple[int, int] | None:
    """Find row and column of the first value that is not finite."""
    if isinstance(rows, torch.Tensor):
        if not rows.is_floating_point():
            return None
        finite: Any = rows.isfinite()
    elif rows.dtype.kind != "f":
        return None
    else:
        finite = np.isfinite(rows)
    if finite.all():
        return None
    row, column = np.argwhere(~np.array(finite.tolist()))[0].tolist()
    return row, column
