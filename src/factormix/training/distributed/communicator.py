"""The ranks that train one mixture together, seen from one of them.

Ranks stand on a mesh of two axes. Along "data", each has a shard of the rows of every batch and the
same components, and contributions are summed. Along "components", each has some of the components
and sees the same rows, and summaries of rows are gathered. Every decision, such as a random draw or
the time of a report, is made on one rank and broadcast.

Training code meets other ranks at three seams: batches (``announce``, ``receive_notice``),
contributions (``reduce``) and components (``components``, a `ComponentPlacement`). With one rank
every method is trivial, and nothing is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from factormix.core.averages import Components
from factormix.core.exchange import Exchange
from factormix.core.parameters import Parameters
from factormix.core.statistics import LatentSums, Statistics
from factormix.errors import InputError

T = TypeVar("T")
Tensors = TypeVar("Tensors", bound=tuple[Tensor, ...])

SMALL_MESSAGE = 1 << 14
"""Elements up to which a tensor shares a message with others: below 64 KiB, latency costs more than
the copy."""


class RankLost(InputError):
    """Another rank has ended, and the run cannot go on."""


class Notice(NamedTuple):
    """Facts about a step that all ranks know before it is taken."""

    n_rows: int
    """Rows of the batch, of all shards."""
    mean_weight: float
    """Their mean weight."""
    volume: float | Tensor
    """Mean log-volume of the units of missing entries, see ``loop``."""
    signal: int = 0
    """The signal that asks for the end of the run, if one came."""
    report: bool = False
    """Whether it is time for a report."""


class Group(NamedTuple):
    """The ranks along an axis of the mesh."""

    size: int = 1
    rank: int = 0
    """Of this process in the group."""
    handle: Any = None
    ranks: tuple[int, ...] = (0,)
    """Ranks of the members in the world."""


class Communicator:
    """One rank among all that train a mixture."""

    def __init__(
        self,
        world: Group | None = None,
        data: Group | None = None,
        components: Group | None = None,
    ) -> None:
        self.world = world or Group()
        """All ranks, by messages in the memory of the CPU."""
        self.data = data or Group()
        self.components = ComponentPlacement(self, components or Group())
        self.seconds = 0.0
        """Time spent sending and waiting."""
        self.bytes = 0
        """Bytes that this rank has sent, each message counted once."""
        self._on_first_only = False
        self._announced: tuple[Tensor, Any, Exception | None] | None = None
        """The notice of the next step on its way, until it is needed: the numbers of all ranks, the
        request that gathers them, and the failure of this rank."""
        self._notice: Notice | None = None

    @property
    def is_single(self) -> bool:
        """Whether there is no other rank."""
        return self.world.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this rank reports and writes."""
        return self.world.rank == 0

    @property
    def has_all_components(self) -> bool:
        """Whether the whole mixture is on this rank."""
        return not self.components.divided

    @property
    def saves(self) -> bool:
        """Whether this rank takes part in writing a model."""
        return self.is_first or not self.has_all_components

    # Batches

    def announce(self, notice: Notice, failure: Exception | None = None) -> None:
        """Send facts about a shard of a batch; ``receive_notice`` returns the facts of all shards.

        Every rank calls it before every step, even one that cannot take the step. It does not wait:
        the answers arrive while the shard is computed.
        """
        weight = notice.n_rows * notice.mean_weight
        numbers = [
            float(failure is not None),
            float(notice.n_rows),
            weight,
            weight * float(notice.volume),
            float(notice.signal),
            float(notice.report and self.is_first),
        ]
        self._announced = (*self._begin_gathering(numbers), failure)
        self._notice = None

    def receive_notice(self, notice: Notice) -> Notice:
        """Return the facts about the whole batch, or ``notice`` if none was announced.

        Raise the failure of any rank.
        """
        self._wait_for_notice()
        return self._notice or notice

    def _wait_for_notice(self) -> None:
        """Wait for announced facts, before anything that needs all ranks."""
        if self._announced is None:
            return
        (gathered, request, failure), self._announced = self._announced, None
        with self.sending():
            request.wait()
        if any(gathered[:, 0]):
            self._raise(failure)
        totals = gathered[:, 1:4].sum(dim=0) / self.components.group.size
        rows, weights, volumes = totals.tolist()
        self._notice = Notice(
            n_rows=round(rows),
            mean_weight=weights / rows if rows else 1.0,
            volume=volumes / weights if weights else 0.0,
            signal=int(gathered[:, 4].max()),
            report=bool(gathered[0, 5]),
        )

    # Contributions

    def reduce(self, contribution: T, parameters: Parameters, *, by_owner: bool = False) -> T:
        """Add the contributions of all shards of a batch; their memory is reused.

        The parameters are of the components of this rank. With ``by_owner``, sums of single
        components are left to ``step_by_owner``, but cover all components that any shard touched.
        Where some shards have `LatentSums`, all are converted.
        """
        found: Any = contribution
        if self.data.size == 1 or hasattr(found, "rows"):
            # Every rank has read all of the rows that are kept for seeding.
            return contribution
        if not isinstance(found, Statistics):
            known = {name: t for name, t in found._asdict().items() if t is not None}
            added = self._add_along_data(list(known.values()))
            return found._replace(**dict(zip(known, added, strict=True)))  # type: ignore[no-any-return]
        sums, K = found.sums, len(parameters.means)
        on_cpu = parameters.means.device.type == "cpu"
        # Only on the CPU is the number of touched components known without waiting for the device.
        used = parameters.means.new_zeros(K if on_cpu else 0)
        used[slice(None) if sums.touched is None else sums.touched] = 1
        latent = used.new_full((1,), float(isinstance(sums, LatentSums)))
        *totals, used, latent = self._add_along_data([*found.totals, used, latent])
        if on_cpu and bool(latent):
            sums = sums.to_latent(parameters)
        touched = used.nonzero()[:, 0]
        everything = not on_cpu or len(touched) == K
        sums = sums.spread_to_all(K) if everything else sums.spread(touched)
        if not by_owner:
            added = self._add_along_data(list(sums.tensors.values()))
            sums = sums.replace(sums.touched, **dict(zip(sums.tensors, added, strict=True)))
        result: Any = found.replace_totals(totals)._replace(sums=sums)
        return result  # type: ignore[no-any-return]

    def _add_along_data(self, tensors: list[Tensor]) -> list[Tensor]:
        """Add tensors over the shards of the data, small ones in one message."""
        tensors = [t.contiguous() for t in tensors]
        small = [t for t in tensors if t.numel() <= SMALL_MESSAGE]
        message = torch.cat([t.reshape(-1) for t in small])
        large = [t for t in tensors if t.numel() > SMALL_MESSAGE]
        group = self.data.handle
        with self.sending(message, *large):
            requests = [dist.all_reduce(t, group=group, async_op=True) for t in (*large, message)]
            for request in requests:
                request.wait()
        cut = torch.split(message, [t.numel() for t in small])
        added = iter([part.view(t.shape) for part, t in zip(cut, small, strict=True)])
        return [t if t.numel() > SMALL_MESSAGE else next(added) for t in tensors]

    def sum_stepped(self, tensor: Tensor) -> Tensor:
        """Add tensors over all ranks, each of which steps components of its own."""
        if self.data.size > 1:
            (tensor,) = self._add_along_data([tensor])
        return self.components.sum(tensor)

    # Decisions

    def agree(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the first rank with the same components; shapes are equal.

        Processors of different kinds round differently, and decisions must rest on the same numbers
        everywhere.
        """
        if self.data.size == 1:
            return tensor
        return self._broadcast_(tensor.clone(memory_format=torch.contiguous_format), self.data)

    def run_together(self, work: Callable[[], T]) -> T:
        """Run work that may fail on some ranks; all ranks then raise the same error."""
        return work() if self.is_single else self._try_together(work)[0]

    def any_true(self, work: Callable[[], bool]) -> bool:
        """Run work as ``run_together`` does, and return whether it is true on any rank."""
        return work() if self.is_single else self._try_together(work)[1]

    def _try_together(self, work: Callable[[], T]) -> tuple[T, bool]:
        """Return the result of this rank, and whether the result is true on any rank."""
        found, failure = None, None
        try:
            found = work()
        except RankLost:
            raise
        except (InputError, OSError, TypeError) as error:
            failure = error
        gathered, request = self._begin_gathering([failure is not None, found is True])
        with self.sending():
            request.wait()
        if any(gathered[:, 0]):
            self._raise(failure)
        result: Any = found
        return result, bool(gathered[:, 1].any())

    @contextmanager
    def first_rank_only(self) -> Iterator[None]:
        """Mark a block that runs on the first rank alone: it may not call the others."""
        self._on_first_only = not self.is_single
        try:
            yield
        finally:
            self._on_first_only = False

    def broadcast(self, value: T) -> T:
        """Return the plain value of the first rank."""
        return value if self.is_single else self._gather_objects(value)[0]

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of the first rank; shapes are equal everywhere."""
        if self.is_single:
            return list(tensors)
        copies = [t.detach().to("cpu", copy=True).contiguous() for t in tensors]
        found = [self._broadcast_(copy, self.world) for copy in copies]
        return [t.to(old.device) for t, old in zip(found, tensors, strict=True)]

    def _broadcast_(self, tensor: Tensor, group: Group) -> Tensor:
        """Overwrite a contiguous tensor by the tensor of the first rank of a group."""
        plain = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        with self.sending(plain):
            dist.broadcast(plain, group.ranks[0], group.handle)
        return tensor

    def check_same(self, value: object, message: str) -> None:
        """Raise the message unless all ranks have the same plain value."""
        if not self.is_single and len(set(self._gather_objects(value))) > 1:
            raise InputError(message)

    @contextmanager
    def sending(self, *tensors: Tensor) -> Iterator[None]:
        """Count time and bytes of messages, and explain an error when a rank has ended."""
        started = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            raise RankLost(
                "another process of this run has ended, and the others cannot go on without it: its"
                " own message says why; begin again, or go on from the last checkpoint."
            ) from error
        self.seconds += time.perf_counter() - started
        self.bytes += sum(t.numel() * t.element_size() for t in tensors)

    def _begin_gathering(self, numbers: list[float]) -> tuple[Tensor, Any]:
        """Return memory for the numbers of each rank, (ranks, n), and the request that fills it."""
        self._check_all_ranks()
        own = torch.tensor(numbers, dtype=torch.float64)
        gathered = own.new_empty(self.world.size, len(numbers))
        with self.sending(own):
            request = dist.all_gather(list(gathered), own, self.world.handle, async_op=True)
        return gathered, request

    def _gather_objects(self, value: T) -> list[T]:
        self._check_all_ranks()
        found: list[Any] = [None] * self.world.size
        with self.sending():
            dist.all_gather_object(found, value, self.world.handle)
        return found

    def _raise(self, failure: Exception | None) -> None:
        """Raise the failure of the first rank that has one, on all ranks."""
        texts = self._gather_objects(
            None if failure is None else (type(failure).__name__, str(failure))
        )
        rank = next(i for i, one in enumerate(texts) if one is not None)
        kind, text = texts[rank] or ("", "")
        alike = all(one == texts[rank] for one in texts)
        place = "" if alike else f" (in process {rank} of {len(texts)})"
        raise (TypeError if kind == "TypeError" else InputError)(text + place) from failure

    def _check_all_ranks(self) -> None:
        if self._on_first_only:
            raise InputError(
                "this needs all processes, and callbacks are called in the first one alone: give"
                " the callback an attribute every_process = True, and it is called in all."
            )


class ComponentPlacement:
    """Which rank has which components, and how components move between ranks.

    The components of all ranks stand in one line, the first rank's first, divided evenly: the first
    ranks may have one more. Vectors of one number per component are gathered whole, so that every
    rank decides the same; components themselves are sent only if they move.
    """

    def __init__(self, communicator: Communicator, group: Group) -> None:
        self._communicator = communicator
        self.group = group
        self.counts: list[int] = []
        """Components of each rank, where they are divided."""

    @property
    def divided(self) -> bool:
        """Whether ranks have different components."""
        return self.group.size > 1

    @property
    def local_slice(self) -> slice:
        """The place of the components of this rank in the line; everything on a single rank."""
        if not self.divided:
            return slice(None)
        edges = [0, *accumulate(self.counts)]
        return slice(edges[self.group.rank], edges[self.group.rank + 1])

    @property
    def exchange(self) -> Exchange | None:
        """The link to ranks with other components; None where this rank has all."""
        if not self.divided:
            return None
        return Exchange(self.gather_from_ranks, self.group.rank, max(self.counts))

    def count(self, here: int) -> int:
        """Return the number of components on all ranks, of which this rank has ``here``."""
        return sum(self.counts) if self.divided else here

    def local_count(self, n: int) -> int:
        """Return how many of n components this rank has."""
        return self.counts[self.group.rank] if self.divided else n

    def assign(self, n: int) -> None:
        """Divide n components among the ranks."""
        if not self.divided:
            return
        if n < self.group.size:
            raise InputError(
                f"{n} components cannot be divided among {self.group.size} processes: use fewer"
                " processes along the components, or more components."
            )
        ranks = self.group.size
        self.counts = [n // ranks + (i < n % ranks) for i in range(ranks)]

    def gather_from_ranks(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks with other components, (R, ...), of equal shapes."""
        if not self.divided:
            return tensor.unsqueeze(0)
        communicator = self._communicator
        communicator._check_all_ranks()
        communicator._wait_for_notice()
        if tensor.dtype == torch.bool:
            return self.gather_from_ranks(tensor.to(torch.uint8)).bool()
        tensor = tensor.contiguous()
        found = tensor.new_empty(self.group.size, *tensor.shape)
        with communicator.sending(tensor):
            dist.all_gather(list(found), tensor, self.group.handle)
        return found

    def gather(self, vector: Tensor) -> Tensor:
        """Return the vector (n,), or rows (n, m), of the components of all ranks, (K, ...)."""
        vector = self._communicator.agree(vector)
        return self.concatenate(vector, self.counts) if self.divided else vector

    def gather_weights(self, logits: Tensor) -> Tensor:
        """Return pi of all components, (K,), from the logits of this rank.

        The result may differ between ranks by a rounding, so no decision may rest on it.
        """
        if self.divided:
            return torch.softmax(self.concatenate(logits, self.counts), dim=0)
        return torch.log_softmax(logits, dim=0).exp()

    def concatenate(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Concatenate rows of all ranks, each of which has its count of them."""
        if not self.divided:
            return rows
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = self.gather_from_ranks(padded)
        return torch.cat([part[:n] for part, n in zip(gathered, counts, strict=True)])

    def concatenate_selected(self, rows: Tensor, selected: Tensor) -> Tensor:
        """Concatenate the rows of the selected components (K,) of all ranks."""
        if not self.divided:
            return rows
        counts = [int(part.sum()) for part in torch.split(selected, self.counts)]
        return self.concatenate(rows, counts)

    def sum(self, tensor: Tensor) -> Tensor:
        """Add tensors over the ranks with other components."""
        return self.gather_from_ranks(tensor).sum(dim=0) if self.divided else tensor

    def log_sum(self, log_values: Tensor, logits: Tensor) -> Tensor:
        """Combine log-densities (B, ...) under normalised weights over ranks, up to a constant."""
        if not self.divided:
            return log_values
        # Weights are normalised among the components of a rank.
        return self.gather_from_ranks(log_values + logits.logsumexp(dim=0)).logsumexp(dim=0)

    def is_nearest(self, distances: Tensor) -> Tensor | None:
        """Return the rows (B,) whose least distance is on this rank; None for all rows."""
        if not self.divided:
            return None
        return self.gather_from_ranks(distances).argmin(dim=0) == self.group.rank

    def select(self, vector: Tensor) -> Tensor:
        """Return the entries of a vector of all components, (K, ...), that this rank has."""
        return vector[self.local_slice] if self.divided else vector

    def cut(self, tensors: Tensors) -> Tensors:
        """Return copies for the components of this rank of tensors of all, (K, ...) each."""
        if not self.divided:
            return tensors
        place, make = self.local_slice, type(tensors)
        return make(*(t[place].clone(memory_format=torch.preserve_format) for t in tensors))

    def to_local(self, numbers: Tensor) -> Tensor:
        """Return the local numbers of the components (n,) of the line that are on this rank."""
        if not self.divided:
            return numbers
        place = self.local_slice
        local: Tensor = numbers[(numbers >= place.start) & (numbers < place.stop)] - place.start
        return local

    def match_targets(self, source: Tensor, target: Tensor) -> Tensor:
        """Order targets (n,) so that many are on the rank of their source (n,)."""
        if not self.divided:
            return target
        owners = self._owners()
        free = list[list[int]]([] for _ in self.counts)
        for number in target.tolist():
            free[int(owners[number])].append(number)
        chosen = [
            free[owner].pop() if free[owner] else -1 for owner in owners[source.cpu()].tolist()
        ]
        rest = iter([number for left in free for number in left])
        return torch.tensor([n if n >= 0 else next(rest) for n in chosen], device=target.device)

    def grow(self, components: Components, n: int) -> tuple[Components, Tensor]:
        """Append n empty components, and return their numbers in the line, (n,)."""
        if not self.divided:
            k = len(components.weight)
            return components.append_empty(n), torch.arange(
                k, k + n, device=components.weight.device
            )
        before = self.counts
        self.assign(sum(before) + n)
        rank = self.group.rank
        components = components.append_empty(self.counts[rank] - before[rank])
        lines = torch.split(torch.arange(sum(self.counts)), self.counts)
        new = torch.cat([line[old:] for line, old in zip(lines, before, strict=True)])
        return components, new.to(components.weight.device)

    def keep(self, components: Components, numbers: Tensor) -> tuple[Components, Tensor | None]:
        """Keep the components of rising numbers (n,) in the line, divided evenly again.

        Return also the local numbers of components that may have come from other ranks.
        """
        if not self.divided:
            return components.take(numbers), None
        before = self.counts
        self.assign(len(numbers))
        after, self.counts = self.counts, before
        found = self._fetch(components, list(torch.split(numbers.cpu(), after)))
        self.counts = after
        return found, torch.arange(len(found.weight), device=found.weight.device)

    def fetch_sources(self, components: Tensors, source: Tensor, target: Tensor) -> Tensors:
        """Return copies of the sources (n,) whose targets (n,) are on this rank."""
        if not self.divided:
            return type(components)(*(t[source] for t in components))
        owners = self._owners()[target.cpu()].to(source.device)
        return self._fetch(components, [source[owners == rank] for rank in range(self.group.size)])

    def _fetch(self, components: Tensors, wanted: list[Tensor]) -> Tensors:
        """Return copies of the components that this rank wants, in its order.

        ``wanted`` has for each rank the numbers in the line, (n,), which all ranks know.
        """
        rank, owners, place = self.group.rank, self._owners(), self.local_slice
        own, device = wanted[rank].cpu(), components[0].device
        found = type(components)(*(t.new_empty(len(own), *t.shape[1:]) for t in components))
        # The numbers here that each rank gets, and the places of the components that it sends.
        leaving, arriving = list[Tensor](), list[Tensor]()
        for other, theirs in enumerate(one.cpu() for one in wanted):
            leaving.append((theirs[owners[theirs] == rank] - place.start).to(device))
            arriving.append((owners[own] == other).nonzero()[:, 0].to(device))
        for t, new in zip(components, found, strict=True):
            new[arriving[rank]] = t[leaving[rank]]
        leaving[rank], arriving[rank] = leaving[rank][:0], arriving[rank][:0]
        index, at = torch.cat(leaving), torch.cat(arriving)
        sizes = [t[:1].numel() for t in components]
        pairs = zip(components, sizes, strict=True)
        message = torch.cat([t[index].reshape(len(index), size) for t, size in pairs], dim=1)
        space = message.new_empty(len(at), message.shape[1])
        counts = [len(one) for one in arriving], [len(one) for one in leaving]
        with self._communicator.sending(message):
            dist.all_to_all_single(space, message, *counts, self.group.handle)
        for new, part in zip(found, torch.split(space, sizes, dim=1), strict=True):
            new[at] = part.reshape(len(at), *new.shape[1:])
        return found

    def _owners(self) -> Tensor:
        """Return the rank of each component of the line, (K,)."""
        return torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))


SINGLE = Communicator()
"""A rank that has all rows and all components."""
