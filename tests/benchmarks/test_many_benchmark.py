"""The benchmark of very many components: a small run of every part in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "many.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_a_small_run_of_every_part_writes_the_page(tmp_path):
    rng = np.random.default_rng(0)
    for name, n in (("train", 2000), ("val", 200), ("test", 200)):
        np.save(tmp_path / f"{name}.npy", rng.normal(size=(n, 20)).astype("f4"))
    parts = ["--quick", "--parts", "steps,images,race,stream,patches", "--patches", str(tmp_path)]
    done = run(*parts, "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "many.md").read_text()
    for heading in (
        "A step and scoring", "Held-out likelihood", "One pass", "A long stream", "Image patches",
    ):  # fmt: skip
        assert heading in page
    assert (tmp_path / "out" / "figures" / "many-steps.png").stat().st_size > 1000
    # What is finished is not run again.
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "many").rglob("*.json")}
    assert before
    assert run(*parts, "-o", str(tmp_path / "out")).returncode == 0
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_wrong_options_are_turned_down(tmp_path):
    for wrong in (["--parts", "speed"], ["--parts", "patches"], ["--quick", "--write-docs"]):
        done = run(*wrong, "-o", str(tmp_path))
        assert done.returncode == 2
        assert not list(tmp_path.iterdir())
