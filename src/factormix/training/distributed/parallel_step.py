"""A step of ranks that have the same components, each of which takes the step for a part of them.

Every rank has sums over its own shard of the rows. The sums of a part go to the rank that owns it,
which adds them and steps; the result goes to all other ranks. This sends as much as summing
everything everywhere would, and no rank repeats the work of another. Each component is computed on
one rank, so all ranks have the same numbers, whatever their processors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch import distributed as dist

from factormix.core.arrays import Workspace
from factormix.core.averages import Averages, prediction_widths, rebuild_precisions, to_logits
from factormix.core.parameters import Parameters
from factormix.core.statistics import ProductSums, Statistics
from factormix.training.distributed.communicator import Communicator, Group

Step = Callable[[Averages, Parameters, Statistics], tuple[Averages, Parameters]]


def step_by_owner(
    communicator: Communicator,
    step: Step,
    averages: Averages,
    parameters: Parameters,
    statistics: Statistics,
    max_precision: Tensor,
    work: Workspace,
    n_rows: float | None = None,
) -> tuple[Averages, Parameters]:
    """Take a step by statistics over the rows of each rank; the memory of arguments is reused.

    ``step`` is a function such as ``natural_step`` with the bound ``max_precision`` (d,) and the
    same ``n_rows``. The statistics are of the same components on all ranks. Received tensors lie in
    ``work``.
    """
    K, n, rank = len(averages.weight), communicator.data.size, communicator.data.rank
    edges = [K * i // n for i in range(n + 1)]
    parts = [slice(*pair) for pair in pairwise(edges)]
    # The components of each part that are sent: all, or those that were touched.
    moved: list[slice | Tensor] = list(parts)
    rows, touched = parts, statistics.sums.touched
    if touched is not None:
        cuts = torch.searchsorted(touched, torch.tensor(edges, device=touched.device)).tolist()
        rows = [slice(*pair) for pair in pairwise(cuts)]
        moved = [touched[row] for row in rows]
    sums, names = statistics.sums, list(statistics.sums.tensors)
    added = _add_own_rows(communicator, list(sums.tensors.values()), rows, work)
    local = None if touched is None else touched[rows[rank]] - edges[rank]
    own = statistics._replace(sums=sums.replace(local, **dict(zip(names, added, strict=True))))
    widths = None
    if n_rows is not None:
        widths = prediction_widths(averages.weight, parameters.latent_variances, n_rows)
    # A step leaves Theta in the memory of B, where the Theta of other ranks can go too.
    after = averages
    if touched is None and not isinstance(sums, ProductSums):
        after = averages._replace(Theta=sums.B)
    _step_part_(step, averages, parameters, own, parts[rank], after)
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
) -> None:
    """Step a part of the components: parameters in place, averages into ``after``."""
    if part.start == part.stop:
        return
    new, found = step(
        Averages(*(t[part] for t in averages)),
        Parameters(*(t[part] for t in parameters)),
        statistics,
    )
    targets = (*after, *parameters[2:])
    for whole, some in zip(targets, (*new, *found[2:]), strict=True):
        if whole[part].data_ptr() != some.data_ptr():
            whole[part] = some


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
    communicator: Communicator, sums: Sequence[Tensor], rows: Sequence[slice], work: Workspace
) -> list[Tensor]:
    """Add the rows that this rank owns over all ranks; ``rows`` has the rows of each rank."""
    own = rows[communicator.data.rank]
    totals = [t[own] for t in sums]
    spaces = [work.array(f"arrived {i}", t, *t.shape) for i, t in enumerate(totals)]
    turns = _exchange_in_turns(
        communicator, lambda to: [t[rows[to]] for t in sums], lambda source: spaces
    )
    for _, arrived in turns:
        for total, some in zip(totals, arrived, strict=True):
            total.add_(some)
    return totals


def _broadcast_parts_(
    communicator: Communicator,
    tensors: Sequence[Tensor],
    moved: Sequence[Sequence[slice | Tensor]],
) -> None:
    """Copy to every rank the rows of each tensor that other ranks have changed, in place.

    ``moved`` has for each tensor the rows that each rank owns.
    """
    both = list(zip(tensors, moved, strict=True))
    own = [t[rows[communicator.data.rank]].contiguous() for t, rows in both]

    def spaces(source: int) -> list[Tensor]:
        return [_receive_space(t, rows[source]) for t, rows in both]

    for source, arrived in _exchange_in_turns(communicator, lambda to: own, spaces):
        for (t, rows), some in zip(both, arrived, strict=True):
            numbers = rows[source]
            if not isinstance(numbers, slice) or t[numbers].data_ptr() != some.data_ptr():
                t[numbers] = some


def _receive_space(t: Tensor, rows: slice | Tensor) -> Tensor:
    """Return memory for rows of a tensor: its own, if the rows are contiguous."""
    if isinstance(rows, slice):
        return t[rows].contiguous()
    return t.new_empty(len(rows), *t.shape[1:])


def _exchange_in_turns(
    communicator: Communicator,
    tensors_for: Callable[[int], list[Tensor]],
    spaces_for: Callable[[int], list[Tensor]],
) -> Iterator[tuple[int, list[Tensor]]]:
    """Exchange tensors with one rank after the other; yield the source and its tensors."""
    group = communicator.data
    for turn in range(1, group.size):
        to, source = (group.rank + turn) % group.size, (group.rank - turn) % group.size
        leaving, arriving = tensors_for(to), spaces_for(source)
        with communicator.sending(*leaving):
            _send_and_receive(group, leaving, to, arriving, source)
        yield source, arriving


def _send_and_receive(
    group: Group, leaving: list[Tensor], to: int, arriving: list[Tensor], source: int
) -> None:
    """Send tensors to a rank while others arrive from one."""
    operations = [
        dist.P2POp(way, t, group.ranks[other], group.handle, tag)
        for way, tensors, other in ((dist.isend, leaving, to), (dist.irecv, arriving, source))
        for tag, t in enumerate(t for t in tensors if t.numel())
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
