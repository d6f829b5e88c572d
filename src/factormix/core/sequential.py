"""The numbers of a row in their order, each given those before it, by a mixture.

Given its component and the numbers before it, number j of a row is normal (Kalman, 1960) ::

    mean      mu_j + Lambda_j' z      z the posterior mean of the factors, at first 0
    variance  s_j = Lambda_j' P Lambda_j + D_j      P their posterior covariance, at first I
    gain      g_j = P Lambda_j / s_j

and then ``z <- z + g_j (x_j - mean)`` and ``P <- P - s_j g_j g_j'``. Variances and gains are those
of every row, so they are prepared once, in float64. The density of a number is a mixture of normal
ones, with the weights ``p(k | x_1 .. x_j-1)``. A number takes B x K x l operations, and the largest
array is K x B x l. It is updated once for a block of numbers, by matrix products: within a block, a
number j changes the mean of a later one, i, by ``Lambda_i' g_j`` times its error.

A number that takes the levels from 0 to the highest has the mass of the bin from x - 1/2 to
x + 1/2. The outer bins are open, so that the masses of all levels sum to one. A level that is given
counts as the point in the middle of its bin.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.special import log_ndtr

from factormix.core.parameters import (
    Parameters,
    diagonalise_precisely,
    like_tensor,
    loadings,
    noise_variances,
)

BLOCK = 16
"""Numbers between two updates of the factors."""
LEAST_MASS = 1e-30
"""Mass below which float32, whose least number is 1e-38, begins to lose digits of its parts."""


class SequentialMixture(NamedTuple):
    """A mixture of rows of d numbers, prepared for one number after the other."""

    log_weights: Tensor
    """(K,)."""
    means: Tensor
    """mu, (d, K)."""
    loadings: Tensor
    """Lambda, (d, K, l)."""
    gains: Tensor
    """g, (d, K, l)."""
    couplings: Tensor
    """``Lambda_i' g_j`` of the numbers i after j in its block, (d, BLOCK - 1, K)."""
    deviations: Tensor
    """sqrt(s), (d, K)."""

    @classmethod
    def prepare(cls, parameters: Parameters) -> Self:
        """Compute gains and deviations, in float64."""
        precise = diagonalise_precisely(parameters)
        Lambda = loadings(precise).transpose(0, 1)
        D = noise_variances(precise.precision_diag).T
        d, K, l = Lambda.shape
        P = torch.eye(l, **like_tensor(D)).repeat(K, 1, 1)
        gains, variances = torch.empty_like(Lambda), torch.empty_like(D)
        couplings = D.new_zeros(d, BLOCK - 1, K)
        for j in range(d):
            spread = (P @ Lambda[j, :, :, None])[..., 0]
            # Rounding may leave a variance below zero where earlier numbers determine the factors.
            variances[j] = (Lambda[j] * spread).sum(-1).clamp(min=0) + D[j]
            gains[j] = spread / variances[j, :, None]
            P -= gains[j, :, :, None] * spread[:, None, :]
            later = Lambda[j + 1 : j - j % BLOCK + BLOCK]
            couplings[j, : len(later)] = (later * gains[j]).sum(-1)
        mu, deviations = precise.means.T, variances.sqrt()
        return cls(precise.log_weights, mu, Lambda, gains, couplings, deviations)

    def to(self, dtype: torch.dtype) -> SequentialMixture:
        """Return the mixture in another precision."""
        return SequentialMixture(*(tensor.to(dtype).contiguous() for tensor in self))


class _Given:
    """The first numbers of rows, and what follows from them for the next one."""

    def __init__(self, mixture: SequentialMixture, n: int) -> None:
        _, K, l = mixture.gains.shape
        self.mixture, self.j = mixture, 0
        self.factors = mixture.gains.new_zeros(K, n, l)
        """Posterior means z at the start of the block, (K, n, l)."""
        self.means = self.errors = mixture.means.new_zeros(0, n, K)
        """Means of the numbers of the block, given those so far, and errors of these."""
        self.log_shares = mixture.log_weights.expand(n, K)
        """``log p(k | x_1 .. x_j-1)``, (n, K)."""

    def predict(self) -> tuple[Tensor, Tensor]:
        """Return the means (n, K) and deviations (K,) of the next number."""
        i, block = self.j % BLOCK, slice(self.j, self.j + BLOCK)
        if i == 0:
            seen = torch.bmm(self.factors, self.mixture.loadings[block].permute(1, 2, 0))
            self.means = seen.permute(2, 1, 0) + self.mixture.means[block, None]
            self.errors = torch.empty_like(self.means)
        return self.means[i], self.mixture.deviations[self.j]

    def append_(self, error: Tensor) -> None:
        """Add the next number of each row, by its differences (n, K) from the means."""
        i, mixture = self.j % BLOCK, self.mixture
        log_p = normal_log_densities(error, mixture.deviations[self.j])
        self.log_shares = torch.log_softmax(self.log_shares + log_p, dim=1)
        self.errors[i], later = error, self.means[i + 1 :]
        later.addcmul_(mixture.couplings[self.j, : len(later), None], error)
        self.j += 1
        if not len(later):
            gains = mixture.gains[self.j - i - 1 : self.j].transpose(0, 1)
            self.factors.baddbmm_(self.errors.permute(2, 1, 0), gains)


def score_sequences(mixture: SequentialMixture, x: Tensor, levels: int | None) -> Tensor:
    """Return the log-density, or log-mass of the level, of each number (B, d) of rows (B, d)."""
    given, found = _Given(mixture, len(x)), torch.empty_like(x)
    for j, column in enumerate(x.T):
        means, deviations = given.predict()
        error = column[:, None] - means
        if levels is None:
            log_p = normal_log_densities(error, deviations)
            found[:, j] = torch.logsumexp(given.log_shares + log_p, dim=1)
        else:
            outer = column <= 0, column >= levels - 1
            found[:, j] = bin_log_masses_of_normals(given.log_shares, error, deviations, *outer)
        given.append_(error)
    return found


def draw_sequences_(
    mixture: SequentialMixture,
    x: Tensor,
    levels: int | None,
    generator: torch.Generator | None = None,
    missing: Tensor | None = None,
) -> None:
    """Draw all numbers of rows x (B, d) in place, or those ``missing`` (B, d).

    Each is given the numbers before it alone, those that were known among them.
    """
    given = _Given(mixture, len(x))
    for j, column in enumerate(x.T):
        means, deviations = given.predict()
        k = torch.multinomial(given.log_shares.exp(), 1, generator=generator)
        noise = torch.randn(k.shape, generator=generator, **like_tensor(x))
        drawn = (means.gather(1, k) + deviations[k] * noise)[:, 0]
        if levels is not None:
            drawn = drawn.round().clamp(0, levels - 1)
        column[:] = drawn if missing is None else torch.where(missing[:, j], drawn, column)
        given.append_(column[:, None] - means)


def normal_log_densities(error: Tensor, deviations: Tensor) -> Tensor:
    """Return the log-densities (B, K) of differences from the means (B, K)."""
    z = error / deviations
    return -0.5 * z.square() - deviations.log() - 0.5 * math.log(2 * math.pi)


def bin_log_masses_of_normals(
    log_shares: Tensor, error: Tensor, deviations: Tensor, lowest: Tensor, highest: Tensor
) -> Tensor:
    """Return the log-masses (B,) of bins of length 1 in mixtures of normals with shares (B, K).

    The middle of a bin differs from the means by ``error`` (B, K). The bins of rows that are the
    ``lowest`` (B,) or ``highest`` (B,) level are open.
    """
    low = ((error - 0.5) / deviations).masked_fill_(lowest[:, None], -torch.inf)
    high = ((error + 0.5) / deviations).masked_fill_(highest[:, None], torch.inf)
    # On the left of the mean, where tails keep their digits.
    right = error > 0
    low, high = torch.where(right, -high, low), torch.where(right, -low, high)
    masses = 0.5 * (torch.erfc(-math.sqrt(0.5) * high) - torch.erfc(-math.sqrt(0.5) * low))
    found = (log_shares.exp() * masses).sum(dim=1)
    # Logarithms of masses take twenty times as long, and few rows are so far from every mean.
    far = (found < LEAST_MASS).nonzero()[:, 0]
    log_high = log_ndtr(high[far])
    log_masses = log_high + torch.log(-torch.expm1(log_ndtr(low[far]) - log_high))
    return found.log().index_copy_(0, far, torch.logsumexp(log_shares[far] + log_masses, dim=1))
