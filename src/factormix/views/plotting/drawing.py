"""The style of all figures, the numbers they draw, and the files they are saved to."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.core import inspection
from factormix.errors import InputError, input_error, require_package
from factormix.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")
Array: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

COLOURS = ("#2f6db3", "#e07b39", "#3a9d6e", "#9659b0", "#c23b4b", "#7a7a7a")
MARK = "#f0562d"
INK = "#222222"
QUIET = "#555555"

_STYLE: Any = {
    "font.size": 9.0,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 7.0,
    "axes.edgecolor": "#8a8a8a",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e6e6e6",
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "svg.hashsalt": "factormix",
}


class Model(Protocol):
    """The attributes of a fitted model that figures read, as NumPy arrays or torch tensors."""

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


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Make a function draw in the shared style, whatever the user's settings are."""

    @wraps(draw)
    def draw_in_style(*args: P.args, **kwargs: P.kwargs) -> T:
        require_package("matplotlib", "plots")
        from matplotlib import style
        from matplotlib.figure import Figure

        with style.context(_STYLE, after_reset=True):
            figure = draw(*args, **kwargs)
            if isinstance(figure, Figure):
                # A second layout would move things slightly: with one, every save is equal.
                engine = figure.get_layout_engine()
                if engine is not None:
                    engine.execute(figure)
                figure.set_layout_engine("none")
            return figure

    return draw_in_style


def new_figure(width: float, height: float) -> Figure:
    """Make a figure, sized in inches, that is not registered with pyplot."""
    from matplotlib.figure import Figure

    # The compressed layout makes a colour bar as high as the images beside it.
    return Figure(figsize=(width, height), layout="compressed", facecolor="white")


def figure_png(fig: Figure, dpi: float = 150) -> bytes:
    """Render a figure as PNG; equal figures give equal bytes."""
    return _render(fig, "png", dpi)


def save_figure(fig: Figure, path: str | os.PathLike[str], dpi: float = 150) -> None:
    """Write a figure as PNG, SVG or PDF by the path's extension, whole or not at all."""
    kind = Path(path).suffix.lower().lstrip(".")
    if kind not in ("png", "svg", "pdf"):
        raise InputError(f"cannot write a picture to {Path(path)}: name it .png, .svg or .pdf")
    write_whole(path, _render(fig, kind, dpi))


@styled
def _render(fig: Figure, kind: str, dpi: float) -> bytes:
    """Render without dates or version numbers, so that equal figures give equal bytes."""
    buffer = io.BytesIO()
    names = {"png": ["Software"], "svg": ["Date", "Creator"]}
    unnamed = names.get(kind, ["CreationDate", "Creator", "Producer"])
    fig.savefig(buffer, format=kind, dpi=dpi, metadata=dict.fromkeys(unnamed))
    return buffer.getvalue()


def read_attribute(model: Model, name: str) -> Array:
    """Return a fitted attribute as a finite float64 array."""
    with input_error(f"the model has no {name}: fit it first, then plot it", AttributeError):
        values = to_array(getattr(model, name))
    if not np.isfinite(values).all():
        raise InputError(f"{name} of the model holds NaN or infinite values: fit it again")
    return values


def used_components(model: Model) -> Mask:
    """Return which components are in use, (K,)."""
    used: Mask = inspection.in_use(read_attribute(model, "weights_"))
    return used


def to_array(values: Any) -> Array:
    """Convert an array or tensor on any device to float64 NumPy."""
    if isinstance(values, torch.Tensor):
        # On the CPU first, because not every device has float64.
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def check_vector(values: Any, name: str) -> Array:
    """Check that values are a finite vector (n,) with n >= 1."""
    vector = to_array(values)
    if vector.ndim != 1 or vector.size == 0 or not np.isfinite(vector).all():
        raise InputError(f"{name} must be a vector of finite numbers, and not empty")
    return vector


def value_limits(values: Array, margin: float = 0.1) -> tuple[float, float]:
    """Return [0, 1] for values within ``margin`` of it, else the bulk of the values."""
    low, high = (float(q) for q in np.quantile(values, (0.002, 0.998)))
    if low >= -margin and 0.2 < high <= 1 + margin:
        return 0.0, 1.0
    return widen_limits(low, high)


def widen_limits(low: float, high: float) -> tuple[float, float]:
    """Return limits that differ, even if all values are equal."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InputError("the values to draw are not all finite: check the model or the scores")
    if high > low:
        return low, high
    slack = 0.5 * abs(low) or 0.5
    return low - slack, low + slack
