"""Processes that train one mixture together, and what they tell each other.

They stand on a mesh of two axes. Along "data" each has a share of the rows of every batch and the
same components; contributions are summed. Along "components" each has some of the components and
sees the same rows; what their components say of a row is gathered. Whatever decides, such as a
random draw or a clock, does so in one process, and the others are told.

A process that is alone goes through the same code, and nothing is sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from factormix.core.parameters import Parameters
from factormix.core.statistics import LatentSums, Statistics
from factormix.errors import InputError

T = TypeVar("T")
SMALL = 1 << 14
"""Numbers of a tensor up to which it shares a message with others."""


class ProcessLost(InputError):
    """Say that another process has gone and the run cannot go on."""


class Notice(NamedTuple):
    """What all processes know of a step before it is taken."""

    n_rows: int
    """Rows of the batch, of all shares."""
    mean_weight: float
    """Their mean weight."""
    volume: float | Tensor
    """The mean volume of units that they do not have; see ``loop``."""
    number: int = 0
    """The signal that asks for the end of the run, if any came."""
    tick: bool = False
    """Whether it is time to tell how the run stands."""


class Group(NamedTuple):
    """Processes along an axis of the mesh."""

    size: int = 1
    place: int = 0
    """That of this process among them."""
    handle: Any = None
    ranks: tuple[int, ...] = (0,)


class _Numbers:
    """A few numbers on their way to all processes."""

    def __init__(
        self, group: Group, numbers: list[float], failure: Exception | None = None
    ) -> None:
        self.mine = torch.tensor(numbers, dtype=torch.float64)
        self.failure = failure
        """Why this process cannot go on, if it cannot."""
        self._each = self.mine.new_empty(group.size, len(numbers))
        self._work: Any = dist.all_gather(list(self._each), self.mine, group.handle, async_op=True)

    def wait(self) -> Tensor:
        """Return what each process has, (processes, n), in float64."""
        self._work.wait()
        return self._each


class Processes:
    """This process among all that train a mixture."""

    def __init__(
        self,
        everybody: Group | None = None,
        data: Group | None = None,
        components: Group | None = None,
    ) -> None:
        self.everybody = everybody or Group()
        """All of them, by messages that lie on the CPU."""
        self.data = data or Group()
        self.components = components or Group()
        self.counts: list[int] = []
        """Components that each process along their axis has, where they are divided."""
        self.seconds = 0.0
        """Time spent in telling and waiting."""
        self.bytes = 0
        """What this process has sent, to each other one once."""
        self.leading = False
        """Whether only the first process does what is under way."""
        self._announced: _Numbers | None = None
        """What is being told of the next step, until somebody needs the answer."""
        self._notice: Notice | None = None

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.everybody.size == 1

    @property
    def first(self) -> bool:
        """Whether this is the one that reports and writes."""
        return self.everybody.place == 0

    @property
    def divided(self) -> bool:
        """Whether this process has some of the components only."""
        return self.components.size > 1

    def summed(self, contribution: T, parameters: Parameters, *, in_parts: bool = False) -> T:
        """Add the contributions of all shares of a batch; their memory is reused.

        The parameters are of the components of this process. With ``in_parts``, sums of single
        components are left to ``data.stepped``, but are of all components that any share touched.
        Where some shares have `LatentSums`, all are converted.
        """
        found: Any = contribution
        if self.data.size == 1 or hasattr(found, "rows"):
            # Every process has read all of the rows that are kept for seeding.
            return contribution
        if not isinstance(found, Statistics):
            known = {name: t for name, t in found._asdict().items() if t is not None}
            added = self._sums(list(known.values()))
            return found._replace(**dict(zip(known, added, strict=True)))  # type: ignore[no-any-return]
        sums, K = found.sums, len(parameters.means)
        some = parameters.means.device.type == "cpu"
        # The number of touched components is known without waiting for the device on the CPU alone.
        used = parameters.means.new_zeros(K if some else 0)
        used[slice(None) if sums.touched is None else sums.touched] = 1
        latent = used.new_full((1,), float(isinstance(sums, LatentSums)))
        *totals, used, latent = self._sums([*found.totals, used, latent])
        if some and bool(latent):
            sums = sums.to_latent(parameters)
        touched = used.nonzero()[:, 0]
        everything = not some or len(touched) == K
        sums = sums.spread_to_all(K) if everything else sums.spread(touched)
        if not in_parts:
            added = self._sums(list(sums.tensors.values()))
            sums = sums.replace(sums.touched, **dict(zip(sums.tensors, added, strict=True)))
        result: Any = found.replace_totals(totals)._replace(sums=sums)
        return result  # type: ignore[no-any-return]

    def _sums(self, tensors: list[Tensor]) -> list[Tensor]:
        """Add tensors over the shares of the data, small ones in one message."""
        tensors = [t.contiguous() for t in tensors]
        small = [t for t in tensors if t.numel() <= SMALL]
        message = torch.cat([t.reshape(-1) for t in small])
        large = [t for t in tensors if t.numel() > SMALL]
        group = self.data.handle
        with self.telling(message, *large):
            under_way = [dist.all_reduce(t, group=group, async_op=True) for t in (*large, message)]
            for work in under_way:
                work.wait()
        cut = torch.split(message, [t.numel() for t in small])
        told = iter([part.view(t.shape) for part, t in zip(cut, small, strict=True)])
        return [t if t.numel() > SMALL else next(told) for t in tensors]

    def agreed(self, tensor: Tensor) -> Tensor:
        """Return what the first of those with the same components has; shapes are the same.

        Processors of different kinds round differently, and what decides must be the same number
        everywhere.
        """
        if self.data.size == 1:
            return tensor
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        plain = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        with self.telling(plain):
            dist.broadcast(plain, self.data.ranks[0], self.data.handle)
        return tensor

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return what those with other components have too, (R, ...), of the same shape each."""
        if not self.divided:
            return tensor.unsqueeze(0)
        self._check_all_here()
        self._heed()
        if tensor.dtype == torch.bool:
            return self.gathered(tensor.to(torch.uint8)).bool()
        tensor = tensor.contiguous()
        found = tensor.new_empty(self.components.size, *tensor.shape)
        with self.telling(tensor):
            dist.all_gather(list(found), tensor, self.components.handle)
        return found

    def announce(self, notice: Notice, failure: Exception | None = None) -> None:
        """Begin to tell of a share of a batch: ``noticed`` says what holds for all.

        Every process calls it before every step, also one that cannot take the step. Nobody waits:
        the others' answers arrive while the share is computed.
        """
        self._check_all_here()
        weight = notice.n_rows * notice.mean_weight
        mine = [float(failure is not None), float(notice.n_rows), weight,
                weight * float(notice.volume), float(notice.number),
                float(notice.tick and self.first)]  # fmt: skip
        with self.telling():
            self._announced = _Numbers(self.everybody, mine, failure)
        self._notice = None

    def noticed(self, notice: Notice) -> Notice:
        """Return what holds for all of them, or this notice where none was announced.

        Raise the failure of any.
        """
        self._heed()
        return self._notice or notice

    def _heed(self) -> None:
        """Wait for what the others announced, before anything that needs all of them."""
        if self._announced is None:
            return
        under_way, self._announced = self._announced, None
        with self.telling(under_way.mine):
            told = under_way.wait()
        if any(told[:, 0]):
            self._raise(under_way.failure)
        rows, weights, volumes = (told[:, 1:4].sum(dim=0) / self.components.size).tolist()
        self._notice = Notice(
            n_rows=round(rows),
            mean_weight=weights / rows if rows else 1.0,
            volume=volumes / weights if weights else 0.0,
            number=int(told[:, 4].max()),
            tick=bool(told[0, 5]),
        )

    def together(self, work: Callable[[], T]) -> T:
        """Do what may fail in some of the processes; then all of them raise the same sentence."""
        return work() if self.alone else self._tried(work)[0]

    def any_of(self, work: Callable[[], bool]) -> bool:
        """Do so and tell whether it is true in any process."""
        return work() if self.alone else self._tried(work)[1]

    def _tried(self, work: Callable[[], T]) -> tuple[T, bool]:
        """Return what work finds here, and whether it finds in any process what is true."""
        found, failure = None, None
        try:
            found = work()
        except ProcessLost:
            raise
        except (InputError, OSError, TypeError) as error:
            failure = error
        told = self._gathered_numbers([float(failure is not None), float(found is True)])
        if any(told[:, 0]):
            self._raise(failure)
        result: Any = found
        return result, bool(told[:, 1].any())

    @contextmanager
    def only_first(self) -> Iterator[bool]:
        """Tell whether this process does what the first one does alone, in this block."""
        self.leading = not self.alone
        try:
            yield self.first
        finally:
            self.leading = False

    def any(self, flag: bool) -> bool:
        """Tell whether a flag is set in any process."""
        return flag if self.alone else bool(self._gathered_numbers([float(flag)]).any())

    def same(self, value: T) -> T:
        """Return what the first process has: a plain value."""
        return value if self.alone else self._objects(value)[0]

    def each(self, value: T) -> list[T]:
        """Return what each process has: a plain value."""
        return [value] if self.alone else self._objects(value)

    def check_same(self, value: object, message: str) -> None:
        """Check that all processes have the same plain value, or raise the message."""
        if not self.alone and len(set(self._objects(value))) > 1:
            raise InputError(message)

    def same_tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what the first process has: tensors of the same shapes everywhere."""
        if self.alone:
            return list(tensors)
        found = [t.detach().to("cpu", copy=True).contiguous() for t in tensors]
        with self.telling(*found):
            for tensor in found:
                plain = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
                dist.broadcast(plain, self.everybody.ranks[0], self.everybody.handle)
        return [t.to(old.device) for t, old in zip(found, tensors, strict=True)]

    def _gathered_numbers(self, numbers: list[float]) -> Tensor:
        """Return what each process has, (processes, n), in float64."""
        self._check_all_here()
        with self.telling():
            told = _Numbers(self.everybody, numbers)
        with self.telling(told.mine):
            return told.wait()

    def _objects(self, value: T) -> list[T]:
        self._check_all_here()
        found: list[Any] = [None] * self.everybody.size
        with self.telling():
            dist.all_gather_object(found, value, self.everybody.handle)
        return found

    def _raise(self, failure: Exception | None) -> None:
        """Raise the failure of the first process that has one, in all of them."""
        told = self._objects(None if failure is None else (type(failure).__name__, str(failure)))
        where = next(i for i, one in enumerate(told) if one is not None)
        kind, text = told[where] or ("", "")
        alike = all(one == told[where] for one in told)
        place = "" if alike else f" (in process {where} of {len(told)})"
        raise (TypeError if kind == "TypeError" else InputError)(text + place) from failure

    def _check_all_here(self) -> None:
        if self.leading:
            raise InputError(
                "this needs all processes, and callbacks are called in the first one alone: give"
                " the callback an attribute every_process = True, and it is called in all."
            )

    @contextmanager
    def telling(self, *tensors: Tensor) -> Iterator[None]:
        """Count time and bytes of messages, and say in one sentence that a process has gone."""
        begun = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            raise ProcessLost(
                "another process of this run has ended, and the others cannot go on without it: its"
                " own message says why; begin again, or go on from the last checkpoint."
            ) from error
        self.seconds += time.perf_counter() - begun
        self.bytes += sum(t.numel() * t.element_size() for t in tensors)


ALONE = Processes()
"""A process that has all rows and all components."""
