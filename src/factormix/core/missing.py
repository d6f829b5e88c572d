"""Rows with missing entries: densities of the observed features, and expected statistics.

With o the observed features of a row, ``xt = x_o - mu_o`` and ``y = Gamma_o' xt``, the matrix

    C = M + Gamma_o' E_o^-1 Gamma_o                                                (l x l)

is all that a pattern of missing entries changes: it is the identity for a complete row and M for an
empty one. Then

    log p_k(x_o) = -1/2 [d_o log 2pi - sum_o log E + log|C| - log|M| + sum_o E xt^2 - y' C^-1 y]
    z | x_o, k  ~  N(M^(1/2) C^-1 y,  M^(1/2) C^-1 M^(1/2))

C is a sum of positive terms, so no digits cancel. For all rows at once it is one product of the
mask (B x d) with d x (K l^2) numbers, without a loop over patterns. Arrays of size l^2 x K x B are
computed for blocks of rows. The rows are the last axis, so that small matrices are factored and
inverted element by element for all rows at once: LAPACK takes them one by one.

In training, a missing entry is a latent variable like z: given z it is ``Theta_j' [1, z] + eps``.
With ``T = R E[[1,z][1,z]']`` of a row, which is summed to A, it adds ``T Theta_j`` to B and
``Theta_j' T Theta_j + R D_j`` to S: its conditional mean, and its conditional variance too.
The sum of T over the rows in which j is missing is one product of all T with the mask. Where few
pairs of a row and a component matter, it is one product for each component, with its own rows.

`RowBlock` evaluates rows of either kind by the same methods, and ``evaluate_rows`` separates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from factormix.core import density
from factormix.core.arrays import BLOCK_ELEMENTS, Workspace, slice_rows, symmetric_places
from factormix.core.density import Operands, Posterior, operands
from factormix.core.parameters import Parameters, latent_matrix, loadings, noise_variances
from factormix.core.statistics import DEFAULT_TUNING, LatentSums, Tuning, find_pairs

T = TypeVar("T")


class ObservedOperands(NamedTuple):
    """The matrices that rows and their masks are multiplied by."""

    ops: Operands
    M: Tensor
    """(K, l, l)."""
    log_M: Tensor
    """``log |M|``, (K,)."""
    features: Tensor
    """((1 + l + l (l+1) / 2) * K, d), the terms that each observed feature adds to the
    log-likelihood, to ``Gamma' mu`` and to the columns of C, each from the diagonal down."""


class Observed(NamedTuple):
    """Densities and latent posteriors of rows, given their observed entries."""

    log_prob: Tensor
    """``log p_k(x_o)``, (B, K)."""
    means: Tensor
    """Posterior means of z, (B, K, l)."""
    roots: Tensor
    """Q with ``Q' Q`` the posterior covariance of z, (B, K, l, l)."""


class Factored(NamedTuple):
    """Densities of rows, and the factors ``C = L L'`` that give their latent posteriors."""

    log_prob: Tensor
    """``log p_k(x_o)``, (B, K)."""
    columns: tuple[Tensor, ...]
    """Columns of L from the diagonal down, (l, K, B) to (1, K, B)."""
    scaled: Tensor
    """``L^-1 y``, (l, K, B)."""

    def take(self, rows: Tensor, components: Tensor) -> Factored:
        """Return P pairs of a row and a component: (P,) in place of (B, K) or (K, B)."""
        columns = tuple(column[:, components, rows] for column in self.columns)
        return Factored(self.log_prob[rows, components], columns, self.scaled[:, components, rows])

    def posterior(self, variances: Tensor) -> tuple[Tensor, Tensor]:
        """Compute means and roots of ``Observed``; ``variances`` is the diagonal of M, (K, l)."""
        means, rows = self._invert(variances.mT.unsqueeze(-1))
        l, (K, n) = len(means), means.shape[1:]
        padded = [torch.cat([row, row.new_zeros(l - len(row), K, n)]) for row in rows]
        roots = torch.stack(padded) if l else means.new_zeros(0, 0, K, n)
        # Rows of the batch first, as others use them.
        return means.permute(2, 1, 0), roots.permute(3, 2, 0, 1)

    def moments(self, variances: Tensor, R: Tensor) -> Tensor:
        """Compute the lower triangles of ``T = R E[[1,z][1,z]']``, ((l+1)(l+2)/2, K, B).

        R is (K, B), and ``variances`` is the diagonal of M, (K, l). For pairs, these are (P,) and
        (P, l), and the result has (P,) in place of (K, B).
        """
        diagonal = variances.movedim(-1, 0)
        means, rows = self._invert(diagonal if R.ndim == 1 else diagonal.unsqueeze(-1))
        l = len(means)
        T = R.new_empty((l + 1) * (l + 2) // 2, *R.shape)
        T[0] = 1
        for a in range(l):
            # Row a + 1 of the triangle of [1, z][1, z]' is z_a times 1 and z_0 to z_a.
            first = (a + 1) * (a + 2) // 2
            T[first] = means[a]
            products = torch.mul(means[: a + 1], means[a], out=T[first + 1 : first + 2 + a])
            for row in rows[a:]:
                products.addcmul_(row[: a + 1], row[a])
        return T.mul_(R)

    def _invert(self, variances: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute means (l, ...) and rows (1, ...) to (l, ...) of ``L^-1 M^(1/2)``, up to the
        diagonal.

        ``variances`` is the diagonal of M, (l, ...).
        """
        scales, means = variances.sqrt(), self.scaled[:0]
        rows, rest = (
            list[Tensor](),
            self.scaled.new_zeros(len(self.scaled), *self.scaled.shape)[:, :0],
        )
        for column, scale, u in zip(self.columns, scales, self.scaled, strict=True):
            row = torch.cat([rest[0], scale.expand_as(u).unsqueeze(0)]) / column[0]
            known = row * u
            means = torch.cat([known[:-1] + means, known[-1:]])
            below = -column[1:].unsqueeze(1) * row
            rest = torch.cat([below[:, :-1] + rest[1:], below[:, -1:]], dim=1)
            rows.append(row)
        return means, rows


def row_blocks(n_rows: int, K: int, l: int, elements: int = BLOCK_ELEMENTS) -> list[slice]:
    """Cut rows into blocks for which arrays of size B x K x (l+1)^2 stay small."""
    return slice_rows(n_rows, elements // (K * (l + 1) ** 2))


def observed_operands(
    parameters: Parameters, *, centre: bool = True, diagonal: bool = False
) -> ObservedOperands:
    """Gather the operands of ``project_observed``; the options are as in ``density.operands``."""
    mu, E, Gamma, variances = parameters[1:]
    _, d, l = parameters.shape
    ops = operands(parameters, centre=centre, diagonal=diagonal)
    M = variances.diag_embed() if diagonal else latent_matrix(E, Gamma)
    log_M = variances.log().sum(dim=1) if diagonal else torch.linalg.slogdet(M).logabsdet
    if ops.offset is not None:
        mu = mu - ops.offset
    alone = 0.5 * (E.log() - E * mu.square() - math.log(2 * math.pi))
    # The lower triangle by columns is the upper one by rows.
    columns, rows = torch.triu_indices(l, l, device=mu.device)
    products = Gamma[..., rows] * (Gamma / E.unsqueeze(-1))[..., columns]
    adds = torch.cat([alone.unsqueeze(-1), Gamma * mu.unsqueeze(-1), products], dim=-1)
    # The kind of term first, so that each kind is one slice of the product.
    features = adds.permute(2, 0, 1).reshape(-1, d)
    return ObservedOperands(ops, M.to(mu), log_M.to(mu), features)


def project_observed(x: Tensor, missing: Tensor, observed_ops: ObservedOperands) -> Observed:
    """Compute densities and latent posteriors of rows x (B, d) where ``missing`` (B, d) is false.

    The values of missing entries do not matter.
    """
    found = factor_observed(x, missing, observed_ops)
    return Observed(found.log_prob, *found.posterior(observed_ops.ops.latent_variances))


def factor_observed(x: Tensor, missing: Tensor, observed_ops: ObservedOperands) -> Factored:
    """Compute densities of rows x (B, d), and the factors of their latent posteriors."""
    ops, M, log_M, features = observed_ops
    (K, l), n = ops.latent_variances.shape, len(x)
    x = ops.centre(x).masked_fill(missing, 0)
    added = (features @ (~missing).to(x).mT).view(-1, K, n)
    log_p = added[0] + ops.E_mu @ x.mT - 0.5 * (ops.E @ x.square().mT)
    y = (ops.Gamma @ x.mT).view(K, l, n).transpose(0, 1) - added[1 : l + 1]
    return _factor(log_p, y, added[l + 1 :], M, ops.latent_variances, log_M)


def _factor(
    log_p: Tensor, y: Tensor, added: Tensor, M: Tensor, variances: Tensor, log_M: Tensor
) -> Factored:
    """Add the contribution of the factors to ``log p_k``, with y (l, K, B).

    ``log_p`` (K, B) lacks ``1/2 (log|M| - log|C| + y' C^-1 y)``. ``added`` (l (l+1) / 2, K, B) is
    ``C - M``, column by column from the diagonal down.
    """
    l = len(y)
    if l == 0:
        return Factored(log_p.mT, (), y)
    # Up to rounding, no remaining block of C has a smaller eigenvalue than M.
    least = 0.5 * variances.amin(dim=1, keepdim=True)
    columns, scaled = list[Tensor](), list[Tensor]()
    volume, length = 0.5 * log_M.unsqueeze(-1), torch.zeros_like(log_p)
    for j, packed in enumerate(torch.split(added, list(range(l, 0, -1)))):
        column = packed + M[:, j:, j].mT.unsqueeze(-1)
        for k, before in enumerate(columns):
            column = torch.addcmul(column, before[j - k :], before[j - k], value=-1)
        pivot = torch.maximum(column[0], least).sqrt()
        below, u = column[1:] / pivot, y[0] / pivot
        columns.append(torch.cat([pivot.unsqueeze(0), below]))
        scaled.append(u)
        volume, length = volume - pivot.log(), length + u.square()
        y = torch.addcmul(y[1:], below, u, value=-1)
    log_prob = (log_p + volume + 0.5 * length).mT
    return Factored(log_prob, tuple(columns), torch.stack(scaled))


def observed_components(
    x: Tensor, missing: Tensor, observed_ops: ObservedOperands, elements: int = BLOCK_ELEMENTS
) -> Tensor:
    """Compute ``log p_k(x_o)``, (B, K), block by block; 0 for a row without entries.

    ``elements`` bounds arrays of size B x K x (l+1)^2.
    """
    K, l = observed_ops.ops.latent_variances.shape
    parts = [
        factor_observed(x[part], missing[part], observed_ops).log_prob
        for part in row_blocks(len(x), K, l, elements)
    ]
    return torch.cat(parts)


def observed_peaks(missing: Tensor, observed_ops: ObservedOperands) -> Tensor:
    """Compute ``log p_k`` at the observed part of ``mu_k``, (B, K), block by block."""
    log_E = 0.5 * (observed_ops.ops.E.log() - math.log(2 * math.pi))
    parts = list[Tensor]()
    for part in row_blocks(len(missing), *observed_ops.ops.latent_variances.shape):
        # C, and with it the volume, does not depend on the values.
        seen = (~missing[part]).to(log_E)
        found = factor_observed(torch.zeros_like(seen), missing[part], observed_ops)
        peaks = seen @ log_E.mT + 0.5 * observed_ops.log_M
        for column in found.columns:
            peaks = peaks - column[0].mT.log()
        parts.append(peaks)
    return torch.cat(parts)


def observed_posterior(x: Tensor, missing: Tensor, observed_ops: ObservedOperands) -> Posterior:
    """Compute ``p(k | x_o)`` (B, K), and means and variances of ``z | x_o, k``, both (B, K, l)."""
    parts = []
    for part in row_blocks(len(x), *observed_ops.ops.latent_variances.shape):
        log_p, means, roots = project_observed(x[part], missing[part], observed_ops)
        shares = torch.softmax(log_p + observed_ops.ops.log_weights, dim=1)
        parts.append((shares, means, roots.square().sum(dim=-2)))
    return Posterior(*(torch.cat(kind) for kind in zip(*parts, strict=True)))


def correct_observed(
    log_p: Tensor,
    x: Tensor,
    missing: Tensor,
    parameters: Parameters,
    observed_ops: ObservedOperands,
    components: Tensor,
) -> Tensor:
    """Compute ``log p_k(x_o)`` of some components (m,) again, by ``x - mu``, among all (B, K)."""
    if not len(components):
        return log_p
    K, d, l = parameters.shape
    kinds = observed_ops.features.view(-1, K, d)
    seen, columns = (~missing).to(x), []
    for k in components.tolist():
        mu, E, Gamma = (t[k] for t in parameters[1:4])
        xt = (x - mu).masked_fill(missing, 0)
        squares = (xt * E.sqrt()).square().sum(dim=1)
        log_p_k = 0.5 * (seen @ (E.log() - math.log(2 * math.pi)) - squares)
        found = _factor(
            log_p_k.unsqueeze(0),
            (Gamma.mT @ xt.mT).unsqueeze(1),
            (kinds[l + 1 :, k] @ seen.mT).unsqueeze(1),
            observed_ops.M[k : k + 1],
            parameters.latent_variances[k : k + 1],
            observed_ops.log_M[k : k + 1],
        )
        columns.append(found.log_prob)
    return log_p.index_copy(1, components, torch.cat(columns, dim=1))


class PreparedMixture:
    """A mixture with the operands of its densities, which are made when they are first needed.

    The options are as in ``density.operands``. ``exact`` computes components by ``x - mu`` where
    matrix products would lose their digits.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        centre: bool = True,
        allow_forms: bool = False,
        exact: bool = True,
    ) -> None:
        self.parameters, self._exact = parameters, exact
        self._centre, self._allow_forms = centre, allow_forms

    @cached_property
    def ops(self) -> Operands:
        """The operands of complete rows."""
        return operands(self.parameters, centre=self._centre, allow_forms=self._allow_forms)

    @cached_property
    def observed(self) -> ObservedOperands:
        """The operands of rows with missing entries."""
        return observed_operands(self.parameters, centre=self._centre)

    @cached_property
    def inexact(self) -> Tensor:
        """The components (m,) that are computed by ``x - mu``."""
        if not self._exact:
            return torch.empty(0, dtype=torch.long, device=self.parameters.means.device)
        return density.find_inexact(self.parameters, centre=self._centre)


class RowBlock(NamedTuple):
    """Rows to evaluate under a mixture: all of them complete, or any with missing entries."""

    mixture: PreparedMixture
    x: Tensor
    """(B, d)."""
    missing: Tensor | None = None
    """(B, d), true for missing entries, whose values do not matter; None for complete rows."""
    work: Workspace | None = None

    @property
    def ops(self) -> Operands:
        """The operands of these rows."""
        return self.mixture.ops if self.missing is None else self.mixture.observed.ops

    @property
    def n_observed(self) -> Tensor | int:
        """The number of observed entries: of each row, (B, 1), or d."""
        if self.missing is None:
            return self.x.shape[1]
        return (~self.missing).sum(dim=1, keepdim=True)

    def components(self) -> Tensor:
        """Compute ``log p_k(x_o)``, (B, K); 0 for a row without entries."""
        parameters, inexact = self.mixture.parameters, self.mixture.inexact
        if self.missing is None:
            log_p = density.component_log_prob(self.x, self.ops, self.work)
            return density.correct_components(log_p, self.x, parameters, inexact)
        known = self.mixture.observed
        log_p = observed_components(self.x, self.missing, known)
        return correct_observed(log_p, self.x, self.missing, parameters, known, inexact)

    def joint(self) -> Tensor:
        """Compute ``log pi_k + log p_k(x_o)``, (B, K)."""
        return self.components() + self.ops.log_weights

    def peaks(self) -> Tensor:
        """Compute ``log p_k`` at ``mu_k``, (K,), or at its observed part, (B, K)."""
        if self.missing is None:
            return density.peak_log_prob(self.ops)
        return observed_peaks(self.missing, self.mixture.observed)

    def posterior(self) -> Posterior:
        """Compute ``p(k | x_o)`` and ``z | x_o, k``, with variances of each row if any has gaps."""
        if self.missing is None:
            return density.posterior(self.x, self.ops, self.work)
        return observed_posterior(self.x, self.missing, self.mixture.observed)

    def split(self) -> Iterator[RowBlock]:
        """Cut incomplete rows into blocks for which arrays of size B x K x (l+1)^2 stay small."""
        if self.missing is None:
            yield self
            return
        for part in row_blocks(len(self.x), *self.ops.latent_variances.shape):
            yield self._replace(x=self.x[part], missing=self.missing[part])


def evaluate_rows(
    mixture: PreparedMixture,
    x: Tensor,
    missing: Tensor | None,
    function: Callable[[RowBlock], T],
    work: Workspace | None = None,
    part_rows: int | None = None,
) -> T:
    """Compute a function of the complete rows among x (B, d), and of the other rows.

    The function returns a tensor, or a sequence of tensors, with an entry for each row. It gets at
    most ``part_rows`` incomplete rows at a time.
    """
    if missing is None:
        return function(RowBlock(mixture, x, None, work))
    incomplete = missing.any(dim=1)
    some, whole = (chosen.nonzero()[:, 0] for chosen in (incomplete, ~incomplete))
    numbers = list(torch.split(some, part_rows or len(x)))
    found = [function(RowBlock(mixture, x[part], missing[part])) for part in numbers]
    if len(whole):
        numbers.append(whole)
        found.append(function(RowBlock(mixture, x[whole], None, work)))
    order = torch.cat(numbers).argsort()
    if isinstance(found[0], Tensor):
        return cast(T, torch.cat(cast(list[Tensor], found))[order])
    columns = zip(*cast(list[list[Tensor]], found), strict=True)
    return cast(T, [torch.cat(column)[order] for column in columns])


def sum_incomplete_rows(
    parameters: Parameters,
    Theta: Tensor,
    x: Tensor,
    missing: Tensor,
    R: Tensor,
    factored: Factored,
    tuning: Tuning = DEFAULT_TUNING,
) -> LatentSums:
    """Sum ``R [1,z][1,z]'``, ``R [1,z] x'`` and ``R x^2`` with z and missing entries expected.

    x (B, d) is zero where it is missing, R (B, K) holds non-negative weights, and Theta
    (K, l+1, d) is the ``regression`` of the parameters. Pairs of a row and a component are summed
    one by one where few of them matter.
    """
    # Only on the CPU is the number of pairs known without waiting for the device.
    found = find_pairs(R) if x.device.type == "cpu" else None
    if found is not None and tuning.pairs_pay(len(found), R.numel()):
        return sum_incomplete_pairs(parameters, Theta, x, missing, R, factored, found)
    return sum_all_incomplete(parameters, Theta, x, missing, R, factored, tuning.lacking)


def regression(parameters: Parameters) -> Tensor:
    """Return ``Theta = [mu, Lambda]``, (K, l+1, d), the regression of x on [1, z]."""
    return torch.cat([parameters.means.unsqueeze(1), loadings(parameters).mT], dim=1)


def sum_all_incomplete(
    parameters: Parameters,
    Theta: Tensor,
    x: Tensor,
    missing: Tensor,
    R: Tensor,
    factored: Factored,
    elements: int = BLOCK_ELEMENTS,
) -> LatentSums:
    """Compute ``sum_incomplete_rows`` over all pairs of a row and a component.

    ``elements`` bounds the sums over rows with a missing entry, ((l+1)(l+2)/2, K, d).
    """
    n, (K, d, l) = len(x), parameters.shape
    D = noise_variances(parameters.precision_diag)
    T = factored.moments(parameters.latent_variances, R.mT)
    gaps, unfold = missing.to(x), symmetric_places(l + 1, x.device)
    A = T.sum(dim=2)[unfold].mT.reshape(K, l + 1, l + 1)
    # The first column of the triangle is R [1, z].
    B = (T[unfold[: l + 1]].view(-1, n) @ x).view(l + 1, K, d).transpose(0, 1).contiguous()
    S = R.mT @ x.square()
    for k in slice_rows(K, elements // (len(T) * d)):
        lacking = (T[:, k].reshape(-1, n) @ gaps).view(len(T), -1, d)
        regressed = Theta[k].transpose(0, 1)
        expected = (lacking[unfold].view(l + 1, l + 1, -1, d) * regressed).sum(dim=1)
        B[k] += expected.transpose(0, 1)
        S[k] += (expected * regressed).sum(dim=0).addcmul_(lacking[0], D[k])
    return LatentSums(None, A, B, S)


def sum_incomplete_pairs(
    parameters: Parameters,
    Theta: Tensor,
    x: Tensor,
    missing: Tensor,
    R: Tensor,
    factored: Factored,
    found: Tensor,
) -> LatentSums:
    """Compute ``sum_incomplete_rows`` over the pairs in ``found``, (P, 2)."""
    (K, d, l), D = parameters.shape, noise_variances(parameters.precision_diag)
    found = found[found[:, 1].argsort(stable=True)]
    rows, components = found.unbind(dim=1)
    shares = R[rows, components]
    T = factored.take(rows, components).moments(parameters.latent_variances[components], shares)
    unfold = symmetric_places(l + 1, x.device)
    Rz = T[unfold[: l + 1]]
    A = T.new_zeros(len(T), K).index_add_(1, components, T)[unfold].mT.reshape(K, l + 1, l + 1)
    B, S = x.new_zeros(K, l + 1, d), x.new_zeros(K, d)
    which, counts = torch.unique_consecutive(components, return_counts=True)
    ends = counts.cumsum(0).tolist()
    for k, last, n in zip(which.tolist(), ends, counts.tolist(), strict=True):
        chosen = slice(last - n, last)
        values, gaps = x[rows[chosen]], missing[rows[chosen]].to(x)
        lacking = T[:, chosen] @ gaps
        expected = (lacking[unfold].view(l + 1, l + 1, d) * Theta[k]).sum(dim=1)
        B[k] = torch.addmm(expected, Rz[:, chosen], values)
        S[k] = shares[chosen] @ values.square_()
        S[k] += (expected * Theta[k]).sum(dim=0).addcmul_(lacking[0], D[k])
    return LatentSums(None, A, B, S)
