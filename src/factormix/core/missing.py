"""Rows with missing entries: densities of the observed features, and expected statistics.

With o the observed features of a row, ``xt = x_o - mu_o`` and ``y = Gamma_o' xt``, the matrix

    C = M + Gamma_o' E_o^-1 Gamma_o                                                (l x l)

is all that a pattern of missing entries changes: it is the identity for a complete row and M for an
empty one. Then

    log p_k(x_o) = -1/2 [d_o log 2pi - sum_o log E + log|C| - log|M| + sum_o E xt^2 - y' C^-1 y]
    z | x_o, k  ~  N(M^(1/2) C^-1 y,  M^(1/2) C^-1 M^(1/2))

C is a sum of positive terms, so no digits cancel. For all rows at once it is one product of the
mask (B x d) with d x (K l^2) numbers, without a loop over patterns. Arrays of size B x K x l^2 are
computed for blocks of rows.

In training, a missing entry is a latent variable like z: given z it is ``Theta_j' [1, z] + eps``.
With ``T = R E[[1,z][1,z]']`` of a row, which is summed to A, it adds ``T Theta_j`` to B and
``Theta_j' T Theta_j + R D_j`` to S: its conditional mean, and the conditional variance in addition.
The sum of T over the rows in which j is missing is one product of all T with the mask. Where few
pairs of a row and a component matter, it is one product for each component, with its own rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import (
    BLOCK_ELEMENTS,
    slice_rows,
    symmetric_places,
    triangle_indices,
)
from factormix.core.density import Operands, Posterior, operands
from factormix.core.parameters import Parameters, latent_matrix, loadings, noise_variances
from factormix.core.statistics import DEFAULT_TUNING, LatentSums, Tuning, find_pairs


class ObservedOperands(NamedTuple):
    """The matrices that rows and their masks are multiplied by."""

    ops: Operands
    M: Tensor
    """(K, l, l)."""
    log_M: Tensor
    """``log |M|``, (K,)."""
    features: Tensor
    """(d, K * (1 + l + l (l+1) / 2)), the terms that each observed feature adds to the
    log-likelihood, to ``Gamma' mu`` and to the lower triangle of C."""


class Observed(NamedTuple):
    """Densities and latent posteriors of rows, given their observed entries."""

    log_prob: Tensor
    """``log p_k(x_o)``, (B, K)."""
    means: Tensor
    """Posterior means of z, (B, K, l)."""
    roots: Tensor
    """Q with ``Q' Q`` the posterior covariance of z, (B, K, l, l)."""


class Factored(NamedTuple):
    """Densities of rows, and the factors ``C = L L'`` that give their latent posteriors."""

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

        ``variances`` is the diagonal of M, (K, l). For P pairs, the results are (P, l) and
        (P, l, l).
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


def row_blocks(n_rows: int, K: int, l: int, elements: int = BLOCK_ELEMENTS) -> list[slice]:
    """Cut rows into blocks for which arrays of size B x K x (l+1)^2 stay small."""
    return slice_rows(n_rows, elements // (K * (l + 1) ** 2))


def observed_operands(
    parameters: Parameters, *, centre: bool = True, diagonal: bool = False
) -> ObservedOperands:
    """Gather the operands of ``project_observed``; the options are as in ``density.operands``."""
    mu, E, Gamma, variances = parameters[1:]
    _, d, l = parameters.shape
    ops = operands(parameters, centre=centre, diagonal=diagonal)
    M = variances.diag_embed() if diagonal else latent_matrix(E, Gamma)
    log_M = variances.log().sum(dim=1) if diagonal else torch.linalg.slogdet(M).logabsdet
    if ops.offset is not None:
        mu = mu - ops.offset
    alone = 0.5 * (E.log() - E * mu.square() - math.log(2 * math.pi))
    rows, columns = triangle_indices(l, mu.device)
    products = Gamma[..., rows] * (Gamma / E.unsqueeze(-1))[..., columns]
    adds = torch.cat([alone.unsqueeze(-1), Gamma * mu.unsqueeze(-1), products], dim=-1)
    # The kind of term first, so that each kind is one slice of the product.
    features = adds.permute(1, 2, 0).reshape(d, -1)
    return ObservedOperands(ops, M.to(mu), log_M.to(mu), features)


def project_observed(x: Tensor, missing: Tensor, observed_ops: ObservedOperands) -> Observed:
    """Compute densities and latent posteriors of rows x (B, d) where ``missing`` (B, d) is false.

    The values of missing entries do not matter.
    """
    found = factor_observed(x, missing, observed_ops)
    return Observed(found.log_prob, *found.posterior(observed_ops.ops.latent_variances))


def factor_observed(x: Tensor, missing: Tensor, observed_ops: ObservedOperands) -> Factored:
    """Compute densities of rows x (B, d), and the factors of their latent posteriors."""
    ops, M, log_M, features = observed_ops
    (K, l), n = ops.latent_variances.shape, len(x)
    x = ops.centre(x).masked_fill(missing, 0)
    added = ((~missing).to(x) @ features).view(n, -1, K).transpose(0, 1)
    log_p = added[0] + x @ ops.E_mu.mT - 0.5 * (x.square() @ ops.E.mT)
    y = (x @ ops.Gamma.mT).view(n, K, l).permute(2, 0, 1) - added[1 : l + 1]
    C = added[l + 1 :][symmetric_places(l, x.device)].view(l, l, n, K) + M.permute(
        1, 2, 0
    ).unsqueeze(2)
    return _factored(log_p, y, C, ops.latent_variances, log_M)


def _factored(log_p: Tensor, y: Tensor, C: Tensor, variances: Tensor, log_M: Tensor) -> Factored:
    """Add the contribution of the factors to ``log p_k``, with C (l, l, B, K) and y (l, B, K).

    ``log_p`` (B, K) lacks ``1/2 (log|M| - log|C| + y' C^-1 y)``. The Cholesky factor is computed
    column by column for all rows and components at once: LAPACK takes small matrices one by one.
    """
    if len(y) == 0:
        return Factored(log_p, (), y)
    # Up to rounding, no remaining block of C has a smaller eigenvalue than M.
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


def observed_components(
    x: Tensor, missing: Tensor, observed_ops: ObservedOperands, elements: int = BLOCK_ELEMENTS
) -> Tensor:
    """Compute ``log p_k(x_o)``, (B, K), block by block; 0 for a row without entries.

    ``elements`` bounds arrays of size B x K x (l+1)^2.
    """
    K, l = observed_ops.ops.latent_variances.shape
    parts = [
        factor_observed(x[part], missing[part], observed_ops).log_prob
        for part in row_blocks(len(x), K, l, elements)
    ]
    return torch.cat(parts)


def observed_joint(x: Tensor, missing: Tensor, observed_ops: ObservedOperands) -> Tensor:
    """Compute ``log pi_k + log p_k(x_o)``, (B, K)."""
    return observed_components(x, missing, observed_ops) + observed_ops.ops.log_weights


def observed_peaks(missing: Tensor, observed_ops: ObservedOperands) -> Tensor:
    """Compute ``log p_k`` at the observed part of ``mu_k``, (B, K), block by block."""
    log_E = 0.5 * (observed_ops.ops.E.log() - math.log(2 * math.pi))
    parts = list[Tensor]()
    for part in row_blocks(len(missing), *observed_ops.ops.latent_variances.shape):
        # C, and with it the volume, does not depend on the values.
        seen = (~missing[part]).to(log_E)
        found = factor_observed(torch.zeros_like(seen), missing[part], observed_ops)
        peaks = seen @ log_E.mT + 0.5 * observed_ops.log_M
        for column in found.columns:
            peaks = peaks - column[0].log()
        parts.append(peaks)
    return torch.cat(parts)


def observed_posterior(x: Tensor, missing: Tensor, observed_ops: ObservedOperands) -> Posterior:
    """Compute ``p(k | x_o)`` (B, K), and means and variances of ``z | x_o, k``, both (B, K, l)."""
    parts = []
    for part in row_blocks(len(x), *observed_ops.ops.latent_variances.shape):
        log_p, means, roots = project_observed(x[part], missing[part], observed_ops)
        shares = torch.softmax(log_p + observed_ops.ops.log_weights, dim=1)
        parts.append((shares, means, roots.square().sum(dim=-2)))
    return Posterior(*(torch.cat(kind) for kind in zip(*parts, strict=True)))


def exact_observed_joint(
    x: Tensor,
    missing: Tensor,
    parameters: Parameters,
    observed_ops: ObservedOperands,
    components: Tensor,
) -> Tensor:
    """Compute ``log pi_k + log p_k(x_o)``, (B, K), some components (m,) by ``x - mu``."""
    log_p = observed_components(x, missing, observed_ops)
    log_p = correct_observed(log_p, x, missing, parameters, observed_ops, components)
    return log_p + observed_ops.ops.log_weights


def correct_observed(
    log_p: Tensor,
    x: Tensor,
    missing: Tensor,
    parameters: Parameters,
    observed_ops: ObservedOperands,
    components: Tensor,
) -> Tensor:
    """Compute ``log p_k(x_o)`` of some components (m,) again, by ``x - mu``, among all (B, K)."""
    if not len(components):
        return log_p
    K, d, l = parameters.shape
    kinds = observed_ops.features.view(d, -1, K)
    seen, columns = (~missing).to(x), []
    for k in components.tolist():
        mu, E, Gamma = (t[k] for t in parameters[1:4])
        xt = (x - mu).masked_fill(missing, 0)
        squares = (xt * E.sqrt()).square().sum(dim=1)
        log_p_k = 0.5 * (seen @ (E.log() - math.log(2 * math.pi)) - squares)
        C = (seen @ kinds[:, l + 1 :, k])[:, symmetric_places(l, x.device)].mT.view(l, l, -1)
        found = _factored(
            log_p_k.unsqueeze(1),
            (xt @ Gamma).mT.unsqueeze(-1),
            (C + observed_ops.M[k].unsqueeze(-1)).unsqueeze(-1),
            parameters.latent_variances[k : k + 1],
            observed_ops.log_M[k],
        )
        columns.append(found.log_prob)
    return log_p.index_copy(1, components, torch.cat(columns, dim=1))


def sum_incomplete_rows(
    parameters: Parameters,
    Theta: Tensor,
    x: Tensor,
    missing: Tensor,
    R: Tensor,
    factored: Factored,
    tuning: Tuning = DEFAULT_TUNING,
) -> LatentSums:
    """Sum ``R [1,z][1,z]'``, ``R [1,z] x'`` and ``R x^2`` with z and missing entries expected.

    x (B, d) is zero where it is missing, R (B, K) holds non-negative weights, and Theta
    (K, l+1, d) is the ``regression`` of the parameters. Pairs of a row and a component are summed
    one by one where few of them matter.
    """
    # The number of pairs is known without waiting for the device on the CPU alone.
    found = find_pairs(R) if x.device.type == "cpu" else None
    if found is not None and tuning.pairs_pay(len(found), R.numel()):
        return sum_incomplete_pairs(parameters, Theta, x, missing, R, factored, found)
    observed = Observed(factored.log_prob, *factored.posterior(parameters.latent_variances))
    return sum_all_incomplete(parameters, Theta, x, missing, R, observed, tuning.lacking)


def regression(parameters: Parameters) -> Tensor:
    """Return ``Theta = [mu, Lambda]``, (K, l+1, d), the regression of x on [1, z]."""
    return torch.cat([parameters.means.unsqueeze(1), loadings(parameters).mT], dim=1)


def latent_moments(R: Tensor, observed: Observed) -> Tensor:
    """Compute the lower triangles of ``T = R E[[1,z][1,z]']``, (B, K, (l+1)(l+2)/2).

    For pairs of a row and a component, (P,), the result is (P, (l+1)(l+2)/2).
    """
    _, means, roots = observed
    l = means.shape[-1]
    rows, columns = triangle_indices(l, R.device)
    # One product for each pair: the products of columns of all roots would be an array l times as
    # large.
    second = means[..., rows] * means[..., columns] + (roots.mT @ roots)[..., rows, columns]
    T = R.new_empty(*R.shape, (l + 1) * (l + 2) // 2)
    # The triangle of [1, z][1, z]' is a column of 1 and z, and the triangle of z z' beside it.
    rows, columns = triangle_indices(l + 1, R.device)
    edge = columns == 0
    T[..., edge] = torch.cat([torch.ones_like(R).unsqueeze(-1), means], dim=-1)
    T[..., ~edge] = second
    return T * R.unsqueeze(-1)


def sum_all_incomplete(
    parameters: Parameters,
    Theta: Tensor,
    x: Tensor,
    missing: Tensor,
    R: Tensor,
    observed: Observed,
    elements: int = BLOCK_ELEMENTS,
) -> LatentSums:
    """Compute ``sum_incomplete_rows`` over all pairs of a row and a component.

    ``elements`` bounds the sums over rows with a missing entry, (K, (l+1)(l+2)/2, d).
    """
    n, (K, d, l) = len(x), parameters.shape
    D = noise_variances(parameters.precision_diag)
    T, gaps = latent_moments(R, observed), missing.to(x)
    rows, columns = triangle_indices(l + 1, x.device)
    A = x.new_empty(K, l + 1, l + 1)
    A[:, rows, columns] = A[:, columns, rows] = T.sum(dim=0)
    Rz = torch.cat([R.unsqueeze(-1), R.unsqueeze(-1) * observed.means], dim=-1)
    B = (Rz.view(n, -1).mT @ x).view(K, l + 1, d)
    S = R.mT @ x.square()
    for k in slice_rows(K, elements // (T.shape[-1] * d)):
        lacking = (T[:, k].reshape(n, -1).mT @ gaps).view(-1, T.shape[-1], d)
        expected = torch.zeros_like(Theta[k])
        for i, (a, b) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            expected[:, a].addcmul_(lacking[:, i], Theta[k, b])
            if a != b:
                expected[:, b].addcmul_(lacking[:, i], Theta[k, a])
        B[k] += expected
        S[k] += (expected * Theta[k]).sum(dim=1).addcmul_(lacking[:, 0], D[k])
    return LatentSums(None, A, B, S)


def sum_incomplete_pairs(
    parameters: Parameters,
    Theta: Tensor,
    x: Tensor,
    missing: Tensor,
    R: Tensor,
    factored: Factored,
    found: Tensor,
) -> LatentSums:
    """Compute ``sum_incomplete_rows`` over the pairs in ``found``, (P, 2)."""
    (K, d, l), D = parameters.shape, noise_variances(parameters.precision_diag)
    found = found[found[:, 1].argsort(stable=True)]
    rows, components = found.unbind(dim=1)
    shares = R[rows, components]
    means, roots = factored.posterior(parameters.latent_variances, rows, components)
    T = latent_moments(shares, Observed(factored.log_prob, means, roots))
    Rz = torch.cat([shares.unsqueeze(1), shares.unsqueeze(1) * means], dim=1)
    unfold = symmetric_places(l + 1, x.device)
    A = T.new_zeros(K, T.shape[1]).index_add_(0, components, T)[:, unfold].view(K, l + 1, l + 1)
    B, S = x.new_zeros(K, l + 1, d), x.new_zeros(K, d)
    which, counts = torch.unique_consecutive(components, return_counts=True)
    ends = counts.cumsum(0).tolist()
    for k, last, n in zip(which.tolist(), ends, counts.tolist(), strict=True):
        chosen = slice(last - n, last)
        values, gaps = x[rows[chosen]], missing[rows[chosen]].to(x)
        lacking = T[chosen].mT @ gaps
        expected = (lacking[unfold].view(l + 1, l + 1, d) * Theta[k]).sum(dim=1)
        B[k] = torch.addmm(expected, Rz[chosen].mT, values)
        S[k] = shares[chosen] @ values.square_()
        S[k] += (expected * Theta[k]).sum(dim=0).addcmul_(lacking[0], D[k])
    return LatentSums(None, A, B, S)
