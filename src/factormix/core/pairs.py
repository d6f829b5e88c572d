"""Statistics of the few (row, component) pairs that matter, instead of all B x K.

Of a row's responsibilities nearly all are far below what rounding leaves of a sum. Pairs above
``LEAST_SHARE`` are sorted by component, and each component sums the rows of its own pairs, which
is exact to rounding and costs what the pairs cost.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

__all__ = ["LEAST_SHARE", "Pairs", "Sums", "join", "pays", "segment_sums", "significant"]

LEAST_SHARE = 1e-6
"""Responsibility below which a pair of a row and a component contributes nothing."""
PAIR_COST = 10
"""How many times what a pair costs in a product of all pairs it costs by itself."""


class Pairs(NamedTuple):
    """Pairs of a row and a component, P of them."""

    rows: Tensor
    """(P,) numbers of rows."""
    components: Tensor
    """(P,) numbers of components."""
    shares: Tensor
    """(P,) R, the responsibility."""
    Y: Tensor
    """(P, l), ``Gamma' (x - mu)``."""


class Sums(NamedTuple):
    """Sums over the rows of components, T of them."""

    touched: Tensor | None
    """(T,) rising numbers of the components; None for all, T = K."""
    first: Tensor
    """``sum R [1, y]``, (T, l+1)."""
    B: Tensor
    """``sum R [1, y] x'``, (T, l+1, d)."""
    S: Tensor
    """``sum R x^2``, (T, d)."""


def significant(R: Tensor) -> Tensor:
    """Find where responsibilities R (B, K) matter, (P, 2)."""
    return (R > LEAST_SHARE).nonzero()


def pays(n_pairs: int, n_all: int) -> bool:
    """Tell whether the sums over so many pairs cost less than the products over all of them."""
    return n_pairs * PAIR_COST <= n_all


def join(parts: list[Pairs]) -> Pairs:
    """Join pairs of several blocks of rows."""
    return Pairs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def segment_sums(pairs: Pairs, x: Tensor, squares: Tensor, n_components: int | None = None) -> Sums:
    """Sum over the pairs of each component, for rows x (B, d) and their squares (B, d).

    With ``n_components``, so many have sums, which are zero without a pair.
    """
    order = pairs.components.argsort(stable=True)
    components, rows = pairs.components[order], pairs.rows[order]
    if n_components is None:
        touched, which, counts = torch.unique_consecutive(
            components, return_inverse=True, return_counts=True
        )
    else:
        touched, which = None, components
        counts = torch.bincount(components, minlength=n_components)
    T, l = len(counts), pairs.Y.shape[1]
    R = pairs.shares[order]
    RY = torch.cat([R.unsqueeze(1), pairs.Y[order] * R.unsqueeze(1)], dim=1)
    first = RY.new_zeros(T, l + 1).index_add_(0, which, RY)
    begins = counts.cumsum(0) - counts
    S = embedding_bag(rows, squares, begins, mode="sum", per_sample_weights=R)
    # A bag for each of [1, y_1 .. y_l] of a component, so that the sums lie as they are needed.
    bag_counts = counts.repeat_interleave(l + 1)
    bag_begins = bag_counts.cumsum(0) - bag_counts
    bag = torch.arange(T * (l + 1), device=x.device).repeat_interleave(bag_counts)
    pair = torch.arange(len(bag), device=x.device) - bag_begins[bag] + begins[bag // (l + 1)]
    B = embedding_bag(
        rows[pair], x, bag_begins, mode="sum", per_sample_weights=RY[pair, bag % (l + 1)]
    )
    return Sums(touched, first, B.view(T, l + 1, -1), S)
