"""Checks of input: tables of real and finite numbers, weights of rows, columns with values."""

from __future__ import annotations

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
from factormix.errors import InputError, input_error

CHUNK_BYTES = 4 << 20
"""Bytes to read at once where the order of rows does not matter: chosen, not measured."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-30, 1e30
"""Weights between which sums over a batch hold in float32; smaller ones count as zero."""
ADDED_ROWS = 16
"""Rows of a block to add to a sample for each column without a value in it: a
deviation of 16 normal values has an error of 1 / sqrt(2 * 15) = 18%."""


def check_real_tensor(values: Tensor, name: str) -> Tensor:
    """Return a tensor if it is dense and real."""
    if values.layout is not torch.strided:
        raise InputError(f"{name} is sparse, which is not supported: give a dense tensor.")
    if values.is_complex():
        raise InputError(f"Complex data not supported: give the .real or .imag of {name}.")
    return values


def to_real_array(values: Any, name: str) -> NDArray[Any]:
    """Return real numbers in any container as an array, without a copy where possible."""
    if hasattr(values, "toarray") and hasattr(values, "nnz"):
        raise InputError(f"{name} is sparse, which is not supported: give a dense array.")
    if isinstance(values, np.ma.MaskedArray):
        raise InputError(f"{name} is masked, which is not supported: fill or drop masked values.")
    with input_error(f"{name} must be a table: give rows of the same length.", ValueError):
        array = values if isinstance(values, np.ndarray) else np.asarray(values)
    if array.dtype.kind == "c":
        raise InputError(f"Complex data not supported: give the .real or .imag of {name}.")
    if array.dtype.kind == "O":
        return _convert_objects(array, name)
    if array.dtype.kind not in "biuf":
        kind = "strings" if array.dtype.kind in "US" else f"values of the type {array.dtype}"
        raise InputError(f"{name} must hold numbers only, not {kind}: encode or drop them.")
    return array


_is_missing = np.frompyfunc(lambda v: v is None or type(v).__name__ == "NAType", 1, 1)
"""Return whether each object stands for a missing value: None, or NA of pandas."""


def _convert_objects(objects: NDArray[Any], name: str) -> NDArray[Any]:
    try:
        return np.where(np.asarray(_is_missing(objects), bool), np.nan, objects).astype(np.float64)
    except TypeError as error:
        # By scikit-learn's conventions, an object that is no number raises TypeError.
        raise TypeError(f"{name} must hold numbers only: {error}.") from error
    except ValueError as error:
        raise InputError(
            f"{name} must hold numbers only ({error}): encode or drop the others."
        ) from error


def check_shape(shape: tuple[int, ...]) -> None:
    """Check that an array or tensor is a table with rows and columns."""
    if len(shape) != 2:
        one = (
            "Reshape your data by X.reshape(-1, 1) for one column, or X.reshape(1, -1) for one row"
        )
        hint = {0: "give a table", 1: one}.get(
            len(shape), "Reshape your data by X.reshape(len(X), -1) for images"
        )
        raise InputError(f"X must have the shape (n_samples, n_features), not {shape}: {hint}.")
    for length, what in zip(shape, ("sample", "feature"), strict=True):
        if length == 0:
            raise InputError(f"X has 0 {what}(s) (shape={shape}) while a minimum of 1 is required.")


def check_weights(sample_weight: Any, n_rows: int) -> Weights:
    """Return weights of rows as an array (n,): finite, none negative, some positive.

    A single number is the weight of all rows.
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
    """Scale weights (n,) so that the positive ones have mean 1; equal weights become None."""
    if weights is None or weights.min() == weights.max():
        return None
    # Divided by the largest first, because a sum of large weights may overflow.
    relative: Weights = weights / weights.max()
    relative[relative < LEAST_WEIGHT] = 0
    relative /= relative[relative > 0].mean()
    return relative


def check_absolute_weights(weights: Weights | None) -> Weights | None:
    """Return weights (n,) unscaled, if a step can be taken with them."""
    if weights is None:
        return None
    if not LEAST_WEIGHT <= weights.max() <= MOST_WEIGHT:
        raise InputError(
            f"the largest sample_weight is {weights.max()}, and partial_fit takes weights as they"
            f" are, which must lie between {LEAST_WEIGHT} and {MOST_WEIGHT}: multiply all of them"
            " by a constant."
        )
    return np.where(weights < LEAST_WEIGHT, 0, weights)


def ensure_finite_rows(rows: Rows, name: str = "X") -> Rows:
    """Return rows without infinities, reading them once unless they have been checked."""
    if getattr(rows, "checked", False):
        return rows
    complete = check_finite(rows, name)
    mark = getattr(rows, "mark_finite", None)
    return rows if mark is None else mark(complete=complete)


def ensure_finite_blocks(source: Source, size: int, name: str = "X") -> Iterator[Batch]:
    """Yield the blocks of a source, checking each on the way unless they have been checked."""
    if getattr(source, "checked", False):
        return source.blocks(size)
    return (batch for batch, _ in _check_batches(source.blocks(size), name))


def check_finite(rows: Rows, name: str = "X") -> bool:
    """Raise an error that names the first infinity, reading the rows once, in blocks.

    Return whether no value is missing (NaN).
    """
    dtype, complete = rows.dtype, True
    if dtype.is_floating_point if isinstance(dtype, torch.dtype) else dtype.kind == "f":
        for _, finite in _check_batches(rows.blocks(count_chunk_rows(rows)), name):
            complete &= finite
    return complete


def _check_batches(batches: Iterator[Batch], name: str) -> Iterator[tuple[Batch, bool]]:
    """Yield batches, checked for infinities, and whether each is complete."""
    first = 0
    for batch in batches:
        finite = is_finite(batch.rows)
        if not finite and len(infinite := find_infinite(batch.rows)):
            row, column = infinite[0]
            raise InputError(
                f"{name} has an infinite value in row {first + row}, column {column} (counting from"
                " 0); remove the row, or fill in the value, or NaN if it is missing."
            )
        yield batch, finite
        first += len(batch)


def is_finite(rows: Values) -> bool:
    """Return whether no value is infinite or NaN."""
    if isinstance(rows, Tensor):
        return not rows.is_floating_point() or bool(rows.isfinite().all())
    if rows.dtype.kind != "f":
        return True
    # A finite sum has finite terms only, and costs less than a look at each of them. The sum itself
    # may overflow, so any other result needs a second look.
    with np.errstate(over="ignore", invalid="ignore"):
        total = rows.sum(dtype=np.float64 if rows.dtype.itemsize < 4 else None)
    return bool(np.isfinite(total)) or bool(np.isfinite(rows).all())


def find_infinite(rows: Values) -> NDArray[np.intp]:
    """Find the infinite values of rows (n, d): their rows and columns, (m, 2), in order."""
    infinite = rows.isinf().cpu().numpy() if isinstance(rows, Tensor) else np.isinf(rows)
    return np.argwhere(infinite)


def count_chunk_rows(source: Source) -> int:
    """Return the number of rows that ``CHUNK_BYTES`` hold in float64."""
    return max(1, CHUNK_BYTES // (8 * source.n_features))


def add_observed_rows(rows: Rows, sample: Batch) -> Batch:
    """Return a sample in which every column has a value, or name a column without any.

    Where the sample has no value of a column, rows of positive weight that have one are added.
    """
    lacking = np.flatnonzero(~Columns(sample).observed.numpy())
    for batch in drop_zero_weights(rows.blocks(count_chunk_rows(rows))) if len(lacking) else ():
        observed = (~as_tensor(batch.rows)[:, lacking].isnan()).cpu().numpy()
        firsts = [np.flatnonzero(column)[:ADDED_ROWS] for column in observed.T]
        chosen = np.unique(np.concatenate(firsts))
        if len(chosen):
            sample = join_batches([sample, batch.take(chosen)])
            lacking = lacking[~observed.any(axis=0)]
        if not len(lacking):
            break
    if len(lacking):
        raise unobserved_column_error(rows, int(lacking[0]))
    return sample


def unobserved_column_error(source: Source, column: int) -> InputError:
    """Build the error about a column without any value."""
    names = getattr(source, "feature_names", None)
    which = f"{column} (counting from 0)" if names is None else repr(names[column])
    return InputError(
        f"X has no value in column {which}, only missing ones (NaN): leave the column out, or"
        " give rows in which it is observed."
    )


def find_observed_rows(rows: Rows) -> NDArray[np.bool_] | None:
    """Find the rows that have any value, (n,); None where nothing is missing at all."""
    if getattr(rows, "complete", False):
        return None
    blocks = (as_tensor(block.rows) for block in rows.blocks(count_chunk_rows(rows)))
    seen = np.concatenate([np.asarray((~x.isnan()).any(dim=1).cpu()) for x in blocks])
    return None if seen.all() else seen
