"""A step that processes with the same components take together, each a part of the components.

Every process has sums over its own share of the rows. Those of a part go to the process that has
it, which adds them and steps; what came of it goes to all others. That sends what the sums of all
in every process would, and nobody does the same work twice. A component is made by one process, so
that all of them have the same numbers, whatever their processors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch import distributed as dist

from factormix.core.arrays import Workspace
from factormix.core.averages import Running, logits_of, prediction_widths, turned_form
from factormix.core.parameters import Parameters
from factormix.core.statistics import ProductSums, Statistics
from factormix.training.distributed.processes import Group, Processes

Step = Callable[[Running, Parameters, Statistics], tuple[Running, Parameters]]


def stepped(
    processes: Processes,
    step: Step,
    running: Running,
    parameters: Parameters,
    statistics: Statistics,
    max_precision: Tensor,
    work: Workspace,
    n_rows: float | None = None,
) -> tuple[Running, Parameters]:
    """Take a step by statistics of the rows of each process; the arguments are used up.

    ``step`` is that of some components, as ``natural_step``, with the bound ``max_precision`` (d,)
    and the same ``n_rows``.
    The statistics are of the same components in all processes. What arrives lies in ``work``.
    """
    K, n, place = len(running.weight), processes.data.size, processes.data.place
    edges = [K * i // n for i in range(n + 1)]
    parts = [slice(*pair) for pair in pairwise(edges)]
    # What is sent of each part: all of it, or the components that were touched.
    moved: list[slice | Tensor] = list(parts)
    rows, touched = parts, statistics.sums.touched
    if touched is not None:
        cuts = torch.searchsorted(touched, torch.tensor(edges, device=touched.device)).tolist()
        rows = [slice(*pair) for pair in pairwise(cuts)]
        moved = [touched[row] for row in rows]
    sums, names = statistics.sums, list(statistics.sums.tensors)
    added = _added(processes, list(sums.tensors.values()), rows, work)
    here = None if touched is None else touched[rows[place]] - edges[place]
    own = statistics._replace(sums=sums.replace(here, **dict(zip(names, added, strict=True))))
    widths = None
    if n_rows is not None:
        widths = prediction_widths(running.weight, parameters.latent_variances, n_rows)
    # A step leaves Theta where B was, and what others tell of it can lie there too.
    after = running
    if touched is None and not isinstance(sums, ProductSums):
        after = running._replace(Theta=sums.B)
    _step_part(step, running, parameters, own, parts[place], after)
    running = after
    # Weights decay where no row touched a component too.
    tensors = (running.Theta, running.V, parameters.latent_variances, running.weight)
    _tell(processes, tensors, (moved, moved, moved, parts))
    for other, numbers in enumerate(moved):
        if other != place:
            _follow(running, parameters, numbers, max_precision, widths)
    E, Gamma, M = parameters[2:]
    return running, Parameters(logits_of(running.weight), running.Theta[:, 0], E, Gamma, M)


def _step_part(
    step: Step,
    running: Running,
    parameters: Parameters,
    statistics: Statistics,
    part: slice,
    after: Running,
) -> None:
    """Step a part of the components: parameters in place, averages into ``after``."""
    if part.start == part.stop:
        return
    new, found = step(
        Running(*(t[part] for t in running)),
        Parameters(*(t[part] for t in parameters)),
        statistics,
    )
    kept = (*after, *parameters[2:])
    for whole, some in zip(kept, (*new, *found[2:]), strict=True):
        if whole[part].data_ptr() != some.data_ptr():
            whole[part] = some


def _follow(
    running: Running,
    parameters: Parameters,
    numbers: slice | Tensor,
    max_precision: Tensor,
    widths: Tensor | None,
) -> None:
    """Let E and Gamma follow what others have told of components, in place."""
    E, Gamma, M = parameters[2], parameters[3].mT, parameters[4]
    wide = None if widths is None else widths[numbers]
    told = running.Theta[numbers], running.V[numbers], M[numbers], max_precision, wide
    if isinstance(numbers, slice):
        turned_form(*told, out=(E[numbers], Gamma[numbers]))
    else:
        E[numbers], Gamma[numbers] = turned_form(*told)


def _added(
    processes: Processes,
    sums: Sequence[Tensor],
    rows: Sequence[slice],
    work: Workspace,
) -> list[Tensor]:
    """Add the rows of this process over all processes, each of which has the rows of all."""
    mine = rows[processes.data.place]
    totals = [t[mine] for t in sums]
    spaces = [work.array(f"arrived {i}", t, *t.shape) for i, t in enumerate(totals)]
    turns = _turns(processes, lambda to: [t[rows[to]] for t in sums], lambda source: spaces)
    for _, arrived in turns:
        for total, some in zip(totals, arrived, strict=True):
            total.add_(some)
    return totals


def _tell(
    processes: Processes,
    tensors: Sequence[Tensor],
    moved: Sequence[Sequence[slice | Tensor]],
) -> None:
    """Give every process the rows of each tensor that others have moved, in place.

    ``moved`` has for each tensor the rows that belong to each process.
    """
    both = list(zip(tensors, moved, strict=True))
    mine = [t[rows[processes.data.place]].contiguous() for t, rows in both]

    def spaces(source: int) -> list[Tensor]:
        return [_space(t, rows[source]) for t, rows in both]

    for source, arrived in _turns(processes, lambda to: mine, spaces):
        for (t, rows), some in zip(both, arrived, strict=True):
            numbers = rows[source]
            if not isinstance(numbers, slice) or t[numbers].data_ptr() != some.data_ptr():
                t[numbers] = some


def _space(t: Tensor, rows: slice | Tensor) -> Tensor:
    """Return where rows of a tensor can arrive: in it, if they lie there together."""
    if isinstance(rows, slice):
        return t[rows].contiguous()
    return t.new_empty(len(rows), *t.shape[1:])


def _turns(
    processes: Processes,
    sent: Callable[[int], list[Tensor]],
    spaces: Callable[[int], list[Tensor]],
) -> Iterator[tuple[int, list[Tensor]]]:
    """Exchange tensors with one process after the other; yield from which some came, and these.

    They arrive in ``spaces``.
    """
    group = processes.data
    for turn in range(1, group.size):
        to, source = (group.place + turn) % group.size, (group.place - turn) % group.size
        leaving, coming = sent(to), spaces(source)
        with processes.telling(*leaving):
            _sent(group, leaving, to, coming, source)
        yield source, coming


def _sent(group: Group, leaving: list[Tensor], to: int, coming: list[Tensor], source: int) -> None:
    """Send tensors to a process while others come from one."""
    operations = [
        dist.P2POp(way, t, group.ranks[other], group.handle, tag)
        for way, tensors, other in ((dist.isend, leaving, to), (dist.irecv, coming, source))
        for tag, t in enumerate(t for t in tensors if t.numel())
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
