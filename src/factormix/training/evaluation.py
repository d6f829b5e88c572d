"""How well a mixture in working units explains rows in units of the data, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from factormix.core import density
from factormix.core.density import Operands
from factormix.core.parameters import Parameters, latent_variances, precise_dtype
from factormix.core.workspace import Workspace
from factormix.data.batches import Batch, Values
from factormix.data.columns import precise
from factormix.data.sources import Rows, checked_blocks
from factormix.data.units import Units
from factormix.training.threads import Team, team

__all__ = [
    "FARTHEST",
    "evaluate",
    "in_precise_dtype",
    "in_score_dtype",
    "joint_log_prob_of",
    "mean_log_likelihood",
]

SCORE_ELEMENTS = 1 << 20
"""Elements that a block of rows and its projections have together."""
SMALL = 50_000
"""Number of parameters up to which a mixture is always scored in float64."""
TOLERANCE = 1e-3
"""What rounding may cost a log-density, per feature."""
FARTHEST = {torch.float32: 1e14, torch.float64: 1e120}
"""Working units beyond which all points are equally unlikely: squares would overflow."""

T = TypeVar("T")


def evaluate(
    threads: Team,
    parameters: Parameters,
    units: Units,
    rows: Rows,
    function: Callable[[Tensor, Operands, Workspace], T],
) -> Iterator[tuple[Values | None, T]]:
    """Compute a function of each block of rows (B, d), in working units, and of the operands.

    The function also gets a workspace, and must return nothing that lies in it: later blocks use
    it again, and several are computed at the same time. The results come in the order of the rows,
    each with the weights (B,) of its block.
    """
    parameters = in_score_dtype(parameters)
    like, work = parameters.means, Workspace()
    farthest = FARTHEST[like.dtype]
    with torch.no_grad():
        # Working data is centred already, unless it is the data itself.
        ops = density.operands(parameters, centre=units.is_identity)

    def of_block(block: Batch) -> tuple[Values | None, T]:
        # Held over the call, because a generator lets go of it at every yield.
        with torch.no_grad():
            x: Any = units.to_working(block, like.device, like.dtype).rows
            return block.weights, function(x.clamp(-farthest, farthest), ops, work)

    K, d, l = parameters.shape
    blocks = checked_blocks(rows, max(1, SCORE_ELEMENTS // (d + K * (l + 1))))
    return threads.stream(of_block, blocks)


def in_score_dtype(parameters: Parameters) -> Parameters:
    """Return parameters in the precision that their density needs: that of training, or float64.

    Small mixtures cost little in either. In a larger one, float32 will do unless the means lie so
    many standard deviations from the origin that the products of a density, which cancel, would
    lose more than ``TOLERANCE`` per feature.
    """
    K, d, l = parameters.shape
    dtype = precise_dtype(parameters.means.device)
    lost = torch.finfo(parameters.means.dtype).eps * density.cancelling(parameters).max()
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
    lost = torch.finfo(precise.means.dtype).eps * density.cancelling(precise).max()
    if lost < TOLERANCE:
        return density.joint_log_prob
    return lambda x, ops, work: density.exact_joint_log_prob(x, precise, ops)


def mean_log_likelihood(parameters: Parameters, units: Units, rows: Rows) -> float:
    """Compute the mean log-likelihood of rows (n, d) in units of the data, by their weights."""
    device = parameters.means.device
    total = torch.zeros((), device=device, dtype=precise_dtype(device))
    weight = torch.zeros_like(total)
    joint = joint_log_prob_of(parameters)

    def log_prob(x: Tensor, ops: Operands, work: Workspace) -> Tensor:
        return density.log_normaliser(joint(x, ops, work))[0]

    with team() as threads:
        for given, part in evaluate(threads, parameters, units, rows, log_prob):
            scores = part.to(total.dtype)
            if given is None:
                total, weight = total + scores.sum(), weight + len(scores)
            else:
                weights = precise(given).to(scores)
                total, weight = total + scores @ weights, weight + weights.sum()
    return (total / weight).item() - units.log_volume
