"""Work in several threads that sleep while they wait.

The threads of torch spin while they wait for each other, so that beside a busy process, or under a
CPU quota, they take many times as long as one thread alone; and their products differ in
the last digits with their number. So torch works in one thread here, and large work is cut by rows
into parts, each computed by a thread of our own. The cut follows from the sizes and the number of
threads alone, never from the clock: the same seed on the same machine gives the same result,
whatever else runs on it.

Whoever has chosen a number of threads keeps it: with ``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS``
set, or after ``torch.set_num_threads``, torch works in that many and nothing is cut.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice, pairwise
from typing import TypeVar

import torch

__all__ = ["Team", "team"]

LEAST_WORK = 100_000_000
"""Multiply-adds that are worth a thread of their own: a few milliseconds of matrix products."""
CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which a user chooses the number of threads."""

T = TypeVar("T")
Item = TypeVar("Item")


class Team:
    """Threads that compute parts of the same work, each in one thread of torch."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        # The caller takes a part too, where there is nothing else for it to do.
        self._pool = ThreadPoolExecutor(size, "factormix") if size > 1 else None

    def cut(self, n_rows: int, work: float) -> list[slice]:
        """Cut rows into parts for ``each``, where all of them take ``work`` multiply-adds."""
        n = int(max(1, min(self.size, work // LEAST_WORK, n_rows)))
        edges = [n_rows * i // n for i in range(n + 1)]
        return [slice(*pair) for pair in pairwise(edges)]

    def each(self, function: Callable[[Item], T], parts: list[Item]) -> list[T]:
        """Compute a function of every part at the same time, without gradients."""
        if self._pool is None or len(parts) == 1:
            return [function(part) for part in parts]
        mode = _mode()
        others = [self._pool.submit(_in_mode, mode, function, part) for part in parts[1:]]
        return [function(parts[0]), *(other.result() for other in others)]

    def stream(self, function: Callable[[Item], T], items: Iterable[Item]) -> Iterator[T]:
        """Compute a function of items as they come, in their order, a few at the same time."""
        following = iter(items)
        first = list(islice(following, 2))
        if self._pool is None or len(first) < 2:
            yield from map(function, chain(first, following))
            return
        waiting: deque[Future[T]] = deque()
        for item in chain(first, following):
            waiting.append(self._pool.submit(_in_mode, torch.no_grad, function, item))
            # One more than there are threads, so that none waits while the next item is read.
            if len(waiting) > self.size:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Let torch have all threads in a block whose work cannot be cut."""
        if self._pool is None:
            yield
            return
        torch.set_num_threads(self.size)
        try:
            yield
        finally:
            torch.set_num_threads(1)

    def close(self) -> None:
        """End the threads, after the parts that are under way."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


ALONE = Team()


class _Setting:
    """The number of torch's threads, which all threads of a process share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.before = 1

    def take(self) -> int:
        """Let torch work in one thread, and return how many it would use."""
        with self.lock:
            if self.users == 0:
                self.before = torch.get_num_threads()
            self.users += 1
        torch.set_num_threads(1)
        return self.before

    def give_back(self) -> None:
        """Restore the number of threads, which counts for each calling thread by itself."""
        with self.lock:
            self.users -= 1
            torch.set_num_threads(self.before)


class _Current(threading.local):
    team: Team | None = None


_setting = _Setting()
_current = _Current()


@contextmanager
def team() -> Iterator[Team]:
    """Give the team of this thread; torch has its number of threads back at the end of the block.

    Blocks within blocks share one team.
    """
    if _current.team is not None:
        yield _current.team
        return
    with _setting.lock:
        alone = _setting.users == 0 and _chosen()
    if alone:
        yield ALONE
        return
    _current.team = made = Team(_setting.take())
    try:
        yield made
    finally:
        _current.team = None
        made.close()
        _setting.give_back()


def _chosen() -> bool:
    """Tell whether the user has chosen how many threads torch has, or whether there is just one."""
    now = torch.get_num_threads()
    if now == 1 or any(os.environ.get(name) for name in CHOICES):
        return True
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    everything = os.cpu_count() or 1
    # By default there is one for each processor, or for each core of two processors.
    return now not in {visible, visible // 2, everything, everything // 2}


def _mode() -> Callable[[], AbstractContextManager[None]]:
    """Return the mode of torch in which the calling thread works, without gradients."""
    return torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad


def _in_mode(
    mode: Callable[[], AbstractContextManager[None]], function: Callable[[Item], T], item: Item
) -> T:
    # The mode of the calling thread does not reach the others.
    with mode():
        return function(item)
