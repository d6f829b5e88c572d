"""Figures for reading a model: rows near its components, overlaps, and bins of samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from factormix.errors import InputError
from factormix.views.plotting.model import Model, fitted, in_use
from factormix.views.plotting.samples import chosen_components, name_rows
from factormix.views.plotting.style import COLOURS, MARK, QUIET, new_figure, styled
from factormix.views.plotting.tiles import Grid, Paint, checked_shape, draw_tiles
from factormix.views.plotting.values import as_array, value_limits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_bins", "plot_nearest", "plot_overlaps"]


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
    shape = checked_shape(means.shape[1], image_shape)
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
