"""Means and variances of components and of the whole mixture."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from factormix.core.parameters import Parameters, loadings, noise_variances

__all__ = ["Moments", "component_variances", "explained_shares", "moments"]


class Moments(NamedTuple):
    """The mean and the variance of every feature under a mixture."""

    mean: Tensor
    """(d,)."""
    variance: Tensor
    """(d,)."""


def component_variances(parameters: Parameters) -> Tensor:
    """Compute the diagonal of ``Sigma = D + Lambda Lambda'`` of every component, (K, d).

    ``diag Sigma = 1/E + sum_j Gamma_j^2 / (E^2 M_jj)``, column by column, so that nothing of the
    size of the factors is formed.
    """
    E, Gamma, M = parameters[2:]
    variances = noise_variances(E)
    for j in range(Gamma.shape[2]):
        variances = variances + (Gamma[:, :, j] / E).square() / M[:, j : j + 1]
    return variances


def moments(parameters: Parameters) -> Moments:
    """Compute the mean ``sum_k pi_k mu_k`` and the variance of every feature.

    The variance is that within the components plus that of their means.
    """
    pi, mu = parameters.log_weights.exp(), parameters.means
    mean = pi @ mu
    return Moments(mean, pi @ (component_variances(parameters) + (mu - mean).square()))


def explained_shares(parameters: Parameters, scale: Tensor) -> Tensor:
    """Compute the share of each factor in the variance of its component, (K, l).

    ``tr Sigma = sum D + sum_j |Lambda_j|^2``, with every feature divided by its ``scale`` (d,)
    first; what is missing to one is noise.
    """
    Lambda = loadings(parameters) / scale.unsqueeze(-1)
    by_factor = Lambda.square().sum(dim=1)
    noise = (noise_variances(parameters.precision_diag) / scale.square()).sum(dim=1, keepdim=True)
    return by_factor / (noise + by_factor.sum(dim=1, keepdim=True))
