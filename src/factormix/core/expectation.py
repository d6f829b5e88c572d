"""The E-step: statistics of a batch under the posterior of components and latent variables.

``expected_statistics`` is the one entry. It separates rows with missing entries from complete ones
and chooses how complete rows meet the components: all of them, by quadratic forms where these cost
less, or a few that a screen selects for each row. Where components lie on several ranks,
the ranks exchange summaries of the rows before responsibilities are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import Workspace, reuse, slice_rows, zero_pages
from factormix.core.density import (
    SMALL,
    Operands,
    PackedProjections,
    feature_products,
    log_normaliser,
    operands,
    project,
    project_packed,
    quadratic_log_prob,
    squared,
)
from factormix.core.exchange import Exchange, Normaliser, RowSummary, summarise_
from factormix.core.missing import (
    factor_observed,
    observed_operands,
    regression,
    row_blocks,
    sum_incomplete_rows,
)
from factormix.core.parameters import Parameters, find_ranks
from factormix.core.scales import Spread, make_spread
from factormix.core.screening import Block, CandidateSearch
from factormix.core.statistics import (
    DEFAULT_TUNING,
    Pairs,
    ProductSums,
    ProjectionSums,
    Statistics,
    Tuning,
    find_pairs,
    removal_losses,
    sum_pairs,
)

FEW_FEATURES = 256
"""Features up to which passes over ``[R, R Y]`` cost more than its products with x: chosen by the
times of steps of some sizes (``benchmarks/step.py --size``)."""
MOST_TOUCHED = 0.7
"""Share of touched components above which rewriting all is cheaper than copying some: chosen by the
times of steps of some sizes (``benchmarks/step.py --size``)."""
LEAST_RESPONSIBILITY = 2e-30
"""Responsibilities up to this number become zero. It is just above the least share of
``log_normaliser``, so that a row that is very far from a component does not reach it."""


class _Options(NamedTuple):
    """The options of ``expected_statistics`` by which components meet rows."""

    candidates: Tensor | None
    scales: Tensor | None
    search: CandidateSearch | None
    n_probes: int
    work: Workspace | None
    exchange: Exchange | None
    tuning: Tuning


def expected_statistics(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None = None,
    missing: Tensor | None = None,
    *,
    candidates: Tensor | None = None,
    scales: Tensor | None = None,
    search: CandidateSearch | None = None,
    n_probes: int = 0,
    work: Workspace | None = None,
    exchange: Exchange | None = None,
    convert: bool = True,
    tuning: Tuning = DEFAULT_TUNING,
) -> Statistics:
    """Sum the expected complete-data statistics over a batch x (B, d).

    Parameters
    ----------
    parameters : Parameters
        Of all components, or of the components on this rank.
    weights : Tensor (B,) or None
        Weights of the rows.
    missing : Tensor (B, d) or None
        True for entries that are missing.
    candidates : Tensor (K,) or None
        True for components that might be removed. The statistics then have the losses without them.
    scales : Tensor (K, S) or None
        Weights of the scales of each component. Rows must be complete, and all components are
        evaluated.
    search : CandidateSearch or None
        Evaluates a few components for each complete row.
    n_probes : int
        Rows that are evaluated against all components too, to estimate the loss by screening.
    exchange : Exchange or None
        The link to ranks with other components.
    convert : bool
        Return `LatentSums`. Otherwise sums of complete rows keep the form in which rows gave them,
        so that they can be added before they are converted.
    """
    options = _Options(candidates, scales, search, n_probes, work, exchange, tuning)
    if missing is None:
        return _sum_complete(parameters, x, weights, options, convert=convert)
    incomplete = missing.any(dim=1)
    whole, rest = ((~incomplete).nonzero()[:, 0], incomplete.nonzero()[:, 0])
    if not len(whole):
        return _sum_incomplete(parameters, x, weights, missing, options)
    some = _select(weights, whole)
    complete = _sum_complete(parameters, x[whole], some, options, convert=True)
    if not len(rest):
        return complete
    some = _select(weights, rest)
    return complete.add(_sum_incomplete(parameters, x[rest], some, missing[rest], options))


def _select(weights: Tensor | None, rows: Tensor | slice) -> Tensor | None:
    """Select the weights of some rows, if rows have weights."""
    return None if weights is None else weights[rows]


def _sum_complete(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None,
    options: _Options,
    *,
    convert: bool,
) -> Statistics:
    if options.search is None:
        statistics, Gamma_mu = _sum_all(parameters, x, weights, options)
    else:
        statistics = _sum_screened(parameters, x, weights, options, options.search)
        Gamma_mu = options.search.screen.Gamma_mu
    if not convert and options.exchange is None:
        return statistics
    sums = statistics.sums
    projected = sums.project(parameters) if isinstance(sums, ProductSums) else sums
    assert isinstance(projected, ProjectionSums)
    return statistics._replace(sums=projected.to_latent(parameters, Gamma_mu))


def _sum_all(
    parameters: Parameters, x: Tensor, weights: Tensor | None, options: _Options
) -> tuple[Statistics, Tensor]:
    """Evaluate all components; also return ``Gamma' mu``, (K, l)."""
    exchange, work, spread = options.exchange, options.work, None
    ops = operands(parameters, centre=False, diagonal=True, allow_forms=exchange is None)
    if options.scales is not None:
        spread = make_spread(parameters, options.scales)
    else:
        log_weights = ops.log_weights if exchange is None else parameters.logits
        ops = ops._replace(constant=ops.constant + log_weights)
    Gamma_mu = ops.Gamma_mu.view_as(ops.latent_variances)
    if ops.forms is not None:
        # In parts, because products are many times as large as rows.
        parts = slice_rows(len(x), options.tuning.products // ops.forms.square.shape[1])
        found = [
            _sum_products(parameters, x[part], _select(weights, part), options, ops, spread)
            for part in parts
        ]
        return reduce(Statistics.add, found), Gamma_mu
    squares = squared(x, work)
    total = _Accumulator(parameters, x, squares, weights, options, spread)

    def evaluate(part: slice) -> Block:
        some = x[part], squares[part]
        if ops.packed is None:
            return Block(part, None, *project(some[0], ops, some[1], work))
        return Block(part, None, *project_packed(some[0], ops, ops.packed, some[1], work))

    if exchange is None:
        for part in _row_parts(len(x), parameters, parameters.shape[2], options.tuning):
            total.add_joint(evaluate(part))
    else:
        _add_by_exchange(total, exchange, evaluate(slice(0, len(x))))
    return total.statistics(ProjectionSums), Gamma_mu


def _sum_products(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None,
    options: _Options,
    ops: Operands,
    spread: Spread | None,
) -> Statistics:
    """Sum products of features over rows x (m, d)."""
    assert ops.forms is not None
    products, none = feature_products(x, options.work), x.new_empty(0)
    total = _Accumulator(parameters, products, x, weights, options, spread)
    for part in _row_parts(len(x), parameters, 0, options.tuning):
        log_p = quadratic_log_prob(x[part], products[part], ops, ops.forms)
        total.add_joint(Block(part, None, log_p, none.view(*log_p.shape, 0)))
    return total.statistics(ProductSums)


def _row_parts(n: int, parameters: Parameters, l: int, tuning: Tuning) -> list[slice]:
    """Cut the rows of a batch, with l projections for each component, into parts."""
    K, d, _ = parameters.shape
    elements = n * K * (l + 1)
    if d > FEW_FEATURES or elements <= tuning.responsibilities:
        return [slice(0, n)]
    return slice_rows(n, max(64, math.ceil(n / math.ceil(elements / tuning.responsibilities))))


def _sum_screened(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None,
    options: _Options,
    search: CandidateSearch,
) -> Statistics:
    """Evaluate the candidates of each row."""
    exchange, work = options.exchange, options.work
    log_weights = parameters.log_weights if exchange is None else parameters.logits
    # Evenly spaced rows are evaluated against all components too.
    step = max(1, len(x) // max(1, options.n_probes))
    squares, rows = squared(x, work), slice(step // 2, None, step)
    block = search.evaluate(x, squares, parameters, log_weights, work)
    total = _Accumulator(parameters, x, squares, weights, options)
    probes = list[Tensor]()
    if options.n_probes:
        every = search.joint_of_all(x[rows], parameters, log_weights)
        counts = search.counts or (search.n_candidates,)
        few = every.gather(1, search.rank(x[rows], log_weights, max(counts)))
        probes = [few[:, :n] for n in counts] + [every]
    if exchange is None:
        total.add_joint(block)
        found = [log_normaliser(joint)[0] for joint in probes]
    else:
        summaries = [summarise_(joint.clone()) for joint in probes]
        normalisers = _add_by_exchange(total, exchange, block, summaries)
        found = [one.log_prob for one in normalisers]
    statistics = total.statistics(ProjectionSums)
    if not found:
        return statistics
    *by_few, by_all = found
    losses = [(by_all - some).clamp(min=0) for some in by_few]
    ones = torch.ones_like(by_all)
    values = torch.stack([*losses, by_all - search.screen.base, ones])
    return statistics._replace(screening=values @ (ones if weights is None else weights[rows]))


def _add_by_exchange(
    total: _Accumulator, exchange: Exchange, block: Block, summaries: Sequence[RowSummary] = ()
) -> list[Normaliser]:
    """Add all rows, evaluated by the components of this rank; other ranks have the others.

    Further ``summaries`` are exchanged in the same message; return their normalisers.
    """
    candidates, numbers = total.candidates, block.components
    some = candidates if candidates is None or numbers is None else candidates[numbers]
    summary = summarise_(block.joint, some)
    normaliser, *others = exchange.normalisers([summary, *summaries], total.parameters)
    if candidates is not None:
        best = (
            summary.best
            if numbers is None
            else numbers.gather(1, summary.best.unsqueeze(1)).squeeze(1)
        )
        total.losses += normaliser.removal_losses(exchange.rank, best, candidates, total.weights)
    R = normaliser.normalise_(block.joint, summary.largest)
    total.add_responsibilities(block, normaliser.log_prob, R)
    return others


def _sum_incomplete(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None,
    missing: Tensor,
    options: _Options,
) -> Statistics:
    """Sum the statistics of rows with missing entries, by all components."""
    ops = observed_operands(parameters, centre=False, diagonal=True)
    Theta, exchange = regression(parameters), options.exchange
    total: Statistics | None = None
    K, _, l = parameters.shape
    # All ranks cut the rows alike.
    most = K if exchange is None else exchange.most_components
    for part in row_blocks(len(x), most, l, options.tuning.latent):
        block, gaps = x[part].masked_fill(missing[part], 0), missing[part]
        w = _select(weights, part)
        factored = factor_observed(block, gaps, ops)
        log_likelihood, R, removal = _normalise(factored.log_prob, parameters, w, options)
        R = torch.threshold_(R, LEAST_RESPONSIBILITY, 0)
        count = torch.full_like(log_likelihood[0], len(block))
        if w is not None:
            R, log_likelihood, count = R * w.unsqueeze(1), log_likelihood * w, w.sum()
        sums = sum_incomplete_rows(parameters, Theta, block, gaps, R, factored, options.tuning)
        found = Statistics(count, log_likelihood.sum(), sums, removal)
        total = found if total is None else total.add(found)
    assert total is not None
    return total


def _normalise(
    log_p: Tensor, parameters: Parameters, weights: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute log-likelihoods (B,), responsibilities (B, K) and losses of ``log p_k``, (B, K)."""
    candidates, exchange, removal = options.candidates, options.exchange, None
    if exchange is None:
        joint = log_p + parameters.log_weights
        if candidates is not None:
            removal = removal_losses(joint, candidates, weights)
        return *log_normaliser(joint), removal
    joint = log_p + parameters.logits
    summary = summarise_(joint, candidates)
    (normaliser,) = exchange.normalisers([summary], parameters)
    if candidates is not None:
        removal = normaliser.removal_losses(exchange.rank, summary.best, candidates, weights)
    return normaliser.log_prob, normaliser.normalise_(joint, summary.largest), removal


class _Accumulator:
    """Accumulate the statistics of a batch from blocks of its rows, each with some components.

    Where few pairs of a row and a component matter, they are kept until the end, and each component
    then sums its own rows. Where many do, dense products sum all of them.

    For `ProductSums`, ``x`` holds products of features, ``squares`` the rows themselves, and there
    are no projections.
    """

    def __init__(
        self,
        parameters: Parameters,
        x: Tensor,
        squares: Tensor,
        weights: Tensor | None,
        options: _Options,
        spread: Spread | None = None,
    ) -> None:
        self.parameters, self.work, self.tuning = parameters, options.work, options.tuning
        self.x, self.squares, self.weights = x, squares, weights
        self.candidates = options.candidates
        self.log_likelihoods: list[Tensor] = []
        self.losses = x.new_zeros(2, 0 if self.candidates is None else len(parameters.means))
        """Losses without components, alone and together."""
        self._pairs: list[Pairs] = []
        self._dense: tuple[Tensor, Tensor, Tensor] | None = None
        """``sum R [1, y]``, ``sum R [1, y] x'`` and ``sum R x^2`` of all components."""
        self._spread = spread
        self._scales = None if spread is None else torch.zeros_like(spread.offset).mT
        # Only on the CPU is the number of pairs known without waiting for the device.
        self._seeks_pairs = x.device.type == "cpu" and len(x) * len(parameters.means) > SMALL

    def add_joint(self, block: Block) -> None:
        """Add rows by their joint log-densities.

        Where components have several scales, ``block.joint`` is ``log p_k`` of scale one instead.
        """
        joint = block.joint if self._spread is None else self._spread.joint(block.joint)
        weights = _select(self.weights, block.place)
        if self.candidates is not None:
            self.losses += removal_losses(joint, self.candidates, weights, block.components)
        log_likelihood, R = log_normaliser(joint)
        if self._spread is not None:
            R = self._add_scales(self._spread, block.joint, R, weights)
        self.add_responsibilities(block, log_likelihood, R)

    def add_responsibilities(self, block: Block, log_likelihood: Tensor, R: Tensor) -> None:
        """Add the rows of a block by their log-likelihoods (m,) and responsibilities R (m, C)."""
        self.log_likelihoods.append(log_likelihood)
        if self._seeks_pairs or block.components is not None:
            found = find_pairs(R)
            if block.components is not None or self.tuning.pairs_pay(len(found), R.numel()):
                self._add_pairs(block, R, found)
                return
        self._add_dense(block, R)

    def statistics(self, form: type[ProjectionSums | ProductSums]) -> Statistics:
        """Return the statistics, with sums of the given form."""
        touched, first, B, S = self._sums()
        log_likelihood = torch.cat(self.log_likelihoods)
        if self.weights is None:
            count = torch.full_like(log_likelihood[0], len(self.x))
        else:
            count, log_likelihood = self.weights.sum(), log_likelihood * self.weights
        removal = None if self.candidates is None else self.losses
        sums = (
            ProjectionSums(touched, first, B, S)
            if form is ProjectionSums
            else ProductSums(touched, count=first, linear=S, products=B)
        )
        return Statistics(count, log_likelihood.sum(), sums, removal, scales=self._scales)

    def _add_scales(
        self, spread: Spread, log_p: Tensor, R: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Sum R (m, K) for each scale, and return ``R E[1/c]``, the weights for other sums."""
        assert self._scales is not None
        counted = R if weights is None else R * weights.unsqueeze(1)
        if not self._seeks_pairs:
            K = torch.arange(R.shape[1], device=R.device).repeat(len(R))
            shares = spread.shares(log_p.reshape(-1), K).view(-1, *R.shape)
            self._scales += (shares * counted).sum(dim=1).mT
            return R * (spread.slope.view(-1, 1, 1) * shares).sum(dim=0)
        rows, k = find_pairs(R).unbind(dim=1)
        shares = spread.shares(log_p[rows, k], k)
        self._scales.mT.scatter_add_(1, k.expand_as(shares), shares * counted[rows, k])
        counts = torch.zeros_like(R)
        counts[rows, k] = R[rows, k] * (spread.slope @ shares)
        return counts

    def _add_pairs(self, block: Block, R: Tensor, found: Tensor) -> None:
        rows, k = found.unbind(dim=1)
        shares = R[rows, k]
        if self.weights is not None:
            shares = shares * self.weights[block.place][rows]
        numbers = k if block.components is None else block.components[rows, k]
        Y = block.Y[rows, k] if isinstance(block.Y, Tensor) else block.Y.take(rows, k)
        self._pairs.append(Pairs(rows + block.place.start, numbers, shares, Y))

    def _add_dense(self, block: Block, R: Tensor) -> None:
        R = torch.threshold_(R, LEAST_RESPONSIBILITY, 0)
        if self.weights is not None:
            R.mul_(self.weights[block.place].unsqueeze(1))
        x = self.x[block.place]
        sums = *self._multiply(R, block.Y, x), R.mT @ self.squares[block.place]
        if self._dense is None:
            self._dense = sums
            return
        for total, some in zip(self._dense, sums, strict=True):
            total.add_(some)

    def _multiply(
        self, R: Tensor, Y: Tensor | PackedProjections, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute ``sum R [1, y]``, (C, l+1), and ``sum R [1, y] x'``, (C, l+1, d)."""
        if isinstance(Y, Tensor):
            n, C, l = Y.shape
            RY = reuse(self.work, "[R, R Y]", x, n, C, l + 1)
            RY = x.new_empty(n, C, l + 1) if RY is None else RY
            RY[:, :, 0] = R
            torch.mul(Y, R.unsqueeze(-1), out=RY[:, :, 1:])
            return RY.sum(dim=0), (RY.view(n, C * (l + 1)).mT @ x).view(C, l + 1, -1)
        (C, l), (k, j) = (R.shape[1], Y.n_factors), Y.factors.owners()
        RY = torch.cat([R, Y.values * R[:, k]], dim=1)
        # Ones of all components come first.
        place = torch.cat([torch.arange(C), k]), torch.cat([k.new_zeros(C), j + 1])
        first, B = x.new_zeros(C, l + 1), zero_pages(x, C, l + 1, x.shape[1])
        first[place], B[place] = RY.sum(dim=0), RY.mT @ x
        return first, B

    def _sums(self) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """Return the sums of pairs and of dense products together."""
        dense, K = self._dense, len(self.parameters.means)
        if not self._pairs:
            assert dense is not None
            return (None, *dense)
        pairs = Pairs(*(torch.cat(tensors) for tensors in zip(*self._pairs, strict=True)))
        # Products of features have no projections.
        ranks = find_ranks(self.parameters) if pairs.Y.shape[1] else None
        if dense is None:
            n_touched = int(torch.bincount(pairs.components).count_nonzero())
            most = n_touched > MOST_TOUCHED * K
            return sum_pairs(pairs, self.x, self.squares, K if most else None, ranks)
        touched, *sums = sum_pairs(pairs, self.x, self.squares, ranks=ranks)
        assert touched is not None
        for total, some in zip(dense, sums, strict=True):
            total.index_add_(0, touched, some)
        return (None, *dense)
