"""Running averages of a mixture in training, and the precision form that they imply."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.parameters import Parameters, factor_major, precise_dtype

__all__ = [
    "Components",
    "Running",
    "bounded_precision",
    "logits_of",
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
