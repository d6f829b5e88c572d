"""What the commands do with the file of a classifier."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_iris

from factormix import MFAClassifier
from factormix.cli import run

X, y = load_iris(return_X_y=True)
NAMES = np.array(["setosa", 'versicolor, or "blue"', "virginica"])[y]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MFAClassifier:
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", X)
    model = MFAClassifier(1, 2, reject=0.05, random_state=0).fit(X, NAMES)
    model.save("c.safetensors")
    return model


def test_info(here: MFAClassifier, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "c.safetensors"]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("class setosa"))
    assert "1 components, prior 0.333, factors: 2 per component, 0." in line
    assert "0.05 of the training rows, by ratio" in out
    assert run(["info", "c.safetensors", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [one["label"] for one in facts["classes"]] == here.classes_.tolist()


def test_score(here: MFAClassifier) -> None:
    assert run(["score", "c.safetensors", "rows.npy", "-o", "s.csv"]) == 0
    with open("s.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == here.predict(X).tolist()
    np.testing.assert_allclose(
        [float(row["log_likelihood"]) for row in rows], here.score_samples(X), rtol=1e-7
    )


@pytest.mark.parametrize(
    "command", ["sample c.safetensors -o s.npy", "train rows.npy -o c.safetensors --resume"]
)
def test_commands_for_mixtures_say_so(
    command: str, here: MFAClassifier, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command.split()) == 2
    assert "c.safetensors holds an MFAClassifier, and this command" in capsys.readouterr().err
