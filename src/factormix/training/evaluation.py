"""How well a mixture in working units explains rows in units of the data, block by block.

Scores of rows by a mixture whose components are divided among processes.

Every process serves the same rows, evaluates all of its components, and tells of each row what they
say together and what its best one says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from factormix.core import density
from factormix.core.arrays import Workspace
from factormix.core.density import Operands
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
from factormix.training.distributed.processes import Processes
from factormix.training.threads import Threads, use_threads

SCORE_ELEMENTS = 1 << 20
"""Elements that a block of rows and its projections have together."""
LEAST_ROWS = 64
"""Rows of a block where components are very many: products of fewer are slow."""
FEW_ROWS, FEW_ELEMENTS = 8192, 1 << 23
"""Rows, and their elements, that are sorted together where few of many components are looked at."""
SMALL = 50_000
"""Number of parameters up to which a mixture is always scored in float64."""
TOLERANCE = 1e-3
"""What rounding may cost a log-density, per feature."""
FARTHEST = {torch.float32: 1e14, torch.float64: 1e120}
"""Working units beyond which all points are equally unlikely: squares would overflow."""

T = TypeVar("T")


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
) -> Iterator[tuple[Values | None, T]]:
    """Compute a function of each block of rows (B, d), in working units, and of the operands.

    The function also gets a workspace, and must return nothing that lies in it: later blocks use
    it again, and several are computed at the same time. The results come in the order of the rows,
    each with the weights (B,) of its block.

    Rows with missing entries go to ``partial`` instead, with the mask (B, d) of what is missing.
    Both functions return a tensor, or a sequence of tensors, with an entry for each row.

    With ``search``, complete rows are evaluated against few of very many components, and
    ``of_best`` computes the result from the best of them.
    """
    trained, parameters = parameters, in_score_dtype(parameters)
    like, work = parameters.means, Workspace()
    farthest = FARTHEST[like.dtype]
    K, d, l = parameters.shape
    # Projections of d rows are no larger than the parameters.
    at_once = max(min(LEAST_ROWS, d), SCORE_ELEMENTS // (d + K * (l + 1)))

    @cache
    def ops() -> Operands:
        # Working data is centred already, unless it is the data itself.
        return density.operands(parameters, centre=units.is_identity, allow_forms=True)

    def of_rows(x: Tensor) -> T:
        if search is None or of_best is None:
            return function(x, ops(), work)
        found = search.find_best(x.to(trained.means), trained, work)
        return of_best(found._replace(log_prob=found.log_prob.to(x), Y=found.Y.to(x)))

    complete = getattr(rows, "complete", False)

    @cache
    def observed_ops() -> ObservedOperands:
        return observed_operands(parameters, centre=units.is_identity)

    def of_block(block: Batch) -> tuple[Values | None, T]:
        # Held over the call, because a generator lets go of it at every yield.
        with torch.no_grad():
            batch = units.to_working(block, like.device, like.dtype, complete=complete)
            x, missing = batch.tensors()[0].clamp(-farthest, farthest), batch.missing
            if missing is None:
                return block.weights, of_rows(x)
            if partial is None:
                raise InputError(
                    f"{getattr(rows, 'name', 'X')} has missing values (NaN), which cannot be used"
                    " here: fill them in by impute."
                )
            gaps = missing.any(dim=1)
            some, whole = (rows_.nonzero()[:, 0] for rows_ in (gaps, ~gaps))
            found, done = None, some[:0]
            # The block may be one for few components, and these are evaluated against all.
            for part in torch.split(some, at_once):
                new = partial(x[part], missing[part], observed_ops())
                found, done = (
                    (new, part)
                    if found is None
                    else (_stacked(found, new), torch.cat([done, part]))
                )
            assert found is not None
            if not len(whole):
                return block.weights, found
            return block.weights, _merged(found, done, of_rows(x[whole]), whole)

    size = at_once
    if search is not None and of_best is not None:
        # More rows than that are not nearer to each other by much.
        size = min(FEW_ROWS, max(1, FEW_ELEMENTS // d))
    else:
        # Once, before threads ask for them.
        with torch.no_grad():
            ops()
    blocks = ensure_finite_blocks(rows, size)
    return threads.stream(of_block, blocks)


def _stacked(first: T, second: T) -> T:
    """Put results of some rows before those of others."""
    if isinstance(first, Tensor):
        return cast(T, torch.cat([first, cast(Any, second)]))
    pairs = zip(cast(Any, first), cast(Any, second), strict=True)
    return cast(T, [_stacked(a, b) for a, b in pairs])


def _merged(first: T, at: Tensor, second: T, then: Tensor) -> T:
    """Put results of some rows (n,) and of others (m,) in the order of all of them."""
    if isinstance(first, Tensor):
        whole: Any = first.new_empty(len(at) + len(then), *first.shape[1:])
        whole[at], whole[then] = first, second
        return cast(T, whole)
    pairs = zip(cast(Any, first), cast(Any, second), strict=True)
    return cast(T, [_merged(a, at, b, then) for a, b in pairs])


def in_score_dtype(parameters: Parameters) -> Parameters:
    """Return parameters in the precision that their density needs: that of training, or float64.

    Small mixtures cost little in either. In a larger one, float32 will do unless the means lie so
    many standard deviations from the origin that the products of a density, which cancel, would
    lose more than ``TOLERANCE`` per feature.
    """
    K, d, l = parameters.shape
    dtype = precise_dtype(parameters.means.device)
    lost = torch.finfo(parameters.means.dtype).eps * density.cancellation(parameters).max()
    if parameters.means.dtype == dtype or (K * d * (l + 2) > SMALL and lost < TOLERANCE):
        return parameters
    return in_precise_dtype(parameters)


def in_precise_dtype(parameters: Parameters) -> Parameters:
    """Return parameters in float64 where the device has it."""
    dtype = precise_dtype(parameters.means.device)
    if parameters.means.dtype == dtype:
        return parameters
    logits, mu, E, Gamma = (t.to(dtype) for t in parameters[:4])
    # What M was in training has lost digits where it is small.
    return Parameters(logits, mu, E, Gamma, latent_variances(E, Gamma))


def joint_log_prob_of(
    parameters: Parameters,
) -> Callable[[Tensor, Operands, Workspace], Tensor]:
    """Return the function that computes ``log pi_k + log p_k(x)``, (B, K), for ``evaluate``.

    The value of each row's best component is right to ``TOLERANCE`` per feature and its rounding.
    """
    precise = in_score_dtype(parameters)
    lost = torch.finfo(precise.means.dtype).eps * density.cancellation(precise).max()
    if lost < TOLERANCE:
        return density.joint_log_prob
    return lambda x, ops, work: density.exact_joint_log_prob(x, precise, ops)


def observed_joint_of(
    parameters: Parameters,
) -> Callable[[Tensor, Tensor, ObservedOperands], Tensor]:
    """Return the function that computes ``log pi_k + log p_k(x_o)``, (B, K), of partial rows."""
    precise = in_score_dtype(parameters)
    lost = torch.finfo(precise.means.dtype).eps * density.cancellation(precise).max()
    if lost < TOLERANCE:
        return observed_joint
    return lambda x, missing, ops: exact_observed_joint(x, missing, precise, ops)


def with_missing_volume(scores: Tensor, missing: Tensor, units: Units) -> Tensor:
    """Add to scores (B,) the volume of units that missing entries (B, d) do not have.

    Less the volume of all units they are log-likelihoods in units of the data, and 0 for a row
    without entries.
    """
    found = scores + units.missing_volume(missing).to(scores)
    return found.masked_fill(missing.all(dim=1), units.log_volume)


def mean_log_likelihood(
    parameters: Parameters, units: Units, rows: Rows, search: CandidateSearch | None = None
) -> float:
    """Compute the mean log-likelihood of rows (n, d) in units of the data, by their weights.

    ``search`` evaluates few of many components.
    """
    device = parameters.means.device
    total = torch.zeros((), device=device, dtype=precise_dtype(device))
    weight = torch.zeros_like(total)
    joint, partial_joint = joint_log_prob_of(parameters), observed_joint_of(parameters)

    def log_prob(x: Tensor, ops: Operands, work: Workspace) -> Tensor:
        return density.log_normaliser(joint(x, ops, work))[0]

    def partial(x: Tensor, missing: Tensor, ops: ObservedOperands) -> Tensor:
        scores = density.log_normaliser(partial_joint(x, missing, ops))[0]
        return with_missing_volume(scores, missing, units)

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
            scores = part.to(total.dtype)
            if given is None:
                total, weight = total + scores.sum(), weight + len(scores)
            else:
                weights = to_float64(given).to(scores)
                total, weight = total + scores @ weights, weight + weights.sum()
    return (total / weight).item() - units.log_volume


MESSAGE_ROWS = 8192
"""Rows of which processes tell each other at once."""

Scored = tuple[Tensor, Tensor, Tensor]
"""Log-likelihoods in working units, the best component of each row, and weights, (B,) each."""


def divided_scores(
    processes: Processes, parameters: Parameters, units: Units, rows: Rows
) -> Iterator[Scored]:
    """Yield scores of rows (n, d) in their order; all processes have to ask for them."""
    edges = torch.tensor([0, *accumulate(processes.counts)])
    mass = parameters.logits.to(precise_dtype(parameters.means.device)).logsumexp(dim=0)
    log_mass = processes.gathered(mass).logsumexp(dim=0)
    for mine in _regrouped(_here(parameters, units, rows, mass)):
        told, weights = mine[:, :3], mine[:, 3]
        each = processes.gathered(told)
        who = each[..., 1].argmax(dim=0)
        component = each[..., 2].gather(0, who.unsqueeze(0)).squeeze(0).long()
        component = component + edges.to(who.device)[who]
        yield each[..., 0].logsumexp(dim=0) - log_mass, component, weights


def divided_mean(processes: Processes, parameters: Parameters, units: Units, rows: Rows) -> float:
    """Compute the mean log-likelihood of rows (n, d) in units of the data, by their weights."""
    total = weight = 0.0
    for scores, _, weights in divided_scores(processes, parameters, units, rows):
        total, weight = total + float(scores @ weights), weight + float(weights.sum())
    return total / weight - units.log_volume


def _here(parameters: Parameters, units: Units, rows: Rows, mass: Tensor) -> Iterator[Tensor]:
    """Yield what components here say of rows, (B, 4): together, at best, which, and the weight."""
    joint_log_prob, partial_joint = joint_log_prob_of(parameters), observed_joint_of(parameters)

    def told(joint: Tensor) -> Sequence[Tensor]:
        together, (best, which) = density.log_normaliser(joint)[0], joint.max(dim=1)
        return [t.to(mass) for t in (together + mass, best + mass, which)]

    def of_rows(x: Tensor, ops: Operands, work: Workspace) -> Sequence[Tensor]:
        return told(joint_log_prob(x, ops, work))

    def of_partial(x: Tensor, missing: Tensor, ops: ObservedOperands) -> Sequence[Tensor]:
        together, best, which = told(partial_joint(x, missing, ops))
        return [together + units.missing_volume(missing).to(together), best, which]

    with use_threads() as threads:
        for weights, parts in evaluate(threads, parameters, units, rows, of_rows, of_partial):
            given = torch.ones_like(parts[0]) if weights is None else to_float64(weights)
            yield torch.stack([*parts, given.to(mass)], dim=1)


def _regrouped(parts: Iterator[Tensor]) -> Iterator[Tensor]:
    """Put parts together so that every process has the same, (at most ``MESSAGE_ROWS``, 4)."""
    held, count = list[Tensor](), 0
    for part in parts:
        held.append(part)
        count += len(part)
        while count >= MESSAGE_ROWS:
            everything = torch.cat(held)
            yield everything[:MESSAGE_ROWS]
            held, count = [everything[MESSAGE_ROWS:]], count - MESSAGE_ROWS
    if count:
        yield torch.cat(held)
