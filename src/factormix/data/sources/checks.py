"""Checks that all values of a source are finite, or NaN for what is missing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.data.batches import Batch, Values, join, used
from factormix.data.columns import Columns
from factormix.data.sources.protocol import Rows, Source
from factormix.data.units import as_tensor
from factormix.errors import InputError

__all__ = [
    "CHUNK_BYTES",
    "check_finite",
    "check_observed",
    "checked_blocks",
    "checked_rows",
    "never_observed",
    "observed_rows",
]

CHUNK_BYTES = 4 << 20
"""What is read at once where the order does not matter."""
ADDED = 16
"""Rows of a block that are added to a sample for each column of which it has no value."""


def checked_rows(source: Rows, name: str = "X") -> Rows:
    """Return rows without infinities, reading them once if nobody has checked them yet."""
    if getattr(source, "checked", False):
        return source
    complete = check_finite(source, name)
    mark = getattr(source, "known_finite", None)
    return source if mark is None else mark(complete=complete)


def check_finite(source: Rows, name: str = "X") -> bool:
    """Raise an error that names the first infinity, reading `source` once, in blocks.

    Return whether no value is missing (NaN).
    """
    dtype, complete = source.dtype, True
    if dtype.is_floating_point if isinstance(dtype, torch.dtype) else dtype.kind == "f":
        size = max(1, CHUNK_BYTES // (8 * source.n_features))
        for _, whole in _finite(source.blocks(size), name):
            complete &= whole
    return complete


def check_observed(rows: Rows, sample: Batch, name: str = "X") -> Batch:
    """Return a sample of rows in which every column has a value, or say which one never has.

    Where the sample lacks values of a column, rows of positive weight that have them are added.
    """
    lacking = np.flatnonzero(~Columns(sample).observed.numpy())
    size = max(1, CHUNK_BYTES // (8 * rows.n_features))
    for batch in used(rows.blocks(size)) if len(lacking) else ():
        have = ~np.isnan(np.asarray(as_tensor(batch.rows)[:, lacking].cpu()))
        chosen = np.unique(np.concatenate([np.flatnonzero(has)[:ADDED] for has in have.T]))
        if len(chosen):
            sample = join([sample, batch.take(chosen)])
            lacking = lacking[~have.any(axis=0)]
        if not len(lacking):
            break
    if len(lacking):
        raise never_observed(rows, int(lacking[0]), name)
    return sample


def never_observed(source: Source, column: int, name: str = "X") -> InputError:
    """Say that a column has no value."""
    names = getattr(source, "feature_names", None)
    which = f"{column} (counting from 0)" if names is None else repr(names[column])
    return InputError(
        f"{name} has no value in column {which}, only missing ones (NaN): leave the column out, or"
        " give rows in which it is observed."
    )


def observed_rows(rows: Rows) -> NDArray[np.bool_] | None:
    """Tell of which rows anything is observed, (n,); None where nothing is missing at all."""
    if getattr(rows, "complete", False):
        return None
    size = max(1, CHUNK_BYTES // (8 * rows.n_features))
    blocks = (as_tensor(block.rows) for block in rows.blocks(size))
    seen = np.concatenate([np.asarray((~x.isnan()).any(dim=1).cpu()) for x in blocks])
    return None if seen.all() else seen


def checked_blocks(source: Source, size: int, name: str = "X") -> Iterator[Batch]:
    """Yield the blocks of a source, checking them on the way if nobody has checked them yet."""
    known = getattr(source, "checked", False)
    if known:
        return source.blocks(size)
    return (batch for batch, _ in _finite(source.blocks(size), name))


def _finite(batches: Iterator[Batch], name: str) -> Iterator[tuple[Batch, bool]]:
    """Yield batches without infinities, each with whether nothing in it is missing."""
    first = 0
    for batch in batches:
        whole = _all_finite(batch.rows)
        bad = None if whole else _first_infinite(batch.rows)
        if bad is not None:
            row, column = bad
            raise InputError(
                f"{name} has an infinite value in row {first + row}, column {column} (counting from"
                " 0); remove the row, or fill in the value, or NaN if it is missing."
            )
        yield batch, whole
        first += len(batch)


def _all_finite(rows: Values) -> bool:
    if isinstance(rows, torch.Tensor):
        return not rows.is_floating_point() or bool(rows.isfinite().all())
    return rows.dtype.kind != "f" or bool(np.isfinite(rows).all())


def _first_infinite(rows: Values) -> tuple[int, int] | None:
    """Find row and column of the first infinite value."""
    infinite = rows.isinf().cpu().numpy() if isinstance(rows, torch.Tensor) else np.isinf(rows)
    found = np.argwhere(infinite)
    return None if not len(found) else (int(found[0, 0]), int(found[0, 1]))
