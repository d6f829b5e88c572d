"""What a picture reads from a fitted mixture."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from factormix.core import usage
from factormix.errors import InputError
from factormix.views.plotting.values import Array, Mask, as_array

__all__ = ["Model", "fitted", "in_use"]


class Model(Protocol):
    """Name what a picture reads from a fitted model; arrays are NumPy arrays or torch tensors."""

    @property
    def weights_(self) -> Any: ...
    @property
    def means_(self) -> Any: ...
    @property
    def precision_diag_(self) -> Any: ...
    @property
    def precision_factors_(self) -> Any: ...
    @property
    def loadings_(self) -> Any: ...
    @property
    def noise_variances_(self) -> Any: ...


def fitted(model: Model, name: str) -> Array:
    """Fetch a fitted attribute as a float64 NumPy array, all of it finite."""
    try:
        values = as_array(getattr(model, name))
    except AttributeError as error:
        raise InputError(f"the model has no {name}: fit it first, then plot it") from error
    if not np.isfinite(values).all():
        raise InputError(f"{name} of the model holds NaN or infinite values: fit it again")
    return values


def in_use(model: Model) -> Mask:
    """Tell which components are in use, (K,)."""
    used: Mask = usage.in_use(fitted(model, "weights_"))
    return used
