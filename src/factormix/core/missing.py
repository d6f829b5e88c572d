"""Densities of rows with missing entries: the marginal of each row's own observed features.

With o the observed features of a row, ``xt = x_o - mu_o`` and ``y = Gamma_o' xt``, the matrix

    C = M + Gamma_o' E_o^-1 Gamma_o                                                (l x l)

is all that a pattern changes: it is the identity for a complete row and M for an empty one. Then

    log p_k(x_o) = -1/2 [d_o log 2pi - sum_o log E + log|C| - log|M| + sum_o E xt^2 - y' C^-1 y]
    z | x_o, k  ~  N(M^(1/2) C^-1 y,  M^(1/2) C^-1 M^(1/2))

C is a sum of positive terms, so that no digits cancel, and for all rows at once it is one product
of the mask (B x d) with d x (K l^2) numbers: no loop over patterns is needed. What has the size
B x K x l^2 is computed for blocks of rows.

Expected statistics of rows with missing entries.

A missing entry is a latent variable like z: given z it is ``Theta_j' [1, z] + eps``. With
``T = R E[[1,z][1,z]']`` of a row, which is summed to A, it adds ``T Theta_j`` to B and
``Theta_j' T Theta_j + R D_j`` to S: its conditional mean, and the conditional variance on top. The
sum of T over the rows in which j is missing is one product of all T with the mask; where few pairs
of a row and a component matter, it is one for each component, with its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import Workspace, pairs, symmetric_places
from factormix.core.density import Operands, Posterior, log_normaliser, operands
from factormix.core.divided import Exchange, divided_statistics, hear, told
from factormix.core.expectation import expected_statistics, removal_losses
from factormix.core.pairs import pays, significant
from factormix.core.parameters import Parameters, latent_matrix, loadings, noise_variances
from factormix.core.screening import Few, screened_statistics
from factormix.core.statistics import Statistics

__all__ = [
    "Factored",
    "Observed",
    "ObservedOperands",
    "Sums",
    "batch_statistics",
    "completed_sums",
    "exact_observed_joint",
    "factor_observed",
    "latent_moments",
    "observed_components",
    "observed_joint",
    "observed_operands",
    "observed_posterior",
    "paired_sums",
    "project_observed",
    "regression",
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


SUM_ELEMENTS = 1 << 24
"""Elements that sums of T over the rows with a missing entry, (K, (l+1)(l+2)/2, d), may have."""


class Sums(NamedTuple):
    """A, B and S of ``Statistics``."""

    A: Tensor
    B: Tensor
    S: Tensor


def batch_statistics(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None = None,
    missing: Tensor | None = None,
    *,
    candidates: Tensor | None = None,
    scales: Tensor | None = None,
    few: Few | None = None,
    n_probes: int = 0,
    work: Workspace | None = None,
    exchange: Exchange | None = None,
    finish: bool = True,
) -> Statistics:
    """Sum the expected statistics over a batch x (B, d) of which entries may be ``missing`` (B, d).

    Complete rows are summed as ever; ``weights`` (B,), ``candidates`` (K,) and ``scales`` (K, S),
    which are for complete rows and all components, are as in ``expected_statistics``, ``few`` and
    ``n_probes`` as in ``screened_statistics``. With an exchange, these are some of the components,
    and the others are at other places. Without ``finish``, what can wait for other sums is not
    done, unless entries are missing.
    """

    def of_complete(x: Tensor, weights: Tensor | None) -> Statistics:
        options: Any = {"candidates": candidates, "work": work}
        if few is not None or exchange is not None:
            options |= {"few": few, "n_probes": n_probes}
        if exchange is not None:
            return divided_statistics(parameters, x, weights, exchange=exchange, **options)
        options |= {"finish": finish or missing is not None}
        if few is None:
            return expected_statistics(parameters, x, weights, scales=scales, **options)
        return screened_statistics(parameters, x, weights, **options)

    if missing is None:
        return of_complete(x, weights)
    partial = missing.any(dim=1)
    whole = (~partial).nonzero()[:, 0]
    if not len(whole):
        return _partial_statistics(parameters, x, weights, missing, candidates, exchange)
    rest = partial.nonzero()[:, 0]
    complete = of_complete(x[whole], None if weights is None else weights[whole])
    if not len(rest):
        return complete
    weights = None if weights is None else weights[rest]
    others = _partial_statistics(parameters, x[rest], weights, missing[rest], candidates, exchange)
    return complete.joined(others)


def _partial_statistics(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None,
    missing: Tensor,
    candidates: Tensor | None,
    exchange: Exchange | None,
) -> Statistics:
    ops = observed_operands(parameters, centre=False, diagonal=True)
    Theta = regression(parameters)
    total: Statistics | None = None
    K, d, l = parameters.shape
    # All places cut the rows alike.
    for part in row_blocks(len(x), (K if exchange is None else exchange.most, d, l)):
        block, gaps = x[part].masked_fill(missing[part], 0), missing[part]
        w = None if weights is None else weights[part]
        factored = factor_observed(block, gaps, ops)
        log_likelihood, R, losses = _posterior(
            factored.log_prob, parameters, candidates, w, exchange
        )
        # As for complete rows: what is very far must not reach a component.
        R = torch.threshold_(R, 2e-30, 0)
        count = torch.full_like(log_likelihood[0], len(block))
        if w is not None:
            R, log_likelihood, count = R * w.unsqueeze(1), log_likelihood * w, w.sum()
        sums = _sums(parameters, Theta, block, gaps, R, factored)
        found = Statistics(count, log_likelihood.sum(), *sums, *losses)
        total = found if total is None else total.joined(found)
    assert total is not None
    return total


def _posterior(
    log_p: Tensor,
    parameters: Parameters,
    candidates: Tensor | None,
    weights: Tensor | None,
    exchange: Exchange | None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Compute log-likelihoods (B,), responsibilities (B, K), and what removing costs, (K,) twice.

    ``log_p`` is ``log p_k(x_o)``, (B, K).
    """
    none = log_p.new_zeros(0)
    if exchange is None:
        joint = log_p + parameters.log_weights
        losses = (none, none)
        if candidates is not None:
            losses = removal_losses(joint, candidates, weights)
        return *log_normaliser(joint), losses
    joint = log_p + parameters.logits
    mine, which = told(joint, candidates)
    (heard,) = hear([mine], parameters, exchange)
    losses = (none, none)
    if candidates is not None:
        alone, together = heard.losses(exchange.place, which, candidates, weights)
        losses = (alone, together)
    return heard.log_prob, heard.shares(joint, mine[:, 0]), losses


def _sums(
    parameters: Parameters,
    Theta: Tensor,
    x: Tensor,
    missing: Tensor,
    R: Tensor,
    factored: Factored,
) -> Sums:
    """Compute ``completed_sums``, of the pairs that matter where these are few."""
    variances = parameters.latent_variances
    # How many there are is known without waiting on the processor alone.
    found = significant(R) if x.device.type == "cpu" else None
    if found is not None and pays(len(found), R.numel()):
        return paired_sums(parameters, Theta, x, missing, R, factored, found)
    projected = Observed(factored.log_prob, *factored.posterior(variances))
    return completed_sums(parameters, Theta, x, missing, R, projected)


def regression(parameters: Parameters) -> Tensor:
    """Return ``Theta = [mu, Lambda]``, (K, l+1, d), by which x follows from [1, z]."""
    return torch.cat([parameters.means.unsqueeze(1), loadings(parameters).mT], dim=1)


def latent_moments(R: Tensor, projected: Observed) -> Tensor:
    """Compute the lower triangles of ``T = R E[[1,z][1,z]']``, (B, K, (l+1)(l+2)/2).

    Of pairs of a row and a component, (P,), it is (P, (l+1)(l+2)/2).
    """
    _, means, roots = projected
    l = means.shape[-1]
    rows, columns = pairs(l, R.device)
    second = means[..., rows] * means[..., columns] + (roots[..., rows] * roots[..., columns]).sum(
        dim=-2
    )
    T = R.new_empty(*R.shape, (l + 1) * (l + 2) // 2)
    # The triangle of [1, z][1, z]' has those of z z' below a column of 1 and z.
    rows, columns = pairs(l + 1, R.device)
    edge = columns == 0
    T[..., edge] = torch.cat([torch.ones_like(R).unsqueeze(-1), means], dim=-1)
    T[..., ~edge] = second
    return T * R.unsqueeze(-1)


def completed_sums(
    parameters: Parameters,
    Theta: Tensor,
    x: Tensor,
    missing: Tensor,
    R: Tensor,
    projected: Observed,
) -> Sums:
    """Sum ``R [1,z][1,z]'``, ``R [1,z] x'`` and ``R x^2`` with z and missing entries expected.

    x (B, d) is zero where it is missing, R (B, K) holds non-negative weights, and Theta
    (K, l+1, d) is that of the parameters.
    """
    n, (K, d, l) = len(x), parameters.shape
    D = noise_variances(parameters.precision_diag)
    T, gaps = latent_moments(R, projected), missing.to(x)
    rows, columns = pairs(l + 1, x.device)
    A = x.new_empty(K, l + 1, l + 1)
    A[:, rows, columns] = A[:, columns, rows] = T.sum(dim=0)
    Rz = torch.cat([R.unsqueeze(-1), R.unsqueeze(-1) * projected.means], dim=-1)
    B = (Rz.view(n, -1).mT @ x).view(K, l + 1, d)
    S = R.mT @ x.square()
    step = max(1, SUM_ELEMENTS // (T.shape[-1] * d))
    for first in range(0, K, step):
        k = slice(first, first + step)
        lacking = (T[:, k].reshape(n, -1).mT @ gaps).view(-1, T.shape[-1], d)
        expected = torch.zeros_like(Theta[k])
        for i, (a, b) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            expected[:, a].addcmul_(lacking[:, i], Theta[k, b])
            if a != b:
                expected[:, b].addcmul_(lacking[:, i], Theta[k, a])
        B[k] += expected
        S[k] += (expected * Theta[k]).sum(dim=1).addcmul_(lacking[:, 0], D[k])
    return Sums(A, B, S)


def paired_sums(
    parameters: Parameters,
    Theta: Tensor,
    x: Tensor,
    missing: Tensor,
    R: Tensor,
    factored: Factored,
    found: Tensor,
) -> Sums:
    """Compute ``completed_sums`` by the pairs of a row and a component in ``found``, (P, 2)."""
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
        mine = slice(last - n, last)
        values, gaps = x[rows[mine]], missing[rows[mine]].to(x)
        lacking = T[mine].mT @ gaps
        expected = (lacking[unfold].view(l + 1, l + 1, d) * Theta[k]).sum(dim=1)
        B[k] = torch.addmm(expected, Rz[mine].mT, values)
        S[k] = shares[mine] @ values.square_()
        S[k] += (expected * Theta[k]).sum(dim=0).addcmul_(lacking[0], D[k])
    return Sums(A, B, S)
