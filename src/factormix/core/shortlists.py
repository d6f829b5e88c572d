"""Rows in blocks of near ones, and the few of many components that each block evaluates.

The rows of a batch are sorted by a tree into blocks of rows that are near each other in the
coordinates of a screen, and every block evaluates the components that its rows rank highest, by
ordinary dense products. What a component is worth to a block is the least by which it falls behind
the best of one of the rows: the first of each row is always there.

Some blocks lie where many components are near, others where few are. So the blocks are sorted by
how much their last candidates would be worth, and the more that is, the more candidates they get,
which loses far less than the same number for all. All shapes follow from the sizes alone, so that
nothing waits for the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.screening import Screen, products

__all__ = ["Shortlists", "shortlists"]

LAYOUTS = {2048: (16, (3, 4, 5, 6)), 512: (16, (2, 3)), 128: (8, (1, 2)), 0: (8, (1,))}
"""Groups of a block, and rows that a group may have, from so many rows of a batch on; of these,
what leaves the fewest places over. Larger blocks read the parameters of their candidates
less often, but where rows are few, those of a block are far apart and share few candidates."""
UNEQUAL = 5.5
"""How many times more candidates the block with the most has than the one with the fewest, where
components are many enough."""
ELEMENTS = 1 << 22
"""Elements of the ranks of a few blocks, which are computed at a time."""


class Shortlists(NamedTuple):
    """Rows in blocks, and the components that each block evaluates."""

    rows: Tensor
    """(n, m) numbers of rows; those of B and above are there to fill the last ones only."""
    components: list[Tensor]
    """(C_i,) rising numbers of components for each block, C of them on average."""


def shortlists(x: Tensor, screen: Screen, log_weights: Tensor, n_candidates: int) -> Shortlists:
    """Sort rows x (B, d) into blocks and choose the components that each block evaluates."""
    z = screen.coordinates(x)
    groups = _tree(z)
    real, phi = groups.clamp(max=len(x) - 1), products(z)
    K = len(screen.table)
    n, C = max(1, len(groups) // _layouts(len(x))[0]), min(n_candidates, K)
    rows, counts = real.view(n, -1), _counts(n, C, K)
    worths, chosen = _best(phi, rows, screen.table, log_weights, counts[-1])
    # Who would still be worth much as the last of a usual list goes last, and gets a longer one.
    order = worths[:, C - 1].argsort(stable=True)
    ordered = zip(chosen[order].unbind(), counts, strict=True)
    return Shortlists(groups.view(n, -1)[order], [few[:c].sort().values for few, c in ordered])


def _counts(n: int, C: int, K: int) -> list[int]:
    """Return how many of K components each of n blocks gets, rising, C on average."""
    # Square, so that the block with the most gets no more than there are.
    unequal = min(UNEQUAL, (K / C) ** 2)
    shares = [unequal ** ((i + 0.5) / n) for i in range(n)]
    return [min(K, max(1, round(C * n * share / sum(shares)))) for share in shares]


def _best(
    phi: Tensor, rows: Tensor, table: Tensor, log_weights: Tensor, C: int
) -> tuple[Tensor, Tensor]:
    """Choose for blocks of rows (n, m) the C components that fall behind least, by features (B, F).

    Return what they are worth and their numbers, the best first, both (n, C).
    """
    found, m, columns = [], rows.shape[1], _weighted(table, log_weights).mT
    for part in torch.split(rows, max(1, ELEMENTS // (m * len(table)))):
        ranks = phi[part.reshape(-1)] @ columns
        found.append(_least_behind(ranks.view(len(part), m, -1), C))
    worths, numbers = zip(*found, strict=True)
    return torch.cat(worths), torch.cat(numbers)


def _weighted(table: Tensor, log_weights: Tensor) -> Tensor:
    """Return a table (K, F) for ranks with the weights of components (K,).

    They join what belongs to the last feature, which is one: a sum of its own for each rank would
    be another pass through the memory.
    """
    return torch.cat([table[:, :-1], (table[:, -1] + log_weights).unsqueeze(1)], dim=1)


def _least_behind(ranks: Tensor, C: int) -> tuple[Tensor, Tensor]:
    """Choose the C components that fall behind the best of a row by least, for ranks (n, m, K)."""
    behind = ranks.sub_(ranks.amax(dim=2, keepdim=True)).amax(dim=1)
    worths, which = behind.topk(C, dim=1)
    return worths, which


def _tree(z: Tensor) -> Tensor:
    """Sort rows z (B, p) into groups of a few near ones, (n, m), near groups beside each other.

    Each node is cut in equal parts across the direction in which its rows vary most. Numbers of B
    and above fill the last places.
    """
    parts, levels, size = _layout(len(z))
    n = parts * 2**levels * size
    nodes = torch.arange(n, device=z.device).view(1, n)
    # What fills the last places lies where the last row does.
    z = torch.cat([z, z[-1:].expand(n - len(z), -1)])
    for cut in [parts] + [2] * levels:
        members = z[nodes]
        members = members - members.mean(dim=1, keepdim=True)
        covariance = members.mT @ members
        # Any start that is not orthogonal to the first eigenvector will do.
        v = covariance.sum(dim=2, keepdim=True) + covariance.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        for _ in range(4):
            v = covariance @ v
            v = v / v.norm(dim=1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)
        along = (members @ v).squeeze(-1)
        nodes = nodes.gather(1, along.argsort(dim=1, stable=True))
        nodes = nodes.view(len(nodes) * cut, -1)
    return nodes


def _layout(n_rows: int) -> tuple[int, int, int]:
    """Choose parts, levels and rows of a group, so that few places are left over.

    There are ``parts * 2**levels`` groups, a multiple of those of a block; few rows are one group.
    """
    best, lowest = (1, 0, n_rows), math.inf
    block_groups, sizes = _layouts(n_rows)
    if n_rows < 2 * block_groups:
        return best
    first = int(math.log2(block_groups))
    for size in sizes:
        for parts in range(1, 16):
            levels = max(first, math.ceil(math.log2(n_rows / (size * parts))))
            # Many parts across one direction are thin.
            cost = parts * 2**levels * size * (1 + 0.005 * parts)
            if cost < lowest:
                best, lowest = (parts, levels, size), cost
    return best


def _layouts(n_rows: int) -> tuple[int, tuple[int, ...]]:
    """Return the groups of a block, and rows that a group may have, for a batch of so many rows."""
    return next(found for rows, found in LAYOUTS.items() if n_rows >= rows)
