"""Evaluate a mixture in working units on rows in units of the data, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from factormix.core import density
from factormix.core.arrays import Workspace
from factormix.core.density import TOLERANCE
from factormix.core.missing import PreparedMixture, RowBlock, evaluate_rows
from factormix.core.parameters import Parameters, precise_dtype, to_precise_dtype
from factormix.core.screening import BestComponents, CandidateSearch
from factormix.data.batches import Batch, Values
from factormix.data.checks import ensure_finite_blocks
from factormix.data.columns import to_float64
from factormix.data.sources.base import Rows
from factormix.data.units import Units
from factormix.training.distributed.communicator import SINGLE, Communicator
from factormix.training.threads import Threads, use_threads

SCORE_ELEMENTS = 1 << 20
"""Elements of a block of rows and its projections, 8 MiB in float64: they stay in the cache."""
LEAST_BLOCK_ROWS = 64
"""Least rows of a block where components are very many: products of fewer rows are slow."""
SEARCH_ROWS, SEARCH_ELEMENTS = 8192, 1 << 23
"""Rows, and their elements, that are sorted together for a screen: more rows are hardly nearer to
each other (``benchmarks/many.py``)."""
SMALL_MIXTURE = 50_000
"""Parameters up to which a mixture is always scored in float64. For mixtures of all sizes it takes
1.7 to 2.4 times as long as float32 beyond the overhead of a call: up to here, at most 6
microseconds more of a core for each of thousands of rows, and 0.4 ms for a single one. With
float32, scores of digits (K = 25, l = 4) change by up to 6e-4 nats."""
FARTHEST = {torch.float32: 1e14, torch.float64: 1e120}
"""Working units beyond which all points are equally unlikely: their squares would overflow."""

T = TypeVar("T")


def evaluate(
    threads: Threads,
    parameters: Parameters,
    units: Units,
    rows: Rows,
    function: Callable[[RowBlock], T],
    *,
    search: CandidateSearch | None = None,
    of_best: Callable[[BestComponents], T] | None = None,
    block_rows: int | None = None,
) -> Iterator[tuple[Values | None, T]]:
    """Compute a function of each block of rows (B, d), in working units.

    The function must return nothing that lies in the workspace of a block: later blocks reuse it,
    and several are computed at the same time. Where rows have missing entries, it returns a tensor,
    or a sequence of tensors, with an entry for each row. Results come in the order of the rows,
    each with the weights (B,) of its block. All densities are right to ``TOLERANCE`` per feature
    and their rounding.

    With ``search``, complete rows are evaluated against few of very many components, and
    ``of_best`` computes the result from the best of them. ``block_rows`` are the rows of a block in
    which all components are evaluated, ``count_block_rows`` of the mixture by default.
    """
    trained, parameters = parameters, to_score_dtype(parameters)
    like, work = parameters.means, Workspace()
    farthest = FARTHEST[like.dtype]
    part_rows = count_block_rows(*parameters.shape) if block_rows is None else block_rows
    # Working data is centred, unless it is the data itself.
    mixture = PreparedMixture(parameters, centre=units.is_identity, allow_forms=True)
    complete = getattr(rows, "complete", False)

    def of_either(block: RowBlock) -> T:
        if search is None or of_best is None or block.missing is not None:
            return function(block)
        x = block.x
        found = search.find_best(x.to(trained.means), trained, work)
        return of_best(found._replace(log_prob=found.log_prob.to(x), Y=found.Y.to(x)))

    def of_block(block: Batch) -> tuple[Values | None, T]:
        # Held over the call, because a generator releases it at every yield.
        with torch.no_grad():
            batch = units.to_working(block, like.device, like.dtype, complete=complete)
            x = batch.tensors()[0].clamp(-farthest, farthest)
            # In parts: the block may be one for a search, and rows with gaps meet all components.
            found = evaluate_rows(mixture, x, batch.missing, of_either, work, part_rows)
            return block.weights, found

    size = part_rows
    if search is not None and of_best is not None:
        size = min(SEARCH_ROWS, max(1, SEARCH_ELEMENTS // like.shape[1]))
    else:
        # Once, before threads ask for them.
        with torch.no_grad():
            _ = mixture.ops
    return threads.stream(of_block, ensure_finite_blocks(rows, size))


def count_block_rows(n_components: int, n_features: int, n_factors: int) -> int:
    """Return the rows of a block whose projections on all factors have ``SCORE_ELEMENTS``."""
    # Projections of d rows are no larger than the parameters.
    least = min(LEAST_BLOCK_ROWS, n_features)
    return max(least, SCORE_ELEMENTS // (n_features + n_components * (n_factors + 1)))


def to_score_dtype(parameters: Parameters) -> Parameters:
    """Return parameters in the precision that scores need: the precision of training, or float64.

    Small mixtures cost microseconds more in float64. For a larger one, float32 suffices unless the
    means lie so far from the origin, in standard deviations, that the cancelling products of a
    density would lose more than ``TOLERANCE`` per feature.
    """
    K, d, l = parameters.shape
    if K * d * (l + 2) > SMALL_MIXTURE and rounding_error(parameters) < TOLERANCE:
        return parameters
    return to_precise_dtype(parameters)


def rounding_error(parameters: Parameters) -> Tensor:
    """Return the rounding error of a log-density per feature, scalar."""
    eps = torch.finfo(parameters.means.dtype).eps
    return eps * density.cancellation(parameters).max()


def add_missing_volume(scores: Tensor, missing: Tensor | None, units: Units) -> Tensor:
    """Add to scores (B,) the log-volume of the units of missing entries (B, d).

    Subtract the log-volume of all units to get log-likelihoods in units of the data, which are 0
    for a row without entries.
    """
    if missing is None:
        return scores
    found = scores + units.missing_volume(missing).to(scores)
    return found.masked_fill(missing.all(dim=1), units.log_volume)


def mean_log_likelihood(
    parameters: Parameters,
    units: Units,
    rows: Rows,
    search: CandidateSearch | None = None,
    communicator: Communicator = SINGLE,
) -> float:
    """Compute the mean log-likelihood of rows (n, d) in units of the data, by their weights.

    ``search`` evaluates few of many components. Where ranks have different components, all ranks
    call this.
    """
    if not communicator.has_all_components:
        total = weight = 0.0
        for scores, _, weights in score_on_ranks(communicator, parameters, units, rows):
            total, weight = total + float(scores @ weights), weight + float(weights.sum())
        return total / weight - units.log_volume
    device = parameters.means.device
    sums = torch.zeros(2, device=device, dtype=precise_dtype(device))

    def of_block(block: RowBlock) -> Tensor:
        return add_missing_volume(density.log_normaliser(block.joint())[0], block.missing, units)

    with use_threads() as threads:
        parts = evaluate(
            threads,
            parameters,
            units,
            rows,
            of_block,
            search=search,
            of_best=lambda found: found.log_prob,
        )
        for given, part in parts:
            scores = part.to(sums.dtype)
            if given is None:
                sums = sums + torch.stack([scores.sum(), scores.new_tensor(len(scores))])
            else:
                weights = to_float64(given).to(scores)
                sums = sums + torch.stack([scores @ weights, weights.sum()])
    return (sums[0] / sums[1]).item() - units.log_volume


RankScores = tuple[Tensor, Tensor, Tensor]
"""Log-likelihoods in working units, the best component of each row, and weights, (B,) each."""


def score_on_ranks(
    communicator: Communicator, parameters: Parameters, units: Units, rows: Rows
) -> Iterator[RankScores]:
    """Yield scores of rows (n, d) by a mixture whose components lie on several ranks.

    Every rank serves the same rows, evaluates all of its components, and exchanges for each row
    their joint density and the density of its best one.
    """
    placement = communicator.components
    edges = torch.tensor([0, *accumulate(placement.counts)])
    mass = parameters.logits.to(precise_dtype(parameters.means.device)).logsumexp(dim=0)
    log_mass = placement.gather_from_ranks(mass).logsumexp(dim=0)
    # Equal blocks on all ranks, whose numbers of components differ by one.
    block_rows = count_block_rows(max(placement.counts), *parameters.shape[1:])

    def summarise(block: RowBlock) -> Sequence[Tensor]:
        """Return the total of this rank's components, the best one, and its number, (B,) each."""
        joint = block.joint()
        total, (best, which) = density.log_normaliser(joint)[0], joint.max(dim=1)
        total, best, which = (t.to(mass) for t in (total + mass, best + mass, which))
        if block.missing is not None:
            total = total + units.missing_volume(block.missing).to(total)
        return total, best, which

    with use_threads() as threads:
        blocks = evaluate(threads, parameters, units, rows, summarise, block_rows=block_rows)
        for weights, own in blocks:
            gathered = placement.gather_from_ranks(torch.stack(list(own), dim=1))
            rank = gathered[..., 1].argmax(dim=0)
            component = gathered[..., 2].gather(0, rank.unsqueeze(0)).squeeze(0).long()
            component = component + edges.to(rank.device)[rank]
            given = torch.ones_like(own[0]) if weights is None else to_float64(weights)
            yield gathered[..., 0].logsumexp(dim=0) - log_mass, component, given.to(mass)
