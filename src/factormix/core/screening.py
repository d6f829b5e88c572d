"""A cheap screen that ranks very many components, so that only a few are evaluated for each row.

The marginal of the mixture on p directions is a Gaussian mixture with means ``W' mu_k`` and
covariances ``W' Sigma_k W``. Its log-densities are linear in the products ``phi(z)`` of the
coordinates ``z = W' (x - origin)``. So one matrix product with a table (K, F),
``F = (p + 1)(p + 2) / 2``, ranks all components for all rows. The directions are the ones in which
the mixture varies most compared with the noise of its components. They follow from its parameters,
without rows.

The rows of a batch are sorted by a tree into blocks of rows that are near each other in the
coordinates of the screen. Each block evaluates the components that its rows rank highest, by
ordinary dense products. A component is ranked for a block by how little it falls behind the best
component of some row, so the first component of each row is always included. Some blocks lie where
many components are near. Blocks whose last candidates still rank high get more candidates, which
loses far less than the same number for every block. All shapes follow from the sizes alone, so
nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import (
    BLOCK_ELEMENTS,
    CACHE_ELEMENTS,
    Workspace,
    reuse,
    slice_rows,
)
from factormix.core.density import (
    LEAST_RATIO,
    Operands,
    log_prob,
    operands,
    project,
    squared,
    terms_without_rows,
)
from factormix.core.parameters import Parameters, factor_rows, precise_dtype

N_DIRECTIONS = 16
"""Largest number of directions of a screen (``benchmarks/many.py``, method.md section 9: on
FashionMNIST 16 directions lose 0.7 of 969 nats at 64 candidates)."""
RIDGE = 1e-5
"""Share of the mixture's variance that is added to the variance of each component, so that none is
too sharp for float32 products to rank it."""
QUERY_ROWS = 4096
"""Rows that are searched at a time outside of training: twice as many as the largest layout needs
for near rows to share a block."""
LAYOUTS = {2048: (16, (3, 4, 5, 6)), 512: (16, (2, 3)), 128: (8, (1, 2)), 0: (8, (1,))}
"""From a number of rows of a batch on: groups of a block, and the sizes that a group may have. Of
these, the size that leaves the fewest places over is taken. Larger blocks read the parameters of
their candidates less often, but where rows are few, the rows of a block are far apart and share few
candidates (``benchmarks/many.py``)."""
UNEQUAL = 5.5
"""Ratio of the most to the fewest candidates of a block, where components are many enough
(``benchmarks/many.py``)."""


class Screen(NamedTuple):
    """The table that ranks components, and constants of their exact evaluation.

    All tensors have length 0 where nothing is screened.
    """

    origin: Tensor
    """(d,), subtracted from rows."""
    directions: Tensor
    """W, (d, p)."""
    variances: Tensor
    """(p,), variances of z over the mixture."""
    table: Tensor
    """(K, F): the coefficients of ``log N(z; W' mu_k, W' Sigma_k W)`` for ``phi(z)``."""
    constant: Tensor
    """(K,), the terms of ``log p_k(x)`` that do not depend on x."""
    Gamma_mu: Tensor
    """(K, l), ``Gamma' mu``."""

    @classmethod
    def empty(cls, like: Tensor) -> Screen:
        """Return a screen of nothing."""
        none = like.new_zeros(0)
        square = none.view(0, 0)
        return cls(none, square, none.clone(), square.clone(), none.clone(), square.clone())

    @property
    def active(self) -> bool:
        """Whether anything is screened."""
        return len(self.table) > 0

    def coordinates(self, x: Tensor) -> Tensor:
        """Compute ``z = W' (x - origin)`` of rows x (B, d), (B, p)."""
        # Subtracted afterwards, because another array of the size of the rows costs more than z.
        return x @ self.directions - self.origin @ self.directions

    def resize(self, n: int) -> Screen:
        """Return a screen for n components: without the last ones, or with room for more."""
        tensors = (
            torch.cat([t, t.new_zeros(max(0, n - len(t)), *t.shape[1:])])[:n] for t in self[3:]
        )
        return Screen(*self[:3], *tensors)


def table_size(n_features: int) -> int:
    """Return F, the numbers of a screen for each component."""
    p = min(N_DIRECTIONS, n_features)
    return (p + 1) * (p + 2) // 2


def make_screen(
    parameters: Parameters,
    start: Tensor | None = None,
    iterations: int = 8,
    *,
    ridge: float = RIDGE,
) -> Screen:
    """Make the screen of a mixture, with directions that suit it; ``start`` is an earlier W."""
    K, d, l = parameters.shape
    origin, W = find_directions(parameters, start, iterations)
    new, variances = parameters.means.new_empty, _total_variances(origin, W, parameters)
    screen = Screen(origin, W, variances, new(K, table_size(d)), new(K), new(K, l))
    update_screen_(screen, parameters, ridge=ridge)
    return screen


def update_screen_(
    screen: Screen, parameters: Parameters, index: Tensor | None = None, *, ridge: float = RIDGE
) -> None:
    """Update a screen in place to the parameters of its components, or of ``index`` (n,)."""
    K, d, l = parameters.shape
    numbers = torch.arange(K, device=screen.table.device) if index is None else index
    for part in torch.split(numbers, max(1, CACHE_ELEMENTS // (d * (l + 1)))):
        some = parameters.take(part)
        screen.table[part] = _coefficients(screen, some, ridge)
        _, mu, E, Gamma, M = some
        terms = terms_without_rows(mu, E, Gamma, M.log().sum(dim=1))
        screen.Gamma_mu[part], screen.constant[part] = terms[1:]


def find_directions(
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
    total = torch.zeros_like(W)
    for part in slice_rows(len(E), BLOCK_ELEMENTS // (l * len(W))):
        factors = slice(part.start * l, part.stop * l)
        Lambda = rows[factors] / E[part].repeat_interleave(l, dim=0)
        total += Lambda.mT @ (strength[factors] * (Lambda @ W))
    return total


def _total_variances(origin: Tensor, W: Tensor, parameters: Parameters) -> Tensor:
    """Estimate the variances of z over the mixture, (p,), by its means and its mean noise."""
    pi = parameters.log_weights.exp()
    z = (parameters.means - origin) @ W
    noise = pi @ parameters.precision_diag.reciprocal()
    return pi @ z.square() + noise @ W.square()


def _coefficients(screen: Screen, some: Parameters, ridge: float) -> Tensor:
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
    covariance.diagonal(dim1=1, dim2=2).add_(ridge * screen.variances.to(dtype))
    mean = (mu @ W - screen.origin @ W).to(dtype).unsqueeze(-1)
    L, _ = torch.linalg.cholesky_ex(covariance)
    precision = torch.cholesky_inverse(L)
    linear = precision @ mean
    level = -0.5 * (mean * linear).sum(dim=(1, 2)) - L.diagonal(dim1=1, dim2=2).log().sum(dim=1)
    twice = torch.where(i == j, -0.5, -1.0).to(precision)
    parts = [precision[:, i, j] * twice, linear.squeeze(-1), level.unsqueeze(1)]
    return torch.cat(parts, dim=1).to(mu.dtype)


def coordinate_products(z: Tensor) -> Tensor:
    """Compute ``phi(z)``: the products of two coordinates, the coordinates, and one."""
    i, j = torch.triu_indices(z.shape[1], z.shape[1], device=z.device)
    return torch.cat([z[:, i] * z[:, j], z, z.new_ones(len(z), 1)], dim=1)


class Shortlists(NamedTuple):
    """Rows in blocks, and the components that each block evaluates."""

    rows: Tensor
    """(n, m) numbers of rows; numbers of B and above only fill the last places."""
    components: list[Tensor]
    """(C_i,) rising numbers of components for each block, C of them on average."""


def make_shortlists(
    x: Tensor,
    screen: Screen,
    log_weights: Tensor,
    n_candidates: int,
    *,
    unequal: float = UNEQUAL,
) -> Shortlists:
    """Sort rows x (B, d) into blocks and choose the components that each block evaluates."""
    z = screen.coordinates(x)
    groups = _sort_into_groups(z)
    real, phi = groups.clamp(max=len(x) - 1), coordinate_products(z)
    K = len(screen.table)
    n, C = max(1, len(groups) // _block_layout(len(x))[0]), min(n_candidates, K)
    rows, counts = real.view(n, -1), _candidates_per_block(n, C, K, unequal)
    ranks, chosen = _rank_components(phi, rows, screen.table, log_weights, counts[-1])
    # The higher the last candidate of an average list still ranks, the longer the block's list.
    order = ranks[:, C - 1].argsort(stable=True)
    ordered = zip(chosen[order].unbind(), counts, strict=True)
    return Shortlists(groups.view(n, -1)[order], [some[:c].sort().values for some, c in ordered])


def _candidates_per_block(n: int, C: int, K: int, unequal: float) -> list[int]:
    """Return the number of components, of K, for each of n blocks, rising, C on average."""
    # The square, so that the block with the most gets no more than there are.
    unequal = min(unequal, (K / C) ** 2)
    shares = [unequal ** ((i + 0.5) / n) for i in range(n)]
    return [min(K, max(1, round(C * n * share / sum(shares)))) for share in shares]


def _rank_components(
    phi: Tensor, rows: Tensor, table: Tensor, log_weights: Tensor, C: int
) -> tuple[Tensor, Tensor]:
    """Choose C components for each block of rows (n, m), by their products phi (B, F).

    Return by how little they fall behind the best of a row, and their numbers, the best first,
    both (n, C).
    """
    # The weights join the coefficient of the last feature, which is one: adding them to each rank
    # would be another pass through memory.
    columns = torch.cat([table[:, :-1], (table[:, -1] + log_weights).unsqueeze(1)], dim=1).mT
    found, m = [], rows.shape[1]
    for part in torch.split(rows, max(1, BLOCK_ELEMENTS // (m * len(table)))):
        ranks = (phi[part.reshape(-1)] @ columns).view(len(part), m, -1)
        behind = ranks.sub_(ranks.amax(dim=2, keepdim=True)).amax(dim=1)
        found.append(behind.topk(C, dim=1))
    ranks_, numbers = zip(*found, strict=True)
    return torch.cat(ranks_), torch.cat(numbers)


def _sort_into_groups(z: Tensor) -> Tensor:
    """Sort rows z (B, p) into groups of a few near rows, (n, m), near groups side by side.

    Each node of the tree is cut into equal parts across the direction in which its rows vary most.
    Numbers of B and above fill the last places.
    """
    parts, levels, size = _choose_layout(len(z))
    n = parts * 2**levels * size
    nodes = torch.arange(n, device=z.device).view(1, n)
    # Filled places lie where the last row does.
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


def _choose_layout(n_rows: int) -> tuple[int, int, int]:
    """Choose the first cut, the levels of halving and the rows of a group.

    There are ``parts * 2**levels`` groups, a multiple of the groups of a block. Few rows are one
    group.
    """
    best, lowest = (1, 0, n_rows), math.inf
    block_groups, sizes = _block_layout(n_rows)
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


def _block_layout(n_rows: int) -> tuple[int, tuple[int, ...]]:
    """Return the groups of a block and the possible sizes of a group, for a batch of n rows."""
    return next(found for rows, found in LAYOUTS.items() if n_rows >= rows)


class SortedRows(NamedTuple):
    """The rows of a batch in the order of their blocks."""

    lists: Shortlists
    order: Tensor
    """(n * m,) numbers of the rows; the last row again in filled places."""
    real: Tensor
    """(n * m,), false for filled places."""
    x: Tensor
    """(n * m, d)."""
    squares: Tensor
    """(n * m, d)."""

    def weigh(self, weights: Tensor | None) -> Tensor:
        """Return the weights of the sorted rows, zero for filled places."""
        used = self.real.to(self.x.dtype)
        if weights is not None:
            used *= weights[self.order]
        return used

    def restore_order(self, values: Tensor, n_rows: int) -> Tensor:
        """Bring values of the sorted rows, (n * m, ...), into the order of the batch, (B, ...)."""
        whole = torch.empty_like(values)
        # Each row has a number of its own, and filled places have the last ones.
        return whole.index_copy_(0, self.lists.rows.view(-1), values)[:n_rows]


class Block(NamedTuple):
    """Rows that are near each other, evaluated against their candidates."""

    place: slice
    """Of the rows among the sorted ones."""
    components: Tensor | None
    """(C,) numbers of the components; None for all of them."""
    joint: Tensor
    """``log pi_k + log p_k(x)``, (m, C)."""
    Y: Tensor
    """``Gamma_k' (x - mu_k)``, (m, C, l)."""

    def select(self, values: Tensor | None) -> Tensor | None:
        """Select the block's components, (C,), from the values of all components (K,), if any."""
        return values if values is None or self.components is None else values[self.components]


class BestComponents(NamedTuple):
    """The result of a search for each row."""

    log_prob: Tensor
    """``log p(x)`` by the evaluated components, (B,)."""
    component: Tensor
    """The most probable component, (B,)."""
    Y: Tensor
    """``Gamma_k' (x - mu_k)`` of that component, (B, l)."""


class CandidateSearch(NamedTuple):
    """A screen, and the number of components that it selects for each row on average."""

    screen: Screen
    n_candidates: int
    gathered_elements: int = 2 * BLOCK_ELEMENTS
    """Elements of candidates whose parameters are gathered at a time."""
    probe_elements: int = BLOCK_ELEMENTS
    """Elements of means by which probes are evaluated at a time."""

    def find_best(
        self, x: Tensor, parameters: Parameters, work: Workspace | None = None
    ) -> BestComponents:
        """Evaluate the candidates of rows x (B, d)."""
        l, parts = parameters.shape[2], list[BestComponents]()
        rows = self.sort_rows(x, parameters.log_weights, work)
        for block in self.evaluate(rows, parameters, parameters.log_weights, work):
            joint, Y, numbers = block.joint, block.Y, block.components
            assert numbers is not None
            best, which = joint.max(dim=1)
            # As ``log_normaliser``, but nothing else needs the joint or the shares.
            shares = joint.sub_(best.unsqueeze(1)).clamp_(min=math.log(LEAST_RATIO)).exp_()
            parts.append(
                BestComponents(
                    shares.sum(dim=1).log_().add_(best),
                    torch.index_select(numbers, 0, which),
                    Y.gather(1, which.view(-1, 1, 1).expand(-1, 1, l)).squeeze(1),
                )
            )
        return BestComponents(
            *(rows.restore_order(torch.cat(t), len(x)) for t in zip(*parts, strict=True))
        )

    def compare_without(
        self, x: Tensor, parameters: Parameters, removed: Tensor, work: Workspace | None = None
    ) -> Tensor:
        """Compute ``log p(x)`` with and without the components in ``removed`` (K,), (B, 2).

        The second is minus infinity where no other component was evaluated.
        """
        log_weights, whole = parameters.log_weights, list[Tensor]()
        # The rows may be far more than a batch: only arrays of components lie in the workspace.
        for part in torch.split(x, QUERY_ROWS):
            rows, found = self.sort_rows(part, log_weights), []
            for block in self.evaluate(rows, parameters, log_weights, work):
                without = block.joint.masked_fill(removed[block.components], -torch.inf)
                found.append(torch.stack([block.joint, without], dim=1).logsumexp(dim=2))
            whole.append(rows.restore_order(torch.cat(found), len(part)))
        return torch.cat(whole)

    def log_prob_of_all(self, x: Tensor, parameters: Parameters) -> Tensor:
        """Compute ``log p`` of rows (n, d) by all components, (n,), a part of them at a time."""
        K, d, _ = parameters.shape
        found = list[Tensor]()
        for part in slice_rows(K, self.probe_elements // d):
            some = parameters.take(part)
            ops = operands(some, centre=False, diagonal=True)
            # Weights are normalised among the components of a part.
            found.append(log_prob(x, ops) + some.logits.logsumexp(dim=0))
        return torch.stack(found).logsumexp(dim=0) - parameters.logits.logsumexp(dim=0)

    def sort_rows(
        self, x: Tensor, log_weights: Tensor, work: Workspace | None = None
    ) -> SortedRows:
        """Sort rows x (B, d) into blocks with candidates."""
        lists = make_shortlists(x, self.screen, log_weights, self.n_candidates)
        numbers = lists.rows.view(-1)
        order, real = numbers.clamp(max=len(x) - 1), numbers < len(x)
        out = reuse(work, "sorted", x, len(order), x.shape[1])
        rows = torch.index_select(x, 0, order, out=out)
        return SortedRows(lists, order, real, rows, squared(rows, work))

    def evaluate(
        self,
        rows: SortedRows,
        parameters: Parameters,
        log_weights: Tensor,
        work: Workspace | None = None,
        *,
        keep: bool = False,
    ) -> Iterator[Block]:
        """Evaluate every block of the sorted rows exactly, against its candidates.

        With a workspace, a block is valid until the next one, unless ``keep`` is set.
        """
        m, constant = rows.lists.rows.shape[1], self.screen.constant + log_weights
        (_, d, l), own = parameters.shape, None if keep else work
        size = max(1, self.gathered_elements // (d * (l + 2)))
        for i, components in enumerate(rows.lists.components):
            place, found = slice(i * m, (i + 1) * m), []
            for some in torch.split(components, size):
                ops = self._gather_operands(parameters, constant, log_weights, some, work)
                # Projections in the workspace are overwritten by the next part of the candidates.
                here = own if len(some) == len(components) else None
                found.append(project(rows.x[place], ops, rows.squares[place], here))
            joint, Y = found[0]
            if len(found) > 1:
                joint, Y = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
            yield Block(place, components, joint, Y)

    def _gather_operands(
        self,
        parameters: Parameters,
        constant: Tensor,
        log_weights: Tensor,
        index: Tensor,
        work: Workspace | None,
    ) -> Operands:
        """Gather operands of some components (C,), for which ``project`` gives joint densities."""
        _, mu, E, Gamma, M = parameters
        (_, d, l), C = parameters.shape, len(index)
        some_E = torch.index_select(E, 0, index, out=reuse(work, "some E", E, C, d))
        some_mu = torch.index_select(mu, 0, index, out=reuse(work, "some E mu", E, C, d))
        numbers = (index * l + torch.arange(l, device=index.device).unsqueeze(1)).view(-1)
        some_Gamma = torch.index_select(
            factor_rows(Gamma), 0, numbers, out=reuse(work, "some Gamma", E, l * C, d)
        )
        return Operands(
            offset=None,
            E=some_E,
            E_mu=torch.mul(some_mu, some_E, out=None if work is None else some_mu),
            Gamma=some_Gamma,
            Gamma_mu=torch.index_select(self.screen.Gamma_mu.reshape(-1), 0, numbers),
            constant=torch.index_select(constant, 0, index),
            log_weights=torch.index_select(log_weights, 0, index),
            latent_variances=torch.index_select(M, 0, index),
            by_factor=True,
        )
