"""Checks of what a user gives an estimator: each failure is one sentence, before any long work.

The options of an estimator: which are allowed, and what follows from them.

A bar for estimators that train several mixtures.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.data.batches import Weights
from factormix.data.checks import (
    check_absolute_weights,
    check_real_tensor,
    ensure_finite_rows,
    normalize_weights,
    to_real_array,
)
from factormix.data.features import Features, describe_features, match_columns
from factormix.data.sources.base import Rows, Source
from factormix.data.sources.convert import as_rows, as_source, replace_weights
from factormix.data.units import to_shareable_array
from factormix.defaults import MOST_FACTORS
from factormix.errors import InputError
from factormix.training.distributed.mesh import check_mesh
from factormix.training.solvers import resolve

if TYPE_CHECKING:
    from factormix.estimators.mfa import MFA

__all__ = [
    "MIN_SCALE_ROWS",
    "Array",
    "as_tensor",
    "check_callbacks",
    "check_count",
    "check_device",
    "check_dtype",
    "check_enough",
    "check_enough_for_scale",
    "check_mixture",
    "check_options",
    "check_positive",
    "check_rows",
    "check_seed",
    "check_source",
    "factors_for",
    "kind_of",
    "like_input",
    "progress",
    "remember_features",
    "trained_features",
    "weighed",
]

Array = Any
"""A NumPy array, a torch tensor, a data frame or whatever NumPy turns into an array, (n, d)."""
Weigh = Callable[[Weights | None], Weights | None]
S = TypeVar("S", bound=Source)

MIN_SCALE_ROWS = 10
"""Fewest rows from which a stream may take its working units."""


def check_rows(
    estimator: Any,
    X: Array | Rows,
    sample_weight: Array | None = None,
    weigh: Weigh = normalize_weights,
) -> Rows:
    """Return rows (n, d) that fit a trained estimator, columns in its order, with weights (n,).

    Their values are not looked at yet.
    """
    rows = weighed(as_rows(X, sample_weight), weigh)
    return _fitting(estimator, X, rows)


def check_source(estimator: Any, X: Array | Source, sample_weight: Array | None) -> Source:
    """Return a source that fits a trained estimator, with weights as they are.

    The values of rows are checked; those of a stream are checked when they are served.
    """
    source = as_source(X, sample_weight)
    if isinstance(source, Rows):
        source = weighed(source, check_absolute_weights)
    source = _fitting(estimator, X, source)
    return ensure_finite_rows(source) if isinstance(source, Rows) else source


def weighed(rows: Rows, weigh: Weigh) -> Rows:
    """Return rows with their weights as a fit, a score or a stream takes them."""
    return replace_weights(rows, weigh(getattr(rows, "weights", None)))


def trained_features(estimator: Any) -> Features:
    """Return the columns that an estimator was trained on."""
    names = getattr(estimator, "feature_names_in_", None)
    shape = estimator.image_shape_
    return Features(estimator.n_features_in_, None if names is None else tuple(names), shape)


def remember_features(estimator: Any, features: Features) -> None:
    """Make the columns of a table those that an estimator is trained on."""
    estimator.n_features_in_ = features.count
    estimator.image_shape_ = features.image_shape
    if features.names is not None:
        estimator.feature_names_in_ = np.asarray(features.names, dtype=object)
    elif hasattr(estimator, "feature_names_in_"):
        del estimator.feature_names_in_


def _fitting(estimator: Any, X: Array | Source, source: S) -> S:
    """Return a source with its columns in the order of the training."""
    trained, name = trained_features(estimator), type(estimator).__name__
    ordered = match_columns(source, trained, name)
    named = describe_features(source).names is not None
    # As scikit-learn does; a tensor or a source of rows need not have names.
    if named != (trained.names is not None) and not isinstance(X, (Tensor, Source)):
        with_, without = ("has", "without") if named else ("does not have valid", "with")
        warnings.warn(
            f"X {with_} feature names, but {name} was fitted {without} feature names",
            stacklevel=4,
        )
    return ordered


def as_tensor(values: Array, name: str) -> Tensor:
    """Return finite numbers as a tensor, on the device where they are."""
    table = (
        check_real_tensor(values, name)
        if isinstance(values, Tensor)
        else to_real_array(values, name)
    )
    tensor = (
        table.detach() if isinstance(table, Tensor) else torch.from_numpy(to_shareable_array(table))
    )
    if not tensor.isfinite().all():
        raise InputError(f"{name} holds NaN or infinite values: drop those rows.")
    return tensor


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


def check_enough(rows: Rows, n_rows: int, n_components: int) -> None:
    """Check that there are rows for so many components; ``n_rows`` have a positive weight."""
    least = max(2, n_components)
    if n_rows < least:
        raise InputError(
            f"X has {_counted(rows, n_rows)}, fewer than the {least} rows that n_components="
            f"{n_components} needs: lower n_components or give more rows."
        )


def check_enough_for_scale(rows: Source, n_rows: int) -> None:
    """Check that the first rows of a stream can tell the scale of the data."""
    if n_rows < MIN_SCALE_ROWS:
        raise InputError(
            f"X has {_counted(rows, n_rows)}, too few for the first call of partial_fit, which"
            f" sets the scale of the data: give it {MIN_SCALE_ROWS} rows or more, or both"
            " scaling=None and max_precision."
        )


def check_mixture(model: Any) -> None:
    """Check that a model is one fitted mixture, and not an ensemble or something else."""
    if not hasattr(type(model), "mixture_"):
        raise InputError(
            f"a fitted MFA is needed here, not {type(model).__name__}: give one, such as one of the"
            " estimators_ of a classifier."
        )
    check_is_fitted(model)


def kind_of(X: Array | Source) -> str:
    """Tell how fitted quantities are returned: "torch", or the name of a NumPy dtype."""
    if isinstance(X, Tensor):
        return "torch"
    return "float32" if getattr(X, "dtype", None) == np.float32 else "float64"


def _counted(rows: Source, n_rows: int) -> str:
    """Say how many rows there are to learn from."""
    some = (
        isinstance(rows, Rows)
        and getattr(rows, "weights", None) is not None
        and n_rows < rows.n_rows
    )
    return f"n_samples={n_rows}" + (" of positive weight" if some else "")


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


@contextmanager
def progress(total: int, verbose: int) -> Iterator[Callable[[str], object]]:
    """Show a bar that the yielded function moves on, with a remark."""
    if not verbose:
        yield lambda remark: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="mixture") as bar:

        def tell(remark: str) -> None:
            bar.set_postfix_str(remark, refresh=False)
            bar.update()

        yield tell
