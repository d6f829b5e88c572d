"""Sums over the rows of a batch by which the complete-data model is learned.

Given the component, the model is linear: ``x = Theta' [1, z] + eps`` with ``Theta = [mu, Lambda]``
and ``eps ~ N(0, D)``. A batch contributes ``A = sum R [1,z][1,z]'``, ``B = sum R [1,z] x'`` and
``S = sum R x^2`` with z under its posterior and R the responsibilities. The same sums exist in
three forms, each a type of its own:

- `ProductSums`: sums of products of two features, where factors are many and features few;
- `ProjectionSums`: sums of the projections ``y = Gamma' (x - mu)``, which rows give directly;
- `LatentSums`: sums of the latent variables ``z = M^(1/2) y``, by which averages are updated.

Each form follows from the one before without another look at the rows, so the conversion can wait
until the sums of all rows are added. ``core/expectation.py`` makes the sums, and
``core/averages.py`` updates running averages by them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from factormix.core.arrays import (
    BLOCK_ELEMENTS,
    CACHE_ELEMENTS,
    slice_rows,
    symmetric_places,
    zero_pages,
)
from factormix.core.parameters import Parameters, group_by_rank

LEAST_SHARE = 1e-6
"""Responsibility below which a pair of a row and a component contributes nothing: float32 keeps
seven digits of a sum."""
ALIGNMENT = 64
"""Components are rewritten in multiples of this number: LAPACK rounds small matrices by their
alignment, so equal parts must begin where they would among all components."""


class Tuning(NamedTuple):
    """The cost that decides how pairs are summed, and numbers of elements of temporary arrays."""

    pair_cost: float = 10
    """Cost of summing one pair of a row and a component by itself, in units of its cost in a dense
    matrix product (``benchmarks/step.py``)."""
    responsibilities: int = CACHE_ELEMENTS
    """Of ``[R, R Y]``, where features are few."""
    products: int = 1 << 25
    """Of the products of features, 128 MiB in float32: each part of the rows adds sums of all
    components, which are as large as the model."""
    latent: int = BLOCK_ELEMENTS
    """Of arrays of size B x K x (l+1)^2 for rows with missing entries."""
    lacking: int = BLOCK_ELEMENTS
    """Of the sums over rows with a missing entry, (K, (l+1)(l+2)/2, d)."""

    def pairs_pay(self, n_pairs: int, n_all: int) -> bool:
        """Return whether summing pair by pair costs less than a dense product over all pairs."""
        return n_pairs * self.pair_cost <= n_all


DEFAULT_TUNING = Tuning()


@dataclass(frozen=True)
class ComponentSums:
    """Sums over the rows of each component: of all components, or of those that rows touched."""

    touched: Tensor | None
    """(T,) rising numbers of the components; None for all, T = K."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The sums by name, each (T, ...)."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "touched"]
        return {name: getattr(self, name) for name in names}

    def replace(self, touched: Tensor | None, **tensors: Tensor) -> Self:
        """Return sums of the same form with other values."""
        return type(self)(touched, **tensors)

    def add(self, other: ComponentSums) -> Self:
        """Add the sums of other rows, which have the same form."""
        assert type(self) is type(other)
        if self.touched is None or other.touched is None:
            whole, some = (self, other) if self.touched is None else (other, self)
            k, added = some.touched, some.tensors
            return self.replace(
                None,
                **{
                    name: one + added[name] if k is None else one.index_add(0, k, added[name])
                    for name, one in whole.tensors.items()
                },
            )
        touched, place = torch.unique(torch.cat([self.touched, other.touched]), return_inverse=True)
        first, second = torch.split(place, [len(self.touched), len(other.touched)])
        sums, others = {}, other.tensors
        for name, one in self.tensors.items():
            total = one.new_zeros(len(touched), *one.shape[1:])
            sums[name] = total.index_add_(0, first, one).index_add_(0, second, others[name])
        return self.replace(touched, **sums)

    def spread(self, numbers: Tensor) -> Self:
        """Return the sums for components of rising numbers (T,), zero for those not touched."""
        if self.touched is None or len(numbers) == len(self.touched):
            return self
        place, sums = torch.searchsorted(numbers, self.touched), {}
        for name, some in self.tensors.items():
            zeros = some.new_zeros(len(numbers), *some.shape[1:])
            sums[name] = zeros.index_copy_(0, place, some)
        return self.replace(numbers, **sums)

    def spread_to_all(self, n_components: int) -> Self:
        """Return the sums for all components, zero for those not touched."""
        if self.touched is None:
            return self
        whole = self.spread(torch.arange(n_components, device=self.touched.device))
        return self.replace(None, **whole.tensors)

    def split(self, numbers: Tensor, elements: int) -> Iterator[Self]:
        """Cut the sums into parts for components of rising numbers (T,), by their size."""
        assert self.touched is not None
        width = max(t.shape[1:].numel() for t in self.tensors.values())
        size = max(ALIGNMENT, elements // max(1, width) // ALIGNMENT * ALIGNMENT)
        n = max(1, len(numbers) // size)
        pieces = torch.split(numbers, [size] * (n - 1) + [len(numbers) - (n - 1) * size])
        cuts = [int(torch.searchsorted(self.touched, piece[0])) for piece in pieces[1:]]
        for piece, first, last in zip(pieces, [0, *cuts], [*cuts, len(self.touched)], strict=True):
            some = {name: tensor[first:last] for name, tensor in self.tensors.items()}
            yield self.replace(self.touched[first:last], **some).spread(piece)


@dataclass(frozen=True)
class LatentSums(ComponentSums):
    """Sums of the latent variables, with the posterior covariance of z."""

    A: Tensor
    """``sum R [1,z][1,z]'``, (T, l+1, l+1)."""
    B: Tensor
    """``sum R [1,z] x'``, (T, l+1, d)."""
    S: Tensor
    """``sum R x^2``, (T, d)."""

    def to_latent(self, parameters: Parameters) -> LatentSums:
        """Return the sums themselves."""
        return self

    def name_components(self, n_components: int) -> LatentSums:
        """Return the same sums with the numbers of all components, if these were left out."""
        if self.touched is not None:
            return self
        return self.replace(torch.arange(n_components, device=self.S.device), **self.tensors)

    def split_by_width(self, widths: Tensor | None) -> Iterator[LatentSums]:
        """Cut the sums into parts of components with equal numbers of factors ``widths`` (K,)."""
        if widths is None:
            yield self
            return
        assert self.touched is not None
        own = widths[self.touched]
        for some, l in _equal_widths(own, len(own)):
            A, B = self.A[some, : l + 1, : l + 1], self.B[some, : l + 1]
            yield LatentSums(self.touched[some], A, B, self.S[some])


@dataclass(frozen=True)
class ProjectionSums(ComponentSums):
    """Sums of the projections ``y = Gamma' (x - mu)``."""

    first: Tensor
    """``sum R [1, y]``, (T, l+1)."""
    B: Tensor
    """``sum R [1, y] x'``, (T, l+1, d)."""
    S: Tensor
    """``sum R x^2``, (T, d)."""

    def to_latent(
        self,
        parameters: Parameters,
        Gamma_mu: Tensor | None = None,
        elements: int = CACHE_ELEMENTS,
    ) -> LatentSums:
        """Convert to sums of ``z = M^(1/2) y``; the memory of these sums is reused.

        The parameters must be the ones by which the sums were made. ``Gamma_mu`` is ``Gamma' mu``,
        (K, l), if it is known. ``elements`` bounds copies of touched factors.
        """
        (_, mu, _, Gamma, M), touched = parameters, self.touched
        if Gamma_mu is None:
            Gamma_mu = torch.bmm(mu.unsqueeze(1), Gamma).squeeze(1)
        if touched is not None:
            M, Gamma_mu = M[touched], Gamma_mu[touched]
        root, widths = M.sqrt(), group_by_rank(M)
        first, zx = self.first, self.B[:, 1:]
        first[:, 1:].mul_(root)
        A = first.new_empty(*first.shape, first.shape[1])
        A[:, 0] = first
        A[:, 1:, 0] = first[:, 1:]
        # Because z = M^(1/2) Gamma' (x - mu), sum R z z' follows from sum R z x'.
        if widths is not None:
            zy = zx.new_zeros(*M.shape, M.shape[1])
            for some, l in _equal_widths(widths, max(1, elements // zx[:1].numel())):
                scaled = zx[some, :l].mul_(root[some, :l].unsqueeze(-1))
                numbers = some if touched is None else touched[some]
                zx[some, :l] = scaled
                zy[some, :l, :l] = torch.bmm(scaled, Gamma.mT[numbers, :l].mT)
        elif touched is None:
            zy = torch.bmm(zx.mul_(root.unsqueeze(-1)), Gamma)
        else:
            # In parts, because a copy of all touched factors would be nearly as large as B.
            zx.mul_(root.unsqueeze(-1))
            n = max(1, zx.numel() // elements)
            parts = zip(zx.tensor_split(n), touched.tensor_split(n), strict=True)
            zy = torch.cat([torch.bmm(some, Gamma[numbers]) for some, numbers in parts])
        zy.addcmul_(first[:, 1:].unsqueeze(-1), Gamma_mu.unsqueeze(1), value=-1)
        torch.mul(zy, root.unsqueeze(1), out=A[:, 1:, 1:])
        # The posterior covariance of z.
        A.diagonal(dim1=1, dim2=2)[:, 1:].addcmul_(first[:, :1], M)
        return LatentSums(touched, A, self.B, self.S)


@dataclass(frozen=True)
class ProductSums(ComponentSums):
    """Sums of products of two features."""

    count: Tensor
    """``sum R``, (T, 1)."""
    linear: Tensor
    """``sum R x``, (T, d)."""
    products: Tensor
    """``sum R x_i x_j`` for i >= j, (T, 1, d (d + 1) / 2)."""

    def to_latent(self, parameters: Parameters) -> LatentSums:
        """Convert to sums of the latent variables, as `ProjectionSums` does."""
        return self.project(parameters).to_latent(parameters)

    def project(self, parameters: Parameters) -> ProjectionSums:
        """Convert to sums of the projections y."""
        touched, count, linear = self.touched, self.count, self.linear
        mu, Gamma = parameters.means, parameters.precision_factors
        T, (_, d, l) = len(count), Gamma.shape
        first, B, S = (count.new_empty(T, *size) for size in ((l + 1,), (l + 1, d), (d,)))
        places = symmetric_places(d, count.device)
        for part in slice_rows(T, CACHE_ELEMENTS // d**2):
            which: slice | Tensor = part if touched is None else touched[part]
            x, n, factors = linear[part], count[part], Gamma[which].mT
            xx = self.products[part, 0].index_select(1, places).view(-1, d, d)
            Gamma_mu = torch.bmm(factors, mu[which].unsqueeze(-1))
            first[part, :1], B[part, 0], S[part] = n, x, xx.diagonal(dim1=1, dim2=2)
            y = torch.bmm(factors, x.unsqueeze(-1)).squeeze(-1)
            first[part, 1:] = y.addcmul_(Gamma_mu.squeeze(-1), n, value=-1)
            B[part, 1:] = torch.bmm(factors, xx).addcmul_(Gamma_mu, x.unsqueeze(1), value=-1)
        return ProjectionSums(touched, first, B, S)


def _equal_widths(widths: Tensor, size: int) -> Iterator[tuple[Tensor, int]]:
    """Yield components with equal numbers of factors ``widths`` (K,), ``size`` at most, and it."""
    for l in sorted(set(widths.tolist())):
        for some in (widths == l).nonzero()[:, 0].split(size):
            yield some, l


class Statistics(NamedTuple):
    """The contribution of a batch to a step: sums over its rows."""

    n_samples: Tensor
    """Number of rows, or the sum of their weights; scalar."""
    log_likelihood: Tensor
    """Scalar."""
    sums: LatentSums | ProjectionSums | ProductSums
    removal: Tensor | None = None
    """The log-likelihood that rows would lose, (2, K): without each component, and without all
    candidates for removal at once, counted for the candidate that explains each row best. None
    unless candidates are watched."""
    screening: Tensor | None = None
    """Over rows that were also evaluated against all components, (G+2,): the log-likelihood that
    each number of candidates loses, the gain over one Gaussian, and the number of these rows or the
    sum of their weights; None without such rows."""
    scales: Tensor | None = None
    """``sum R`` of every scale of each component, (K, S), while ``sums`` count rows by
    ``R E[1/c]``; None where components have one scale, see ``core/scales.py``."""
    n_missing: Tensor | None = None
    """Number of missing entries per feature, scalar; None unless counted."""

    def add(self, other: Statistics) -> Statistics:
        """Add the statistics of other rows; what one of them lacks is taken from the other."""
        return Statistics(
            self.n_samples + other.n_samples,
            self.log_likelihood + other.log_likelihood,
            self.sums.add(other.sums),
            *(_add_known(*pair) for pair in zip(self[3:], other[3:], strict=True)),
        )

    @property
    def totals(self) -> list[Tensor]:
        """All known sums except the sums of single components."""
        return [self.n_samples, self.log_likelihood, *(t for t in self[3:] if t is not None)]

    def replace_totals(self, totals: list[Tensor]) -> Statistics:
        """Return statistics with other ``totals``, in the same order."""
        rest = iter(totals)
        n_samples, log_likelihood = next(rest), next(rest)
        others = [None if t is None else next(rest) for t in self[3:]]
        return Statistics(n_samples, log_likelihood, self.sums, *others)


def _add_known(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Add two tensors, of which either may be unknown."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def removal_losses(
    joint: Tensor, candidates: Tensor, weights: Tensor | None, components: Tensor | None = None
) -> Tensor:
    """Sum the losses of rows without the component that explains them best, (2, K).

    ``joint`` is ``log pi_k + log p_k``, (B, K), or (B, C) of some ``components`` (B, C). If the
    component alone goes, the second best takes over. If all candidates go, the best one that is not
    a candidate does. The second loss keeps twins from looking dispensable because each could stand
    in for the other.
    """
    best, which = joint.max(dim=1)
    second = joint.scatter(1, which.unsqueeze(1), -torch.inf).amax(dim=1)
    some = candidates if components is None else candidates[components]
    losses = losses_of_rows(best, second, best_of_others(joint, some), weights)
    if components is not None:
        which = components.gather(1, which.unsqueeze(1)).squeeze(1)
    return sum_losses(losses, which, candidates)


def losses_of_rows(best: Tensor, second: Tensor, other: Tensor, weights: Tensor | None) -> Tensor:
    """Compute the losses, (2, B), of rows whose best component is replaced by another."""
    losses: Tensor = torch.nn.functional.softplus(torch.stack([best - second, best - other]))
    return losses if weights is None else losses * weights


def sum_losses(losses: Tensor, which: Tensor, candidates: Tensor) -> Tensor:
    """Sum losses (2, B) over the rows of each best component, (2, K)."""
    sums = losses.new_zeros(2, len(candidates)).index_add_(1, which, losses)
    sums[1].masked_fill_(~candidates, 0)
    return sums


def best_of_others(joint: Tensor, candidates: Tensor) -> Tensor:
    """Return the largest of ``joint`` (B, C) among components that are not candidates, (B,).

    ``candidates`` are (C,), or (B, C) where rows have components of their own. The result is
    minus infinity where every component is a candidate.
    """
    # Adding a row costs a fraction of filling by a mask that is repeated for each row.
    left_out = joint.new_zeros(candidates.shape).masked_fill_(candidates, -torch.inf)
    return (joint + left_out).amax(dim=1)


class Pairs(NamedTuple):
    """Pairs of a row and a component whose responsibility matters, P of them.

    Nearly all responsibilities of a row are far below the rounding of a sum. Pairs above
    ``LEAST_SHARE`` are sorted by component, and each component sums its own rows: exact to
    rounding, at a cost proportional to the number of pairs.
    """

    rows: Tensor
    """(P,) numbers of rows."""
    components: Tensor
    """(P,) numbers of components."""
    shares: Tensor
    """(P,) R, the responsibility."""
    Y: Tensor
    """(P, l), ``Gamma' (x - mu)``."""


def find_pairs(R: Tensor) -> Tensor:
    """Find where responsibilities R (B, K) matter, (P, 2)."""
    return (R > LEAST_SHARE).nonzero()


def sum_pairs(
    pairs: Pairs,
    x: Tensor,
    squares: Tensor,
    n_components: int | None = None,
    ranks: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Sum ``R [1, y]``, ``R [1, y] x'`` and ``R x^2`` over the pairs of each component.

    x and ``squares`` are (B, d). Return the touched components and the three sums. With
    ``n_components``, all components have sums, zero without a pair, and the first result is None.
    With the ``ranks`` (K,) of the components, y is zero behind them, and so are its sums.
    """
    order = pairs.components.argsort(stable=True)
    components, rows = pairs.components[order], pairs.rows[order]
    if n_components is None:
        touched, which, counts = torch.unique_consecutive(
            components, return_inverse=True, return_counts=True
        )
    else:
        touched, which = None, components
        counts = torch.bincount(components, minlength=n_components)
    T, l = len(counts), pairs.Y.shape[1]
    R = pairs.shares[order]
    RY = torch.cat([R.unsqueeze(1), pairs.Y[order] * R.unsqueeze(1)], dim=1)
    first = RY.new_zeros(T, l + 1).index_add_(0, which, RY)
    starts = counts.cumsum(0) - counts
    S = embedding_bag(rows, squares, starts, mode="sum", per_sample_weights=R)
    # One bag for each of [1, y_1 .. y_l] of a component, so that the sums lie as B needs them.
    used = torch.ones(T, l + 1, dtype=torch.bool, device=x.device)
    if ranks is not None:
        own = ranks if touched is None else ranks[touched]
        used = torch.arange(l + 1, device=x.device) <= own.unsqueeze(1)
    component, column = used.nonzero().unbind(dim=1)
    bag_counts = counts[component]
    bag_starts = bag_counts.cumsum(0) - bag_counts
    bag = torch.arange(len(component), device=x.device).repeat_interleave(bag_counts)
    pair = torch.arange(len(bag), device=x.device) - bag_starts[bag] + starts[component][bag]
    B = embedding_bag(
        rows[pair], x, bag_starts, mode="sum", per_sample_weights=RY[pair, column[bag]]
    )
    if ranks is None:
        return touched, first, B.view(T, l + 1, -1), S
    whole = zero_pages(B, T, l + 1, B.shape[1])
    whole[used] = B
    return touched, first, whole, S
