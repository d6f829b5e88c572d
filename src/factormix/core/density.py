"""Log-densities, responsibilities, the latent posterior and samples, as matrix products of a batch.

Functions are differentiable in x and in the parameters unless they are given a workspace. None of
them forms an array of size B x K x d.

There are two ways to evaluate ``x' P x``. The usual one projects rows on the factors,
``y = Gamma' (x - mu)``. Where factors number more than about half of the features, the quadratic
form is cheaper: ``x' P x = sum_ij P_ij x_i x_j`` is linear in the ``d (d + 1) / 2`` products of two
features, which are then fewer numbers than Gamma has. One matrix product gives the log-densities of
all components without any y.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import (
    CACHE_ELEMENTS,
    Workspace,
    reuse,
    slice_rows,
    triangle_indices,
)
from factormix.core.parameters import (
    Parameters,
    factor_rows,
    find_ranks,
    latent_log_determinant,
    like_tensor,
    loadings,
    noise_variances,
)

LEAST_RATIO = 1e-30
"""Least ratio of a density to the largest of its row: smaller ones would become denormal numbers,
which slow down everything after."""
TOLERANCE = 1e-3
"""Nats per feature that rounding may cost a log-density: 0.8 for the 784 pixels of FashionMNIST,
where two seeds of K = 800 differ by 4."""
MOST_LOST = 0.02
"""Share of a component's noise that rounding may cost where products of features are used: a
variance that is wrong by 2% costs a log-density 0.0001 nats per feature."""
LEAST_REST = 0.5
"""Rows that a component needs without a given row: half-way between none and one, because weights
of training are exact to about a tenth of a row."""
LEAST_VARIANCE = 1e-4
"""Share of a component's variance, in the direction of a row, that is left without the row: beyond
a hundred times the distance, all rows are equally unlikely."""
SMALL = 10_000
"""Elements up to which the overhead of a call exceeds its arithmetic: ``addcmul_`` takes 1.3
microseconds for ten numbers, 2.0 for as many as here and 12 for ten times as many (one core)."""
MOST_FEATURES = 100
"""Features up to which products of two are formed: chosen, so that they take at most 50 times the
memory of a batch, d / 2 times."""
PRODUCT_COST = 0.5
"""Cost of forming a product of two features, in multiplications for each feature: beside few
components, products leave the cache. With it, ``quadratic_forms_pay`` predicts that forms cost less
from 12, 32, 112, 53 and 33 components on for (d, l) of (12, 9), (32, 24), (63, 40), (63, 50) and
(63, 62); statistics of 1,000 rows on one core cost less from below 20, below 20, 90, 75 and 35."""


class QuadraticForms(NamedTuple):
    """``x' P mu - x' P x / 2`` as products with rows and with products of their features."""

    linear: Tensor
    """``P mu``, (K, d)."""
    square: Tensor
    """``-P / 2`` at i >= j, elements off the diagonal twice, (K, d (d + 1) / 2)."""
    constant: Tensor
    """``|Gamma' mu|^2 / 2``, (K,): ``-mu' P mu / 2`` less ``-sum E mu^2 / 2``."""


class PackedFactors(NamedTuple):
    """The factors of a mixture whose components differ in rank, without the factors that are zero.

    Components come by falling rank, so the ``counts[j]`` components with a factor j are the first.
    Memory and products follow the sum of the ranks, n.
    """

    Gamma: Tensor
    """(n, d): factor 0 of all components that have one, then factor 1, and so on."""
    Gamma_mu: Tensor
    """(n,), ``Gamma' mu``."""
    counts: list[int]
    """Of each factor, at most l of them."""
    order: Tensor
    """(K,), the numbers of the components by falling rank."""
    places: Tensor
    """(K,), the place of each component in this order."""
    ranks: Tensor
    """(K,), the number of factors up to the last that is not zero."""

    def owners(self) -> tuple[Tensor, Tensor]:
        """Return the component and the number of each factor, both (n,)."""
        numbers = torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts).long())
        return torch.cat([self.order[:n] for n in self.counts] or [self.order[:0]]), numbers


class PackedProjections(NamedTuple):
    """``Y = Gamma_k' (x - mu_k)`` of the factors that are not zero."""

    values: Tensor
    """(B, n), in the order of ``PackedFactors.Gamma``."""
    factors: PackedFactors
    n_factors: int
    """l."""

    def explained(self) -> Tensor:
        """Compute ``|Gamma' xt|^2 / 2``, (B, K)."""
        found = self.values.new_zeros(len(self.values), len(self.factors.order))
        for column in torch.split(self.values, self.factors.counts, dim=1):
            found[:, : column.shape[1]].addcmul_(column, column, value=0.5)
        return found[:, self.factors.places]

    def take(self, rows: Tensor, components: Tensor) -> Tensor:
        """Return Y of pairs of a row (P,) and a component (P,), (P, l), with zeros."""
        factors, Y = self.factors, self.values.new_zeros(len(rows), self.n_factors)
        if factors.counts:
            starts = torch.tensor([0, *accumulate(factors.counts[:-1])])
            used = factors.ranks[components].unsqueeze(1) > torch.arange(len(starts))
            index = (factors.places[components].unsqueeze(1) + starts).masked_fill_(~used, 0)
            found = self.values[rows.unsqueeze(1), index]
            Y[:, : len(starts)] = found.masked_fill_(~used, 0)
        return Y

    def unpack(self) -> Tensor:
        """Return Y of all pairs, (B, K, l), with zeros."""
        B, K = len(self.values), len(self.factors.order)
        Y = self.values.new_zeros(B, K, self.n_factors)
        for j, column in enumerate(torch.split(self.values, self.factors.counts, dim=1)):
            Y[:, self.factors.order[: column.shape[1]], j] = column
        return Y


class Operands(NamedTuple):
    """The matrices that a batch is multiplied by, and the constants that are added."""

    offset: Tensor | None
    """(d,) subtracted from the batch first, or None when the means are near zero already."""
    E: Tensor
    """(K, d)."""
    E_mu: Tensor
    """(K, d)."""
    Gamma: Tensor
    """(K * l, d)."""
    Gamma_mu: Tensor
    """(K * l,), ``Gamma' mu``."""
    constant: Tensor
    """(K,), every term of the log-likelihood that does not depend on x."""
    log_weights: Tensor
    """(K,)."""
    latent_variances: Tensor
    """(K, l), the diagonal of M."""
    forms: QuadraticForms | None = None
    """For log-densities without y, where they cost less."""
    packed: PackedFactors | None = None
    """The factors that are not zero, where leaving out the others is cheaper."""

    def centre(self, x: Tensor) -> Tensor:
        """Subtract the offset from rows x (B, d)."""
        return x if self.offset is None else x - self.offset


class Posterior(NamedTuple):
    """The latent posterior ``z | x, k ~ N(means[:, k], diag(variances[k]))`` and ``p(k | x)``."""

    responsibilities: Tensor
    """(B, K)."""
    means: Tensor
    """(B, K, l)."""
    variances: Tensor
    """(K, l), the same for every x."""

    def __repr__(self) -> str:
        """Return the shapes of the arrays."""
        return f"Posterior({', '.join(f'{n} {tuple(v.shape)}' for n, v in self._asdict().items())})"


def operands(
    parameters: Parameters,
    *,
    centre: bool = True,
    diagonal: bool = False,
    allow_forms: bool = False,
) -> Operands:
    """Gather the operands of the matrix products of a density.

    ``centre`` moves the origin to the middle of the means, because ``X^2 E' - 2 X (E mu)' + ..``
    loses its digits in float32 when the means are far from zero. Training on centred data
    switches it off. ``diagonal`` takes the determinant of M from its diagonal, as after a step.
    ``allow_forms`` adds quadratic forms where they cost less and lose no digits.
    """
    mu, E, Gamma, M = parameters[1:]
    offset = _middle(mu) if centre else None
    if offset is not None:
        mu = mu - offset
    ranks = find_ranks(parameters)
    log_M = M.log().sum(dim=1) if diagonal else latent_log_determinant(E, Gamma, ranks)
    E_mu, Gamma_mu, constant = terms_without_rows(mu, E, Gamma, log_M)
    forms = None
    if allow_forms and quadratic_forms_pay(parameters.shape) and _keeps_digits(parameters):
        forms = _quadratic_forms(E, Gamma, mu, Gamma_mu)
    return Operands(
        offset,
        E,
        E_mu,
        factor_rows(Gamma),
        Gamma_mu.view(-1),
        constant,
        parameters.log_weights,
        M,
        forms,
        None if forms is not None or ranks is None else _pack_factors(Gamma, Gamma_mu, ranks),
    )


def _pack_factors(Gamma: Tensor, Gamma_mu: Tensor, ranks: Tensor) -> PackedFactors:
    """Leave zeros out of Gamma (K, d, l) and ``Gamma' mu`` (K, l), by the ranks (K,)."""
    order = ranks.argsort(descending=True, stable=True)
    counts = [n for j in range(Gamma.shape[2]) if (n := int((ranks > j).sum()))]
    packed = PackedFactors(Gamma[0], Gamma_mu[0], counts, order, order.argsort(), ranks)
    index = packed.owners()
    return packed._replace(Gamma=Gamma.mT[index], Gamma_mu=Gamma_mu[index])


def _middle(mu: Tensor) -> Tensor:
    """Return the median of the means, (d,): a mean far from all others does not move it."""
    return mu.detach().median(dim=0).values


def terms_without_rows(
    mu: Tensor, E: Tensor, Gamma: Tensor, log_M: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``E mu``, (K, d), ``Gamma' mu``, (K, l), and the terms of log p_k without x, (K,).

    The terms leave out ``|Gamma' mu|^2 / 2``, which is added with the projections of rows.
    """
    E_mu = E * mu
    constant = torch.addcmul(E.log(), E_mu, mu, value=-1).sum(dim=1) + log_M
    constant = 0.5 * constant - 0.5 * mu.shape[1] * math.log(2 * math.pi)
    return E_mu, torch.bmm(mu.unsqueeze(1), Gamma).squeeze(1), constant


def quadratic_forms_pay(shape: tuple[int, int, int]) -> bool:
    """Return whether quadratic forms cost less than projections, for a mixture of shape (K, d, l).

    In multiplications for each row, forms cost ``d (d + 1) / 2 + d`` for each component and
    ``PRODUCT_COST d`` for each of the products, and projections ``d (l + 2)`` for each component.
    """
    K, d, l = shape
    products = d * (d + 1) / 2
    forms = K * (products + d) + PRODUCT_COST * d * products
    return d <= MOST_FEATURES and forms < K * d * (l + 2)


def _keeps_digits(parameters: Parameters) -> bool:
    """Return whether sums of products of features resolve the noise of all components."""
    lost = torch.finfo(parameters.means.dtype).eps * cancellation(parameters).max()
    return bool(lost < MOST_LOST)


def _quadratic_forms(E: Tensor, Gamma: Tensor, mu: Tensor, Gamma_mu: Tensor) -> QuadraticForms:
    """Form P of every component; E and mu are (K, d), Gamma is (K, d, l), Gamma_mu is (K, l)."""
    K, d, _ = Gamma.shape
    rows, columns = triangle_indices(d, E.device)
    lower, linear, square = rows * d + columns, list[Tensor](), list[Tensor]()
    # x_i x_j and x_j x_i are one product.
    factor = torch.where(rows == columns, -0.5, -1.0).to(E)
    for part in slice_rows(K, CACHE_ELEMENTS // d**2):
        P = precision_matrices(E[part], Gamma[part])
        linear.append((P @ mu[part].unsqueeze(-1)).squeeze(-1))
        square.append(P.view(-1, d * d).index_select(1, lower) * factor)
    constant = 0.5 * Gamma_mu.square().sum(dim=1)
    return QuadraticForms(torch.cat(linear), torch.cat(square), constant)


def precision_matrices(E: Tensor, Gamma: Tensor) -> Tensor:
    """Compute ``P = E - Gamma Gamma'``, (T, d, d), of E (T, d) and Gamma (T, d, l)."""
    return E.diag_embed() - Gamma @ Gamma.mT


def feature_products(x: Tensor, work: Workspace | None = None) -> Tensor:
    """Compute ``x_i x_j`` for i >= j, (B, d (d + 1) / 2), in the workspace if there is one."""
    n, d = x.shape
    if work is None:
        rows, columns = triangle_indices(d, x.device)
        return x[:, rows] * x[:, columns]
    out, start = work.array("x x'", x, n, d * (d + 1) // 2), 0
    for i in range(d):
        torch.mul(x[:, : i + 1], x[:, i : i + 1], out=out[:, start : start + i + 1])
        start += i + 1
    return out


def joint_operands(parameters: Parameters) -> Operands:
    """Gather operands for which ``project`` gives ``log pi_k + log p_k``, for centred data."""
    ops = operands(parameters, centre=False, diagonal=True)
    return ops._replace(constant=ops.constant + ops.log_weights)


def project(
    x: Tensor, ops: Operands, squares: Tensor | None = None, work: Workspace | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``log p_k(x)``, (B, K), and ``Y = Gamma_k' (x - mu_k)``, (B, K, l).

    ``log p_k(x) = -1/2 [d log 2pi - sum log E - sum log M + sum E xt^2 - |Gamma' xt|^2]`` with
    ``xt = x - mu_k`` (the paper's log-likelihood in precision form), as three matrix products.
    With a workspace, Y lies in it.
    """
    if ops.packed is not None:
        log_p, packed = project_packed(x, ops, ops.packed, squares, work)
        return log_p, packed.unpack()
    x, log_p = _evaluate_diagonal(x, ops, squares, work)
    K, l = ops.latent_variances.shape
    if l == 0:
        return log_p, x.new_zeros(len(x), K, 0)
    out = reuse(work, "Y", x, len(x), K * l)
    Y = torch.addmm(ops.Gamma_mu, x, ops.Gamma.mT, beta=-1, out=out).view(len(x), K, l)
    Y2 = torch.mul(Y, Y, out=reuse(work, "Y^2", x, *Y.shape))
    # A product with ones takes half the time of a sum over such a short axis.
    return log_p.add_(Y2 @ Y2.new_ones(l), alpha=0.5), Y


def project_packed(
    x: Tensor,
    ops: Operands,
    factors: PackedFactors,
    squares: Tensor | None = None,
    work: Workspace | None = None,
) -> tuple[Tensor, PackedProjections]:
    """Compute the same as ``project`` by the factors that are not zero, and return these alone."""
    x, log_p = _evaluate_diagonal(x, ops, squares, work)
    out = reuse(work, "Y", x, len(x), len(factors.Gamma))
    values = torch.addmm(factors.Gamma_mu, x, factors.Gamma.mT, beta=-1, out=out)
    Y = PackedProjections(values, factors, ops.latent_variances.shape[1])
    return log_p.add_(Y.explained()), Y


def _evaluate_diagonal(
    x: Tensor, ops: Operands, squares: Tensor | None, work: Workspace | None
) -> tuple[Tensor, Tensor]:
    """Return rows less the offset, (B, d), and ``log p_k(x) - |Gamma' xt|^2 / 2``, (B, K)."""
    if ops.offset is not None:
        x, squares = x - ops.offset, None
    squares = squared(x, work) if squares is None else squares
    half = torch.addmm(ops.constant, squares, ops.E.mT, alpha=-0.5)
    return x, torch.addmm(half, x, ops.E_mu.mT, out=None if work is None else half)


def squared(x: Tensor, work: Workspace | None = None) -> Tensor:
    """Compute ``x^2``, (B, d), in the workspace if there is one."""
    return torch.mul(x, x, out=reuse(work, "x^2", x, *x.shape))


def log_normaliser(joint: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``log sum_k exp(joint)``, (B,), and ``exp(joint)`` normalised, (B, K)."""
    largest = joint.amax(dim=1, keepdim=True)
    shares = (joint - largest).clamp(min=math.log(LEAST_RATIO)).exp_()
    total = shares.sum(dim=1, keepdim=True)
    return (largest + total.log()).squeeze(1), shares / total


def component_log_prob(x: Tensor, ops: Operands, work: Workspace | None = None) -> Tensor:
    """Compute ``log p_k(x)``, (B, K)."""
    if ops.packed is not None:
        return project_packed(x, ops, ops.packed, work=work)[0]
    if ops.forms is None:
        return project(x, ops, work=work)[0]
    x = ops.centre(x)
    return quadratic_log_prob(x, feature_products(x, work), ops, ops.forms)


def quadratic_log_prob(x: Tensor, products: Tensor, ops: Operands, forms: QuadraticForms) -> Tensor:
    """Compute ``log p_k(x)``, (B, K), from rows and the products of their features."""
    constant = ops.constant + forms.constant
    return torch.addmm(torch.addmm(constant, x, forms.linear.mT), products, forms.square.mT)


def joint_log_prob(x: Tensor, ops: Operands, work: Workspace | None = None) -> Tensor:
    """Compute ``log pi_k + log p_k(x)``, (B, K)."""
    return component_log_prob(x, ops, work) + ops.log_weights


def log_prob(x: Tensor, ops: Operands, work: Workspace | None = None) -> Tensor:
    """Compute ``log p(x) = log sum_k pi_k p_k(x)``, (B,)."""
    return log_normaliser(joint_log_prob(x, ops, work))[0]


def peak_log_prob(ops: Operands) -> Tensor:
    """Compute ``log p_k(mu_k)``, (K,)."""
    # The constant of the operands lacks the squares of the means.
    return ops.constant + 0.5 * (ops.E_mu.square() / ops.E).sum(dim=1)


def leave_one_out(
    joint: Tensor, peaks: Tensor, log_weights: Tensor, n_rows: int, n_observed: Tensor | int
) -> Tensor:
    """Compute ``log pi_k + log p_k(x)``, (B, K), as if each of the n training rows were left out.

    ``joint`` (B, K) has the values with the row, ``peaks`` (B, K) or (K,) is ``log p_k(mu_k)``, and
    ``n_observed`` (B, 1), or d, the number of observed features. A component of ``N = n pi_k`` rows
    that loses the share r of one has N - r rows, the mean ``(N mu - r x) / (N - r)`` and the
    covariance ``(N Sigma - r N / (N - r) xt xt') / (N - r)``. With ``h = xt' P xt`` and
    ``u = 1 - r h / (N - r)``, these have ``h' = N / (N - r) h / u`` and
    ``log |Sigma'| = d log(N / (N - r)) + log u + log |Sigma|`` (Sherman and Morrison).

    This is exact for free covariances, fixed responsibilities and u above ``LEAST_VARIANCE``. A
    component with nothing left does not count, unless all components are like that.
    """
    R, N = torch.softmax(joint, dim=1), n_rows * log_weights.exp()
    alone = N - R < LEAST_REST
    rest = (N - R).clamp(min=LEAST_REST)
    h = 2 * (peaks + log_weights - joint).clamp(min=0)
    u = (1 - R * h / rest).clamp(min=LEAST_VARIANCE)
    ratio = N / rest
    left = peaks - 0.5 * (n_observed * ratio.log() + u.log() + ratio * h / u)
    left = left + (rest / max(1, n_rows - 1)).log()
    return left.masked_fill(alone & ~alone.all(dim=1, keepdim=True), -math.inf)


def cancellation(parameters: Parameters) -> Tensor:
    """Compute the size per feature of the terms that cancel in ``log p_k`` near ``mu_k``, (K,).

    The terms are ``E mu^2`` in the products of ``project``, and 1 in ``M = 1 - Gamma' E^-1 Gamma``.
    Times the rounding of the format, this is the possible error of a log-density.
    """
    mu, E, _, M = parameters[1:]
    return (E * mu.square()).mean(dim=1) + M.reciprocal().sum(dim=1) / mu.shape[1]


@torch.no_grad()
def find_inexact(parameters: Parameters, *, centre: bool = True) -> Tensor:
    """Return the components (m,) for which ``project`` may be wrong by more than ``TOLERANCE``.

    ``centre`` is as in ``operands``.
    """
    mu = parameters.means
    near = parameters._replace(means=mu - _middle(mu)) if centre else parameters
    lost = torch.finfo(mu.dtype).eps * cancellation(near)
    # An error that overflows is NaN.
    return (~(lost < TOLERANCE)).nonzero()[:, 0]


def correct_components(
    log_p: Tensor, x: Tensor, parameters: Parameters, components: Tensor
) -> Tensor:
    """Compute ``log p_k(x)`` of some components (m,) again, by ``x - mu``, among all (B, K).

    This covers all rows: where products cancel, they cannot show which component a row belongs to.
    """
    if not len(components):
        return log_p
    _, mu, E, Gamma, _ = parameters.take(components)
    volume = E.log().sum(dim=1) + latent_log_determinant(E, Gamma)
    constant = 0.5 * (volume - mu.shape[1] * math.log(2 * math.pi))
    # Scaled before squaring: the square of a large x may overflow where ``E x^2`` does not.
    roots = E.sqrt()
    scaled = Gamma / roots.unsqueeze(-1)
    columns = []
    for k in range(len(components)):
        xt = (x - mu[k]) * roots[k]
        explained = (xt @ scaled[k]).square().sum(dim=1)
        columns.append(constant[k] - 0.5 * (xt.square().sum(dim=1) - explained))
    return log_p.index_copy(1, components, torch.stack(columns, dim=1))


def posterior(x: Tensor, ops: Operands, work: Workspace | None = None) -> Posterior:
    """Compute ``z | x, k ~ N(M^(1/2) Gamma' xt, M)`` for every component, and ``p(k | x)``."""
    log_p, Y = project(x, ops, work=work)
    M = ops.latent_variances
    return Posterior(torch.softmax(log_p + ops.log_weights, dim=1), Y * M.sqrt(), M)


def sample(
    parameters: Parameters,
    n: int,
    *,
    component: int | None = None,
    noise: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw n samples (n, d) and the component of each (n,).

    Components are drawn by their weights unless one is given. ``noise=False`` leaves out eps, as
    pictures of such models usually do.
    """
    _, d, l = parameters.shape
    mu = parameters.means
    like = like_tensor(mu)
    if component is None:
        weights = parameters.log_weights.exp()
        # At least one, because multinomial refuses to draw none.
        drawn = torch.multinomial(weights, max(n, 1), replacement=True, generator=generator)
        components = drawn[:n]
    else:
        components = torch.full((n,), component, dtype=torch.long, device=mu.device)
    z = torch.randn(n, l, generator=generator, **like)
    x = decode(parameters, z, components)
    if noise:
        scale = noise_variances(parameters.precision_diag).sqrt()
        x += torch.randn(n, d, generator=generator, **like) * scale[components]
    return x, components


def decode(parameters: Parameters, z: Tensor, components: Tensor) -> Tensor:
    """Compute ``mu_k + Lambda_k z``, (n, d), for codes z (n, l) of the given components (n,)."""
    x = parameters.means[components]
    if z.shape[1] == 0:
        return x
    Lambda = loadings(parameters)
    for k in torch.unique(components).tolist():
        rows = components == k
        x[rows] += z[rows] @ Lambda[k].mT
    return x
