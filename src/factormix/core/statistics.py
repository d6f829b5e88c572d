"""Sums over the rows of a batch by which the complete-data model is learned.

Given the component, the model is linear: ``x = Theta' [1, z] + eps`` with ``Theta = [mu, Lambda]``
and ``eps ~ N(0, D)``. A batch contributes the sums ``A = sum R [1,z][1,z]'``,
``B = sum R [1,z] x'`` and ``S = sum R x^2`` with z under its posterior. They are made in
``core/expectation.py``, and ``core/averages.py`` steps by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from factormix.core.pairs import Sums
from factormix.core.parameters import Parameters
from factormix.core.quadratic import projected_sums

__all__ = ["Statistics"]

PART_ELEMENTS = 1 << 20
"""Elements of Theta of the components that a step rewrites at a time: copies of all that are
touched would be as large as the model."""
ALIGNED = 64
"""Components of which so many, or a multiple, are rewritten at a time."""


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
    with_gaps: Tensor | None = None
    """How many of the samples have missing entries, scalar; None where nobody asks."""

    @property
    def is_finished(self) -> bool:
        """Whether A and B are those of z."""
        return self.A.dim() == 3

    @property
    def by_products(self) -> bool:
        """Whether these are sums of products of features, see ``core/quadratic.py``.

        A is then ``sum R``, (T, 1), B is ``sum R x_i x_j``, (T, 1, d (d + 1) / 2), and S is
        ``sum R x``, (T, d).
        """
        return not self.is_finished and self.A.shape[1] == 1 and self.B.shape[2] != self.S.shape[1]

    def finished(self, parameters: Parameters, Gamma_mu: Tensor | None = None) -> Statistics:
        """Return A and B of z, for sums of ``y = Gamma' (x - mu)``; these are used up.

        That can wait until the sums of all samples are added. The parameters are those by which the
        sums were made, and ``Gamma_mu`` is ``Gamma' mu``, (K, l), if it is known.
        """
        if self.is_finished:
            return self
        if self.by_products:
            sums = projected_sums(Sums(self.touched, self.A, self.B, self.S), parameters)
            self = self._replace(A=sums.first, B=sums.B, S=sums.S)
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
        for name in ("missed", "scales", "with_gaps"):
            if getattr(self, name) is not None and getattr(other, name) is not None:
                sums[name] = getattr(self, name) + getattr(other, name)
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
