"""Trained mixtures of any kind behind one face, so that one scorer in float64 judges them all."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from factormix import PrecisionMixture
from factormix.core import inspection

__all__ = ["FullMixture", "LowRankMixture", "Model", "components_in_use", "matched_share"]

BLOCK = 1000


class Model(Protocol):
    """A mixture as the benchmark sees it."""

    weights: NDArray[np.float64]
    """(K,)."""
    means: NDArray[np.float64]
    """(K, d)."""

    def score(self, x: Tensor) -> float:
        """Compute the mean log-likelihood of the rows x (n, d)."""


class LowRankMixture:
    """A mixture with diagonal covariances, or diagonal plus low rank."""

    def __init__(self, mixture: PrecisionMixture) -> None:
        self._mixture = mixture.double()
        self.weights = mixture.weights.detach().double().numpy()
        self.means = mixture.means.detach().double().numpy()

    @classmethod
    def from_generative(
        cls, weights: Any, means: Any, loadings: Any, noise_variances: Any
    ) -> LowRankMixture:
        """Build it from ``x = mu + Lambda z + eps``; weights of zero become tiny ones."""
        pi, mu, Lambda, D = (
            torch.as_tensor(t).detach().double()
            for t in (weights, means, loadings, noise_variances)
        )
        return cls(PrecisionMixture.from_generative(pi.clamp_min(1e-300), mu, Lambda, D))

    @classmethod
    def from_diagonal(cls, weights: Any, means: Any, variances: Any) -> LowRankMixture:
        """Build it from diagonal covariances (K, d)."""
        mu = torch.as_tensor(means)
        return cls.from_generative(weights, mu, mu.new_zeros(*mu.shape, 0), variances)

    @torch.no_grad()
    def score(self, x: Tensor) -> float:
        parts = [
            self._mixture.log_prob(x[begun : begun + BLOCK].double())
            for begun in range(0, len(x), BLOCK)
        ]
        return float(torch.cat(parts).mean())


class FullMixture:
    """A mixture with full covariances."""

    def __init__(self, weights: Any, means: Any, covariances: Any) -> None:
        pi, mu, self._covariances = (
            torch.as_tensor(t).detach() for t in (weights, means, covariances)
        )
        self._log_weights = pi.double().clamp_min(1e-300).log()
        self.weights, self.means = pi.double().numpy(), mu.double().numpy()

    @torch.no_grad()
    def score(self, x: Tensor) -> float:
        """Factor in float64; solve in float32, whose error is far below what the plots show."""
        columns = []
        for k, covariance in enumerate(self._covariances):
            factor = torch.linalg.cholesky(covariance.double())
            shifted = (x.double() - torch.as_tensor(self.means[k])).float()
            z = torch.linalg.solve_triangular(factor.float(), shifted.mT, upper=False)
            distance = z.double().square().sum(dim=0)
            half_log_det = factor.diagonal().log().sum()
            constant = half_log_det + 0.5 * x.shape[1] * math.log(2 * math.pi)
            columns.append(self._log_weights[k] - constant - 0.5 * distance)
        return float(torch.stack(columns, dim=1).logsumexp(dim=1).mean())


def components_in_use(model: Model) -> int:
    """Count the components whose weight is at least 0.1/K."""
    return inspection.components_in_use(model.weights)


def matched_share(model: Model, truth: Model) -> float:
    """Return the share of true components that the model has found.

    Components are paired so that the means are nearest in all (Hungarian assignment). A pair
    matches if its means are nearer than a quarter of the way to the next true mean, and its
    weights differ by less than a factor of 1.5: two true components under one, or one under two,
    do not match.
    """
    apart = _distances(truth.means, truth.means)
    np.fill_diagonal(apart, np.inf)
    distance = _distances(truth.means, model.means)
    true, found = linear_sum_assignment(distance)
    near = distance[true, found] < 0.25 * apart.min(axis=1)[true]
    ratio = model.weights[found] / truth.weights[true]
    heavy = (ratio > 1 / 1.5) & (ratio < 1.5)
    return float((near & heavy).sum()) / len(truth.weights)


def _distances(a: ArrayLike, b: ArrayLike) -> NDArray[np.float64]:
    """Euclidean distances (K, J) between the rows of two arrays."""
    distances: NDArray[np.float64] = torch.cdist(
        torch.as_tensor(a).double(), torch.as_tensor(b).double()
    ).numpy()
    return distances
