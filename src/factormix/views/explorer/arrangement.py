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
SWEEPS = 8
"""Times that every cell may swap with another, at most."""


def grid_shape(n: int) -> tuple[int, int]:
    """Choose rows and columns for n cells: at most twice as wide as high, with few cells empty."""
    most = max(1, math.isqrt(n))
    choices = range(max(1, math.ceil(math.sqrt(n / 2))), most + 1)
    rows = min(choices, key=lambda r: (-n % r, abs(n / r**2 - 1.4)), default=most)
    return rows, math.ceil(n / rows)


def arrange(
    points: NDArray[np.floating], rows: int, cols: int, before: NDArray[np.floating] | None = None
) -> Order:
    """Find an order (n,) of points (n, d) for the cells of a grid, row by row.

    The cell ``i`` gets the point ``order[i]``; ``rows * cols`` is at least n, and the cells that
    are left over are the last ones. With the points ``before`` (n, d), cell by cell, of an earlier
    picture, each goes as near as it can to where its like was.
    """
    n = len(points)
    if n < 3:
        return np.arange(n)
    x = _principal(points)
    if before is not None and before.shape == points.shape:
        order = _assigned(np.asarray(before, np.float64), np.asarray(points, np.float64))
    else:
        order = _sorted_out(x, rows, cols)
    return _swapped(order, x, cols) if n <= MANY else order


def _sorted_out(x: Array, rows: int, cols: int) -> Order:
    """Lay out points (n, p) from the rough to the fine, by averages that become narrower."""
    n = len(x)
    random = np.random.default_rng(0)
    order = _bands(x, rows, cols)
    radius, size = max(rows, cols) / 4, PART if n <= MANY else PART // 2
    while radius > 0.4:
        targets = _smoothed(x[order], rows, cols, radius)
        for part in np.array_split(random.permutation(n), math.ceil(n / size)):
            order[part] = order[part][_assigned(targets[part], x[order[part]])]
        radius *= SHRINK
    return order


def _swapped(order: Order, x: Array, cols: int) -> Order:
    """Swap points (n, p) of two cells while that brings neighbours nearer to each other."""
    n = len(order)
    beside = [_neighbours(cell, n, cols) for cell in range(n)]
    squares = (x**2).sum(axis=1)
    apart = squares[:, None] + squares - 2 * x @ x.T
    # What point p would have to its neighbours in cell c, (n, n).
    pull = np.stack([apart[order[cells]].sum(axis=0) for cells in beside])
    least = 1e-9 * float(pull.mean())
    for _ in range(SWEEPS):
        before = order.copy()
        for i in range(n):
            now = pull[np.arange(n), order]
            then = pull[i, order] + pull[:, order[i]]
            # Neighbours that swap stay neighbours.
            then[beside[i]] += 2 * apart[order[i], order[beside[i]]]
            gain = now[i] + now - then
            gain[i] = 0.0
            j = int(gain.argmax())
            if gain[j] <= least:
                continue
            change = apart[order[j]] - apart[order[i]]
            pull[beside[i]] += change
            pull[beside[j]] -= change
            order[[i, j]] = order[[j, i]]
        if (order == before).all():
            break
    return order


def _neighbours(cell: int, n: int, cols: int) -> list[int]:
    """Name the cells above, below, left and right of a cell."""
    found = [cell - cols, cell + cols]
    found += [cell - 1] * (cell % cols > 0) + [cell + 1] * (cell % cols < cols - 1)
    return [c for c in found if 0 <= c < n]


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
