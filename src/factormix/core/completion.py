"""Expected statistics of rows with missing entries.

A missing entry is a latent variable like z: given z it is ``Theta_j' [1, z] + eps``. With
``T = R E[[1,z][1,z]']`` of a row, which is summed to A, it adds ``T Theta_j`` to B and
``Theta_j' T Theta_j + R D_j`` to S: its conditional mean, and the conditional variance on top. The
sum of T over the rows in which j is missing is one product of all T with the mask; where few pairs
of a row and a component matter, it is one for each component, with its own rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from factormix.core.density import log_normaliser
from factormix.core.divided import Exchange, divided_statistics, hear, told
from factormix.core.expectation import expected_statistics, removal_losses
from factormix.core.observed import (
    Factored,
    Observed,
    factor_observed,
    observed_operands,
    row_blocks,
)
from factormix.core.pairs import pays, significant
from factormix.core.parameters import Parameters, loadings, noise_variances
from factormix.core.screened import Few, screened_statistics
from factormix.core.statistics import Statistics
from factormix.core.symmetric import pairs, symmetric_places
from factormix.core.workspace import Workspace

__all__ = [
    "Sums",
    "batch_statistics",
    "completed_sums",
    "latent_moments",
    "paired_sums",
    "regression",
]

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
