"""The figure of samples: one row per component, its centroid first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from factormix.errors import InputError
from factormix.views.plotting.model import Model, fitted, in_use
from factormix.views.plotting.style import QUIET, new_figure, styled
from factormix.views.plotting.tiles import Grid, Paint, checked_shape, draw_tiles
from factormix.views.plotting.values import Array, value_limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["chosen_components", "name_rows", "plot_samples", "sample_rows"]


@styled
def plot_samples(
    model: Model,
    components: Iterable[int] | None = None,
    n: int = 10,
    noise: bool = True,
    image_shape: Sequence[int] | None = None,
    random_state: int | None = None,
) -> Figure:
    """Draw one row per component: its centroid, then ``n`` samples, with or without noise.

    ``components`` left out means the ten heaviest, in the order of their numbers.
    """
    means, used = fitted(model, "means_"), in_use(model)
    chosen = chosen_components(fitted(model, "weights_"), components)
    if n < 1:
        raise InputError(f"n is {n}: ask for at least one sample per component")
    shape = checked_shape(means.shape[1], image_shape)
    rows = sample_rows(model, chosen, n, noise, random_state).reshape(-1, means.shape[1])
    grid = Grid.fit(len(chosen), n + 1, shape, 7.0, apart=True)
    # Grey levels of images follow the centroids, so that noise cannot dim them; lines must all fit.
    paint = Paint("gray", *value_limits(means[used] if grid.of_images else rows))
    width, height = grid.size
    fig = new_figure(width + 1.0, height + 0.55)
    axes = fig.add_subplot()
    draw_tiles(axes, rows, grid, paint)
    axes.set_title(f"Samples per component, {'with' if noise else 'without'} noise", pad=16)
    _name_columns(axes, grid)
    name_rows(axes, grid, model, chosen)
    return fig


def sample_rows(
    model: Model, chosen: Sequence[int], n: int, noise: bool, random_state: int | None
) -> Array:
    """Draw ``mu + Lambda z (+ D^(1/2) e)``; return (components, 1 + n, d), the centroid first."""
    means, loadings = fitted(model, "means_"), fitted(model, "loadings_")
    variances = fitted(model, "noise_variances_")
    rng = np.random.default_rng(random_state)
    rows = np.empty((len(chosen), n + 1, means.shape[1]))
    for row, k in zip(rows, chosen, strict=True):
        row[:] = means[k]
        row[1:] += rng.standard_normal((n, loadings.shape[2])) @ loadings[k].T
        # Drawn in both cases, so that a picture without noise shows the same latent codes.
        error = rng.standard_normal((n, means.shape[1]))
        if noise:
            row[1:] += error * np.sqrt(variances[k])
    return rows


def chosen_components(weights: Array, components: Iterable[int] | None) -> list[int]:
    """Check the component numbers asked for, or take the ten heaviest."""
    if components is None:
        return sorted(int(k) for k in np.argsort(-weights, kind="stable")[:10])
    chosen = [int(k) for k in components]
    if not chosen or min(chosen) < 0 or max(chosen) >= len(weights):
        raise InputError(
            f"components is {chosen}: name one or more components from 0 to {len(weights) - 1}"
        )
    return chosen


def _name_columns(axes: Axes, grid: Grid) -> None:
    """Say above the tiles which column is the centroid and where the samples begin."""
    for x, name, align in (
        (grid.extent[0] / 2, "centroid", "center"),
        (1 + grid.gap, "samples", "left"),
    ):
        axes.annotate(
            name, (x, 0), xytext=(0, 2), textcoords="offset points", fontsize=7.5,
            ha=align, va="bottom", annotation_clip=False, color=QUIET,
        )  # fmt: skip


def name_rows(axes: Axes, grid: Grid, model: Model, chosen: Sequence[int]) -> None:
    """Write the number and the weight of its component beside each row of tiles."""
    weights, used = fitted(model, "weights_"), in_use(model)
    names = [f"{k}  ({100 * weights[k]:.1f}%{'' if used[k] else ', unused'})" for k in chosen]
    axes.set_yticks(-np.arange(len(chosen)) - grid.extent[1] / 2, names)
    axes.tick_params(length=0)
    axes.set_ylabel("component (weight)")
