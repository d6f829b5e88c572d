"""The benchmark on missing values: its data, its page, and a quick run."""

from __future__ import annotations

from pathlib import Path

import missing
import numpy as np
import pytest
from harness import Result, Trial


def result(trial: Trial, **values: float) -> Result:
    return Result(trial, values)


def test_the_recipe_is_judged_on_other_tables_than_it_was_chosen_on():
    assert len(set(missing.TABLES)) == 10
    assert not set(missing.TABLES) & set(missing.TUNING_TABLES)


def test_rows_are_split_and_standardised_by_the_training_rows():
    train, new = missing.split_table("wine", 100, 0)
    assert (len(train), len(new)) == (66, 34)
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(train.std(axis=0), 1)
    assert abs(new.mean()) > 1e-3


def test_the_error_of_the_mean_is_the_standard_deviation():
    (trial,) = missing.plan_imputation(["wine"], ["mean"], 150, 0)
    found = trial.run(trial.settings, None).values
    assert found["rmse"] == pytest.approx(1, abs=0.2)
    (trial,) = missing.plan_imputation(["wine"], ["KNNImputer"], 150, 0)
    assert trial.run(trial.settings, None).values["rmse"] < found["rmse"]


def test_the_page_follows_the_results():
    plan = missing.plan_imputation(
        ["wine", "diabetes"], [missing.OURS, "mean", "MissForest"], 100, 0
    )
    common = {"features": 3, "training_rows": 66}
    errors = {missing.OURS: 0.9, "mean": 1.0, "MissForest": 0.8}
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
    for trial, score in zip(missing.plan_images(100, 1, 0), (800.0, 790.0, 100.0), strict=True):
        results.append(result(trial, score=score, seconds=1.0, training_rows=100))
    text = missing.compose_page(results, 12, {"cores": "2"})
    assert "3 of 12 trials are not finished" in text
    assert "is **not** below the errors of all others: 0.900 against 0.800" in text
    assert "15 times faster" in text
    assert "hold 90.0% of the 200 entries" in text
    assert "within 1.25% of complete training (at most 2%)" in text
    assert "88% below" in text


@pytest.mark.slow
def test_a_quick_run_is_complete_and_reuses_finished_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing.main(["--quick", "-o", str(tmp_path)])
    assert capsys.readouterr().out.count("done") == 6
    text = (tmp_path / "missing.md").read_text()
    assert "| wine |" in text
    assert "not finished" not in text
    missing.main(["--quick", "-o", str(tmp_path)])
    assert "done" not in capsys.readouterr().out
