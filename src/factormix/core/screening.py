"""Few of many components: a cheap screen that ranks all of them, so that few are evaluated.

The marginal of the mixture on p directions is a Gaussian mixture of its own, with means
``W' mu_k`` and covariances ``W' Sigma_k W``. Its log-densities are linear in the products
``phi(z)`` of the coordinates ``z = W' (x - origin)``, so that one matrix product with a table
(K, F), ``F = (p + 1)(p + 2) / 2``, ranks all components for all rows.

The rows of a batch are sorted by a tree into blocks of rows that are near each other in z, and
every block evaluates the C components that its rows rank highest by ordinary dense products. What
a component is worth to a block is the least by which it falls behind the best of one of the rows:
the first of each row is always there. All shapes follow from the sizes alone, so that nothing
waits for the device. Where the table is large, groups of a few rows choose a longer list first.

The directions are those in which the mixture varies most compared with the noise of its
components. They follow from its parameters, without rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.density import Operands, project
from factormix.core.parameters import Parameters, factor_rows, precise_dtype
from factormix.core.workspace import Workspace, kept

__all__ = [
    "Block",
    "Screen",
    "Shortlists",
    "blocks",
    "directions",
    "follow",
    "screen_of",
    "shortlists",
    "table_size",
]

N_DIRECTIONS = 16
"""Most directions of a screen."""
GROUP_ROWS = {2048: (3, 4, 5, 6), 512: (2, 3), 128: (1, 2), 0: (1,)}
"""Rows that a group may have, from so many rows of a batch on: where rows are few, those of a group
are far apart and share few candidates. Of these, what leaves the fewest places over."""
BLOCK_GROUPS = 8
"""Groups of a block."""
RIDGE = 1e-5
"""Share of the mixture's variance that is added to each component's, so that none is too sharp for
products in float32 to rank it."""
LONGER = 8
"""How many times longer the first of two lists is."""
LARGE = 40_000
"""Components from which groups of rows choose a list first: below, one list for all rows loses less
in the same time."""
ELEMENTS = 1 << 22
"""Elements of the ranks of a few blocks, which are computed at a time."""
NEAR = 1 << 19
"""Elements of a few components, whose coefficients are computed at a time."""


class Screen(NamedTuple):
    """What ranks the components, and what their exact evaluation needs beside the parameters.

    All are of length 0 where nothing is screened.
    """

    origin: Tensor
    """(d,), subtracted from rows."""
    directions: Tensor
    """W, (d, p)."""
    variances: Tensor
    """(p,), those of z over the mixture."""
    table: Tensor
    """(K, F): the coefficients of ``log N(z; W' mu_k, W' Sigma_k W)`` for ``phi(z)``."""
    constant: Tensor
    """(K,), the terms of ``log p_k(x)`` that do not depend on x."""
    Gamma_mu: Tensor
    """(K, l), ``Gamma' mu``."""

    @classmethod
    def nothing(cls, like: Tensor) -> Screen:
        """Screen nothing."""
        none = like.new_zeros(0)
        square = none.view(0, 0)
        return cls(none, square, none.clone(), square.clone(), none.clone(), square.clone())

    @property
    def active(self) -> bool:
        """Whether anything is screened."""
        return len(self.table) > 0

    def resized(self, n: int) -> Screen:
        """Return a screen for n components: without the last ones, or with room for more."""
        tensors = (
            torch.cat([t, t.new_zeros(max(0, n - len(t)), *t.shape[1:])])[:n] for t in self[3:]
        )
        return Screen(*self[:3], *tensors)


class Shortlists(NamedTuple):
    """Rows in blocks, and the components that each block evaluates."""

    rows: Tensor
    """(n, m) numbers of rows; those of B and above are there to fill the last ones only."""
    components: Tensor
    """(n, C) numbers of components, rising."""


class Block(NamedTuple):
    """Rows that are near each other, and what their components say of them."""

    place: slice
    """Where the rows lie in the sorted batch."""
    components: Tensor
    """(C,)."""
    joint: Tensor
    """``log pi_k + log p_k(x)``, (m, C)."""
    Y: Tensor
    """``Gamma_k' (x - mu_k)``, (m, C, l)."""


def table_size(n_features: int) -> int:
    """Return F, the numbers that a screen has for each component."""
    p = min(N_DIRECTIONS, n_features)
    return (p + 1) * (p + 2) // 2


def directions(
    parameters: Parameters, start: Tensor | None = None, iterations: int = 8
) -> tuple[Tensor, Tensor]:
    """Find the mean of the mixture, (d,), and the directions W, (d, p), in which it varies most.

    Variance counts in units of the mean noise of each feature, ``s``: W is ``s^-1`` times the first
    eigenvectors of ``s^-1 Cov s^-1``, by a subspace iteration from ``start``, an earlier W.
    """
    _, mu, E, Gamma, M = parameters
    K, d, l = parameters.shape
    pi, p = parameters.log_weights.exp(), min(N_DIRECTIONS, d)
    noise = pi @ E.reciprocal()
    scale = noise.sqrt().unsqueeze(1)
    origin = pi @ mu
    if start is None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(d, p, generator=generator).to(mu) / scale
    W = torch.linalg.qr(start * scale).Q / scale
    rows = factor_rows(Gamma)
    # Lambda = E^-1 Gamma M^(-1/2); pi is spread over its columns.
    strength = (pi.unsqueeze(1) / M).view(K * l, 1)
    for _ in range(iterations):
        centred = mu @ W - origin @ W
        product = noise.unsqueeze(1) * W
        product += mu.mT @ (pi.unsqueeze(1) * centred)
        product -= torch.outer(origin, pi @ centred)
        if l:
            product += _factor_product(rows, E, strength, W, l)
        W = torch.linalg.qr(product / scale).Q / scale
    # Row by row, as a file has it: the same numbers in another layout would round differently.
    return origin, W.contiguous()


def _factor_product(rows: Tensor, E: Tensor, strength: Tensor, W: Tensor, l: int) -> Tensor:
    """Compute ``sum_k pi_k Lambda_k Lambda_k' W``, (d, p), a part of the components at a time."""
    total, size = torch.zeros_like(W), max(1, ELEMENTS // (l * len(W)))
    for first in range(0, len(E), size):
        part = slice(first * l, (first + size) * l)
        Lambda = rows[part] / E[first : first + size].repeat_interleave(l, dim=0)
        total += Lambda.mT @ (strength[part] * (Lambda @ W))
    return total


def screen_of(parameters: Parameters, start: Tensor | None = None, iterations: int = 8) -> Screen:
    """Make the screen of a mixture, with the directions that suit it."""
    K, d, l = parameters.shape
    origin, W = directions(parameters, start, iterations)
    new, size = parameters.means.new_empty, table_size(d)
    variances = _total_variances(origin, W, parameters)
    screen = Screen(origin, W, variances, new(K, size), new(K), new(K, l))
    follow(screen, parameters)
    return screen


def follow(screen: Screen, parameters: Parameters, index: Tensor | None = None) -> None:
    """Let a screen follow the parameters of its components, or of those in ``index`` (n,)."""
    K, d, l = parameters.shape
    numbers = torch.arange(K, device=screen.table.device) if index is None else index
    for part in torch.split(numbers, max(1, NEAR // (d * (l + 1)))):
        some = Parameters(*(t[part] for t in parameters))
        screen.table[part] = _coefficients(screen, some)
        screen.constant[part], screen.Gamma_mu[part] = _exact_terms(some)


def _total_variances(origin: Tensor, W: Tensor, parameters: Parameters) -> Tensor:
    """Estimate the variances of z over the mixture, (p,), by its means and its mean noise."""
    pi = parameters.log_weights.exp()
    z = (parameters.means - origin) @ W
    noise = pi @ parameters.precision_diag.reciprocal()
    return pi @ z.square() + noise @ W.square()


def _exact_terms(some: Parameters) -> tuple[Tensor, Tensor]:
    """Compute the terms of ``log p_k(x)`` without x, (n,), and ``Gamma' mu``, (n, l)."""
    _, mu, E, Gamma, M = some
    constant = torch.addcmul(E.log(), E * mu, mu, value=-1).sum(dim=1) + M.log().sum(dim=1)
    constant = 0.5 * constant - 0.5 * mu.shape[1] * math.log(2 * math.pi)
    return constant, torch.bmm(mu.unsqueeze(1), Gamma).squeeze(1)


def _coefficients(screen: Screen, some: Parameters) -> Tensor:
    """Compute the coefficients of ``log N(z; W' mu, W' Sigma W)`` for ``phi(z)``, (n, F)."""
    W = screen.directions
    _, mu, E, Gamma, M = some
    (d, p), l, dtype = W.shape, M.shape[1], precise_dtype(W.device)
    D = E.reciprocal()
    i, j = torch.triu_indices(p, p, device=W.device)
    upper = (D @ (W[:, i] * W[:, j])).to(dtype)
    covariance = upper.new_zeros(len(mu), p, p)
    covariance[:, i, j] = upper
    covariance[:, j, i] = upper
    # Lambda is E^-1 Gamma M^(-1/2).
    z = ((Gamma.mT * D.unsqueeze(1)).reshape(-1, d) @ W).view(len(mu), l, p)
    z = (z * M.rsqrt().unsqueeze(-1)).to(dtype)
    covariance = torch.baddbmm(covariance, z.mT, z)
    covariance.diagonal(dim1=1, dim2=2).add_(RIDGE * screen.variances.to(dtype))
    L, _ = torch.linalg.cholesky_ex(covariance)
    precision = torch.cholesky_inverse(L)
    mean = (mu @ W - screen.origin @ W).to(dtype).unsqueeze(-1)
    linear = precision @ mean
    level = -0.5 * (mean * linear).sum(dim=(1, 2)) - L.diagonal(dim1=1, dim2=2).log().sum(dim=1)
    twice = torch.where(i == j, -0.5, -1.0).to(precision)
    parts = [precision[:, i, j] * twice, linear.squeeze(-1), level.unsqueeze(1)]
    return torch.cat(parts, dim=1).to(mu.dtype)


def _products(z: Tensor) -> Tensor:
    """Compute ``phi(z)``: the products of any two coordinates, these themselves, and one."""
    i, j = torch.triu_indices(z.shape[1], z.shape[1], device=z.device)
    return torch.cat([z[:, i] * z[:, j], z, z.new_ones(len(z), 1)], dim=1)


def shortlists(x: Tensor, screen: Screen, log_weights: Tensor, n_candidates: int) -> Shortlists:
    """Sort rows x (B, d) into blocks and choose the components that each block evaluates."""
    z = (x - screen.origin) @ screen.directions
    groups = _tree(z)
    real, phi = groups.clamp(max=len(x) - 1), _products(z)
    K, (n_groups, size) = len(screen.table), groups.shape
    n, C = max(1, n_groups // BLOCK_GROUPS), min(n_candidates, K)
    rows = real.view(n, -1)
    if K >= LARGE and LONGER * C < K and n_groups > 1:
        means = phi[real.view(-1)].view(n, -1, size, phi.shape[1]).mean(dim=2)
        longer = _best(means, screen.table, log_weights, LONGER * C)
        chosen = _best_of(phi, rows, longer, screen.table, log_weights, C)
    else:
        chosen = _best(phi[rows.view(-1)].view(*rows.shape, -1), screen.table, log_weights, C)
    return Shortlists(groups.view(n, -1), chosen.sort(dim=1).values)


def _best(phi: Tensor, table: Tensor, log_weights: Tensor, C: int) -> Tensor:
    """Choose for blocks of features (n, m, F) the C components that fall behind least, (n, C)."""
    m, F = phi.shape[1:]
    found = []
    for part in torch.split(phi, max(1, ELEMENTS // (m * len(table)))):
        ranks = torch.addmm(log_weights, part.reshape(-1, F), table.mT).view(len(part), m, -1)
        found.append(_least_behind(ranks, C))
    return torch.cat(found)


def _best_of(
    phi: Tensor, rows: Tensor, lists: Tensor, table: Tensor, log_weights: Tensor, C: int
) -> Tensor:
    """Choose C components of the lists (n, C') of blocks of rows (n, m), (n, C)."""
    found, size = [], max(1, ELEMENTS // (lists.shape[1] * table.shape[1]))
    for members, some in zip(torch.split(rows, size), torch.split(lists, size), strict=True):
        few = torch.baddbmm(log_weights[some].unsqueeze(1), phi[members], table[some].mT)
        found.append(some.gather(1, _least_behind(few, C)))
    return torch.cat(found)


def _least_behind(ranks: Tensor, C: int) -> Tensor:
    """Choose the C components that fall behind the best of a row by least, for ranks (n, m, K)."""
    behind = ranks.sub_(ranks.amax(dim=2, keepdim=True)).amax(dim=1)
    return behind.topk(C, dim=1, sorted=False).indices


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

    There are ``parts * 2**levels`` groups, a multiple of ``BLOCK_GROUPS``; few rows are one group.
    """
    best, lowest = (1, 0, n_rows), math.inf
    if n_rows < 2 * BLOCK_GROUPS:
        return best
    first = int(math.log2(BLOCK_GROUPS))
    for size in next(sizes for rows, sizes in GROUP_ROWS.items() if n_rows >= rows):
        for parts in range(1, 16):
            levels = max(first, math.ceil(math.log2(n_rows / (size * parts))))
            # Many parts across one direction are thin.
            cost = parts * 2**levels * size * (1 + 0.005 * parts)
            if cost < lowest:
                best, lowest = (parts, levels, size), cost
    return best


def blocks(
    x: Tensor,
    squares: Tensor,
    parameters: Parameters,
    screen: Screen,
    log_weights: Tensor,
    lists: Shortlists,
    work: Workspace | None = None,
) -> Iterator[Block]:
    """Evaluate every block of the sorted rows x and their squares, both (n * m, d), exactly.

    What a block holds is valid until the next one if there is a workspace.
    """
    m = lists.rows.shape[1]
    for i, components in enumerate(lists.components.unbind()):
        place = slice(i * m, (i + 1) * m)
        ops = _some_operands(parameters, screen, log_weights, components, work)
        joint, Y = project(x[place], ops, squares[place], work)
        yield Block(place, components, joint, Y)


def _some_operands(
    parameters: Parameters,
    screen: Screen,
    log_weights: Tensor,
    index: Tensor,
    work: Workspace | None,
) -> Operands:
    """Gather operands of some components (C,), for which ``project`` gives ``log pi + log p``."""
    _, mu, E, Gamma, M = parameters
    (_, d, l), C = parameters.shape, len(index)
    some_E = torch.index_select(E, 0, index, out=kept(work, "some E", E, C, d))
    some_mu = torch.index_select(mu, 0, index, out=kept(work, "some E mu", E, C, d))
    rows = Gamma.mT.reshape(len(E), l * d)
    some_Gamma = torch.index_select(rows, 0, index, out=kept(work, "some Gamma", E, C, l * d))
    E_mu = torch.mul(some_mu, some_E, out=None if work is None else some_mu)
    weights = log_weights[index]
    return Operands(
        None,
        some_E,
        E_mu,
        some_Gamma.view(C * l, d),
        screen.Gamma_mu[index].view(C * l),
        screen.constant[index] + weights,
        weights,
        M[index],
    )
