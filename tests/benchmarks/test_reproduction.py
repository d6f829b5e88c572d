"""``benchmarks/reproduction.py``: runs that continue, their report, and refusals."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import reproduction
import reproduction_figure1 as figure1
from harness import Outcome, Store
from reproduction_plan import QUICK

N_TRIALS = 31


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which no image set can be found."""
    names = ("FACTORMIX_DATA", "XDG_CACHE_HOME", "XDG_DATA_DIRS")
    return {**os.environ, **dict.fromkeys(names, str(folder)), "OMP_NUM_THREADS": "1"}


def list_finished(folder: Path) -> dict[Path, int]:
    """Return the result files of a run, with their times."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("trials-*/*/*.json")}


def start_run(options: list[str], output: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    """Start a run in a process and wait until two trials are finished."""
    process = subprocess.Popen(
        [sys.executable, reproduction.__file__, *options],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while len(list_finished(output)) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process


class Run:
    """One experiment on the digits, then all of them in the same folder."""

    def __init__(self, folder: Path) -> None:
        none, self.output, self.docs = folder / "none", folder / "out", folder / "docs"
        none.mkdir()
        # A second process would take longer to start than it saves.
        options = ["--quick", "--steps", "30", "--jobs", "1", "-o", str(self.output)]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment(none).items():
                patch.setenv(name, value)
            assert reproduction.main(["figure1", *options]) == 0
            self.before = list_finished(self.output)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                self.code = reproduction.main(["all", *options, "--write-docs", str(self.docs)])
        self.stdout = printed.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("reproduce"))


@pytest.mark.slow
def test_one_experiment_is_reported_alone(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["figure1", "--quick", "--steps", "30", "--jobs", "1", "-o", str(nowhere / "out")]
    assert reproduction.main([*options, "--write-docs", str(nowhere / "docs")]) == 0
    assert len(list_finished(nowhere / "out")) == 1
    assert "8 x 8 digits that come with scikit-learn" in capsys.readouterr().out
    text = (nowhere / "docs" / "reproduction.md").read_text()
    pictures = list((nowhere / "docs" / "reproduction").glob("*.png"))
    assert pictures
    assert all(f"reproduction/{picture.name}" in text for picture in pictures)


@pytest.mark.slow
def test_only_missing_trials_are_run(run: Run) -> None:
    assert run.code == 0
    after = list_finished(run.output)
    assert len(run.before) == 1
    assert len(after) == N_TRIALS
    assert {path: after[path] for path in run.before} == run.before
    assert f"{N_TRIALS} trials, 1 of them finished before" in run.stdout
    for path in after:
        assert json.loads(path.read_text())["values"]


@pytest.mark.slow
def test_a_killed_run_continues_with_the_missing_trials(nowhere: Path) -> None:
    output = nowhere / "out"
    options = ["all", "--quick", "--steps", "100", "-o", str(output)]
    process = start_run(options, output, environment(nowhere))
    process.kill()
    process.communicate()
    # The workers end with their parent: no more results appear.
    before: dict[Path, int] = {}
    while before != (found := list_finished(output)):
        before = found
        time.sleep(1.5)
    assert 2 <= len(before) < N_TRIALS
    assert reproduction.main([*options]) == 0
    after = list_finished(output)
    assert len(after) == N_TRIALS
    assert {path: after[path] for path in before} == before


@pytest.mark.slow
def test_names_the_sets_that_are_missing(run: Run) -> None:
    for name in ("mnist", "fashion-mnist", "svhn"):
        assert f"{name} was not found on this machine and could not be run" in run.stdout
    assert "8 x 8 digits that come with scikit-learn" in run.stdout
    assert f"Report: {run.output / 'report.md'}" in run.stdout


@pytest.mark.slow
def test_report_holds_every_experiment(run: Run) -> None:
    page = (run.output / "report.md").read_text()
    for title in ("Figure 1", "Figure 2", "Convergence", "Table I", "SVHN", "Streaming"):
        assert title in page
    assert "shortened" in page
    assert "so they are described beside ours" in page
    assert "**held" in page or "**not found**" in page
    assert len(list((run.output / "pictures").glob("*.png"))) == 11
    assert len(list((run.output / "figures").glob("*.png"))) == 11
    assert len(list((run.output / "figures").glob("*.svg"))) == 11
    text = (run.docs / "reproduction.md").read_text()
    pictures = list((run.docs / "reproduction").glob("*.png"))
    assert len(pictures) == 11
    assert all(f"reproduction/{picture.name}" in text for picture in pictures)


@pytest.mark.slow
def test_tables_follow_from_the_trials(run: Run) -> None:
    tables = run.output / "tables"
    with (tables / "outlier-trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {int(row["held_out"]) for row in rows} == set(range(10))
    trial = json.loads(
        next(
            run.output.glob("trials-*/table1/digits-mfa-E20-M0.05-without3-seed0.json")
        ).read_text()
    )
    row = next(
        r for r in rows
        if (r["model"], r["variant"], r["held_out"], r["score"], r["area"])
        == ("MFA", "E ≤ 20", "3", "max-component", "rank")
    )  # fmt: skip
    assert float(row["auc"]) == trial["values"]["auc"]["max-component"]["rank"]
    with (tables / "verdicts.csv").open(newline="") as file:
        found = {one["verdict"] for one in csv.DictReader(file)}
    assert found <= {"held", "held with a change", "not found"}


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for all places where image sets are looked for."""
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.slow
def test_an_interrupt_ends_the_run_and_its_processes(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = nowhere / "out"
    options = ["table1", "--quick", "--steps", "200", "--jobs", "1", "-o", str(output)]
    process = start_run(options, output, environment(nowhere))
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert not list(output.rglob(".*"))
    assert reproduction.main([*options, "--report-only"]) == 0
    assert "trials are not finished" in capsys.readouterr().out
    assert (output / "report.md").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["figure3"], "there is no experiment 'figure3': choose one of figure1"),
        (["svhn"], "svhn is not on this machine: run factormix data fetch svhn"),
        (["table1", "--report-only"], "nothing to report"),
        (["svhn", "--report-only"], "nothing to report"),
    ],
)
def test_impossible_runs_are_refused(
    arguments: list[str], message: str, nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduction.main([*arguments, "-o", str(nowhere / "out")]) == 2
    assert message in capsys.readouterr().err


def test_runs_of_two_lengths_do_not_share_a_folder(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nowhere / "trials" / "table1").mkdir(parents=True)
    report = nowhere / "report.md"
    report.write_text("of the full run")
    assert reproduction.main(["all", "--quick", "-o", str(nowhere)]) == 2
    assert "give this one a folder of its own" in capsys.readouterr().err
    assert report.read_text() == "of the full run"


def test_a_report_needs_no_data(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trials have the names of their sets."""
    store = Store(nowhere / "out" / "trials-quick")
    values = {
        "seconds": 1.0,
        "epochs": 2,
        "test_log_likelihood": 1.0,
        "components_in_use": 25,
        "sigma": 0.01,
        "late_rise": 0.0,
        "history": [[1, 0.0, 25], [2, 1.0, 25]],
        "image_shape": [28, 28],
        "note": "",
        "column_strengths": [2.0, 1.0],
        "column_cosine": 0.0,
        "neighbour_ratio": 0.5,
        "neighbour_chance": 0.001,
        "share_18_20": 0.9,
        "sample_spread": 0.5,
    }
    for trial in figure1.plan_trials(["mnist"], QUICK, 1):
        store.write(trial, Outcome(values))
    code = reproduction.main(["all", "--quick", "--report-only", "-o", str(nowhere / "out")])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "data: mnist\n" in shown.out
    assert "Nothing is finished yet on fashion-mnist" in shown.out
    assert "8 x 8 digits" not in shown.out


def test_a_damaged_set_is_not_passed_over(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = nowhere / "mnist"
    folder.mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte").write_bytes(b"nothing of the kind")
    assert reproduction.main(["figure1", "--quick", "-o", str(nowhere / "out")]) == 2
    assert "truncated or altered" in capsys.readouterr().err
    assert not list_finished(nowhere / "out")
