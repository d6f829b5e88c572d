"""Two samples counted in the same bins: which bins differ more than chance allows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["jensen_shannon", "p_values"]


def p_values(first: Tensor, second: Tensor) -> Tensor:
    """Compute the two-sided p-value of equal proportions for each bin, from counts (n_bins,).

    By the two-proportion z-test with pooled variance, as in NDB (Richardson and Weiss, 2018). Where
    both are empty, or both hold all, nothing differs.
    """
    n, m = first.sum(), second.sum()
    pooled = (first + second) / (n + m)
    error = (pooled * (1 - pooled) * (1 / n + 1 / m)).sqrt()
    difference = (first / n - second / m).abs()
    z = torch.where(error > 0, difference / error, 0.0)
    values: Tensor = torch.special.erfc(z / math.sqrt(2))
    return values


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Compute the Jensen-Shannon divergence of two histograms (n_bins,) in nats, scalar."""
    p, q = first / first.sum(), second / second.sum()
    middle = (p + q) / 2
    return ((torch.xlogy(p, p / middle) + torch.xlogy(q, q / middle)).nansum()) / 2
