"""Statistics of the complete-data model, and the step in its natural geometry.

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

from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from factormix.core.density import SMALL
from factormix.core.parameters import Parameters, factor_major, precise_dtype

__all__ = [
    "Components",
    "Running",
    "Statistics",
    "factor_moments",
    "logits_of",
    "natural_step",
    "precision_form",
    "turned_form",
]

PART_ELEMENTS = 1 << 20
"""Elements of Theta of the components that a step rewrites at a time: copies of all that are
touched would be as large as the model."""
ALIGNED = 64
"""Components of which so many, or a multiple, are rewritten at a time."""
LEAST_NOISE_SHARE = 0.02
"""Share of the noise that the data shows below which variances are hastened no more."""
FARTHEST = 1.6
"""Factor by which a variance changes in a step at most because it is hastened."""


class Statistics(NamedTuple):
    """Sums over the samples of a batch, with R the responsibilities."""

    n_samples: Tensor
    """Number of samples, or the sum of their weights; scalar."""
    log_likelihood: Tensor
    """Scalar."""
    A: Tensor
    """``sum R [1,z][1,z]'``, (K, l+1, l+1), with the posterior covariance of z; not ``finished``,
    ``sum R [1,y]``, (K, l+1), with ``z = M^(1/2) y``.
    """
    B: Tensor
    """``sum R [1,z] x'``, (K, l+1, d); not finished, ``sum R [1,y] x'``."""
    S: Tensor
    """``R' X^2``, (K, d)."""
    loss_alone: Tensor
    """Log-likelihood lost without each component, (K,); (0,) if not asked for."""
    loss_together: Tensor
    """Log-likelihood lost if all candidates for removal went at once, counted for the candidate
    that explains each sample best, (K,); (0,) if not asked for.
    """
    touched: Tensor | None = None
    """(T,) rising numbers of the components that A, B and S are about, T instead of K; None for
    all of them.
    """
    missed: Tensor | None = None
    """Of samples that were evaluated in full too: the log-likelihood that screening lost, and their
    number or the sum of their weights, (2,); None without screening.
    """
    scales: Tensor | None = None
    """``sum R`` of every scale of components, (K, S), also where A, B and S are of some components
    only, and by ``R E[1/c]``; None where they have one scale, see ``core/scales.py``.
    """

    @property
    def is_finished(self) -> bool:
        """Whether A and B are those of z."""
        return self.A.dim() == 3

    def finished(self, parameters: Parameters, Gamma_mu: Tensor | None = None) -> Statistics:
        """Return A and B of z, for sums of ``y = Gamma' (x - mu)``; these are used up.

        That can wait until the sums of all samples are added. The parameters are those by which the
        sums were made, and ``Gamma_mu`` is ``Gamma' mu``, (K, l), if it is known.
        """
        if self.is_finished:
            return self
        (_, mu, _, Gamma, M), touched = parameters, self.touched
        if Gamma_mu is None:
            Gamma_mu = torch.bmm(mu.unsqueeze(1), Gamma).squeeze(1)
        if touched is not None:
            M, Gamma_mu = M[touched], Gamma_mu[touched]
        root, first, B = M.sqrt(), self.A, self.B
        B[:, 1:].mul_(root.unsqueeze(-1))
        first[:, 1:].mul_(root)
        return self._replace(A=_second_moments(Gamma, touched, M, Gamma_mu, root, B, first))

    def joined(self, other: Self) -> Self:
        """Add the sums of other samples, both finished or neither."""
        names = ("n_samples", "log_likelihood", "loss_alone", "loss_together")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        if self.missed is not None and other.missed is not None:
            sums["missed"] = self.missed + other.missed
        if self.scales is not None and other.scales is not None:
            sums["scales"] = self.scales + other.scales
        if self.touched is None and other.touched is None:
            sums |= {name: getattr(self, name) + getattr(other, name) for name in "ABS"}
        elif self.touched is None or other.touched is None:
            whole, some = (self, other) if self.touched is None else (other, self)
            assert some.touched is not None
            for name in "ABS":
                sums[name] = getattr(whole, name).index_add(0, some.touched, getattr(some, name))
        else:
            touched, place = torch.unique(
                torch.cat([self.touched, other.touched]), return_inverse=True
            )
            first, second = torch.split(place, [len(self.touched), len(other.touched)])
            for name in "ABS":
                one, two = getattr(self, name), getattr(other, name)
                total = one.new_zeros(len(touched), *one.shape[1:])
                sums[name] = total.index_add_(0, first, one).index_add_(0, second, two)
            sums["touched"] = touched
        # What only one of them has stays as it is.
        return (self if self.missed is not None else other)._replace(**{"touched": None} | sums)

    def among(self, numbers: Tensor) -> Statistics:
        """Return them for components of rising numbers (T,), of which those touched are some."""
        if self.touched is None or len(numbers) == len(self.touched):
            return self
        place, spread = torch.searchsorted(numbers, self.touched), {}
        for name in "ABS":
            some = getattr(self, name)
            among = some.new_zeros(len(numbers), *some.shape[1:])
            spread[name] = among.index_copy_(0, place, some)
        return self._replace(**spread, touched=numbers)

    def parts(self, numbers: Tensor) -> Iterator[Statistics]:
        """Cut them into those of a few components of rising numbers (T,) each, as ``among``."""
        assert self.touched is not None
        # Small matrices begin where they would among all: LAPACK rounds by how they are aligned.
        size = max(ALIGNED, PART_ELEMENTS // max(1, self.B.shape[1:].numel()) // ALIGNED * ALIGNED)
        n = max(1, len(numbers) // size)
        pieces = torch.split(numbers, [size] * (n - 1) + [len(numbers) - (n - 1) * size])
        cuts = [int(torch.searchsorted(self.touched, piece[0])) for piece in pieces[1:]]
        for piece, first, last in zip(pieces, [0, *cuts], [*cuts, len(self.touched)], strict=True):
            some = {name: getattr(self, name)[first:last] for name in ("A", "B", "S", "touched")}
            yield self._replace(**some).among(piece)

    def whole(self, n_components: int) -> Statistics:
        """Return them for all components, with zeros for those that were not touched."""
        return self.among(torch.arange(n_components, device=self.S.device))._replace(touched=None)


def _second_moments(
    Gamma: Tensor,
    touched: Tensor | None,
    M: Tensor,
    Gamma_mu: Tensor,
    root: Tensor,
    B: Tensor,
    first: Tensor,
) -> Tensor:
    """Compute ``sum R [1,z][1,z]'``, (T, l+1, l+1), of ``B = sum R [1,z] x'`` and ``sum R [1,z]``.

    Because ``z = M^(1/2) Gamma' (x - mu)``, ``sum R z z'`` follows from ``sum R z x'`` without
    another look at the samples; the posterior covariance ``r M`` comes on top. Gamma (K, d, l) is
    that of all components, of which T were ``touched``; ``Gamma_mu`` and ``root`` are
    ``Gamma' mu`` and ``M^(1/2)``, (T, l).
    """
    A = B.new_empty(*first.shape, first.shape[1])
    A[:, 0] = first
    A[:, 1:, 0] = first[:, 1:]
    zy = torch.bmm(B[:, 1:], Gamma) if touched is None else _products_of(B[:, 1:], Gamma, touched)
    zy.addcmul_(first[:, 1:].unsqueeze(-1), Gamma_mu.unsqueeze(1), value=-1)
    torch.mul(zy, root.unsqueeze(1), out=A[:, 1:, 1:])
    A.diagonal(dim1=1, dim2=2)[:, 1:].addcmul_(first[:, :1], M)
    return A


def _products_of(B: Tensor, Gamma: Tensor, touched: Tensor) -> Tensor:
    """Multiply B (T, l, d) by Gamma (K, d, l) of the touched components (T,), (T, l, l)."""
    # A copy of all of these would be nearly as large as B.
    n = max(1, B.numel() // PART_ELEMENTS)
    parts = zip(B.tensor_split(n), touched.tensor_split(n), strict=True)
    return torch.cat([torch.bmm(some, Gamma[numbers]) for some, numbers in parts])


class Running(NamedTuple):
    """Running averages of the statistics, for latent variables of zero mean and unit covariance."""

    Theta: Tensor
    """(K, l+1, d): mu, then the columns of Lambda as rows."""
    V: Tensor
    """(K, d): residual variance, before its bound."""
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
) -> tuple[Running, Parameters]:
    """Move the running averages by one natural step; the arguments are used up.

    Without ``expand``, a step of rate one is that of classical EM. Where the statistics are of some
    components only, the others are not rewritten: the weight alone of what no row touched decays.
    That supposes that the bound is the one of the last step: for a new one, they are rewritten
    ``everywhere``. ``n_components`` are those of the mixture, where these are some of them.
    ``hasten`` is for variances, see ``_hasten``.
    """
    statistics = statistics.finished(parameters)
    bounds, K = (max_precision, min_eigenvalue), n_components or len(running.weight)
    if statistics.touched is None:
        before = (running.V.clone(), _noise_share(*parameters[2:4])) if hasten else None
        Theta, T, spare = _moved(running, statistics, rate, parameters.precision_factors, K)
        if before is not None:
            _hasten(running.V, *before)
        return precision_form(Running(Theta, *running[1:]), *bounds, T if expand else None, spare)
    numbers, weights = statistics.touched, list[Tensor]()
    if everywhere:
        numbers = torch.arange(len(running.weight), device=numbers.device)
    E, Gamma, M = parameters[2:]
    for part in statistics.parts(numbers):
        touched = part.touched
        assert touched is not None
        some = Running(*(t[touched] for t in running))
        before = (some.V.clone(), _noise_share(E[touched], Gamma[touched])) if hasten else None
        Theta, T, _ = _moved(some, part, rate, None, K)
        if before is not None:
            _hasten(some.V, *before)
        some, new = precision_form(Running(Theta, *some[1:]), *bounds, T if expand else None)
        weights.append(some.weight)
        rewritten = (some.Theta, some.V, new[2], new[3].mT, new[4])
        for whole, found in zip((*running[:2], E, Gamma.mT, M), rewritten, strict=True):
            whole.index_copy_(0, touched, found)
    running.weight.mul_(1 - rate).index_copy_(0, numbers, torch.cat(weights))
    logits = logits_of(running.weight)
    return running, Parameters(logits, running.Theta[:, 0], E, Gamma, M)


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
    V.div_(_representable(weight).unsqueeze(-1))
    return Theta, T, None if Gamma is None else (Gamma.mT, G)


def _noise_share(E: Tensor, Gamma: Tensor) -> Tensor:
    """Compute ``Q_j = P_jj / E_j``, (K, d): how much of a feature's noise the data itself shows."""
    # A norm needs no memory for the squares.
    squares: Tensor = torch.linalg.vector_norm(Gamma.mT, dim=1).square()
    share: Tensor = 1 - squares / E
    return share.clamp_(min=LEAST_NOISE_SHARE)


def _hasten(V: Tensor, before: Tensor, share: Tensor) -> None:
    """Let variances V (K, d) move farther from where they were before, in place.

    Where factors are many, the posterior of z explains most of a row's noise, and the step of EM,
    which takes that for known, is short: with Q = V^(1/2) P V^(1/2), the information of the data
    about log V is Q * Q / 2, element by element, of which EM assumes I / 2. As Q has eigenvalues of
    at most one, it is at most diag(Q) / 2: so ``1 / Q_jj`` times the step of EM, ``share`` (K, d),
    goes up as surely. It is never less far than EM goes.
    """
    change = (V / before.clamp(min=torch.finfo(V.dtype).tiny) - 1) / share
    far = change.add_(1).clamp_(1 / FARTHEST, FARTHEST).mul_(before)
    V.copy_(torch.where(before < V, torch.maximum(V, far), torch.minimum(V, far)))


def logits_of(weight: Tensor) -> Tensor:
    """Return the logits of weights, (K,)."""
    return _representable(weight).log()


def _representable(weight: Tensor) -> Tensor:
    """Return weights (K,) that are not too small to be divided by."""
    return weight.clamp(min=torch.finfo(weight.dtype).tiny ** 0.5)


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
    Theta, V, weight = running
    K, l, d = len(V), Theta.shape[1] - 1, V.shape[1]
    E = _bounded_precision(V, max_precision)
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
    out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Compute E, (K, d), and Gamma, (K, l, d), of what ``precision_form`` has turned, as it does.

    Theta is (K, l+1, d), V is (K, d), M is (K, l). ``out`` is where they are to lie, if anywhere.
    """
    E = _bounded_precision(V, max_precision, out[0])
    Gamma = torch.mul(Theta[:, 1:], E.unsqueeze(1), out=out[1])
    return E, Gamma.mul_(M.sqrt().unsqueeze(-1))


def _bounded_precision(V: Tensor, max_precision: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute E, (K, d), of residual variances V, (K, d)."""
    return torch.maximum(V, 1 / max_precision, out=out).reciprocal_()


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
