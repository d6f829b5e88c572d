"""Few of many components: a cheap screen that ranks all of them, so that few are evaluated.

The marginal of the mixture on p directions is a Gaussian mixture of its own, with means
``W' mu_k`` and covariances ``W' Sigma_k W``. Its log-densities are linear in the products
``phi(z)`` of the coordinates ``z = W' (x - origin)``, so that one matrix product with a table
(K, F), ``F = (p + 1)(p + 2) / 2``, ranks all components for all rows.

The directions are those in which the mixture varies most compared with the noise of its
components. They follow from its parameters, without rows.

Rows in blocks of near ones, and the few of many components that each block evaluates.

The rows of a batch are sorted by a tree into blocks of rows that are near each other in the
coordinates of a screen, and every block evaluates the components that its rows rank highest, by
ordinary dense products. What a component is worth to a block is the least by which it falls behind
the best of one of the rows: the first of each row is always there.

Some blocks lie where many components are near, others where few are. So the blocks are sorted by
how much their last candidates would be worth, and the more that is, the more candidates they get,
which loses far less than the same number for all. All shapes follow from the sizes alone, so that
nothing waits for the device.

What a mixture of very many components says of a batch, by few components for each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import Workspace, kept
from factormix.core.density import log_prob, operands, squared
from factormix.core.expectation import Collected
from factormix.core.parameters import Parameters, factor_rows, precise_dtype
from factormix.core.statistics import Statistics

__all__ = [
    "Block",
    "Few",
    "Found",
    "Screen",
    "Shortlists",
    "blocks",
    "directions",
    "follow",
    "products",
    "screen_of",
    "screened_statistics",
    "shortlists",
    "sorted_rows",
    "table_size",
]

N_DIRECTIONS = 16
"""Most directions of a screen."""
RIDGE = 1e-5
"""Share of the mixture's variance that is added to each component's, so that none is too sharp for
products in float32 to rank it."""
LOADING_ELEMENTS = 1 << 22
"""Elements of the loadings of a few components, which are computed at a time."""
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

    def coordinates(self, x: Tensor) -> Tensor:
        """Compute ``z = W' (x - origin)`` of rows x (B, d), (B, p)."""
        # Subtracted afterwards, because another array of the rows' size costs more than z.
        return x @ self.directions - self.origin @ self.directions

    def resized(self, n: int) -> Screen:
        """Return a screen for n components: without the last ones, or with room for more."""
        tensors = (
            torch.cat([t, t.new_zeros(max(0, n - len(t)), *t.shape[1:])])[:n] for t in self[3:]
        )
        return Screen(*self[:3], *tensors)


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
    total, size = torch.zeros_like(W), max(1, LOADING_ELEMENTS // (l * len(W)))
    for first in range(0, len(E), size):
        part = slice(first * l, (first + size) * l)
        Lambda = rows[part] / E[first : first + size].repeat_interleave(l, dim=0)
        total += Lambda.mT @ (strength[part] * (Lambda @ W))
    return total


def screen_of(parameters: Parameters, start: Tensor | None = None, iterations: int = 8) -> Screen:
    """Make the screen of a mixture, with the directions that suit it."""
    K, d, l = parameters.shape
    origin, W = directions(parameters, start, iterations)
    new, variances = parameters.means.new_empty, _total_variances(origin, W, parameters)
    screen = Screen(origin, W, variances, new(K, table_size(d)), new(K), new(K, l))
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
    """Compute the rows of the table for some components, (n, F)."""
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
    mean = (mu @ W - screen.origin @ W).to(dtype).unsqueeze(-1)
    L, _ = torch.linalg.cholesky_ex(covariance)
    precision = torch.cholesky_inverse(L)
    linear = precision @ mean
    level = -0.5 * (mean * linear).sum(dim=(1, 2)) - L.diagonal(dim1=1, dim2=2).log().sum(dim=1)
    twice = torch.where(i == j, -0.5, -1.0).to(precision)
    parts = [precision[:, i, j] * twice, linear.squeeze(-1), level.unsqueeze(1)]
    return torch.cat(parts, dim=1).to(mu.dtype)


def products(z: Tensor) -> Tensor:
    """Compute ``phi(z)``: the products of any two coordinates, these themselves, and one."""
    i, j = torch.triu_indices(z.shape[1], z.shape[1], device=z.device)
    return torch.cat([z[:, i] * z[:, j], z, z.new_ones(len(z), 1)], dim=1)


LAYOUTS = {2048: (16, (3, 4, 5, 6)), 512: (16, (2, 3)), 128: (8, (1, 2)), 0: (8, (1,))}
"""Groups of a block, and rows that a group may have, from so many rows of a batch on; of these,
what leaves the fewest places over. Larger blocks read the parameters of their candidates
less often, but where rows are few, those of a block are far apart and share few candidates."""
UNEQUAL = 5.5
"""How many times more candidates the block with the most has than the one with the fewest, where
components are many enough."""
RANK_ELEMENTS = 1 << 22
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
    for part in torch.split(rows, max(1, RANK_ELEMENTS // (m * len(table)))):
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


ASKED = 4096
"""Rows at a time, where there may be any number of them."""
GATHERED = 1 << 23
"""Elements of a few components, whose parameters are gathered at a time."""
PROBED = 1 << 22
"""Elements of the means of a few components, by which rows in full are evaluated at a time."""


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


class Found(NamedTuple):
    """What the evaluated components say of each row."""

    log_prob: Tensor
    """``log p(x)`` without the components that were left out, (B,)."""
    component: Tensor
    """The most probable component, (B,)."""
    Y: Tensor
    """``Gamma_k' (x - mu_k)`` of that component, (B, l)."""


class Few(NamedTuple):
    """A screen, and how many components it lets through."""

    screen: Screen
    n_candidates: int

    def best(self, x: Tensor, parameters: Parameters, work: Workspace | None = None) -> Found:
        """Evaluate the components that the screen chooses, for rows x (B, d)."""
        l, parts = parameters.shape[2], list[Found]()
        lists = shortlists(x, self.screen, parameters.log_weights, self.n_candidates)
        for block in self._each(x, parameters, lists, work):
            joint, Y = block.joint, block.Y
            best, which = joint.max(dim=1)
            # As ``log_normaliser``, but nothing else needs the joint or the shares.
            shares = joint.sub_(best.unsqueeze(1)).clamp_(min=math.log(1e-30)).exp_()
            parts.append(
                Found(
                    shares.sum(dim=1).log_().add_(best),
                    torch.index_select(block.components, 0, which),
                    Y.gather(1, which.view(-1, 1, 1).expand(-1, 1, l)).squeeze(1),
                )
            )
        return Found(*(_in_order(torch.cat(t), lists, len(x)) for t in zip(*parts, strict=True)))

    def with_and_without(
        self, x: Tensor, parameters: Parameters, gone: Tensor, work: Workspace | None = None
    ) -> Tensor:
        """Compute ``log p(x)`` of rows x (B, d), and that without components, (B, 2).

        Those for which gone (K,) is true are left out; minus infinity where nothing else was
        looked at. Arrays of components lie in ``work``.
        """
        log_weights, whole = parameters.log_weights, list[Tensor]()
        # They may be far more than those of a batch: the workspace is for components alone.
        for part in torch.split(x, ASKED):
            lists, found = shortlists(part, self.screen, log_weights, self.n_candidates), []
            rows = part[sorted_rows(lists, len(part))[0]]
            squares = rows.square()
            for block in blocks(rows, squares, parameters, self.screen, log_weights, lists, work):
                without = block.joint.masked_fill(gone[block.components], -torch.inf)
                found.append(torch.stack([block.joint, without], dim=1).logsumexp(dim=2))
            whole.append(_in_order(torch.cat(found), lists, len(part)))
        return torch.cat(whole)

    def _each(
        self,
        x: Tensor,
        parameters: Parameters,
        lists: Shortlists,
        work: Workspace | None = None,
    ) -> Iterator[Block]:
        """Evaluate every block of rows x (B, d)."""
        order, _ = sorted_rows(lists, len(x))
        rows = torch.index_select(x, 0, order, out=kept(work, "sorted", x, len(order), x.shape[1]))
        squares, log_weights = squared(rows, work), parameters.log_weights
        return blocks(rows, squares, parameters, self.screen, log_weights, lists, work)


def _in_order(sorted_values: Tensor, lists: Shortlists, n_rows: int) -> Tensor:
    """Bring what blocks say of their rows, (n * m, ...), into the order of the batch, (B, ...)."""
    whole = torch.empty_like(sorted_values)
    # Each row has a number of its own, and those that fill blocks have the last ones.
    return whole.index_copy_(0, lists.rows.view(-1), sorted_values)[:n_rows]


def screened_statistics(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None = None,
    *,
    few: Few,
    candidates: Tensor | None = None,
    n_probes: int = 0,
    work: Workspace | None = None,
    finish: bool = True,
) -> Statistics:
    """Sum the expected statistics over a batch x (B, d), each row by the components of its block.

    As ``expected_statistics``, but for the components that the screen leaves out. ``n_probes`` rows
    are evaluated in full too, to tell what that costs.
    """
    log_weights, screen = parameters.log_weights, few.screen
    lists = shortlists(x, screen, log_weights, few.n_candidates)
    order, real = sorted_rows(lists, len(x))
    rows = torch.index_select(x, 0, order, out=kept(work, "sorted", x, len(order), x.shape[1]))
    squares = squared(rows, work)
    used = real.to(x.dtype)
    if weights is not None:
        used *= weights[order]
    collected = Collected(parameters, rows, squares, used, candidates)
    for block in blocks(rows, squares, parameters, screen, log_weights, lists, work):
        collected.add(block.place, block.joint, block.Y, block.components, work)
    statistics = collected.statistics(screen.Gamma_mu, finish=finish)
    missed = x.new_zeros(2)
    if n_probes:
        scores = torch.cat(collected.log_likelihoods)
        missed = _missed(rows, scores, used, parameters, n_probes)
    return statistics._replace(missed=missed)


def _missed(
    rows: Tensor, scores: Tensor, used: Tensor, parameters: Parameters, n_probes: int
) -> Tensor:
    """Evaluate a few of the sorted rows in full: what they lost, and their weight, (2,)."""
    step = max(1, len(rows) // n_probes)
    probes = slice(step // 2, None, step)
    full = _in_full(rows[probes], parameters)
    lost = (full - scores[probes]).clamp(min=0)
    return torch.stack([lost @ used[probes], used[probes].sum()])


def _in_full(rows: Tensor, parameters: Parameters) -> Tensor:
    """Compute ``log p`` of rows (n, d) by all components, (n,), a part of them at a time."""
    K, d, _ = parameters.shape
    found, size = list[Tensor](), max(1, PROBED // d)
    for first in range(0, K, size):
        some = Parameters(*(t[first : first + size] for t in parameters))
        ops = operands(some, centre=False, diagonal=True)
        # Weights are normalised among the components of a part.
        found.append(log_prob(rows, ops) + some.logits.logsumexp(dim=0))
    return torch.stack(found).logsumexp(dim=0) - parameters.logits.logsumexp(dim=0)


def sorted_rows(lists: Shortlists, n_rows: int) -> tuple[Tensor, Tensor]:
    """Return the rows of all blocks in one sequence, (n * m,), and which of them are real."""
    order = lists.rows.view(-1)
    return order.clamp(max=n_rows - 1), order < n_rows


def blocks(
    x: Tensor,
    squares: Tensor,
    parameters: Parameters,
    screen: Screen,
    log_weights: Tensor,
    lists: Shortlists,
    work: Workspace | None = None,
    *,
    keep: bool = False,
) -> Iterator[Block]:
    """Evaluate every block of the sorted rows x and their squares, both (n * m, d), exactly.

    What a block holds is valid until the next one if there is a workspace, unless it is to be kept.
    """
    m, constant = lists.rows.shape[1], screen.constant + log_weights
    (_, d, l), own = parameters.shape, None if keep else work
    size = max(1, GATHERED // (d * (l + 2)))
    for i, components in enumerate(lists.components):
        place, found = slice(i * m, (i + 1) * m), []
        for few in torch.split(components, size):
            some = _gathered(parameters, screen, constant, few, work)
            # What lies in the workspace does so until the next few are evaluated.
            here = own if len(few) == len(components) else None
            found.append(_evaluated(x[place], squares[place], some, here))
        joint, Y = found[0] if len(found) == 1 else map(_joined, zip(*found, strict=True))
        yield Block(place, components, joint, Y)


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """Join what some components say and what others say, along the axis of components."""
    return torch.cat(parts, dim=1)


class _Some(NamedTuple):
    """What rows are multiplied by for some components, as ``Operands``, each factor by itself."""

    E: Tensor
    """(C, d)."""
    E_mu: Tensor
    """(C, d)."""
    Gamma: Tensor
    """(l * C, d): the first factors of all, then the second ones."""
    Gamma_mu: Tensor
    """(l * C,)."""
    constant: Tensor
    """(C,)."""


def _gathered(
    parameters: Parameters,
    screen: Screen,
    constant: Tensor,
    index: Tensor,
    work: Workspace | None,
) -> _Some:
    """Gather what some components (C,) are evaluated by."""
    _, mu, E, Gamma, _ = parameters
    (_, d, l), C = parameters.shape, len(index)
    some_E = torch.index_select(E, 0, index, out=kept(work, "some E", E, C, d))
    some_mu = torch.index_select(mu, 0, index, out=kept(work, "some E mu", E, C, d))
    numbers = (index * l + torch.arange(l, device=index.device).unsqueeze(1)).view(-1)
    some_Gamma = torch.index_select(
        factor_rows(Gamma), 0, numbers, out=kept(work, "some Gamma", E, l * C, d)
    )
    return _Some(
        some_E,
        torch.mul(some_mu, some_E, out=None if work is None else some_mu),
        some_Gamma,
        torch.index_select(screen.Gamma_mu.reshape(-1), 0, numbers),
        torch.index_select(constant, 0, index),
    )


def _evaluated(
    x: Tensor, squares: Tensor, some: _Some, work: Workspace | None
) -> tuple[Tensor, Tensor]:
    """Compute ``log pi_k + log p_k(x)``, (m, C), and Y, (m, C, l), as ``density.project``."""
    m, C, l = len(x), len(some.E), len(some.Gamma) // len(some.E)
    joint = torch.addmm(some.constant, squares, some.E.mT, alpha=-0.5).addmm_(x, some.E_mu.mT)
    if l == 0:
        return joint, x.new_zeros(m, C, 0)
    Y = torch.addmm(
        some.Gamma_mu, x, some.Gamma.mT, beta=-1, out=kept(work, "Y", x, m, l * C)
    ).view(m, l, C)
    # Each factor lies by itself, so that these passes go through memory in its order.
    for y in Y.unbind(dim=1):
        joint.addcmul_(y, y, value=0.5)
    return joint, Y.mT
