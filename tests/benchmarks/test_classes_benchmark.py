"""The benchmark of classes: a small run in real processes, its page and its picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import classes


@pytest.mark.slow
def test_a_quick_run_writes_page_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classes.main(["--quick", "-o", str(tmp_path)])
    page = (tmp_path / "classes.md").read_text()
    assert "digits (8 x 8)" in page
    assert "failed" not in capsys.readouterr().out
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
    classes.main(["--quick", "--no-run", "-o", str(tmp_path)])
    assert (tmp_path / "classes.md").read_text() == page


def test_the_curve_is_the_accuracy_on_the_remaining_images() -> None:
    wrong = np.array([1, 0, 1, 0, 0, 0, 0, 0, 0, 0], dtype=np.uint8)
    found = {"wrong": wrong, **{by: np.arange(10.0) for by in classes.MEASURES}}
    axes = classes.draw({"mnist": found}).axes[0]
    line = next(line for line in axes.lines if line.get_label() == "by margin")
    expected = [100 * (1 - wrong[n:].mean()) for n in range(5)]
    np.testing.assert_allclose(line.get_ydata(), expected)
    np.testing.assert_allclose(line.get_xdata(), [0, 10, 20, 30, 40])
