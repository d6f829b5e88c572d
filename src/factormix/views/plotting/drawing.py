"""The look that all figures share, whatever the user's own settings are.

Numbers to draw: any array as float64 NumPy, and the limits between which to draw it.

Pictures as files: equal pictures give equal bytes, and a file is written whole.

What a picture reads from a fitted mixture.
"""

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
from factormix.errors import InputError
from factormix.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure
if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "INK",
    "MARK",
    "QUIET",
    "Array",
    "Mask",
    "Model",
    "as_array",
    "figure_png",
    "finite_vector",
    "fitted",
    "in_use",
    "new_figure",
    "save_figure",
    "styled",
    "value_limits",
    "widened",
]

P = ParamSpec("P")
T = TypeVar("T")

COLOURS = ("#2f6db3", "#e07b39", "#3a9d6e", "#9659b0", "#c23b4b", "#7a7a7a")
MARK = "#f0562d"
INK = "#222222"
QUIET = "#555555"

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 7.0,
    "axes.labelsize": 9.0,
    "axes.facecolor": "white",
    "axes.edgecolor": "#8a8a8a",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.unicode_minus": True,
    "grid.color": "#e6e6e6",
    "text.color": INK,
    "text.usetex": False,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "svg.fonttype": "path",
    "svg.hashsalt": "factormix",
}


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Run ``draw`` in the shared style, and say so if matplotlib is missing."""

    @wraps(draw)
    def drawn_in_style(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                'pictures need matplotlib: run `pip install "factormix[plots]"`'
            ) from error
        with matplotlib.rc_context(_STYLE):
            drawn = draw(*args, **kwargs)
            if isinstance(drawn, Figure):
                # A second layout moves things by a hair: one, so that every save is equal.
                engine = drawn.get_layout_engine()
                if engine is not None:
                    engine.execute(drawn)
                drawn.set_layout_engine("none")
            return drawn

    return drawn_in_style


def new_figure(width: float, height: float) -> Figure:
    """Make a figure, sized in inches, that no pyplot registry knows."""
    from matplotlib.figure import Figure

    # Compressed, so that a colour bar is as high as the images of fixed aspect beside it.
    return Figure(figsize=(width, height), layout="compressed", facecolor="white")


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


def figure_png(fig: Figure, dpi: float = 150) -> bytes:
    """Render a figure as PNG; equal figures give equal bytes."""
    return _render(fig, "png", dpi)


def save_figure(fig: Figure, path: str | os.PathLike[str], dpi: float = 150) -> None:
    """Write a figure as PNG or SVG by the path's extension, whole or not at all."""
    kind = Path(path).suffix.lower().lstrip(".")
    if kind not in ("png", "svg"):
        raise InputError(f"cannot write a picture to {Path(path)}: name it .png or .svg")
    write_whole(path, _render(fig, kind, dpi))


@styled
def _render(fig: Figure, kind: str, dpi: float) -> bytes:
    """Render without dates or version numbers, so that equal figures give equal bytes."""
    buffer = io.BytesIO()
    unnamed = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    fig.savefig(buffer, format=kind, dpi=dpi, metadata=unnamed)
    return buffer.getvalue()


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
    used: Mask = inspection.in_use(fitted(model, "weights_"))
    return used
