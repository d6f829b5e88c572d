"""The shares of a batch are the batch, whatever the rows lie in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import BatchShard
from factormix.data.sources.files import FileRows


def source(kind: str, folder: Path, weighted: bool) -> ArrayRows | FileRows:
    """Make 1,003 rows that are their own numbers."""
    table = np.arange(2006.0).reshape(1003, 2)
    weights = np.arange(1003.0) % 3 if weighted else None
    if kind == "array":
        return ArrayRows(table, weights=weights)
    np.save(folder / "rows.npy", table)
    # So small a buffer that a pass takes several.
    return FileRows(folder / "rows.npy", weights=weights, buffer_bytes=1 << 12)


@pytest.mark.parametrize("kind", ["array", "file"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("size", [5, 100, 2000])
def test_shares_of_a_batch_are_the_batch(
    tmp_path: Path, kind: str, weighted: bool, count: int, size: int
):
    rows = source(kind, tmp_path, weighted)
    order = {"seed": 1, "epoch": 2, "start": 1 if size < 1000 else 0}
    parts = [BatchShard(rows, i, count).shuffled(size, **order) for i in range(count)]
    for whole, *shares in zip(rows.shuffled(size, **order), *parts, strict=True):
        weights = [np.ones(len(s)) if s.weights is None else np.asarray(s.weights) for s in shares]
        found = np.concatenate([s.rows[w > 0, 0] for s, w in zip(shares, weights, strict=True)])
        np.testing.assert_array_equal(np.sort(found), np.sort(whole.rows[:, 0]))
        if weighted:
            np.testing.assert_array_equal(found // 2 % 3, np.concatenate(weights)[
                np.concatenate(weights) > 0])  # fmt: skip


def test_a_share_of_a_file_is_about_its_part(tmp_path: Path):
    rows = source("file", tmp_path, False)
    sizes = [[len(batch) for batch in BatchShard(rows, i, 2).shuffled(250, seed=0, epoch=0)]
             for i in range(2)]  # fmt: skip
    assert np.all(np.abs(np.array(sizes)[:, :-1] - 125) < 40)
