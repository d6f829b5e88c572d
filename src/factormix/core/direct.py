"""The step of means and covariances themselves, where sums of products of features are known.

EM knows of the factors only what their posterior says, and the more of them there are, the less of
a row is left for the noise: loadings and variances follow slowly. Where features are so few that
``sum R x x'`` is summed (``core/quadratic.py``), a step can be that of the Gaussian itself, whose
averages are the mean and the covariance:

    Sigma <- (1 - a) Sigma + a S + a (1 - a) delta delta'

with S the covariance of the batch's rows around their mean, delta from mu to that mean, and a the
share of the batch in the weight. Given the variances V, the likeliest loadings then follow from the
eigenvectors of ``V^(-1/2) Sigma V^(-1/2)`` (Lawley, 1940). V itself goes up its gradient as in EM,
but farther, as in ``hastened``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import symmetric_places
from factormix.core.averages import Running, hastened, logits_of, noise_share
from factormix.core.parameters import Parameters, precise_dtype
from factormix.core.quadratic import matrix_parts, precision_matrices
from factormix.core.statistics import Statistics

__all__ = ["direct_step"]

Each = Callable[[Callable[[list[slice]], None], list[list[slice]]], Iterable[None]]


def direct_step(
    running: Running,
    parameters: Parameters,
    statistics: Statistics,
    rate: float,
    max_precision: Tensor,
    min_eigenvalue: float,
    *,
    everywhere: bool = False,
    each: Each = map,
    n_groups: int = 1,
) -> tuple[Running, Parameters]:
    """Move means and covariances by one natural step; the arguments are used up.

    The statistics are ``by_products``. As in ``natural_step``, components that no row touched are
    not rewritten, unless that is to be done ``everywhere``. ``each`` computes a function of so many
    groups of components, perhaps at the same time; the result does not depend on it.
    """
    K, d, _ = parameters.shape
    E, Gamma, M = parameters[2:]
    numbers = statistics.touched
    if numbers is None or everywhere:
        numbers = torch.arange(K, device=E.device)
    sums, share = statistics.among(numbers), rate / float(statistics.n_samples)
    running.weight.mul_(1 - rate)
    kept = (*running, E, Gamma.mT, M)

    def step(parts: list[slice]) -> None:
        for part in parts:
            which = numbers[part]
            batch = (t[part].to(precise_dtype(E.device)) for t in (sums.A, sums.S, sums.B[:, 0]))
            old = _Gaussians.of(Running(*(t[which] for t in running)))
            moved, change = _moved(old, share, *batch)
            V = _variances(old.V, change, E[which], Gamma[which])
            new = _factored(moved._replace(V=V), M[which], max_precision, min_eigenvalue)
            for whole, some in zip(kept, new, strict=True):
                whole.index_copy_(0, which, some.to(whole))

    parts = matrix_parts(len(numbers), d)
    groups = [parts[i::n_groups] for i in range(min(n_groups, len(parts)))]
    if groups:
        list(each(step, groups))
    return running, Parameters(logits_of(running.weight), running.Theta[:, 0], E, Gamma, M)


class _Gaussians(NamedTuple):
    """Components as Gaussians, in the best precision that there is."""

    weight: Tensor
    """(T, 1)."""
    mean: Tensor
    """(T, d)."""
    covariance: Tensor
    """(T, d, d)."""
    V: Tensor
    """(T, d), that of its variances which no factor explains."""

    @classmethod
    def of(cls, running: Running) -> _Gaussians:
        Theta, V, weight = (t.to(precise_dtype(t.device)) for t in running)
        Lambda = Theta[:, 1:].mT
        covariance = Lambda @ Lambda.mT
        covariance.diagonal(dim1=1, dim2=2).add_(V)
        return cls(weight.unsqueeze(1), Theta[:, 0], covariance, V)


def _moved(
    old: _Gaussians, share: float, count: Tensor, linear: Tensor, products: Tensor
) -> tuple[_Gaussians, Tensor]:
    """Move Gaussians by sums over rows: ``sum R``, (T, 1), ``sum R x``, (T, d), ``sum R x x'``.

    Return also what that adds to their covariances, (T, d, d).
    """
    d = linear.shape[1]
    weight = old.weight + share * count
    # Without rows, nothing moves.
    some, count = count > 0, count.clamp(min=torch.finfo(count.dtype).tiny)
    a = torch.where(some, share * count / weight, 0)
    mean = torch.where(some, linear / count, old.mean)
    delta = mean - old.mean
    squares = products.index_select(1, symmetric_places(d, linear.device)).view(-1, d, d)
    change = squares.div_(count.unsqueeze(-1)).sub_(mean.unsqueeze(2) * mean.unsqueeze(1))
    change.sub_(old.covariance)
    change.add_((1 - a).unsqueeze(-1) * delta.unsqueeze(2) * delta.unsqueeze(1))
    change.mul_(a.unsqueeze(-1))
    moved = old._replace(
        weight=weight, mean=old.mean + a * delta, covariance=old.covariance + change
    )
    return moved, change


def _variances(V: Tensor, change: Tensor, E: Tensor, Gamma: Tensor) -> Tensor:
    """Return V (T, d) after the step: ``V^2 diag(P change P)`` is that of EM, P before it."""
    E, Gamma = E.to(V), Gamma.to(V)
    P = precision_matrices(E, Gamma)
    slope = (P @ change).mul_(P).sum(dim=2)
    return hastened(V.addcmul(V.square(), slope), V, noise_share(E, Gamma))


def _factored(
    moved: _Gaussians, M: Tensor, max_precision: Tensor, min_eigenvalue: float
) -> tuple[Tensor, ...]:
    """Find the likeliest loadings, given V; return Theta, V, the weight, E, Gamma and M.

    Gamma is (T, l, d). M (T, l) is that of before, in the dtype in which all of it will be kept.
    """
    d, l, eps = moved.V.shape[1], M.shape[1], torch.finfo(M.dtype).eps
    V = torch.maximum(moved.V, 1 / max_precision.to(moved.V))
    root = V.sqrt()
    omega, U = torch.linalg.eigh(moved.covariance / root.unsqueeze(2) / root.unsqueeze(1))
    # Strongest first, and nothing of what explains less than a rounding of the noise.
    strength = (omega[:, d - l :].flip(1) - 1).clamp_(max=1 / min_eigenvalue - 1)
    strength = torch.where(strength > eps, strength, 0)
    Lambda = (U[:, :, d - l :].flip(2) * strength.sqrt().unsqueeze(1)).mul_(root.unsqueeze(2)).mT
    M = 1 / (1 + strength)
    Theta = torch.cat([moved.mean.unsqueeze(1), Lambda], dim=1)
    Gamma = Lambda / V.unsqueeze(1) * M.sqrt().unsqueeze(2)
    return Theta, V, moved.weight.squeeze(1), 1 / V, Gamma, M
