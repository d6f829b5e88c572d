"""The options of an estimator: which are allowed, and what follows from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from factormix.defaults import MOST_FACTORS
from factormix.errors import InputError
from factormix.estimators.validation import (
    check_callbacks,
    check_count,
    check_device,
    check_dtype,
    check_positive,
)
from factormix.training.meshes import check_mesh
from factormix.training.solvers import resolve

if TYPE_CHECKING:
    from factormix.estimators.mfa import MFA

__all__ = ["check_options", "factors_for"]


def check_options(model: MFA) -> None:
    """Check the options of a model, before any data is looked at."""
    check_count(model.n_components, "n_components", 1)
    check_count(model.n_init, "n_init", 1)
    for name, least in (("n_factors", 0), ("batch_size", 1), ("max_epochs", 1)):
        if getattr(model, name) is not None:
            check_count(getattr(model, name), name, least)
    if model.max_precision is not None:
        check_positive(model.max_precision, "max_precision")
    if model.scaling not in ("global", "feature", None):
        raise InputError(f"scaling must be 'global', 'feature' or None, not {model.scaling!r}.")
    if model.candidates is not None and model.candidates != "auto":
        if isinstance(model.candidates, str):
            raise InputError(
                f"candidates must be a whole number, 'auto' or None, not {model.candidates!r}."
            )
        check_count(model.candidates, "candidates", 2)
    check_dtype(model.dtype)
    check_device(model.device)
    check_callbacks(model.callbacks)
    check_mesh(model.mesh)
    resolve(model.solver)


def factors_for(n_factors: int | None, n_features: int) -> int:
    """Return the number of factors l: the one given, if it is below d, or up to four."""
    if n_factors is None:
        return min(MOST_FACTORS, n_features - 1)
    if 0 < n_factors >= n_features:
        raise InputError(
            f"n_factors={n_factors} must be smaller than n_features={n_features}: lower n_factors."
        )
    return int(n_factors)
