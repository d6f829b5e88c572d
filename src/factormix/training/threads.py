"""Worker threads that sleep while they wait.

Torch's own threads spin while they wait for each other. Beside a busy process, or under a CPU
quota, they take many times as long as one thread, and their products differ in the last digits with
their number. So torch works in one thread here, and large work is cut by rows into parts, each
computed by a thread of a pool. The cut depends on the sizes and the number of threads alone, never
on the clock: the same seed on the same machine gives the same result, whatever else runs.

A number of threads that the user has chosen is respected: with ``OMP_NUM_THREADS`` or
``MKL_NUM_THREADS`` set, or after ``torch.set_num_threads``, torch uses that number and nothing is
cut.

Workers live as long as the process. A thread that ends frees its buffers under a lock of MKL's
allocator, and a child forked at that moment would wait for the lock forever. A fork waits until all
workers are idle, and the child starts workers of its own when it needs them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import chain, islice, pairwise
from typing import TypeVar

import torch

from factormix.core.parameters import without_autocast

WORK_PER_THREAD = 100_000_000
"""Multiply-adds that are worth a thread: a few milliseconds of matrix products."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables by which a user chooses the number of threads."""

T = TypeVar("T")
Item = TypeVar("Item")


@contextmanager
def use_threads() -> Iterator[Threads]:
    """Give the calling thread its workers, and restore torch's number of threads at the end.

    Nested blocks share their workers. A block inside a worker has none. Workers would not know of
    ``torch.autocast``, so the calling thread leaves it too.
    """
    with without_autocast():
        if _current.threads is not None:
            yield _current.threads
            return
        with _shared.lock:
            first = _shared.users == 0
            chosen = first and _is_chosen_by_user()
            if first:
                _shared.torch_threads = torch.get_num_threads()
            if not chosen:
                _shared.users += 1
        if chosen:
            yield Threads(1)
            return
        torch.set_num_threads(1)
        _current.threads = Threads(_shared.torch_threads)
        try:
            yield _current.threads
        finally:
            _current.threads = None
            with _shared.lock:
                _shared.users -= 1
                # Each thread has its own number.
                torch.set_num_threads(_shared.torch_threads)


class Threads:
    """Compute parts of the same work at the same time, each in one thread of torch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def cut_rows(self, n_rows: int, work: float) -> list[slice]:
        """Cut rows into parts for ``map``, where all rows together take ``work`` multiply-adds."""
        n = int(max(1, min(self.size, work // WORK_PER_THREAD, n_rows)))
        edges = [n_rows * i // n for i in range(n + 1)]
        return [slice(*pair) for pair in pairwise(edges)]

    def map(self, function: Callable[[Item], T], parts: Sequence[Item]) -> list[T]:
        """Compute a function of every part at the same time, without gradients."""
        if self.size == 1 or len(parts) == 1:
            return [function(part) for part in parts]
        mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad
        # The calling thread computes the first part.
        others = [self._submit(mode, function, part) for part in parts[1:]]
        try:
            return [function(parts[0]), *(other.result() for other in others)]
        finally:
            _finish(others)

    def stream(self, function: Callable[[Item], T], items: Iterable[Item]) -> Iterator[T]:
        """Yield a function of each item in order, reading a few items ahead, without gradients."""
        remaining = iter(items)
        first = list(islice(remaining, 2))
        if self.size == 1 or len(first) < 2:
            yield from map(function, chain(first, remaining))
            return
        pending: deque[Future[T]] = deque()
        try:
            for item in chain(first, remaining):
                pending.append(self._submit(torch.no_grad, function, item))
                # One more than there are threads, so that none waits while the next item is read.
                if len(pending) > self.size:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            _finish(pending)

    @contextmanager
    def lend_to_torch(self) -> Iterator[None]:
        """Let torch use all threads in a block whose work cannot be cut."""
        if self.size == 1:
            yield
            return
        torch.set_num_threads(self.size)
        try:
            yield
        finally:
            torch.set_num_threads(1)

    def _submit(
        self,
        mode: Callable[[], AbstractContextManager[None]],
        function: Callable[[Item], T],
        item: Item,
    ) -> Future[T]:
        def compute() -> T:
            # The mode of the calling thread does not reach the workers.
            with mode():
                return function(item)

        try:
            return _shared.start_workers(self.size).submit(compute)
        except RuntimeError:
            # No thread can be started, or the interpreter is shutting down.
            done: Future[T] = Future()
            done.set_result(compute())
            return done


def _finish(futures: Iterable[Future[T]]) -> None:
    """Drop work that nobody waits for, and wait for the rest."""
    wait([future for future in futures if not future.cancel()])


class _Current(threading.local):
    """The workers of the block that a thread is in."""

    threads: Threads | None = None


class _Shared:
    """What all threads of a process share: torch's number of threads, and the workers."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        """Threads inside ``use_threads``."""
        self.torch_threads = 1
        """Number of torch's threads before the first of them."""
        self.pools: dict[int, ThreadPoolExecutor] = {}
        self.fork = ExitStack()

    def start_workers(self, size: int) -> ThreadPoolExecutor:
        """Return a pool of ``size`` workers, which are started by the first call."""
        with self.lock:
            if size not in self.pools:
                pool = ThreadPoolExecutor(size, "factormix", initializer=_begin_worker)
                # All begin now, inside a block. A worker that sets its number of torch's threads
                # sets it for all threads that start later too.
                with _hold_idle(pool, size):
                    self.pools[size] = pool
            return self.pools[size]

    def before_fork(self) -> None:
        """Wait until all workers are idle, and keep them so."""
        self.lock.acquire()
        if _current.threads is _IN_WORKER:
            return
        for size, pool in self.pools.items():
            # Nothing can be submitted, and no worker is left, when the interpreter shuts down.
            with suppress(RuntimeError):
                self.fork.enter_context(_hold_idle(pool, size))

    def after_fork_in_parent(self) -> None:
        self.fork.close()
        self.lock.release()

    def after_fork_in_child(self) -> None:
        # No thread of the parent but the calling one is here.
        self.lock = threading.RLock()
        self.users = int(_current.threads not in (None, _IN_WORKER))
        self.pools, self.fork = {}, ExitStack()


@contextmanager
def _hold_idle(pool: ThreadPoolExecutor, size: int) -> Iterator[None]:
    """Keep all workers idle in a block, after the work that they have."""
    idle, go_on = threading.Semaphore(0), threading.Event()

    def rest() -> None:
        idle.release()
        go_on.wait()

    try:
        for _ in range(size):
            pool.submit(rest)
        for _ in range(size):
            idle.acquire()
        yield
    finally:
        go_on.set()


def _begin_worker() -> None:
    torch.set_num_threads(1)
    _current.threads = _IN_WORKER


def _is_chosen_by_user() -> bool:
    """Return whether the user has chosen torch's number of threads, or whether it is 1."""
    now = torch.get_num_threads()
    if now == 1 or any(os.environ.get(name) for name in THREAD_VARIABLES):
        return True
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    everything = os.cpu_count() or 1
    # By default there is one for each processor, or for each core of two processors.
    return now not in {visible, visible // 2, everything, everything // 2}


_IN_WORKER = Threads(1)
_current = _Current()
_shared = _Shared()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_shared.before_fork,
        after_in_parent=_shared.after_fork_in_parent,
        after_in_child=_shared.after_fork_in_child,
    )
