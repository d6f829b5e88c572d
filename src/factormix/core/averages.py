"""Running averages of a mixture in training, and the precision form that they imply.

The step of running averages in the natural geometry of the complete-data model.

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

from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.density import SMALL
from factormix.core.parameters import Parameters, factor_major, precise_dtype
from factormix.core.statistics import Statistics

__all__ = [
    "Components",
    "Running",
    "bounded_precision",
    "factor_moments",
    "hastened",
    "logits_of",
    "natural_step",
    "noise_share",
    "precision_form",
    "prediction_widths",
    "representable",
    "turned_form",
]

LEAST_ROWS = 3.0
"""Rows for each number that is fitted to a feature, below which the error of prediction is taken to
be the one of so many."""


class Running(NamedTuple):
    """Running averages of the statistics, for latent variables of zero mean and unit covariance."""

    Theta: Tensor
    """(K, l+1, d): mu, then the columns of Lambda as rows."""
    V: Tensor
    """(K, d): residual variance, before its bound, which direct steps apply to it."""
    weight: Tensor
    """(K,)."""


class Components(NamedTuple):
    """Hold all that a mixture in training knows about its components, along the first axis."""

    Theta: Tensor
    V: Tensor
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
        """Return them with n empty components at the end; these here are used up.

        One tensor after the other grows where it is, so that never all of them are there twice,
        whoever else may still hold them.
        """
        rows = self._replace(Gamma=self.Gamma.mT)
        grown = Components(*(_lengthened(t, n) for t in rows))
        return grown._replace(Gamma=grown.Gamma.mT)

    def parted(self) -> tuple[Running, Parameters]:
        """Return them as running averages and parameters."""
        logits = logits_of(self.weight)
        return Running(*self[:3]), Parameters(
            logits, self.Theta[:, 0], self.E, factor_major(self.Gamma), self.M
        )


def _lengthened(t: Tensor, n: int) -> Tensor:
    """Return t (K, ...) with n zeros at the end of its first axis; t is used up.

    Memory that holds nothing else grows where it is, and t shows the first part of it.
    """
    K, storage = len(t), t.untyped_storage()
    alone = t.is_contiguous() and storage.nbytes() == t.numel() * t.element_size()
    if not (alone and storage.resizable()):
        return torch.cat([t, t.new_zeros(n, *t.shape[1:])])
    longer = t.view(t.shape).resize_(K + n, *t.shape[1:])
    longer[K:] = 0
    return longer


def logits_of(weight: Tensor) -> Tensor:
    """Return the logits of weights, (K,)."""
    return representable(weight).log()


def representable(weight: Tensor) -> Tensor:
    """Return weights (K,) that are not too small to be divided by."""
    return weight.clamp(min=torch.finfo(weight.dtype).tiny ** 0.5)


def precision_form(
    running: Running,
    max_precision: Tensor,
    min_eigenvalue: float,
    T: Tensor | None = None,
    spare: tuple[Tensor, Tensor] | None = None,
    widths: Tensor | None = None,
) -> tuple[Running, Parameters]:
    """Turn the latent basis so that M is diagonal; the given averages are used up.

    ``L = I + Lambda' E Lambda = O ell O'`` gives ``Lambda <- Lambda O`` and ``M = 1 / ell``, which
    is bounded below. With T, (K, l+1, l+1), the latent variables are first standardised
    by ``[1, z] = T [1, u]``; T is used up. ``spare`` is memory for Gamma, (K, l, d), and for
    Theta, (K, l+1, d). ``widths`` (K,) are those of ``prediction_widths``.

    A column of Lambda that explains less than a rounding of the noise, so that its M is one, is set
    to zero: the density is the same, and it would only decay further, through numbers that the
    format can hardly hold.
    """
    Theta, V, weight = running
    K, l, d = len(V), Theta.shape[1] - 1, V.shape[1]
    E = bounded_precision(V, max_precision, widths)
    Gamma, turned = spare or (V.new_empty(K, l, d), torch.empty_like(Theta))
    Lambda = Theta[:, 1:]
    torch.mul(Lambda, E.unsqueeze(1), out=Gamma)
    strength = torch.bmm(Lambda, Gamma.mT)
    if T is None:
        T = torch.eye(l + 1, dtype=V.dtype, device=V.device).repeat(K, 1, 1)
    root = T[:, 1:, 1:]
    root.copy_(root @ _turned_basis(root.mT @ strength @ root, 1 / min_eigenvalue - 1))
    torch.bmm(T.mT, Theta, out=turned)
    Lambda = turned[:, 1:]
    torch.mul(Lambda, E.unsqueeze(1), out=Gamma)
    # The eigenvalues beside a far larger one have lost digits: take them from the turned basis.
    strength = torch.bmm(Lambda, Gamma.mT).diagonal(dim1=1, dim2=2)
    supported = (strength > torch.finfo(V.dtype).eps).to(V.dtype)
    Lambda.mul_(supported.unsqueeze(-1))
    M = (1 + strength * supported).reciprocal_().clamp_(min_eigenvalue, 1)
    Gamma.mul_((M.sqrt() * supported).unsqueeze(-1))
    parameters = Parameters(logits_of(weight), turned[:, 0], E, Gamma.mT, M)
    return Running(turned, V, weight), parameters


def turned_form(
    Theta: Tensor,
    V: Tensor,
    M: Tensor,
    max_precision: Tensor,
    widths: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Compute E, (K, d), and Gamma, (K, l, d), of what ``precision_form`` has turned, as it does.

    Theta is (K, l+1, d), V is (K, d), M is (K, l), widths are (K,). ``out`` is where they are to
    lie, if anywhere.
    """
    E = bounded_precision(V, max_precision, widths, out[0])
    Gamma = torch.mul(Theta[:, 1:], E.unsqueeze(1), out=out[1])
    return E, Gamma.mul_(M.sqrt().unsqueeze(-1))


def bounded_precision(
    V: Tensor, max_precision: Tensor, widths: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute E, (K, d), of residual variances V, (K, d), which are to be so many times wider."""
    if widths is not None:
        V = out = torch.mul(V, widths.unsqueeze(1), out=out)
    return torch.maximum(V, 1 / max_precision, out=out).reciprocal_()


def prediction_widths(weight: Tensor, M: Tensor, n_rows: float) -> Tensor:
    """Compute how many times wider than its rows were a component expects new ones to be, (K,).

    Residuals are too small by what was fitted to them: with n rows and p numbers for each feature,
    the mean and the factors that are in use, those of new rows have ``(n + p) / (n - p)`` times
    the variance (Akaike's final prediction error). ``n_rows`` are those of all components, whose
    weights are (K,), with M (K, l).
    """
    p = 1 + (1 - M).sum(dim=1)
    n = torch.maximum(weight * n_rows, LEAST_ROWS * p)
    return (n + p) / (n - p)


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
