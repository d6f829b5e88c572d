"""The E-step: statistics of a batch under the posterior of components and latent variables.

``expected_statistics`` is the one entry. It separates rows with missing entries from complete ones
and chooses how complete rows meet the components: all of them, by quadratic forms where these cost
less, or a few that a screen selects for each block of rows. Where components lie on several ranks,
the ranks exchange summaries of the rows before responsibilities are known.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import Workspace, reuse, slice_rows
from factormix.core.density import (
    SMALL,
    Operands,
    feature_products,
    joint_operands,
    log_normaliser,
    operands,
    project,
    quadratic_log_prob,
    squared,
)
from factormix.core.exchange import (
    Exchange,
    RowSummary,
    best_of_others,
    summarise_,
    unnormalised_operands,
)
from factormix.core.missing import (
    factor_observed,
    observed_operands,
    regression,
    row_blocks,
    sum_incomplete_rows,
)
from factormix.core.parameters import Parameters
from factormix.core.scales import Spread, make_spread
from factormix.core.screening import Block, CandidateSearch, SortedRows
from factormix.core.statistics import (
    Pairs,
    ProductSums,
    ProjectionSums,
    RemovalLosses,
    Statistics,
    concatenate_pairs,
    find_pairs,
    pairs_pay,
    sum_pairs,
)

PART_ELEMENTS = 1 << 20
"""Elements of ``[R, R Y]`` that are computed at a time where features are few: 4 MiB in float32,
which is read again while it is still in the processor's cache."""
PRODUCT_ELEMENTS = 1 << 25
"""Elements of the products of features that are formed at a time, 128 MiB in float32."""
FEW_FEATURES = 256
"""Features below which passes over ``[R, R Y]`` cost more than its products with x."""
MOST_TOUCHED = 0.7
"""Share of touched components above which rewriting all is cheaper than copying some
(``benchmarks/step.py``)."""


class _Options(NamedTuple):
    """How the components meet complete rows."""

    candidates: Tensor | None
    scales: Tensor | None
    search: CandidateSearch | None
    n_probes: int
    work: Workspace | None
    exchange: Exchange | None


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
) -> Statistics:
    """Sum the expected complete-data statistics over a batch x (B, d).

    Parameters
    ----------
    parameters : Parameters
        Of all components, or of those on this rank.
    weights : Tensor (B,) or None
        Weights of the rows.
    missing : Tensor (B, d) or None
        True for entries that are missing.
    candidates : Tensor (K,) or None
        True for components that might be removed: asks for the losses without them.
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
    options = _Options(candidates, scales, search, n_probes, work, exchange)
    if missing is None:
        return _sum_complete(parameters, x, weights, options, convert=convert)
    incomplete = missing.any(dim=1)
    whole, rest = ((~incomplete).nonzero()[:, 0], incomplete.nonzero()[:, 0])
    if not len(whole):
        return _sum_incomplete(parameters, x, weights, missing, options)
    some = None if weights is None else weights[whole]
    complete = _sum_complete(parameters, x[whole], some, options, convert=True)
    if not len(rest):
        return complete
    some = None if weights is None else weights[rest]
    return complete.add(_sum_incomplete(parameters, x[rest], some, missing[rest], options))


def _sum_complete(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None,
    options: _Options,
    *,
    convert: bool,
) -> Statistics:
    if options.exchange is not None:
        some = _sum_all_by_exchange if options.search is None else _sum_screened_by_exchange
        statistics, Gamma_mu = some(parameters, x, weights, options, options.exchange)
        convert = True
    elif options.search is not None:
        statistics, Gamma_mu = _sum_screened(parameters, x, weights, options, options.search)
    else:
        statistics, Gamma_mu = _sum_all(parameters, x, weights, options)
    if not convert:
        return statistics
    if isinstance(statistics.sums, ProductSums):
        projected = statistics.sums.project(parameters)
        return statistics._replace(sums=projected.to_latent(parameters, Gamma_mu))
    assert isinstance(statistics.sums, ProjectionSums)
    return statistics._replace(sums=statistics.sums.to_latent(parameters, Gamma_mu))


def _sum_all(
    parameters: Parameters, x: Tensor, weights: Tensor | None, options: _Options
) -> tuple[Statistics, Tensor]:
    """Evaluate all components; return also ``Gamma' mu``, (K, l)."""
    if options.scales is None:
        ops, spread = joint_operands(parameters, allow_forms=True), None
    else:
        ops = operands(parameters, centre=False, diagonal=True, allow_forms=True)
        spread = make_spread(parameters, options.scales)
    Gamma_mu = ops.Gamma_mu.view_as(ops.latent_variances)
    if ops.forms is not None:
        # In parts, because products are many times as large as rows.
        parts = slice_rows(len(x), max(1, PRODUCT_ELEMENTS // ops.forms.square.shape[1]))
        given = [None if weights is None else weights[part] for part in parts]
        found = [
            _sum_products(parameters, x[part], some, options, ops, spread)
            for part, some in zip(parts, given, strict=True)
        ]
        return reduce(Statistics.add, found), Gamma_mu
    squares = squared(x, options.work)
    total = _Accumulator(parameters, x, squares, weights, options, spread)
    for part in _row_parts(len(x), parameters, parameters.shape[2]):
        total.add_joint(part, *project(x[part], ops, squares[part], options.work))
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
    for part in _row_parts(len(x), parameters, 0):
        log_p = quadratic_log_prob(x[part], products[part], ops, ops.forms)
        total.add_joint(part, log_p, none.view(*log_p.shape, 0))
    return total.statistics(ProductSums)


def _row_parts(n: int, parameters: Parameters, l: int) -> list[slice]:
    """Cut the rows of a batch, with l projections for each component, into parts."""
    K, d, _ = parameters.shape
    elements = n * K * (l + 1)
    if d > FEW_FEATURES or elements <= PART_ELEMENTS:
        return [slice(0, n)]
    return slice_rows(n, max(64, math.ceil(n / math.ceil(elements / PART_ELEMENTS))))


def _sum_screened(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None,
    options: _Options,
    search: CandidateSearch,
) -> tuple[Statistics, Tensor]:
    """Evaluate the candidates of each block of rows; return also ``Gamma' mu``, (K, l)."""
    rows = search.sort_rows(x, parameters.log_weights, options.work)
    used = rows.weigh(weights)
    total = _Accumulator(parameters, rows.x, rows.squares, used, options)
    for block in search.evaluate(rows, parameters, parameters.log_weights, options.work):
        total.add_joint(block.place, block.joint, block.Y, block.components)
    screening = x.new_zeros(2)
    if options.n_probes:
        scores, probes = torch.cat(total.log_likelihoods), _probes(len(rows.x), options.n_probes)
        lost = (search.log_prob_of_all(rows.x[probes], parameters) - scores[probes]).clamp(min=0)
        screening = torch.stack([lost @ used[probes], used[probes].sum()])
    found = total.statistics(ProjectionSums)._replace(screening=screening)
    return found, search.screen.Gamma_mu


def _probes(n_rows: int, n_probes: int) -> slice:
    """Return places of n rows that are evenly spaced."""
    step = max(1, n_rows // n_probes)
    return slice(step // 2, None, step)


def _sum_all_by_exchange(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None,
    options: _Options,
    exchange: Exchange,
) -> tuple[Statistics, Tensor]:
    """Evaluate all components of this rank; other ranks have the others."""
    squares, ops = squared(x, options.work), unnormalised_operands(parameters)
    joint, Y = project(x, ops, squares, options.work)
    summary = summarise_(joint, options.candidates)
    (normaliser,) = exchange.normalisers([summary], parameters)
    total = _Accumulator(parameters, x, squares, weights, options)
    if options.candidates is not None:
        total.losses += torch.stack(
            normaliser.removal_losses(exchange.rank, summary.best, options.candidates, weights)
        )
    R = normaliser.normalise_(joint, summary.largest)
    total.add_responsibilities(slice(0, len(x)), normaliser.log_prob, R, Y)
    K, _, l = parameters.shape
    return total.statistics(ProjectionSums), ops.Gamma_mu.view(K, l)


def _sum_screened_by_exchange(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None,
    options: _Options,
    exchange: Exchange,
) -> tuple[Statistics, Tensor]:
    """Evaluate the candidates of this rank for each block of rows."""
    search, logits, work = options.search, parameters.logits, options.work
    assert search is not None
    rows = search.sort_rows(x, logits, work)
    # All blocks are kept until the normaliser is known.
    blocks = list(search.evaluate(rows, parameters, logits, work, keep=True))
    summary = _summarise_blocks_(blocks, rows, len(x), options.candidates)
    summaries, probes = [summary], _probes(len(x), max(1, options.n_probes))
    if options.n_probes:
        summaries.append(summarise_(project(x[probes], unnormalised_operands(parameters))[0]))
    normaliser, *full = exchange.normalisers(summaries, parameters)
    used = rows.weigh(weights)
    total = _Accumulator(parameters, rows.x, rows.squares, used, options)
    if options.candidates is not None:
        total.losses += torch.stack(
            normaliser.removal_losses(exchange.rank, summary.best, options.candidates, weights)
        )
    for block in blocks:
        numbers = rows.order[block.place]
        R = normaliser.normalise_(block.joint, summary.largest[numbers], numbers)
        log_prob = normaliser.log_prob[numbers]
        total.add_responsibilities(block.place, log_prob, R, block.Y, block.components)
    screening = x.new_zeros(2)
    for probed in full:
        lost = (probed.log_prob - normaliser.log_prob[probes]).clamp(min=0)
        counted = torch.ones_like(lost) if weights is None else weights[probes]
        screening = torch.stack([lost @ counted, counted.sum()])
    found = total.statistics(ProjectionSums)._replace(screening=screening)
    return found, search.screen.Gamma_mu


def _summarise_blocks_(
    blocks: list[Block], rows: SortedRows, n_rows: int, candidates: Tensor | None
) -> RowSummary:
    """Summarise blocks in the order of the batch; their joint log-densities change in place."""
    values = blocks[0].joint.new_empty(n_rows, 2 if candidates is None else 4)
    best = torch.empty(n_rows, dtype=torch.long, device=values.device)
    for block in blocks:
        some = None if candidates is None else candidates[block.components]
        numbers, summary = rows.order[block.place], summarise_(block.joint, some)
        values[numbers], best[numbers] = summary.values, block.components[summary.best]
    return RowSummary(values, best)


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
    for part in row_blocks(len(x), K if exchange is None else exchange.most_components, l):
        block, gaps = x[part].masked_fill(missing[part], 0), missing[part]
        w = None if weights is None else weights[part]
        factored = factor_observed(block, gaps, ops)
        log_likelihood, R, removal = _normalise(factored.log_prob, parameters, w, options)
        # As for complete rows: a row that is very far from a component must not reach it.
        R = torch.threshold_(R, 2e-30, 0)
        count = torch.full_like(log_likelihood[0], len(block))
        if w is not None:
            R, log_likelihood, count = R * w.unsqueeze(1), log_likelihood * w, w.sum()
        sums = sum_incomplete_rows(parameters, Theta, block, gaps, R, factored)
        found = Statistics(count, log_likelihood.sum(), sums, removal)
        total = found if total is None else total.add(found)
    assert total is not None
    return total


def _normalise(
    log_p: Tensor, parameters: Parameters, weights: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor, RemovalLosses | None]:
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
        self.parameters, self.work = parameters, options.work
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
        # The number of pairs is known without waiting for the device on the CPU alone.
        self._seeks_pairs = x.device.type == "cpu" and len(x) * len(parameters.means) > SMALL

    def add_joint(
        self, part: slice, joint: Tensor, Y: Tensor, components: Tensor | None = None
    ) -> None:
        """Add rows by ``log pi_k + log p_k``, (m, C), and projections Y, (m, C, l).

        ``components`` (C,) are the numbers of the components; None stands for all. Where components
        have several scales, ``joint`` is ``log p_k`` of scale one, for all components.
        """
        log_p = joint
        if self._spread is not None:
            joint = self._spread.joint(log_p)
        weights = None if self.weights is None else self.weights[part]
        if self.candidates is not None:
            some = self.candidates if components is None else self.candidates[components]
            losses = torch.stack(removal_losses(joint, some, weights))
            if components is None:
                self.losses += losses
            else:
                self.losses.index_add_(1, components, losses)
        log_likelihood, R = log_normaliser(joint)
        if self._spread is not None:
            R = self._add_scales(self._spread, log_p, R, weights)
        self.add_responsibilities(part, log_likelihood, R, Y, components)

    def add_responsibilities(
        self,
        part: slice,
        log_likelihood: Tensor,
        R: Tensor,
        Y: Tensor,
        components: Tensor | None = None,
    ) -> None:
        """Add rows by their log-likelihoods (m,) and responsibilities R (m, C)."""
        weights = None if self.weights is None else self.weights[part]
        self.log_likelihoods.append(log_likelihood)
        if self._seeks_pairs:
            found = find_pairs(R)
            if pairs_pay(len(found), R.numel()):
                self._add_pairs(part, R, Y, found, components, weights)
                return
        self._add_dense(part, R, Y, components, weights)

    def statistics(self, form: type[ProjectionSums | ProductSums]) -> Statistics:
        """Return the statistics, with sums of the given form."""
        touched, first, B, S = self._sums()
        log_likelihood = torch.cat(self.log_likelihoods)
        if self.weights is None:
            count = torch.full_like(log_likelihood[0], len(self.x))
        else:
            count, log_likelihood = self.weights.sum(), log_likelihood * self.weights
        removal = None if self.candidates is None else RemovalLosses(*self.losses.unbind())
        sums = (
            ProjectionSums(touched, first, B, S)
            if form is ProjectionSums
            else ProductSums(touched, count=first, linear=S, products=B)
        )
        return Statistics(count, log_likelihood.sum(), sums, removal, scales=self._scales)

    def _add_scales(
        self, spread: Spread, log_p: Tensor, R: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Sum R (m, K) for each scale, and return ``R E[1/c]``, by which rows count."""
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
        few = torch.zeros_like(R)
        few[rows, k] = R[rows, k] * (spread.slope @ shares)
        return few

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

    def _add_dense(
        self,
        part: slice,
        R: Tensor,
        Y: Tensor,
        components: Tensor | None,
        weights: Tensor | None,
    ) -> None:
        # A row that is very far from all components but one must not reach the others.
        R = torch.threshold_(R, 2e-30, 0)
        if weights is not None:
            R.mul_(weights.unsqueeze(1))
        x, (n, C, l) = self.x[part], Y.shape
        RY = reuse(self.work, "[R, R Y]", x, n, C, l + 1)
        RY = x.new_empty(n, C, l + 1) if RY is None else RY
        RY[:, :, 0] = R
        torch.mul(Y, R.unsqueeze(-1), out=RY[:, :, 1:])
        B = (RY.view(n, C * (l + 1)).mT @ x).view(C, l + 1, -1)
        sums = RY.sum(dim=0), B, R.mT @ self.squares[part]
        if self._dense is None and components is None:
            self._dense = sums
            return
        if self._dense is None:
            K = len(self.parameters.means)
            first, second, third = (t.new_zeros(K, *t.shape[1:]) for t in sums)
            self._dense = first, second, third
        for total, some in zip(self._dense, sums, strict=True):
            if components is None:
                total.add_(some)
            else:
                total.index_add_(0, components, some)

    def _sums(self) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """Return the sums of pairs and of dense products together."""
        dense, K = self._dense, len(self.parameters.means)
        if not self._pairs:
            assert dense is not None
            return (None, *dense)
        pairs = concatenate_pairs(self._pairs)
        if dense is None:
            n_touched = int(torch.bincount(pairs.components).count_nonzero())
            most = n_touched > MOST_TOUCHED * K
            return sum_pairs(pairs, self.x, self.squares, K if most else None)
        touched, *sums = sum_pairs(pairs, self.x, self.squares)
        assert touched is not None
        for total, some in zip(dense, sums, strict=True):
            total.index_add_(0, touched, some)
        return (None, *dense)


def removal_losses(joint: Tensor, candidates: Tensor, weights: Tensor | None) -> RemovalLosses:
    """Sum the losses of rows without the component that explains them best.

    ``joint`` is ``log pi_k + log p_k``, (B, K). Alone, the second best component takes over. For
    all candidates together, the best one that is no candidate does, so that a group of twins is not
    thought dispensable because each could stand in for the other.
    """
    K = joint.shape[1]
    best, which = joint.max(dim=1)
    second = joint.scatter(1, which.unsqueeze(1), -torch.inf).amax(dim=1)
    other = best_of_others(joint, candidates)
    losses = torch.nn.functional.softplus(torch.stack([best - second, best - other]))
    if weights is not None:
        losses = losses * weights
    alone, together = losses.new_zeros(2, K).index_add_(1, which, losses)
    return RemovalLosses(alone, together.masked_fill(~candidates, 0))
