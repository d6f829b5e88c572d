"""Where the variance of a mixture lies: between components, in their factors, in the noise."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from factormix.core.parameters import Parameters, loadings, noise_variances

__all__ = ["VarianceShares", "communalities", "feature_variances", "variance_shares"]


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

    The variance of the mixture is that between the means plus the mean of those of its components.
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
