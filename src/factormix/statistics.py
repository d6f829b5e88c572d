"""Expected statistics of the complete-data model, and the step in its natural geometry.

Given the component, the model is linear: ``x = Theta' [z, 1] + eps`` with ``Theta = [Lambda, mu]``
and ``eps ~ N(0, D)``. A batch contributes the sums ``A = sum R [z,1][z,1]'``,
``B = sum R [z,1] x'`` and ``S = sum R x^2`` with z under its posterior. With A a running average
and ``G = B - A_batch Theta`` the batch's residual correlation, the least-squares solution of all
averaged statistics is exactly

    Theta <- Theta + rate A^-1 G
    U     <- (1 - rate) U + rate (S - Theta . B - G . Theta_new)

so that no running copy of ``sum R x z'`` is needed: Theta and A imply it. ``U / pi`` is D before
its bound. With rate one and the sums of all the data this is the M-step of EM.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from factormix.density import joint_operands, log_normaliser, project, squared
from factormix.parameters import Parameters
from factormix.scratch import scratch

__all__ = ["Running", "Statistics", "expected_statistics", "natural_step", "precision_form_"]


class Statistics(NamedTuple):
    """Sums over the samples of a batch, with R the responsibilities."""

    n_samples: Tensor
    """Number of samples, or the sum of their weights; scalar."""
    log_likelihood: Tensor
    """Scalar."""
    A: Tensor
    """``sum R [z,1][z,1]'``, (K, l+1, l+1), with the posterior covariance of z."""
    B: Tensor
    """``sum R [z,1] x'``, (K, l+1, d)."""
    S: Tensor
    """``R' X^2``, (K, d)."""


class Running(NamedTuple):
    """Running averages of the statistics, in the coordinates of the current latent basis."""

    Theta: Tensor
    """(K, l+1, d): the columns of Lambda as rows, then mu."""
    U: Tensor
    """(K, d): residual variance times component weight, before its bound."""
    A: Tensor
    """(K, l+1, l+1)."""


def expected_statistics(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None = None,
    temper: float = 1.0,
) -> Statistics:
    """Sum the expected complete-data statistics over a batch x (B, d), with sample weights (B,).

    ``temper`` below one softens the responsibilities to ``(pi p)^temper``, normalised.
    """
    squares = squared(x)
    joint, Y = project(x, joint_operands(parameters), squares)
    log_likelihood, R = log_normaliser(joint)
    if temper != 1:
        R = torch.softmax(joint.mul_(temper), dim=1)
    # Numbers too small for the format would slow every product with them down.
    R = torch.threshold_(R, 1e-30, 0)
    if weights is not None:
        R.mul_(weights.unsqueeze(1))
        log_likelihood = log_likelihood * weights
    n, (K, d, l) = len(x), parameters.shape
    M = parameters.latent_variances
    root = M.sqrt()
    kept = scratch("RZ", x, n, K, l + 1)
    RZ = x.new_empty(n, K, l + 1) if kept is None else kept
    torch.mul(Y, R.unsqueeze(-1), out=RZ[:, :, :l]).mul_(root)
    RZ[:, :, l] = R
    B = (RZ.view(n, K * (l + 1)).mT @ x).view(K, l + 1, d)
    A = _second_moments(parameters, B, RZ.sum(dim=0))
    count = torch.full_like(log_likelihood[0], n) if weights is None else weights.sum()
    return Statistics(count, log_likelihood.sum(), A, B, R.mT @ squares)


def _second_moments(parameters: Parameters, B: Tensor, first: Tensor) -> Tensor:
    """Compute ``sum R [z,1][z,1]'``, (K, l+1, l+1), of ``B = sum R [z,1] x'`` and ``sum R [z,1]``.

    Because ``z = M^(1/2) Gamma' (x - mu)``, ``sum R z z'`` follows from ``sum R z x'`` without
    another look at the samples; the posterior covariance ``r M`` comes on top.
    """
    mu, _, Gamma, M = parameters[1:]
    K, _, l = parameters.shape
    A = B.new_empty(K, l + 1, l + 1)
    outer = first[:, :l].unsqueeze(-1) * (mu.unsqueeze(1) @ Gamma)
    zz = (B[:, :l] @ Gamma - outer) * M.sqrt().unsqueeze(1)
    A[:, :l, :l] = 0.5 * (zz + zz.mT)
    A[:, l] = first
    A[:, :l, l] = first[:, :l]
    A.diagonal(dim1=1, dim2=2)[:, :l].addcmul_(first[:, l:], M)
    return A


def natural_step(
    running: Running,
    parameters: Parameters,
    statistics: Statistics,
    rate: float,
    max_precision: Tensor,
    min_eigenvalue: float,
) -> tuple[Running, Parameters]:
    """Move the running averages by one natural step; all that it is given is used up."""
    Theta, U, A = running
    size = A.shape[1]
    n, B = float(statistics.n_samples), statistics.B
    U.mul_(1 - rate).add_(statistics.S, alpha=rate / n)
    for j in range(size):
        U.addcmul_(Theta[:, j], B[:, j], value=-rate / n)
    G = B.baddbmm_(statistics.A, Theta, alpha=-1)
    A.mul_(1 - rate).add_(statistics.A, alpha=rate / n)
    Theta.baddbmm_(_inverse(A), G, alpha=rate / n)
    for j in range(size):
        U.addcmul_(G[:, j], Theta[:, j], value=-rate / n)
    spare = parameters.precision_factors.mT, G
    return running, precision_form_(running, max_precision, min_eigenvalue, spare)


def _inverse(A: Tensor) -> Tensor:
    """Invert second moments (K, l+1, l+1) that may be singular but for rounding.

    Scaled to a unit diagonal, so that a ridge of a few roundings makes any of them definite; the
    least diagonal keeps a component without samples solvable, far below any used one's share.
    """
    K, size, _ = A.shape
    scale = A.diagonal(dim1=1, dim2=2).clamp(min=1e-6 / K).rsqrt().unsqueeze(-1)
    ridge = 8 * size * torch.finfo(A.dtype).eps
    unit = A * scale * scale.mT + ridge * torch.eye(size, dtype=A.dtype, device=A.device)
    unit.diagonal(dim1=1, dim2=2).clamp_(min=1)
    inverse: Tensor = torch.linalg.inv(unit)
    return inverse * scale * scale.mT


def precision_form_(
    running: Running,
    max_precision: Tensor,
    min_eigenvalue: float,
    spare: tuple[Tensor, Tensor] | None = None,
) -> Parameters:
    """Turn the latent basis in place so that M is diagonal, and return the parameters.

    ``L - I = Lambda' E Lambda = O lambda O'`` gives ``Lambda <- Lambda O`` and
    ``M = 1 / (1 + lambda)``; lambda is bounded so that M stays above its floor. ``spare`` is memory
    for Gamma, (K, l, d), and for the work, (K, l+1, d).
    """
    Theta, U, A = running
    K, l, d = len(A), A.shape[1] - 1, U.shape[1]
    r = A[:, l, l].clamp(min=torch.finfo(A.dtype).tiny ** 0.5).unsqueeze(-1)
    E = r / torch.maximum(U, r / max_precision)
    Gamma, work = spare or (U.new_empty(K, l, d), torch.empty_like(Theta))
    work = work.view(-1)[: K * l * d].view(K, l, d)
    Lambda = Theta[:, :l]
    torch.mul(Lambda, E.unsqueeze(1), out=Gamma)
    strength, O = torch.linalg.eigh(Lambda @ Gamma.mT)
    strength, O = strength.clamp(min=0).flip(-1), O.flip(-1)
    most = 1 / min_eigenvalue - 1
    shrink = (most / strength.clamp(min=most)).sqrt().unsqueeze(1)
    turn = (O * shrink).mT
    Lambda.copy_(torch.bmm(turn, Lambda, out=work))
    torch.bmm(turn, Gamma, out=work)
    # The eigenvalues beside a far larger one have lost digits: take them from the turned basis.
    strength = (Lambda @ work.mT).diagonal(dim1=1, dim2=2)
    M = (1 + strength).reciprocal().clamp(min_eigenvalue, 1)
    torch.mul(work, M.sqrt().unsqueeze(-1), out=Gamma)
    back = O / shrink
    A[:, :, :l] = A[:, :, :l] @ back
    A[:, :l] = back.mT @ A[:, :l]
    return Parameters(r.squeeze(-1).log(), Theta[:, l], E, Gamma.mT, M)
