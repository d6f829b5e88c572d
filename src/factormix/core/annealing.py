"""The component grid, the smoothing kernel on it, and the rule that narrows the kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

COLLAPSED = 0.3
"""Below this width the kernel is the identity: a neighbour would get less than 0.4 per cent."""


def grid_shape(n_components: int) -> tuple[int, int]:
    """Return the (rows, columns) of the rectangle nearest to a square that holds K components."""
    rows = next(r for r in range(math.isqrt(n_components), 0, -1) if n_components % r == 0)
    return rows, n_components // rows


def torus_distances(n_components: int) -> Tensor:
    """Compute squared distances (K, K) between components on the grid, which wraps around."""
    rows, columns = grid_shape(n_components)
    index = torch.arange(n_components)
    squared = torch.zeros(n_components, n_components)
    for position, period in ((index // columns, rows), (index % columns, columns)):
        apart = (position[:, None] - position[None, :]).abs()
        squared += torch.minimum(apart, period - apart).float().square()
    return squared


def smoothing_kernel(distances: Tensor, sigma: float) -> Tensor:
    """Compute ``g_kj ~ exp(-dist^2 / (2 sigma^2))``, (K, K), with rows that sum to one."""
    return torch.softmax(distances / (-2 * sigma * sigma), dim=1)


@dataclass
class Window:
    """Watch the mean objective over windows of steps, and detect when it has stopped rising.

    With ``l0`` the mean of the first window, ``delta_L = (this - last) / (last - l0)``; the
    objective is stationary when ``-2 delta < delta_L < delta``. The first two windows give no
    verdict.
    """

    delta: float
    finished: int = 0
    first: float = 0.0
    last: float = 0.0

    def close(self, mean: float) -> bool:
        """Take the mean of a finished window and return whether the objective is stationary."""
        self.finished += 1
        if self.finished == 1:
            self.first = self.last = mean
            return False
        risen, change = self.last - self.first, mean - self.last
        self.last = mean
        if self.finished == 2:
            return False
        if risen == 0:
            return change == 0
        return -2 * self.delta < change / risen < self.delta
