"""What values in memory must be: real numbers in a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.errors import InputError

__all__ = ["check_shape", "infinite_rows", "real_array", "real_tensor"]


def real_tensor(values: Tensor, name: str) -> Tensor:
    """Return a tensor if it is dense and real."""
    if values.layout is not torch.strided:
        raise InputError(f"{name} is sparse, which is not supported: give a dense tensor.")
    if values.is_complex():
        raise InputError(f"Complex data not supported: give the .real or .imag of {name}.")
    return values


def real_array(values: Any, name: str) -> NDArray[Any]:
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


def infinite_rows(rows: NDArray[Any] | Tensor) -> NDArray[np.intp]:
    """Find the numbers of the rows (n, d) that have an infinite value."""
    if isinstance(rows, Tensor):
        return np.flatnonzero(rows.isinf().any(dim=1).cpu().numpy())
    return np.flatnonzero(np.isinf(rows).any(axis=1))
