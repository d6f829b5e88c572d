"""A step of ranks that have the same components: each rank takes it for a part of the components.

Every rank has sums over its own shard of the rows. The sums of a part go to the rank that owns it,
which adds them and steps; the result goes to all other ranks. This sends as much as summing
everything everywhere would, and no rank repeats the work of another. Each component is computed on
one rank, so all ranks have the same numbers, whatever their processors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch import distributed as dist

from factormix.core.averages import Averages, prediction_widths, rebuild_precisions, to_logits
from factormix.core.noise import Noise
from factormix.core.parameters import Parameters
from factormix.core.statistics import ProductSums, Statistics
from factormix.training.distributed.communicator import Communicator

Step = Callable[[Averages, Parameters, Statistics], tuple[Averages, Parameters]]


def step_by_owner(
    communicator: Communicator,
    step: Step,
    averages: Averages,
    parameters: Parameters,
    statistics: Statistics,
    max_precision: Tensor,
    n_rows: float | None,
    noise: Noise | None = None,
) -> tuple[Averages, Parameters]:
    """Take a step by statistics over the rows of each rank; the memory of arguments is reused.

    ``step`` is a function such as ``natural_step`` with the bound ``max_precision`` (d,) and the
    same ``n_rows`` and ``noise``. The statistics are of the same components on all ranks.
    """
    K, n, rank = len(averages.weight), communicator.data.size, communicator.data.rank
    edges = [K * i // n for i in range(n + 1)]
    parts = [slice(*pair) for pair in pairwise(edges)]
    # The components of each part that are sent: all, or only the touched ones.
    moved: list[slice | Tensor] = list(parts)
    rows, touched = parts, statistics.sums.touched
    if touched is not None:
        cuts = torch.searchsorted(touched, torch.tensor(edges, device=touched.device)).tolist()
        rows = [slice(*pair) for pair in pairwise(cuts)]
        moved = [touched[row] for row in rows]
    sums, names = statistics.sums, list(statistics.sums.tensors)
    added = _add_own_rows(communicator, list(sums.tensors.values()), rows)
    local = None if touched is None else touched[rows[rank]] - edges[rank]
    own = statistics._replace(sums=sums.replace(local, **dict(zip(names, added, strict=True))))
    widths = None
    if n_rows is not None:
        widths = prediction_widths(averages.weight, parameters.latent_variances, n_rows, noise)
    # A step leaves Theta in the memory of B, where the Theta of other ranks can go too.
    after = averages
    if touched is None and not isinstance(sums, ProductSums):
        after = averages._replace(Theta=sums.B)
    tied = noise is not None and noise.tied
    _step_part_(step, averages, parameters, own, parts[rank], after, tied=tied)
    averages = after
    # Weights also decay where no row touched a component.
    tensors = (averages.Theta, averages.V, parameters.latent_variances, averages.weight)
    _broadcast_parts_(communicator, tensors, (moved, moved, moved, parts))
    for other, numbers in enumerate(moved):
        if other != rank:
            _update_precisions_(averages, parameters, numbers, max_precision, widths)
    E, Gamma, M = parameters[2:]
    return averages, Parameters(to_logits(averages.weight), averages.Theta[:, 0], E, Gamma, M)


def _step_part_(
    step: Step,
    averages: Averages,
    parameters: Parameters,
    statistics: Statistics,
    part: slice,
    after: Averages,
    *,
    tied: bool,
) -> None:
    """Step a part of the components: parameters in place, averages into ``after``."""
    # A rank without components takes part in sums over all of them.
    if part.start == part.stop and not tied:
        return
    new, found = step(averages.take(part), parameters.take(part), statistics)
    targets = (*after, *parameters[2:])
    for whole, some in zip(targets, (*new, *found[2:]), strict=True):
        _copy_(whole, part, some)


def _update_precisions_(
    averages: Averages,
    parameters: Parameters,
    numbers: slice | Tensor,
    max_precision: Tensor,
    widths: Tensor | None,
) -> None:
    """Compute E and Gamma of components that other ranks have stepped, in place."""
    E, Gamma, M = parameters[2], parameters[3].mT, parameters[4]
    wide = None if widths is None else widths[numbers]
    given = averages.Theta[numbers], averages.V[numbers], M[numbers], max_precision, wide
    if isinstance(numbers, slice):
        rebuild_precisions(*given, out=(E[numbers], Gamma[numbers]))
    else:
        E[numbers], Gamma[numbers] = rebuild_precisions(*given)


def _add_own_rows(
    communicator: Communicator, sums: Sequence[Tensor], rows: Sequence[slice]
) -> list[Tensor]:
    """Add the rows that this rank owns over all ranks; ``rows`` has the rows of each rank."""
    group = communicator.data
    parts = [(owner, t[some]) for owner, some in enumerate(rows) for t in sums]
    with communicator.sending(*(part for owner, part in parts if owner != group.rank)):
        requests = [
            dist.reduce(part, group.ranks[owner], group=group.handle, async_op=True)
            for owner, part in parts
            if part.numel()
        ]
        for request in requests:
            request.wait()
    return [t[rows[group.rank]] for t in sums]


def _broadcast_parts_(
    communicator: Communicator,
    tensors: Sequence[Tensor],
    moved: Sequence[Sequence[slice | Tensor]],
) -> None:
    """Copy to every rank the rows of each tensor that other ranks have changed, in place.

    ``moved`` has for each tensor the rows that each rank owns.
    """
    group = communicator.data
    for owner, rank in enumerate(group.ranks):
        parts = [t[rows[owner]].contiguous() for t, rows in zip(tensors, moved, strict=True)]
        # Counted once for each rank that receives it.
        sent = parts * (group.size - 1) if owner == group.rank else []
        with communicator.sending(*sent):
            for part in filter(torch.numel, parts):
                dist.broadcast(part, rank, group.handle)
        for t, rows, part in zip(tensors, moved, parts, strict=True):
            if owner != group.rank:
                _copy_(t, rows[owner], part)


def _copy_(t: Tensor, rows: slice | Tensor, part: Tensor) -> None:
    """Copy a part into some rows of a tensor, unless it lies there already."""
    if not isinstance(rows, slice) or t[rows].data_ptr() != part.data_ptr():
        t[rows] = part
