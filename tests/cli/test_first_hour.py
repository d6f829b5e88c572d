"""The tables that people really have, through the commands of a first hour."""

from __future__ import annotations

import bz2
import gzip
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import factormix
from factormix.cli import run
from factormix.data.readers import read_rows

N = 60
RNG = np.random.default_rng(0)
SIZE = RNG.normal(170, 9, N).round(1)
WEIGHT = (0.9 * SIZE - 85 + RNG.normal(0, 5, N)).round(1)
PAY = (1000 * RNG.uniform(1, 9, N)).round(2)
GAPS = np.arange(N) % 9 == 4
NAMES = [f"Zoë {i}" for i in range(N)]
DATES = pd.date_range("2024-01-01", periods=N).strftime("%Y-%m-%d").tolist()
TOWNS = ["Bonn", "Rome", "Paris"] * 20
# Missing in every ninth row of the column weight, in whatever way a file says so.
NUMBERS = np.column_stack([SIZE, np.where(GAPS, np.nan, WEIGHT), PAY])
FRAME = pd.DataFrame(NUMBERS, columns=["size", "weight", "pay"])
PEOPLE = FRAME.assign(name=NAMES, date=DATES, town=TOWNS)[
    ["name", "date", "size", "town", "weight", "pay"]
]


def text(frame: pd.DataFrame = PEOPLE, **options: object) -> str:
    return frame.to_csv(index=False, **options)


def format_grouped(value: float) -> str:
    return f"{value:,.2f}"


def format_german(value: float) -> str:
    return f"{value:,.2f}".translate(str.maketrans(",.", ".,"))


def with_percent() -> str:
    frame = PEOPLE.assign(size=[f"{value}%" for value in SIZE])
    return text(frame)


def with_booleans() -> str:
    frame = PEOPLE.assign(weight=np.where(GAPS, "", np.where(WEIGHT > 68, "TRUE", "False")))
    return text(frame)


def with_notes() -> str:
    notes = ['said "no, thanks"\nand left' if gap else "a; b" for gap in GAPS]
    return text(PEOPLE.assign(note=notes))


def with_blank_lines() -> str:
    return "\n\n" + text().replace("\n", "\n\n")


BOOLEANS = np.where(GAPS, np.nan, WEIGHT > 68)

# Each file: its name, its content, and the numbers in it where they are not those of NUMBERS.
FILES: dict[str, tuple[str, Callable[[], str | bytes] | None, np.ndarray | None]] = {
    "dates, names and categories": ("people.csv", text, None),
    "only numbers": ("numbers.csv", lambda: text(FRAME), None),
    "row numbers without a name": ("index.csv", lambda: FRAME.to_csv(), None),
    "no header": ("plain.csv", lambda: text(PEOPLE, header=False), None),
    "gzip": ("people.csv.gz", lambda: gzip.compress(text().encode()), None),
    "bzip2": ("people.tsv.bz2", lambda: bz2.compress(text(sep="\t").encode()), None),
    "tabs": ("people.tsv", lambda: text(sep="\t"), None),
    "decimal commas": ("german.csv", lambda: text(sep=";", decimal=","), None),
    "groups of thousands": (
        "us.csv",
        lambda: text(PEOPLE.assign(pay=PEOPLE["pay"].map(format_grouped))),
        None,
    ),
    "German thousands": (
        "groups.csv",
        lambda: text(PEOPLE.assign(pay=PEOPLE["pay"].map(format_german)), sep=";", decimal=","),
        None,
    ),
    "percent": ("percent.csv", with_percent, None),
    "question marks": ("marks.csv", lambda: text(na_rep="?").replace(",", ", "), None),
    "booleans": ("booleans.csv", with_booleans, np.column_stack([SIZE, BOOLEANS, PAY])),
    "Excel": ("people.xlsx", None, None),
    "JSON lines": ("people.jsonl", lambda: PEOPLE.to_json(orient="records", lines=True), None),
    "UTF-16": ("wide.csv", lambda: text().encode("utf-16"), None),
    "cp1252": ("windows.csv", lambda: text().encode("cp1252"), None),
    "byte-order mark": ("mark.csv", lambda: text().encode("utf-8-sig"), None),
    "standard input": ("-", text, None),
    "JSON on standard input": ("-", lambda: PEOPLE.to_json(orient="records", lines=True), None),
    "a constant column": (
        "constant.csv",
        lambda: text(FRAME.assign(one=1)),
        np.column_stack([NUMBERS, np.ones(N)]),
    ),
    "empty names": (
        "unnamed.csv",
        lambda: text(header=["name", "", "size", "", "weight", ""]),
        None,
    ),
    "the same name twice": (
        "twice.csv",
        lambda: text(header=["name", "date", "a", "b", "a", "a"]),
        None,
    ),
    "blank lines": ("blank.csv", with_blank_lines, None),
    "quotes with new lines": ("notes.csv", with_notes, None),
    "huge numbers": (
        "huge.csv",
        lambda: text(FRAME.assign(n=[10**25 + i * 10**20 for i in range(N)])),
        np.column_stack([NUMBERS, [float(10**25 + i * 10**20) for i in range(N)]]),
    ),
    "an empty column": ("empty.csv", lambda: text(PEOPLE.assign(gone="")), None),
    "one column": ("one.csv", lambda: text(FRAME[["size"]]), SIZE[:, None]),
}
COMMANDS = (
    "train {data} -o m.safetensors --n-components 2 --n-factors {factors} --max-epochs 2 -q",
    "outliers m.safetensors {data} --contamination 0.1 --explain -o outliers.csv -q",
    "impute i.safetensors {data} --fit -o filled.csv --max-epochs 2 --random-state 0",
    "score m.safetensors {data} -o scores.csv",
    "sample m.safetensors -n 5 -o samples.csv",
)


class Rewinding:
    """Standard input with the same bytes for each command."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def buffer(self) -> io.BytesIO:
        return io.BytesIO(self._data)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Write a file into the working folder, or put it on standard input; return its name."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, content: Callable[[], str | bytes] | None) -> str:
        if content is None:
            dates = pd.to_datetime(PEOPLE["date"])
            PEOPLE.assign(date=dates).to_excel(name, index=False)
            return name
        data = content()
        data = data.encode() if isinstance(data, str) else data
        if name == "-":
            monkeypatch.setattr(sys, "stdin", Rewinding(data))
        else:
            Path(name).write_bytes(data)
        return name

    return write


def call(command: str) -> int:
    return run(command.split())


def read_numbers(path: str, **options: Any) -> np.ndarray:
    return np.concatenate([batch.rows for batch in read_rows(path, **options).blocks(7)])


@pytest.mark.filterwarnings("ignore:.*left out as not numeric")
@pytest.mark.parametrize("name", FILES)
def test_every_command_works_or_says_what_to_do(name, place, capsys):
    path, content, numbers = FILES[name]
    data, numbers = place(path, content), NUMBERS if numbers is None else numbers
    np.testing.assert_array_equal(read_numbers(data), numbers)
    records = read_rows(data).records
    for command in COMMANDS:
        code = call(command.format(data=data, factors=min(1, numbers.shape[1] - 1)))
        errors = capsys.readouterr().err
        assert code == 0, errors
        # At most one line, which names what is left out.
        assert re.fullmatch(r"(factormix: note: .*left out as not numeric: .*\n)?", errors), errors
    ids = [one for one in records.ids if one != "Unnamed: 0"]
    for out in ("scores.csv", "outliers.csv"):
        check_rows(out, ids)
    samples = pd.read_csv("samples.csv")
    assert len(samples) == 5
    unnamed = ["0", "1", "2"]
    assert list(samples) == (unnamed if name == "no header" else list(records.features))
    # The other columns are as they were, and so are the numbers that were there.
    filled, there = (
        pd.read_csv("filled.csv", sep=records.delimiter, dtype=str),
        ~np.isnan(numbers),
    )
    assert len(filled.columns) == len(records.columns)
    assert all(filled[one].tolist() == NAMES for one in ids if name != "no header")
    features = [2, 4, 5] if name == "no header" else list(records.features)
    found = read_numbers("filled.csv", columns=features)
    np.testing.assert_array_equal(found[there], numbers[there])
    assert np.isfinite(found).all()


def check_rows(out: str, ids: list[str]) -> None:
    """Check that a table of results has every row, with its name."""
    table = pd.read_csv(out)
    assert table["row"].tolist() == list(range(N))
    assert all(table[one].tolist() == NAMES for one in ids)


QUICK = ("dates, names and categories", "no header", "Excel", "standard input")
"""Files for which a detector is trained in every run of the tests."""


@pytest.mark.filterwarnings("ignore:.*left out as not numeric")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FILES],
)
def test_a_detector_is_trained_on_every_file(name, place, capsys):
    path, content, _ = FILES[name]
    data = place(path, content)
    command = "outliers d.safetensors {data} --fit --explain -o outliers.csv -q --random-state 0"
    code = call(command.format(data=data))
    errors = capsys.readouterr().err
    assert code == 0, errors
    assert re.fullmatch(r"(factormix: note: .*left out as not numeric: .*\n)?", errors), errors
    check_rows("outliers.csv", [one for one in read_rows(data).records.ids if one != "Unnamed: 0"])


REFUSED_LINES = {
    "no header": "has 6 values, where 3 are expected: give a header",
    "quotes with new lines": "no line breaks within a cell",
    **dict.fromkeys(
        ["gzip", "bzip2", "Excel", "UTF-16", "cp1252"], "watch reads lines of UTF-8 text"
    ),
}


@pytest.mark.filterwarnings("ignore:.*left out as not numeric")
@pytest.mark.parametrize("name", [name for name in FILES if name != "huge numbers"])
def test_every_file_is_watched_or_refused_with_a_remedy(name, place, capsys, monkeypatch):
    path, content, numbers = FILES[name]
    if path == "-":
        path = "people.jsonl" if name.startswith("JSON") else "people.csv"
    data, numbers = place(path, content), NUMBERS if numbers is None else numbers
    assert call(COMMANDS[0].format(data=data, factors=min(1, numbers.shape[1] - 1))) == 0
    capsys.readouterr()
    with open(data, encoding="utf-8") as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        code = call("watch m.safetensors --alert 0.01 --explain --no-learn")
    shown = capsys.readouterr()
    if name in REFUSED_LINES:
        assert code == 2
        first, *others = shown.err.splitlines()
        assert REFUSED_LINES[name] in first
        assert all(line.startswith("factormix: note: ") for line in others)
        return
    assert code == 0, shown.err
    scores = pd.read_csv(io.StringIO(shown.out))
    assert scores["row"].tolist() == list(range(N))
    model = factormix.load("m.safetensors")
    expected = model.score_samples(read_rows(data))
    np.testing.assert_allclose(scores["log_likelihood"], expected, rtol=1e-4)


def test_options_choose_columns(place, capsys):
    data = place("people.csv", text)
    train = f"train {data} -o m.safetensors --n-components 2 --n-factors 1 --max-epochs 2 -q"

    def features(options: str) -> list[str]:
        assert run([*train.split(), *options.split()]) == 0
        return factormix.load("m.safetensors").feature_names_in_.tolist()

    assert features("--columns size --columns weight,pay") == ["size", "weight", "pay"]
    assert features("--columns size --columns pay") == ["size", "pay"]
    assert capsys.readouterr().err == ""
    assert features("--exclude size,town") == ["weight", "pay"]
    assert capsys.readouterr().err == (
        "factormix: note: people.csv: left out as not numeric: 'name', 'date'; 'name' identifies"
        " rows; pandas.get_dummies encodes categories; --columns, --exclude and --id decide.\n"
    )
    assert features("--id pay --id town") == ["size", "weight"]
    assert call("score m.safetensors people.csv -o s.csv --id pay --id town") == 0
    scores = pd.read_csv("s.csv")
    assert list(scores) == ["row", "pay", "town", "log_likelihood", "component"]
    assert scores["pay"].tolist() == PAY.tolist()
    assert run([*train.split(), "--exclude", "height"]) == 2
    assert "has no column 'height'; it has name, date" in capsys.readouterr().err


def test_gaps_are_filled_in_the_style_of_the_file(place):
    frame = PEOPLE.assign(weight=[f"{w}%".replace(".", ",") for w in WEIGHT])
    frame.loc[GAPS, "weight"] = "?"
    lines = text(frame, sep=";", decimal=",").splitlines()
    place("german.csv", lambda: "\n".join(lines) + "\n")
    command = "impute i.safetensors german.csv --fit -o out.csv --max-epochs 2 --random-state 0"
    assert call(command) == 0
    found = Path("out.csv").read_text().splitlines()
    assert [line for line, gap in zip(found[1:], GAPS, strict=True) if not gap] == [
        line for line, gap in zip(lines[1:], GAPS, strict=True) if not gap
    ]
    assert re.fullmatch(r"Zoë 4;2024-01-05;[\d,]+;Rome;\d+,\d+%;[\d,]+", found[5])


@pytest.mark.filterwarnings("ignore:.*left out as not numeric")
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_parquet_file_keeps_its_other_columns(kind, place):
    frame = PEOPLE.assign(
        date=pd.to_datetime(PEOPLE["date"]), town=PEOPLE["town"].astype("category")
    )
    place("other.csv", text)
    frame.to_parquet("people.parquet", row_group_size=25)
    out = f"out.{kind}"
    assert call(f"impute i.safetensors people.parquet --fit -o {out} --max-epochs 2") == 0
    found = pd.read_parquet(out) if kind == "parquet" else pd.read_csv(out)
    others = ["name", "date", "town"]
    expected = frame if kind == "parquet" else PEOPLE
    assert list(found) == list(PEOPLE)
    pd.testing.assert_frame_equal(found[others], expected[others], check_dtype=kind == "parquet")
    assert not found["weight"].isna().any()
    # A text table of the same people, with its columns in another order, scores the same.
    assert call("train people.parquet -o m.safetensors --n-components 2 --max-epochs 2 -q") == 0
    PEOPLE[PEOPLE.columns[::-1]].assign(more=1).to_csv("turned.csv", index=False)
    for name in ("people.parquet", "turned.csv"):
        assert run(["score", "m.safetensors", name, "-o", f"{name}.scores.csv"]) == 0
    first, second = (pd.read_csv(f"{name}.scores.csv") for name in ("people.parquet", "turned.csv"))
    assert first["name"].tolist() == NAMES
    np.testing.assert_array_equal(first["log_likelihood"], second["log_likelihood"])
    assert run(["sample", "m.safetensors", "-o", "s.parquet", "-n", "4"]) == 0
    assert list(pd.read_parquet("s.parquet")) == ["size", "weight", "pay"]


@pytest.mark.filterwarnings("ignore:.*components with")
def test_samples_of_whole_numbers_are_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    count = np.where(GAPS, np.nan, RNG.integers(3, 40, N))
    frame = FRAME.assign(count=count, flag=SIZE > 180, big=10.0**20 * np.arange(N))
    frame.to_csv("rows.csv", index=False)
    assert call("train rows.csv -o m.safetensors --max-epochs 3 --random-state 0 -q") == 0
    for name in ("s.csv", "s.parquet", "s.npy"):
        assert run(["sample", "m.safetensors", "-n", "200", "-o", name]) == 0
    for drawn in (pd.read_csv("s.csv"), pd.read_parquet("s.parquet")):
        assert list(drawn.dtypes) == ["float64"] * 3 + ["int64"] * 2 + ["float64"]
        assert drawn["count"].between(3, 39).all()
        assert set(drawn["flag"]) == {0, 1}
        assert (drawn["size"] % 1 != 0).all()
    plain = np.load("s.npy")
    assert (plain[:, 3] % 1 != 0).all()
    assert np.abs(plain[:, 3] - drawn["count"]).median() < 0.5


def test_files_of_images_are_named(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    Path("pictures").mkdir()
    for i in range(12):
        pixels = np.random.default_rng(i).integers(0, 256, size=(3, 4), dtype=np.uint8)
        Image.fromarray(pixels).save(f"pictures/{i:02}.png")
    assert call("train pictures -o m.safetensors --n-components 2 --max-epochs 2 -q") == 0
    assert call("score m.safetensors pictures -o s.csv") == 0
    assert pd.read_csv("s.csv")["file"].tolist() == [f"{i:02}.png" for i in range(12)]


def test_bad_json_names_its_line(place, capsys):
    place("bad.jsonl", lambda: '{"a": 1}\n\n{"a": 2\n')
    assert call("train bad.jsonl -o m.safetensors") == 2
    assert "bad.jsonl has no JSON in line 3; write an object" in capsys.readouterr().err
    place("text.jsonl", lambda: "".join(f'{{"a": {a}, "b": 1}}\n' for a in (1, 2, 3, '"x"')))
    assert call("train text.jsonl -o m.safetensors") == 2
    assert "'x', which is not a number, in line 4, column 1 (a)" in capsys.readouterr().err
