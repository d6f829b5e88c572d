"""Criteria that weigh how well a mixture fits against how large it is; lower is better in all."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["aic", "assignment_entropy", "bic", "icl", "n_free_parameters"]


def n_free_parameters(n_components: int, n_features: int, n_factors: int) -> int:
    """Count the free parameters of a mixture: weights, means, noise variances and loadings.

    A rotation of the factors changes no density, so that ``l (l - 1) / 2`` of each component's
    loadings are not free.
    """
    K, d, l = n_components, n_features, n_factors
    return K - 1 + K * (2 * d + d * l - l * (l - 1) // 2)


def bic(log_likelihood: float, n_parameters: int, n_rows: int) -> float:
    """Compute ``-2 log L + p log n``, the Bayesian criterion (Schwarz), L being of all rows."""
    return -2 * log_likelihood + n_parameters * math.log(n_rows)


def aic(log_likelihood: float, n_parameters: int) -> float:
    """Compute ``-2 log L + 2 p``, Akaike's criterion, L being of all rows."""
    return -2 * log_likelihood + 2 * n_parameters


def icl(log_likelihood: float, entropy: float, n_parameters: int, n_rows: int) -> float:
    """Compute ``BIC + 2 H``, the integrated complete likelihood (Biernacki and others, 2000).

    H is the entropy of all rows' assignments: components that share rows are paid for, so that the
    criterion counts clusters rather than components.
    """
    return bic(log_likelihood, n_parameters, n_rows) + 2 * entropy


def assignment_entropy(joint: Tensor) -> Tensor:
    """Compute ``-sum_k r_k log r_k``, (B,), from ``log pi_k + log p_k(x)``, (B, K)."""
    log_r = torch.log_softmax(joint, dim=1)
    return -torch.xlogy(log_r.exp(), log_r.exp()).sum(dim=1)
