"""Place components on a grid so that neighbours look alike.

The method is linear assignment sorting. Each round smooths the points that lie on the grid, takes
the smoothed values as targets of the cells, and assigns the points to the targets they resemble
most. The smoothing narrows from round to round, so the coarse order forms before the fine one.
Large grids are assigned in random parts, which takes time in proportion to their size.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Order = NDArray[np.int64]

PART_CELLS = 200
"""Cells assigned at a time: the time of one assignment grows with the cube of this number."""
MANY_CELLS = 2000
"""Above this size parts are halved, so 10,000 cells take a few seconds."""
DIRECTIONS = 24
"""Principal directions in which points are compared."""
SHRINK = 0.9
"""Factor by which the smoothing narrows each round. Among 225 digits of 8 x 8, the mean distance of
neighbours is 48.7 in random order, 32.5 with 0.8, 32.1 with 0.9 and 31.5 with 0.95, in 1, 2 and 3
hundredths of a second; swaps until none helps reach 30.1."""
USUAL_RATIO = 1.4
"""Width over height of the map in a window of 1200 by 860 pixels, 868 by 619."""


def choose_grid(n: int, ratio: float = USUAL_RATIO) -> tuple[int, int]:
    """Return the rows and columns of n cells that are as large as the space allows.

    ``ratio`` is the width of the space over its height, in cells. A cell is the smaller of
    ``ratio / columns`` and ``1 / rows`` wide; of equally large cells, the fewest are empty.
    """

    def rate(cols: int) -> tuple[float, int]:
        rows = math.ceil(n / cols)
        return min(ratio / cols, 1 / rows), -rows * cols

    cols = max(range(1, n + 1), key=rate)
    return math.ceil(n / cols), cols


def arrange_on_grid(
    points: NDArray[np.floating], rows: int, cols: int, previous: NDArray[np.floating] | None = None
) -> Order:
    """Return an order (n,) of points (n, d) such that cell ``i`` gets the point ``order[i]``.

    Cells count row by row; ``rows * cols`` is at least n, and empty cells come last. Given the
    ``previous`` points (n, d) cell by cell, each point goes as near as possible to the cell of the
    previous point that it resembles.
    """
    n = len(points)
    if n < 3:
        return np.arange(n)
    if previous is not None and previous.shape == points.shape:
        return _assign(np.asarray(previous, np.float64), np.asarray(points, np.float64))
    return _sort_coarse_to_fine(_principal_coordinates(points), rows, cols)


def _principal_coordinates(points: NDArray[np.floating]) -> Array:
    """Return coordinates (n, p) of points (n, d) along their first principal directions."""
    from sklearn.decomposition import PCA

    # Equal points have no variance to divide by.
    with np.errstate(invalid="ignore"):
        x = PCA(min(DIRECTIONS, *points.shape), random_state=0).fit_transform(points)
    x = np.asarray(x, np.float64)
    # A direction has no sign of its own: fix it, so that equal points give equal maps.
    return x * np.where((x**3).sum(axis=0) < 0, -1.0, 1.0)


def _sort_coarse_to_fine(x: Array, rows: int, cols: int) -> Order:
    """Order points (n, p) by targets that are smoothed less and less."""
    n = len(x)
    random = np.random.default_rng(0)
    order = _sort_into_columns(x, cols)
    radius, size = max(rows, cols) / 4, PART_CELLS if n <= MANY_CELLS else PART_CELLS // 2
    while radius > 0.4:
        targets = _smooth(x[order], rows, cols, radius)
        for part in np.array_split(random.permutation(n), math.ceil(n / size)):
            order[part] = order[part][_assign(targets[part], x[order[part]])]
        radius *= SHRINK
    return order


def _sort_into_columns(x: Array, cols: int) -> Order:
    """Split points (n, p) into columns by the first coordinate; sort each by the second."""
    n = len(x)
    second = x[:, min(1, x.shape[1] - 1)]
    order = np.empty(n, np.int64)
    cells = np.arange(n)
    by_first, start = np.argsort(x[:, 0], kind="stable"), 0
    for column in range(cols):
        inside = cells[cells % cols == column]
        band = by_first[start : start + len(inside)]
        order[inside] = band[np.argsort(second[band], kind="stable")]
        start += len(inside)
    return order


def _smooth(on_grid: Array, rows: int, cols: int, radius: float) -> Array:
    """Average points on the grid (n, p) over their neighbourhoods."""
    from scipy.ndimage import gaussian_filter

    n, p = on_grid.shape
    cells = np.zeros((rows * cols, p + 1))
    cells[:n, :p], cells[:n, p] = on_grid, 1.0
    sums = gaussian_filter(
        cells.reshape(rows, cols, p + 1), (radius, radius, 0), mode="constant", truncate=3.0
    )
    flat = sums.reshape(rows * cols, p + 1)[:n]
    averages: Array = flat[:, :p] / flat[:, p:]
    return averages


def _assign(targets: Array, x: Array) -> Order:
    """Assign points (m, p) to targets (m, p) with the least sum of squared distances."""
    from scipy.optimize import linear_sum_assignment

    # The squares of points and targets are the same for every assignment.
    return np.asarray(linear_sum_assignment(-(targets @ x.T))[1], np.int64)
