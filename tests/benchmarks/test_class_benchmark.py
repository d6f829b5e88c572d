"""The benchmark of classes: a small run in real processes, and what its page says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import classes

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / "classes.py"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.slow
def test_a_quick_run_writes_page_and_picture(tmp_path: Path) -> None:
    done = run_script("--quick", "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "classes.md").read_text()
    assert "digits (8 x 8)" in page
    assert "failed" not in done.stdout
    assert (tmp_path / "classes.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "classes" / "judge" / "digits.json").read_text())
    choices = [
        json.loads(path.read_text()) for path in (tmp_path / "classes" / "choose").glob("*.json")
    ]
    best = max(choices, key=lambda choice: choice["values"]["accuracy"])
    accuracy = best["values"]["accuracy"]
    same = {c["settings"]["floor"] for c in choices if c["values"]["accuracy"] == accuracy}
    assert found["settings"]["floor"] in same
    assert found["values"]["accuracy"] > 0.9
    again = run_script("--quick", "--no-run", "-o", str(tmp_path))
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "classes.md").read_text() == page


def test_quick_runs_are_not_for_the_docs(tmp_path: Path) -> None:
    done = run_script("--quick", "--write-docs", "-o", str(tmp_path))
    assert done.returncode == 2
    assert "too small for the docs" in done.stderr


def test_the_curve_is_accuracy_on_what_is_left() -> None:
    wrong = np.array([1, 0, 1, 0, 0, 0, 0, 0, 0, 0], dtype=np.uint8)
    found = {"wrong": wrong, **{by: np.arange(10.0) for by in classes.labelled.MEASURES}}
    axes = classes.draw({"mnist": found}).axes[0]
    line = next(line for line in axes.lines if line.get_label() == "by margin")
    expected = [100 * (1 - wrong[n:].mean()) for n in range(5)]
    np.testing.assert_allclose(line.get_ydata(), expected)
    np.testing.assert_allclose(line.get_xdata(), [0, 10, 20, 30, 40])
