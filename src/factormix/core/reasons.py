"""Why a row scores as it does: a score split over features, and each feature given all others.

With ``xt = x - mu_k``, ``P xt = E xt - Gamma Gamma' xt`` and ``P_jj = E_j - |Gamma_j|^2``, feature
j given all others has the mean ``x_j - (P xt)_j / P_jj`` and the variance ``1 / P_jj``.

The squared Mahalanobis distance is that of the noise and that of the latent code, ``xt' P xt = e' E
e + |z|^2``, with the posterior means ``e = E^-1 P xt`` and ``z = M^(1/2) Gamma' xt``.
Its split over features is ``E_j e_j^2 + xt_j (Gamma M Gamma' xt)_j``: what feature j alone is off,
and its part in a code that is large. (``xt_j (P xt)_j`` sums to the same, but blames a feature that
is off only where it is also far from the component's mean.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core import density
from factormix.core.density import Operands
from factormix.core.scores import subspace_strengths

__all__ = [
    "LEAST_SHARE",
    "Conditionals",
    "conditionals",
    "contributions",
    "feature_blocks",
    "feature_split",
    "loading_rows",
    "precision_of_features",
]

LEAST_SHARE = 1e-12
"""Responsibility below which a component has no say: what it would say is smaller still."""
BLOCK_ELEMENTS = 1 << 18
"""Numbers of a block of features that are worked on at once: they stay in the caches."""


class Conditionals(NamedTuple):
    """What each feature is expected to be, given all other features of the row."""

    expected: Tensor
    """(B, d), the mean of ``x_j`` given the others."""
    deviation: Tensor
    """(B, d), its standard deviation."""
    z_score: Tensor
    """(B, d), ``(x_j - expected_j) / deviation_j``."""


def contributions(name: str, x: Tensor, ops: Operands) -> Tensor:
    """Split a score of ``core.scores``, by its name, over features: (B, d), rows sum to the score.

    What does not depend on x is shared equally. ``log p(x) = sum_k r_k [log pi_k + log p_k(x) - log
    r_k]`` with ``r = p(k | x)``, so that every component speaks by its responsibility; the other
    scores are those of the most probable component.
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

    Feature j does not vote on the component that is to judge it: the components speak by
    ``p(k | all features but j)``, and mean and variance are those of their mixture. It goes some
    features at a time.
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
    """Cut features into blocks for which arrays of rows, components and features stay small.

    No larger, that is, than the rows or the parameters themselves.
    """
    size = n_features // max(1, min(n_rows, n_components))
    size = max(1, min(size, BLOCK_ELEMENTS // max(1, n_rows * n_components)))
    for first in range(0, n_features, size):
        yield slice(first, first + size)


def precision_of_features(ops: Operands) -> Tensor:
    """Compute ``P_jj = E_j - |Gamma_j|^2``, (K, d).

    At least ``E_j min(M)``, which holds exactly because ``I - W W'`` has the eigenvalues one and M:
    where a factor explains one feature alone, the difference may lose all its digits.
    """
    K, l = ops.latent_variances.shape
    if l == 0:
        return ops.E
    Gamma, squares = ops.Gamma.view(K, l, ops.E.shape[1]), torch.zeros_like(ops.E)
    # One pass for each factor is much faster than a sum over so short an axis.
    for factor in Gamma.unbind(dim=1):
        squares.addcmul_(factor, factor)
    least = ops.latent_variances.amin(dim=1, keepdim=True)
    return torch.maximum(ops.E - squares, ops.E * least)


def _constants(ops: Operands) -> Tensor:
    """Compute ``log pi_k + log p_k(mu_k)``, (K,)."""
    # The constant of the operands has what the means have in the products taken off.
    return ops.constant + ops.log_weights + 0.5 * (ops.E_mu.square() / ops.E).sum(dim=1)


def _split_of_one(x: Tensor, ops: Operands, Y: Tensor, which: Tensor) -> Tensor:
    """Compute ``E_j e_j^2 + xt_j (Gamma M Y)_j``, (B, d), of one component of each row."""
    out = torch.empty_like(x)
    for k in torch.unique(which).tolist():
        mine = which == k
        out[mine] = _split_by(k, x[mine], ops, Y[mine, k])
    return out


def _split_by(k: int, x: Tensor, ops: Operands, y: Tensor) -> Tensor:
    """Compute the same, (B, d), for component k and its projections y (B, l)."""
    M = ops.latent_variances[k]
    xt = (x if ops.offset is None else x - ops.offset) - ops.E_mu[k] / ops.E[k]
    z = y * M.sqrt()
    return feature_split(xt, ops.E[k], loading_rows(ops, k), z, z * M)


def feature_split(xt: Tensor, E: Tensor, Lambda: Tensor, z: Tensor, V_z: Tensor) -> Tensor:
    """Compute ``E_j e_j^2 + xt_j E_j (Lambda V z)_j`` with ``e = xt - Lambda z``, (B, d).

    It splits ``e' E e + |z|^2``, where ``z`` (B, l) is the mean and V the covariance of the latent
    posterior; E is (d,), and Lambda (l, d) has its factors as rows.
    """
    return E * (xt - z @ Lambda).square() + xt * E * (V_z @ Lambda)


def loading_rows(ops: Operands, k: int) -> Tensor:
    """Compute the loadings of component k, ``M^(-1/2) Gamma' E^-1``, (l, d)."""
    l = ops.latent_variances.shape[1]
    Gamma = ops.Gamma[k * l : (k + 1) * l]
    return ops.latent_variances[k].rsqrt().unsqueeze(1) * Gamma / ops.E[k]


def _residuals(x: Tensor, ops: Operands, Y: Tensor, which: Tensor) -> Tensor:
    """Compute ``E_j e_j^2``, (B, d), with e the part of xt outside the factors' subspace."""
    xt, y = _differences(x, ops, which), _chosen(Y, which)
    E = ops.E[which]
    outside = xt - _by_component(y * subspace_strengths(ops)[which], ops, which) / E
    return E * outside.square()


def _by_component(y: Tensor, ops: Operands, which: Tensor) -> Tensor:
    """Compute ``Gamma_k y``, (B, d), for codes y (B, l) and the component of each row."""
    K, l = ops.latent_variances.shape
    Gamma, out = ops.Gamma.view(K, l, ops.E.shape[1]), y.new_zeros(len(y), ops.E.shape[1])
    for k in torch.unique(which).tolist():
        mine = which == k
        out[mine] = y[mine] @ Gamma[k]
    return out


def _split_of_all(x: Tensor, ops: Operands, Y: Tensor, R: Tensor) -> Tensor:
    """Compute the sum over components of R times their splits, (B, d).

    Without factors it is three products of the batch. With them, each component is asked about the
    rows that it has a share in: for most rows one or two.
    """
    K, l = ops.latent_variances.shape
    if l == 0:
        x = x if ops.offset is None else x - ops.offset
        return x.square() * (R @ ops.E) - 2 * x * (R @ ops.E_mu) + R @ (ops.E_mu.square() / ops.E)
    out = torch.zeros_like(x)
    for k in range(K):
        mine = (R[:, k] > LEAST_SHARE).nonzero().squeeze(1)
        if len(mine):
            split = _split_by(k, x[mine], ops, Y[mine, k])
            out.index_add_(0, mine, R[mine, k].unsqueeze(1) * split)
    return out


def _differences(x: Tensor, ops: Operands, which: Tensor) -> Tensor:
    x = x if ops.offset is None else x - ops.offset
    return x - (ops.E_mu / ops.E)[which]


def _chosen(Y: Tensor, which: Tensor) -> Tensor:
    return Y[torch.arange(len(Y), device=Y.device), which]
