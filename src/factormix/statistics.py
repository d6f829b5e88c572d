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

The latent variables are then brought back to mean zero and unit covariance by ``z = z_mean + L u``,
which moves ``mu`` to ``mu + Lambda z_mean`` and Lambda to ``Lambda L``: the parameter-expanded EM
of Liu, Rubin and Wu (1998). Without it a mean creeps along strong loadings, because z can make up
for nearly all of its error. It also makes the running A the identity times the weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from factormix.density import joint_operands, log_normaliser, project, squared
from factormix.parameters import Parameters
from factormix.scratch import scratch

__all__ = ["Running", "Statistics", "expected_statistics", "natural_step", "precision_form"]


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
    worth: Tensor
    """Log-likelihood that the samples would lose without each component, (K,); (0,) if not asked
    for.
    """


class Running(NamedTuple):
    """Running averages of the statistics, for latent variables of zero mean and unit covariance."""

    Theta: Tensor
    """(K, l+1, d): the columns of Lambda as rows, then mu."""
    U: Tensor
    """(K, d): residual variance times component weight, before its bound."""
    weight: Tensor
    """(K,)."""


def expected_statistics(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None = None,
    *,
    worth: bool = False,
) -> Statistics:
    """Sum the expected complete-data statistics over a batch x (B, d), with sample weights (B,).

    ``worth`` asks also what each component is worth.
    """
    squares = squared(x)
    ops = joint_operands(parameters)
    joint, Y = project(x, ops, squares)
    values = _worth(joint, weights) if worth else joint.new_zeros(0)
    log_likelihood, R = log_normaliser(joint)
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
    A = _second_moments(parameters, ops.Gamma_mu.view(K, l), B, RZ.sum(dim=0))
    count = torch.full_like(log_likelihood[0], n) if weights is None else weights.sum()
    return Statistics(count, log_likelihood.sum(), A, B, R.mT @ squares, values)


def _worth(joint: Tensor, weights: Tensor | None) -> Tensor:
    """Sum what samples would lose without the component that explains them best, (K,).

    ``joint`` is ``log pi_k + log p_k``, (B, K); the second best component would take over.
    """
    K = joint.shape[1]
    if K == 1:
        return joint.new_full((1,), torch.inf)
    best, which = joint.max(dim=1)
    second = joint.scatter(1, which.unsqueeze(1), -torch.inf).amax(dim=1)
    loss = torch.nn.functional.softplus(best - second)
    if weights is not None:
        loss = loss * weights
    return loss.new_zeros(K).index_add_(0, which, loss)


def _second_moments(parameters: Parameters, Gamma_mu: Tensor, B: Tensor, first: Tensor) -> Tensor:
    """Compute ``sum R [z,1][z,1]'``, (K, l+1, l+1), of ``B = sum R [z,1] x'`` and ``sum R [z,1]``.

    Because ``z = M^(1/2) Gamma' (x - mu)``, ``sum R z z'`` follows from ``sum R z x'`` without
    another look at the samples; the posterior covariance ``r M`` comes on top.
    """
    Gamma, M = parameters[3:]
    K, _, l = parameters.shape
    A = B.new_empty(K, l + 1, l + 1)
    outer = first[:, :l].unsqueeze(-1) * Gamma_mu.unsqueeze(1)
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
    *,
    expand: bool = True,
) -> tuple[Running, Parameters]:
    """Move the running averages by one natural step; all that it is given is used up.

    Without ``expand`` a step of rate one is the classical EM's.
    """
    Theta, U, weight = running
    size = Theta.shape[1]
    n, B = float(statistics.n_samples), statistics.B
    U.mul_(1 - rate).add_(statistics.S, alpha=rate / n)
    for j in range(size):
        U.addcmul_(Theta[:, j], B[:, j], value=-rate / n)
    G = B.baddbmm_(statistics.A, Theta, alpha=-1)
    weight.mul_(1 - rate)
    A = statistics.A.mul_(rate / n)
    A.diagonal(dim1=1, dim2=2).add_(weight.unsqueeze(-1))
    weight.copy_(A[:, -1, -1])
    Theta.baddbmm_(_inverse(A), G, alpha=rate / n)
    for j in range(size):
        U.addcmul_(G[:, j], Theta[:, j], value=-rate / n)
    spare = parameters.precision_factors.mT, G
    moments = A if expand else None
    return precision_form(running, max_precision, min_eigenvalue, moments, spare)


def _inverse(A: Tensor) -> Tensor:
    """Invert second moments (K, l+1, l+1) that may be singular but for rounding.

    Scaled to a unit diagonal, so that a ridge of a few roundings makes any of them definite; the
    least diagonal keeps a component without samples solvable, far below any used one's share.
    """
    K, size, _ = A.shape
    scale = A.diagonal(dim1=1, dim2=2).clamp(min=1e-6 / K).rsqrt().unsqueeze(-1)
    ridge = 8 * size * torch.finfo(A.dtype).eps
    unit = A * scale * scale.mT
    unit.diagonal(dim1=1, dim2=2).fill_(1 + ridge)
    inverse: Tensor = torch.linalg.inv_ex(unit).inverse
    return inverse * scale * scale.mT


def precision_form(
    running: Running,
    max_precision: Tensor,
    min_eigenvalue: float,
    moments: Tensor | None = None,
    spare: tuple[Tensor, Tensor] | None = None,
) -> tuple[Running, Parameters]:
    """Turn the latent basis so that M is diagonal; the averages that it is given are used up.

    ``L - I = Lambda' E Lambda = O lambda O'`` gives ``Lambda <- Lambda O`` and
    ``M = 1 / (1 + lambda)``; lambda is bounded so that M stays above its floor. With the second
    ``moments`` of [z, 1], (K, l+1, l+1), z is brought to mean zero and unit covariance before.
    ``spare`` is memory for Gamma, (K, l, d), and for Theta, (K, l+1, d).
    """
    Theta, U, weight = running
    K, l, d = len(U), Theta.shape[1] - 1, U.shape[1]
    r = weight.clamp(min=torch.finfo(U.dtype).tiny ** 0.5).unsqueeze(-1)
    E = r / torch.maximum(U, r / max_precision)
    Gamma, turned = spare or (U.new_empty(K, l, d), torch.empty_like(Theta))
    Lambda = Theta[:, :l]
    torch.mul(Lambda, E.unsqueeze(1), out=Gamma)
    strength = Lambda @ Gamma.mT
    change = U.new_zeros(K, l + 1, l + 1)
    change[:, l, l] = 1
    root = None
    if moments is not None:
        change[:, l, :l], root = _standardising(moments, r)
        strength = root.mT @ strength @ root
    strength, O = torch.linalg.eigh(strength)
    strength, O = strength.clamp(min=0).flip(-1), O.flip(-1)
    most = 1 / min_eigenvalue - 1
    shrink = (most / strength.clamp(min=most)).sqrt().unsqueeze(1)
    basis = (O * shrink).mT
    change[:, :l, :l] = basis if root is None else basis @ root.mT
    torch.bmm(change, Theta, out=turned)
    Lambda = turned[:, :l]
    torch.mul(Lambda, E.unsqueeze(1), out=Gamma)
    # The eigenvalues beside a far larger one have lost digits: take them from the turned basis.
    strength = torch.bmm(Lambda, Gamma.mT).diagonal(dim1=1, dim2=2)
    M = (1 + strength).reciprocal_().clamp_(min_eigenvalue, 1)
    Gamma.mul_(M.sqrt().unsqueeze(-1))
    parameters = Parameters(r.squeeze(-1).log(), turned[:, l], E, Gamma.mT, M)
    return Running(turned, U, weight), parameters


def _standardising(moments: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Find z_mean (K, l) and L (K, l, l) so that ``z = z_mean + L u`` with u standard.

    ``moments`` is the average of ``R [z,1][z,1]'`` and r (K, 1) that of R.
    """
    l = moments.shape[1] - 1
    z_mean = moments[:, l, :l] / r
    covariance = moments[:, :l, :l] / r.unsqueeze(-1) - z_mean.unsqueeze(1) * z_mean.unsqueeze(2)
    root, failed = torch.linalg.cholesky_ex(covariance)
    # A component without samples, or with fewer digits than it needs, keeps its basis.
    whole = (failed == 0).view(-1, 1, 1)
    basis = torch.eye(l, dtype=root.dtype, device=root.device)
    return torch.where(whole[:, 0], z_mean, 0), torch.where(whole, root, basis)
