"""Figures for reading a model: rows near its components, overlaps, and bins of samples.

The figure of reasons: where an image is unusual, or which columns of a row are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from factormix.errors import InputError
from factormix.views.plotting.components import chosen_components, name_rows
from factormix.views.plotting.drawing import (
    COLOURS,
    MARK,
    QUIET,
    Model,
    as_array,
    fitted,
    in_use,
    new_figure,
    styled,
    value_limits,
)
from factormix.views.plotting.tiles import Grid, Paint, check_image_shape, draw_bar, draw_tiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from factormix.estimators.explanation import Explanation

__all__ = ["plot_bins", "plot_nearest", "plot_overlaps", "plot_reasons"]


class Nearest(Protocol):
    """Name what a picture reads from ``nearest_rows``."""

    @property
    def rows(self) -> Any: ...


class Bins(Protocol):
    """Name what a picture reads from ``ndb``."""

    @property
    def proportions(self) -> Any: ...
    @property
    def sample_proportions(self) -> Any: ...
    @property
    def different(self) -> Any: ...


@styled
def plot_nearest(
    model: Model,
    X: Any,
    nearest: Nearest,
    components: Iterable[int] | None = None,
    image_shape: Sequence[int] | None = None,
) -> Figure:
    """Draw one row per component: its centroid, then the rows of X (n, d) that are nearest to it.

    ``nearest`` is what ``factormix.reading.nearest_rows(model, X)`` gives. ``components`` left out
    means the ten heaviest, in the order of their numbers.
    """
    means, used = fitted(model, "means_"), in_use(model)
    chosen = chosen_components(fitted(model, "weights_"), components)
    numbers = np.asarray(nearest.rows)[chosen]
    shape = check_image_shape(means.shape[1], image_shape)
    data = as_array(X)
    if data.ndim != 2 or data.shape[1] != means.shape[1] or numbers.max() >= len(data):
        raise InputError("X are not the rows that nearest was found in: give the same rows")
    pictures = np.concatenate([means[chosen][:, None], data[numbers]], axis=1)
    grid = Grid.fit(len(chosen), numbers.shape[1] + 1, shape, 7.0, apart=True)
    flat = pictures.reshape(-1, means.shape[1])
    paint = Paint("gray", *value_limits(means[used] if grid.of_images else flat))
    width, height = grid.size
    fig = new_figure(width + 1.0, height + 0.55)
    axes = fig.add_subplot()
    draw_tiles(axes, flat, grid, paint)
    axes.set_title("Centroid and nearest rows of each component", pad=8)
    name_rows(axes, grid, model, chosen)
    return fig


@styled
def plot_overlaps(overlaps: Any) -> Figure:
    """Draw overlaps, confusion or distances of components, (K, K) or (K, J), as a heat map.

    ``factormix.reading`` gives all three; numbers above one are taken as distances.
    """
    values = as_array(overlaps)
    if values.ndim != 2 or not values.size:
        raise InputError(f"overlaps must have the shape (K, J), not {values.shape}")
    side = float(np.clip(0.16 * max(values.shape), 2.6, 6.5))
    fig = new_figure(side + 1.3, side * values.shape[0] / max(values.shape) + 0.9)
    most = float(np.nanmax(values))
    far = most > 1 + 1e-6
    axes = fig.add_subplot(xlabel="component", ylabel="component")
    axes.set_title("Distance of components" if far else "Overlap of components")
    image = axes.imshow(values, cmap="viridis_r" if far else "viridis", vmin=0, vmax=max(1, most))
    axes.spines[:].set_visible(False)
    fig.colorbar(image, ax=axes)
    return fig


@styled
def plot_bins(binned: Bins) -> Figure:
    """Draw the shares of data and samples in each bin of ``ndb``, the fullest first.

    Bins in which the two differ significantly are marked.
    """
    data, drawn = (as_array(a) for a in (binned.proportions, binned.sample_proportions))
    different = np.asarray(binned.different)
    fig = new_figure(7.0, 3.0)
    axes = fig.add_subplot(xlabel="bin", ylabel="rows in the bin, %")
    places = np.arange(len(data))
    axes.bar(places, 100 * data, width=0.9, color=COLOURS[0], alpha=0.35, label="data")
    axes.plot(places, 100 * drawn, ".", color=QUIET, markersize=4, label="samples")
    axes.plot(
        places[different], 100 * drawn[different], "o", color=MARK, markersize=4, label="different"
    )
    axes.set(xlim=(-0.6, len(data) - 0.4), ylim=(0, None))
    axes.set_title(f"Samples against data: {different.sum()} of {len(data)} bins differ")
    axes.legend(loc="upper right")
    return fig


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
    shape = check_image_shape(explanation.values.shape[1], given)
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
