"""Scores of rows under a mixture, and their attribution to features.

A score is higher for more usual rows. Scores that refer to one component take the most probable
one. A score is split over features, and each feature is compared with its distribution given all
other features of the row.

Given the observed entries ``x_o`` of a row and a component, the latent variable has the posterior
``N(z, V)`` (``core/missing.py``; V is M for a complete row). With ``xt = x - mu_k`` and lambda_j
the loadings of feature j, an observed feature has, given all other observed ones, the precision
``P_jj = E_j (1 - E_j lambda_j' V lambda_j)`` and the mean
``x_j - E_j (xt_j - lambda_j' z) / P_jj``. A missing one has the mean ``mu_j + lambda_j' z`` and the
variance ``1/E_j + lambda_j' V lambda_j``.

The squared Mahalanobis distance is the sum of a distance of the noise and one of the latent code,
``xt' P xt = e' E e + |z|^2``, with ``e = xt - Lambda z``. Its split over features is
``E_j e_j^2 + xt_j E_j (Lambda V z)_j``: the deviation of feature j alone, and its part in a large
code. (``xt_j (P xt)_j`` has the same sum, but blames a deviating feature only where it is also far
from the component's mean.) Missing features contribute nothing.

The parameters of a component are estimates. As a regression of feature j on the others, a component
of N rows predicts a new value with the variance ``1 / P_jj (1 + (1 + h) / N)``, where h is the
squared Mahalanobis distance of the other features from the mean: far out, a small error of a slope
causes a large error of the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core import density
from factormix.core.density import Operands, log_normaliser
from factormix.core.missing import RowBlock, project_observed
from factormix.errors import InputError

LEAST_COUNTED = 1e-12
"""Responsibility below which a component is left out: its contribution would be smaller still."""
UNUSED = 1e-10
"""Relative eigenvalue of ``I - V`` up to which a direction of the code counts as unused: float64
rounds V to about 1e-16, so a direction in use keeps six digits."""
FEATURE_ELEMENTS = 1 << 18
"""Elements of a block of features that are computed at a time: 2 MiB in float64, which stays in the
processor's cache."""


class Conditionals(NamedTuple):
    """The distribution of each feature, given all other observed features of the row."""

    expected: Tensor
    """(B, d), the mean of ``x_j`` given the others."""
    deviation: Tensor
    """(B, d), its standard deviation."""
    z_score: Tensor
    """(B, d), ``(x_j - expected_j) / deviation_j``; NaN for missing features."""


def score(name: str, block: RowBlock) -> Tensor:
    """Compute a score of rows by its name, (B,); 0 for a row without entries."""
    of_joint = _find_score(name).of_joint
    if of_joint is None:
        return contributions(name, block).sum(dim=1)
    found = of_joint(block.joint())
    return found if block.missing is None else found.masked_fill(block.missing.all(dim=1), 0.0)


def contributions(name: str, block: RowBlock) -> Tensor:
    """Split a score, by its name, over observed features: (B, d), rows sum to the score.

    Terms that do not depend on x are shared equally. ``log p(x) = sum_k r_k [log pi_k + log p_k(x)
    - log r_k]`` with ``r = p(k | x)``, so every component counts by its responsibility. The other
    scores refer to the most probable component.
    """
    kind = _find_score(name)
    return torch.cat([_split(kind, _Rows.of(part), part.ops) for part in block.split()])


def conditionals(block: RowBlock, counts: Tensor | None = None) -> Conditionals:
    """Compute mean, deviation and z-score of each feature given the other observed ones, (B, d).

    Feature j has no influence on the component that judges it: components count by
    ``p(k | all features but j)``, and mean and variance are of their mixture. ``counts`` (K,), the
    training rows of each component, adds the uncertainty of the parameters to the variance.
    """
    parts = list[Conditionals]()
    for part in block.split():
        sizes = None if counts is None else _Sizes(counts, part.peaks())
        parts.append(_condition(_Rows.of(part), part.ops, sizes))
    return Conditionals(*(torch.cat(kind) for kind in zip(*parts, strict=True)))


def compressed(u: Tensor) -> Tensor:
    """Compute ``sign(u) log(1 + |u|)``, a scale on which large values differ little."""
    return u.sign() * u.abs().log1p()


def compression_slope(u: Tensor) -> Tensor:
    """Compute ``compressed(u) / u``, which is 1 at zero."""
    size = u.abs()
    return torch.where(size > 0, size.log1p() / size, torch.ones_like(size))


class _Score(NamedTuple):
    """How a score follows from the components, and how its distance is split over features."""

    of_joint: Callable[[Tensor], Tensor] | None
    """Turns ``log pi_k + log p_k(x)``, (B, K), into a log-density; None for minus a distance."""
    of_one_component: bool
    split_distance: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    """Takes xt (n, d), E (d,), Lambda (l, d), z (n, l) and V (n or 1, l, l); returns (n, d)."""


def _split_mahalanobis(xt: Tensor, E: Tensor, Lambda: Tensor, z: Tensor, V: Tensor) -> Tensor:
    """Compute ``E_j e_j^2 + xt_j E_j (Lambda V z)_j`` with ``e = xt - Lambda z``."""
    V_z = (V @ z.unsqueeze(-1)).squeeze(-1)
    return E * (xt - z @ Lambda).square() + xt * E * (V_z @ Lambda)


def _split_residual(xt: Tensor, E: Tensor, Lambda: Tensor, z: Tensor, V: Tensor) -> Tensor:
    """Compute ``E_j e_j^2`` with e the part of xt outside the factors' subspace.

    The least-squares code in the metric E is ``(I - V)^-1 z`` where the factors span.
    """
    if z.shape[1] == 0:
        return E * xt.square()
    span = torch.eye(z.shape[1]).to(z) - V
    code: Tensor = torch.linalg.pinv(span, hermitian=True, rtol=UNUSED) @ z.unsqueeze(-1)
    return E * (xt - code.squeeze(-1) @ Lambda).square()


_SCORES = {
    "log_likelihood": _Score(lambda joint: log_normaliser(joint)[0], False, _split_mahalanobis),
    "best_component": _Score(lambda joint: joint.amax(dim=1), True, _split_mahalanobis),
    "mahalanobis": _Score(None, True, _split_mahalanobis),
    "reconstruction": _Score(None, True, _split_residual),
}

SCORES = tuple(_SCORES)


def _find_score(name: str) -> _Score:
    if name not in _SCORES:
        raise InputError(f"there is no score {name!r}: choose one of {', '.join(SCORES)}.")
    return _SCORES[name]


class _Rows(NamedTuple):
    """Rows, and the latent posterior of every component given their observed entries."""

    x: Tensor
    """(B, d), relative to the offset of the operands; zero where missing."""
    seen: Tensor
    """(B, d), 1 for observed entries and 0 for missing ones."""
    joint: Tensor
    """``log pi_k + log p_k(x_o)``, (B, K)."""
    means: Tensor
    """z, (K, B, l)."""
    roots: Tensor
    """Q with ``V = Q' Q``, (K, B, l, l), or (K, 1, l, l) where it is the same for all rows."""

    @classmethod
    def of(cls, block: RowBlock) -> _Rows:
        """Compute the posteriors of a block of rows."""
        ops, x, gaps = block.ops, block.x, block.missing
        if gaps is None:
            log_p, Y = density.project(x, ops)
            root = ops.latent_variances.sqrt()
            means, roots = (Y * root).transpose(0, 1), root.diag_embed().unsqueeze(1)
            return cls(ops.centre(x), torch.ones_like(x), log_p + ops.log_weights, means, roots)
        log_p, means, roots = project_observed(x, gaps, block.mixture.observed)
        x, seen = ops.centre(x).masked_fill(gaps, 0), (~gaps).to(x)
        joint = log_p + ops.log_weights
        return cls(x, seen, joint, means.transpose(0, 1), roots.transpose(0, 1))


def _split(kind: _Score, rows: _Rows, ops: Operands) -> Tensor:
    """Split a score over features, (B, d).

    Each component is evaluated for the rows in which it has a share: most rows have one or two such
    components.
    """
    R = torch.softmax(rows.joint, dim=1)
    if kind.of_one_component:
        R = torch.zeros_like(R).scatter(1, R.argmax(dim=1, keepdim=True), 1.0)
    Lambda, split = _loading_rows(ops), torch.zeros_like(rows.x)
    level: Tensor = torch.special.entr(R).sum(dim=1)
    for k in (R > LEAST_COUNTED).any(dim=0).nonzero().squeeze(1).tolist():
        chosen = (R[:, k] > LEAST_COUNTED).nonzero().squeeze(1)
        seen, Q, share = rows.seen[chosen], rows.roots[k], R[chosen, k]
        Q = Q if len(Q) == 1 else Q[chosen]
        xt = (rows.x[chosen] - ops.E_mu[k] / ops.E[k]) * seen
        own = kind.split_distance(xt, ops.E[k], Lambda[k], rows.means[k, chosen], Q.mT @ Q) * seen
        split.index_add_(0, chosen, share.unsqueeze(1) * own)
        # The rest of the log-density does not depend on x.
        level.index_add_(0, chosen, share * (rows.joint[chosen, k] + 0.5 * own.sum(dim=1)))
    if kind.of_joint is None:
        return -split
    n_seen = rows.seen.sum(dim=1).clamp(min=1)
    return rows.seen * (level / n_seen).unsqueeze(1) - 0.5 * split


class _Sizes(NamedTuple):
    """What the prediction error of components depends on."""

    counts: Tensor
    """Training rows of each component, (K,)."""
    peaks: Tensor
    """``log p_k`` at ``mu_k``, (K,), or at its observed part, (B, K)."""

    def distances(self, rows: _Rows, ops: Operands) -> Tensor:
        """Compute ``xt' P xt`` of every component and row, (K, B, 1)."""
        return 2 * (self.peaks + ops.log_weights - rows.joint).mT.unsqueeze(2)

    def prediction_factor(self, h: Tensor) -> Tensor:
        """Compute ``1 + (1 + h) / N`` of distances h (K, B, b)."""
        return 1 + (1 + h.clamp(min=0)) / self.counts.to(h)[:, None, None]


def _condition(rows: _Rows, ops: Operands, sizes: _Sizes | None = None) -> Conditionals:
    """Compute the distribution of each feature given the others, a block of features at a time."""
    x, Lambda = rows.x, _loading_rows(ops)
    K, l, d = Lambda.shape
    n = rows.roots.shape[1]
    joint, roots = rows.joint.mT.unsqueeze(2), rows.roots.flatten(1, 2)
    # ``I - W W'`` of a precision ``E^(1/2) (I - W W') E^(1/2)`` has the eigenvalues one and, for a
    # complete row, M; fewer entries make V larger. Rounding must not give smaller ones.
    least = torch.nn.functional.pad(ops.latent_variances, (0, 1), value=1.0).amin(dim=1)
    missing = rows.seen == 0
    incomplete = bool(missing.any())
    distances = joint if sizes is None else sizes.distances(rows, ops)
    # Relative to x_j, so that means far from zero cost no digits of the variance.
    expected, variance = torch.empty_like(x), torch.empty_like(x)
    for part in feature_blocks(len(x), K if n == 1 else K * max(1, l), d):
        # Of every component, row and feature of the block, (K, B, b).
        E, some = ops.E[:, None, part], Lambda[:, :, part]
        e = x[:, part] - ops.E_mu[:, None, part] / E - rows.means @ some
        spread = (roots @ some).square().view(K, n, l, E.shape[2]).sum(dim=2)
        P = E * torch.maximum(1 - E * spread, least.view(K, 1, 1))
        step, own = e * (-E / P), P.reciprocal()
        own_distance = P * step.square()
        log_density = 0.5 * (P.log() - math.log(2 * math.pi) - own_distance)
        if incomplete:
            gap = missing[:, part]
            log_density, own_distance = (t.masked_fill(gap, 0) for t in (log_density, own_distance))
            step, own = torch.where(gap, -e, step), torch.where(gap, 1 / E + spread, own)
        if sizes is not None:
            own = own * sizes.prediction_factor(distances - own_distance)
        R = torch.softmax(joint - log_density, dim=0)
        mean = (R * step).sum(dim=0)
        expected[:, part] = mean
        variance[:, part] = (R * (own + (step - mean).square())).sum(dim=0)
    deviation = variance.sqrt()
    z_score = (-expected / deviation).masked_fill(missing, math.nan)
    origin = x if ops.offset is None else x + ops.offset
    return Conditionals(origin + expected, deviation, z_score)


def feature_blocks(n_rows: int, n_components: int, n_features: int) -> Iterator[slice]:
    """Cut features into blocks whose arrays (rows, components, features) stay small.

    Arrays are no larger than the rows or the parameters.
    """
    size = n_features // max(1, min(n_rows, n_components))
    size = max(1, min(size, FEATURE_ELEMENTS // max(1, n_rows * n_components)))
    for first in range(0, n_features, size):
        yield slice(first, first + size)


def _loading_rows(ops: Operands) -> Tensor:
    """Compute the loadings ``M^(-1/2) Gamma' E^-1``, (K, l, d)."""
    K, l = ops.latent_variances.shape
    Gamma = ops.Gamma.view(K, l, ops.E.shape[1])
    return ops.latent_variances.rsqrt().unsqueeze(2) * Gamma / ops.E.unsqueeze(1)
