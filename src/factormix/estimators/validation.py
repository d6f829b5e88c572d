"""Checks of what a user gives an estimator: each failure is one sentence, before any long work."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data
from torch import Tensor

from factormix.data.sources import Rows, Weights, check_finite, rows
from factormix.data.units import shareable
from factormix.errors import InputError

__all__ = [
    "Array",
    "as_rows",
    "as_tensor",
    "as_weighted_rows",
    "check_callbacks",
    "check_count",
    "check_device",
    "check_dtype",
    "check_features",
    "check_positive",
    "check_rows",
    "check_seed",
    "check_weighted_rows",
    "check_weights",
    "like_input",
]

Array = Any
"""A NumPy array, a torch tensor, a pandas frame or anything that NumPy turns into an array, (n,
d).
"""


def check_rows(estimator: Any, X: Array | Rows, *, reset: bool) -> Rows:
    """Check rows (n, d) and return them as a source of batches.

    ``reset`` takes number and names of the features from X; otherwise X must agree with those
    seen in training.
    """
    source = as_rows(X)
    check_features(estimator, X, source.n_features, reset=reset)
    return source


def check_weighted_rows(
    estimator: Any, X: Array | Rows, sample_weight: Array | None
) -> tuple[Rows, Weights | None]:
    """Check rows (n, d) against those seen in training, and their weights (n,)."""
    source, weights = as_weighted_rows(X, sample_weight)
    check_features(estimator, X, source.n_features, reset=False)
    return source, weights


def as_rows(X: Array | Rows) -> Rows:
    """Return a table of finite numbers (n, d) as a source of batches, without copying it whole."""
    return as_weighted_rows(X, None)[0]


def as_weighted_rows(X: Array | Rows, sample_weight: Array | None) -> tuple[Rows, Weights | None]:
    """Return a table (n, d) as a source of batches, and weights for its rows (n,) or None."""
    if isinstance(X, Rows):
        source: Rows = X
    else:
        table = _real_tensor(X, "X") if isinstance(X, Tensor) else _real_array(X, "X")
        _check_shape(tuple(table.shape))
        source = rows(table)
    # Before the values, which may take long to read.
    weights = None if sample_weight is None else check_weights(sample_weight, source.n_rows)
    check_finite(source)
    return source, weights


def check_weights(sample_weight: Array, n_rows: int) -> Weights:
    """Return weights of rows as an array (n,): finite, none negative, some positive.

    One number counts for all rows.
    """
    name = "sample_weight"
    if isinstance(sample_weight, Tensor):
        sample_weight = _real_tensor(sample_weight, name).detach().cpu().double().numpy()
    given = _real_array(sample_weight, name)
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


def as_tensor(values: Array, name: str) -> Tensor:
    """Return finite numbers as a tensor, on the device where they are."""
    table = _real_tensor(values, name) if isinstance(values, Tensor) else _real_array(values, name)
    tensor = table.detach() if isinstance(table, Tensor) else torch.from_numpy(shareable(table))
    if not tensor.isfinite().all():
        raise InputError(f"{name} holds NaN or infinite values: drop those rows.")
    return tensor


def check_features(estimator: Any, X: Array | Rows, n_features: int, *, reset: bool) -> None:
    """Remember number and names of the features, or compare them with those seen in training."""
    if not isinstance(X, (Tensor, Rows)):
        # scikit-learn reads shape and column names, and words what is wrong with them.
        validate_data(estimator, X, reset=reset, skip_check_array=True)
    elif reset:
        estimator.n_features_in_ = n_features
        if hasattr(estimator, "feature_names_in_"):
            del estimator.feature_names_in_
    elif n_features != estimator.n_features_in_:
        raise InputError(
            f"X has {n_features} features, but {type(estimator).__name__} is expecting"
            f" {estimator.n_features_in_} features as input."
        )


def _real_tensor(values: Tensor, name: str) -> Tensor:
    if values.layout is not torch.strided:
        raise InputError(f"{name} is sparse, which is not supported: give a dense tensor.")
    if values.is_complex():
        raise InputError(f"Complex data not supported: give the .real or .imag of {name}.")
    return values


def _real_array(values: Array, name: str) -> NDArray[Any]:
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


def _numbers(objects: NDArray[Any], name: str) -> NDArray[Any]:
    try:
        return objects.astype(np.float64)
    except TypeError as error:
        # What is no number at all is a TypeError by scikit-learn's conventions.
        raise TypeError(f"{name} must hold numbers only: {error}.") from error
    except ValueError as error:
        raise InputError(
            f"{name} must hold numbers only ({error}): encode or drop the others."
        ) from error


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) != 2:
        hint = {0: "give a table", 1: "Reshape your data by X.reshape(1, -1) for one row"}.get(
            len(shape), "Reshape your data by X.reshape(len(X), -1) for images"
        )
        raise InputError(f"X must have the shape (n_samples, n_features), not {shape}: {hint}.")
    for length, what in zip(shape, ("sample", "feature"), strict=True):
        if length == 0:
            raise InputError(f"X has 0 {what}(s) (shape={shape}) while a minimum of 1 is required.")


def check_count(value: object, name: str, least: int) -> int:
    """Return a whole number that is at least ``least``, or say what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    return int(value)


def check_positive(value: Any, name: str) -> float:
    """Return a positive, finite number, or say what is wrong with it."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise InputError(f"{name} must be a positive number or None, not {value!r}.")
    return float(value)


def check_dtype(value: object) -> torch.dtype:
    """Return the torch dtype that a name stands for."""
    known = {"float32": torch.float32, "float64": torch.float64}
    name = str(value).removeprefix("torch.")
    if name not in known:
        raise InputError(f"dtype must be 'float32' or 'float64', not {value!r}.")
    return known[name]


def check_device(value: Any) -> torch.device:
    """Return the torch device that a name stands for, the CPU for None, if this machine has it."""
    try:
        probe = torch.empty(0, device="cpu" if value is None else value)
        probe.cpu()
    except (RuntimeError, AssertionError, ImportError, TypeError, ValueError) as error:
        raise InputError(
            f"device must be a torch device that this machine has, such as 'cpu', or None, not"
            f" {value!r}."
        ) from error
    return probe.device


def check_seed(value: Any) -> int:
    """Return a seed: the number given, or one drawn from a RandomState or, for None, at random."""
    try:
        random = check_random_state(value)
        if isinstance(value, numbers.Integral):
            return int(value)
        return int(random.randint(np.iinfo(np.int32).max))
    except ValueError as error:
        raise InputError(
            "random_state must be None, a whole number between 0 and 2**32 - 1 or a"
            f" numpy.random.RandomState, not {value!r}."
        ) from error


def check_callbacks(value: object) -> None:
    """Check that callbacks can be called one after the other."""
    if not isinstance(value, Sequence) or not all(callable(callback) for callback in value):
        raise InputError(f"callbacks must be a list or tuple of callables, not {value!r}.")


def like_input(result: Tensor, X: Array | Rows) -> Any:
    """Return a result the way X came: torch in, torch out; else a NumPy array of X's precision.

    Rows of whole numbers or of half precision get results in torch's default dtype, or float64.
    """
    if isinstance(X, Tensor):
        kept = X.dtype in (torch.float32, torch.float64)
        dtype = X.dtype if kept else torch.get_default_dtype()
        return result.to(X.device, dtype if result.is_floating_point() else None)
    array = result.cpu().numpy()
    single = getattr(X, "dtype", None) == np.float32
    return array.astype(np.float32 if single else np.float64) if array.dtype.kind == "f" else array
