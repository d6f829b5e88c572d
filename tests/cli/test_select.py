"""``factormix select`` as a user runs it: tables, models, pictures, Ctrl-C and bad input."""

from __future__ import annotations

import csv
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import factormix
from factormix.cli import run
from factormix.cli.select import PICTURES
from launching import check_one_sentence, interrupt_on_terminal

SIZES = ["--n-components", "1,2,3", "--n-factors", "0,1", "--random-state", "0"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    table = random.normal(size=(400, 4)) + 8 * random.integers(0, 2, size=(400, 1))
    np.save("table.npy", table)
    np.save("other.npy", table[:50])
    np.save("wide.npy", np.hstack([table, table]))
    rows = "\n".join(",".join(map(str, row)) for row in table.tolist())
    Path("table.csv").write_text(f"a,b,c,d\n{rows}\n")
    Path("notes.txt").write_text("not data")
    return tmp_path


def test_table_model_and_picture(
    here: Path, terminal: None, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = ["-o", "m.safetensors", "--table", "sizes.csv", "--plot", "sizes.png"]
    assert run(["select", "table.csv", *SIZES, *targets]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split()[:3] == ["K", "l", "held_out"]
    assert len(lines) == 8
    assert lines[-1] == "m.safetensors has the best model"
    assert "best" in printed.err
    with open("sizes.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["n_components"], row["n_factors"]) for row in rows] == [
        (K, l) for K in "123" for l in "01"
    ]
    best = max(rows, key=lambda row: float(row["difference"]))
    model = factormix.load("m.safetensors")
    assert (str(model.n_components), str(model.n_factors)) == (
        best["n_components"],
        best["n_factors"],
    )
    assert best["n_components"] == "2"
    assert model.feature_names_in_.tolist() == list("abcd")
    assert Path("sizes.png").read_bytes().startswith(b"\x89PNG")
    assert run(["info", "m.safetensors"]) == 0
    assert "effective" in capsys.readouterr().out or best["n_factors"] == "0"


@pytest.mark.parametrize("kind", PICTURES)
def test_every_kind_of_picture_that_help_offers_is_written(
    kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["select", "--help"])
    assert kind in capsys.readouterr().out
    sizes = ["--n-components", "1,2", "--n-factors", "0", "--max-epochs", "2"]
    assert run(["select", "table.npy", *sizes, "--plot", f"sizes{kind}", "-q"]) == 0
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert Path(f"sizes{kind}").read_bytes().startswith(begins[kind])


def test_a_missing_package_for_pictures_is_named_before_any_work(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["select", "none.npy", "--plot", "sizes.png"]) == 2
    assert 'pip install "factormix[plots]"' in capsys.readouterr().err


def test_by_a_criterion_quietly(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["select", "table.npy", *SIZES, "--criterion", "bic", "-o", "m.safetensors", "-q"]
    assert run(command) == 0
    assert capsys.readouterr() == ("", "")
    assert factormix.load("m.safetensors").n_components == 2


@pytest.mark.parametrize("judges", ["0.3", "other.npy"])
def test_judged_by(judges: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["select", "table.npy", *SIZES, "--held-out", judges, "--every"]) == 0
    out = capsys.readouterr().out
    assert "stopped" not in out
    assert "best model" not in out


BAD_INPUT = {
    "no such data": ("select none.npy", "none.npy does not exist"),
    "numbers": ("select table.npy --n-components 5,x", "--n-components must be whole numbers"),
    "no components": ("select table.npy --n-components 0,1", "whole number of at least 1, not 0"),
    "many factors": ("select table.npy --n-factors 4", "n_factors=4 must be smaller"),
    "many components": ("select table.npy --n-components 999", "n_components=999 needs"),
    "criterion": ("select table.npy --criterion x", "--criterion must be one of held_out"),
    "share": ("select table.npy --held-out 2", "a share between 0 and 1"),
    "no such judges": ("select table.npy --held-out none.npy", "none.npy does not exist"),
    "the same rows": ("select table.npy --held-out table.npy", "hold other rows out"),
    "wide judges": ("select table.npy --held-out wide.npy", "has 8 features"),
    "output": ("select table.npy -o notes.txt", "notes.txt exists and is not a factormix model"),
    "table": ("select table.npy --table t.txt", "name it .csv"),
    "picture": ("select table.npy --plot t.txt", "name it .png"),
    "solver": ("select table.npy --solver x", "solver must be one of"),
    "judges for bic": (
        "select table.npy --criterion bic --held-out 0.1",
        "held_out is for the criterion 'held_out'",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_gets_one_sentence(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected = BAD_INPUT[name]
    check_one_sentence(arguments, expected, capsys)


def test_an_interrupt_keeps_the_best_so_far(here: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(20_000, 60))
    np.save("large.npy", rows)
    command = ["select", "large.npy", "--n-components", "1,200,300", "--n-factors", "20,40"]
    code, out, error = interrupt_on_terminal(
        [sys.executable, "-m", "factormix", *command, "-o", "m.safetensors"],
        signal.SIGINT,
        "best",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert code == 130
    assert "interrupted with" in error
    assert out.splitlines()[-1] == "m.safetensors has the best model"
    assert factormix.load("m.safetensors").n_components == 1
