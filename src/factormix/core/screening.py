"""A cheap screen that ranks very many components, so that only a few are evaluated for each row.

The marginal of the mixture on p directions is a Gaussian mixture with means ``W' mu_k`` and
covariances ``W' Sigma_k W``. Its log-densities are linear in the products ``phi(z)`` of the
coordinates ``z = W' (x - origin)``. So one matrix product with a table (K, F),
``F = (p + 1)(p + 2) / 2``, ranks all components for all rows. The directions are the ones in which
the mixture varies most compared with the noise of its components. They follow from its parameters,
without rows.

Each row is evaluated exactly against the C components that it ranks highest. The pairs of a row and
a component are sorted by component, so that the parameters of each are read once, and a sampled
matrix product computes the elements of these pairs alone.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import (
    BLOCK_ELEMENTS,
    CACHE_ELEMENTS,
    Workspace,
    reuse,
    slice_rows,
    symmetric_places,
    triangle_indices,
)
from factormix.core.density import (
    Operands,
    PackedProjections,
    log_normaliser,
    project,
    squared,
    terms_without_rows,
)
from factormix.core.parameters import Parameters, factor_rows, find_ranks, precise_dtype

N_DIRECTIONS = 16
"""Largest number of directions of a screen. On FashionMNIST (K = 1,600, l = 4), 32 candidates by 16
directions lost 0.4 of 969 nats in a prototype; no script repeats it."""
RIDGE = 1e-5
"""Share of the mixture's variance that is added to the variance of each component, so that none is
too sharp for float32 products to rank it."""


class Screen(NamedTuple):
    """The table that ranks components, and constants of their exact evaluation.

    All tensors but ``base`` have length 0 where nothing is screened.
    """

    origin: Tensor
    """(d,), subtracted from rows."""
    directions: Tensor
    """W, (d, p)."""
    variances: Tensor
    """(p,), variances of z over the mixture."""
    base: Tensor
    """Mean log-likelihood of one Gaussian of p factors for rows of the mixture, scalar."""
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
        base = like.new_zeros(())
        return cls(none, square, none.clone(), base, square.clone(), none.clone(), square.clone())

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
            torch.cat([t, t.new_zeros(max(0, n - len(t)), *t.shape[1:])])[:n] for t in self[4:]
        )
        return Screen(*self[:4], *tensors)


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
    new, base = parameters.means.new_empty, score_one_gaussian(parameters, W)
    variances = _total_variances(origin, W, parameters)
    screen = Screen(origin, W, variances, base, new(K, table_size(d)), new(K), new(K, l))
    update_screen_(screen, parameters, ridge=ridge)
    return screen


def update_screen_(
    screen: Screen, parameters: Parameters, index: Tensor | None = None, *, ridge: float = RIDGE
) -> None:
    """Update a screen in place to the parameters of its components, or of ``index`` (n,)."""
    (K, d, l), W = parameters.shape, screen.directions
    numbers = torch.arange(K, device=W.device) if index is None else index
    i, j = triangle_indices(W.shape[1], W.device)
    products = W[:, i] * W[:, j]
    for part in torch.split(numbers, max(1, CACHE_ELEMENTS // (d * (l + 1)))):
        some = parameters.take(part)
        screen.table[part] = _coefficients(screen, some, products, ridge)
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
    pi, d = parameters.log_weights.exp(), parameters.shape[1]
    scale = (pi @ parameters.precision_diag.reciprocal()).sqrt().unsqueeze(1)
    if start is None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(d, min(N_DIRECTIONS, d), generator=generator).to(pi) / scale
    W = torch.linalg.qr(start * scale).Q / scale
    for _ in range(iterations):
        W = torch.linalg.qr(_multiply_covariance(parameters, W)[0] / scale).Q / scale
    # Row by row, as a file has it: the same numbers in another layout would round differently.
    return pi @ parameters.means, W.contiguous()


def score_one_gaussian(parameters: Parameters, W: Tensor) -> Tensor:
    """Compute the mean log-likelihood of one Gaussian for rows of the mixture, scalar.

    Its covariance ``S = F'F + rest`` has the variances of the mixture, Cov, and
    ``F'F = Cov W (W' Cov W)^-1 W' Cov``, with W (d, p). The mean is
    ``-1/2 [d log 2pi + log |S| + tr(S^-1 Cov)]``.
    """
    (d, p), dtype = W.shape, precise_dtype(W.device)
    product, variances = (t.to(dtype) for t in _multiply_covariance(parameters, W))
    L, _ = torch.linalg.cholesky_ex(W.to(dtype).mT @ product)
    F = torch.linalg.solve_triangular(L, product.mT, upper=False)
    rest = (variances - F.square().sum(dim=0)).clamp(min=1e-6 * variances)
    scaled = (F / rest).mT
    inner = torch.eye(p, dtype=dtype, device=W.device) + F @ scaled
    spread = scaled.mT @ _multiply_covariance(parameters, scaled.to(W.dtype))[0].to(dtype)
    trace = (variances / rest).sum() - torch.linalg.solve(inner, spread).trace()
    twice = d * math.log(2 * math.pi) + rest.log().sum() + torch.logdet(inner) + trace
    base: Tensor = -0.5 * twice.to(W.dtype)
    return base


def _multiply_covariance(parameters: Parameters, W: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``Cov W``, (d, p), and the diagonal of Cov, (d,), of the covariance of the mixture.

    A part of the components at a time.
    """
    _, mu, E, Gamma, M = parameters
    (K, d, l), pi = parameters.shape, parameters.log_weights.exp()
    rows, origin, noise = factor_rows(Gamma), pi @ mu, pi @ E.reciprocal()
    centred = mu @ W - origin @ W
    product = noise.unsqueeze(1) * W + mu.mT @ (pi.unsqueeze(1) * centred)
    product -= torch.outer(origin, pi @ centred)
    variances = noise + pi @ mu.square() - origin.square()
    # Lambda = E^-1 Gamma M^(-1/2); pi is spread over its columns.
    strength = (pi.unsqueeze(1) / M).view(K * l)
    for part in slice_rows(K, CACHE_ELEMENTS // max(1, l * d)) if l else ():
        some = slice(part.start * l, part.stop * l)
        Lambda = rows[some] / E[part].repeat_interleave(l, dim=0)
        product += Lambda.mT @ (strength[some].unsqueeze(1) * (Lambda @ W))
        variances += strength[some] @ Lambda.square_()
    return product, variances


def _total_variances(origin: Tensor, W: Tensor, parameters: Parameters) -> Tensor:
    """Estimate the variances of z over the mixture, (p,), by its means and its mean noise."""
    pi = parameters.log_weights.exp()
    z = (parameters.means - origin) @ W
    noise = pi @ parameters.precision_diag.reciprocal()
    return pi @ z.square() + noise @ W.square()


def _coefficients(screen: Screen, some: Parameters, products: Tensor, ridge: float) -> Tensor:
    """Compute the rows of the table for some components, (n, F).

    ``products`` has the products of pairs of directions, (d, p (p + 1) / 2).
    """
    W = screen.directions
    _, mu, E, Gamma, M = some
    (n, d, l), p, dtype = some.shape, W.shape[1], precise_dtype(W.device)
    D = E.reciprocal()
    # Lambda is E^-1 Gamma M^(-1/2).
    z = ((factor_rows(Gamma).view(n, l, d) * D.unsqueeze(1)).view(n * l, d) @ W).view(n, l, p)
    z = (z * M.rsqrt().unsqueeze(-1)).to(dtype)
    upper = (D @ products).to(dtype)
    covariance = upper.index_select(1, symmetric_places(p, W.device)).view(n, p, p)
    covariance = covariance.baddbmm_(z.mT, z)
    covariance.diagonal(dim1=1, dim2=2).add_(ridge * screen.variances.to(dtype))
    mean = (mu @ W - screen.origin @ W).to(dtype).unsqueeze(-1)
    L, _ = torch.linalg.cholesky_ex(covariance)
    precision = torch.cholesky_inverse(L)
    linear = precision @ mean
    level = -0.5 * (mean * linear).sum(dim=(1, 2)) - L.diagonal(dim1=1, dim2=2).log().sum(dim=1)
    i, j = triangle_indices(p, W.device)
    # z_i z_j and z_j z_i are one product.
    factor = torch.where(i == j, -0.5, -1.0).to(precision)
    parts = [precision[:, i, j] * factor, linear.squeeze(-1), level.unsqueeze(1)]
    return torch.cat(parts, dim=1).to(mu.dtype)


def coordinate_products(z: Tensor) -> Tensor:
    """Compute ``phi(z)``: the products of two coordinates, the coordinates, and one."""
    i, j = triangle_indices(z.shape[1], z.device)
    return torch.cat([z[:, i] * z[:, j], z, z.new_ones(len(z), 1)], dim=1)


class Block(NamedTuple):
    """Rows with the components that they were evaluated against."""

    place: slice
    """Of the rows in the batch."""
    components: Tensor | None
    """(m, C) numbers of the components; None for all of them."""
    joint: Tensor
    """``log pi_k + log p_k(x)``, (m, C)."""
    Y: Tensor | PackedProjections
    """``Gamma_k' (x - mu_k)``, (m, C, l), or without factors that are zero."""


class BestComponents(NamedTuple):
    """The result of a search for each row."""

    log_prob: Tensor
    """``log p(x)`` by the evaluated components, (B,)."""
    component: Tensor
    """The most probable component, (B,)."""
    Y: Tensor
    """``Gamma_k' (x - mu_k)`` of that component, (B, l)."""


class CandidateSearch(NamedTuple):
    """A screen, and the number of components that it selects for each row."""

    screen: Screen
    n_candidates: int
    counts: tuple[int, ...] = ()
    """Numbers of candidates whose loss probes estimate; empty for ``n_candidates`` alone."""
    rank_elements: int = BLOCK_ELEMENTS
    """Elements of ranks of rows and all components at a time."""
    pair_elements: int = BLOCK_ELEMENTS
    """Elements of log-densities and projections of pairs at a time."""
    part_elements: int = CACHE_ELEMENTS
    """Elements of means of the components that are evaluated at a time."""

    def find_best(
        self, x: Tensor, parameters: Parameters, work: Workspace | None = None
    ) -> BestComponents:
        """Evaluate the candidates of rows x (B, d)."""
        block = self.evaluate(x, squared(x, work), parameters, parameters.log_weights, work)
        assert block.components is not None
        assert isinstance(block.Y, Tensor)
        which = block.joint.argmax(dim=1, keepdim=True)
        Y = block.Y.gather(1, which.unsqueeze(-1).expand(-1, 1, block.Y.shape[2])).squeeze(1)
        component = block.components.gather(1, which).squeeze(1)
        return BestComponents(log_normaliser(block.joint)[0], component, Y)

    def compare_without(
        self, x: Tensor, parameters: Parameters, removed: Tensor, work: Workspace | None = None
    ) -> Tensor:
        """Compute ``log p(x)`` with and without the components in ``removed`` (K,), (B, 2).

        The second is minus infinity where no other component was evaluated.
        """
        block = self.evaluate(x, squared(x), parameters, parameters.log_weights, work)
        without = block.joint.masked_fill(removed[block.components], -torch.inf)
        return torch.stack([block.joint, without], dim=1).logsumexp(dim=2)

    def evaluate(
        self,
        x: Tensor,
        squares: Tensor,
        parameters: Parameters,
        log_weights: Tensor,
        work: Workspace | None = None,
    ) -> Block:
        """Evaluate each of the rows x (B, d) exactly against its candidates."""
        components, ranks = self.rank(x, log_weights, self.n_candidates), find_ranks(parameters)
        constant, found = self.screen.constant + log_weights, list[tuple[Tensor, Tensor]]()
        size = components.shape[1] * (parameters.shape[2] + 1)
        for part in slice_rows(len(x), self.pair_elements // size):
            some = x[part], squares[part], components[part]
            found.append(self._evaluate_pairs(*some, parameters, constant, ranks, work))
        joint, Y = (torch.cat(parts) for parts in zip(*found, strict=True))
        return Block(slice(0, len(x)), components, joint, Y)

    def _evaluate_pairs(
        self,
        x: Tensor,
        squares: Tensor,
        components: Tensor,
        parameters: Parameters,
        constant: Tensor,
        ranks: Tensor | None,
        work: Workspace | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute ``log pi_k + log p_k(x)``, (n, C), and Y, (n, C, l), of components (n, C).

        With the ``ranks`` (K,) of all components, the factors behind them are left out.
        """
        (K, d, l), (n, C) = parameters.shape, components.shape
        _, mu, E, Gamma, _ = parameters
        order = components.reshape(-1).argsort(stable=True)
        k, rows = components.reshape(-1)[order], order.div(C, rounding_mode="floor")
        counts = torch.bincount(k, minlength=K)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        # The projections of a component lie together: all rows by its first factor, then the next.
        numbers = torch.arange(l, device=x.device)
        widths = torch.full_like(counts, l) if ranks is None else ranks
        firsts = torch.cat([counts.new_zeros(1), (counts * widths).cumsum(0)])
        place = torch.arange(len(k), device=x.device) + (firsts - starts)[k]
        places = place.unsqueeze(1) + counts[k].unsqueeze(1) * numbers
        several = rows.unsqueeze(1).expand_as(places)
        used = None if ranks is None else numbers < ranks[k].unsqueeze(1)
        if used is not None:
            places, several = places[used], several[used]
        rows_of_factors = rows.new_empty(places.numel())
        rows_of_factors[places] = several
        joint, found = x.new_empty(n * C), x.new_empty(places.numel())
        for part in slice_rows(K, self.part_elements // d):
            first, last = starts[[part.start, part.stop]].tolist()
            here, bounds = slice(first, last), starts[part.start : part.stop + 1] - first
            E_mu = torch.mul(
                E[part], mu[part], out=reuse(work, "some E mu", x, part.stop - part.start, d)
            )
            joint[here] = pair_products(E[part], squares, bounds, rows[here]).mul_(-0.5)
            joint[here] += pair_products(E_mu, x, bounds, rows[here])
            if l:
                products = slice(first * l, last * l)
                factors, bounds = factor_rows(Gamma[part]), _bounds_of_factors(bounds, widths[part])
                if ranks is not None:
                    products = slice(*firsts[[part.start, part.stop]].tolist())
                    factors = Gamma[part].mT[numbers < ranks[part].unsqueeze(1)]
                found[products] = pair_products(factors, x, bounds, rows_of_factors[products])
        Y = found[places]
        if used is not None:
            Y = Y.new_zeros(used.shape).masked_scatter_(used, Y)
        Y -= self.screen.Gamma_mu[k]
        joint += constant[k] + 0.5 * Y.square().sum(dim=1)
        joint, Y = (torch.empty_like(t).index_copy_(0, order, t) for t in (joint, Y))
        return joint.view(n, C), Y.view(n, C, l)

    def rank(self, x: Tensor, log_weights: Tensor, n_candidates: int) -> Tensor:
        """Find the components that rows x (B, d) rank highest, (B, C), the best first."""
        C, table = min(n_candidates, len(self.screen.table)), self.screen.table
        found = []
        for part in slice_rows(len(x), self.rank_elements // len(table)):
            phi = coordinate_products(self.screen.coordinates(x[part]))
            found.append(torch.addmm(log_weights, phi, table.mT).topk(C, dim=1).indices)
        return torch.cat(found)

    def joint_of_all(self, x: Tensor, parameters: Parameters, log_weights: Tensor) -> Tensor:
        """Compute ``log pi_k + log p_k`` of rows (n, d) for all components, (n, K)."""
        (K, d, _), found = parameters.shape, list[Tensor]()
        _, mu, E, Gamma, M = parameters
        constant, squares = self.screen.constant + log_weights, squared(x)
        for part in slice_rows(K, self.part_elements // d):
            ops = Operands(
                offset=None,
                E=E[part],
                E_mu=E[part] * mu[part],
                Gamma=factor_rows(Gamma[part]),
                Gamma_mu=self.screen.Gamma_mu[part].reshape(-1),
                constant=constant[part],
                log_weights=log_weights[part],
                latent_variances=M[part],
            )
            found.append(project(x, ops, squares)[0])
        return torch.cat(found, dim=1)


def _bounds_of_factors(bounds: Tensor, widths: Tensor) -> Tensor:
    """Return the first place of the pairs of each factor, and the end of all.

    ``bounds`` (T+1,) are those of components, which have ``widths`` (T,) factors.
    """
    counts = bounds.diff().repeat_interleave(widths)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def pair_products(left: Tensor, right: Tensor, bounds: Tensor, rows: Tensor) -> Tensor:
    """Compute some elements (P,) of ``left @ right'``, for left (T, d) and right (B, d).

    The elements of row i of the product are in the columns ``rows[bounds[i] : bounds[i + 1]]``,
    with ``rows`` (P,) and ``bounds`` (T+1,).
    """
    if left.device.type != "cpu":
        return gather_products(left, right, bounds, rows)
    _silence_sparse_warning()
    wanted = torch.sparse_csr_tensor(
        bounds, rows, left.new_zeros(len(rows)), (len(left), len(right)), check_invariants=False
    )
    found: Tensor = torch.sparse.sampled_addmm(wanted, left, right.mT, beta=0.0)
    return found.values()


def gather_products(left: Tensor, right: Tensor, bounds: Tensor, rows: Tensor) -> Tensor:
    """Compute the same as ``pair_products``, by copies of both operands for each element."""
    numbers = torch.repeat_interleave(bounds.diff(), output_size=len(rows))
    parts = slice_rows(len(rows), BLOCK_ELEMENTS // left.shape[1])
    return torch.cat([(left[numbers[i]] * right[rows[i]]).sum(dim=1) for i in parts])


@cache
def _silence_sparse_warning() -> None:
    """Trigger and hide torch's one warning that sparse tensors may still change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)
