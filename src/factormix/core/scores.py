"""How usual a row is under a mixture: scores by name, higher for what is usual.

All are matrix products of a batch; those that speak of one component take the most probable one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from factormix.core import density
from factormix.core.density import Operands

__all__ = [
    "SCORES",
    "best_component",
    "compressed",
    "compression_slope",
    "log_likelihood",
    "mahalanobis",
    "of_component",
    "reconstruction",
    "score",
    "subspace_strengths",
]

SCORES = ("log_likelihood", "best_component", "mahalanobis", "reconstruction")

UNUSED = 1e-12
"""``1 - M`` up to which a factor counts as unused: it spans no direction."""


def score(name: str, x: Tensor, ops: Operands) -> Tensor:
    """Compute a score by its name, (B,), of x (B, d)."""
    functions = {
        "log_likelihood": log_likelihood,
        "best_component": best_component,
        "mahalanobis": mahalanobis,
        "reconstruction": reconstruction,
    }
    return functions[name](x, ops)


def log_likelihood(x: Tensor, ops: Operands) -> Tensor:
    """Compute ``log sum_k pi_k p_k(x)``, (B,)."""
    return density.log_prob(x, ops)


def best_component(x: Tensor, ops: Operands) -> Tensor:
    """Compute ``max_k [log pi_k + log p_k(x)]``, (B,), the max-component form of the paper."""
    return density.joint_log_prob(x, ops).amax(dim=1)


def mahalanobis(x: Tensor, ops: Operands) -> Tensor:
    """Compute ``-xt' P xt``, (B,): minus the squared distance to the most probable component."""
    E_distance, Y, _ = _of_best(x, ops)
    return -(E_distance - Y.square().sum(dim=1))


def reconstruction(x: Tensor, ops: Operands) -> Tensor:
    """Compute minus the squared length, (B,), of the part of xt outside the factors' subspace.

    In the metric E of the noise, the least-squares code ``M^(1/2) Y / (1 - M)`` leaves
    ``xt' E xt - sum_i Y_i^2 / (1 - M_i)``, for the most probable component.
    """
    E_distance, Y, best = _of_best(x, ops)
    return -(E_distance - (Y.square() * subspace_strengths(ops)[best]).sum(dim=1))


def subspace_strengths(ops: Operands) -> Tensor:
    """Compute ``1 / (1 - M)``, (K, l), zero for factors that are not in use."""
    span = 1 - ops.latent_variances
    return torch.where(span > UNUSED, span.clamp(min=UNUSED).reciprocal(), torch.zeros_like(span))


def of_component(x: Tensor, ops: Operands, which: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``xt' E xt``, (B,), and ``Gamma' xt``, (B, l), for one component of each row."""
    _, Y = density.project(x, ops)
    x = x if ops.offset is None else x - ops.offset
    E, E_mu = ops.E[which], ops.E_mu[which]
    xt = x - E_mu / E
    rows = torch.arange(len(x), device=x.device)
    return (E * xt.square()).sum(dim=1), Y[rows, which]


def _of_best(x: Tensor, ops: Operands) -> tuple[Tensor, Tensor, Tensor]:
    best = density.joint_log_prob(x, ops).argmax(dim=1)
    return (*of_component(x, ops, best), best)


def compressed(u: Tensor) -> Tensor:
    """Compute ``sign(u) log(1 + |u|)``: a scale on which far and farther differ little."""
    return u.sign() * u.abs().log1p()


def compression_slope(u: Tensor) -> Tensor:
    """Compute ``compressed(u) / u``, which is 1 at zero."""
    size = u.abs()
    return torch.where(size > 1e-8, size.log1p() / size.clamp(min=1e-8), torch.ones_like(size))
