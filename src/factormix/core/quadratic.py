"""Log-densities and sums by products of two features, where factors are many and features few.

``x' P x = sum_ij P_ij x_i x_j`` is linear in the products of two features, of which there are
``d (d + 1) / 2``. Where factors are more than about half of the features, these are fewer numbers
than ``Gamma`` has: one product of them with those of a batch gives the log-densities of all
components, without y of every row and component in between. The sums of a batch follow from those
of the products, ``sum R x x'``, once for each component.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import Workspace, pairs, symmetric_places
from factormix.core.pairs import Sums
from factormix.core.parameters import Parameters

__all__ = [
    "Forms",
    "feature_products",
    "matrix_parts",
    "pays",
    "precision_matrices",
    "projected_sums",
    "quadratic_forms",
]

MOST_FEATURES = 100
"""Features up to which products of two are formed: a batch has ``d / 2`` times its size of them."""
LEAST_COMPONENTS = 60
"""Components below which forming the products costs more than they save."""
PART_ELEMENTS = 1 << 20
"""Elements of matrices (d, d) that are formed at a time."""


class Forms(NamedTuple):
    """``x' P mu - x' P x / 2`` as products with rows and with products of their features."""

    linear: Tensor
    """``P mu``, (K, d)."""
    square: Tensor
    """``-P / 2`` at i >= j, what is beside the diagonal twice, (K, d (d + 1) / 2)."""
    constant: Tensor
    """``|Gamma' mu|^2 / 2``, (K,), which ``-mu' P mu / 2`` has more than ``-sum E mu^2 / 2``."""


def pays(shape: tuple[int, int, int]) -> bool:
    """Tell whether products of two features cost less than y, for K components, d and l."""
    K, d, l = shape
    return K >= LEAST_COMPONENTS and d <= MOST_FEATURES and d + 3 < 2 * (l + 2)


def feature_products(x: Tensor, work: Workspace | None = None) -> Tensor:
    """Compute ``x_i x_j`` for i >= j, (B, d (d + 1) / 2), in the workspace if there is one."""
    n, d = x.shape
    if work is None:
        rows, columns = pairs(d, x.device)
        return x[:, rows] * x[:, columns]
    out, begin = work.array("x x'", x, n, d * (d + 1) // 2), 0
    for i in range(d):
        torch.mul(x[:, : i + 1], x[:, i : i + 1], out=out[:, begin : begin + i + 1])
        begin += i + 1
    return out


def precision_matrices(E: Tensor, Gamma: Tensor) -> Tensor:
    """Compute ``P = E - Gamma Gamma'``, (T, d, d), of E (T, d) and Gamma (T, d, l)."""
    return E.diag_embed() - Gamma @ Gamma.mT


def quadratic_forms(E: Tensor, Gamma: Tensor, mu: Tensor, Gamma_mu: Tensor) -> Forms:
    """Compute what rows and products of their features are multiplied by.

    E and mu are (K, d), Gamma is (K, d, l), and ``Gamma' mu`` is (K, l).
    """
    K, d, _ = Gamma.shape
    rows, columns = pairs(d, E.device)
    lower, linear, square = rows * d + columns, list[Tensor](), list[Tensor]()
    # Both of x_i x_j and x_j x_i are in one.
    factor = torch.where(rows == columns, -0.5, -1.0).to(E)
    for part in matrix_parts(K, d):
        P = precision_matrices(E[part], Gamma[part])
        linear.append((P @ mu[part].unsqueeze(-1)).squeeze(-1))
        square.append(P.view(-1, d * d).index_select(1, lower) * factor)
    constant = 0.5 * Gamma_mu.square().sum(dim=1)
    return Forms(torch.cat(linear), torch.cat(square), constant)


def projected_sums(sums: Sums, parameters: Parameters) -> Sums:
    """Compute the sums of components by y from those by products of their features.

    These have ``sum R`` as first, (T, 1), ``sum R x x'`` as B, (T, 1, d (d + 1) / 2), and
    ``sum R x`` as S, (T, d).
    """
    touched, count, products, linear = sums
    mu, Gamma = parameters.means, parameters.precision_factors
    T, (_, d, l) = len(count), Gamma.shape
    first, B, S = (count.new_empty(T, *size) for size in ((l + 1,), (l + 1, d), (d,)))
    places = symmetric_places(d, count.device)
    for part in matrix_parts(T, d):
        which: slice | Tensor = part if touched is None else touched[part]
        x, n, factors = linear[part], count[part], Gamma[which].mT
        xx = products[part, 0].index_select(1, places).view(-1, d, d)
        Gamma_mu = torch.bmm(factors, mu[which].unsqueeze(-1))
        first[part, :1], B[part, 0], S[part] = n, x, xx.diagonal(dim1=1, dim2=2)
        y = torch.bmm(factors, x.unsqueeze(-1)).squeeze(-1)
        first[part, 1:] = y.addcmul_(Gamma_mu.squeeze(-1), n, value=-1)
        B[part, 1:] = torch.bmm(factors, xx).addcmul_(Gamma_mu, x.unsqueeze(1), value=-1)
    return Sums(touched, first, B, S)


def matrix_parts(n: int, d: int) -> list[slice]:
    """Cut components into parts whose matrices (d, d) are formed together."""
    size = max(1, PART_ELEMENTS // (d * d))
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]
