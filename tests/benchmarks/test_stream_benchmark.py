"""The benchmark of streams: what it makes, measures and writes, in small."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import stream
from streamed import endless, files, speed

from factormix.data.readers import read_rows
from factormix.studies.harness import Result, Trial

pytest.importorskip("pyarrow")


@pytest.mark.parametrize("kind", files.KINDS)
def test_all_kinds_hold_the_same_rows(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 100)
    path = files.write(kind, tmp_path, 450, 6, files=3)
    assert files.write(kind, tmp_path, 450, 6, files=3) == path, "made once"
    got = np.concatenate([batch.rows for batch in read_rows(path).blocks(64)])
    expected = np.concatenate(list(files.blocks(450, 6)))
    np.testing.assert_array_equal(np.sort(got, axis=0), np.sort(expected, axis=0))
    assert got.dtype == np.float32


def options(tmp_path: Path) -> argparse.Namespace:
    sizes = {"bytes": 1 << 20, "limit": 0, "seconds": 0.3, "repeats": 1, "batches": 200}
    return argparse.Namespace(**sizes, scratch=tmp_path / "scratch")


def test_every_trial_is_measured_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "COMPONENTS", (3, 2))
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


def test_what_follows_a_drift_is_nearer_to_the_truth(tmp_path):
    settings = {"features": 4, "components": 2, "factors": 1, "batch_size": 32, "batches": 400}
    last = [
        endless.run_drift({**settings, "reach": 30.0, "forgetting": rate}, None).values["last"]
        for rate in (None, 0.1)
    ]
    assert last[0] < last[1]


def test_the_speed_from_memory_has_a_place():
    assert speed.MEMORY not in files.KINDS


def test_a_limit_on_memory_counts_and_ends(tmp_path):
    code = f"""
from streamed import limits
with limits.limited({700 << 20}) as limit:
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
    assert run.stdout.split()[-1] == "False", "it is back where it was"
    assert "True" in run.stdout, "what it holds is counted"
