"""Few of many components: a cheap screen that ranks all of them, so that few are evaluated.

The marginal of the mixture on p directions is a Gaussian mixture of its own, with means
``W' mu_k`` and covariances ``W' Sigma_k W``. Its log-densities are linear in the products
``phi(z)`` of the coordinates ``z = W' (x - origin)``, so that one matrix product with a table
(K, F), ``F = (p + 1)(p + 2) / 2``, ranks all components for all rows.

The directions are those in which the mixture varies most compared with the noise of its
components. They follow from its parameters, without rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.parameters import Parameters, factor_rows, precise_dtype

__all__ = [
    "Screen",
    "directions",
    "follow",
    "products",
    "screen_of",
    "table_size",
]

N_DIRECTIONS = 16
"""Most directions of a screen."""
RIDGE = 1e-5
"""Share of the mixture's variance that is added to each component's, so that none is too sharp for
products in float32 to rank it."""
ELEMENTS = 1 << 22
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
