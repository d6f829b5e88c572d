"""Batches from shuffle buffers, reading ahead, and the shards of a batch."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import BatchShard
from factormix.data.sources.files import FileRows
from factormix.data.sources.shards import ShardedRows


class Slow:
    """A shard of 5 rows, which may wait or fail before its last ones are read."""

    n_rows, first, direct, name = 5, 0, False, "slow"

    def __init__(self, number: int, wait=lambda: None) -> None:
        self._number, self._wait = number, wait

    def open(self, first: int):
        def fill(out: np.ndarray) -> None:
            nonlocal first
            self._wait()
            out[:] = 5 * self._number + np.arange(first, first + len(out))[:, None]
            first += len(out)

        return fill


@pytest.mark.parametrize("batch_size", [3, 7, 100])
def test_batches_continue_over_buffers_with_their_weights(batch_size):
    rows = ShardedRows([Slow(i) for i in range(4)], 2, np.dtype(float), buffer_bytes=80)
    rows = rows.with_weights(np.arange(20.0) % 5)
    served = list(rows.shuffled(batch_size, seed=0, epoch=0))
    assert [len(batch) for batch in served][:-1] == [batch_size] * (15 // batch_size)
    numbers = np.concatenate([batch.rows[:, 1] for batch in served])
    assert sorted(numbers) == [n for n in range(20) if n % 5]
    np.testing.assert_array_equal(np.concatenate([b.weights for b in served]), numbers % 5)


def test_a_buffer_is_filled_while_the_one_before_is_served():
    started, go_on, calls = threading.Event(), threading.Event(), []

    def wait() -> None:
        calls.append(1)
        if len(calls) > 2:
            started.set()
            assert go_on.wait(60)

    rows = ShardedRows([Slow(i, wait) for i in range(4)], 2, np.dtype(float), buffer_bytes=80)
    batches = rows.shuffled(2, seed=0, epoch=0)
    next(batches)
    assert started.wait(60), "the second buffer is filled while batches of the first are left"
    go_on.set()
    assert sum(map(len, batches)) == 18


def test_an_error_of_a_buffer_keeps_its_place_and_threads_end():
    def fail() -> None:
        raise OSError("gone")

    before = set(threading.enumerate())
    # One shard in a buffer; of two orders of the shards, one begins with the good one.
    rows = ShardedRows([Slow(0), Slow(1, fail)], 2, np.dtype(float), buffer_bytes=80)
    counts = set()
    for seed in range(8):
        served = list[int]()
        with pytest.raises(OSError, match="gone"):
            served.extend(len(batch) for batch in rows.shuffled(2, seed=seed, epoch=0))
        counts.add(sum(served))
    assert counts == {0, 4}
    left = ShardedRows([Slow(0), Slow(1)], 2, np.dtype(float), buffer_bytes=80)
    batches = left._draw(left._fill_buffers(2, [0], 0), 2)
    next(batches)
    batches.close()
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
