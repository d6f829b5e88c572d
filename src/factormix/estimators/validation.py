"""Check what a user gives an estimator: options before any data, then rows and their columns.

Each failure is one sentence with a remedy, raised before any long work.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
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
from factormix.data.features import (
    Features,
    describe_features,
    match_columns,
    take_known_columns,
)
from factormix.data.sources.base import Rows, Source
from factormix.data.sources.convert import as_rows, as_source, replace_weights
from factormix.data.units import Scaling, to_shareable_array
from factormix.defaults import (
    DEFAULT_ROWS_PER_COMPONENT,
    MAX_FACTORS,
    MOST_COMPONENTS,
    MOST_FACTORS,
    NOISE,
    NOISE_MODELS,
)
from factormix.errors import InputError, TrainingWarning
from factormix.training.distributed.mesh import check_mesh
from factormix.training.solvers import Solver, resolve
from factormix.training.solvers.base import is_number

Array = Any
"""A NumPy array, torch tensor, data frame or anything that NumPy turns into an array, (n, d)."""
Weigh = Callable[[Weights | None], Weights | None]
S = TypeVar("S", bound=Source)

LEAST_ROWS_PER_NUMBER = 4
"""Fewest rows of a component for each number it fits to a feature, the mean and l factors: with
fewer, held-out likelihoods of small tables fall below a Gaussian (``benchmarks/tables.py``)."""
MIN_SCALE_ROWS = 10
"""Fewest rows from which a stream may take its working units: a deviation of ten normal values has
an error of 1 / sqrt(2 * 9) = 24%."""


@dataclass(frozen=True)
class Options:
    """The options of a mixture, checked and in plain types."""

    n_components: int | None
    n_factors: int | None
    """l; where components choose their ranks, the maximum."""
    choose_ranks: bool
    """Whether each component keeps only the factors that its rows support."""
    solver: Solver[Any]
    max_precision: float | None
    batch_size: int | None
    max_epochs: int | None
    n_init: int
    random_state: Any
    device: torch.device | None
    dtype: torch.dtype
    scaling: Scaling
    noise: str
    candidates: int | str | None
    mesh: Any
    means_init: Tensor | None
    """(K, d), in units of the data."""

    @property
    def scales(self) -> int:
        """The number of scales in which each kind of component comes."""
        return int(getattr(self.solver, "scales", 1))

    def count_factors(self, n_features: int, rows_per_component: float = math.inf) -> int:
        """Return l, or the maximum where components choose their ranks.

        Components that begin with more factors than their rows can support learn their rows by
        heart, and fit other rows worse.
        """
        if not self.choose_ranks:
            return check_n_factors(self.n_factors, n_features)
        known = max(1.0, rows_per_component / LEAST_ROWS_PER_NUMBER - 1)
        return int(min(self.n_factors or MAX_FACTORS, n_features - 1, known))

    def device_for(self, X: Any) -> torch.device:
        """Return the device to train on: the chosen one, or else the device of a tensor."""
        if self.device is None and isinstance(X, Tensor):
            return check_device(X.device)
        return check_device(self.device)


def check_callbacks(callbacks: Any) -> None:
    """Refuse what is not a sequence of callables."""
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise InputError(f"callbacks must be a list or tuple of callables, not {callbacks!r}.")


def check_options(model: Any) -> Options:
    """Check the options of an ``MFA``, before any data is looked at."""
    names = [field.name for field in fields(Options) if field.name != "choose_ranks"]
    values = {name: getattr(model, name) for name in names}
    values["choose_ranks"], values["n_factors"] = _check_ranks(model.n_factors, model.max_factors)
    least = {"n_components": 1, "n_init": 1, "n_factors": 0, "batch_size": 1, "max_epochs": 1}
    for name, smallest in least.items():
        if values[name] is not None or name == "n_init":
            values[name] = check_count(values[name], name, smallest)
    if model.max_precision is not None:
        check_positive(model.max_precision, "max_precision")
    if model.scaling not in ("global", "feature", None):
        raise InputError(f"scaling must be 'global', 'feature' or None, not {model.scaling!r}.")
    check_callbacks(model.callbacks)
    check_mesh(model.mesh)
    values["solver"] = resolve(model.solver)
    _check_noise(model.noise, values["solver"])
    if values["choose_ranks"] and not getattr(values["solver"], "chooses_ranks", False):
        raise InputError(
            f"the solver {values['solver'].name!r} does not count the rows that support a factor:"
            " use the solver 'natural' or 'em' for n_factors='auto', or give n_factors a number."
        )
    values["device"] = None if model.device is None else check_device(model.device)
    values["dtype"] = check_dtype(model.dtype)
    values["candidates"] = _check_candidates(model.candidates)
    if model.means_init is not None:
        values["means_init"] = to_finite_tensor(model.means_init, "means_init").to(
            "cpu", torch.float64
        )
    options = Options(**values)
    if options.means_init is not None and options.scales > 1:
        raise InputError(
            f"means_init gives each component a mean, and scales={options.scales} of the solver"
            " shares one among several: leave out one of them."
        )
    return options


def _check_ranks(n_factors: Any, max_factors: Any) -> tuple[bool, Any]:
    """Return whether components choose their ranks, and the number of factors or its maximum."""
    if isinstance(n_factors, str) and n_factors != "auto":
        raise InputError(
            f"n_factors must be a whole number of at least 0, 'auto' or None, not {n_factors!r}."
        )
    if max_factors is None:
        return n_factors == "auto", None if n_factors == "auto" else n_factors
    check_count(max_factors, "max_factors", 1)
    if n_factors != "auto":
        raise InputError(
            f"max_factors={max_factors} limits ranks that components choose: use it with"
            " n_factors='auto', or leave it out."
        )
    return True, max_factors


def _check_noise(noise: Any, solver: Solver[Any]) -> None:
    """Check a noise model, and that a solver can train it."""
    if not isinstance(noise, str) or noise not in NOISE_MODELS:
        raise InputError(f"noise must be one of {', '.join(NOISE_MODELS)}, not {noise!r}.")
    if noise not in getattr(solver, "noise_models", (NOISE,)):
        raise InputError(
            f"the solver {solver.name!r} gives each component its own noise, not"
            f" noise={noise!r}: use the solver 'natural', 'em' or 'sgd'."
        )


def _check_candidates(value: Any) -> int | str | None:
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    if isinstance(value, str):
        raise InputError(f"candidates must be a whole number, 'auto' or None, not {value!r}.")
    return check_count(value, "candidates", 2)


def check_count(value: object, name: str, least: int) -> int:
    """Return a whole number that is at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    return int(value)


def check_positive(value: Any, name: str, *, or_none: bool = True) -> float:
    """Return a positive, finite number; ``or_none`` says that the caller accepts None, too."""
    if not is_number(value) or not 0 < value < math.inf:
        kind = "a positive number or None" if or_none else "a positive number"
        raise InputError(f"{name} must be {kind}, not {value!r}.")
    return float(value)


def check_dtype(value: object) -> torch.dtype:
    """Return the torch dtype of this name."""
    known = {"float32": torch.float32, "float64": torch.float64}
    name = str(value).removeprefix("torch.")
    if name not in known:
        raise InputError(f"dtype must be 'float32' or 'float64', not {value!r}.")
    return known[name]


def check_device(value: Any) -> torch.device:
    """Return the torch device of this name, if the machine has it; None is the CPU."""
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
    """Return the number given, or draw a seed from a RandomState or, for None, at random."""
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


def check_n_factors(n_factors: int | None, n_features: int) -> int:
    """Return the number of factors l: the one given, if it is below d, or up to eight."""
    if n_factors is None:
        return min(MOST_FACTORS, n_features - 1)
    if 0 < n_factors >= n_features:
        raise InputError(
            f"n_factors={n_factors} must be smaller than n_features={n_features}: lower n_factors."
        )
    return int(n_factors)


def check_mixture(model: Any) -> None:
    """Check that a model is a single fitted mixture, not an ensemble or something else."""
    if not hasattr(type(model), "mixture_"):
        raise InputError(
            f"a fitted MFA is needed here, not {type(model).__name__}: give one, such as one of the"
            " estimators_ of a classifier."
        )
    check_is_fitted(model)


def check_rows(
    estimator: Any,
    X: Array | Rows,
    sample_weight: Array | None = None,
    weigh: Weigh = normalize_weights,
) -> Rows:
    """Return rows (n, d) with weights (n,) and the columns of a fitted estimator, in its order.

    Their values are not looked at yet.
    """
    X = take_known_columns(X, fitted_features(estimator).names)
    rows = weigh_rows(as_rows(X, sample_weight), weigh)
    return _order_columns(estimator, X, rows)


def check_source(estimator: Any, X: Array | Source, sample_weight: Array | None) -> Source:
    """Return a source with the columns of a fitted estimator, and with its weights as they are.

    The values of rows are checked here, the values of a stream when it serves them.
    """
    X = take_known_columns(X, fitted_features(estimator).names)
    source = as_source(X, sample_weight)
    if isinstance(source, Rows):
        source = weigh_rows(source, check_absolute_weights)
    source = _order_columns(estimator, X, source)
    return ensure_finite_rows(source) if isinstance(source, Rows) else source


def weigh_rows(rows: Rows, weigh: Weigh) -> Rows:
    """Return the same rows, with the weights that ``weigh`` makes of theirs."""
    return replace_weights(rows, weigh(getattr(rows, "weights", None)))


def get_weights(rows: Rows) -> NDArray[np.float64]:
    """Return a copy of the weights of rows (n,); ones if there are none."""
    weights = getattr(rows, "weights", None)
    return np.ones(rows.n_rows) if weights is None else np.array(weights, dtype=np.float64)


def count_components(options: Options, n_rows: int | None) -> int:
    """Return K: the one given, or a number that suits the rows, or None for a stream.

    ``benchmarks/tables.py`` compares the default with a Gaussian and with scikit-learn's mixtures.
    """
    if options.n_components is not None:
        return options.n_components
    if options.means_init is not None:
        return len(options.means_init)
    K = MOST_COMPONENTS
    if n_rows is not None:
        K = min(K, math.ceil(n_rows / DEFAULT_ROWS_PER_COMPONENT))
    return K * options.scales


def warn_of_few_rows(options: Options, rows: Rows) -> None:
    """Warn if components will have too few rows on average to predict others."""
    if options.n_components is None or rows.n_rows < options.n_components:
        return
    if options.choose_ranks:
        l = 0
    else:
        l = MOST_FACTORS if options.n_factors is None else options.n_factors
        l = min(l, rows.n_features - 1)
    kinds = options.n_components // options.scales
    least = LEAST_ROWS_PER_NUMBER * (l + 1)
    if rows.n_rows < least * kinds:
        warnings.warn(
            f"{options.n_components} components with {l} factors for {rows.n_rows} rows are likely"
            f" to be a poor model of other rows: use n_components={max(1, rows.n_rows // least)},"
            " fewer factors, or select to find the best size.",
            TrainingWarning,
            stacklevel=4,
        )


def check_enough(rows: Rows, n_rows: int, n_components: int) -> None:
    """Check that there are enough rows; ``n_rows`` of them have a positive weight."""
    least = max(2, n_components)
    if n_rows < least:
        raise InputError(
            f"X has {_describe_count(rows, n_rows)}, fewer than the {least} rows that n_components="
            f"{n_components} needs: lower n_components or give more rows."
        )


def check_enough_for_scale(rows: Source, n_rows: int, options: Options) -> None:
    """Check that a stream begins with enough rows to estimate the scale of the data."""
    estimated = options.scaling is not None or options.max_precision is None
    if estimated and n_rows < MIN_SCALE_ROWS:
        raise InputError(
            f"X has {_describe_count(rows, n_rows)}, too few for the first call of partial_fit,"
            f" which sets the scale of the data: give it {MIN_SCALE_ROWS} rows or more, or both"
            " scaling=None and max_precision."
        )


def _describe_count(rows: Source, n_rows: int) -> str:
    if isinstance(rows, Rows) and getattr(rows, "weights", None) is not None:
        return f"n_samples={n_rows}" + (" of positive weight" if n_rows < rows.n_rows else "")
    return f"n_samples={n_rows}"


def fitted_features(estimator: Any) -> Features:
    """Return the columns that an estimator was fitted on."""
    names = getattr(estimator, "feature_names_in_", None)
    shape = estimator.image_shape_
    return Features(estimator.n_features_in_, None if names is None else tuple(names), shape)


def set_features_(estimator: Any, features: Features) -> None:
    """Set the attributes that describe the columns an estimator was fitted on."""
    estimator.n_features_in_ = features.count
    estimator.image_shape_ = features.image_shape
    if features.names is not None:
        estimator.feature_names_in_ = np.asarray(features.names, dtype=object)
    elif hasattr(estimator, "feature_names_in_"):
        del estimator.feature_names_in_


def _order_columns(estimator: Any, X: Array | Source, source: S) -> S:
    """Return a source with its columns in the order of the training."""
    expected, name = fitted_features(estimator), type(estimator).__name__
    ordered = match_columns(source, expected, name)
    named = describe_features(source).names is not None
    # As scikit-learn does; a tensor or a source of rows need not have names.
    if named != (expected.names is not None) and not isinstance(X, (Tensor, Source)):
        with_, without = ("has", "without") if named else ("does not have valid", "with")
        warnings.warn(
            f"X {with_} feature names, but {name} was fitted {without} feature names",
            stacklevel=4,
        )
    return ordered


def to_finite_tensor(values: Array, name: str) -> Tensor:
    """Return finite numbers as a tensor, on the device where they are."""
    if isinstance(values, Tensor):
        tensor = check_real_tensor(values, name).detach()
    else:
        tensor = torch.from_numpy(to_shareable_array(to_real_array(values, name)))
    if not tensor.isfinite().all():
        raise InputError(f"{name} holds NaN or infinite values: drop those rows.")
    return tensor


def join_results(blocks: Iterable[Sequence[Tensor]], n_rows: int) -> list[Tensor]:
    """Join results (B, ...) of blocks of rows, one or several for each block, to (n, ...)."""
    results, first = list[Tensor](), 0
    for parts in blocks:
        # Small parts kept until the end would fragment the memory.
        results = results or [part.new_empty(n_rows, *part.shape[1:]) for part in parts]
        last = first + len(parts[0])
        for result, part in zip(results, parts, strict=True):
            result[first:last] = part
        first = last
    return results


def like_input(result: Tensor, X: Array | Rows) -> Any:
    """Return a result in the kind of X: a tensor for a tensor, else an array of X's precision.

    Rows of whole numbers or of half precision get results in torch's default dtype, or float64.
    """
    if isinstance(X, Tensor):
        keep = X.dtype in (torch.float32, torch.float64)
        dtype = X.dtype if keep else torch.get_default_dtype()
        return result.to(X.device, dtype if result.is_floating_point() else None)
    array = result.cpu().numpy()
    single = getattr(X, "dtype", None) == np.float32
    return array.astype(np.float32 if single else np.float64) if array.dtype.kind == "f" else array


def output_kind(X: Array | Source) -> str:
    """Return the kind of fitted attributes: "torch", or the name of a NumPy dtype."""
    if isinstance(X, Tensor):
        return "torch"
    return "float32" if getattr(X, "dtype", None) == np.float32 else "float64"
