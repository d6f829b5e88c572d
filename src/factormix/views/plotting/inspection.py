"""Figures that inspect a model: nearest rows, overlaps, bins of samples, and reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from factormix.errors import InputError
from factormix.estimators import Explanation
from factormix.estimators.inspection import BinnedProportions, NearestRows
from factormix.views.plotting.components import choose_components, draw_component_rows
from factormix.views.plotting.drawing import (
    COLOURS,
    MARK,
    QUIET,
    Model,
    new_figure,
    read_attribute,
    styled,
    to_array,
    value_limits,
)
from factormix.views.plotting.tiles import (
    Grid,
    Paint,
    check_image_shape,
    draw_colour_bar,
    draw_tiles,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_IMAGES = 12
"""Images for which reasons are drawn, side by side."""
MAX_ROWS = 4
"""Rows of a table for which reasons are drawn, one below the other."""


@styled
def plot_nearest(
    model: Model,
    X: Any,
    nearest: NearestRows,
    components: Iterable[int] | None = None,
    image_shape: Sequence[int] | None = None,
) -> Figure:
    """Draw one line of tiles per component: its centroid, then the nearest rows of X (n, d).

    ``nearest`` is the result of ``factormix.inspection.nearest_rows(model, X)``. Without
    ``components``, the ten heaviest are drawn in the order of their numbers.
    """
    means = read_attribute(model, "means_")
    chosen = choose_components(model, components)
    numbers = np.asarray(nearest.rows)[chosen]
    data = to_array(X)
    if data.ndim != 2 or data.shape[1] != means.shape[1] or numbers.max() >= len(data):
        raise InputError("X are not the rows that nearest was found in: give the same rows")
    rows = np.concatenate([means[chosen][:, None], data[numbers]], axis=1)
    fig, axes, _ = draw_component_rows(model, chosen, rows, image_shape)
    axes.set_title("Centroid and nearest rows of each component", pad=8)
    return fig


@styled
def plot_overlaps(overlaps: Any) -> Figure:
    """Draw overlaps, confusion or distances of components, (K, K) or (K, J), as a heat map.

    ``factormix.inspection`` computes all three. Numbers above one are taken as distances.
    """
    values = to_array(overlaps)
    if values.ndim != 2 or not values.size:
        raise InputError(f"overlaps must have the shape (K, J), not {values.shape}")
    side = float(np.clip(0.16 * max(values.shape), 2.6, 6.5))
    fig = new_figure(side + 1.3, side * values.shape[0] / max(values.shape) + 0.9)
    most = float(np.nanmax(values))
    are_distances = most > 1 + 1e-6
    axes = fig.add_subplot(xlabel="component", ylabel="component")
    axes.set_title("Distance of components" if are_distances else "Overlap of components")
    cmap = "viridis_r" if are_distances else "viridis"
    image = axes.imshow(values, cmap=cmap, vmin=0, vmax=max(1, most))
    axes.spines[:].set_visible(False)
    fig.colorbar(image, ax=axes)
    return fig


@styled
def plot_bins(binned: BinnedProportions) -> Figure:
    """Draw the shares of data and samples in each bin of ``ndb``, the fullest first.

    Bins in which the two differ significantly are marked.
    """
    data, samples = (to_array(a) for a in (binned.proportions, binned.sample_proportions))
    different = np.asarray(binned.different)
    fig = new_figure(7.0, 3.0)
    axes = fig.add_subplot(xlabel="bin", ylabel="rows in the bin, %")
    x, y = np.arange(len(data)), 100 * samples
    axes.bar(x, 100 * data, width=0.9, color=COLOURS[0], alpha=0.35, label="data")
    axes.plot(x, y, ".", color=QUIET, markersize=4, label="samples")
    axes.plot(x[different], y[different], "o", color=MARK, markersize=4, label="different")
    axes.set(xlim=(-0.6, len(data) - 0.4), ylim=(0, None))
    axes.set_title(f"Samples against data: {different.sum()} of {len(data)} bins differ")
    axes.legend(loc="upper right")
    return fig


@styled
def plot_reasons(
    explanation: Explanation, image_shape: Sequence[int] | None = None, top: int = 8
) -> Figure:
    """Draw why rows are unusual, for the first rows of the result of ``explain``.

    An image is drawn beside the expected image, in which each pixel is predicted from all others,
    and beside the contribution of each pixel to the score. For other rows, bars show the ``top``
    columns with the lowest contributions, each with its value and the expected one.
    """
    if not len(explanation):
        raise InputError("there are no rows to draw reasons of: explain one row or more.")
    given = image_shape if image_shape is not None else explanation.image_shape
    shape = check_image_shape(explanation.values.shape[1], given)
    if len(shape) > 1:
        return _draw_images(explanation[:MAX_IMAGES], shape)
    shown = explanation[:MAX_ROWS]
    n_columns = max(1, min(top, shown.values.shape[1]))
    fig = new_figure(7.0, len(shown) * (0.28 * n_columns + 0.75))
    for row, axes in enumerate(fig.subplots(len(shown), 1, squeeze=False)[:, 0]):
        _draw_bars(axes, shown, row, n_columns)
    return fig


def _draw_images(explanation: Explanation, shape: tuple[int, ...]) -> Figure:
    """Draw images, expected images and contributions: beside each other for one, or in lines."""
    n = len(explanation)
    lines, columns = (1, 3) if n == 1 else (3, 1)
    grid, flat_grid = (Grid.fit(1, n, one, 7.0 / columns) for one in (shape, shape[:2]))
    grey = Paint("gray", *value_limits(explanation.values))
    # The contributions of the channels of a pixel add up.
    parts = explanation.contributions.reshape(n, *shape)
    parts = (parts.sum(axis=-1) if len(shape) == 3 else parts).reshape(n, -1)
    parts = parts - np.median(parts)
    largest = float(np.quantile(np.abs(parts), 0.999)) or 1.0
    signed = Paint("RdBu", -largest, largest, "contribution")
    width, height = grid.size
    fig = new_figure(columns * width + 1.6, lines * (height + 0.37))
    first, second, third = fig.subplots(lines, columns).flat
    draw_tiles(first, explanation.values, grid, grey)
    draw_tiles(second, explanation.expected, grid, grey)
    draw_tiles(third, parts, flat_grid, signed)
    first.set_title("Row" if n == 1 else "Rows")
    second.set_title("Expected" if n == 1 else "Expected value of each pixel, given the others")
    third.set_title("Contributions")
    draw_colour_bar(fig, [first, second], explanation.values, grid, grey)
    draw_colour_bar(fig, [third], parts, flat_grid, signed)
    return fig


def _draw_bars(axes: Axes, explanation: Explanation, row: int, n_columns: int) -> None:
    """Draw the lowest contributions of a row as bars."""
    order = explanation.ranking()[row][:n_columns]
    contributions = explanation.contributions[row, order]
    colours = np.where(contributions < 0, MARK, COLOURS[0])
    axes.barh(np.arange(n_columns), contributions, color=list(colours), height=0.7)
    labels = [
        f"{explanation.features[j]} = {explanation.values[row, j]:.4g}"
        f"  ({explanation.expected[row, j]:.4g} ± {explanation.deviation[row, j]:.2g})"
        for j in order
    ]
    axes.set_yticks(np.arange(n_columns), labels)
    axes.invert_yaxis()
    axes.axvline(0, color=QUIET, linewidth=0.8)
    # Long names leave little room beside them: the title must stay short.
    axes.set_title(f"Score {explanation.score[row]:.4g}")
    axes.set_xlabel("contribution of each value (expected value in brackets)")
