"""``factormix watch``: rows from lines or files, scores to standard output, a model that learns."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file
from tests.faulty_streams import FAULTS, NAMES, draw_ordinary

import factormix
from factormix.cli import run

X = np.random.default_rng(0).normal(size=(600, 3)) + np.array([0, 5, 10])
FRAME = pd.DataFrame(X, columns=["a", "b", "c"])


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained model, in the working folder."""
    monkeypatch.chdir(tmp_path)
    fitted = factormix.MFA(2, 1, batch_size=100, random_state=0, max_epochs=3).fit(FRAME)
    fitted.save("m.safetensors")
    return tmp_path / "m.safetensors"


def watch_text(text: str, *options: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command on a text as standard input."""
    Path("input.txt").write_text(text)
    with open("input.txt") as lines:
        monkeypatch.setattr("sys.stdin", lines)
        return run(["watch", "m.safetensors", *options])


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def json_lines(frame: pd.DataFrame) -> str:
    return "".join(json.dumps(row) + "\n" for row in frame.to_dict("records"))


TEXTS = {
    "csv with names": FRAME.to_csv(index=False),
    "csv in another order": FRAME[["c", "a", "b"]].assign(d="word").to_csv(index=False),
    "csv without names": FRAME.to_csv(index=False, header=False),
    "windows csv": FRAME.to_csv(index=False).replace("\n", "\r\n"),
    "json objects": json_lines(FRAME[["b", "c", "a"]].assign(note="x")),
    "json arrays": "".join(json.dumps(row) + "\n\n" for row in X.tolist()),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_row_is_scored_by_the_model_before_it(name, model, monkeypatch, capsys):
    by_hand = factormix.load(model)
    parts = list(factormix.stream(by_hand, FRAME))
    assert watch_text(TEXTS[name], monkeypatch=monkeypatch) == 0
    out, err = capsys.readouterr()
    rows = table(out)
    assert [int(row["row"]) for row in rows] == list(range(600))
    expected = np.concatenate([part.scores for part in parts])
    np.testing.assert_allclose([float(row["log_likelihood"]) for row in rows], expected, rtol=1e-6)
    components = np.concatenate([part.components for part in parts])
    np.testing.assert_array_equal([int(row["component"]) for row in rows], components)
    assert err == "factormix: note: 600 rows scored, 600 learned; the model is in m.safetensors\n"
    np.testing.assert_array_equal(factormix.load(model).means_, by_hand.means_)


def write_shards(folder: Path) -> Path:
    folder.mkdir()
    for i, part in enumerate(np.array_split(X, 4)):
        save_file({"x": part}, folder / f"{i}.safetensors")
    return folder


WRITERS = {
    "rows.csv": lambda path: FRAME.assign(d="word").to_csv(path, index=False),
    "rows.csv.gz": lambda path: FRAME.to_csv(path, index=False),
    "rows.jsonl": lambda path: path.write_text(json_lines(FRAME)),
    "rows.npy": lambda path: np.save(path, X),
    "rows.parquet": lambda path: FRAME[["c", "a", "b"]].to_parquet(path),
    "shards": write_shards,
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_and_folders_are_watched_as_lines_are(name, model, monkeypatch, capsys):
    if name == "rows.parquet":
        pytest.importorskip("pyarrow")
    assert watch_text(TEXTS["csv with names"], "-o", "a", monkeypatch=monkeypatch) == 0
    expected = capsys.readouterr()
    WRITERS[name](Path(name))
    assert run(["watch", "m.safetensors", name, "-o", "b"]) == 0
    found = capsys.readouterr()
    assert table(found.out) == table(expected.out)
    assert found.err == expected.err.replace(" a\n", " b\n")
    one, other = factormix.load("a"), factormix.load("b")
    np.testing.assert_array_equal(one.means_, other.means_)


def test_a_table_has_its_keys_and_times(model, capsys):
    pytest.importorskip("pyarrow")
    times = pd.date_range("2026-01-01", periods=600, freq="min")
    machines = [f"m{i}" for i in range(599)]
    FRAME.assign(machine=[*machines, None], Time=times).to_parquet("rows.parquet")
    command = ["watch", "m.safetensors", "rows.parquet", "--no-learn", "-q", "--id"]
    assert run([*command, "machine,a"]) == 0
    found = pd.read_csv(io.StringIO(capsys.readouterr().out), keep_default_na=False)
    assert list(found) == ["row", "Time", "machine", "a", "log_likelihood", "component"]
    # As in a file of lines, a cell without a value is empty.
    assert found["machine"].tolist() == [*machines, ""]
    assert found["Time"][1] == "2026-01-01 00:01:00"
    np.testing.assert_allclose(found["a"], FRAME["a"])
    assert run([*command, "x"]) == 2
    assert "--id names the column 'x', and rows.parquet has only" in capsys.readouterr().err


def test_infinite_rows_of_shards_stop_or_are_skipped(model, capsys):
    rows = X.copy()
    rows[450, 1] = np.inf
    Path("shards").mkdir()
    for i, part in enumerate(np.array_split(rows, 2)):
        np.save(f"shards/{i}.npy", part)
    assert run(["watch", "m.safetensors", "shards", "-q", "-o", "new.safetensors"]) == 2
    out, err = capsys.readouterr()
    assert "row 150, column 1" in err
    assert "; the rows with scores are learned and saved; --on-bad-row skip leaves such rows" in err
    assert err.count("\n") == 1
    assert len(table(out)) == 300
    assert factormix.load("new.safetensors").n_samples_seen_ == 1800 + 300
    assert run(["watch", "m.safetensors", "shards", "--on-bad-row", "skip"]) == 0
    out, err = capsys.readouterr()
    assert [int(row["row"]) for row in table(out)] == [i for i in range(600) if i != 450]
    assert "599 rows scored, 599 learned, 1 skipped" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.csv"], "nothing.csv does not exist"),
        (["narrow.npy"], "narrow.npy has 2 features, but MFA is expecting 3"),
        (["narrow.npy", "--format", "csv"], "--format is for lines, and narrow.npy has none"),
        (["rows.csv", "-o", "rows.csv"], "rows.csv is both input and output"),
        (["bytes.csv"], "bytes.csv cannot be read after line 0"),
    ],
)
def test_wrong_files_get_one_sentence(arguments, message, model, capsys):
    np.save("narrow.npy", X[:, :2])
    Path("rows.csv").write_text("a,b,c\n1,2,3\n")
    Path("bytes.csv").write_bytes(b"\xff\xfe\x80" * 9)
    assert run(["watch", "m.safetensors", *arguments, "-q"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_model_that_does_not_learn_stays_as_it_is(model, monkeypatch, capsys):
    before = model.read_bytes()
    assert watch_text(TEXTS["csv with names"], "--no-learn", "-q", monkeypatch=monkeypatch) == 0
    out, err = capsys.readouterr()
    assert err == ""
    scores = [float(row["log_likelihood"]) for row in table(out)]
    np.testing.assert_allclose(scores, factormix.load(model).score_samples(FRAME), rtol=1e-6)
    assert model.read_bytes() == before


def test_another_place_for_the_model(model, monkeypatch):
    before = model.read_bytes()
    assert watch_text(TEXTS["json arrays"], "-o", "new.safetensors", monkeypatch=monkeypatch) == 0
    assert model.read_bytes() == before
    assert factormix.load("new.safetensors").n_samples_seen_ == 600 + 1800


@pytest.fixture(scope="module")
def sensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the command trained on sensors without faults."""
    folder = tmp_path_factory.mktemp("sensors")
    data, model = folder / "rows.csv", folder / "m.safetensors"
    pd.DataFrame(draw_ordinary(2000, 0), columns=NAMES).to_csv(data, index=False)
    assert run(["train", str(data), "-o", str(model), "--random-state", "0", "-q"]) == 0
    return model


@pytest.mark.parametrize("options", [[], ["--no-learn"]], ids=["learning", "not learning"])
@pytest.mark.parametrize("kind", FAULTS)
def test_faults_alert_from_the_first_row_on_and_after_a_restart(
    kind, options, sensors, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copy(sensors, "m.safetensors")
    rows, faults, ordinary = FAULTS[kind](6000)
    alerts = list[bool]()
    for half in (rows[:3000], rows[3000:]):
        text = pd.DataFrame(half, columns=NAMES).to_csv(index=False)
        assert watch_text(text, "--alert", "0.001", *options, monkeypatch=monkeypatch) == 0
        out, err = capsys.readouterr()
        alerts += [row["alert"] == "1" for row in table(out)]
        assert f"{sum(alerts[-3000:]):,} alerts" in err
    assert np.mean(np.array(alerts)[faults]) > 0.95
    assert np.mean(np.array(alerts)[ordinary]) < 0.01


def test_alerts_are_not_learned_unless_asked_for(model, monkeypatch, capsys):
    strange = FRAME.copy()
    strange.loc[[0, 1, 500]] = [30.0, -20.0, 99.0]
    text = strange.to_csv(index=False)
    for options, learned in ([], "597 learned"), (["--learn-alerts"], "600 learned"):
        names = ["-o", "new.safetensors", "--alert", "1e-4", *options]
        assert watch_text(text, *names, monkeypatch=monkeypatch) == 0
        out, err = capsys.readouterr()
        alerts = [row["row"] for row in table(out) if row["alert"] == "1"]
        assert alerts[:2] == ["0", "1"]
        assert learned in err


def test_lines_repeat_time_and_keys_and_alerts_have_reasons(model, monkeypatch, capsys):
    frame = FRAME[:5].copy()
    frame.loc[3, "b"] = 500.0
    frame.insert(1, "machine", ["m, 1", 'the "old" one', "m3", "", "m5"])
    frame["Timestamp"] = [f"2026-01-01T00:00:0{i}" for i in range(5)]
    frame["remark"] = "fine"
    options = ["--alert", "0.001", "--explain", "--id", "machine, a", "--no-learn", "-q"]
    for text in (frame.to_csv(index=False), json_lines(frame)):
        assert watch_text(text, *options, monkeypatch=monkeypatch) == 0
        found = pd.read_csv(io.StringIO(capsys.readouterr().out), keep_default_na=False)
        names = "row Timestamp machine a log_likelihood component alert reason"
        assert list(found) == names.split()
        assert found["Timestamp"].tolist() == frame["Timestamp"].tolist()
        assert found["machine"].tolist() == frame["machine"].tolist()
        np.testing.assert_allclose(found["a"], frame["a"])
        assert found["alert"].tolist() == [0, 0, 0, 1, 0]
        assert [len(reason) > 0 for reason in found["reason"]] == [False] * 3 + [True, False]
        assert "b is 500.00 where" in found["reason"][3]


def test_rows_are_numbered_as_in_the_input(model, monkeypatch, capsys):
    text = "a,b,c\n1,5,10\n1,x,10\n\n1,5,10\n"
    options = ["--on-bad-row", "skip", "--no-learn"]
    assert watch_text(text, *options, monkeypatch=monkeypatch) == 0
    out, err = capsys.readouterr()
    assert [row["row"] for row in table(out)] == ["0", "2"]
    assert "2 rows scored, 1 skipped" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,c,d\n1,2,3,4\n", "--id names the column 'x', and standard input has only a, b, c, d"),
        ("1,2,3\n", "--id names the column 'x', and standard input has no names of columns"),
    ],
)
def test_keys_must_be_columns(text, message, model, monkeypatch, capsys):
    assert watch_text(text, "--id", "x", "-q", monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)


def test_a_model_without_held_out_scores_has_no_alerts(model, monkeypatch, capsys):
    factormix.MFA(2, 1, random_state=0).partial_fit(FRAME).save("m.safetensors")
    assert watch_text("1,2,3\n", "--alert", "0.01", monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert "this model has no held-out scores" in err
    assert (out, err.count("\n")) == ("", 1)


COUNT = (
    "values, where 3 are expected: give a header, the columns of the model, and no line breaks"
    " within a cell"
)

BAD = {
    "a word": (
        "1,2,x",
        "line 302 of standard input has 'x', which is not a number: give numbers such as 1.5, or"
        " leave the cell empty",
    ),
    "too few": (
        "1,2",
        f"line 302 of standard input has 2 {COUNT}",
    ),
    "too many": (
        "1,2,3,4",
        f"line 302 of standard input has 4 {COUNT}",
    ),
    "infinite": ("1,inf,3", "line 302 of standard input has an infinite value"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_stops_with_its_place_or_is_skipped(kind, model, monkeypatch, capsys):
    lines = TEXTS["csv with names"].splitlines()
    wrong, message = BAD[kind]
    text = "\n".join([*lines[:301], wrong, *lines[301:]]) + "\n"
    assert watch_text(text, "-q", monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert err == (
        f"factormix: {message}; the rows with scores are learned and saved; --on-bad-row skip"
        " leaves such rows out.\n"
    )
    assert len(table(out)) == 300
    assert factormix.load(model).n_samples_seen_ == 1800 + 300
    options = ["--on-bad-row", "skip", "-o", "all.safetensors"]
    assert watch_text(text, *options, monkeypatch=monkeypatch) == 0
    out, err = capsys.readouterr()
    assert len(table(out)) == 600
    assert "600 rows scored, 600 learned, 1 skipped" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": 1, "b": 2, "c": "x"}', "has 'x', which is not a number"),
        ('{"a": 1, "b": 2,', "is not a line of JSON"),
        ('{"d": 1}', "has no value of 'a' or any other column"),
        (
            "[1, 2]",
            f"has 2 {COUNT}",
        ),
        ("3", "is neither an object nor an array"),
        ("[1, 2, true]", "has 'True', which is not a number"),
        ("[1, 2, Infinity]", "has an infinite value"),
    ],
)
def test_bad_lines_of_json(line, message, model, monkeypatch, capsys):
    text = "[1, 2, 3]\n" + line + "\n"
    assert watch_text(text, "-q", "--format", "json", monkeypatch=monkeypatch) == 2
    assert f"line 2 of standard input {message}" in capsys.readouterr().err


def test_missing_values_are_missing(model, monkeypatch, capsys):
    fitted = factormix.load(model)
    text = "a,b,c\n1,,2\n,NA,null\n"
    assert watch_text(text, "--no-learn", "-q", monkeypatch=monkeypatch) == 0
    scores = [float(row["log_likelihood"]) for row in table(capsys.readouterr().out)]
    nan = np.nan
    expected = fitted.score_samples(pd.DataFrame([[1, nan, 2], [nan] * 3], columns=list("abc")))
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    text = '{"a": 1, "c": 2}\n'
    assert watch_text(text, "--no-learn", "-q", monkeypatch=monkeypatch) == 0
    assert float(table(capsys.readouterr().out)[0]["log_likelihood"]) == pytest.approx(expected[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--alert", "2"], "--alert is the share of ordinary rows that may raise an alert"),
        (["--explain"], "--explain is about alerts: add --alert"),
        (["--learn-alerts"], "--learn-alerts is about alerts: add --alert"),
        (["--alert", "0.1", "--no-learn", "--learn-alerts"], "--no-learn changes no model"),
        (["--no-learn", "-o", "x"], "--no-learn changes no model"),
        (["--forgetting", "0"], "--forgetting must be above 0"),
        (["--every", "soon"], "'soon' is not a time"),
        (["--format", "xml"], "'xml'"),
    ],
)
def test_bad_options_get_one_sentence(options, message, model, monkeypatch, capsys):
    before = model.read_bytes()
    assert watch_text("1,2,3\n", *options, monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)
    assert model.read_bytes() == before


def test_a_header_must_have_the_columns_of_the_model(model, monkeypatch, capsys):
    assert watch_text("a,b,d\n1,2,3\n", "-q", monkeypatch=monkeypatch) == 2
    assert "line 1 of standard input has no column 'c', which the model has" in (
        capsys.readouterr().err
    )


def test_no_rows_are_no_error(model, monkeypatch, capsys):
    before = model.read_bytes()
    assert watch_text("", monkeypatch=monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == "row,log_likelihood,component\n"
    assert "0 rows scored" in err
    assert model.read_bytes() == before


def test_a_drifting_stream_is_followed_with_forgetting(model, monkeypatch):
    draw = np.random.default_rng(1)
    moved = pd.DataFrame(1e3 + 50 * draw.normal(size=(20_000, 3)), columns=list("abc"))
    text = moved.to_csv(index=False)
    assert watch_text(text, "-q", "--forgetting", "0.05", monkeypatch=monkeypatch) == 0
    fitted = factormix.load(model)
    best = -3 * (0.5 * np.log(2 * np.pi * np.e) + np.log(50))
    assert fitted.score(moved[-5000:]) > best - 0.5


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_scores_come_at_once_and_a_signal_saves(number, model):
    """A pipe that stays open, as from a sensor."""
    command = [sys.executable, "-m", "factormix", "watch", "m.safetensors", "--every", "1h"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("a,b,c\n1,2,3\n4,5,6\n")
        process.stdin.flush()
        lines = [process.stdout.readline() for _ in range(3)]
        assert [line.split(",")[0] for line in lines] == ["row", "0", "1"]
        process.send_signal(number)
        process.wait()
        assert process.stderr is not None
        assert "2 rows scored, 2 learned; the model is in m.safetensors" in process.stderr.read()
    assert process.returncode == 128 + number
    assert factormix.load(model).n_samples_seen_ == 1802
