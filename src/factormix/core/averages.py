"""Running averages of a mixture in training, and the natural step that moves them.

A batch contributes the sums A, B and S of ``core/statistics.py``. With A a running average and
``G = B - A_batch Theta`` the residual correlation of the batch, the least-squares solution of all
averaged statistics is exactly

    Theta <- Theta + rate A^-1 G
    pi V  <- (1 - rate) pi V + rate (S - Theta . B - G . Theta_new)

So no running copy of ``sum R x z'`` is needed: Theta and A imply it. V is D before its bound. With
rate one and the sums of all the data this is the M-step of EM.

A component that no row of a batch touched only has its weight decay: Theta and V are averages over
the same rows as before. So a step rewrites only the touched components.

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

from factormix.core.arrays import CACHE_ELEMENTS
from factormix.core.density import SMALL
from factormix.core.noise import Noise
from factormix.core.parameters import (
    Parameters,
    factor_major,
    group_by_rank,
    precise_dtype,
)
from factormix.core.statistics import LatentSums, Statistics

LEAST_ROWS = 3.0
"""Least ratio of rows to fitted numbers of a feature in ``prediction_widths``, whose formula has a
pole at a ratio of one: variances are at most doubled."""
LEAST_NOISE_SHARE = 0.02
"""Least share ``P_jj / E_j`` that ``hasten_variances`` divides by: a step is at most 50 times as
long as in EM before its own limit applies."""
LARGEST_CHANGE = 1.6
"""Largest factor by which ``hasten_variances`` changes a variance in a step
(``benchmarks/many.py``, patches)."""


class Averages(NamedTuple):
    """Running averages of the statistics, for latent variables of zero mean and unit covariance."""

    Theta: Tensor
    """(K, l+1, d): mu, then the columns of Lambda as rows."""
    V: Tensor
    """(K, d): residual variance before its bound; ``covariance_step`` applies the bound to it."""
    weight: Tensor
    """(K,)."""

    def take(self, components: slice | Tensor) -> Averages:
        """Return the averages of some components: copies for their numbers, views for a slice."""
        return Averages(*(t[components] for t in self))


class Components(NamedTuple):
    """All tensors of a mixture in training, with the components along the first axis."""

    Theta: Tensor
    V: Tensor
    weight: Tensor
    E: Tensor
    Gamma: Tensor
    M: Tensor

    @classmethod
    def of(cls, averages: Averages, parameters: Parameters) -> Components:
        """Gather running averages and parameters."""
        return cls(*averages, *parameters[2:])

    def take(self, index: Tensor) -> Components:
        """Return a copy of some components, in the order of their numbers (n,)."""
        return Components(*(t[index] for t in self))

    def append_empty(self, n: int) -> Components:
        """Append n empty components; the memory of the old ones is reused.

        Tensors grow in place one after the other, so that there are never two copies of all.
        """
        rows = self._replace(Gamma=self.Gamma.mT)
        grown = Components(*(_append_zeros(t, n) for t in rows))
        return grown._replace(Gamma=grown.Gamma.mT)

    def split(self) -> tuple[Averages, Parameters]:
        """Return running averages and parameters."""
        logits = to_logits(self.weight)
        return Averages(*self[:3]), Parameters(
            logits, self.Theta[:, 0], self.E, factor_major(self.Gamma), self.M
        )


def _append_zeros(t: Tensor, n: int) -> Tensor:
    """Append n zeros along the first axis of t (K, ...), in place if its memory can grow."""
    K, storage = len(t), t.untyped_storage()
    alone = t.is_contiguous() and storage.nbytes() == t.numel() * t.element_size()
    if not (alone and storage.resizable()):
        return torch.cat([t, t.new_zeros(n, *t.shape[1:])])
    longer = t.view(t.shape).resize_(K + n, *t.shape[1:])
    longer[K:] = 0
    return longer


def to_logits(weight: Tensor) -> Tensor:
    """Return the logits of weights, (K,)."""
    return clamp_weights(weight).log()


def clamp_weights(weight: Tensor) -> Tensor:
    """Return weights (K,) clamped so that dividing by them does not overflow."""
    return weight.clamp(min=torch.finfo(weight.dtype).tiny ** 0.5)


def rotate_averages(
    averages: Averages,
    max_precision: Tensor,
    min_eigenvalue: float,
    T: Tensor | None = None,
    spare: tuple[Tensor, Tensor] | None = None,
    widths: Tensor | None = None,
) -> tuple[Averages, Parameters]:
    """Rotate the latent basis so that M is diagonal; the memory of the averages is reused.

    ``L = I + Lambda' E Lambda = O ell O'`` gives ``Lambda <- Lambda O`` and ``M = 1 / ell``, which
    is bounded below. With T, (K, l+1, l+1), the latent variables are first standardised by
    ``[1, z] = T [1, u]``; T is overwritten. ``spare`` is memory for Gamma, (K, l, d), and Theta,
    (K, l+1, d). ``widths`` (K,) are the ``prediction_widths``, if variances are widened.

    A column of Lambda that explains less than a rounding of the noise is set to zero. The density
    is the same, and the column would only decay further into denormal numbers.
    """
    Theta, V, weight = averages
    K, l, d = len(V), Theta.shape[1] - 1, V.shape[1]
    # The rounding of Gamma leaves no digit of an M below a few roundings of one.
    eps = torch.finfo(V.dtype).eps
    min_eigenvalue = max(min_eigenvalue, 8 * eps)
    E = bound_precisions(V, max_precision, widths)
    Gamma, turned = spare or (V.new_empty(K, l, d), torch.empty_like(Theta))
    Lambda, limit = Theta[:, 1:], 1 / min_eigenvalue - 1
    torch.mul(Lambda, E.unsqueeze(1), out=Gamma)
    strength = torch.bmm(Lambda, Gamma.mT)
    if T is None:
        T = torch.eye(l + 1, dtype=V.dtype, device=V.device).repeat(K, 1, 1)
    root = T[:, 1:, 1:]
    precise = root.to(precise_dtype(V.device))
    rotated = precise.mT @ strength.to(precise) @ precise
    # Rounding leaves about this much off the diagonal of the strength after the rotation.
    most_lost = l * eps * float(rotated.amax()) if rotated.numel() else 0.0
    root.copy_(precise @ _find_rotation(rotated, limit))
    torch.bmm(T.mT, Theta, out=turned)
    Lambda = turned[:, 1:]
    torch.mul(Lambda, E.unsqueeze(1), out=Gamma)
    # Eigenvalues beside a far larger one have lost digits: take them from the rotated basis.
    full = torch.bmm(Lambda, Gamma.mT)
    strength = full.diagonal(dim1=1, dim2=2)
    if most_lost > 0.1:
        # With S = full, I - Gamma' E^-1 Gamma = M^(1/2) (I - S + diag S) M^(1/2) is definite if
        # each row of S adds up to less than one off the diagonal (Gershgorin). The rounding of
        # Gamma needs half of that.
        inexact = (full.abs().sum(dim=2).sub_(strength) > 0.5).any(dim=1)
        lost = inexact.nonzero()[:, 0]
        weights = E[lost].unsqueeze(1)
        # Where variances fell by orders of magnitude in a step, their features outweigh all others
        # in every column of Lambda, and the rotation subtracts nearly equal numbers.
        exact = precise[lost].mT @ Theta[lost, 1:].to(precise)
        exact = _find_rotation(exact @ (exact * weights).mT, limit).mT @ exact
        strength[lost] = (exact.square() * weights).sum(dim=2).to(V)
        Lambda[lost] = exact.to(V)
        Gamma[lost] = Lambda[lost] * weights
    supported = (strength > eps).to(V.dtype)
    Lambda.mul_(supported.unsqueeze(-1))
    M = (1 + strength * supported).reciprocal_().clamp_(min_eigenvalue, 1)
    Gamma.mul_((M.sqrt() * supported).unsqueeze(-1))
    parameters = Parameters(to_logits(weight), turned[:, 0], E, Gamma.mT, M)
    return Averages(turned, V, weight), parameters


def rebuild_precisions(
    Theta: Tensor,
    V: Tensor,
    M: Tensor,
    max_precision: Tensor,
    widths: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Compute E, (K, d), and Gamma, (K, l, d), from results of ``rotate_averages``, bit by bit.

    Theta is (K, l+1, d), V is (K, d), M is (K, l), widths are (K,). ``out`` is memory for E and
    Gamma.
    """
    E = bound_precisions(V, max_precision, widths, out[0])
    Gamma = torch.mul(Theta[:, 1:], E.unsqueeze(1), out=out[1])
    return E, Gamma.mul_(M.sqrt().unsqueeze(-1))


def bound_precisions(
    V: Tensor, max_precision: Tensor, widths: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute E, (K, d), of residual variances V, (K, d), times ``widths`` (K,)."""
    if widths is not None:
        V = out = torch.mul(V, widths.unsqueeze(1), out=out)
    return torch.maximum(V, 1 / max_precision, out=out).reciprocal_()


def prediction_widths(
    weight: Tensor, M: Tensor, n_rows: float, noise: Noise | None = None
) -> Tensor:
    """Compute the ratio of the variances of new rows and of training rows, (K,).

    Residuals of training rows are too small, because means and loadings were fitted to these rows.
    With n rows and p fitted numbers for each feature, one for the mean and one for each factor in
    use, new rows have ``(n + p) / (n - p)`` times the variance (Akaike's final prediction error).
    ``n_rows`` counts the rows of all components, whose weights are (K,), with M (K, l). Tied noise
    has one width for all components, ``noise.width``.
    """
    if noise is not None and noise.width is not None:
        return noise.width.expand_as(weight)
    p = 1 + (1 - M).sum(dim=1)
    n = torch.maximum(weight * n_rows, LEAST_ROWS * p)
    return (n + p) / (n - p)


def tied_width(weight: Tensor, M: Tensor, n_rows: float, noise: Noise) -> Tensor:
    """Compute the ratio of ``prediction_widths`` for noise that all components share, scalar.

    The rows and the fitted numbers of all components count together.
    """
    counts = torch.stack([n_rows * weight.sum(), len(M) + (1 - M).sum()])
    n, p = counts if noise.sum_parts is None else noise.sum_parts(counts)
    n = torch.maximum(n, LEAST_ROWS * p)
    width: Tensor = (n + p) / (n - p)
    return width


def _find_rotation(strength: Tensor, most: float) -> Tensor:
    """Find the basis (K, l, l) in which ``strength`` is diagonal, decreasing and at most ``most``.

    The eigenvalues of ``I + strength`` are computed in float64 where the device has it: LAPACK's
    routine for float32 fails or returns NaN where a diagonal reaches from 1e2 to the edge of the
    format.
    """
    dtype = precise_dtype(strength.device)
    L = strength.to(dtype, copy=True)
    L.diagonal(dim1=1, dim2=2).add_(1)
    ell, O = torch.linalg.eigh(L)
    # Strongest first; eigenvalues above the limit are brought down to it.
    shrink = (most / (ell - 1).clamp_(min=most)).sqrt_().unsqueeze(1)
    basis: Tensor = (O * shrink).flip(-1)
    return basis.to(strength.dtype)


class StepOptions(NamedTuple):
    """How far a step goes, and within which bounds."""

    rate: float
    """Share of the batch in the running averages."""
    max_precision: Tensor
    """Bound on E, (d,)."""
    min_eigenvalue: float
    """Floor of the eigenvalues of M."""
    everywhere: bool = False
    """Rewrite components that no row touched too, as a new bound requires."""
    expand: bool = True
    """Standardise the latent variables; without it, a step of rate one is classical EM."""
    hasten: bool = False
    """Let variances move farther, see ``hasten_variances``."""
    n_components: int | None = None
    """Of the whole mixture, where the parameters are some of its components."""
    n_rows: float | None = None
    """Rows that the averages remember: widens variances by ``prediction_widths``, which assume
    complete rows; None leaves variances as they are."""
    last_bound: Tensor | None = None
    """The bound on E of the last step, (d,), where it differs."""
    noise: Noise = Noise()
    """Which variances are equal."""
    part_elements: int = CACHE_ELEMENTS
    """Elements of Theta that are rewritten at a time: copies of all touched components would be as
    large as the model."""


def natural_step(
    averages: Averages, parameters: Parameters, statistics: Statistics, options: StepOptions
) -> tuple[Averages, Parameters]:
    """Move the running averages by one natural step; the memory of the arguments is reused."""
    sums, (E, Gamma, M) = statistics.sums.to_latent(parameters), parameters[2:]
    noise = options.noise
    if noise.tied:
        # Rows of one component change the noise of all.
        sums = sums.spread_to_all(len(averages.weight))
    share = options.rate / float(statistics.n_samples)
    K, widths = options.n_components or len(averages.weight), None
    if options.n_rows is not None:
        widths = prediction_widths(averages.weight, M, options.n_rows, noise)
    last_bound = options.max_precision if options.last_bound is None else options.last_bound

    def rewrite(
        some: Averages, sums: LatentSums, touched: Tensor | None
    ) -> tuple[Averages, Parameters]:
        # A slice of all is a view, and indexing some makes a copy.
        index = slice(None) if touched is None else touched
        l = sums.A.shape[1] - 1
        before = (some.V.clone(), noise_share(E[index], Gamma[index])) if options.hasten else None
        if widths is not None:
            _narrow_latents_(sums, some, M[index, :l], last_bound)
        spare_Gamma = Gamma if touched is None else None
        Theta, T, spare = _move_averages_(some, sums, options.rate, share, spare_Gamma, K)
        some.V.copy_(noise.pool(some.V, some.weight))
        if before is not None:
            V, determined = before
            some.V.copy_(hasten_variances(some.V, V, noise.pool(determined, some.weight)))
        return rotate_averages(
            Averages(Theta, *some[1:]),
            options.max_precision,
            options.min_eigenvalue,
            T if options.expand else None,
            spare,
            None if widths is None else widths[index],
        )

    widths_of_ranks = None if noise.tied else group_by_rank(M)
    if sums.touched is None and widths_of_ranks is None:
        return rewrite(averages, sums, None)
    sums = sums.name_components(len(averages.weight))
    numbers, weights = sums.touched, averages.weight * (1 - options.rate)
    assert numbers is not None
    if options.everywhere:
        numbers = torch.arange(len(averages.weight), device=numbers.device)
    for whole_part in sums.split(numbers, options.part_elements):
        for part in whole_part.split_by_width(widths_of_ranks):
            touched, l = part.touched, part.A.shape[1] - 1
            assert touched is not None
            some = averages.take(touched)
            some, new = rewrite(some._replace(Theta=some.Theta[:, : l + 1]), part, touched)
            weights.index_copy_(0, touched, some.weight)
            rewritten = (some.Theta, some.V, new[2], new[3].mT, new[4])
            targets = averages.Theta[:, : l + 1], averages.V, E, Gamma.mT[:, :l], M[:, :l]
            for whole, found in zip(targets, rewritten, strict=True):
                whole.index_copy_(0, touched, found)
    averages.weight.copy_(weights)
    return averages, Parameters(to_logits(averages.weight), averages.Theta[:, 0], E, Gamma, M)


def _narrow_latents_(
    sums: LatentSums, averages: Averages, M: Tensor, max_precision: Tensor
) -> None:
    """Convert A and B in place to the posterior of z under variances that are not widened.

    Widened variances are for new rows. A posterior under them, with variances M (K, l), would trust
    the training rows less, and weak factors would fade. A latent value of one has the posterior
    mean ``1 - M``, so posterior means grow by the ratio of ``1 - M`` without and with widening.
    This is exact where the bound holds for no feature or for all, and nearly so where it holds for
    some.
    """
    if not M.shape[1]:
        return
    A, B, E = sums.A, sums.B, bound_precisions(averages.V, max_precision)
    # Factor by factor, because the squares of all would be as large as the loadings.
    strength = [(E * column.square()).sum(dim=1) for column in averages.Theta[:, 1:].unbind(dim=1)]
    own = torch.minimum((1 + torch.stack(strength, dim=1)).reciprocal_(), M)
    known = 1 - M
    growth = torch.where(known > 0, (1 - own) / known.clamp(min=torch.finfo(M.dtype).eps), 1.0)
    r, diagonal = A[:, :1, 0].clone(), A.diagonal(dim1=1, dim2=2)[:, 1:]
    diagonal.addcmul_(r, M, value=-1)
    A[:, 1:].mul_(growth.unsqueeze(2))
    A[:, :, 1:].mul_(growth.unsqueeze(1))
    diagonal.addcmul_(r, own)
    B[:, 1:].mul_(growth.unsqueeze(2))


def _move_averages_(
    averages: Averages,
    sums: LatentSums,
    rate: float,
    share: float,
    Gamma: Tensor | None,
    n_components: int,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Move averages in place; return Theta, T of ``factor_moments``, and memory that is free now.

    ``share`` is the rate divided by the number of rows. The free memory is Gamma's, if it is given,
    and the sums'.
    """
    Theta, V, weight = averages
    B = sums.B
    weight.mul_(1 - rate)
    V.mul_(weight.unsqueeze(-1)).add_(sums.S, alpha=share)
    _subtract_products_(V, Theta, B, share)
    G = B.baddbmm_(sums.A, Theta, alpha=-1)
    A = sums.A.mul_(share)
    A.diagonal(dim1=1, dim2=2).add_(weight.unsqueeze(-1))
    weight.copy_(A[:, 0, 0])
    T, inverse = factor_moments(A, n_components)
    Theta.baddbmm_(inverse, G, alpha=share)
    _subtract_products_(V, G, Theta, share)
    V.div_(clamp_weights(weight).unsqueeze(-1))
    return Theta, T, None if Gamma is None else (Gamma.mT, G)


def noise_share(E: Tensor, Gamma: Tensor) -> Tensor:
    """Compute ``P_jj / E_j``, (K, d), the share of a feature's noise that the data determines."""
    share = E.clone()
    _subtract_products_(share, Gamma.mT, Gamma.mT, 1.0)
    return share.div_(E).clamp_(min=LEAST_NOISE_SHARE)


def hasten_variances(V: Tensor, before: Tensor, share: Tensor) -> Tensor:
    """Return V (K, d) moved farther away from the variances ``before`` the step.

    Where factors are many, the posterior of z explains most of a row's noise, and the step of EM,
    which treats the posterior as known, is short. With ``Q = V^(1/2) P V^(1/2)``, the information
    of the data about log V is ``Q * Q / 2`` element by element, where EM assumes ``I / 2``. The
    eigenvalues of Q are at most one, so the information is at most ``diag(Q) / 2``, and
    ``1 / Q_jj`` times the step of EM still increases the likelihood. ``share`` (K, d) is ``Q_jj``
    or, where components or features share a variance, its mean over them, by the same bound. The
    step is never shorter than in EM.
    """
    change = (V / before.clamp(min=torch.finfo(V.dtype).tiny) - 1) / share
    far = change.add_(1).clamp_(1 / LARGEST_CHANGE, LARGEST_CHANGE).mul_(before)
    return torch.where(before < V, torch.maximum(V, far), torch.minimum(V, far))


def _subtract_products_(V: Tensor, first: Tensor, second: Tensor, factor: float) -> None:
    """Subtract ``factor * sum_j first_j second_j`` from V (K, d), in place; both (K, m, d)."""
    if first.numel() <= SMALL:
        V.sub_((first * second).sum(dim=1), alpha=factor)
        return
    # Factor by factor, because the products of all would be as large as the factors.
    for one, other in zip(first.unbind(dim=1), second.unbind(dim=1), strict=True):
        V.addcmul_(one, other, value=-factor)


def factor_moments(A: Tensor, n_components: int | None = None) -> tuple[Tensor, Tensor]:
    """Find T, lower triangular, with ``A = r T T'`` and r the first element; and ``A^-1``.

    A holds second moments of [1, z], (K, l+1, l+1): ``[1, z] = T [1, u]`` gives u zero mean and
    unit covariance. Elements off the diagonal are shrunk by a few roundings, which makes nearly all
    moments definite; where that fails, only the diagonal is used. Its floor, far below the share of
    any component in use, keeps a component without rows solvable. ``n_components`` counts the whole
    mixture, of which A may have only some components.
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
