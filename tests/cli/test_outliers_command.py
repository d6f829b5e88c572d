"""``factormix outliers``: real files, exit codes, and reasons."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import factormix
from factormix import MFAOutlierDetector
from factormix.cli import run
from factormix.data.readers import read_rows
from factormix.estimators.ensemble import NOVELTY, WorkingRows, train_mixture


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A .csv file of 400 rows, the last of which is strange in the column glucose."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    age = rng.uniform(20, 80, size=400)
    rows = np.column_stack([age, 90 + age + 9 * rng.normal(size=400), rng.normal(60, 9, size=400)])
    rows[-1] = [50.0, 312.0, 60.0]
    path = tmp_path / "patients.csv"
    np.savetxt(path, rows, delimiter=",", header="age,glucose,weight", comments="")
    return path


def call(command: str) -> int:
    return run(command.split())


def read(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_detector_judges_its_training_rows(table, capsys):
    command = "outliers d.safetensors patients.csv --fit -q -o out.csv --explain --random-state 0"
    assert call(command) == 0
    rows = read("out.csv")
    assert [int(row["row"]) for row in rows] == list(range(400))
    assert list(rows[0]) == ["row", "score", "tail_probability", "outlier", "reason"]
    assert rows[-1]["outlier"] == "1"
    # 140 ± 9 in truth.
    assert re.match(r"glucose is 312\.0 where 1[34]\d\.\d ± [89]\.\d", rows[-1]["reason"])
    assert all(row["reason"] == "" for row in rows if row["outlier"] == "0")
    detector = factormix.load("d.safetensors")
    X = np.loadtxt(table, delimiter=",", skiprows=1)
    with pytest.warns(UserWarning, match="feature names"):
        scores = detector.score_samples(X)
    np.testing.assert_allclose([float(row["score"]) for row in rows], scores, rtol=1e-6)
    assert min(range(400), key=lambda i: scores[i]) == 399
    assert capsys.readouterr().out == ""


def test_the_device_reaches_the_training(table):
    Path("few.csv").write_text("".join(table.read_text().splitlines(keepends=True)[:40]))
    rows = read_rows("few.csv")
    assert MFAOutlierDetector(novelty=True, device="cpu").fit(rows).device == "cpu"
    with pytest.raises(factormix.InputError, match=r"device must be .* not 'meta'"):
        MFAOutlierDetector(device="meta").fit(rows)
    # Meta tensors have no values to train on: the error shows that their device is used.
    empty = WorkingRows(torch.zeros(20, 3, device="meta"))
    with pytest.raises(factormix.InputError, match=r"device must be .*meta"):
        train_mixture(NOVELTY.kinds[0], empty, 0, "float32", 10)


def test_novelty_then_new_rows_with_a_table_of_reasons(table, capsys):
    fit = (
        "outliers d.safetensors patients.csv --fit --novelty --contamination 0.05 --random-state 0"
    )
    assert call(fit) == 0
    assert "trained on 400 rows" in capsys.readouterr().out
    Path("new.csv").write_text("age,glucose,weight\n50,140,60\n50,140,160\n")
    command = "outliers d.safetensors new.csv -o out.csv --reasons why.csv --top 2"
    assert call(command) == 0
    assert [row["outlier"] for row in read("out.csv")] == ["0", "1"]
    reasons = read("why.csv")
    assert [row["row"] for row in reasons] == ["1", "1"]
    assert reasons[0]["feature"] == "weight"
    assert float(reasons[0]["z_score"]) > 5
    assert call("info d.safetensors") == 0
    assert "outlier detector" in capsys.readouterr().out
    assert call("info d.safetensors --json") == 0


def test_a_plain_mixture_finds_outliers_too(table, capsys):
    # Trained on the strange row too, a mixture would explain it.
    Path("clean.csv").write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    assert call("train clean.csv -o m.safetensors --n-components 2 -q --random-state 0") == 0
    assert call("outliers m.safetensors patients.csv -o all.csv --explain") == 0
    rows = read("all.csv")
    assert list(rows[0]) == ["row", "score", "reason"]
    assert all(row["reason"] for row in rows)
    command = "outliers m.safetensors patients.csv -o some.csv --explain --contamination 0.01"
    assert call(command) == 0
    called = [row for row in read("some.csv") if row["outlier"] == "1"]
    assert len(called) == 4
    assert called[-1]["row"] == "399"
    assert "4 of them outliers" in capsys.readouterr().out


def test_the_screen_is_the_default_output(table, capsys):
    assert call("outliers d.safetensors patients.csv --fit --novelty -q --random-state 0") == 0
    assert capsys.readouterr().out == ""
    assert call("outliers d.safetensors patients.csv") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "row,score,tail_probability,outlier"
    assert len(lines) == 401


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("outliers d.safetensors no.csv --fit", "no.csv"),
        ("outliers no.safetensors patients.csv", "no such file"),
        ("outliers patients.csv patients.csv", "not a complete factormix model"),
        ("outliers d.npz patients.csv --fit", "unknown ending"),
        ("outliers d.safetensors patients.csv --fit -o out.txt", "unknown ending"),
        ("outliers d.safetensors patients.csv --fit --contamination 0.9", "up to 0.5"),
        ("outliers d.safetensors patients.csv --fit --scoring best", "scoring must be one of"),
        ("outliers d.safetensors patients.csv --novelty", "--novelty is for training"),
        ("outliers d.safetensors patients.csv --random-state 1", "--random-state is for training"),
        ("outliers d.safetensors patients.csv --fit -o a.csv --reasons a.csv", "both OUT and"),
        ("outliers d.safetensors bad.csv --fit", "bad.csv"),
        ("outliers d.safetensors few.csv --fit", "n_samples=2"),
        ("outliers d.safetensors patients.csv --fit --top 0", "--top"),
        ("outliers d.safetensors none.csv --fit --device tpu9", "device must be a torch device"),
        ("outliers d.safetensors none.csv --fit --device meta", "device must be a torch device"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_no_file(table, capsys, command, message):
    Path("bad.csv").write_text("a,b\n1,2\n3,inf\n4,5\n6,7\n8,9\n")
    Path("few.csv").write_text("a,b\n1,2\n3,4\n")
    before = sorted(Path().iterdir())
    assert call(command) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert sorted(Path().iterdir()) == before


def test_other_commands_say_that_a_detector_is_no_mixture(table, capsys):
    assert call("outliers d.safetensors patients.csv --fit --novelty -q") == 0
    for command in ("score d.safetensors patients.csv", "sample d.safetensors -n 3 -o s.npy"):
        assert call(command) == 2
        assert "MFAOutlierDetector" in capsys.readouterr().err
    assert not Path("s.npy").exists()
