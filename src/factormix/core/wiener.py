"""Wiener filters: the posterior mean of clean rows, given rows with added noise.

If x follows a mixture with covariances ``Lambda Lambda' + D``, then ``y = x + noise`` of variance
``s`` follows the mixture with ``D + s`` and the same loadings. With its precisions ``P_k``,

    E[x | y, k] = y - s P_k (y - mu_k)

so the filter needs no inverse beyond the precision form of the noisy mixture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from factormix.core.arrays import BLOCK_ELEMENTS, slice_rows
from factormix.core.density import joint_log_prob, operands
from factormix.core.parameters import Parameters, from_generative, loadings, noise_variances


def add_noise(parameters: Parameters, variance: float) -> Parameters:
    """Return the mixture of rows of a mixture plus independent noise of a variance."""
    D = noise_variances(parameters.precision_diag) + variance
    return from_generative(parameters.logits, parameters.means, loadings(parameters), D)


def filter_rows(y: Tensor, noisy: Parameters, variance: float) -> Tensor:
    """Return the posterior mean of clean rows, (B, d), by the most probable component of each.

    ``noisy`` is the mixture of the noisy rows y (B, d), and ``variance`` the part of the noise in
    it.
    """
    _, mu, E, Gamma, _ = noisy
    ops = operands(noisy, allow_forms=True)
    K, d, _ = noisy.shape
    best = torch.cat(
        [
            joint_log_prob(y[part], ops).argmax(dim=1)
            for part in slice_rows(len(y), max(1, BLOCK_ELEMENTS // max(K, d * d)))
        ]
    )
    # Rows of one component together: its precision is then applied by two matrix products.
    order = best.argsort(stable=True)
    counts, clean = torch.bincount(best, minlength=K).tolist(), torch.empty_like(y)
    for k, rows in enumerate(torch.split(order, counts)):
        if len(rows):
            xt = y[rows] - mu[k]
            clean[rows] = y[rows] - variance * (E[k] * xt - (xt @ Gamma[k]) @ Gamma[k].mT)
    return clean
