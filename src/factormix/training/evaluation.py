"""How well a mixture in working units explains rows in units of the data, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from factormix.core import density
from factormix.core.density import Operands
from factormix.core.parameters import Parameters, precise_dtype
from factormix.core.workspace import Workspace
from factormix.data.batches import Batch, Values
from factormix.data.sources import Rows, checked_blocks
from factormix.data.units import Units
from factormix.training.threads import Team, team

__all__ = ["evaluate", "mean_log_likelihood"]

SCORE_ELEMENTS = 1 << 20
"""Elements of what a block of rows and its projections take together."""
FARTHEST = 1e14
"""Working units beyond which all points are equally unlikely."""

T = TypeVar("T")


def evaluate(
    threads: Team,
    parameters: Parameters,
    units: Units,
    rows: Rows,
    function: Callable[[Tensor, Operands, Workspace], T],
) -> Iterator[tuple[Values | None, T]]:
    """Compute a function of each block of rows (B, d), in working units, and of the operands.

    The function gets a workspace too, from which it may return nothing: the next block, of which
    several are computed at the same time, uses it again. The results come in the order of the
    rows, each with the weights (B,) of its block.
    """
    like, work = parameters.means, Workspace()
    with torch.no_grad():
        # Working data is centred already, unless it is the data itself.
        ops = density.operands(parameters, centre=units.is_identity)

    def of_block(block: Batch) -> tuple[Values | None, T]:
        # Held over the call, because a generator lets go of it at every yield.
        with torch.no_grad():
            x: Any = units.to_working(block, like.device, like.dtype).rows
            # Squares of what is further out would overflow and give no score at all.
            return block.weights, function(x.clamp(-FARTHEST, FARTHEST), ops, work)

    K, d, l = parameters.shape
    blocks = checked_blocks(rows, max(1, SCORE_ELEMENTS // (d + K * (l + 1))))
    return threads.stream(of_block, blocks)


def mean_log_likelihood(parameters: Parameters, units: Units, rows: Rows) -> float:
    """Compute the mean log-likelihood of rows (n, d) in units of the data, by their weights."""
    device = parameters.means.device
    total = torch.zeros((), device=device, dtype=precise_dtype(device))
    weight = torch.zeros_like(total)
    with team() as threads:
        for given, part in evaluate(threads, parameters, units, rows, density.log_prob):
            scores = part.to(total.dtype)
            if given is None:
                total, weight = total + scores.sum(), weight + len(scores)
            else:
                weights = torch.as_tensor(given).to(scores)
                total, weight = total + scores @ weights, weight + weights.sum()
    return (total / weight).item() - units.log_volume
