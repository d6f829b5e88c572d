"""Densities of rows with missing entries: the marginal of each row's own observed features.

With o the observed features of a row, ``xt = x_o - mu_o`` and ``y = Gamma_o' xt``, the matrix

    C = M + Gamma_o' E_o^-1 Gamma_o                                                (l x l)

is all that a pattern changes: it is the identity for a complete row and M for an empty one. Then

    log p_k(x_o) = -1/2 [d_o log 2pi - sum_o log E + log|C| - log|M| + sum_o E xt^2 - y' C^-1 y]
    z | x_o, k  ~  N(M^(1/2) C^-1 y,  M^(1/2) C^-1 M^(1/2))

C is a sum of positive terms, so that no digits cancel, and for all rows at once it is one product
of the mask (B x d) with d x (K l^2) numbers: no loop over patterns is needed. What has the size
B x K x l^2 is computed for blocks of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.density import Operands, Posterior, operands
from factormix.core.parameters import Parameters, latent_matrix
from factormix.core.symmetric import pairs, symmetric_places

__all__ = [
    "Factored",
    "Observed",
    "ObservedOperands",
    "exact_observed_joint",
    "factor_observed",
    "observed_components",
    "observed_joint",
    "observed_operands",
    "observed_posterior",
    "project_observed",
    "row_blocks",
]

BLOCK_ELEMENTS = 1 << 22
"""Elements that an array of the size B x K x (l+1)^2 may have."""


class ObservedOperands(NamedTuple):
    """Hold what rows and their masks are multiplied by."""

    ops: Operands
    M: Tensor
    """(K, l, l)."""
    log_M: Tensor
    """``log |M|``, (K,)."""
    features: Tensor
    """(d, K * (1 + l + l (l+1) / 2)), what each observed feature adds: to the log-likelihood,
    to ``Gamma' mu`` and to the lower triangle of C.
    """


class Observed(NamedTuple):
    """What the observed entries of rows tell about each component."""

    log_prob: Tensor
    """``log p_k(x_o)``, (B, K)."""
    means: Tensor
    """Posterior means of z, (B, K, l)."""
    roots: Tensor
    """Q with ``Q' Q`` the posterior covariance of z, (B, K, l, l)."""


class Factored(NamedTuple):
    """Densities of rows, and what their latent posteriors follow from: ``C = L L'``."""

    log_prob: Tensor
    """``log p_k(x_o)``, (B, K)."""
    columns: tuple[Tensor, ...]
    """Columns of L from the diagonal down, (l, B, K) to (1, B, K)."""
    scaled: Tensor
    """``L^-1 y``, (l, B, K)."""

    def posterior(
        self, variances: Tensor, rows: Tensor | None = None, components: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute means and roots of ``Observed``, for all or for pairs of a row and a component.

        ``variances`` are those of M, (K, l); of P pairs, (P,) each, there are (P, l) and (P, l, l).
        """
        columns, u = list(self.columns), self.scaled
        if rows is not None and components is not None:
            columns, u = [c[:, rows, components] for c in columns], u[:, rows, components]
            variances = variances[components]
        L = u.new_zeros(len(u), *u.shape)
        for j, column in enumerate(columns):
            L[j:, j] = column
        L, u = L.movedim((0, 1), (-2, -1)), u.movedim(0, -1)
        scales = variances.sqrt().diag_embed().expand_as(L)
        roots = torch.linalg.solve_triangular(L, scales, upper=False)
        return (roots.mT @ u.unsqueeze(-1)).squeeze(-1), roots


def row_blocks(n_rows: int, parameters_shape: tuple[int, int, int]) -> Iterator[slice]:
    """Cut rows into blocks for which arrays of B x K x (l+1)^2 elements stay small."""
    K, _, l = parameters_shape
    size = max(1, BLOCK_ELEMENTS // (K * (l + 1) ** 2))
    for first in range(0, n_rows, size):
        yield slice(first, first + size)


def observed_operands(
    parameters: Parameters, *, centre: bool = True, diagonal: bool = False
) -> ObservedOperands:
    """Gather what ``project_observed`` needs; the options are those of ``operands``."""
    mu, E, Gamma, variances = parameters[1:]
    _, d, l = parameters.shape
    ops = operands(parameters, centre=centre, diagonal=diagonal)
    M = variances.diag_embed() if diagonal else latent_matrix(E, Gamma)
    log_M = variances.log().sum(dim=1) if diagonal else torch.linalg.slogdet(M).logabsdet
    if ops.offset is not None:
        mu = mu - ops.offset
    alone = 0.5 * (E.log() - E * mu.square() - math.log(2 * math.pi))
    rows, columns = pairs(l, mu.device)
    products = Gamma[..., rows] * (Gamma / E.unsqueeze(-1))[..., columns]
    adds = torch.cat([alone.unsqueeze(-1), Gamma * mu.unsqueeze(-1), products], dim=-1)
    # By kind first, so that each kind is one slice of the product.
    features = adds.permute(1, 2, 0).reshape(d, -1)
    return ObservedOperands(ops, M.to(mu), log_M.to(mu), features)


def project_observed(x: Tensor, missing: Tensor, observed_ops: ObservedOperands) -> Observed:
    """Compute densities and latent posteriors of rows x (B, d) where ``missing`` (B, d) is false.

    The values of missing entries are not looked at.
    """
    found = factor_observed(x, missing, observed_ops)
    return Observed(found.log_prob, *found.posterior(observed_ops.ops.latent_variances))


def factor_observed(x: Tensor, missing: Tensor, observed_ops: ObservedOperands) -> Factored:
    """Compute densities, and what latent posteriors follow from, of rows x (B, d)."""
    ops, M, log_M, features = observed_ops
    (K, l), n = ops.latent_variances.shape, len(x)
    x = (x if ops.offset is None else x - ops.offset).masked_fill(missing, 0)
    added = ((~missing).to(x) @ features).view(n, -1, K).transpose(0, 1)
    log_p = added[0] + x @ ops.E_mu.mT - 0.5 * (x.square() @ ops.E.mT)
    y = (x @ ops.Gamma.mT).view(n, K, l).permute(2, 0, 1) - added[1 : l + 1]
    C = added[l + 1 :][symmetric_places(l, x.device)].view(l, l, n, K) + M.permute(
        1, 2, 0
    ).unsqueeze(2)
    return _factored(log_p, y, C, ops.latent_variances, log_M)


def _factored(log_p: Tensor, y: Tensor, C: Tensor, variances: Tensor, log_M: Tensor) -> Factored:
    """Complete ``log p_k`` by the part of the factors, with C (l, l, B, K) and y (l, B, K).

    ``log_p`` (B, K) lacks ``1/2 (log|M| - log|C| + y' C^-1 y)``. The Cholesky factor is found by
    columns, for all rows and components at once: a library takes the small matrices one by one.
    """
    if len(y) == 0:
        return Factored(log_p, (), y)
    # Whatever is left of C has no smaller eigenvalue than M, but for rounding.
    least = 0.5 * variances.amin(dim=1)
    columns, scaled = list[Tensor](), list[Tensor]()
    volume, length = 0.5 * log_M, torch.zeros_like(log_p)
    while len(y):
        pivot = torch.maximum(C[0, 0], least).sqrt()
        below = C[1:, 0] / pivot
        u = y[0] / pivot
        columns.append(torch.cat([pivot.unsqueeze(0), below]))
        scaled.append(u)
        volume, length = volume - pivot.log(), length + u.square()
        y = y[1:] - below * u
        C = C[1:, 1:] - below.unsqueeze(1) * below
    return Factored(log_p + volume + 0.5 * length, tuple(columns), torch.stack(scaled))


def observed_components(x: Tensor, missing: Tensor, observed_ops: ObservedOperands) -> Tensor:
    """Compute ``log p_k(x_o)``, (B, K), block by block; 0 for a row without entries."""
    parts = [
        factor_observed(x[part], missing[part], observed_ops).log_prob
        for part in row_blocks(len(x), _shape(observed_ops))
    ]
    return torch.cat(parts)


def observed_joint(x: Tensor, missing: Tensor, observed_ops: ObservedOperands) -> Tensor:
    """Compute ``log pi_k + log p_k(x_o)``, (B, K)."""
    return observed_components(x, missing, observed_ops) + observed_ops.ops.log_weights


def observed_posterior(x: Tensor, missing: Tensor, observed_ops: ObservedOperands) -> Posterior:
    """Compute ``p(k | x_o)`` (B, K), and means and variances of ``z | x_o, k``, both (B, K, l)."""
    parts = []
    for part in row_blocks(len(x), _shape(observed_ops)):
        log_p, means, roots = project_observed(x[part], missing[part], observed_ops)
        shares = torch.softmax(log_p + observed_ops.ops.log_weights, dim=1)
        parts.append((shares, means, roots.square().sum(dim=-2)))
    return Posterior(*(torch.cat(kind) for kind in zip(*parts, strict=True)))


def exact_observed_joint(
    x: Tensor, missing: Tensor, parameters: Parameters, observed_ops: ObservedOperands
) -> Tensor:
    """Compute ``log pi_k + log p_k(x_o)``, (B, K), by ``x - mu`` for each row's best component.

    It is for rows and means that are far from zero, where products with x would cancel.
    """
    joint = observed_joint(x, missing, observed_ops)
    which = joint.argmax(dim=1)
    K, _, l = parameters.shape
    best = torch.empty_like(joint[:, 0])
    kinds = observed_ops.features.view(parameters.shape[1], -1, K)
    for k in torch.unique(which).tolist():
        mine = which == k
        mu, E, Gamma = (t[k] for t in parameters[1:4])
        seen = (~missing[mine]).to(x)
        xt = (x[mine] - mu) * seen
        log_p = 0.5 * (seen @ (E.log() - math.log(2 * math.pi)) - xt.square() @ E)
        C = (seen @ kinds[:, l + 1 :, k])[:, symmetric_places(l, x.device)].mT.view(l, l, -1)
        found = _factored(
            log_p.unsqueeze(1),
            (xt @ Gamma).mT.unsqueeze(-1),
            (C + observed_ops.M[k].unsqueeze(-1)).unsqueeze(-1),
            parameters.latent_variances[k : k + 1],
            observed_ops.log_M[k],
        )
        best[mine] = found.log_prob.squeeze(1) + observed_ops.ops.log_weights[k]
    return joint.scatter(1, which.unsqueeze(1), best.unsqueeze(1))


def _shape(observed_ops: ObservedOperands) -> tuple[int, int, int]:
    K, l = observed_ops.ops.latent_variances.shape
    return K, observed_ops.ops.E.shape[1], l
