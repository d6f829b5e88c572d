"""Scores of rows under a mixture, and their attribution to features.

A score is higher for more usual rows. Scores that refer to one component take the most probable
one. A score is split over features, and each feature is compared with its distribution given all
other features of the row.

With ``xt = x - mu_k``, ``P xt = E xt - Gamma Gamma' xt`` and ``P_jj = E_j - |Gamma_j|^2``, feature
j given all others has the mean ``x_j - (P xt)_j / P_jj`` and the variance ``1 / P_jj``.

The squared Mahalanobis distance is the sum of a distance of the noise and one of the latent code,
``xt' P xt = e' E e + |z|^2``, with the posterior means ``e = E^-1 P xt`` and
``z = M^(1/2) Gamma' xt``. Its split over features is ``E_j e_j^2 + xt_j (Gamma M Gamma' xt)_j``:
the deviation of feature j alone, and its part in a large code. (``xt_j (P xt)_j`` has the same sum,
but blames a deviating feature only where it is also far from the component's mean.)

For rows with missing entries, the posterior ``z | x_o, k ~ N(z, V)`` of ``core/missing.py``
replaces the posterior of a complete row: ``(P xt)_j = E_j (xt_j - lambda_j' z)`` and
``P_jj = E_j (1 - E_j lambda_j' V lambda_j)`` for observed features, and the mean
``mu_j + lambda_j' z`` with the variance ``1/E_j + lambda_j' V lambda_j`` for missing ones. Missing
features contribute nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core import density
from factormix.core.density import Operands, log_normaliser
from factormix.core.missing import (
    Observed,
    ObservedOperands,
    observed_joint,
    project_observed,
    row_blocks,
)

SCORES = ("log_likelihood", "best_component", "mahalanobis", "reconstruction")

UNUSED = 1e-12
"""``1 - M`` up to which a factor counts as unused: it spans no direction."""


def score(name: str, x: Tensor, ops: Operands) -> Tensor:
    """Compute a score by its name, (B,), of x (B, d)."""
    functions = {
        "log_likelihood": log_likelihood,
        "best_component": best_component,
        "mahalanobis": mahalanobis,
        "reconstruction": reconstruction,
    }
    return functions[name](x, ops)


def log_likelihood(x: Tensor, ops: Operands) -> Tensor:
    """Compute ``log sum_k pi_k p_k(x)``, (B,)."""
    return density.log_prob(x, ops)


def best_component(x: Tensor, ops: Operands) -> Tensor:
    """Compute ``max_k [log pi_k + log p_k(x)]``, (B,), the max-component form of the paper."""
    return density.joint_log_prob(x, ops).amax(dim=1)


def mahalanobis(x: Tensor, ops: Operands) -> Tensor:
    """Compute ``-xt' P xt``, (B,): minus the squared distance to the most probable component."""
    E_distance, Y, _ = _of_best(x, ops)
    return -(E_distance - Y.square().sum(dim=1))


def reconstruction(x: Tensor, ops: Operands) -> Tensor:
    """Compute minus the squared length, (B,), of the part of xt outside the factors' subspace.

    In the metric E of the noise, the least-squares code ``M^(1/2) Y / (1 - M)`` leaves
    ``xt' E xt - sum_i Y_i^2 / (1 - M_i)``, for the most probable component.
    """
    E_distance, Y, best = _of_best(x, ops)
    return -(E_distance - (Y.square() * subspace_strengths(ops)[best]).sum(dim=1))


def subspace_strengths(ops: Operands) -> Tensor:
    """Compute ``1 / (1 - M)``, (K, l), zero for factors that are not in use."""
    span = 1 - ops.latent_variances
    return torch.where(span > UNUSED, span.clamp(min=UNUSED).reciprocal(), torch.zeros_like(span))


def of_component(x: Tensor, ops: Operands, which: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``xt' E xt``, (B,), and ``Gamma' xt``, (B, l), for one component of each row."""
    _, Y = density.project(x, ops)
    x = x if ops.offset is None else x - ops.offset
    E, E_mu = ops.E[which], ops.E_mu[which]
    xt = x - E_mu / E
    rows = torch.arange(len(x), device=x.device)
    return (E * xt.square()).sum(dim=1), Y[rows, which]


def _of_best(x: Tensor, ops: Operands) -> tuple[Tensor, Tensor, Tensor]:
    best = density.joint_log_prob(x, ops).argmax(dim=1)
    return (*of_component(x, ops, best), best)


def compressed(u: Tensor) -> Tensor:
    """Compute ``sign(u) log(1 + |u|)``, a scale on which large values differ little."""
    return u.sign() * u.abs().log1p()


def compression_slope(u: Tensor) -> Tensor:
    """Compute ``compressed(u) / u``, which is 1 at zero."""
    size = u.abs()
    return torch.where(size > 1e-8, size.log1p() / size.clamp(min=1e-8), torch.ones_like(size))


LEAST_SHARE = 1e-12
"""Responsibility below which a component is left out: its contribution would be smaller still."""
BLOCK_ELEMENTS = 1 << 18
"""Elements of a block of features that are computed at a time: they stay in the cache."""


class Conditionals(NamedTuple):
    """The distribution of each feature, given all other features of the row."""

    expected: Tensor
    """(B, d), the mean of ``x_j`` given the others."""
    deviation: Tensor
    """(B, d), its standard deviation."""
    z_score: Tensor
    """(B, d), ``(x_j - expected_j) / deviation_j``."""


def contributions(name: str, x: Tensor, ops: Operands) -> Tensor:
    """Split a score, by its name, over features: (B, d), rows sum to the score.

    Terms that do not depend on x are shared equally. ``log p(x) = sum_k r_k [log pi_k + log p_k(x)
    - log r_k]`` with ``r = p(k | x)``, so every component counts by its responsibility. The other
    scores refer to the most probable component.
    """
    log_p, Y = density.project(x, ops)
    joint = log_p + ops.log_weights
    best = joint.argmax(dim=1)
    if name == "mahalanobis":
        return -_split_of_one(x, ops, Y, best)
    if name == "reconstruction":
        return -_residuals(x, ops, Y, best)
    if name == "best_component":
        split = -0.5 * _split_of_one(x, ops, Y, best)
        return split + _constants(ops)[best].unsqueeze(1) / x.shape[1]
    R = torch.softmax(joint, dim=1)
    level: Tensor = (R * _constants(ops)).sum(dim=1) + torch.special.entr(R).sum(dim=1)
    return -0.5 * _split_of_all(x, ops, Y, R) + level.unsqueeze(1) / x.shape[1]


def conditionals(x: Tensor, ops: Operands) -> Conditionals:
    """Compute mean, deviation and z-score of each feature given all others, each (B, d).

    Feature j has no influence on the component that judges it: components count by
    ``p(k | all features but j)``, and mean and variance are of their mixture.
    """
    log_p, Y = density.project(x, ops)
    joint = (log_p + ops.log_weights).mT.unsqueeze(2)
    x = x if ops.offset is None else x - ops.offset
    P = precision_of_features(ops)
    K, l = ops.latent_variances.shape
    Gamma, codes = ops.Gamma.view(K, l, x.shape[1]), Y.transpose(0, 1)
    expected, variance = torch.empty_like(x), torch.empty_like(x)
    for part in feature_blocks(len(x), K, x.shape[1]):
        # Of every component, row and feature of the block, (K, B, b).
        E, P_jj = ops.E[:, None, part], P[:, None, part]
        P_xt = E * (x[:, part] - ops.E_mu[:, None, part] / E) - codes @ Gamma[:, :, part]
        # Relative to x_j, so that means far from zero cost no digits of the variance.
        step = -P_xt / P_jj
        log_density = 0.5 * (P_jj.log() - math.log(2 * math.pi) + P_xt * step)
        R = torch.softmax(joint - log_density, dim=0)
        mean = (R * step).sum(dim=0)
        spread = P_jj.reciprocal() + (step - mean).square()
        expected[:, part], variance[:, part] = mean, (R * spread).sum(dim=0)
    deviation = variance.sqrt()
    z_score = -expected / deviation
    level = x if ops.offset is None else x + ops.offset
    return Conditionals(level + expected, deviation, z_score)


def feature_blocks(n_rows: int, n_components: int, n_features: int) -> Iterator[slice]:
    """Cut features into blocks whose arrays (rows, components, features) stay small.

    Arrays are no larger than the rows or the parameters.
    """
    size = n_features // max(1, min(n_rows, n_components))
    size = max(1, min(size, BLOCK_ELEMENTS // max(1, n_rows * n_components)))
    for first in range(0, n_features, size):
        yield slice(first, first + size)


def precision_of_features(ops: Operands) -> Tensor:
    """Compute ``P_jj = E_j - |Gamma_j|^2``, (K, d).

    It is at least ``E_j min(M)``, because ``I - W W'`` has the eigenvalues one and M. Where a
    factor explains one feature alone, the difference may lose all its digits.
    """
    K, l = ops.latent_variances.shape
    if l == 0:
        return ops.E
    Gamma, squares = ops.Gamma.view(K, l, ops.E.shape[1]), torch.zeros_like(ops.E)
    # One pass for each factor is much faster than a sum over such a short axis.
    for factor in Gamma.unbind(dim=1):
        squares.addcmul_(factor, factor)
    least = ops.latent_variances.amin(dim=1, keepdim=True)
    return torch.maximum(ops.E - squares, ops.E * least)


def _constants(ops: Operands) -> Tensor:
    """Compute ``log pi_k + log p_k(mu_k)``, (K,)."""
    # The constant of the operands lacks the squares of the means.
    return ops.constant + ops.log_weights + 0.5 * (ops.E_mu.square() / ops.E).sum(dim=1)


def _split_of_one(x: Tensor, ops: Operands, Y: Tensor, which: Tensor) -> Tensor:
    """Compute ``E_j e_j^2 + xt_j (Gamma M Y)_j``, (B, d), of one component of each row."""
    out = torch.empty_like(x)
    for k in torch.unique(which).tolist():
        chosen = which == k
        out[chosen] = _split_by(k, x[chosen], ops, Y[chosen, k])
    return out


def _split_by(k: int, x: Tensor, ops: Operands, y: Tensor) -> Tensor:
    """Compute ``_split_of_one`` for component k and its projections y (B, l)."""
    M = ops.latent_variances[k]
    xt = (x if ops.offset is None else x - ops.offset) - ops.E_mu[k] / ops.E[k]
    z = y * M.sqrt()
    return feature_split(xt, ops.E[k], loading_rows(ops, k), z, z * M)


def feature_split(xt: Tensor, E: Tensor, Lambda: Tensor, z: Tensor, V_z: Tensor) -> Tensor:
    """Compute ``E_j e_j^2 + xt_j E_j (Lambda V z)_j`` with ``e = xt - Lambda z``, (B, d).

    This splits ``e' E e + |z|^2``, where z (B, l) is the mean and V the covariance of the latent
    posterior. E is (d,), and Lambda (l, d) has the factors as rows.
    """
    return E * (xt - z @ Lambda).square() + xt * E * (V_z @ Lambda)


def loading_rows(ops: Operands, k: int) -> Tensor:
    """Compute the loadings of component k, ``M^(-1/2) Gamma' E^-1``, (l, d)."""
    l = ops.latent_variances.shape[1]
    Gamma = ops.Gamma[k * l : (k + 1) * l]
    return ops.latent_variances[k].rsqrt().unsqueeze(1) * Gamma / ops.E[k]


def _residuals(x: Tensor, ops: Operands, Y: Tensor, which: Tensor) -> Tensor:
    """Compute ``E_j e_j^2``, (B, d), with e the part of xt outside the factors' subspace."""
    xt, y = _differences(x, ops, which), _select(Y, which)
    E = ops.E[which]
    outside = xt - _by_component(y * subspace_strengths(ops)[which], ops, which) / E
    return E * outside.square()


def _by_component(y: Tensor, ops: Operands, which: Tensor) -> Tensor:
    """Compute ``Gamma_k y``, (B, d), for codes y (B, l) and the component of each row."""
    K, l = ops.latent_variances.shape
    Gamma, out = ops.Gamma.view(K, l, ops.E.shape[1]), y.new_zeros(len(y), ops.E.shape[1])
    for k in torch.unique(which).tolist():
        chosen = which == k
        out[chosen] = y[chosen] @ Gamma[k]
    return out


def _split_of_all(x: Tensor, ops: Operands, Y: Tensor, R: Tensor) -> Tensor:
    """Compute the sum over components of R times their splits, (B, d).

    Without factors this is three matrix products. With factors, each component is evaluated for the
    rows in which it has a share, and most rows have one or two such components.
    """
    K, l = ops.latent_variances.shape
    if l == 0:
        x = x if ops.offset is None else x - ops.offset
        return x.square() * (R @ ops.E) - 2 * x * (R @ ops.E_mu) + R @ (ops.E_mu.square() / ops.E)
    out = torch.zeros_like(x)
    for k in range(K):
        chosen = (R[:, k] > LEAST_SHARE).nonzero().squeeze(1)
        if len(chosen):
            split = _split_by(k, x[chosen], ops, Y[chosen, k])
            out.index_add_(0, chosen, R[chosen, k].unsqueeze(1) * split)
    return out


def _differences(x: Tensor, ops: Operands, which: Tensor) -> Tensor:
    x = x if ops.offset is None else x - ops.offset
    return x - (ops.E_mu / ops.E)[which]


def _select(Y: Tensor, which: Tensor) -> Tensor:
    return Y[torch.arange(len(Y), device=Y.device), which]


LEAST_PRECISION = 1e-12
"""Share of E below which ``P_jj`` is rounding error."""


def observed_score(name: str, x: Tensor, missing: Tensor, known: ObservedOperands) -> Tensor:
    """Compute a score by its name, (B,), of rows with missing entries; 0 for an empty row."""
    if name not in ("log_likelihood", "best_component"):
        return observed_contributions(name, x, missing, known).sum(dim=1)
    joint = observed_joint(x, missing, known)
    values = log_normaliser(joint)[0] if name == "log_likelihood" else joint.amax(dim=1)
    return values.masked_fill(missing.all(dim=1), 0.0)


def observed_contributions(
    name: str, x: Tensor, missing: Tensor, known: ObservedOperands
) -> Tensor:
    """Split a score over the observed features, (B, d), as ``contributions`` does."""
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
        chosen = (R[:, k] > LEAST_SHARE).nonzero().squeeze(1)
        if len(chosen):
            xt = (x[chosen] - ops.E_mu[k] / ops.E[k]) * seen[chosen]
            own = _split_observed_by(name, k, xt, ops, found, chosen) * seen[chosen]
            share = R[chosen, k]
            split.index_add_(0, chosen, share.unsqueeze(1) * own)
            level.index_add_(0, chosen, share * (joint[chosen, k] + 0.5 * own.sum(dim=1)))
    if name in ("mahalanobis", "reconstruction"):
        return -split
    return seen * (level / seen.sum(dim=1).clamp(min=1)).unsqueeze(1) - 0.5 * split


def _entropy(R: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(R).sum(dim=1)
    return entropy


def _split_observed_by(
    name: str, k: int, xt: Tensor, ops: Operands, found: Observed, chosen: Tensor
) -> Tensor:
    """Compute the split of one component, (B, d), with zeros in xt for what is missing."""
    Lambda, z, Q = loading_rows(ops, k), found.means[chosen, k], found.roots[chosen, k]
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
    # Components first, as in ``conditionals``: (K, B, ...).
    joint, codes = joint.mT.unsqueeze(2), found.means.transpose(0, 1)
    roots = found.roots.transpose(0, 1).reshape(K, len(x) * l, l)
    expected, variance = torch.empty_like(x), torch.empty_like(x)
    for part in feature_blocks(len(x), K * max(1, l), d):
        E, some = ops.E[:, None, part], Lambda[:, :, part]
        mu, explained = ops.E_mu[:, None, part] / E, codes @ some
        spread = (roots @ some).square().view(K, len(x), l, E.shape[2]).sum(dim=2)
        P = E * (1 - E * spread).clamp(min=LEAST_PRECISION)
        step = -E * (x[:, part] - mu - explained) / P
        log_density = 0.5 * (P.log() - math.log(2 * math.pi) - P * step.square())
        gap = missing[:, part]
        R = torch.softmax(torch.where(gap, joint, joint - log_density), dim=0)
        means = torch.where(gap, mu + explained, x[:, part] + step)
        own = torch.where(gap, E.reciprocal() + spread, P.reciprocal())
        mean = (R * means).sum(dim=0)
        expected[:, part] = mean
        variance[:, part] = (R * (own + (means - mean).square())).sum(dim=0)
    deviation = variance.sqrt()
    z_score = ((x - expected) / deviation).masked_fill(missing, math.nan)
    return Conditionals(
        expected if ops.offset is None else expected + ops.offset, deviation, z_score
    )
