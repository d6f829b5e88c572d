"""Quantities that describe a trained mixture.

Information criteria, components in use, rotations that make loadings easier to read, shares of
variance, overlaps of components by l x l algebra, and the comparison of two samples bin by bin.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import BLOCK_ELEMENTS, slice_rows
from factormix.core.noise import Noise
from factormix.core.parameters import Parameters, loadings, noise_variances


def n_free_parameters(
    n_components: int, n_features: int, n_factors: int, noise: str = "component"
) -> int:
    """Count the free parameters of a mixture: weights, means, noise variances and loadings.

    ``noise`` is the noise model.
    """
    K, d, l = n_components, n_features, n_factors
    return int(K - 1 + K * (d + n_loadings(d, l)) + Noise(noise).count_variances(K, d))


def n_loadings(n_features: int, n_factors: Any) -> Any:
    """Count the free loadings of a component of l factors, or of several components.

    A rotation of the factors changes no density, so ``l (l - 1) / 2`` of them are not free.
    """
    return n_factors * n_features - n_factors * (n_factors - 1) // 2


def bic(log_likelihood: float, n_parameters: int, n_rows: int) -> float:
    """Compute ``-2 log L + p log n`` (Schwarz, 1978), with L the likelihood of all rows."""
    return -2 * log_likelihood + n_parameters * math.log(n_rows)


def aic(log_likelihood: float, n_parameters: int) -> float:
    """Compute ``-2 log L + 2 p``, Akaike's criterion, with L the likelihood of all rows."""
    return -2 * log_likelihood + 2 * n_parameters


def icl(log_likelihood: float, entropy: float, n_parameters: int, n_rows: int) -> float:
    """Compute ``BIC + 2 H``, the integrated complete likelihood (Biernacki and others, 2000).

    H is the entropy of the assignments of all rows. Components that share rows are penalised, so
    the criterion counts clusters rather than components.
    """
    return bic(log_likelihood, n_parameters, n_rows) + 2 * entropy


def assignment_entropy(joint: Tensor) -> Tensor:
    """Compute ``-sum_k r_k log r_k``, (B,), from ``log pi_k + log p_k(x)``, (B, K)."""
    log_r = torch.log_softmax(joint, dim=1)
    return -torch.xlogy(log_r.exp(), log_r.exp()).sum(dim=1)


IN_USE = 0.1
"""Share of the average weight from which a component is in use: below it, training replaces it
(``Replacement.unused_weight`` in ``training/solvers/schedule.py``)."""


def in_use(weights: Any) -> Any:
    """Return which components weigh at least 0.1 / K, (K,), for an array or tensor of weights.

    At least one does, because the weights sum to one.
    """
    return weights >= IN_USE / len(weights)


def components_in_use(weights: Any) -> int:
    """Count the components in use, for an array or tensor of weights (K,)."""
    return int(in_use(weights).sum())


MOST_ROTATIONS = 500
"""Most steps of varimax; tens are usual."""
LEAST_GAIN = 1e-9
"""Relative gain of the criterion at which a rotation has converged: loadings then change by about
the square root, which no picture shows."""


class Rotated(NamedTuple):
    """Loadings after a rotation, and the rotation."""

    loadings: Tensor
    """(K, d, l), ``Lambda R``, columns of the largest sum of squares first."""
    rotation: Tensor
    """R, (K, l, l), orthogonal; codes z become ``R' z``."""


def varimax(loadings: Tensor) -> Rotated:
    """Rotate the loadings (K, d, l) of each component so that their squares vary most.

    Loadings of a factor are then large for some features and near zero for the others (Kaiser,
    1958). ``Lambda Lambda'``, and with it every density, does not change. The largest element of
    each column is positive.
    """
    K, _, l = loadings.shape
    R = torch.eye(l, dtype=loadings.dtype, device=loadings.device).repeat(K, 1, 1)
    if l < 2:
        return _ordered(loadings, R)
    before = best = varimax_criterion(loadings)
    kept = R
    for _ in range(MOST_ROTATIONS):
        L = loadings @ R
        # The gradient of the criterion; its polar factor is the next rotation.
        gradient = loadings.mT @ (L.pow(3) - L * L.square().mean(dim=1, keepdim=True))
        U, _, Vh = torch.linalg.svd(gradient)
        R = U @ Vh
        now = varimax_criterion(loadings @ R)
        # With more factors than features, a step may lose: the best rotation is kept.
        kept = torch.where((now > best).view(K, 1, 1), R, kept)
        best = torch.maximum(now, best)
        if bool((now - before <= LEAST_GAIN * now.abs()).all()):
            break
        before = now
    return _ordered(loadings, kept)


def varimax_criterion(loadings: Tensor) -> Tensor:
    """Compute the sum over factors of the variance of the squared loadings (K, d, l), (K,)."""
    squares = loadings.square()
    return (squares - squares.mean(dim=1, keepdim=True)).square().mean(dim=1).sum(dim=1)


def _ordered(loadings: Tensor, R: Tensor) -> Rotated:
    """Put the strongest column first, and make the largest element of each positive."""
    L = loadings @ R
    order = L.square().sum(dim=1).argsort(dim=1, descending=True)
    L, R = (t.gather(2, order.unsqueeze(1).expand_as(t)) for t in (L, R))
    if L.shape[2] == 0:
        return Rotated(L, R)
    largest = L.gather(1, L.abs().argmax(dim=1, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).to(L)
    return Rotated(L * sign, R * sign)


class VarianceShares(NamedTuple):
    """Shares of the variance, summed over features."""

    between: Tensor
    """Scalar: the share of the mixture's variance that lies between the means."""
    factors: Tensor
    """(K, l): the share of each component's own variance that each of its factors explains."""
    noise: Tensor
    """(K,): the share of each component's own variance that is noise."""
    within_factors: Tensor
    """Scalar: the share of the mixture's variance that the factors explain."""
    within_noise: Tensor
    """Scalar: the share of the mixture's variance that is noise."""


def variance_shares(parameters: Parameters) -> VarianceShares:
    """Compute the shares of variance, by ``tr Sigma_k = sum D_k + sum_j |lambda_kj|^2``.

    The variance of the mixture is the variance of the means plus the mean variance of components.
    """
    pi, mu = parameters.log_weights.exp(), parameters.means
    explained = loadings(parameters).square().sum(dim=1)
    noise = noise_variances(parameters.precision_diag).sum(dim=1)
    own = explained.sum(dim=1) + noise
    between = pi @ (mu - pi @ mu).square().sum(dim=1)
    total = between + pi @ own
    return VarianceShares(
        between / total,
        explained / own.unsqueeze(1),
        noise / own,
        pi @ explained.sum(dim=1) / total,
        pi @ noise / total,
    )


def feature_variances(parameters: Parameters) -> Tensor:
    """Compute the variance of each feature under the whole mixture, (d,)."""
    pi, mu = parameters.log_weights.exp(), parameters.means
    explained = loadings(parameters).square().sum(dim=2)
    own = explained + noise_variances(parameters.precision_diag)
    return pi @ ((mu - pi @ mu).square() + own)


def communalities(parameters: Parameters) -> Tensor:
    """Compute the share of each feature's variance that a component's factors explain, (K, d)."""
    explained = loadings(parameters).square().sum(dim=2)
    return explained / (explained + noise_variances(parameters.precision_diag))


def bhattacharyya(one: Parameters, other: Parameters) -> Tensor:
    """Compute the Bhattacharyya distances B of all components of two mixtures, (K, J).

    ``exp(-B)`` is ``integral sqrt(p_k p_j)``: one for the same Gaussian, zero without overlap. With
    ``S = (Sigma_k + Sigma_j) / 2 = D + V V'``, ``V = [Lambda_k, Lambda_j] / sqrt 2`` and
    ``x = mu_k - mu_j`` it is ``B = 1/8 x' S^-1 x + 1/2 log(|S| / sqrt(|Sigma_k| |Sigma_j|))``. S is
    inverted by a 2l x 2l matrix.
    """
    (K, _, l), (J, d, m) = one.shape, other.shape
    parts = slice_rows(J, BLOCK_ELEMENTS // (d * (l + m + 1)))
    rows = []
    for k in range(K):
        single = one.take(slice(k, k + 1))
        rows.append(torch.cat([_distances(single, other.take(part)) for part in parts]))
    return torch.stack(rows)


def _distances(single: Parameters, others: Parameters) -> Tensor:
    """Compute the distances B of one Gaussian to some others, (J,)."""
    J = others.shape[0]
    D = (noise_variances(single.precision_diag) + noise_variances(others.precision_diag)) / 2
    both = [loadings(single).expand(J, -1, -1), loadings(others)]
    V = torch.cat(both, dim=2) / 2**0.5
    weighted = V / D.unsqueeze(2)
    A = V.mT @ weighted
    A = A + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    factor = torch.linalg.cholesky(A)
    x = single.means - others.means
    b = torch.einsum("jdm,jd->jm", weighted, x)
    inner = torch.linalg.solve_triangular(factor, b.unsqueeze(2), upper=False).squeeze(2)
    squared = (x.square() / D).sum(dim=1) - inner.square().sum(dim=1)
    log_S = D.log().sum(dim=1) + 2 * factor.diagonal(dim1=1, dim2=2).log().sum(dim=1)
    volume = log_S - (_log_volume(single) + _log_volume(others)) / 2
    distances: Tensor = (squared / 8 + volume / 2).clamp(min=0)
    return distances


def _log_volume(parameters: Parameters) -> Tensor:
    """Compute ``log |Sigma|``, (K,), from the loadings, so that equal components are at zero."""
    Lambda, E = loadings(parameters), parameters.precision_diag
    A = Lambda.mT @ (E.unsqueeze(-1) * Lambda)
    A = A + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    factor = torch.linalg.cholesky(A)
    volume: Tensor = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(dim=1) - E.log().sum(dim=1)
    return volume


def p_values(first: Tensor, second: Tensor) -> Tensor:
    """Compute the two-sided p-value of equal proportions for each bin, from counts (n_bins,).

    By the two-proportion z-test with pooled variance, as in NDB (Richardson and Weiss, 2018). Where
    both are empty, or both hold all, nothing differs.
    """
    n, m = first.sum(), second.sum()
    pooled = (first + second) / (n + m)
    error = (pooled * (1 - pooled) * (1 / n + 1 / m)).sqrt()
    difference = (first / n - second / m).abs()
    z = torch.where(error > 0, difference / error, 0.0)
    values: Tensor = torch.special.erfc(z / math.sqrt(2))
    return values


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Compute the Jensen-Shannon divergence of two histograms (n_bins,) in nats, scalar."""
    p, q = first / first.sum(), second / second.sum()
    middle = (p + q) / 2
    return ((torch.xlogy(p, p / middle) + torch.xlogy(q, q / middle)).nansum()) / 2
