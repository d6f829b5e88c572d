"""Reading ahead: what comes next is fetched while somebody works on what is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["read_ahead"]

T = TypeVar("T")


def read_ahead(items: Generator[T], depth: int = 2) -> Iterator[T]:
    """Yield what a generator yields, ``depth`` items of which are made in a thread beforehand.

    The order is that of the generator, and what it raises is raised in its place. The generator is
    closed, and the thread gone, when the caller has had enough.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="factormix-read-ahead")
    end = object()
    # A single thread takes them one after the other, in the order in which they are asked for.
    coming = deque(pool.submit(next, items, end) for _ in range(depth))
    try:
        while (item := coming.popleft().result()) is not end:
            coming.append(pool.submit(next, items, end))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        items.close()
