"""Batches from shuffle buffers, reading ahead, and the shards of a batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import BatchShard
from factormix.data.sources.files import FileRows
from factormix.data.sources.shuffle import AHEAD_BYTES, Buffer, draw_batches


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("batch_size", [3, 7, 100])
@pytest.mark.parametrize("row_bytes", [8, 1 << 20], ids=["inline", "ahead"])
def test_batches_continue_over_buffers_with_their_weights(slow, batch_size, row_bytes):
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
    started, go_on = threading.Event(), threading.Event()

    def buffers() -> Iterator[Buffer]:
        yield Buffer(np.zeros((4, 1)), np.arange(4), None)
        started.set()
        assert go_on.wait(60)
        yield Buffer(np.ones((4, 1)), np.arange(4), None)

    batches = draw_batches(buffers(), 2, 8, row_bytes=8, slow=True)
    next(batches)
    assert started.wait(60), "the second buffer is filled while batches of the first are left"
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
    assert taken.wait(60), "a whole buffer is drawn as batches while one of them is used"
    assert sum(1 for _ in batches) == 2 * rows - 2


def test_an_error_of_a_buffer_keeps_its_place_and_threads_end():
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


def make_rows(kind: str, folder: Path, weighted: bool) -> ArrayRows | FileRows:
    """Make 1,003 rows whose first column gives their number."""
    table = np.arange(2006.0).reshape(1003, 2)
    weights = np.arange(1003.0) % 3 if weighted else None
    if kind == "array":
        return ArrayRows(table, weights=weights)
    np.save(folder / "rows.npy", table)
    # The buffer is so small that a pass takes several.
    return FileRows(folder / "rows.npy", weights=weights, buffer_bytes=1 << 12)


@pytest.mark.parametrize("kind", ["array", "file"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("count", "size"), [(2, 100), (3, 2000), (7, 5), (7, 100)])
def test_the_shards_of_a_batch_are_the_batch(
    tmp_path: Path, kind: str, weighted: bool, count: int, size: int
):
    rows = make_rows(kind, tmp_path, weighted)
    order = {"seed": 1, "epoch": 2, "start": 1 if size < 1000 else 0}
    parts = [BatchShard(rows, i, count).shuffled(size, **order) for i in range(count)]
    for whole, *shards in zip(rows.shuffled(size, **order), *parts, strict=True):
        weights = [np.ones(len(s)) if s.weights is None else np.asarray(s.weights) for s in shards]
        found = np.concatenate([s.rows[w > 0, 0] for s, w in zip(shards, weights, strict=True)])
        np.testing.assert_array_equal(np.sort(found), np.sort(whole.rows[:, 0]))
        if weighted:
            together = np.concatenate(weights)
            np.testing.assert_array_equal(found // 2 % 3, together[together > 0])


def test_a_shard_of_a_file_has_about_its_part_of_each_batch(tmp_path: Path):
    rows = make_rows("file", tmp_path, False)
    shards = [BatchShard(rows, i, 2).shuffled(250, seed=0, epoch=0) for i in range(2)]
    sizes = np.array([[len(batch) for batch in shard] for shard in shards])
    assert np.all(np.abs(sizes[:, :-1] - 125) < 40)
