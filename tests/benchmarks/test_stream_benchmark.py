"""The stream benchmark: its files, its measurements and its page, at small sizes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import stream
from harness import Result, Trial
from stream_trials import KINDS, MEMORY, make_blocks, run_drift, write_rows

from factormix.data.readers import read_rows

pytest.importorskip("pyarrow")


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_files_hold_the_same_rows(kind, tmp_path):
    path = write_rows(kind, tmp_path, 450, 6, files=3, block_rows=100)
    assert write_rows(kind, tmp_path, 450, 6, files=3) == path, "written once"
    got = np.concatenate([batch.rows for batch in read_rows(path).blocks(64)])
    expected = np.concatenate(list(make_blocks(450, 6, block_rows=100)))
    np.testing.assert_array_equal(np.sort(got, axis=0), np.sort(expected, axis=0))
    assert got.dtype == np.float32


def options(tmp_path: Path) -> argparse.Namespace:
    sizes = {"bytes": 1 << 20, "limit": 0, "seconds": 0.1, "repeats": 1, "batches": 200}
    return argparse.Namespace(**sizes, scratch=tmp_path / "scratch", components=(3, 2))


@pytest.mark.slow
def test_every_trial_is_measured_and_written(tmp_path):
    small = options(tmp_path)
    trials = stream.plan(small)
    kinds = ["speed"] * 20 + ["endless"] * 2 + ["drift"] * 4
    assert [trial.experiment for trial in trials] == kinds
    measured = []
    for trial in [*trials[:5], *trials[20:]]:
        sizes = {"features": 6, "factors": 1, "batch_size": 32}
        settings = {**trial.settings, **sizes, "rows": 3000, "epochs": 10_000}
        found = trial.run(settings, None)
        shown = Trial(trial.experiment, trial.name, settings, trial.run)
        measured.append(stream.Measured(Result(shown, found.values), found.arrays))
    speeds = [one["rows_per_second"] for one in measured[:5]]
    assert min(speeds) > 0
    looks = measured[5].arrays["looks"]
    assert looks.shape == (100, 5)
    assert looks[-1, 0] == 200
    assert looks[:, 4].sum() == 0, "invariants"
    page = tmp_path / "stream.md"
    stream.save(measured, len(trials), small, page, tmp_path / "figures")
    text = page.read_text()
    assert "15 of 26 trials are not finished" in text
    for words in (
        "| 3 | all | memory |",
        "| parquet lists |",
        "200 batches of partial_fit",
        "forgetting",
    ):
        assert words in text
    assert len(list((tmp_path / "figures").glob("*.png"))) == 3


def test_forgetting_follows_a_drift(tmp_path):
    settings = {"features": 4, "components": 2, "factors": 1, "batch_size": 32, "batches": 400}
    last = [
        run_drift({**settings, "reach": 30.0, "forgetting": rate}, None).values["last"]
        for rate in (None, 0.1)
    ]
    assert last[0] < last[1]


def test_memory_is_compared_with_all_kinds_of_files():
    assert MEMORY not in KINDS


def test_a_limit_on_memory_is_counted_and_removed(tmp_path):
    code = f"""
from memory_limit import limit_memory
with limit_memory({700 << 20}) as limit:
    print(limit.how)
    if limit.how.startswith("cgroup"):
        held = bytearray(300 << 20)
        print(limit.peak() > 300 << 20)
        held = None
    else:
        print(True)
    try:
        if limit.how == "RLIMIT_DATA":
            bytearray(800 << 20)
    except MemoryError:
        print("too much")
import os
from pathlib import Path
print(f"factormix-{{os.getpid()}}" in Path("/proc/self/cgroup").read_text())
"""
    benchmarks = Path(stream.__file__).parent
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=benchmarks, check=True
    )
    assert run.stdout.split()[-1] == "False", "the process is back in its own group"
    assert "True" in run.stdout, "memory is counted"
