"""The gradient of the paper's objective, from sums over the samples of a batch.

Each sample counts for the components by R, the smoothing kernel's row of its best component.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.completion import completed_sums, regression
from factormix.core.density import log_normaliser
from factormix.core.observed import observed_operands, project_observed, row_blocks
from factormix.core.parameters import Parameters, scaled_factors
from factormix.core.workspace import Workspace
from factormix.data.batches import Batch
from factormix.training.solvers.base import add

__all__ = [
    "Gradient",
    "Groups",
    "SGDContribution",
    "likelihood_gradient",
    "mean_gradient",
    "observed_contribution",
]


class SGDContribution(NamedTuple):
    """Sums over the samples of a batch, with R the kernel row of each sample's best component."""

    n_samples: Tensor
    log_likelihood: Tensor
    objective: Tensor
    R: Tensor
    """``sum R``, (K,)."""
    RX: Tensor
    """``R' X``, (K, d)."""
    RY: Tensor
    """``sum R Y``, (K, l)."""
    RX2: Tensor | None
    """``R' X^2``, (K, d); None in phase I."""
    RYX: Tensor | None
    """``(R Y)' X``, (K, l, d); None in phase I."""


class Gradient(NamedTuple):
    """Derivatives of the sum of weighted component log-likelihoods."""

    means: Tensor
    precision_diag: Tensor
    precision_factors: Tensor


class Groups:
    """Sums over the samples with R, whose rows are the kernel's rows of the winners.

    What does not depend on the component is summed by winner first and smoothed after: ``R'X`` is
    the kernel times K sums of rows. Without a kernel, the same holds for the latent.
    """

    def __init__(
        self,
        winner: Tensor,
        weights: Tensor,
        kernel: Tensor | None,
        n_components: int,
        work: Workspace,
    ) -> None:
        self.winner, self.weights, self.kernel = winner, weights, kernel
        self.size, self.work = n_components, work

    def sum(self, values: Tensor) -> Tensor:
        """Compute ``R' values``, (K, n), for values (B, n) that are weighted already."""
        return self._smooth(self._by_winner(values))

    def latent(self, Y: Tensor, x: Tensor, products: bool) -> tuple[Tensor, Tensor | None]:
        """Compute ``sum R Y``, (K, l), and if asked ``(R Y)' X``, (K, l, d), x weighted already."""
        B, K, l = Y.shape
        if self.kernel is None:
            y = Y.gather(1, self.winner.view(B, 1, 1).expand(B, 1, l)).squeeze(1)
            RY = self._by_winner(y * self.weights.unsqueeze(1))
            if not products:
                return RY, None
            RYX = x.new_empty(K, l, x.shape[1])
            for j in range(l):
                RYX[:, j] = self._by_winner(x * y[:, j : j + 1])
            return RY, RYX
        R = self.kernel[self.winner].unsqueeze(-1)
        RY = torch.mul(R, Y, out=self.work.array("R Y", Y, B, K, l))
        total = (self.weights.unsqueeze(0) @ RY.view(B, K * l)).view(K, l)
        if not products:
            return total, None
        return total, (RY.view(B, K * l).mT @ x).view(K, l, x.shape[1])

    def _by_winner(self, values: Tensor) -> Tensor:
        K = self.size
        if values.device.type == "cpu":
            return values.new_zeros(K, values.shape[1]).index_add_(0, self.winner, values)
        # Elsewhere the order of an indexed sum is left to chance, and so would be its last digits.
        return torch.nn.functional.one_hot(self.winner, K).to(values).mT @ values

    def _smooth(self, sums: Tensor) -> Tensor:
        return sums if self.kernel is None else self.kernel.mT @ sums


def observed_contribution(
    parameters: Parameters, batch: Batch, kernel: Tensor | None, moving: bool
) -> SGDContribution:
    """Sum over a batch with missing entries what the gradient of the marginal likelihood needs.

    It is the mean gradient of complete rows over what is missing (Fisher's identity), so that the
    sums are those of complete rows with missing entries expected; ``z = M^(1/2) Y`` gives Y.
    Without a kernel (K, K) each sample counts for its winner alone.
    """
    assert batch.missing is not None
    x, weights = batch.tensors()
    weights = x.new_ones(len(x)) if weights is None else weights
    ops = observed_operands(parameters, centre=False, diagonal=True)
    Theta, root = regression(parameters), parameters.latent_variances.sqrt()
    total: SGDContribution | None = None
    for part in row_blocks(len(x), parameters.shape):
        w, missing = weights[part], batch.missing[part]
        projected = project_observed(x[part], missing, ops)
        joint = projected.log_prob + ops.ops.log_weights
        objective, winner = (joint if kernel is None else joint @ kernel.mT).max(dim=1)
        one_hot = torch.nn.functional.one_hot(winner, len(root))
        R = (one_hot if kernel is None else kernel[winner]).to(x) * w.unsqueeze(1)
        A, B, S = completed_sums(parameters, Theta, x[part], missing, R, projected)
        found = SGDContribution(
            n_samples=w.sum(),
            log_likelihood=w @ log_normaliser(joint)[0],
            objective=w @ objective,
            R=A[:, 0, 0],
            RX=B[:, 0],
            RY=A[:, 0, 1:] / root,
            RX2=S if moving else None,
            RYX=B[:, 1:] / root.unsqueeze(-1) if moving else None,
        )
        total = found if total is None else add(total, found)
    assert total is not None
    return total


def mean_gradient(parameters: Parameters, c: SGDContribution) -> tuple[Tensor, Tensor]:
    """Compute ``d/dmu = E (R'X - r mu) - Gamma (sum R Y)`` and ``R'X - r mu``, both (K, d)."""
    mu, E, Gamma = parameters[1:4]
    centred = torch.addcmul(c.RX, c.R.unsqueeze(-1), mu, value=-1)
    weighted = (E * centred).unsqueeze(1)
    return weighted.baddbmm_(c.RY.unsqueeze(1), Gamma.mT, alpha=-1).squeeze(1), centred


def likelihood_gradient(
    parameters: Parameters, c: SGDContribution, work: Workspace | None = None
) -> Gradient:
    """Compute the gradient of ``sum_nk R_nk log p_k(x_n)``; consumes ``c.RX2`` and ``c.RYX``.

    ``d/dE = 1/2 (r diag Sigma - sum R xt^2)`` and ``d/dGamma = sum R xt Y' - r E^-1 Gamma M^-1``.
    """
    assert c.RX2 is not None
    assert c.RYX is not None
    mu, E, Gamma, M = parameters[1:]
    d_mu, centred = mean_gradient(parameters, c)
    r = c.R.unsqueeze(-1)
    second = c.RX2.addcmul_(mu, c.RX + centred, value=-1)
    Gamma_E = scaled_factors(Gamma, E, work)
    d_Gamma = c.RYX.addcmul_(c.RY.unsqueeze(-1), mu.unsqueeze(1), value=-1)
    d_Gamma.addcmul_(Gamma_E.mT, (r / M).unsqueeze(-1), value=-1)
    spread = (M.reciprocal().unsqueeze(1) @ Gamma_E.square_().mT).squeeze(1)
    d_E = spread.add_(E.reciprocal()).mul_(r).sub_(second).mul_(0.5)
    return Gradient(d_mu, d_E, d_Gamma.mT)
