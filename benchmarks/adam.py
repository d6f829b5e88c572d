"""Mixtures of factor analyzers as they are commonly written in torch: covariance form, einsum,
Woodbury, autograd and Adam, from a k-means start.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from curves import Recorder
from models import LowRankMixture
from numpy.typing import NDArray
from problems import Problem
from settings import FLOOR, Setting
from torch import Tensor, nn

__all__ = ["CovarianceMFA", "train_adam"]

BATCH = 256
LEARNING_RATE = 0.02
"""The best of 0.001, 0.003, 0.01 and 0.02 in a trial on FashionMNIST."""
MAX_PASSES = 100
BROADCAST_ELEMENTS = 1 << 27
"""Most elements of the B x K x d difference, so that large mixtures fit into memory."""


class CovarianceMFA(nn.Module):
    """Covariances ``Lambda Lambda' + D``, with ``D = floor + softplus(free parameters)``."""

    def __init__(
        self,
        means: Tensor,
        variances: Tensor,
        weights: Tensor,
        n_factors: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        K, d = means.shape
        above = (variances - FLOOR).clamp_min(1e-4)
        # Loadings begin at a tenth of the spread: zero would be a saddle.
        noise = torch.randn(K, d, n_factors, generator=generator)
        self.logits = nn.Parameter(weights.clamp_min(1e-6).log())
        self.means = nn.Parameter(means.clone())
        self.loadings = nn.Parameter(0.1 * variances.sqrt().unsqueeze(-1) * noise)
        self.free_noise = nn.Parameter(above + torch.log(-torch.expm1(-above)))

    @property
    def noise_variances(self) -> Tensor:
        """D, (K, d)."""
        return FLOOR + nn.functional.softplus(self.free_noise)

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``log p(x)``, (B,), for x (B, d), by the Woodbury identity and the determinant
        lemma.
        """
        Lambda, D = self.loadings, self.noise_variances
        l, d = Lambda.shape[2], x.shape[1]
        inner = torch.eye(l) + torch.einsum("kdi,kd,kdj->kij", Lambda, 1 / D, Lambda)
        factor = torch.linalg.cholesky(inner)
        xt = x.unsqueeze(1) - self.means
        projected = torch.einsum("bkd,kdl->bkl", xt / D, Lambda)
        solved = torch.linalg.solve_triangular(factor, projected.unsqueeze(-1), upper=False)
        distance = torch.einsum("bkd,bkd->bk", xt, xt / D) - solved.square().sum(dim=(-1, -2))
        log_det = D.log().sum(dim=1) + 2 * factor.diagonal(dim1=1, dim2=2).log().sum(dim=1)
        log_p = -0.5 * (d * math.log(2 * math.pi) + log_det + distance)
        return torch.logsumexp(self.logits.log_softmax(dim=0) + log_p, dim=1)

    def described(self) -> LowRankMixture:
        """Copy the model so far."""
        return LowRankMixture.from_generative(
            self.logits.detach().softmax(dim=0),
            self.means.detach().clone(),
            self.loadings.detach().clone(),
            self.noise_variances.detach(),
        )


def train_adam(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
    """Train until the budget is used up."""
    from peers import kmeans

    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    K = setting.components
    import_optimiser()
    recorder.clock.start()
    start = kmeans(problem.train, K, seed)
    means, variances, weights = cluster_moments(problem.train, start.labels, K)
    model = CovarianceMFA(means, variances, weights, setting.factors, generator)
    begun, seen = start.passes + 1, 0
    recorder.checkpoint(begun, model.described)

    x = torch.from_numpy(problem.train)
    batch = max(1, min(BATCH, BROADCAST_ELEMENTS // (K * x.shape[1])))
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(MAX_PASSES):
        for rows in torch.split(torch.randperm(len(x), generator=generator), batch):
            optimiser.zero_grad()
            (-model(x[rows]).mean()).backward()
            optimiser.step()
            seen += len(rows)
            recorder.checkpoint(begun + seen / len(x), model.described, step=batch / len(x))
    recorder.checkpoint(begun + seen / len(x), model.described, last=True)


def import_optimiser() -> None:
    """Take a step of nothing: torch imports a good part of itself on the first one."""
    nothing = nn.Parameter(torch.zeros(1))
    nothing.grad = torch.zeros(1)
    torch.optim.Adam([nothing]).step()


def cluster_moments(
    x: NDArray[np.float32], labels: NDArray[np.integer], n_clusters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return means and variances (K, d) and weights (K,) of the clusters."""
    parts = [x[labels == k] for k in range(n_clusters)]
    means = np.stack([part.mean(axis=0) for part in parts])
    variances = np.stack([part.var(axis=0) for part in parts])
    weights = np.array([len(part) / len(x) for part in parts])
    return torch.from_numpy(means), torch.from_numpy(variances), torch.from_numpy(weights).float()
