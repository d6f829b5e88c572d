"""How much Gaussians overlap, by l x l algebra."""

from __future__ import annotations

import torch
from torch import Tensor

from factormix.core.parameters import Parameters, latent_log_determinant, loadings, noise_variances

__all__ = ["bhattacharyya"]

ELEMENTS = 1 << 24
"""Numbers that the factors of some pairs have together."""


def bhattacharyya(one: Parameters, other: Parameters) -> Tensor:
    """Compute the Bhattacharyya distances B of all components of two mixtures, (K, J).

    ``exp(-B)`` is ``integral sqrt(p_k p_j)``: one for the same Gaussian, and zero where nothing is
    shared. With ``S = (Sigma_k + Sigma_j) / 2 = D + V V'``, ``V = [Lambda_k, Lambda_j] / sqrt 2``
    and ``x = mu_k - mu_j`` it is ``B = 1/8 x' S^-1 x + 1/2 log(|S| / sqrt(|Sigma_k| |Sigma_j|))``;
    S is inverted by a matrix of the size 2l x 2l.
    """
    J, d, l = other.shape
    size = max(1, ELEMENTS // (d * (one.shape[2] + l + 1)))
    rows = []
    for k in range(one.shape[0]):
        mine = Parameters(*(t[k : k + 1] for t in one))
        parts = [
            _distances(mine, Parameters(*(t[first : first + size] for t in other)))
            for first in range(0, J, size)
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def _distances(mine: Parameters, others: Parameters) -> Tensor:
    """Compute the distances B of one Gaussian to some others, (J,)."""
    J = others.shape[0]
    D = (noise_variances(mine.precision_diag) + noise_variances(others.precision_diag)) / 2
    both = [loadings(mine).expand(J, -1, -1), loadings(others)]
    V = torch.cat(both, dim=2) / 2**0.5
    weighted = V / D.unsqueeze(2)
    A = V.mT @ weighted
    A = A + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    factor = torch.linalg.cholesky(A)
    x = mine.means - others.means
    b = torch.einsum("jdm,jd->jm", weighted, x)
    inner = torch.linalg.solve_triangular(factor, b.unsqueeze(2), upper=False).squeeze(2)
    squared = (x.square() / D).sum(dim=1) - inner.square().sum(dim=1)
    log_S = D.log().sum(dim=1) + 2 * factor.diagonal(dim1=1, dim2=2).log().sum(dim=1)
    volume = log_S - (_log_volume(mine) + _log_volume(others)) / 2
    distances: Tensor = (squared / 8 + volume / 2).clamp(min=0)
    return distances


def _log_volume(parameters: Parameters) -> Tensor:
    """Compute ``log |Sigma|``, (K,)."""
    E, Gamma = parameters[2:4]
    return -E.log().sum(dim=1) - latent_log_determinant(E, Gamma)
