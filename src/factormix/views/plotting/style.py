"""The look that all figures share, whatever the user's own settings are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "INK", "MARK", "QUIET", "new_figure", "styled"]

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
