"""The command line, run as a user runs it: real files, real exit codes, real signals."""

from __future__ import annotations

import contextlib
import csv
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import save_file

import factormix
from factormix.cli import run
from factormix.cli.console import print_warnings_as_notes
from factormix.data.readers import read_rows
from factormix.defaults import SOLVER_NAMES
from factormix.errors import TrainingWarning
from factormix.solvers import SOLVERS, ConstrainedSGD, Problem
from factormix.training.solvers.sgd import SGDPlan
from launching import check_one_sentence, interrupt_on_terminal

COMMANDS = [
    ["train"],
    ["score"],
    ["select"],
    ["impute"],
    ["sample"],
    ["outliers"],
    ["info"],
    ["compare"],
    ["explore"],
    ["demo"],
    ["watch"],
    ["data"],
    ["data", "list"],
    ["data", "fetch"],
    ["denoise"],
    ["images"],
]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
# A solver that takes every planned step, so that a run can be stopped halfway.
SMALL = [
    "--n-components",
    "4",
    "--n-factors",
    "1",
    "--solver",
    "sgd",
    "--batch-size",
    "10",
    "--random-state",
    "0",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good and bad data, and a model of the good data."""
    folder = tmp_path_factory.mktemp("cli")
    random = np.random.default_rng(0)
    table = random.normal(size=(300, 4)) + 5 * random.integers(0, 3, size=(300, 1))
    np.save(folder / "table.npy", table)
    np.save(folder / "wide.npy", np.hstack([table, table]))
    np.save(folder / "short.npy", table[:3])
    np.save(folder / "fewer.npy", table[:200])
    np.save(folder / "line.npy", table[:, 0])
    np.save(folder / "words.npy", np.array([["a", "b"]]))
    np.savez(folder / "two.npz", first=table, second=table)
    np.save(folder / "images.npy", random.integers(0, 256, size=(60, 6, 5), dtype=np.uint8))
    np.save(folder / "turned.npy", random.integers(0, 256, size=(9, 5, 6), dtype=np.uint8))
    rows = "\n".join(",".join(map(str, row)) for row in table.tolist())
    (folder / "table.csv").write_text(f"a,b,c,d\n{rows}\n")
    turned = "\n".join(",".join(map(str, row)) for row in table[:, [3, 1, 0, 2]].tolist())
    (folder / "turned.csv").write_text(f"d,b,a,c\n{turned}\n")
    (folder / "other.csv").write_text(f"e,b,c,d\n{rows}\n")
    np.save(folder / "hole.npy", np.tile([[1, np.nan, 3, 4], [2, np.nan, 1, 5]], (30, 1)))
    (folder / "notes.txt").write_text("not data")
    for data, model in [("table.csv", "model"), ("images.npy", "images")]:
        command = ["train", str(folder / data), "-o", str(folder / f"{model}.safetensors")]
        assert run([*command, *SMALL, "--max-epochs", "3", "--quiet"]) == 0
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "bit.safetensors").write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "factormix", *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )


# Bad input: the arguments, and what the one sentence must say.
BAD_INPUT = {
    "no such data": ("train none.npy -o model.safetensors", "none.npy does not exist"),
    "unknown kind": ("train notes.txt -o model.safetensors", "notes.txt is of an unknown kind"),
    "no cells": ("train hole.npy -o model.safetensors", "no value in column"),
    "one dimension": ("train line.npy -o model.safetensors", "two dimensions"),
    "strings": ("train words.npy -o model.safetensors", "words.npy holds strings"),
    "several arrays": ("train two.npz -o model.safetensors", "several arrays (first, second)"),
    "unknown key": ("train two.npz -o model.safetensors --key third", "no array called 'third'"),
    "key without npz": ("train table.npy -o model.safetensors --key x", "is not an .npz,"),
    "held-out rows of another width": (
        "train table.npy -o model.safetensors --held-out wide.npy",
        "wide.npy has 8 features, but training is expecting 4 features",
    ),
    "no held-out rows": (
        "train table.npy -o model.safetensors --held-out none.npy",
        "none.npy does not exist",
    ),
    "held-out columns of other names": (
        "train table.csv -o model.safetensors --held-out other.csv",
        "other.csv lacks 'a' and has 'e', unseen at fit time; give the same columns",
    ),
    "nothing held out": (
        "train table.npy -o model.safetensors --held-out ./table.npy",
        "table.npy is the training data: hold other rows out",
    ),
    "patience for nothing": (
        "train table.npy -o model.safetensors --patience 4",
        "give them with --held-out",
    ),
    "no patience": (
        "train table.npy -o model.safetensors --held-out fewer.npy --patience 0",
        "'--patience'",
    ),
    "few rows": (
        "train short.npy -o model.safetensors --n-components 4 --n-factors 1",
        "lower n_components or give more rows",
    ),
    "many factors": ("train table.npy -o model.safetensors --n-factors 4", "n_factors=4 must be"),
    "no components": ("train table.npy -o model.safetensors --n-components 0", "'--n-components'"),
    "text for a number": (
        "train table.npy -o model.safetensors --n-factors x",
        "n_factors must be a whole number of at least 0, 'auto' or None",
    ),
    "solver": (
        "train table.npy -o model.safetensors --solver x",
        "solver must be one of 'natural'",
    ),
    "scaling": ("train table.npy -o model.safetensors --scaling x", "scaling must be 'global'"),
    "noise": (
        "train table.npy -o model.safetensors --noise x",
        "noise must be one of component",
    ),
    "dtype": ("train table.npy -o model.safetensors --dtype int8", "dtype must be 'float32'"),
    "device": ("train table.npy -o model.safetensors --device x", "device must be a torch device"),
    "precision": ("train table.npy -o model.safetensors --max-precision -1", "max_precision must"),
    "image size": ("train . -o model.safetensors --image-size 28", "give HEIGHTxWIDTH"),
    "image depth": ("train . -o model.safetensors --image-size 8x8x3", "give HEIGHTxWIDTH"),
    "all kinds": ("train . -o model.safetensors", "files in it; give a folder of one kind"),
    "no output": ("train table.npy", "Missing option '--output'"),
    "unknown option": ("train table.npy -o model.safetensors --foo", "--foo (see factormix train"),
    "output in no folder": ("train table.npy -o none/m", "the folder none does not exist"),
    "output a folder": ("train table.npy -o .", ". is a folder"),
    "output the data": ("train table.npy -o table.npy", "is both input and output"),
    "output other data": ("train table.npy -o wide.npy", "wide.npy exists and is not a factormix"),
    "resume nothing": ("train table.npy -o none.safetensors --resume", "no such file"),
    "resume otherwise": (
        "train table.csv -o model.safetensors --resume --n-components 9",
        "was started with n_components=4",
    ),
    "resume on others": ("train fewer.npy -o model.safetensors --resume", "on the same rows"),
    "resume on wider": ("train wide.npy -o model.safetensors --resume", "wide.npy has 8 features"),
    "score without model": ("score none.safetensors table.npy -o s.csv", "none.safetensors: no"),
    "score with data": ("score table.npy table.npy -o s.csv", "not a complete factormix model"),
    "score with half": ("score cut.safetensors table.npy -o s.csv", "not a complete factormix"),
    "score with damage": ("score bit.safetensors table.npy -o s.csv", "checksum does not match"),
    "resume damage": ("train table.csv -o bit.safetensors --resume", "checksum does not match"),
    "sample from damage": ("sample bit.safetensors -o s.npy", "checksum does not match"),
    "info on damage": ("info bit.safetensors", "checksum does not match"),
    "score wider data": (
        "score model.safetensors wide.npy -o s.csv",
        "wide.npy has 8 features, but MFA is expecting 4 features as input",
    ),
    "score columns of other names": (
        "score model.safetensors other.csv -o s.csv",
        "other.csv lacks 'a' and has 'e', unseen at fit time; give the same columns",
    ),
    "score images of another shape": (
        "score images.safetensors turned.npy -o s.csv",
        "turned.npy has images of 5 x 6, but MFA is expecting images of 6 x 5",
    ),
    "unknown column": (
        "train table.csv -o model.safetensors --columns a,e",
        "table.csv has no column 'e'; it has a, b, c, d",
    ),
    "header of a .npy file": (
        "score model.safetensors table.npy -o s.csv --no-header",
        "table.npy is not a .csv file",
    ),
    "score ending": ("score model.safetensors table.npy -o s.txt", "name it .csv"),
    "sample ending": ("sample model.safetensors -o s.txt", "name it .npy or .csv"),
    "sample none": ("sample model.safetensors -o s.npy -n 0", "'--n-samples'"),
    "sample component": ("sample model.safetensors -o s.npy --component 4", "between 0 and 3"),
    "sample table": ("sample model.safetensors -o s.png", "not images"),
    "sample shape": (
        "sample images.safetensors -o s.png --image-shape 7x5",
        "7 x 5 has 35 values where the model has 30 features",
    ),
    "sample bad shape": (
        "sample images.safetensors -o s.png --image-shape x",
        "not an image shape",
    ),
    "info on data": ("info table.npy", "not a complete factormix model"),
    "info on a folder": ("info .", ". is not a file"),
    "data set": ("data fetch none", "there is no data set 'none'"),
    "data folder": ("data list --folder none", "the data folder none does not exist"),
    "demo into a file": ("demo -o notes.txt", "cannot make the folder notes.txt"),
    "unknown command": ("trane table.npy", "No such command 'trane'"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_gets_one_sentence(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected = BAD_INPUT[name]
    check_one_sentence(arguments, expected, capsys)


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("pyarrow", "train t.parquet -o new.safetensors", "factormix[data]"),
        ("PIL", "train pictures -o new.safetensors", "factormix[data]"),
        ("matplotlib", "sample images.safetensors -o s.png", "factormix[plots]"),
        ("matplotlib", "demo -o new", "factormix[demo]"),
    ],
)
def test_missing_package_is_named(
    package: str,
    arguments: str,
    extra: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (here / "t.parquet").write_bytes(b"PAR1")
    (here / "pictures").mkdir(exist_ok=True)
    (here / "pictures" / "a.png").write_bytes(b"PNG")
    monkeypatch.setitem(sys.modules, package, None)
    check_one_sentence(arguments, f'pip install "{extra}"', capsys)
    assert not (here / "new").exists()


class UnluckyPlan(SGDPlan):
    def update(self, state: Any, contribution: Any) -> Any:
        torch.linalg.cholesky(-torch.eye(3))


class Unlucky(ConstrainedSGD):
    name = "unlucky"

    def plan(self, problem: Problem) -> Any:
        return UnluckyPlan(self, problem)


def test_a_failing_step_is_one_sentence(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SOLVERS, "unlucky", Unlucky)
    command = ["train", "table.npy", "-o", "new.safetensors", "--solver", "unlucky", "--quiet"]
    assert run(command) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"factormix: step 1 of the training failed .*\n", error), error
    assert not (here / "new.safetensors").exists()


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with print_warnings_as_notes():
        warnings.warn("no room is left.", TrainingWarning, stacklevel=1)
    assert capsys.readouterr().err == "factormix: note: no room is left.\n"
    with pytest.warns(DeprecationWarning, match="of others"), print_warnings_as_notes():
        warnings.warn("of others", DeprecationWarning, stacklevel=1)
    assert capsys.readouterr().err == ""


def test_a_repeated_default_is_no_change(here: Path, tmp_path: Path) -> None:
    command = ["train", str(here / "table.npy"), "-o", str(tmp_path / "m"), "--max-epochs", "1"]
    assert run([*command, "--quiet"]) == 0
    assert run([*command, "--quiet", "--resume", "--n-factors", "3"]) == 0
    assert run([*command, "--quiet", "--resume", "--n-factors", "2"]) == 2


def test_process_reports_bad_input(folder: Path) -> None:
    done = process("score", "model.safetensors", "table.npy", "-o", "s.txt", cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"factormix: .*\n", done.stderr), done.stderr


def test_two_commands(folder: Path, tmp_path: Path) -> None:
    """Train and score; the file scores as the library does."""
    model, scores = str(tmp_path / "m.safetensors"), tmp_path / "s.csv"
    done = process("train", "table.csv", "-o", model, *SMALL, "--max-epochs", "3", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no progress bar in a log"
    facts = dict(re.split(r"  +", line) for line in done.stdout.splitlines())
    assert list(facts) == [
        "rows",
        "features",
        "mean log-likelihood",
        "components in use",
        "seconds",
        "model",
    ]
    assert (facts["rows"], facts["features"], facts["model"]) == ("300", "4", model)
    assert run(["score", model, str(folder / "table.csv"), "-o", str(scores)]) == 0
    with scores.open() as file:
        rows = list(csv.DictReader(file))
    table = pd.DataFrame(np.load(folder / "table.npy"), columns=list("abcd"))
    fitted = factormix.load(model)
    assert [int(row["row"]) for row in rows] == list(range(300))
    np.testing.assert_allclose(
        [float(row["log_likelihood"]) for row in rows], fitted.score_samples(table), rtol=1e-6
    )
    np.testing.assert_array_equal([int(row["component"]) for row in rows], fitted.predict(table))
    assert float(facts["mean log-likelihood"]) == pytest.approx(fitted.score(table), rel=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors", "s.csv"]


def test_progress_is_shown_on_a_terminal(
    folder: Path, tmp_path: Path, terminal: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tmp_path / "m.safetensors")
    assert run(["train", str(folder / "table.csv"), "-o", model, *SMALL, "--max-epochs", "3"]) == 0
    shown = capsys.readouterr().err
    assert all(word in shown for word in ("step", "ll=", "used="))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_resumes_as_if_it_had_never_stopped(
    number: int, code: int, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "stopped.safetensors"
    start = ["table.npy", "-o", str(model), *SMALL, "--max-epochs", "80"]
    command = [sys.executable, "-m", "factormix", "train", *start]
    returned, _, error = interrupt_on_terminal(command, number, "ll=", cwd=here, env=ENVIRONMENT)
    assert returned == code
    *_, last = error.splitlines()
    assert last.startswith("factormix: stopped, with the model so far in")
    assert last.endswith(shlex.join(["factormix", "train", *start, "--resume"]))
    assert 0 < factormix.load(model).n_steps_ < 2400

    # The same command again, with --resume, is what people type.
    assert run(["train", *start, "--resume", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    resumed = factormix.load(model)
    assert resumed.n_steps_ == 2400
    whole = factormix.MFA(4, 1, solver="sgd", batch_size=10, max_epochs=80, random_state=0)
    whole.fit(read_rows(here / "table.npy"))
    np.testing.assert_array_equal(resumed.means_, whole.means_)
    np.testing.assert_array_equal(resumed.precision_factors_, whole.precision_factors_)
    np.testing.assert_array_equal(resumed.weights_, whole.weights_)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
def test_the_exit_code_of_a_stop_outside_training_tells_the_signal(
    number: int, code: int, tmp_path: Path
) -> None:
    image = tmp_path / "noisy.png"
    os.mkfifo(image)
    command = [sys.executable, "-m", "factormix", "denoise", str(image), "-o", "clean.png"]
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT) as process:
        writer = None
        while writer is None and process.poll() is None:
            # Opening it for writing fails until the command reads it.
            with contextlib.suppress(OSError):
                writer = os.open(image, os.O_WRONLY | os.O_NONBLOCK)
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) == code
    assert writer is not None
    os.close(writer)


def scores(path: Path) -> np.ndarray:
    return np.loadtxt(path, delimiter=",", skiprows=1)[:, 1]


def test_columns_are_put_in_order_wherever_names_come_from(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A frame, a .csv and a .parquet file in other orders score as the rows they are."""
    frame = pd.DataFrame(np.load("table.npy"), columns=list("abcd")) * [1, 10, 100, 1000]
    turned = frame[list("cadb")]
    options = {"n_components": 3, "n_factors": 1, "max_epochs": 3, "random_state": 0}
    by_frame = factormix.MFA(**options).fit(frame)
    by_frame.save(tmp_path / "frame.safetensors")
    turned.to_csv(tmp_path / "turned.csv", index=False)
    turned.to_parquet(tmp_path / "turned.parquet")
    expected = by_frame.score_samples(frame)
    for kind in ("csv", "parquet"):
        data, out = str(tmp_path / f"turned.{kind}"), tmp_path / f"{kind}.csv"
        assert run(["score", str(tmp_path / "frame.safetensors"), data, "-o", str(out)]) == 0
        np.testing.assert_allclose(scores(out), expected, rtol=1e-6)
        np.testing.assert_allclose(by_frame.score_samples(read_rows(data)), expected)

    command = f"train {tmp_path}/turned.csv -o {tmp_path}/csv.safetensors --n-components 3"
    assert run([*command.split(), "--n-factors", "1", "--quiet", "--random-state", "0"]) == 0
    by_file = factormix.load(tmp_path / "csv.safetensors")
    assert by_file.feature_names_in_.tolist() == list("cadb")
    np.testing.assert_array_equal(by_file.score_samples(frame), by_file.score_samples(turned))
    wrong = frame.rename(columns={"a": "e"})
    with pytest.raises(factormix.InputError, match="X lacks 'a' and has 'e', unseen at fit time"):
        by_file.score_samples(wrong)
    # Rows without names go by their place.
    np.save(tmp_path / "plain.npy", turned.to_numpy())
    model, out = str(tmp_path / "csv.safetensors"), tmp_path / "plain.csv"
    assert run(["score", model, str(tmp_path / "plain.npy"), "-o", str(out)]) == 0
    np.testing.assert_allclose(scores(out), by_file.score_samples(turned), rtol=1e-6)


def test_held_out_columns_are_put_in_order(here: Path, tmp_path: Path) -> None:
    levels = []
    for name in ("table.csv", "turned.csv"):
        copy = tmp_path / f"copy-{name}"
        copy.write_bytes((here / name).read_bytes())
        model = str(tmp_path / f"{name}.safetensors")
        options = [*SMALL, "--max-epochs", "3", "--quiet", "--held-out", str(copy)]
        assert run(["train", "table.csv", "-o", model, *options]) == 0
        levels.append([r.get("held_out") for r in factormix.load(model).history_])
    assert levels[0] == levels[1]
    assert any(level is not None for level in levels[0])


def test_headers_and_columns_are_chosen(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "years.csv", str(tmp_path / "m.safetensors")
    table = np.random.default_rng(0).integers(0, 50, size=(100, 3))
    pd.DataFrame(table, columns=[2019, 2020, 2021]).to_csv(path, index=False)
    options = [*SMALL, "--max-epochs", "2"]
    assert run(["train", str(path), "-o", model, *options]) == 0
    printed = capsys.readouterr()
    assert re.search(r"^rows +101$", printed.out, re.MULTILINE)
    assert "factormix: note: the first line of" in printed.err
    assert run(["train", str(path), "-o", model, *options, "--header"]) == 0
    printed = capsys.readouterr()
    assert re.search(r"^rows +100$", printed.out, re.MULTILINE)
    assert "note" not in printed.err
    assert factormix.load(model).feature_names_in_.tolist() == ["2019", "2020", "2021"]
    command = ["train", str(path), "-o", model, *options, "--header", "--columns", "2021, 0"]
    assert run([*command, "--quiet"]) == 0
    fitted = factormix.load(model)
    assert fitted.feature_names_in_.tolist() == ["2021", "2019"]
    chosen = ["--header", "--columns", "2019,2021", "-o", str(tmp_path / "s.csv")]
    assert run(["score", model, str(path), *chosen]) == 0
    expected = fitted.score_samples(pd.DataFrame(table[:, [2, 0]], columns=["2021", "2019"]))
    np.testing.assert_allclose(scores(tmp_path / "s.csv"), expected, rtol=1e-6)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads /proc")
@pytest.mark.parametrize("held_out", [pytest.param(False, marks=pytest.mark.slow), True])
def test_data_is_read_only_as_often_as_needed(
    held_out: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Count the bytes that are read, in passes over the data: a check, the epochs, the summary."""
    random = np.random.default_rng(0)
    data, model = tmp_path / "x.npy", str(tmp_path / "m.safetensors")
    np.save(data, random.normal(size=(400_000, 50)).astype(np.float32))
    size, epochs = data.stat().st_size, 4
    options = ["--n-components", "1", "--n-factors", "0", "--batch-size", "5000", "--solver", "sgd"]
    options += ["--max-epochs", str(epochs)]
    if held_out:
        np.save(tmp_path / "h.npy", random.normal(size=(400_000, 50)).astype(np.float32))
        options += ["--held-out", str(tmp_path / "h.npy"), "--patience", "9"]

    def bytes_read() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])

    before = bytes_read()
    assert run(["train", str(data), "-o", model, *options]) == 0
    passes = (bytes_read() - before) / size
    looks = sum("held_out" in record for record in factormix.load(model).history_)
    # The sample that sets the units fills at most two buffers, 0.8 of the file.
    expected = 1 + epochs + 1 + (2 + looks if held_out else 0)
    assert expected <= passes < expected + 0.95


def test_scores_on_the_screen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["score", "model.safetensors", "table.npy"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header == "row,log_likelihood,component"
    assert len(lines) == 300


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such pipes")
def test_scores_into_a_pipe_that_closes(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.npy"
    np.save(path, np.zeros((20_000, 4)))
    command = f"'{sys.executable}' -m factormix score model.safetensors '{path}' | head -1"
    done = subprocess.run(
        command, shell=True, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("row,log_likelihood,component\n", "")


def test_samples_equal_the_librarys(here: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.npy"
    command = f"sample model.safetensors -n 5 -o {path} --component 2 --no-noise --random-state 7"
    assert run(command.split()) == 0
    model = factormix.load("model.safetensors").set_params(random_state=7)
    np.testing.assert_array_equal(np.load(path), model.sample(5, component=2, noise=False)[0])


def test_image_shape_is_remembered(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    path = tmp_path / "s.png"
    assert run(["sample", "images.safetensors", "-n", "4", "-o", str(path)]) == 0
    with Image.open(path) as image:
        # Two by two tiles of 6 x 5 with a pixel between them.
        assert image.height / image.width == pytest.approx(13 / 11)
    capsys.readouterr()
    assert run(["info", "images.safetensors"]) == 0
    assert "30 (6 x 5 images)" in capsys.readouterr().out


def test_folder_of_images_is_scored_at_the_size_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(20):
        pixels = random.integers(0, 256, size=(8, 6), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    model = str(tmp_path / "m.safetensors")
    options = [*SMALL, "--max-epochs", "2", "--image-size", "4x3", "--quiet"]
    assert run(["train", str(tmp_path), "-o", model, *options]) == 0
    assert factormix.load(model).n_features_in_ == 12
    assert run(["score", model, str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 21


def test_training_replaces_a_model(here: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((here / "model.safetensors").read_bytes())
    options = ["--n-components", "2", "--n-factors", "0", "--max-epochs", "1", "--quiet"]
    options += ["--scaling", "none", "--dtype", "float64", "--max-precision", "20"]
    assert run(["train", "table.npy", "-o", str(path), *options]) == 0
    model = factormix.load(path)
    assert model.weights_.shape == (2,)
    assert (model.scaling, model.dtype, model.max_precision) == (None, "float64", 20.0)


def test_one_column_is_enough(tmp_path: Path) -> None:
    data, path = tmp_path / "one.npy", tmp_path / "m.safetensors"
    np.save(data, np.random.default_rng(0).normal(size=(100, 1)))
    assert run(["train", str(data), "-o", str(path), "--n-components", "2", "--quiet"]) == 0
    assert factormix.load(path).n_features_in_ == 1


def test_held_out_rows_end_the_training(tmp_path: Path) -> None:
    random, path = np.random.default_rng(0), tmp_path / "m.safetensors"
    for name, n in (("train", 120), ("held-out", 400)):
        np.save(tmp_path / f"{name}.npy", random.normal(size=(n, 12)))
    data, others = str(tmp_path / "train.npy"), tmp_path / "held-out.npy"
    options = ["--n-components", "6", "--random-state", "0", "-q", "--solver", "em"]
    options += ["--max-epochs", "60", "--held-out", str(others), "--patience", "2"]
    # The key belongs to the archive alone.
    np.savez(tmp_path / "train.npz", rows=np.load(data), others=np.zeros((3, 3)))
    archive = [str(tmp_path / "train.npz"), "--key", "rows"]
    assert run(["train", *archive, "-o", str(path), *options]) == 0
    model = factormix.load(path)
    scores = [record["held_out"] for record in model.history_ if "held_out" in record]
    assert model.n_iter_ < 60
    assert scores[-3] == max(scores) == model.score(np.load(others))


@pytest.mark.parametrize("command", ["train -o m.safetensors", "select --max-epochs 2"])
def test_the_key_is_used_for_held_out_safetensors(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
    Path("shards").mkdir()
    held_out = ["held-out.safetensors", "shards"]
    for path in ("train.safetensors", held_out[0], "shards/1.safetensors"):
        save_file({"rows": rows, "labels": rows[:, :1]}, path)
    name, *options = command.split()
    options += ["--key", "rows", "--n-components", "2", "--random-state", "0", "-q"]
    for others in held_out:
        assert run([name, "train.safetensors", *options, "--held-out", others]) == 0


def test_resume_of_a_finished_model_changes_nothing(here: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((here / "model.safetensors").read_bytes())
    before = factormix.load(path)
    assert run(["train", "table.csv", "-o", str(path), "--resume", "--quiet"]) == 0
    np.testing.assert_array_equal(factormix.load(path).means_, before.means_)


def test_info_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "model.safetensors", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["n_components"] == len(facts["weights"]) == 4
    assert (facts["n_factors"], facts["n_features"]) == (1, 4)
    assert (facts["epochs"], facts["planned_epochs"], facts["finished"]) == (3, 3, True)
    assert facts["feature_names"] == ["a", "b", "c", "d"]
    assert facts["samples_seen"] == 900
    assert sum(facts["weights"]) == pytest.approx(1)


def test_info_for_people(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "model.safetensors"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^components +4, \d in use$", shown, re.MULTILINE)
    assert re.search(r"^epochs +3 of 3, finished$", shown, re.MULTILINE)


@pytest.mark.usefixtures("own_machine")
def test_data_sets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "list"]) == 0
    assert "scikit-learn" in capsys.readouterr().out
    assert run(["data", "fetch", "digits"]) == 0
    assert capsys.readouterr().out == "digits comes with an installed package\n"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  Examples?:\n    .*factormix " + " ".join(command), shown, re.MULTILINE)


def test_help_shows_the_estimators_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, parameter in inspect.signature(factormix.MFA).parameters.items():
        if name in ("verbose", "callbacks", "means_init", "warm_start"):
            continue
        option = re.search(rf"--{name.replace('_', '-')} .*?\[default: (.*?)[;\]]", shown)
        assert option is not None, name
        if parameter.default is not None:
            assert option[1].strip("()") == str(parameter.default)
    assert tuple(SOLVERS) == SOLVER_NAMES
    assert f"How to train: {' or '.join(SOLVERS)}." in shown


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["data"]):
        assert run(command) == 0
        assert "Usage: factormix" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"factormix {factormix.__version__}\n"
