"""Grids of tiles: many rows of data in one picture, each an image or a line.

Tile ``k`` has its top left corner at ``(k % cols, -(k // cols))``: tiles lie one unit apart, to the
right and downwards.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from factormix.errors import InputError
from factormix.files import write_whole
from factormix.views.plotting.drawing import (
    COLOURS,
    INK,
    MARK,
    Array,
    Mask,
    styled,
    to_array,
    value_limits,
    widen_limits,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Paint:
    """How values become colours: a colour map from ``low`` to ``high``, and the bar's label."""

    cmap: str
    low: float
    high: float
    label: str = "value"

    def normalise(self, values: Array) -> Array:
        """Map ``low`` to 0 and ``high`` to 1, and clip."""
        return np.clip((values - self.low) / (self.high - self.low), 0, 1)

    def clipped_ends(self, values: Array) -> str:
        """Return the ends of the colour bar beyond which values lie, as matplotlib names them."""
        slack = 0.02 * (self.high - self.low)
        below = bool((values < self.low - slack).any())
        above = bool((values > self.high + slack).any())
        if self.low == -self.high:
            below = above = below or above
        return {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}[below, above]


@dataclass(frozen=True)
class Grid:
    """Places of ``rows`` x ``cols`` tiles of ``shape``, each ``tile`` inches wide.

    With ``apart``, a gap separates the first column from the others.
    """

    rows: int
    cols: int
    shape: tuple[int, ...]
    tile: float
    apart: bool = False

    @classmethod
    def fit(
        cls, rows: int, cols: int, shape: tuple[int, ...], width: float, apart: bool = False
    ) -> Grid:
        """Choose a tile width such that the grid is at most ``width`` inches wide."""
        return cls(rows, cols, shape, min(width / cols, 1.6 if rows * cols > 1 else 2.6), apart)

    @property
    def of_images(self) -> bool:
        """Whether tiles are images, not lines."""
        return len(self.shape) > 1

    @property
    def pad(self) -> int:
        """The pixels between two images."""
        return max(1, round(0.05 * self.shape[1]))

    @property
    def step(self) -> tuple[int, int]:
        """The pixels, across and down, from one image to the next."""
        return self.shape[1] + self.pad, self.shape[0] + self.pad

    @property
    def extent(self) -> tuple[float, float]:
        """The width and height of a tile; both are 1 if there is no space between tiles."""
        if not self.of_images:
            return 1.0, 1.0
        return self.shape[1] / self.step[0], self.shape[0] / self.step[1]

    @property
    def gap(self) -> float:
        """The width of the gap after the first column; lines have another colour instead."""
        return 3 * self.pad / self.step[0] if self.apart and self.of_images else 0.0

    @property
    def size(self) -> tuple[float, float]:
        """The width and height of the whole grid in inches."""
        aspect = self.step[1] / self.step[0] if self.of_images else 0.72
        across = self.cols - 1 + self.extent[0] + self.gap
        return self.tile * across, self.tile * aspect * (self.rows - 1 + self.extent[1])

    def corners(self, n: int) -> Array:
        """Return the top left corners (n, 2) of the first ``n`` tiles, in a grid without gap."""
        k = np.arange(n)
        return np.stack([k % self.cols, -(k // self.cols)], axis=1).astype(float)


def check_image_shape(n_features: int, shape: Sequence[int] | None) -> tuple[int, ...]:
    """Check the shape of an image of ``n_features`` values, or guess it."""
    if shape is None:
        # Below 8 x 8, a square number of features is more likely a table than a picture.
        for channels in (1, 3):
            side = math.isqrt(n_features // channels)
            if side >= 8 and side * side * channels == n_features:
                return (side, side) if channels == 1 else (side, side, 3)
        return (n_features,)
    given = tuple(int(s) for s in shape)
    if len(given) == 3 and given[2] == 1:
        given = given[:2]
    fits = math.prod(given) == n_features and len(given) in (1, 2, 3)
    if not fits or min(given) < 1 or (len(given) == 3 and given[2] != 3):
        raise InputError(
            f"image_shape is {tuple(shape)}, but a row has {n_features} values: "
            "give (height, width) or (height, width, 3) with that product"
        )
    return given


def make_mosaic(images: Array, rows: int, cols: int, pad: int, fill: float = math.nan) -> Array:
    """Place images (n, h, w[, 3]) row by row in one array, ``pad`` pixels of ``fill`` between."""
    n, height, width, *channels = images.shape
    pixels = np.full((rows, height + pad, cols, width + pad, *channels), fill)
    for k in range(n):
        pixels[k // cols, :height, k % cols, :width] = images[k]
    pixels = pixels.reshape(rows * (height + pad), cols * (width + pad), *channels)
    return pixels[: len(pixels) - pad, : pixels.shape[1] - pad]


def draw_tiles(axes: Axes, values: Array, grid: Grid, paint: Paint) -> None:
    """Draw rows (n, d) as the tiles of a grid: images as one mosaic, other rows as lines."""
    draw = _draw_images if grid.of_images else _draw_lines
    draw(axes, values, grid, paint)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _draw_images(axes: Axes, values: Array, grid: Grid, paint: Paint) -> None:
    """Draw rows (n, d) as one image of tiles; RGB rows keep their colours."""
    tiles, fill = values.reshape(-1, *grid.shape), math.nan
    if len(grid.shape) == 3:
        tiles, fill = paint.normalise(tiles), 1.0
    pixels = make_mosaic(tiles, grid.rows, grid.cols, grid.pad, fill)
    if grid.apart:
        first, pads = grid.shape[1], 3 * grid.pad
        between = np.full((len(pixels), pads, *pixels.shape[2:]), fill)
        pixels = np.concatenate([pixels[:, :first], between, pixels[:, first:]], axis=1)
    across, down = grid.step
    axes.imshow(
        pixels,
        cmap=paint.cmap,
        vmin=paint.low,
        vmax=paint.high,
        interpolation_stage="rgba",
        extent=(0, pixels.shape[1] / across, -len(pixels) / down, 0),
        aspect=down / across,
    )


def _draw_lines(axes: Axes, values: Array, grid: Grid, paint: Paint) -> None:
    """Draw rows (n, d) as lines, one per tile, all in one scale, with a zero line."""
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.patches import Rectangle

    n, d = values.shape
    left, top = np.hsplit(grid.corners(n), 2)
    x = left + np.linspace(0.07, 0.93, d)
    y = top - 0.92 + 0.76 * paint.normalise(values)
    cells = [Rectangle((a + 0.02, b - 0.98), 0.96, 0.96) for a, b in grid.corners(n)]
    axes.add_collection(PatchCollection(cells, facecolor="#f1f3f5", edgecolor="none"))
    if paint.low < 0 < paint.high:
        zero = top - 0.92 + 0.76 * paint.normalise(np.zeros(1))
        ends = np.stack([np.hstack([left + 0.05, left + 0.95]), np.hstack([zero, zero])], axis=2)
        axes.add_collection(LineCollection(list(ends), colors="#b9bec4", linewidths=0.7))
    first = np.arange(n) % grid.cols == 0
    colours = np.where(first & grid.apart, COLOURS[1], COLOURS[0])
    lines = np.stack([x, y], axis=2)
    axes.add_collection(LineCollection(list(lines), colors=list(colours), linewidths=1.2))
    if d <= 24 and grid.tile > 0.5:
        axes.scatter(x, y, s=4, c=np.repeat(colours, d), linewidths=0, zorder=3)
    axes.set(xlim=(0, grid.cols), ylim=(-grid.rows, 0))
    axes.set_xlabel(
        f"each tile: features 1 to {d} across, "
        f"{paint.label} {paint.low:.3g} to {paint.high:.3g} upwards",
        fontsize=8,
    )


def cross_out(axes: Axes, grid: Grid, crossed: Mask) -> None:
    """Cross out the tiles for which ``crossed`` (n,) is true."""
    from matplotlib.collections import LineCollection

    if not crossed.any():
        return
    width, height = grid.extent
    strokes = []
    for x, y in grid.corners(len(crossed))[crossed]:
        strokes += [[(x, y), (x + width, y - height)], [(x + width, y), (x, y - height)]]
    axes.add_collection(LineCollection(strokes, colors=MARK, linewidths=1.3), autolim=False)


def number_tiles(axes: Axes, n: int, grid: Grid, paint: Paint) -> None:
    """Write its number into each of ``n`` tiles, with a rim that shows on any image."""
    from matplotlib.patheffects import withStroke

    size = float(np.clip(6.5 * grid.tile, 4.0, 6.5))
    # Grey images are mostly dark; coloured ones and lines are mostly light.
    dark = grid.of_images and paint.cmap == "gray"
    ink, rim = ("white", INK) if dark else (INK, "white")
    width, height = grid.extent
    for k, (x, y) in enumerate(grid.corners(n)):
        number = axes.text(x + 0.05 * width, y - 0.05 * height, str(k), fontsize=size, va="top")
        number.set(color=ink, path_effects=[withStroke(linewidth=0.2 * size, foreground=rim)])
        # Numbers lie within their tiles: leaving them out of the layout saves time.
        number.set_in_layout(False)


def draw_colour_bar(
    fig: Figure, places: Sequence[Axes], values: Array, grid: Grid, paint: Paint
) -> None:
    """Draw the colour bar of some grids; colour images have a grey one."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    cmap = "gray" if len(grid.shape) == 3 else paint.cmap
    source = ScalarMappable(Normalize(paint.low, paint.high), cmap)
    size: dict[str, Any] = {"aspect": 28, "fraction": 0.04, "pad": 0.02}
    bar = fig.colorbar(
        source, ax=places, label=paint.label, extend=paint.clipped_ends(values), **size
    )
    bar.outline.set_visible(False)


@styled
def save_image_grid(
    images: ArrayLike | torch.Tensor,
    path: str | os.PathLike[str],
    image_shape: Sequence[int] | None = None,
    vmin: float | None = None,
    vmax: float | None = None,
) -> None:
    """Write images (n, d) as one PNG of tiles, with every pixel enlarged by a whole factor.

    Values are clipped to [0, 1], or to the bulk of the data if it lies elsewhere.
    """
    from matplotlib.image import imsave

    if Path(path).suffix.lower() != ".png":
        raise InputError(f"cannot write an image grid to {Path(path)}: name it .png")
    values = to_array(images)
    if values.ndim < 2 or values.size == 0:
        raise InputError(f"images have shape {values.shape}: give one or more rows, shape (n, d)")
    if not np.isfinite(values).all():
        raise InputError("images hold NaN or infinite values: remove them first")
    # Stacked images are rows too.
    values = values.reshape(len(values), -1)
    shape = check_image_shape(values.shape[1], image_shape)
    if len(shape) == 1:
        raise InputError(
            f"rows of {shape[0]} values are not images: give image_shape, or write the rows to .npy"
        )
    # Noise takes samples well beyond [0, 1], hence the wide margin.
    low, high = value_limits(values, margin=1.0)
    paint = Paint(
        "gray", *widen_limits(low if vmin is None else vmin, high if vmax is None else vmax)
    )
    cols = math.ceil(math.sqrt(len(values)))
    tiles = paint.normalise(values).reshape(len(values), *shape[:2], -1)
    pixels = make_mosaic(
        tiles, math.ceil(len(values) / cols), cols, max(1, shape[1] // 14), fill=1.0
    )
    pixels = np.rint(255 * np.broadcast_to(pixels, (*pixels.shape[:2], 3))).astype(np.uint8)
    zoom = max(1, round(640 / pixels.shape[1]))
    buffer = io.BytesIO()
    imsave(
        buffer,
        pixels.repeat(zoom, axis=0).repeat(zoom, axis=1),
        format="png",
        metadata={"Software": None},  # type: ignore[dict-item]
    )
    write_whole(path, buffer.getvalue())
