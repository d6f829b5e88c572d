"""Scores and reasons of rows with missing entries, from what each row has observed.

The posterior ``z | x_o, k ~ N(z, V)`` of ``core.observed`` takes the place of that of a complete
row: ``(P xt)_j = E_j (xt_j - lambda_j' z)`` and ``P_jj = E_j (1 - E_j lambda_j' V lambda_j)`` for
observed features, and the mean ``mu_j + lambda_j' z`` with the variance ``1/E_j + lambda_j' V
lambda_j`` for missing ones. Missing features contribute nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from factormix.core.density import Operands, log_normaliser
from factormix.core.observed import (
    Observed,
    ObservedOperands,
    observed_joint,
    project_observed,
    row_blocks,
)
from factormix.core.reasons import (
    LEAST_SHARE,
    Conditionals,
    feature_blocks,
    feature_split,
    loading_rows,
)

__all__ = ["observed_conditionals", "observed_contributions", "observed_score"]

LEAST_PRECISION = 1e-12
"""Share of E below which ``P_jj`` is lost in rounding."""


def observed_score(name: str, x: Tensor, missing: Tensor, known: ObservedOperands) -> Tensor:
    """Compute a score of ``core.scores`` by its name, (B,); 0 for rows without entries."""
    if name not in ("log_likelihood", "best_component"):
        return observed_contributions(name, x, missing, known).sum(dim=1)
    joint = observed_joint(x, missing, known)
    values = log_normaliser(joint)[0] if name == "log_likelihood" else joint.amax(dim=1)
    return values.masked_fill(missing.all(dim=1), 0.0)


def observed_contributions(
    name: str, x: Tensor, missing: Tensor, known: ObservedOperands
) -> Tensor:
    """Split a score over the observed features, (B, d), as ``reasons.contributions`` does."""
    K, l = known.ops.latent_variances.shape
    parts = [
        _contributions(name, x[part], missing[part], known)
        for part in row_blocks(len(x), (K, x.shape[1], l))
    ]
    return torch.cat(parts)


def _contributions(name: str, x: Tensor, missing: Tensor, known: ObservedOperands) -> Tensor:
    ops, seen = known.ops, (~missing).to(x)
    found = project_observed(x, missing, known)
    joint = found.log_prob + ops.log_weights
    R = torch.softmax(joint, dim=1)
    if name != "log_likelihood":
        R = torch.zeros_like(R).scatter(1, R.argmax(dim=1, keepdim=True), 1.0)
    x = x if ops.offset is None else x - ops.offset
    split, level = torch.zeros_like(x), _entropy(R)
    for k in range(R.shape[1]):
        mine = (R[:, k] > LEAST_SHARE).nonzero().squeeze(1)
        if len(mine):
            xt = (x[mine] - ops.E_mu[k] / ops.E[k]) * seen[mine]
            own = _split_by(name, k, xt, ops, found, mine) * seen[mine]
            share = R[mine, k]
            split.index_add_(0, mine, share.unsqueeze(1) * own)
            level.index_add_(0, mine, share * (joint[mine, k] + 0.5 * own.sum(dim=1)))
    if name in ("mahalanobis", "reconstruction"):
        return -split
    return seen * (level / seen.sum(dim=1).clamp(min=1)).unsqueeze(1) - 0.5 * split


def _entropy(R: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(R).sum(dim=1)
    return entropy


def _split_by(
    name: str, k: int, xt: Tensor, ops: Operands, found: Observed, mine: Tensor
) -> Tensor:
    """Compute the split of one component, (B, d), with zeros in xt for what is missing."""
    Lambda, z, Q = loading_rows(ops, k), found.means[mine, k], found.roots[mine, k]
    if z.shape[1] == 0:
        return ops.E[k] * xt.square()
    V = Q.mT @ Q
    if name != "reconstruction":
        return feature_split(xt, ops.E[k], Lambda, z, (V @ z.unsqueeze(-1)).squeeze(-1))
    # The least-squares code of the observed entries: (I - V)^-1 z where the factors span.
    spans = torch.eye(z.shape[1]).to(z) - V
    code: Tensor = torch.linalg.pinv(spans, hermitian=True, rtol=1e-10) @ z.unsqueeze(-1)
    return ops.E[k] * (xt - code.squeeze(-1) @ Lambda).square()


def observed_conditionals(x: Tensor, missing: Tensor, known: ObservedOperands) -> Conditionals:
    """Compute mean, deviation and z-score of each feature given the other observed ones, (B, d).

    A missing feature has a mean and a deviation, and NaN for a z-score.
    """
    K, l = known.ops.latent_variances.shape
    parts = [
        _conditionals(x[part], missing[part], known)
        for part in row_blocks(len(x), (K, x.shape[1], l))
    ]
    return Conditionals(*(torch.cat(kind) for kind in zip(*parts, strict=True)))


def _conditionals(x: Tensor, missing: Tensor, known: ObservedOperands) -> Conditionals:
    ops = known.ops
    found = project_observed(x, missing, known)
    joint = found.log_prob + ops.log_weights
    x = x if ops.offset is None else x - ops.offset
    Lambda = torch.stack([loading_rows(ops, k) for k in range(len(ops.E))])
    K, l, d = Lambda.shape
    # Components first, as in ``reasons.conditionals``: (K, B, ...).
    joint, codes = joint.mT.unsqueeze(2), found.means.transpose(0, 1)
    roots = found.roots.transpose(0, 1).reshape(K, len(x) * l, l)
    expected, variance = torch.empty_like(x), torch.empty_like(x)
    for part in feature_blocks(len(x), K * max(1, l), d):
        E, some = ops.E[:, None, part], Lambda[:, :, part]
        mu, told = ops.E_mu[:, None, part] / E, codes @ some
        spread = (roots @ some).square().view(K, len(x), l, E.shape[2]).sum(dim=2)
        P = E * (1 - E * spread).clamp(min=LEAST_PRECISION)
        step = -E * (x[:, part] - mu - told) / P
        log_density = 0.5 * (P.log() - math.log(2 * math.pi) - P * step.square())
        gap = missing[:, part]
        R = torch.softmax(torch.where(gap, joint, joint - log_density), dim=0)
        means = torch.where(gap, mu + told, x[:, part] + step)
        own = torch.where(gap, E.reciprocal() + spread, P.reciprocal())
        mean = (R * means).sum(dim=0)
        expected[:, part] = mean
        variance[:, part] = (R * (own + (means - mean).square())).sum(dim=0)
    deviation = variance.sqrt()
    z_score = ((x - expected) / deviation).masked_fill(missing, math.nan)
    return Conditionals(
        expected if ops.offset is None else expected + ops.offset, deviation, z_score
    )
