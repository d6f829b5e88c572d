"""A grid on which neighbours are alike, for components that training left in any order.

Linear assignment sorting: the points on the grid are smoothed, which makes a target for each cell,
and the points are assigned anew to the targets they resemble most. Over the rounds the smoothing
becomes narrower, so that first the large order forms and then the small one. Large grids are
assigned in random parts, which takes time in proportion to their size.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["arrange", "grid_shape"]

Array = NDArray[np.float64]
Order = NDArray[np.int64]

PART = 200
"""Cells that are assigned at a time: the time of an assignment grows with their cube."""
MANY = 2000
"""Cells from which on smaller parts are assigned, so that ten thousand take a few seconds."""
DIRECTIONS = 24
"""Principal directions of the points that are compared."""
SHRINK = 0.8
"""How much narrower the smoothing becomes each round."""


def grid_shape(n: int) -> tuple[int, int]:
    """Choose rows and columns for n cells: at most twice as wide as high, with few cells empty."""
    most = max(1, math.isqrt(n))
    choices = range(max(1, math.ceil(math.sqrt(n / 2))), most + 1)
    rows = min(choices, key=lambda r: (-n % r, abs(n / r**2 - 1.4)), default=most)
    return rows, math.ceil(n / rows)


def arrange(points: NDArray[np.floating], rows: int, cols: int) -> Order:
    """Find an order (n,) of points (n, d) for the cells of a grid, row by row.

    The cell ``i`` gets the point ``order[i]``; ``rows * cols`` is at least n, and the cells that
    are left over are the last ones.
    """
    n = len(points)
    if n < 3:
        return np.arange(n)
    x = _principal(points)
    random = np.random.default_rng(0)
    order = _bands(x, rows, cols)
    radius, size = max(rows, cols) / 4, PART if n <= MANY else PART // 2
    while radius > 0.4:
        targets = _smoothed(x[order], rows, cols, radius)
        for part in np.array_split(random.permutation(n), math.ceil(n / size)):
            order[part] = order[part][_assigned(targets[part], x[order[part]])]
        radius *= SHRINK
    return order


def _principal(points: NDArray[np.floating]) -> Array:
    """Express points (n, d) by their first principal directions, (n, p), signs fixed."""
    centred = np.asarray(points, np.float32)
    centred = centred - centred.mean(axis=0)
    n, d = centred.shape
    small = centred if d <= n else centred.T
    # The smaller of the two Gram matrices has all that is needed.
    _, vectors = np.linalg.eigh((small.T @ small).astype(np.float64))
    vectors = vectors[:, ::-1][:, :DIRECTIONS]
    if d <= n:
        x = centred @ vectors.astype(np.float32)
    else:
        x = vectors * np.linalg.norm(small @ vectors, axis=0)
    x = np.asarray(x, np.float64)
    # A direction has no sign of its own: the same points are to give the same picture.
    return x * np.where((x**3).sum(axis=0) < 0, -1.0, 1.0)


def _bands(x: Array, rows: int, cols: int) -> Order:
    """Sort points (n, p) into columns by the first direction, and each by the second."""
    n = len(x)
    second = x[:, min(1, x.shape[1] - 1)]
    order = np.empty(n, np.int64)
    cells = np.arange(n)
    across, first = np.argsort(x[:, 0], kind="stable"), 0
    for column in range(cols):
        mine = cells[cells % cols == column]
        band = across[first : first + len(mine)]
        order[mine] = band[np.argsort(second[band], kind="stable")]
        first += len(mine)
    return order


def _smoothed(on_grid: Array, rows: int, cols: int, radius: float) -> Array:
    """Average the points on the grid (n, p) over their neighbours, (n, p)."""
    from scipy.ndimage import gaussian_filter

    n, p = on_grid.shape
    cells = np.zeros((rows * cols, p + 1))
    cells[:n, :p], cells[:n, p] = on_grid, 1.0
    wide = gaussian_filter(
        cells.reshape(rows, cols, p + 1), (radius, radius, 0), mode="constant", truncate=3.0
    )
    flat = wide.reshape(rows * cols, p + 1)[:n]
    smoothed: Array = flat[:, :p] / flat[:, p:]
    return smoothed


def _assigned(targets: Array, x: Array) -> Order:
    """Assign points (m, p) to targets (m, p) so that the sum of squared distances is least."""
    from scipy.optimize import linear_sum_assignment

    # The squares of points and targets are the same for every assignment.
    return np.asarray(linear_sum_assignment(-(targets @ x.T))[1], np.int64)
