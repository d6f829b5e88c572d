"""``factormix compare``: two model files side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from clusters import X, fitted
from factormix import reading
from factormix.cli import run


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


def test_lines_for_people(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "three.safetensors", "one.safetensors", "--data", "rows.npy"]) == 0
    facts = dict(re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
    assert facts["first"].startswith("3 components, 2 factors")
    assert float(facts["difference"].split()[0]) > 0
    assert facts["KL(first || second)"].endswith("nats")
    assert facts["components"].startswith("1 pairs, median distance")


def test_json_has_what_the_library_gives(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["three.safetensors", "one.safetensors"]
    assert run(["compare", *files, "--data", "rows.csv", "--json", "-n", "500"]) == 0
    facts = json.loads(capsys.readouterr().out)
    models = fitted(solver="natural"), fitted(solver="natural", n_components=1)
    expected = reading.compare(*models, X, n_samples=500)
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
def test_bad_input_gets_one_sentence(
    arguments: str, expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"factormix: .*\n", error), error
    assert expected in error
