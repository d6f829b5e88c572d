"""Figures of the components: centroids, precisions, loadings, weights and samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from factormix.core.annealing import grid_shape
from factormix.errors import InputError
from factormix.views.plotting.drawing import (
    COLOURS,
    INK,
    MARK,
    QUIET,
    Array,
    Model,
    new_figure,
    read_attribute,
    styled,
    used_components,
    value_limits,
    widen_limits,
)
from factormix.views.plotting.tiles import (
    Grid,
    Paint,
    check_image_shape,
    cross_out,
    draw_colour_bar,
    draw_tiles,
    number_tiles,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LoadingKind = Literal["precision_factors", "loadings"]


@styled
def plot_means(model: Model, image_shape: Sequence[int] | None = None) -> Figure:
    """Draw the centroids (K, d) as one grid of images or profiles."""
    means = read_attribute(model, "means_")
    paint = Paint("gray", *value_limits(means[used_components(model)]))
    return _component_figure(model, {"Centroids": means}, image_shape, paint)


@styled
def plot_precisions(
    model: Model,
    image_shape: Sequence[int] | None = None,
    vmin: float | None = None,
    vmax: float | None = None,
) -> Figure:
    """Draw the diagonal precisions (K, d) as one grid, coloured from ``vmin`` to ``vmax``."""
    precisions = read_attribute(model, "precision_diag_")
    shape = check_image_shape(precisions.shape[1], image_shape)
    title = "Diagonal precisions"
    if len(shape) == 3:
        # Three precisions of a pixel are not a colour: their mean has one scale.
        precisions = precisions.reshape(len(precisions), -1, shape[2]).mean(axis=2)
        shape, title = shape[:2], f"{title} (mean of the channels)"
    seen = precisions[used_components(model)]
    low = float(seen.min()) if vmin is None else vmin
    high = float(seen.max()) if vmax is None else vmax
    paint = Paint("viridis", *widen_limits(low, high), "precision")
    return _component_figure(model, {title: precisions}, shape, paint)


@styled
def plot_loadings(
    model: Model,
    column: int | None = None,
    image_shape: Sequence[int] | None = None,
    kind: LoadingKind = "precision_factors",
) -> Figure:
    """Draw the low-rank part (K, d, l): a column, counted from 0, or all of them side by side."""
    names = {"precision_factors": "Precision factors", "loadings": "Loadings"}
    if kind not in names:
        raise InputError(f'kind is {kind!r}: choose "precision_factors" or "loadings"')
    factors = read_attribute(model, f"{kind}_")
    n, heading = factors.shape[2], None
    if n == 0:
        raise InputError("the model has no loading columns (n_factors=0): there is nothing to draw")
    if column is None:
        heading = names[kind]
        panels = {f"Column {j + 1}": factors[:, :, j] for j in range(n)}
    elif 0 <= column < n:
        factors = factors[:, :, column]
        panels = {f"{names[kind]}: column {column + 1} of {n}": factors}
    else:
        raise InputError(
            f"column is {column}, but the model has {n} columns: give a number from 0 to {n - 1}"
        )
    # A few extreme values must not wash out the others.
    sizes = np.abs(factors[used_components(model)])
    limit = float(np.quantile(sizes, 0.999)) or float(sizes.max()) or 1.0
    return _component_figure(model, panels, image_shape, Paint("RdBu_r", -limit, limit), heading)


@styled
def plot_weights(model: Model, kind: Literal["bars", "grid"] = "bars") -> Figure:
    """Draw the component weights (K,) as bars, heaviest first, or in place on the grid.

    Lines mark the average weight 1/K, and 0.1/K, below which a component is unused.
    """
    weights, used = read_attribute(model, "weights_"), used_components(model)
    title = f"Weights: {int(used.sum())} of {len(weights)} components in use"
    if kind == "grid":
        side = 12
        tiles = np.repeat(100 * weights[:, None], side * side, axis=1)
        paint = Paint("viridis", 0.0, float(tiles.max()), "weight, %")
        return _component_figure(model, {title: tiles}, (side, side), paint)
    if kind != "bars":
        raise InputError(f'kind is {kind!r}: choose "bars" or "grid"')
    fig = new_figure(6.6, 2.9)
    axes = fig.add_subplot(title=title, ylabel="weight, %", xlabel="component, heaviest first")
    n, order = len(weights), np.argsort(-weights, kind="stable")
    colours = [COLOURS[0] if used[k] else MARK for k in order]
    axes.bar(np.arange(n), 100 * weights[order], width=0.8 if n <= 100 else 1.0, color=colours)
    axes.set_xlim(-0.7, n - 0.3)
    if n <= 49:
        axes.set_xticks(np.arange(n), [str(k) for k in order], fontsize=6.5)
        for label, k in zip(axes.get_xticklabels(), order, strict=True):
            label.set_color(INK if used[k] else MARK)
    for share, name, colour in ((100 / n, " 1/K", QUIET), (10 / n, " 0.1/K", MARK)):
        axes.axhline(share, color=colour, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(
            name, (n - 0.3, share), va="center", color=colour, annotation_clip=False, fontsize=7.5
        )
    return fig


@styled
def plot_samples(
    model: Model,
    components: Iterable[int] | None = None,
    n: int = 10,
    noise: bool = True,
    image_shape: Sequence[int] | None = None,
    random_state: int | None = None,
) -> Figure:
    """Draw one line of tiles per component: its centroid, then ``n`` samples.

    Without ``components``, the ten heaviest are drawn in the order of their numbers.
    """
    chosen = choose_components(model, components)
    if n < 1:
        raise InputError(f"n is {n}: ask for at least one sample per component")
    rows = draw_sample_rows(model, chosen, n, noise, random_state)
    fig, axes, grid = draw_component_rows(model, chosen, rows, image_shape)
    axes.set_title(f"Samples per component, {'with' if noise else 'without'} noise", pad=16)
    for x, name, align in (
        (grid.extent[0] / 2, "centroid", "center"),
        (1 + grid.gap, "samples", "left"),
    ):
        axes.annotate(
            name, (x, 0), xytext=(0, 2), textcoords="offset points", fontsize=7.5,
            ha=align, va="bottom", annotation_clip=False, color=QUIET,
        )  # fmt: skip
    return fig


def _component_figure(
    model: Model,
    panels: Mapping[str, Array],
    image_shape: Sequence[int] | None,
    paint: Paint,
    heading: str | None = None,
) -> Figure:
    """Draw (K, d) values as component grids, one panel per title, with one colour bar."""
    values = np.stack(list(panels.values()))
    unused = ~used_components(model)
    shape = check_image_shape(values.shape[2], image_shape)
    rows, cols = grid_shape(len(unused))
    # A grid that is far wider than high has the whole width of the figure.
    across = 1 if cols > 4 * rows else min(len(panels), 4)
    width = 11.0 if cols > 4 * rows else 6.0 if across == 1 else max(3.0, 10.0 / across)
    grid = Grid.fit(rows, cols, shape, width)
    down = math.ceil(len(panels) / across)
    width, height = grid.size
    lines = int(heading is not None) + int(unused.any())
    fig = new_figure(max(across * (width + 0.08) + 1.0, 3.4), down * (height + 0.3) + 0.25 * lines)
    places = fig.subplots(down, across, squeeze=False).ravel()
    for axes, title, tiles in zip(places, panels, values, strict=False):
        draw_tiles(axes, tiles, grid, paint)
        cross_out(axes, grid, unused)
        if len(panels) == 1 < len(tiles) and grid.tile >= 0.35:
            number_tiles(axes, len(tiles), grid, paint)
        axes.set_title(title)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    if grid.of_images:
        draw_colour_bar(fig, list(places), values, grid, paint)
    if heading:
        left = 0.04 / fig.get_figwidth()
        fig.suptitle(heading, x=left, ha="left", fontsize=11.5, fontweight="bold")
    if unused.any():
        count = f"{int(unused.sum())} of {len(unused)} components"
        fig.supxlabel(f"{count} unused (weight below 0.1/K): crossed", fontsize=8, color=MARK)
    return fig


def choose_components(model: Model, components: Iterable[int] | None) -> list[int]:
    """Check component numbers; without any, return the ten heaviest components."""
    weights = read_attribute(model, "weights_")
    if components is None:
        return sorted(int(k) for k in np.argsort(-weights, kind="stable")[:10])
    chosen = [int(k) for k in components]
    if not chosen or min(chosen) < 0 or max(chosen) >= len(weights):
        raise InputError(
            f"components is {chosen}: name one or more components from 0 to {len(weights) - 1}"
        )
    return chosen


def draw_sample_rows(
    model: Model, chosen: Sequence[int], n: int, noise: bool, random_state: int | None
) -> Array:
    """Return ``mu + Lambda z (+ D^(1/2) e)``, (components, 1 + n, d), with the centroid first."""
    means, loadings = read_attribute(model, "means_"), read_attribute(model, "loadings_")
    variances = read_attribute(model, "noise_variances_")
    rng = np.random.default_rng(random_state)
    rows = np.empty((len(chosen), n + 1, means.shape[1]))
    for row, k in zip(rows, chosen, strict=True):
        row[:] = means[k]
        row[1:] += rng.standard_normal((n, loadings.shape[2])) @ loadings[k].T
        # Drawn in both cases, so that a figure without noise shows the same latent codes.
        error = rng.standard_normal((n, means.shape[1]))
        if noise:
            row[1:] += error * np.sqrt(variances[k])
    return rows


def draw_component_rows(
    model: Model, chosen: Sequence[int], rows: Array, image_shape: Sequence[int] | None
) -> tuple[Figure, Axes, Grid]:
    """Draw rows (components, n, d), the centroid first, as one line of tiles per component."""
    means, used = read_attribute(model, "means_"), used_components(model)
    shape = check_image_shape(means.shape[1], image_shape)
    grid = Grid.fit(len(chosen), rows.shape[1], shape, 7.0, apart=True)
    flat = rows.reshape(-1, means.shape[1])
    # Grey levels follow the centroids, so that noise cannot dim images; lines must all fit.
    paint = Paint("gray", *value_limits(means[used] if grid.of_images else flat))
    width, height = grid.size
    fig = new_figure(width + 1.0, height + 0.55)
    axes = fig.add_subplot()
    draw_tiles(axes, flat, grid, paint)
    weights = read_attribute(model, "weights_")
    names = [f"{k}  ({100 * weights[k]:.1f}%{'' if used[k] else ', unused'})" for k in chosen]
    axes.set_yticks(-np.arange(len(chosen)) - grid.extent[1] / 2, names)
    axes.tick_params(length=0)
    axes.set_ylabel("component (weight)")
    return fig, axes, grid
