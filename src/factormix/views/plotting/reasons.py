"""The figure of reasons: where an image is unusual, or which columns of a row are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from factormix.errors import InputError
from factormix.views.plotting.style import COLOURS, MARK, QUIET, new_figure, styled
from factormix.views.plotting.tiles import Grid, Paint, checked_shape, draw_bar, draw_tiles
from factormix.views.plotting.values import value_limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from factormix.estimators.explanation import Explanation

__all__ = ["plot_reasons"]

MOST_IMAGES = 12
MOST_ROWS = 4


@styled
def plot_reasons(
    explanation: Explanation, image_shape: Sequence[int] | None = None, top: int = 8
) -> Figure:
    """Draw why rows are unusual, for the first rows of what ``explain`` returned.

    Of an image: the image, what each pixel is expected to be from all others, and what each pixel
    contributes to the score. Of another row: the ``top`` columns that contribute least to it being
    usual, each with its value and what was expected.
    """
    if not len(explanation):
        raise InputError("there are no rows to draw reasons of: explain one row or more.")
    given = image_shape if image_shape is not None else explanation.image_shape
    shape = checked_shape(explanation.values.shape[1], given)
    if len(shape) == 1:
        return _draw_columns(explanation[:MOST_ROWS], top)
    return _draw_images(explanation[:MOST_IMAGES], shape)


def _draw_images(told: Explanation, shape: tuple[int, ...]) -> Figure:
    """Draw images, expected images and contributions below each other."""
    n = len(told)
    grid = Grid.fit(1, n, shape, 7.0)
    grey = Paint("gray", *value_limits(told.values))
    # A colour for a pixel: contributions of the channels of one add up.
    parts = told.contributions.reshape(n, *shape)
    split = (parts.sum(axis=-1) if len(shape) == 3 else parts).reshape(n, -1)
    split = split - np.median(split)
    largest = float(np.quantile(np.abs(split), 0.999)) or 1.0
    signed = Paint("RdBu", -largest, largest, "contribution")
    width, height = grid.size
    fig = new_figure(width + 1.6, 3 * height + 1.1)
    places = fig.subplots(3, 1, squeeze=False)[:, 0]
    flat = Grid.fit(1, n, shape[:2], 7.0)
    draw_tiles(places[0], told.values, grid, grey)
    draw_tiles(places[1], told.expected, grid, grey)
    draw_tiles(places[2], split, flat, signed)
    titles = ("Rows", "What each pixel is expected to be from the others", "Contributions")
    for axes, title in zip(places, titles, strict=True):
        axes.set_title(title)
    draw_bar(fig, list(places[:2]), told.values, grid, grey)
    draw_bar(fig, [places[2]], split, flat, signed)
    return fig


def _draw_columns(told: Explanation, top: int) -> Figure:
    """Draw the contributions of the columns of a few rows as bars."""
    n, shown = len(told), max(1, min(top, told.values.shape[1]))
    fig = new_figure(7.0, n * (0.28 * shown + 0.75))
    for row, axes in enumerate(fig.subplots(n, 1, squeeze=False)[:, 0]):
        _draw_row(axes, told, row, shown)
    return fig


def _draw_row(axes: Axes, told: Explanation, row: int, shown: int) -> None:
    order = told.ranking()[row][:shown]
    values = told.contributions[row, order]
    colours = np.where(values < 0, MARK, COLOURS[0])
    axes.barh(np.arange(shown), values, color=list(colours), height=0.7)
    labels = [
        f"{told.features[j]} = {told.values[row, j]:.4g}"
        f"  ({told.expected[row, j]:.4g} ± {told.deviation[row, j]:.2g})"
        for j in order
    ]
    axes.set_yticks(np.arange(shown), labels)
    axes.invert_yaxis()
    axes.axvline(0, color=QUIET, linewidth=0.8)
    # Long names leave little room beside them: the title must stay short.
    axes.set_title(f"Score {told.score[row]:.4g}")
    axes.set_xlabel("contribution of each value (what was expected)")
