"""The commands on tables with missing values: train, score, impute."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from factormix import MFA, MFAImputer, load
from factormix.cli import run

RNG = np.random.default_rng(0)
X = np.array([[0, 0, 10], [8, -8, 30]])[RNG.integers(2, size=300)] + RNG.normal(size=(300, 3))
GAPS = np.where(RNG.random(X.shape) < 0.25, np.nan, X)
FRAME = pd.DataFrame(GAPS, columns=["a", "b", "c d"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("impute")
    FRAME.to_csv(folder / "gaps.csv", index=False)
    command = ["train", str(folder / "gaps.csv"), "-o", str(folder / "m.safetensors")]
    assert run([*command, "--n-components", "2", "--random-state", "0", "--max-epochs", "20"]) == 0
    return folder / "m.safetensors"


def written(kind, folder):
    """Write the table with its gaps as a file of some kind."""
    path = folder / f"data.{kind}"
    if kind == "csv":
        FRAME.to_csv(path, index=False)
    elif kind == "parquet":
        FRAME.to_parquet(path, index=False)
    else:
        np.save(path, GAPS)
    return path


@pytest.mark.parametrize("out", ["csv", "npy", "parquet"])
@pytest.mark.parametrize("kind", ["csv", "npy", "parquet"])
def test_every_kind_of_file_is_filled_in(model, kind, out, tmp_path, capsys):
    target = tmp_path / f"out.{out}"
    assert run(["impute", str(model), str(written(kind, tmp_path)), "-o", str(target)]) == 0
    expected = load(model).impute(FRAME)
    if out == "npy":
        found = np.load(target)
    else:
        read = pd.read_parquet(target) if out == "parquet" else pd.read_csv(target)
        # Rows without names have those of the model.
        assert list(read.columns) == list(FRAME.columns)
        found = read.to_numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    # What was there is written as it was.
    np.testing.assert_array_equal(found[~np.isnan(GAPS)], GAPS[~np.isnan(GAPS)])
    missing = int(np.isnan(GAPS).sum())
    assert f"300 rows, {missing} of 900 values filled in" in capsys.readouterr().out


def test_draws_and_intervals(model, tmp_path):
    data, fitted = written("csv", tmp_path), load(model)
    for out in ("draws.csv", "draws.parquet", "draws.npy"):
        command = ["impute", str(model), str(data), "-o", str(tmp_path / out), "--n-draws", "3"]
        assert run([*command, "--random-state", "5"]) == 0
    fitted.set_params(random_state=5)
    expected = fitted.impute(FRAME, n_draws=3)
    np.testing.assert_allclose(np.load(tmp_path / "draws.npy"), expected)
    for table in (pd.read_csv(tmp_path / "draws.csv"), pd.read_parquet(tmp_path / "draws.parquet")):
        assert list(table.columns) == ["row", "draw", "a", "b", "c d"]
        assert (table["row"].to_numpy() == np.repeat(np.arange(300), 3)).all()
        second = table[table["draw"] == 1].drop(columns=["row", "draw"]).to_numpy()
        np.testing.assert_allclose(second, expected[1])
    for out in ("ends.csv", "ends.npy"):
        command = ["impute", str(model), str(data), "-o", str(tmp_path / out), "--interval", "0.9"]
        assert run(command) == 0
    found = fitted.impute(FRAME, interval=0.9)
    table = pd.read_csv(tmp_path / "ends.csv")
    assert list(table.columns[3:]) == [
        *("a_lower", "b_lower", "c d_lower"),
        *("a_upper", "b_upper", "c d_upper"),
    ]
    np.testing.assert_allclose(table.to_numpy(), np.hstack([found.mean, found.lower, found.upper]))
    np.testing.assert_allclose(np.load(tmp_path / "ends.npy")[2], found.upper)


def test_scores_of_rows_with_gaps(model, tmp_path):
    assert (
        run(["score", str(model), str(written("csv", tmp_path)), "-o", str(tmp_path / "s.csv")])
        == 0
    )
    scores = pd.read_csv(tmp_path / "s.csv")["log_likelihood"]
    np.testing.assert_allclose(scores, load(model).score_samples(FRAME), rtol=1e-7)


def test_what_is_wrong_gets_one_sentence_and_no_file(model, tmp_path, capsys):
    data = written("csv", tmp_path)
    out = tmp_path / "out.csv"
    out.write_text("old")
    cases = [
        ([str(model), str(data), "-o", str(tmp_path / "out.txt")], "unknown ending"),
        ([str(model), str(data), "-o", str(data)], "is both input and output"),
        ([str(model), str(data), "-o", str(out), "--interval", "2"], "between 0 and 1"),
        (
            [str(model), str(data), "-o", str(out), "--interval", "0.5", "--n-draws", "2"],
            "exclude each other",
        ),
        ([str(model), str(tmp_path / "none.csv"), "-o", str(out)], "does not exist"),
    ]
    for arguments, words in cases:
        assert run(["impute", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    (tmp_path / "bad.csv").write_text("a,b,c d\n1,2,inf\n")
    assert run(["impute", str(model), str(tmp_path / "bad.csv"), "-o", str(out)]) == 2
    assert out.read_text() == "old"
    empty = tmp_path / "never.parquet"
    pd.DataFrame({"a": [1.0, 2.0] * 20, "b": np.nan}).to_parquet(empty)
    assert run(["train", str(empty), "-o", str(tmp_path / "n.safetensors")]) == 2
    assert "no value in column 'b'" in capsys.readouterr().err


@pytest.fixture
def awkward(tmp_path):
    """A table whose columns have the names of those that draws add."""
    frame = FRAME.set_axis(["row", "draw", "row_lower"], axis=1)
    frame.to_csv(tmp_path / "awkward.csv", index=False)
    MFA(2, 1, random_state=0, max_epochs=5).fit(frame).save(tmp_path / "m.safetensors")
    return tmp_path


def test_columns_that_are_called_row_keep_their_values(awkward):
    arguments = [str(awkward / "m.safetensors"), str(awkward / "awkward.csv")]
    assert run(["impute", *arguments, "-o", str(awkward / "out.parquet")]) == 0
    found = pd.read_parquet(awkward / "out.parquet")["row"].to_numpy()
    there = ~np.isnan(GAPS[:, 0])
    np.testing.assert_array_equal(found[there], GAPS[there, 0])


@pytest.mark.parametrize("option", [["--n-draws", "2"], ["--interval", "0.9"]])
def test_names_that_would_come_twice_are_one_sentence(awkward, option, capsys):
    arguments = [str(awkward / "m.safetensors"), str(awkward / "awkward.csv")]
    assert run(["impute", *arguments, "-o", str(awkward / "out.csv"), *option]) == 2
    assert "which impute would add: rename it" in capsys.readouterr().err
    assert not (awkward / "out.csv").exists()
    assert run(["impute", *arguments, "-o", str(awkward / "out.npy"), *option]) == 0


def test_the_file_of_an_imputer_fills_in_and_is_described(tmp_path, capsys):
    imputer = MFAImputer(random_state=0, max_epochs=5).fit(FRAME)
    imputer.save(tmp_path / "i.safetensors")
    FRAME.to_csv(tmp_path / "gaps.csv", index=False)
    command = ["impute", str(tmp_path / "i.safetensors"), str(tmp_path / "gaps.csv"), "-o"]
    assert run([*command, str(tmp_path / "out.csv")]) == 0
    expected = imputer.transform(FRAME)
    np.testing.assert_allclose(pd.read_csv(tmp_path / "out.csv"), expected, rtol=1e-9)
    capsys.readouterr()
    assert run(["info", str(tmp_path / "i.safetensors")]) == 0
    assert "imputer" in capsys.readouterr().out
