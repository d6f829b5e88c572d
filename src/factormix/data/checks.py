"""What values in memory must be: real numbers in a table.

Weights of rows: what they must be, and what they mean to a fit and to a stream.

Checks that all values of a source are finite, or NaN for what is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.data.batches import Batch, Values, Weights, drop_zero_weights, join_batches
from factormix.data.columns import Columns
from factormix.data.sources.base import Rows, Source
from factormix.data.units import as_tensor
from factormix.errors import InputError

__all__ = [
    "CHUNK_BYTES",
    "add_observed_rows",
    "check_absolute_weights",
    "check_finite",
    "check_real_tensor",
    "check_shape",
    "check_weights",
    "ensure_finite_blocks",
    "ensure_finite_rows",
    "find_infinite_rows",
    "find_observed_rows",
    "hash_weights",
    "normalize_weights",
    "to_real_array",
    "unobserved_column_error",
]


def check_real_tensor(values: Tensor, name: str) -> Tensor:
    """Return a tensor if it is dense and real."""
    if values.layout is not torch.strided:
        raise InputError(f"{name} is sparse, which is not supported: give a dense tensor.")
    if values.is_complex():
        raise InputError(f"Complex data not supported: give the .real or .imag of {name}.")
    return values


def to_real_array(values: Any, name: str) -> NDArray[Any]:
    """Return real numbers in whatever container as an array, without a copy where possible."""
    if hasattr(values, "toarray") and hasattr(values, "nnz"):
        raise InputError(f"{name} is sparse, which is not supported: give a dense array.")
    if isinstance(values, np.ma.MaskedArray):
        raise InputError(f"{name} is masked, which is not supported: fill or drop what is masked.")
    try:
        array = values if isinstance(values, np.ndarray) else np.asarray(values)
    except ValueError as error:
        raise InputError(f"{name} must be a table: give rows of the same length.") from error
    if array.dtype.kind == "c":
        raise InputError(f"Complex data not supported: give the .real or .imag of {name}.")
    if array.dtype.kind == "O":
        return _numbers(array, name)
    if array.dtype.kind not in "biuf":
        kind = "strings" if array.dtype.kind in "US" else f"values of the type {array.dtype}"
        raise InputError(f"{name} must hold numbers only, not {kind}: encode or drop them.")
    return array


_is_missing = np.frompyfunc(lambda v: v is None or type(v).__name__ == "NAType", 1, 1)
"""Tell of objects whether they stand for a missing value: None, or the one of pandas."""


def _numbers(objects: NDArray[Any], name: str) -> NDArray[Any]:
    try:
        return np.where(np.asarray(_is_missing(objects), bool), np.nan, objects).astype(np.float64)
    except TypeError as error:
        # What is no number at all is a TypeError by scikit-learn's conventions.
        raise TypeError(f"{name} must hold numbers only: {error}.") from error
    except ValueError as error:
        raise InputError(
            f"{name} must hold numbers only ({error}): encode or drop the others."
        ) from error


def check_shape(shape: tuple[int, ...]) -> None:
    """Check that an array or tensor is a table with rows and columns."""
    if len(shape) != 2:
        hint = {0: "give a table", 1: "Reshape your data by X.reshape(1, -1) for one row"}.get(
            len(shape), "Reshape your data by X.reshape(len(X), -1) for images"
        )
        raise InputError(f"X must have the shape (n_samples, n_features), not {shape}: {hint}.")
    for length, what in zip(shape, ("sample", "feature"), strict=True):
        if length == 0:
            raise InputError(f"X has 0 {what}(s) (shape={shape}) while a minimum of 1 is required.")


def find_infinite_rows(rows: NDArray[Any] | Tensor) -> NDArray[np.intp]:
    """Find the numbers of the rows (n, d) that have an infinite value."""
    if isinstance(rows, Tensor):
        return np.flatnonzero(rows.isinf().any(dim=1).cpu().numpy())
    return np.flatnonzero(np.isinf(rows).any(axis=1))


LEAST, MOST = 1e-30, 1e30
"""Weights between which sums over a batch hold in float32; what is smaller counts as zero."""


def check_weights(sample_weight: Any, n_rows: int) -> Weights:
    """Return weights of rows as an array (n,): finite, none negative, some positive.

    One number counts for all rows.
    """
    name = "sample_weight"
    if isinstance(sample_weight, Tensor):
        sample_weight = check_real_tensor(sample_weight, name).detach().cpu().double().numpy()
    given = to_real_array(sample_weight, name)
    if given.shape not in ((), (n_rows,)):
        raise InputError(
            f"{name} must be one number or have the shape ({n_rows},), a weight for each row of X,"
            f" not {given.shape}."
        )
    weights = np.broadcast_to(np.asarray(given, dtype=np.float64), (n_rows,))
    wrong = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
    if len(wrong):
        raise InputError(
            f"{name} has {weights[wrong[0]]} in row {wrong[0]} (counting from 0): give finite"
            " weights that are not negative; zero leaves a row out."
        )
    if not weights.any():
        raise InputError(f"every {name} is zero: give at least one row a positive weight.")
    return weights


def normalize_weights(weights: Weights | None) -> Weights | None:
    """Scale weights (n,) so that those above zero have the mean one; equal weights become None."""
    if weights is None or weights.min() == weights.max():
        return None
    # By the largest first, because a sum of large weights may overflow.
    relative: Weights = weights / weights.max()
    relative[relative < LEAST] = 0
    relative /= relative[relative > 0].mean()
    return relative


def check_absolute_weights(weights: Weights | None) -> Weights | None:
    """Return weights (n,) as they are, where a step can be taken with them."""
    if weights is None:
        return None
    if not LEAST <= weights.max() <= MOST:
        raise InputError(
            f"the largest sample_weight is {weights.max()}, and partial_fit takes weights as they"
            f" are, which must lie between {LEAST} and {MOST}: multiply all of them by a constant."
        )
    return np.where(weights < LEAST, 0, weights)


def hash_weights(weights: Weights) -> str:
    """Compute a hash that tells weights (n,) from others."""
    return hashlib.sha256(np.ascontiguousarray(weights).data).hexdigest()


CHUNK_BYTES = 4 << 20
"""What is read at once where the order does not matter."""
ADDED = 16
"""Rows of a block that are added to a sample for each column of which it has no value."""


def ensure_finite_rows(source: Rows, name: str = "X") -> Rows:
    """Return rows without infinities, reading them once if nobody has checked them yet."""
    if getattr(source, "checked", False):
        return source
    complete = check_finite(source, name)
    mark = getattr(source, "mark_finite", None)
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


def add_observed_rows(rows: Rows, sample: Batch, name: str = "X") -> Batch:
    """Return a sample of rows in which every column has a value, or say which one never has.

    Where the sample lacks values of a column, rows of positive weight that have them are added.
    """
    lacking = np.flatnonzero(~Columns(sample).observed.numpy())
    size = max(1, CHUNK_BYTES // (8 * rows.n_features))
    for batch in drop_zero_weights(rows.blocks(size)) if len(lacking) else ():
        have = ~np.isnan(np.asarray(as_tensor(batch.rows)[:, lacking].cpu()))
        chosen = np.unique(np.concatenate([np.flatnonzero(has)[:ADDED] for has in have.T]))
        if len(chosen):
            sample = join_batches([sample, batch.take(chosen)])
            lacking = lacking[~have.any(axis=0)]
        if not len(lacking):
            break
    if len(lacking):
        raise unobserved_column_error(rows, int(lacking[0]), name)
    return sample


def unobserved_column_error(source: Source, column: int, name: str = "X") -> InputError:
    """Say that a column has no value."""
    names = getattr(source, "feature_names", None)
    which = f"{column} (counting from 0)" if names is None else repr(names[column])
    return InputError(
        f"{name} has no value in column {which}, only missing ones (NaN): leave the column out, or"
        " give rows in which it is observed."
    )


def find_observed_rows(rows: Rows) -> NDArray[np.bool_] | None:
    """Tell of which rows anything is observed, (n,); None where nothing is missing at all."""
    if getattr(rows, "complete", False):
        return None
    size = max(1, CHUNK_BYTES // (8 * rows.n_features))
    blocks = (as_tensor(block.rows) for block in rows.blocks(size))
    seen = np.concatenate([np.asarray((~x.isnan()).any(dim=1).cpu()) for x in blocks])
    return None if seen.all() else seen


def ensure_finite_blocks(source: Source, size: int, name: str = "X") -> Iterator[Batch]:
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
