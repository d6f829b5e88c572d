"""Wiener filters: posterior means of clean rows, given rows with added noise.

If x follows a mixture with covariances ``Sigma_k = U_k diag(v_k) U_k'``, and ``y = x + noise`` with
noise of variance s in every feature, then y follows the mixture with ``v_k + s``, and

    E[x | y, k] = mu_k + U_k diag(v_k / (v_k + s)) U_k' (y - mu_k)

In the eigenbasis of a component its density needs one product for any s, and the same product
serves all scales c of a kind, whose covariances are ``c Sigma_k`` (``core/scales.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import BLOCK_ELEMENTS, slice_rows
from factormix.core.parameters import Parameters, covariances, precise_dtype
from factormix.core.scales import scale_values

OWN_SHARE, ROUNDS = 0.03, 10
"""Share of the mixture's weights in adapted ones, and rounds of EM that adapt them. Parts of six
training photographs of BSDS300 were denoised with shares from 0.01 to 0.1 and 5 to 30 rounds:
results of ``denoise`` with a prior agreed within 0.01 dB. No script repeats it."""


class EigenMixture(NamedTuple):
    """A mixture of K kinds in S scales, in the eigenbases of its covariances."""

    log_weights: Tensor
    """(K, S)."""
    means: Tensor
    """(K, d)."""
    directions: Tensor
    """Eigenvectors U, (K, d, d), as columns."""
    variances: Tensor
    """Eigenvalues v of every kind and scale, (K, S, d)."""


def diagonalise_covariances(
    parameters: Parameters, basis: Tensor, *, noise: float = 0.0, scales: int = 1
) -> EigenMixture:
    """Return a mixture of rows (d) as a mixture of their coefficients in a basis (d, m).

    The columns of the basis are orthonormal. ``noise`` is the variance of noise in the rows, which
    is taken out. The components of the mixture are kinds in ``scales`` scales, one kind after the
    other, as ``scales.expanded`` orders them.
    """
    kinds = Parameters(*(t[::scales] for t in parameters))
    Sigma = basis.mT @ covariances(kinds) @ basis
    v, U = torch.linalg.eigh(Sigma)
    c = scale_values(scales, v)
    v = v.unsqueeze(1) * (c / c[0]).unsqueeze(1)
    log_weights = torch.log_softmax(parameters.logits, dim=0).reshape(-1, scales)
    return EigenMixture(log_weights, kinds.means @ basis, U, (v - noise).clamp(min=0))


def filter_rows(
    y: Tensor, mixture: EigenMixture, variance: float, *, adapt: bool = False
) -> tuple[Tensor, Tensor]:
    """Filter rows (B, d) with noise of a variance, each by its most probable component.

    With ``adapt``, the weights of the mixture are adapted to the rows first, in blocks if there are
    many rows. Return the posterior means of the clean rows, (B, d), and how many of the d
    directions the filter keeps, ``sum v / (v + s)``, (B,).
    """
    log_weights, mu, U, v = mixture
    K, S, d = v.shape
    precision = 1 / (v + variance)
    constant = log_weights + 0.5 * precision.log().sum(dim=2)
    gain = v * precision
    clean, kept = torch.empty_like(y), y.new_empty(len(y))
    for part in slice_rows(len(y), max(1, BLOCK_ELEMENTS // max(K * S, d))):
        rows = y[part]
        joint = y.new_empty(K, S, len(rows))
        for k in range(K):
            squares = ((rows - mu[k]) @ U[k]).square_()
            joint[k] = constant[k].unsqueeze(1) - 0.5 * precision[k] @ squares.mT
        joint = joint.view(K * S, -1)
        if adapt:
            change = _adapt_weights(joint, log_weights.reshape(-1)) - log_weights.reshape(-1)
            joint += change.unsqueeze(1)
        best = joint.argmax(dim=0)
        # Rows of one kind together, so that its directions are applied by two products.
        order = best.argsort(stable=True)
        counts = torch.bincount(best // S, minlength=K).tolist()
        filtered, kept_here = torch.empty_like(rows), kept[part]
        for k, chosen in enumerate(torch.split(order, counts)):
            if len(chosen):
                share = gain[k, best[chosen] % S]
                z = (rows[chosen] - mu[k]) @ U[k]
                filtered[chosen] = mu[k] + (z * share) @ U[k].mT
                kept_here[chosen] = share.sum(dim=1)
        clean[part] = filtered
    return clean, kept


def filter_groups(y: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Filter groups of rows y (G, n, d) with noise of variance one, each by a Gaussian of its own.

    Estimates ``known`` (G, n, d) of the clean rows give its mean and covariance. Return the
    posterior means (G, n, d), and how many of the d directions the filters keep, (G,).
    """
    mu = known.mean(dim=1, keepdim=True)
    # In float64, because the covariance may exceed the noise by more than the digits of float32.
    centred = (known - mu).to(precise_dtype(y.device))
    Sigma = centred.mT @ centred / max(1, known.shape[1] - 1)
    noisy = Sigma.clone()
    noisy.diagonal(dim1=1, dim2=2).add_(1)
    gain = torch.cholesky_solve(Sigma, torch.linalg.cholesky(noisy))
    kept = gain.diagonal(dim1=1, dim2=2).sum(dim=1)
    return mu + (y - mu) @ gain.to(y), kept.to(y)


def _adapt_weights(joint: Tensor, log_weights: Tensor) -> Tensor:
    """Return log-weights that suit some rows better, given ``log w_k p_k(y)``, (K, B), by EM.

    ``OWN_SHARE`` of the old weights stays, as if a Dirichlet distribution around them were known.
    """
    old = log_weights.exp().clamp(min=torch.finfo(joint.dtype).tiny)
    # The densities p_k(y) up to a factor per row.
    p = joint.softmax(dim=0) / old.unsqueeze(1)
    new = old
    for _ in range(ROUNDS):
        R_mean = new * (p @ (1 / (new @ p))) / p.shape[1]
        new = (1 - OWN_SHARE) * R_mean + OWN_SHARE * old
    return new.log()
