"""Batches from shuffle buffers: what is served, and what is read meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from factormix.data.sources.shuffle import AHEAD_BYTES, Buffer, draw_batches


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("batch_size", [3, 7, 100])
@pytest.mark.parametrize("row_bytes", [8, 1 << 20], ids=["inline", "ahead"])
def test_batches_go_on_over_buffers_with_their_weights(slow, batch_size, row_bytes):
    def buffers() -> Iterator[Buffer]:
        space = [np.empty((5, 2)) for _ in range(2 if slow else 1)]
        for i in range(4):
            rows = space[i % len(space)]
            rows[:] = np.arange(5 * i, 5 * i + 5)[:, None]
            yield Buffer(rows, np.array([4, 0, 3, 1]), np.arange(5.0) + 10 * i)

    served = list(draw_batches(buffers(), batch_size, 16, row_bytes=row_bytes, slow=slow))
    assert [len(rows) for rows, _ in served][:-1] == [batch_size] * (15 // batch_size)
    expected = [5 * i + j for i in range(4) for j in (4, 0, 3, 1)]
    np.testing.assert_array_equal(np.concatenate([rows[:, 1] for rows, _ in served]), expected)
    weights = [10 * i + j for i in range(4) for j in (4, 0, 3, 1)]
    np.testing.assert_array_equal(np.concatenate([weight for _, weight in served]), weights)


def test_a_slow_buffer_is_filled_while_the_one_before_is_served():
    begun, go_on = threading.Event(), threading.Event()

    def buffers() -> Iterator[Buffer]:
        yield Buffer(np.zeros((4, 1)), np.arange(4), None)
        begun.set()
        assert go_on.wait(20)
        yield Buffer(np.ones((4, 1)), np.arange(4), None)

    batches = draw_batches(buffers(), 2, 8, row_bytes=8, slow=True)
    next(batches)
    assert begun.wait(20), "filled already, of the first one there is a batch left"
    go_on.set()
    assert [float(rows[0, 0]) for rows, _ in batches] == [0, 1, 1]


def test_batches_bridge_the_filling_of_a_quick_buffer():
    taken, rows = threading.Event(), AHEAD_BYTES >> 20

    def buffers() -> Iterator[Buffer]:
        yield Buffer(np.zeros((rows, 1)), np.arange(rows), None)
        taken.set()
        yield Buffer(np.zeros((rows, 1)), np.arange(rows), None)

    batches = draw_batches(buffers(), 1, 2 * rows, row_bytes=1 << 20, slow=False)
    next(batches)
    next(batches)
    assert taken.wait(20), "a whole buffer is taken as batches while one of them is used"
    assert sum(1 for _ in batches) == 2 * rows - 2


def test_what_a_buffer_raises_comes_in_its_place_and_threads_end():
    def buffers() -> Iterator[Buffer]:
        yield Buffer(np.zeros((4, 1)), np.arange(4), None)
        raise OSError("gone")

    for slow in (True, False):
        batches = draw_batches(buffers(), 2, 8, row_bytes=1 << 20, slow=slow)
        assert len(next(batches)[0]) == len(next(batches)[0]) == 2
        with pytest.raises(OSError, match="gone"):
            next(batches)
    before = set(threading.enumerate())
    left = draw_batches(buffers(), 2, 8, row_bytes=1 << 20, slow=True)
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) <= before
