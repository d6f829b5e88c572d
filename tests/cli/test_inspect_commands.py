"""``factormix info`` and ``compare``, and commands on the file of a classifier."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_iris

from clusters import X, fitted
from factormix import MFAClassifier, inspection
from factormix.cli import run
from launching import check_one_sentence

IRIS, SPECIES = load_iris(return_X_y=True)
NAMES = np.array(["setosa", 'versicolor, or "blue"', "virginica"])[SPECIES]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    fitted(solver="natural").save("three.safetensors")
    fitted(solver="natural", n_components=1).save("one.safetensors")
    fitted(X[:, :3], n_factors=1).save("narrow.safetensors")
    np.save("rows.npy", X)
    np.save("wide.npy", np.hstack([X, X]))
    pd.DataFrame(X).to_csv("rows.csv", index=False)
    return tmp_path


def test_compare_prints_lines(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "three.safetensors", "one.safetensors", "--data", "rows.npy"]) == 0
    facts = dict(re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
    assert facts["first"].startswith("3 components, 2 factors")
    assert float(facts["difference"].split()[0]) > 0
    assert facts["KL(first || second)"].endswith("nats")
    assert facts["components"].startswith("1 pairs, median distance")


def test_compare_as_json_equals_the_library(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["three.safetensors", "one.safetensors"]
    assert run(["compare", *files, "--data", "rows.csv", "--json", "-n", "500"]) == 0
    facts = json.loads(capsys.readouterr().out)
    models = fitted(solver="natural"), fitted(solver="natural", n_components=1)
    expected = inspection.compare(*models, X, n_samples=500)
    assert facts["difference"]["mean"] == pytest.approx(expected.difference.mean, rel=1e-5)
    assert facts["divergence"]["mean"] == pytest.approx(expected.divergence.mean, rel=1e-5)
    assert run(["compare", *files, "--json", "-n", "100"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("three.safetensors none.safetensors", "none.safetensors: no such file"),
        ("three.safetensors narrow.safetensors", "the first model has 6 features"),
        ("three.safetensors one.safetensors --data wide.npy", "wide.npy has 12 features"),
        ("three.safetensors one.safetensors -n 1", "'--n-samples'"),
        ("three.safetensors rows.npy", "not a complete factormix model"),
    ],
)
def test_bad_input_of_compare_gets_one_sentence(
    arguments: str, expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_one_sentence(f"compare {arguments}", expected, capsys)


@pytest.fixture
def classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MFAClassifier:
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", IRIS)
    model = MFAClassifier(1, 2, reject=0.05, random_state=0).fit(IRIS, NAMES)
    model.save("c.safetensors")
    return model


def test_info_on_a_classifier(
    classifier: MFAClassifier, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", "c.safetensors"]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("class setosa"))
    assert "1 components, prior 0.333, factors: 2 per component, 0." in line
    assert "0.05 of the training rows, by ratio" in out
    assert run(["info", "c.safetensors", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [one["label"] for one in facts["classes"]] == classifier.classes_.tolist()


def test_scores_of_a_classifier(classifier: MFAClassifier) -> None:
    assert run(["score", "c.safetensors", "rows.npy", "-o", "s.csv"]) == 0
    with open("s.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == classifier.predict(IRIS).tolist()
    np.testing.assert_allclose(
        [float(row["log_likelihood"]) for row in rows], classifier.score_samples(IRIS), rtol=1e-7
    )


@pytest.mark.parametrize(
    "command", ["sample c.safetensors -o s.npy", "train rows.npy -o c.safetensors --resume"]
)
def test_commands_for_mixtures_refuse_a_classifier(
    command: str, classifier: MFAClassifier, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command.split()) == 2
    assert "c.safetensors holds an MFAClassifier, and this command" in capsys.readouterr().err
