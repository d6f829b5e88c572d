"""Show a mixture in a notebook: its size, and small pictures of its heaviest components.

The pictures are drawn with the standard library and NumPy only, so that they need no optional
package.
"""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["mixture_html", "png"]

MAX_COMPONENTS = 24
"""Maximum number of components that are shown: about two lines of a notebook."""
MAX_PIXELS, MAX_POINTS = 64, 48
"""Maximum number of pixels along a side of an image, and of points of a profile, which is 96 pixels
wide: larger ones are subsampled."""

Array = NDArray[Any]


def mixture_html(
    name: str,
    facts: Mapping[str, object],
    weights: Array,
    means: Array,
    image_shape: Sequence[int] | None = None,
) -> str:
    """Describe a mixture of weights (K,) and means (K, d) in HTML, with ``facts`` in a line.

    With an ``image_shape``, (height, width[, 3]), means are shown as images, otherwise as profiles:
    bars above and below the mean of all components.
    """
    heaviest = np.argsort(-weights, kind="stable")[:MAX_COMPONENTS]
    shown = means[heaviest].astype(np.float64)
    pictures = _images(shown, image_shape) if image_shape else _profiles(shown, weights @ means)
    tiles = "".join(
        f'<figure style="margin:0;text-align:center;font-size:11px">{picture}'
        f"<figcaption>{k}: {100 * weights[k]:.1f}%</figcaption></figure>"
        for k, picture in zip(heaviest.tolist(), pictures, strict=True)
    )
    text = html.escape(", ".join(f"{value} {key}" for key, value in facts.items()))
    left = len(weights) - len(heaviest)
    more = f'<div style="font-size:11px">and {left:,} lighter components</div>' if left else ""
    return (
        f'<div style="font-family:sans-serif"><b>{html.escape(name)}</b>: {text}'
        '<div style="display:flex;flex-wrap:wrap;gap:8px;margin:6px 0">'
        f"{tiles}</div>{more}</div>"
    )


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode pixels (h, w) or (h, w, 3) as a PNG file."""
    height, width = pixels.shape[:2]
    lines = pixels.reshape(height, -1)
    # Every line begins with the number of its filter: 0 is none.
    raw = np.hstack([np.zeros((height, 1), np.uint8), lines]).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    found = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b"")):
        check = zlib.crc32(kind + content)
        found += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)
    return found


def _images(rows: Array, shape: Sequence[int]) -> list[str]:
    low, high = (float(q) for q in np.quantile(rows, (0.002, 0.998)))
    steps = np.clip((rows - low) / ((high - low) or 1.0), 0, 1)
    pixels = np.rint(255 * steps).astype(np.uint8).reshape(len(rows), *shape)
    step = max(1, -(-max(shape[:2]) // MAX_PIXELS))
    pixels = pixels[:, ::step, ::step]
    # Small images are shown larger, pixel by pixel.
    zoom = max(1, 60 // max(pixels.shape[1:3]))
    height, width = (zoom * n for n in pixels.shape[1:3])
    return [
        f'<img width="{width}" height="{height}" style="image-rendering:pixelated" alt=""'
        f' src="data:image/png;base64,{base64.b64encode(png(image)).decode()}">'
        for image in pixels
    ]


def _profiles(rows: Array, mean: Array) -> list[str]:
    spread = rows.std(axis=0)
    values = (rows - mean) / np.where(spread > 0, spread, 1.0)
    step = max(1, -(-values.shape[1] // MAX_POINTS))
    values = values[:, ::step]
    most = max(float(np.abs(values).max(initial=0)), 1e-12)
    return [_profile(row / most) for row in values]


def _profile(row: Array) -> str:
    width = 96 / len(row)
    bars = "".join(
        f'<rect x="{i * width:.2f}" y="{24 - 22 * max(value, 0):.2f}" width="{0.8 * width:.2f}"'
        f' height="{max(22 * abs(value), 0.5):.2f}"'
        f' fill="{"#c7502f" if value > 0 else "#2f6db3"}"/>'
        for i, value in enumerate(row.tolist())
    )
    return f'<svg width="96" height="48" viewBox="0 0 96 48">{bars}</svg>'
