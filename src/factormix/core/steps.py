"""The step of running averages in the natural geometry of the complete-data model.

Given the component, the model is linear: ``x = Theta' [1, z] + eps`` with ``Theta = [mu, Lambda]``
and ``eps ~ N(0, D)``. A batch contributes the sums ``A = sum R [1,z][1,z]'``,
``B = sum R [1,z] x'`` and ``S = sum R x^2`` with z under its posterior. With A a running average
and ``G = B - A_batch Theta`` the batch's residual correlation, the least-squares solution of all
averaged statistics is exactly

    Theta <- Theta + rate A^-1 G
    pi V  <- (1 - rate) pi V + rate (S - Theta . B - G . Theta_new)

so that no running copy of ``sum R x z'`` is needed: Theta and A imply it. V is D before its bound.
With rate one and the sums of all the data this is the M-step of EM.

A component that no row of a batch touched has its weight decay, and all else stays as it is: Theta
and V are what averages over the same rows gave before. So a step needs to rewrite only the
components that were touched.

The latent variables are then brought back to mean zero and unit covariance by ``[1, z] = T [1, u]``
with T the Cholesky factor of A over the weight, which moves ``mu`` to ``mu + Lambda z_mean`` and
Lambda to ``Lambda L``: the parameter-expanded EM of Liu, Rubin and Wu (1998). Without it a mean
creeps along strong loadings, because z can make up for nearly all of its error. It also makes the
running A the identity times the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from factormix.core.density import SMALL
from factormix.core.parameters import Parameters
from factormix.core.running import (
    Running,
    bounded_precision,
    logits_of,
    precision_form,
    prediction_widths,
    representable,
)
from factormix.core.statistics import Statistics

__all__ = ["factor_moments", "hastened", "natural_step", "noise_share"]

LEAST_NOISE_SHARE = 0.02
"""Share of the noise that the data shows below which variances are hastened no more."""
FARTHEST = 1.6
"""Factor by which a variance changes in a step at most because it is hastened."""


def natural_step(
    running: Running,
    parameters: Parameters,
    statistics: Statistics,
    rate: float,
    max_precision: Tensor,
    min_eigenvalue: float,
    *,
    expand: bool = True,
    hasten: bool = False,
    everywhere: bool = False,
    n_components: int | None = None,
    n_rows: float | None = None,
    last_bound: Tensor | None = None,
) -> tuple[Running, Parameters]:
    """Move the running averages by one natural step; the arguments are used up.

    Without ``expand``, a step of rate one is that of classical EM. Where the statistics are of some
    components only, the others are not rewritten: the weight alone of what no row touched decays.
    That supposes that the bound is the one of the last step: for a new one, they are rewritten
    ``everywhere``. ``n_components`` are those of the mixture, where these are some of them.
    ``hasten`` is for variances, see ``hastened``; ``n_rows``, those that the averages know of, asks
    for the ``prediction_widths`` of variances, which suppose that rows are complete. The parameters
    are then by ``last_bound`` (d,), if that is another one.
    """
    statistics = statistics.finished(parameters)
    bounds, K = (max_precision, min_eigenvalue), n_components or len(running.weight)
    widths, last_bound = None, max_precision if last_bound is None else last_bound
    if n_rows is not None:
        widths = prediction_widths(running.weight, parameters.latent_variances, n_rows)
    E, Gamma, M = parameters[2:]

    def rewrite(
        some: Running, sums: Statistics, touched: Tensor | None
    ) -> tuple[Running, Parameters]:
        # A slice of all is a view, and the numbers of some make a copy.
        index = slice(None) if touched is None else touched
        before = (some.V.clone(), noise_share(E[index], Gamma[index])) if hasten else None
        if widths is not None:
            _narrow_latents(sums, some, M[index], last_bound)
        Theta, T, spare = _moved(some, sums, rate, Gamma if touched is None else None, K)
        if before is not None:
            some.V.copy_(hastened(some.V, *before))
        return precision_form(
            Running(Theta, *some[1:]),
            *bounds,
            T if expand else None,
            spare,
            None if widths is None else widths[index],
        )

    if statistics.touched is None:
        return rewrite(running, statistics, None)
    numbers, weights = statistics.touched, list[Tensor]()
    if everywhere:
        numbers = torch.arange(len(running.weight), device=numbers.device)
    for part in statistics.parts(numbers):
        touched = part.touched
        assert touched is not None
        some, new = rewrite(Running(*(t[touched] for t in running)), part, touched)
        weights.append(some.weight)
        rewritten = (some.Theta, some.V, new[2], new[3].mT, new[4])
        for whole, found in zip((*running[:2], E, Gamma.mT, M), rewritten, strict=True):
            whole.index_copy_(0, touched, found)
    running.weight.mul_(1 - rate).index_copy_(0, numbers, torch.cat(weights))
    logits = logits_of(running.weight)
    return running, Parameters(logits, running.Theta[:, 0], E, Gamma, M)


def _narrow_latents(
    statistics: Statistics, running: Running, M: Tensor, max_precision: Tensor
) -> None:
    """Make A and B those of z as variances give them before they are widened, in place.

    Wider variances are for new rows: a posterior by them, with variances M (K, l), would trust its
    own rows less, and weak factors would fade. A latent value of one is ``1 - M`` in the posterior
    mean, so that means are to grow by the ratio of the two; rows need not be seen for that. That is
    exact where the bound holds for no feature or for all, and nearly so where it does for some.
    """
    if not M.shape[1]:
        return
    A, B, E = statistics.A, statistics.B, bounded_precision(running.V, max_precision)
    # One by one, because the squares of all at once would be as large as the loadings.
    strength = [(E * column.square()).sum(dim=1) for column in running.Theta[:, 1:].unbind(dim=1)]
    own = torch.minimum((1 + torch.stack(strength, dim=1)).reciprocal_(), M)
    known = 1 - M
    growth = torch.where(known > 0, (1 - own) / known.clamp(min=torch.finfo(M.dtype).eps), 1.0)
    r, diagonal = A[:, :1, 0].clone(), A.diagonal(dim1=1, dim2=2)[:, 1:]
    diagonal.addcmul_(r, M, value=-1)
    A[:, 1:].mul_(growth.unsqueeze(2))
    A[:, :, 1:].mul_(growth.unsqueeze(1))
    diagonal.addcmul_(r, own)
    B[:, 1:].mul_(growth.unsqueeze(2))


def _moved(
    running: Running,
    statistics: Statistics,
    rate: float,
    Gamma: Tensor | None = None,
    n_components: int | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Move averages in place; return Theta, T of ``factor_moments``, and memory that is free now.

    That is Gamma's, if it is given, and that of the statistics.
    """
    Theta, V, weight = running
    n, B = float(statistics.n_samples), statistics.B
    weight.mul_(1 - rate)
    V.mul_(weight.unsqueeze(-1)).add_(statistics.S, alpha=rate / n)
    _subtract_products(V, Theta, B, rate / n)
    G = B.baddbmm_(statistics.A, Theta, alpha=-1)
    A = statistics.A.mul_(rate / n)
    A.diagonal(dim1=1, dim2=2).add_(weight.unsqueeze(-1))
    weight.copy_(A[:, 0, 0])
    T, inverse = factor_moments(A, n_components)
    Theta.baddbmm_(inverse, G, alpha=rate / n)
    _subtract_products(V, G, Theta, rate / n)
    V.div_(representable(weight).unsqueeze(-1))
    return Theta, T, None if Gamma is None else (Gamma.mT, G)


def noise_share(E: Tensor, Gamma: Tensor) -> Tensor:
    """Compute ``Q_j = P_jj / E_j``, (K, d): how much of a feature's noise the data itself shows."""
    # A norm needs no memory for the squares.
    squares: Tensor = torch.linalg.vector_norm(Gamma.mT, dim=1).square()
    share: Tensor = 1 - squares / E
    return share.clamp_(min=LEAST_NOISE_SHARE)


def hastened(V: Tensor, before: Tensor, share: Tensor) -> Tensor:
    """Return variances V (K, d) that move farther from where they were before.

    Where factors are many, the posterior of z explains most of a row's noise, and the step of EM,
    which takes that for known, is short: with Q = V^(1/2) P V^(1/2), the information of the data
    about log V is Q * Q / 2, element by element, of which EM assumes I / 2. As Q has eigenvalues of
    at most one, it is at most diag(Q) / 2: so ``1 / Q_jj`` times the step of EM, ``share`` (K, d),
    goes up as surely. It is never less far than EM goes.
    """
    change = (V / before.clamp(min=torch.finfo(V.dtype).tiny) - 1) / share
    far = change.add_(1).clamp_(1 / FARTHEST, FARTHEST).mul_(before)
    return torch.where(before < V, torch.maximum(V, far), torch.minimum(V, far))


def _subtract_products(V: Tensor, first: Tensor, second: Tensor, factor: float) -> None:
    """Subtract ``factor * sum_j first_j second_j`` from V (K, d), in place; both (K, l+1, d)."""
    if first.numel() <= SMALL:
        V.sub_((first * second).sum(dim=1), alpha=factor)
        return
    # One by one, because the products of all at once would be as large as the factors.
    for one, other in zip(first.unbind(dim=1), second.unbind(dim=1), strict=True):
        V.addcmul_(one, other, value=-factor)


def factor_moments(A: Tensor, n_components: int | None = None) -> tuple[Tensor, Tensor]:
    """Find T, lower triangular, with ``A = r T T'`` and r the first element; and ``A^-1``.

    A holds second moments of [1, z], (K, l+1, l+1): ``[1, z] = T [1, u]`` gives u of zero mean and
    unit covariance. Elements off the diagonal are shrunk by a few roundings, which makes any
    moments definite; where even that fails, only the diagonal is used. Its floor, far below the
    share of any component in use, keeps a component without samples solvable. ``n_components`` is
    that of the mixture, where these are some of its components.
    """
    K, size, _ = A.shape
    diagonal = A.diagonal(dim1=1, dim2=2).clamp(min=1e-6 / (n_components or K))
    r = diagonal[:, :1]
    unit_diagonal = diagonal / r
    ridge = 8 * size * torch.finfo(A.dtype).eps
    unit = A * ((1 - ridge) / r).unsqueeze(-1)
    unit.diagonal(dim1=1, dim2=2).copy_(unit_diagonal)
    T, failed = torch.linalg.cholesky_ex(unit)
    T = torch.where((failed == 0).view(K, 1, 1), T, unit_diagonal.sqrt_().diag_embed())
    return T, torch.cholesky_inverse(T) / r.unsqueeze(-1)
