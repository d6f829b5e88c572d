"""The benchmark on missing values: what it measures, what it writes, a quick run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from incomplete import images, page, tables  # noqa: E402

from factormix.studies.harness import Result, Trial  # noqa: E402


def result(trial: Trial, **values: float) -> Result:
    return Result(trial, values)


def test_no_table_judges_a_recipe_that_was_chosen_on_it():
    assert len(set(tables.TABLES)) == 10
    assert not set(tables.TABLES) & set(tables.CHOSEN_ON)


def test_rows_are_split_and_standardised_by_the_training_rows():
    train, new = tables.split("wine", 100, 0)
    assert (len(train), len(new)) == (66, 34)
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(train.std(axis=0), 1)
    assert abs(new.mean()) > 1e-3


def test_the_error_of_the_mean_is_the_spread_of_new_rows():
    (trial,) = tables.trials(["wine"], ["mean"], 150, 0)
    found = trial.run(trial.settings, None).values
    assert found["rmse"] == pytest.approx(1, abs=0.2)
    (trial,) = tables.trials(["wine"], ["KNNImputer"], 150, 0)
    assert trial.run(trial.settings, None).values["rmse"] < found["rmse"]


def test_the_page_says_what_was_found_whatever_it_is():
    plan = tables.trials(["wine", "diabetes"], [tables.OURS, "mean", "MissForest"], 100, 0)
    common = {"features": 3, "training_rows": 66}
    errors = {tables.OURS: 0.9, "mean": 1.0, "MissForest": 0.8}
    results = [
        result(
            trial,
            rmse=errors[trial.settings["method"]],
            seconds=30.0 if trial.settings["method"] == "MissForest" else 2.0,
            held=90,
            missing=100,
            **common,
        )
        for trial in plan
    ]
    for trial, score in zip(images.trials(100, 1, 0), (800.0, 790.0, 100.0), strict=True):
        results.append(result(trial, score=score, seconds=1.0, training_rows=100))
    text = page.compose(results, 12, {"cores": "2"})
    assert "3 of 12 trials are not finished" in text
    assert "is **not** below that of all others: 0.900 against 0.800" in text
    assert "15 times faster" in text
    assert "hold 90.0% of the 200 entries" in text
    assert "within 1.25% of complete training (at most 2%)" in text
    assert "88% below" in text


@pytest.mark.slow
def test_a_quick_run_is_whole_and_goes_on_where_it_was(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "missing.py"),
        "--quick",
        "-o",
        str(tmp_path),
    ]
    first = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert first.stdout.count("done") == 6
    text = (tmp_path / "missing.md").read_text()
    assert "| wine |" in text
    assert "not finished" not in text
    second = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "done" not in second.stdout
