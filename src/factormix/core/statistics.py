"""Expected statistics of the complete-data model, and the step in its natural geometry.

Given the component, the model is linear: ``x = Theta' [1, z] + eps`` with ``Theta = [mu, Lambda]``
and ``eps ~ N(0, D)``. A batch contributes the sums ``A = sum R [1,z][1,z]'``,
``B = sum R [1,z] x'`` and ``S = sum R x^2`` with z under its posterior. With A a running average
and ``G = B - A_batch Theta`` the batch's residual correlation, the least-squares solution of all
averaged statistics is exactly

    Theta <- Theta + rate A^-1 G
    U     <- (1 - rate) U + rate (S - Theta . B - G . Theta_new)

so that no running copy of ``sum R x z'`` is needed: Theta and A imply it. ``U / pi`` is D before
its bound. With rate one and the sums of all the data this is the M-step of EM.

The latent variables are then brought back to mean zero and unit covariance by ``[1, z] = T [1, u]``
with T the Cholesky factor of A over the weight, which moves ``mu`` to ``mu + Lambda z_mean`` and
Lambda to ``Lambda L``: the parameter-expanded EM of Liu, Rubin and Wu (1998). Without it a mean
creeps along strong loadings, because z can make up for nearly all of its error. It also makes the
running A the identity times the weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.density import SMALL, joint_operands, log_normaliser, project, squared
from factormix.core.parameters import Parameters, factor_major, precise_dtype
from factormix.core.workspace import Workspace, kept

__all__ = [
    "Components",
    "Running",
    "Statistics",
    "expected_statistics",
    "factor_moments",
    "natural_step",
    "precision_form",
    "removal_losses",
]


class Statistics(NamedTuple):
    """Sums over the samples of a batch, with R the responsibilities."""

    n_samples: Tensor
    """Number of samples, or the sum of their weights; scalar."""
    log_likelihood: Tensor
    """Scalar."""
    A: Tensor
    """``sum R [1,z][1,z]'``, (K, l+1, l+1), with the posterior covariance of z."""
    B: Tensor
    """``sum R [1,z] x'``, (K, l+1, d)."""
    S: Tensor
    """``R' X^2``, (K, d)."""
    loss_alone: Tensor
    """Log-likelihood lost without each component, (K,); (0,) if not asked for."""
    loss_together: Tensor
    """Log-likelihood lost if all candidates for removal went at once, counted for the candidate
    that explains each sample best, (K,); (0,) if not asked for.
    """


class Running(NamedTuple):
    """Running averages of the statistics, for latent variables of zero mean and unit covariance."""

    Theta: Tensor
    """(K, l+1, d): mu, then the columns of Lambda as rows."""
    U: Tensor
    """(K, d): residual variance times component weight, before its bound."""
    weight: Tensor
    """(K,)."""


class Components(NamedTuple):
    """Hold all that a mixture in training knows about its components, along the first axis."""

    Theta: Tensor
    U: Tensor
    weight: Tensor
    E: Tensor
    Gamma: Tensor
    M: Tensor

    @classmethod
    def of(cls, running: Running, parameters: Parameters) -> Components:
        """Gather what two tuples hold."""
        return cls(*running, *parameters[2:])

    def take(self, index: Tensor) -> Components:
        """Return a copy of some components, in the order of their numbers (n,)."""
        return Components(*(t[index] for t in self))

    def with_room(self, n: int) -> Components:
        """Return a copy with n empty components at the end."""
        return Components(*(torch.cat([t, t.new_zeros(n, *t.shape[1:])]) for t in self))

    def parted(self) -> tuple[Running, Parameters]:
        """Return them as running averages and parameters."""
        logits = self.weight.clamp(min=torch.finfo(self.weight.dtype).tiny).log()
        return Running(*self[:3]), Parameters(
            logits, self.Theta[:, 0], self.E, factor_major(self.Gamma), self.M
        )


def expected_statistics(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None = None,
    *,
    candidates: Tensor | None = None,
    work: Workspace | None = None,
) -> Statistics:
    """Sum the expected complete-data statistics over a batch x (B, d), with sample weights (B,).

    ``candidates`` (K,), true for components that might be removed, asks also for what removing
    components would cost.
    """
    squares = squared(x, work)
    ops = joint_operands(parameters)
    joint, Y = project(x, ops, squares, work)
    losses = (joint.new_zeros(0),) * 2
    if candidates is not None:
        losses = removal_losses(joint, candidates, weights)
    log_likelihood, R = log_normaliser(joint)
    # A row that is very far from all but one component must not reach the others.
    R = torch.threshold_(R, 2e-30, 0)
    if weights is not None:
        R.mul_(weights.unsqueeze(1))
        log_likelihood = log_likelihood * weights
    n, (K, d, l) = len(x), parameters.shape
    RY = kept(work, "[R, R Y]", x, n, K, l + 1)
    RY = x.new_empty(n, K, l + 1) if RY is None else RY
    RY[:, :, 0] = R
    torch.mul(Y, R.unsqueeze(-1), out=RY[:, :, 1:])
    B = (RY.view(n, K * (l + 1)).mT @ x).view(K, l + 1, d)
    first = RY.sum(dim=0)
    # z is M^(1/2) Y.
    root = parameters.latent_variances.sqrt()
    B[:, 1:].mul_(root.unsqueeze(-1))
    first[:, 1:].mul_(root)
    A = _second_moments(parameters, ops.Gamma_mu.view(K, l), root, B, first)
    count = torch.full_like(log_likelihood[0], n) if weights is None else weights.sum()
    return Statistics(count, log_likelihood.sum(), A, B, R.mT @ squares, *losses)


def removal_losses(
    joint: Tensor, candidates: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sum what samples would lose without the component that explains them best, (K,) twice.

    ``joint`` is ``log pi_k + log p_k``, (B, K). First the second best takes over, whichever it
    is; then the best that is not a candidate, so that a group of twins is not thought dispensable
    because each could stand in for the other.
    """
    K = joint.shape[1]
    best, which = joint.max(dim=1)
    second = joint.scatter(1, which.unsqueeze(1), -torch.inf).amax(dim=1)
    # Minus infinity where every component is a candidate: nothing would be left.
    other = joint.masked_fill(candidates, -torch.inf).amax(dim=1)
    losses = torch.nn.functional.softplus(torch.stack([best - second, best - other]))
    if weights is not None:
        losses = losses * weights
    alone, together = losses.new_zeros(2, K).index_add_(1, which, losses)
    return alone, together.masked_fill(~candidates, 0)


def _second_moments(
    parameters: Parameters, Gamma_mu: Tensor, root: Tensor, B: Tensor, first: Tensor
) -> Tensor:
    """Compute ``sum R [1,z][1,z]'``, (K, l+1, l+1), of ``B = sum R [1,z] x'`` and ``sum R [1,z]``.

    Because ``z = M^(1/2) Gamma' (x - mu)``, ``sum R z z'`` follows from ``sum R z x'`` without
    another look at the samples; the posterior covariance ``r M`` comes on top. ``Gamma_mu`` and
    ``root`` are ``Gamma' mu`` and ``M^(1/2)``, (K, l).
    """
    Gamma, M = parameters[3:]
    A = B.new_empty(*first.shape, first.shape[1])
    A[:, 0] = first
    A[:, 1:, 0] = first[:, 1:]
    zy = torch.bmm(B[:, 1:], Gamma)
    zy.addcmul_(first[:, 1:].unsqueeze(-1), Gamma_mu.unsqueeze(1), value=-1)
    torch.mul(zy, root.unsqueeze(1), out=A[:, 1:, 1:])
    A.diagonal(dim1=1, dim2=2)[:, 1:].addcmul_(first[:, :1], M)
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
    """Move the running averages by one natural step; the arguments are used up.

    Without ``expand``, a step of rate one is that of classical EM.
    """
    Theta, U, weight = running
    n, B = float(statistics.n_samples), statistics.B
    U.mul_(1 - rate).add_(statistics.S, alpha=rate / n)
    _subtract_products(U, Theta, B, rate / n)
    G = B.baddbmm_(statistics.A, Theta, alpha=-1)
    weight.mul_(1 - rate)
    A = statistics.A.mul_(rate / n)
    A.diagonal(dim1=1, dim2=2).add_(weight.unsqueeze(-1))
    weight.copy_(A[:, 0, 0])
    T, inverse = factor_moments(A)
    Theta.baddbmm_(inverse, G, alpha=rate / n)
    _subtract_products(U, G, Theta, rate / n)
    spare = parameters.precision_factors.mT, G
    return precision_form(running, max_precision, min_eigenvalue, T if expand else None, spare)


def _subtract_products(U: Tensor, first: Tensor, second: Tensor, factor: float) -> None:
    """Subtract ``factor * sum_j first_j second_j`` from U (K, d), in place; both (K, l+1, d)."""
    if first.numel() <= SMALL:
        U.sub_((first * second).sum(dim=1), alpha=factor)
        return
    # One by one, because the products of all at once would be as large as the factors.
    for one, other in zip(first.unbind(dim=1), second.unbind(dim=1), strict=True):
        U.addcmul_(one, other, value=-factor)


def factor_moments(A: Tensor) -> tuple[Tensor, Tensor]:
    """Find T, lower triangular, with ``A = r T T'`` and r the first element; and ``A^-1``.

    A holds second moments of [1, z], (K, l+1, l+1): ``[1, z] = T [1, u]`` gives u of zero mean and
    unit covariance. Elements off the diagonal are shrunk by a few roundings, which makes any
    moments definite; where even that fails, only the diagonal is used. Its floor, far below the
    share of any component in use, keeps a component without samples solvable.
    """
    K, size, _ = A.shape
    diagonal = A.diagonal(dim1=1, dim2=2).clamp(min=1e-6 / K)
    r = diagonal[:, :1]
    unit_diagonal = diagonal / r
    ridge = 8 * size * torch.finfo(A.dtype).eps
    unit = A * ((1 - ridge) / r).unsqueeze(-1)
    unit.diagonal(dim1=1, dim2=2).copy_(unit_diagonal)
    T, failed = torch.linalg.cholesky_ex(unit)
    T = torch.where((failed == 0).view(K, 1, 1), T, unit_diagonal.sqrt_().diag_embed())
    return T, torch.cholesky_inverse(T) / r.unsqueeze(-1)


def precision_form(
    running: Running,
    max_precision: Tensor,
    min_eigenvalue: float,
    T: Tensor | None = None,
    spare: tuple[Tensor, Tensor] | None = None,
) -> tuple[Running, Parameters]:
    """Turn the latent basis so that M is diagonal; the given averages are used up.

    ``L = I + Lambda' E Lambda = O ell O'`` gives ``Lambda <- Lambda O`` and ``M = 1 / ell``, which
    is bounded below. With T, (K, l+1, l+1), the latent variables are first standardised
    by ``[1, z] = T [1, u]``; T is used up. ``spare`` is memory for Gamma, (K, l, d), and for
    Theta, (K, l+1, d).

    A column of Lambda that explains less than a rounding of the noise, so that its M is one, is set
    to zero: the density is the same, and it would only decay further, through numbers that the
    format can hardly hold.
    """
    Theta, U, weight = running
    K, l, d = len(U), Theta.shape[1] - 1, U.shape[1]
    r = weight.clamp(min=torch.finfo(U.dtype).tiny ** 0.5).unsqueeze(-1)
    E = r / torch.maximum(U, r / max_precision)
    Gamma, turned = spare or (U.new_empty(K, l, d), torch.empty_like(Theta))
    Lambda = Theta[:, 1:]
    torch.mul(Lambda, E.unsqueeze(1), out=Gamma)
    strength = torch.bmm(Lambda, Gamma.mT)
    if T is None:
        T = torch.eye(l + 1, dtype=U.dtype, device=U.device).repeat(K, 1, 1)
    root = T[:, 1:, 1:]
    root.copy_(root @ _turned_basis(root.mT @ strength @ root, 1 / min_eigenvalue - 1))
    torch.bmm(T.mT, Theta, out=turned)
    Lambda = turned[:, 1:]
    torch.mul(Lambda, E.unsqueeze(1), out=Gamma)
    # The eigenvalues beside a far larger one have lost digits: take them from the turned basis.
    strength = torch.bmm(Lambda, Gamma.mT).diagonal(dim1=1, dim2=2)
    supported = (strength > torch.finfo(U.dtype).eps).to(U.dtype)
    Lambda.mul_(supported.unsqueeze(-1))
    M = (1 + strength * supported).reciprocal_().clamp_(min_eigenvalue, 1)
    Gamma.mul_((M.sqrt() * supported).unsqueeze(-1))
    parameters = Parameters(r.squeeze(-1).log(), turned[:, 0], E, Gamma.mT, M)
    return Running(turned, U, weight), parameters


def _turned_basis(strength: Tensor, most: float) -> Tensor:
    """Find the basis (K, l, l) in which ``strength`` is diagonal, at most ``most``, and falling.

    The eigenvalues of ``I + strength`` are sought, in float64 where the device has it. There the
    tiniest and the largest numbers of float32 are ordinary ones, beside a diagonal that is never
    below one: LAPACK's routine for float32 fails or returns NaN where a diagonal reaches from 1e2
    to the edge of the format.
    """
    dtype = precise_dtype(strength.device)
    L = strength.to(dtype, copy=True)
    L.diagonal(dim1=1, dim2=2).add_(1)
    ell, O = torch.linalg.eigh(L)
    # Strongest first, and what is above the most brought down to it.
    shrink = (most / (ell - 1).clamp_(min=most)).sqrt_().unsqueeze(1)
    basis: Tensor = (O * shrink).flip(-1)
    return basis.to(strength.dtype)
