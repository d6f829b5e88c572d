"""Evaluate a mixture in working units on rows in units of the data, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import TypeVar, cast

import torch
from torch import Tensor

from factormix.core import density
from factormix.core.arrays import Workspace
from factormix.core.density import TOLERANCE, Operands
from factormix.core.missing import (
    ObservedOperands,
    exact_observed_joint,
    observed_joint,
    observed_operands,
)
from factormix.core.parameters import Parameters, latent_variances, precise_dtype
from factormix.core.screening import BestComponents, CandidateSearch
from factormix.data.batches import Batch, Values
from factormix.data.checks import ensure_finite_blocks
from factormix.data.columns import to_float64
from factormix.data.sources.base import Rows
from factormix.data.units import Units
from factormix.errors import InputError
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
"""Parameters up to which a mixture is always scored in float64, which then costs little."""
FARTHEST = {torch.float32: 1e14, torch.float64: 1e120}
"""Working units beyond which all points are equally unlikely: their squares would overflow."""

T = TypeVar("T")
JointLogProb = Callable[[Tensor, Operands, Workspace], Tensor]
ObservedJoint = Callable[[Tensor, Tensor, ObservedOperands], Tensor]


def evaluate(
    threads: Threads,
    parameters: Parameters,
    units: Units,
    rows: Rows,
    function: Callable[[Tensor, Operands, Workspace], T],
    partial: Callable[[Tensor, Tensor, ObservedOperands], T] | None = None,
    *,
    search: CandidateSearch | None = None,
    of_best: Callable[[BestComponents], T] | None = None,
    block_rows: int | None = None,
) -> Iterator[tuple[Values | None, T]]:
    """Compute a function of each block of rows (B, d), in working units, and of the operands.

    The function also gets a workspace, and must return nothing that lies in it: later blocks reuse
    it, and several are computed at the same time. Results come in the order of the rows, each with
    the weights (B,) of its block.

    Rows with missing entries go to ``partial`` instead, with the mask (B, d) of missing entries.
    Both functions return a tensor, or a sequence of tensors, with an entry for each row.

    With ``search``, complete rows are evaluated against few of very many components, and
    ``of_best`` computes the result from the best of them. ``block_rows`` are the rows of a block in
    which all components are evaluated, ``count_block_rows`` of the mixture by default.
    """
    trained, parameters = parameters, to_score_dtype(parameters)
    like, work = parameters.means, Workspace()
    farthest = FARTHEST[like.dtype]
    part_rows = count_block_rows(*parameters.shape) if block_rows is None else block_rows

    @cache
    def ops() -> Operands:
        # Working data is centred, unless it is the data itself.
        return density.operands(parameters, centre=units.is_identity, allow_forms=True)

    @cache
    def observed_ops() -> ObservedOperands:
        return observed_operands(parameters, centre=units.is_identity)

    def of_complete(x: Tensor) -> T:
        if search is None or of_best is None:
            return function(x, ops(), work)
        found = search.find_best(x.to(trained.means), trained, work)
        return of_best(found._replace(log_prob=found.log_prob.to(x), Y=found.Y.to(x)))

    complete = getattr(rows, "complete", False)

    def of_block(block: Batch) -> tuple[Values | None, T]:
        # Held over the call, because a generator releases it at every yield.
        with torch.no_grad():
            batch = units.to_working(block, like.device, like.dtype, complete=complete)
            x, missing = batch.tensors()[0].clamp(-farthest, farthest), batch.missing
            if missing is None:
                return block.weights, of_complete(x)
            if partial is None:
                raise InputError(
                    f"{getattr(rows, 'name', 'X')} has missing values (NaN), which cannot be used"
                    " here: fill them in by impute."
                )
            incomplete = missing.any(dim=1)
            some, whole = (chosen.nonzero()[:, 0] for chosen in (incomplete, ~incomplete))
            # In parts: the block may be one for a search, and these rows meet all components.
            parts = [
                (part, partial(x[part], missing[part], observed_ops()))
                for part in torch.split(some, part_rows)
            ]
            if len(whole):
                parts.append((whole, of_complete(x[whole])))
            return block.weights, _merge(parts)

    size = part_rows
    if search is not None and of_best is not None:
        size = min(SEARCH_ROWS, max(1, SEARCH_ELEMENTS // like.shape[1]))
    else:
        # Once, before threads ask for them.
        with torch.no_grad():
            ops()
    return threads.stream(of_block, ensure_finite_blocks(rows, size))


def count_block_rows(n_components: int, n_features: int, n_factors: int) -> int:
    """Return the rows of a block whose projections on all factors have ``SCORE_ELEMENTS``."""
    # Projections of d rows are no larger than the parameters.
    least = min(LEAST_BLOCK_ROWS, n_features)
    return max(least, SCORE_ELEMENTS // (n_features + n_components * (n_factors + 1)))


def _merge(parts: list[tuple[Tensor, T]]) -> T:
    """Merge results of some rows (n,) each, tensors or sequences of them, in the order of rows."""
    rows, results = zip(*parts, strict=True)
    order = torch.cat(rows).argsort()
    if isinstance(results[0], Tensor):
        return cast(T, torch.cat(results)[order])
    return cast(T, [torch.cat(column)[order] for column in zip(*results, strict=True)])


def to_score_dtype(parameters: Parameters) -> Parameters:
    """Return parameters in the precision that scores need: that of training, or float64.

    Small mixtures cost little in either. For a larger one, float32 suffices unless the means lie so
    far from the origin, in standard deviations, that the cancelling products of a density would
    lose more than ``TOLERANCE`` per feature.
    """
    K, d, l = parameters.shape
    dtype = precise_dtype(parameters.means.device)
    if parameters.means.dtype == dtype:
        return parameters
    if K * d * (l + 2) > SMALL_MIXTURE and rounding_error(parameters) < TOLERANCE:
        return parameters
    return to_precise_dtype(parameters)


def to_precise_dtype(parameters: Parameters) -> Parameters:
    """Return parameters in float64 where the device has it."""
    dtype = precise_dtype(parameters.means.device)
    if parameters.means.dtype == dtype:
        return parameters
    logits, mu, E, Gamma = (t.to(dtype) for t in parameters[:4])
    # The M of training has lost digits where it is small.
    return Parameters(logits, mu, E, Gamma, latent_variances(E, Gamma))


def rounding_error(parameters: Parameters) -> Tensor:
    """Return the rounding error of a log-density per feature, scalar."""
    eps = torch.finfo(parameters.means.dtype).eps
    return eps * density.cancellation(parameters).max()


def choose_joints(parameters: Parameters, units: Units) -> tuple[JointLogProb, ObservedJoint]:
    """Return the functions that compute ``log pi_k + log p_k(x)``, (B, K), for ``evaluate``.

    The second is for rows with missing entries. All values are right to ``TOLERANCE`` per feature
    and their rounding.
    """
    precise = to_score_dtype(parameters)
    inexact = density.find_inexact(precise, centre=units.is_identity)
    if not len(inexact):
        return density.joint_log_prob, observed_joint
    return (
        lambda x, ops, work: density.exact_joint_log_prob(x, precise, ops, inexact),
        lambda x, missing, ops: exact_observed_joint(x, missing, precise, ops, inexact),
    )


def add_missing_volume(scores: Tensor, missing: Tensor, units: Units) -> Tensor:
    """Add to scores (B,) the log-volume of the units of missing entries (B, d).

    Less the log-volume of all units, the results are log-likelihoods in units of the data, and 0
    for a row without entries.
    """
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
    joint, partial_joint = choose_joints(parameters, units)

    def log_prob(x: Tensor, ops: Operands, work: Workspace) -> Tensor:
        return density.log_normaliser(joint(x, ops, work))[0]

    def partial(x: Tensor, missing: Tensor, ops: ObservedOperands) -> Tensor:
        scores = density.log_normaliser(partial_joint(x, missing, ops))[0]
        return add_missing_volume(scores, missing, units)

    with use_threads() as threads:
        parts = evaluate(
            threads,
            parameters,
            units,
            rows,
            log_prob,
            partial,
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


Scored = tuple[Tensor, Tensor, Tensor]
"""Log-likelihoods in working units, the best component of each row, and weights, (B,) each."""


def score_on_ranks(
    communicator: Communicator, parameters: Parameters, units: Units, rows: Rows
) -> Iterator[Scored]:
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
    for own in _score_own(parameters, units, rows, mass, block_rows):
        gathered = placement.gather_from_ranks(own[:, :3])
        rank = gathered[..., 1].argmax(dim=0)
        component = gathered[..., 2].gather(0, rank.unsqueeze(0)).squeeze(0).long()
        component = component + edges.to(rank.device)[rank]
        yield gathered[..., 0].logsumexp(dim=0) - log_mass, component, own[:, 3]


def _score_own(
    parameters: Parameters, units: Units, rows: Rows, mass: Tensor, block_rows: int
) -> Iterator[Tensor]:
    """Yield (B, 4) for the components of this rank: total, best, its number, and the weight."""
    joint, partial_joint = choose_joints(parameters, units)

    def summarise(values: Tensor) -> Sequence[Tensor]:
        total, (best, which) = density.log_normaliser(values)[0], values.max(dim=1)
        return [t.to(mass) for t in (total + mass, best + mass, which)]

    def of_rows(x: Tensor, ops: Operands, work: Workspace) -> Sequence[Tensor]:
        return summarise(joint(x, ops, work))

    def of_partial(x: Tensor, missing: Tensor, ops: ObservedOperands) -> Sequence[Tensor]:
        total, best, which = summarise(partial_joint(x, missing, ops))
        return [total + units.missing_volume(missing).to(total), best, which]

    with use_threads() as threads:
        blocks = evaluate(
            threads, parameters, units, rows, of_rows, of_partial, block_rows=block_rows
        )
        for weights, parts in blocks:
            given = torch.ones_like(parts[0]) if weights is None else to_float64(weights)
            yield torch.stack([*parts, given.to(mass)], dim=1)
