"""Pictures as files: equal pictures give equal bytes, and a file is written whole."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from factormix.errors import InputError
from factormix.files import write_whole
from factormix.views.plotting.style import styled
from factormix.views.plotting.tiles import Paint, checked_shape, mosaic
from factormix.views.plotting.values import Array, as_array, value_limits, widened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure_png", "save_figure", "save_image_grid"]


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
def save_image_grid(
    images: ArrayLike | torch.Tensor,
    path: str | os.PathLike[str],
    image_shape: Sequence[int] | None = None,
    vmin: float | None = None,
    vmax: float | None = None,
) -> None:
    """Write rows (n, d) as one PNG of tiles, each data pixel a block of whole pixels.

    Values are clipped to [0, 1], or to the bulk of the data when it lies elsewhere.
    """
    from matplotlib.image import imsave

    if Path(path).suffix.lower() != ".png":
        raise InputError(f"cannot write an image grid to {Path(path)}: name it .png")
    values = _as_rows(images)
    shape = checked_shape(values.shape[1], image_shape)
    if len(shape) == 1:
        raise InputError(
            f"rows of {shape[0]} values are no images: give image_shape, or write the rows to .npy"
        )
    # Samples carry noise well beyond [0, 1], hence the wide margin.
    low, high = value_limits(values, margin=1.0)
    paint = Paint("gray", *widened(low if vmin is None else vmin, high if vmax is None else vmax))
    cols = math.ceil(math.sqrt(len(values)))
    tiles = paint.share(values).reshape(len(values), *shape[:2], -1)
    pixels = mosaic(tiles, math.ceil(len(values) / cols), cols, max(1, shape[1] // 14), fill=1.0)
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


@styled
def _render(fig: Figure, kind: str, dpi: float) -> bytes:
    """Render without dates or version numbers, so that equal figures give equal bytes."""
    buffer = io.BytesIO()
    unnamed = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    fig.savefig(buffer, format=kind, dpi=dpi, metadata=unnamed)
    return buffer.getvalue()


def _as_rows(values: Any) -> Array:
    """Check that values are finite rows (n, d), n > 0; stacked images are rows too."""
    rows = as_array(values)
    if rows.ndim < 2 or rows.size == 0:
        raise InputError(f"images have shape {rows.shape}: give one or more rows, shape (n, d)")
    if not np.isfinite(rows).all():
        raise InputError("images hold NaN or infinite values: remove them first")
    return rows.reshape(len(rows), -1)
