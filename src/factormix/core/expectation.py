"""The statistics of a batch under the posterior: what ``core/averages.py`` steps by."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from factormix.core.arrays import Workspace, kept
from factormix.core.density import (
    SMALL,
    Operands,
    joint_operands,
    log_normaliser,
    operands,
    project,
    quadratic_log_prob,
    squared,
)
from factormix.core.pairs import Pairs, Sums, join, pays, segment_sums, significant
from factormix.core.parameters import Parameters
from factormix.core.quadratic import feature_products
from factormix.core.scales import Spread, spread_of
from factormix.core.statistics import Statistics

__all__ = ["Collected", "best_of_others", "expected_statistics", "removal_losses"]

PART_ELEMENTS = 1 << 20
"""Elements of ``[R, R Y]`` that are computed at a time where features are few: what is read again
at once should still be near the processor."""
PRODUCT_ELEMENTS = 1 << 25
"""Elements of the products of features that are formed at a time."""
FEW_FEATURES = 256
"""Features below which reading and writing these elements costs more than the products."""
MOST_TOUCHED = 0.7
"""Share of the components above which rewriting all of them is cheaper than some."""


def expected_statistics(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None = None,
    *,
    candidates: Tensor | None = None,
    scales: Tensor | None = None,
    work: Workspace | None = None,
    finish: bool = True,
) -> Statistics:
    """Sum the expected complete-data statistics over a batch x (B, d), with sample weights (B,).

    ``candidates`` (K,), true for components that might be removed, asks also for what removing
    components would cost. ``scales`` (K, S) are the weights of components that come in several.
    Without ``finish``, the sums are left as ``Statistics.finished`` takes them.
    """
    if scales is None:
        ops, spread = joint_operands(parameters, without_y=True), None
    else:
        ops = operands(parameters, centre=False, diagonal=True, without_y=True)
        spread = spread_of(parameters, scales)
    Gamma_mu = ops.Gamma_mu.view_as(ops.latent_variances)
    if ops.forms is not None:
        # Products are many times as large as rows.
        parts = _slices(len(x), max(1, PRODUCT_ELEMENTS // ops.forms.square.shape[1]))
        given = [None if weights is None else weights[part] for part in parts]
        found = [
            _by_products(parameters, x[part], some, candidates, ops, spread, work)
            for part, some in zip(parts, given, strict=True)
        ]
        together = reduce(Statistics.joined, found)
        return together.finished(parameters, Gamma_mu) if finish else together
    squares = squared(x, work)
    collected = Collected(parameters, x, squares, weights, candidates, spread)
    for part in _row_parts(len(x), parameters, parameters.shape[2]):
        collected.add(part, *project(x[part], ops, squares[part], work), work=work)
    return collected.statistics(Gamma_mu, finish=finish)


def _by_products(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None,
    candidates: Tensor | None,
    ops: Operands,
    spread: Spread | None,
    work: Workspace | None,
) -> Statistics:
    """Sum products of features over rows x (m, d), not finished."""
    assert ops.forms is not None
    products, none = feature_products(x, work), x.new_empty(0)
    collected = Collected(parameters, products, x, weights, candidates, spread)
    for part in _row_parts(len(x), parameters, 0):
        log_p = quadratic_log_prob(x[part], products[part], ops, ops.forms)
        collected.add(part, log_p, none.view(*log_p.shape, 0), work=work)
    return collected.statistics(finish=False)


def _row_parts(n: int, parameters: Parameters, l: int) -> list[slice]:
    """Cut the rows of a batch, with l of y for each component, into parts to compute in turn."""
    K, d, _ = parameters.shape
    elements = n * K * (l + 1)
    if d > FEW_FEATURES or elements <= PART_ELEMENTS:
        return [slice(0, n)]
    return _slices(n, max(64, math.ceil(n / math.ceil(elements / PART_ELEMENTS))))


def _slices(n: int, size: int) -> list[slice]:
    """Cut n rows into parts of a size; one that is empty if there are none."""
    return [slice(first, min(first + size, n)) for first in range(0, max(n, 1), size)]


class Collected:
    """Collect the statistics of a batch from parts of its rows, some components for each.

    Where few pairs of a row and a component matter, they are kept for the end, when each component
    sums up its own rows; where many do, products sum all of them.

    ``x`` may be products of features and ``squares`` the rows themselves, with no y: what is summed
    becomes sums by y in the end.
    """

    def __init__(
        self,
        parameters: Parameters,
        x: Tensor,
        squares: Tensor,
        weights: Tensor | None,
        candidates: Tensor | None,
        spread: Spread | None = None,
    ) -> None:
        self.parameters = parameters
        self.x, self.squares, self.weights = x, squares, weights
        self.candidates = candidates
        self.log_likelihoods: list[Tensor] = []
        """Of the rows of each part."""
        self._pairs: list[Pairs] = []
        self._products: Sums | None = None
        K = len(parameters.means) if candidates is not None else 0
        self.losses = x.new_zeros(2, K)
        """What removing components would cost, alone and together."""
        self._spread = spread
        self.scales: Tensor | None = None
        """``sum R`` of every scale of components, (K, S), where they come in several."""
        if spread is not None:
            self.scales = torch.zeros_like(spread.offset).mT
        # How many pairs there are is known without waiting on the processor alone.
        self._seeks_pairs = x.device.type == "cpu" and len(x) * len(parameters.means) > SMALL

    def add(
        self,
        part: slice,
        joint: Tensor,
        Y: Tensor,
        components: Tensor | None = None,
        work: Workspace | None = None,
    ) -> None:
        """Add a part of the rows, by ``log pi_k + log p_k``, (m, C), and Y, (m, C, l).

        ``components`` (C,) tells which they are; None stands for all. Where components come in
        several scales, it is ``log p_k`` of scale one, and of all of them.
        """
        log_p = joint
        if self._spread is not None:
            joint = self._spread.joint(log_p)
        weights = None if self.weights is None else self.weights[part]
        if self.candidates is not None:
            self._add_losses(joint, components, weights)
        log_likelihood, R = log_normaliser(joint)
        if self._spread is not None:
            R = self._by_scale(self._spread, log_p, R, weights)
        self.add_shares(part, log_likelihood, R, Y, components, work)

    def _by_scale(self, spread: Spread, log_p: Tensor, R: Tensor, weights: Tensor | None) -> Tensor:
        """Sum R (m, K) for each scale, and return ``R E[1/c]``, by which rows count."""
        assert self.scales is not None
        counted = R if weights is None else R * weights.unsqueeze(1)
        if not self._seeks_pairs:
            K = torch.arange(R.shape[1], device=R.device).repeat(len(R))
            shares = spread.shares(log_p.reshape(-1), K).view(-1, *R.shape)
            self.scales += (shares * counted).sum(dim=1).mT
            return R * (spread.slope.view(-1, 1, 1) * shares).sum(dim=0)
        rows, k = significant(R).unbind(dim=1)
        shares = spread.shares(log_p[rows, k], k)
        self.scales.mT.scatter_add_(1, k.expand_as(shares), shares * counted[rows, k])
        few = torch.zeros_like(R)
        few[rows, k] = R[rows, k] * (spread.slope @ shares)
        return few

    def add_shares(
        self,
        part: slice,
        log_likelihood: Tensor,
        R: Tensor,
        Y: Tensor,
        components: Tensor | None = None,
        work: Workspace | None = None,
    ) -> None:
        """Add a part of the rows by their log-likelihoods (m,) and responsibilities R (m, C)."""
        weights = None if self.weights is None else self.weights[part]
        self.log_likelihoods.append(log_likelihood)
        if self._seeks_pairs:
            found = significant(R)
            if pays(len(found), R.numel()):
                self._add_pairs(part, R, Y, found, components, weights)
                return
        self._add_products(part, R, Y, components, weights, work)

    def _add_losses(self, joint: Tensor, components: Tensor | None, weights: Tensor | None) -> None:
        assert self.candidates is not None
        if components is None:
            self.losses += torch.stack(removal_losses(joint, self.candidates, weights))
        else:
            losses = removal_losses(joint, self.candidates[components], weights)
            self.losses.index_add_(1, components, torch.stack(losses))

    def _add_pairs(
        self,
        part: slice,
        R: Tensor,
        Y: Tensor,
        found: Tensor,
        components: Tensor | None,
        weights: Tensor | None,
    ) -> None:
        rows, k = found.unbind(dim=1)
        shares = R[rows, k]
        if weights is not None:
            shares = shares * weights[rows]
        numbers = k if components is None else components[k]
        self._pairs.append(Pairs(rows + part.start, numbers, shares, Y[rows, k]))

    def _add_products(
        self,
        part: slice,
        R: Tensor,
        Y: Tensor,
        components: Tensor | None,
        weights: Tensor | None,
        work: Workspace | None,
    ) -> None:
        # A row that is very far from all but one component must not reach the others.
        R = torch.threshold_(R, 2e-30, 0)
        if weights is not None:
            R.mul_(weights.unsqueeze(1))
        x, (n, C, l) = self.x[part], Y.shape
        RY = kept(work, "[R, R Y]", x, n, C, l + 1)
        RY = x.new_empty(n, C, l + 1) if RY is None else RY
        RY[:, :, 0] = R
        torch.mul(Y, R.unsqueeze(-1), out=RY[:, :, 1:])
        B = (RY.view(n, C * (l + 1)).mT @ x).view(C, l + 1, -1)
        sums = RY.sum(dim=0), B, R.mT @ self.squares[part]
        if self._products is None and components is None:
            self._products = Sums(None, *sums)
            return
        if self._products is None:
            K = len(self.parameters.means)
            self._products = Sums(None, *(t.new_zeros(K, *t.shape[1:]) for t in sums))
        for total, some in zip(self._products[1:], sums, strict=True):
            if components is None:
                total.add_(some)
            else:
                total.index_add_(0, components, some)

    def _sums(self) -> Sums:
        """Return the sums of pairs and of products together."""
        products, K = self._products, len(self.parameters.means)
        if not self._pairs:
            assert products is not None
            return products
        pairs = join(self._pairs)
        if products is None:
            n_touched = int(torch.bincount(pairs.components).count_nonzero())
            most = n_touched > MOST_TOUCHED * K
            return segment_sums(pairs, self.x, self.squares, K if most else None)
        sums = segment_sums(pairs, self.x, self.squares)
        assert sums.touched is not None
        for total, some in zip(products[1:], sums[1:], strict=True):
            total.index_add_(0, sums.touched, some)
        return products

    def statistics(self, Gamma_mu: Tensor | None = None, *, finish: bool = True) -> Statistics:
        """Return what was collected, finished or not; ``Gamma_mu`` is ``Gamma' mu``, (K, l)."""
        touched, first, B, S = self._sums()
        log_likelihood = torch.cat(self.log_likelihoods)
        if self.weights is None:
            count = torch.full_like(log_likelihood[0], len(self.x))
        else:
            count, log_likelihood = self.weights.sum(), log_likelihood * self.weights
        alone, together = self.losses.unbind()
        found = Statistics(
            count, log_likelihood.sum(), first, B, S, alone, together, touched, None, self.scales
        )
        return found.finished(self.parameters, Gamma_mu) if finish else found


def removal_losses(
    joint: Tensor, candidates: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sum what samples would lose without the component that explains them best, (K,) twice.

    ``joint`` is ``log pi_k + log p_k``, (B, K). First the second best takes over, whichever it
    is; then the best that is not a candidate, so that a group of twins is not thought dispensable
    because each could stand in for the other.
    """
    K = joint.shape[1]
    best, which = joint.max(dim=1)
    second = joint.scatter(1, which.unsqueeze(1), -torch.inf).amax(dim=1)
    other = best_of_others(joint, candidates)
    losses = torch.nn.functional.softplus(torch.stack([best - second, best - other]))
    if weights is not None:
        losses = losses * weights
    alone, together = losses.new_zeros(2, K).index_add_(1, which, losses)
    return alone, together.masked_fill(~candidates, 0)


def best_of_others(joint: Tensor, candidates: Tensor) -> Tensor:
    """Return the largest of ``joint`` (B, K) among components that are no candidates, (B,).

    It is minus infinity where every component is a candidate: nothing would be left.
    """
    # A sum costs a fraction of what filling does where the mask is repeated for each row.
    left_out = joint.new_zeros(len(candidates)).masked_fill_(candidates, -torch.inf)
    return (joint + left_out).amax(dim=1)
