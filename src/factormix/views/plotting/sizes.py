"""The figure of a choice of sizes: a heat map over components and factors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from factormix.errors import InputError
from factormix.views.plotting.style import INK, MARK, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_selection"]

NAMES = {
    "held_out": "held-out log-likelihood",
    "bic": "BIC",
    "aic": "AIC",
    "icl": "ICL",
}
QUANTILE = 0.25
"""Colours tell apart what is better than this share of the sizes; the rest is as dark as can be."""


class Sizes(Protocol):
    """Name what the picture reads from a selection."""

    @property
    def criterion(self) -> str: ...
    @property
    def sizes(self) -> Any: ...
    @property
    def best(self) -> Any: ...


@styled
def plot_selection(selection: Sizes) -> Figure:
    """Draw how far each size lies behind the best, by number of components and of factors.

    The best size is framed and has the value of the criterion; sizes that were stopped on their way
    are in brackets, and those that were not tried are left white.
    """
    tried = [one for one in selection.sizes if math.isfinite(one.difference)]
    if not tried:
        raise InputError("the selection has no size to draw: select among some first")
    components = sorted({one.n_components for one in tried})
    factors = sorted({one.n_factors for one in tried})
    behind = np.full((len(factors), len(components)), np.nan)
    for one in tried:
        place = factors.index(one.n_factors), components.index(one.n_components)
        behind[place] = one.difference
    fig = new_figure(1.9 + 0.85 * len(components), 1.5 + 0.55 * len(factors))
    axes = fig.add_subplot(xlabel="components", ylabel="factors")
    low = float(np.nanquantile(behind, QUANTILE))
    low = low if low < 0 else -1.0
    image = axes.imshow(behind, cmap="viridis", vmin=low, vmax=0, aspect="auto", origin="lower")
    for one in tried:
        row, column = factors.index(one.n_factors), components.index(one.n_components)
        _label(axes, one, selection.best, row, column, dark=one.difference < 0.45 * low)
    axes.set_xticks(range(len(components)), [f"{K:,}" for K in components])
    axes.set_yticks(range(len(factors)), [str(l) for l in factors])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    name = NAMES.get(selection.criterion, selection.criterion)
    axes.set_title(f"Sizes by {name}")
    shown = "min" if float(np.nanmin(behind)) < low else "neither"
    fig.colorbar(image, ax=axes, extend=shown, label="difference to the best")
    return fig


def _label(axes: Axes, one: Any, best: Any, row: int, column: int, *, dark: bool) -> None:
    """Write a size's difference into its cell, and frame the best."""
    is_best = one is best
    text = f"{one.value:.5g}" if is_best else f"{one.difference:.3g}"
    text = text.replace("-", "−")
    text = f"({text})" if one.status == "stopped" else text
    weight = "bold" if is_best else "normal"
    colour = "white" if dark else INK
    axes.text(column, row, text, ha="center", va="center", size=8, color=colour, weight=weight)
    if is_best:
        from matplotlib.patches import Rectangle

        corner = (column - 0.5, row - 0.5)
        frame = Rectangle(corner, 1, 1, fill=False, edgecolor=MARK, linewidth=2.4, clip_on=False)
        axes.add_patch(frame)
