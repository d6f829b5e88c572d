"""Where components are: which process has which of them, and how they get from one to another.

The components of all processes along their axis of the mesh stand in one line, those of the first
process first, and each has as many as the next, or one more. Vectors of one number for each
component are gathered whole, so that every process decides the same; of the components themselves
only those that move are sent.

A run that one process has whole, cut for processes that each take some of its components.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from factormix.core.averages import Components
from factormix.core.exchange import Exchange
from factormix.errors import InputError
from factormix.training.distributed.processes import Processes

T = TypeVar("T", bound=tuple[Tensor, ...])


def settle(processes: Processes, n: int) -> None:
    """Divide n components among the processes."""
    parts = processes.components.size
    if n < parts:
        raise InputError(
            f"{n} components cannot be divided among {parts} processes: use fewer processes along"
            " the components, or more components."
        )
    processes.counts = [n // parts + (i < n % parts) for i in range(parts)]


def place_of(processes: Processes) -> slice:
    """Return where the components of this process stand in the line."""
    edges, i = [0, *accumulate(processes.counts)], processes.components.place
    return slice(edges[i], edges[i + 1])


def n_components(processes: Processes, here: int) -> int:
    """Return the components of all processes, of which this one has so many."""
    return sum(processes.counts) if processes.divided else here


def exchange_of(processes: Processes) -> Exchange | None:
    """Return how what components here say reaches the others; None where all are here."""
    if not processes.divided:
        return None
    return Exchange(processes.gathered, processes.components.place, max(processes.counts))


def whole(processes: Processes, vector: Tensor) -> Tensor:
    """Return a vector of the components here, (n,), or rows (n, m), for all of them, (K, ...)."""
    vector = processes.agreed(vector)
    return joined(processes, vector, processes.counts) if processes.divided else vector


def wholes(processes: Processes, vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return several such vectors, the first of them of numbers, by one message."""
    if processes.alone:
        return list(vectors)
    table = torch.stack([vector.to(vectors[0].dtype) for vector in vectors], dim=1)
    columns = whole(processes, table).unbind(dim=1)
    return [column.to(old.dtype) for column, old in zip(columns, vectors, strict=True)]


def joined(processes: Processes, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return rows of all processes, (sum of counts, ...), each of which has its count of them."""
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    each = processes.gathered(padded)
    return torch.cat([part[:n] for part, n in zip(each, counts, strict=True)])


def mine(processes: Processes, vector: Tensor) -> Tensor:
    """Return the part of a vector of all components, (K,), that is of those here, (n,)."""
    return vector[place_of(processes)] if processes.divided else vector


def cut(processes: Processes, tensors: T) -> T:
    """Return the components here of tensors of all of them, (K, ...) each."""
    if not processes.divided:
        return tensors
    place, make = place_of(processes), type(tensors)
    return make(*(t[place].clone(memory_format=torch.preserve_format) for t in tensors))


def total(processes: Processes, tensor: Tensor) -> Tensor:
    """Add what the processes along the components have."""
    return processes.gathered(tensor).sum(dim=0) if processes.divided else tensor


def weights_of(processes: Processes, logits: Tensor) -> Tensor:
    """Return pi of all components, (K,): what decides nothing, and may differ by a rounding.

    The logits (k,) are those of the components here.
    """
    if processes.divided:
        logits = joined(processes, logits, processes.counts)
        return torch.softmax(logits, dim=0)
    return torch.log_softmax(logits, dim=0).exp()


def in_line(processes: Processes, counts: Sequence[int]) -> list[Tensor]:
    """Return the numbers of the components of each process that has so many."""
    numbers: tuple[Tensor, ...] = torch.split(torch.arange(sum(counts)), list(counts))
    return list(numbers)


def local(processes: Processes, numbers: Tensor) -> Tensor:
    """Return the numbers here of those in the line, (n,), that are here."""
    if not processes.divided:
        return numbers
    place = place_of(processes)
    here: Tensor = numbers[(numbers >= place.start) & (numbers < place.stop)]
    offset: Tensor = here - place.start
    return offset


def near(processes: Processes, source: Tensor, target: Tensor) -> Tensor:
    """Order targets (n,) so that many are where their sources (n,) are."""
    if not processes.divided:
        return target
    owners = _owners(processes)
    free = list[list[int]]([] for _ in processes.counts)
    for number in target.tolist():
        free[int(owners[number])].append(number)
    chosen = [free[owner].pop() if free[owner] else -1 for owner in owners[source.cpu()].tolist()]
    rest = iter([number for left in free for number in left])
    return torch.tensor([n if n >= 0 else next(rest) for n in chosen], device=target.device)


def with_room(processes: Processes, components: Components, n: int) -> tuple[Components, Tensor]:
    """Add n empty components, and return their numbers in the line, (n,)."""
    if not processes.divided:
        k = len(components.weight)
        return components.with_room(n), torch.arange(k, k + n, device=components.weight.device)
    before = processes.counts
    settle(processes, sum(before) + n)
    here = processes.components.place
    components = components.with_room(processes.counts[here] - before[here])
    lines = in_line(processes, processes.counts)
    new = torch.cat([line[old:] for line, old in zip(lines, before, strict=True)])
    return components, new.to(components.weight.device)


def kept(processes: Processes, components: Components, numbers: Tensor) -> Components:
    """Keep the components of rising numbers (n,) in the line, divided evenly again."""
    if not processes.divided:
        return components.take(numbers)
    before = processes.counts
    settle(processes, len(numbers))
    after, processes.counts = processes.counts, before
    wanted = torch.split(numbers.cpu(), after)
    found = fetched(processes, components, list(wanted))
    processes.counts = after
    return found


def fetched(processes: Processes, components: T, wanted: list[Tensor]) -> T:
    """Return copies of components that this process wants, in its order.

    ``wanted`` has for each process the numbers in the line, (n,), which all of them know.
    """
    if not processes.divided:
        return type(components)(*(t[wanted[0]] for t in components))
    here, owners, place = processes.components.place, _owners(processes), place_of(processes)
    ranks, handle = processes.components.ranks, processes.components.handle
    like = components[0]
    mine_ = wanted[here].cpu()
    found = type(components)(*(t.new_empty(len(mine_), *t.shape[1:]) for t in components))
    width = sum(t[:1].numel() for t in components)
    operations, arriving = [], list[tuple[Tensor, Tensor]]()
    for other in range(len(ranks)):
        theirs = wanted[other].cpu()
        from_here = theirs[owners[theirs] == here] - place.start
        to_here = (owners[mine_] == other).nonzero()[:, 0].to(like.device)
        if other == here:
            for t, new in zip(components, found, strict=True):
                new[to_here] = t[from_here.to(like.device)]
            continue
        if len(from_here):
            message = _packed(components, from_here.to(like.device))
            operations.append(dist.P2POp(dist.isend, message, ranks[other], handle))
        if len(to_here):
            space = like.new_empty(len(to_here), width)
            operations.append(dist.P2POp(dist.irecv, space, ranks[other], handle))
            arriving.append((to_here, space))
    with processes.telling(*(one.tensor for one in operations if one.op is dist.isend)):
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
    for at, space in arriving:
        sizes = [t[:1].numel() for t in components]
        for new, part in zip(found, torch.split(space, sizes, dim=1), strict=True):
            new[at] = part.reshape(len(at), *new.shape[1:])
    return found


def _packed(components: tuple[Tensor, ...], index: Tensor) -> Tensor:
    """Put all that belongs to some components in one row each, (n, width)."""
    return torch.cat([t[index].reshape(len(index), -1) for t in components], dim=1)


def _owners(processes: Processes) -> Tensor:
    """Return which process has each component of the line, (K,)."""
    numbers = torch.arange(len(processes.counts))
    return numbers.repeat_interleave(torch.tensor(processes.counts))
