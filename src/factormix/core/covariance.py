"""The natural step of means and covariances, where sums of products of features are known.

EM knows the factors only through their posterior. The more factors there are, the less of a row is
left for the noise, and loadings and variances move slowly. Where features are so few that
``sum R x x'`` is summed (``ProductSums``), a step can move the Gaussian itself, whose averages are
the mean and the covariance:

    Sigma <- (1 - a) Sigma + a S + a (1 - a) delta delta'

with S the covariance of the batch's rows around their mean, delta from mu to that mean, and a the
share of the batch in the weight. Given the variances V, the likeliest loadings follow from the
eigenvectors of ``V^(-1/2) Sigma V^(-1/2)`` (Lawley, 1940). V itself goes up its gradient as in EM,
but farther, as in ``averages.hasten_variances``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import CACHE_ELEMENTS, slice_rows, symmetric_places
from factormix.core.averages import Averages, StepOptions, hasten_variances, noise_share, to_logits
from factormix.core.density import precision_matrices
from factormix.core.parameters import Parameters, precise_dtype
from factormix.core.statistics import ProductSums, Statistics

Map = Callable[[Callable[[list[slice]], None], list[list[slice]]], Iterable[None]]


def covariance_step(
    averages: Averages,
    parameters: Parameters,
    statistics: Statistics,
    options: StepOptions,
    *,
    map_groups: Map = map,
    n_groups: int = 1,
    matrix_elements: int = CACHE_ELEMENTS,
) -> tuple[Averages, Parameters]:
    """Move means and covariances by one natural step; the memory of the arguments is reused.

    The statistics have `ProductSums`. As in ``natural_step``, components that no row touched are
    not rewritten unless ``options.everywhere`` is set. ``map_groups`` applies a function to groups
    of components, perhaps at the same time; the result does not depend on it. ``matrix_elements``
    bounds the (d, d) matrices that are formed at a time.
    """
    assert isinstance(statistics.sums, ProductSums)
    K, d, _ = parameters.shape
    E, Gamma, M = parameters[2:]
    numbers = statistics.sums.touched
    if numbers is None or options.everywhere:
        numbers = torch.arange(K, device=E.device)
    sums = statistics.sums.spread(numbers)
    share, precise = options.rate / float(statistics.n_samples), precise_dtype(E.device)
    averages.weight.mul_(1 - options.rate)
    rewritten = (*averages, E, Gamma.mT, M)

    def step(parts: list[slice]) -> None:
        for part in parts:
            which = numbers[part]
            batch = (t[part].to(precise) for t in (sums.count, sums.linear, sums.products[:, 0]))
            old = _Gaussians.of(averages.take(which))
            moved, change = _move(old, share, *batch)
            V = _move_variances(old.V, change, E[which], Gamma[which])
            new = _factor(moved._replace(V=V), M[which], options)
            for whole, some in zip(rewritten, new, strict=True):
                whole.index_copy_(0, which, some.to(whole))

    parts = slice_rows(len(numbers), matrix_elements // d**2)
    if len(numbers):
        list(map_groups(step, [parts[i::n_groups] for i in range(min(n_groups, len(parts)))]))
    return averages, Parameters(to_logits(averages.weight), averages.Theta[:, 0], E, Gamma, M)


class _Gaussians(NamedTuple):
    """Components as Gaussians, in the widest dtype of the device."""

    weight: Tensor
    """(T, 1)."""
    mean: Tensor
    """(T, d)."""
    covariance: Tensor
    """(T, d, d)."""
    V: Tensor
    """(T, d), the variances that no factor explains."""

    @classmethod
    def of(cls, averages: Averages) -> _Gaussians:
        Theta, V, weight = (t.to(precise_dtype(t.device)) for t in averages)
        Lambda = Theta[:, 1:].mT
        covariance = Lambda @ Lambda.mT
        covariance.diagonal(dim1=1, dim2=2).add_(V)
        return cls(weight.unsqueeze(1), Theta[:, 0], covariance, V)


def _move(
    old: _Gaussians, share: float, count: Tensor, linear: Tensor, products: Tensor
) -> tuple[_Gaussians, Tensor]:
    """Move Gaussians by sums over rows: ``sum R``, (T, 1), ``sum R x``, (T, d), ``sum R x x'``.

    Return also the change of their covariances, (T, d, d).
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


def _move_variances(V: Tensor, change: Tensor, E: Tensor, Gamma: Tensor) -> Tensor:
    """Return V (T, d) after the step; the step of EM is ``V^2 diag(P change P)``."""
    E, Gamma = E.to(V), Gamma.to(V)
    P = precision_matrices(E, Gamma)
    slope = (P @ change).mul_(P).sum(dim=2)
    return hasten_variances(V.addcmul(V.square(), slope), V, noise_share(E, Gamma))


def _factor(moved: _Gaussians, M: Tensor, options: StepOptions) -> tuple[Tensor, ...]:
    """Find the likeliest loadings, given V; return Theta, V, the weight, E, Gamma and M.

    Gamma is (T, l, d). The M (T, l) given is from before the step; results have its dtype.
    """
    d, l, eps = moved.V.shape[1], M.shape[1], torch.finfo(M.dtype).eps
    V = torch.maximum(moved.V, 1 / options.max_precision.to(moved.V))
    root = V.sqrt()
    omega, U = torch.linalg.eigh(moved.covariance / root.unsqueeze(2) / root.unsqueeze(1))
    # Strongest first; factors that explain less than a rounding of the noise are zero.
    strength = (omega[:, d - l :].flip(1) - 1).clamp_(max=1 / options.min_eigenvalue - 1)
    strength = torch.where(strength > eps, strength, 0)
    Lambda = (U[:, :, d - l :].flip(2) * strength.sqrt().unsqueeze(1)).mul_(root.unsqueeze(2)).mT
    M = 1 / (1 + strength)
    Theta = torch.cat([moved.mean.unsqueeze(1), Lambda], dim=1)
    Gamma = Lambda / V.unsqueeze(1) * M.sqrt().unsqueeze(2)
    return Theta, V, moved.weight.squeeze(1), 1 / V, Gamma, M
