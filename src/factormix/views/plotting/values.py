"""Numbers to draw: any array as float64 NumPy, and the limits between which to draw it."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.errors import InputError

__all__ = ["Array", "Mask", "as_array", "finite_vector", "value_limits", "widened"]

Array: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]


def as_array(values: Any) -> Array:
    """Bring an array or tensor on any device to NumPy, in float64."""
    if isinstance(values, torch.Tensor):
        # Widened on the CPU, as not every device has float64.
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def finite_vector(values: Any, what: str) -> Array:
    """Check that values are a finite vector (n,) with n of at least one."""
    vector = as_array(values)
    if vector.ndim != 1 or vector.size == 0 or not np.isfinite(vector).all():
        raise InputError(f"{what} must be a vector of finite numbers, and not empty")
    return vector


def value_limits(values: Array, margin: float = 0.1) -> tuple[float, float]:
    """Take [0, 1] for what lies there within ``margin``, else the bulk of the values."""
    low, high = (float(q) for q in np.quantile(values, (0.002, 0.998)))
    if low >= -margin and 0.2 < high <= 1 + margin:
        return 0.0, 1.0
    return widened(low, high)


def widened(low: float, high: float) -> tuple[float, float]:
    """Give limits that differ, for values that are all the same."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InputError("the values to draw are not all finite: check the model or the scores")
    if high > low:
        return low, high
    slack = 0.5 * abs(low) or 0.5
    return low - slack, low + slack
