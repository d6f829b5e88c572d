"""The command in real processes: a run that is killed, its report, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from factormix import cli
from factormix.studies.harness import Outcome, Store
from factormix.studies.reproduction import QUICK, figure1

N_TRIALS = 31


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which no image set can be found."""
    names = ("FACTORMIX_DATA", "XDG_CACHE_HOME", "XDG_DATA_DIRS")
    return {**os.environ, **dict.fromkeys(names, str(folder)), "OMP_NUM_THREADS": "1"}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "factormix", "reproduce", *map(str, arguments)]


def finished(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("trials-*/*/*.json")}


def started(arguments: list[str], output: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    """Start a run and wait until some trials are finished."""
    process = subprocess.Popen(
        arguments, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    limit = time.monotonic() + 60
    while len(finished(output)) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)
    return process


class Run:
    """A quick run on the digits that was killed once and then run to its end."""

    def __init__(self, folder: Path) -> None:
        none, self.output = folder / "none", folder / "out"
        none.mkdir()
        arguments = command("all", "--quick", "--steps", "100", "-o", self.output)
        arguments += ["--write-docs", str(folder / "docs")]
        process = started(arguments, self.output, environment(none))
        process.kill()
        process.communicate()
        self.docs = folder / "docs"
        # The workers end with their parent: what is there does not grow any more.
        time.sleep(1.0)
        self.before = finished(self.output)
        time.sleep(1.5)
        self.later = finished(self.output)
        self.done = subprocess.run(
            arguments, env=environment(none), text=True, capture_output=True, timeout=120
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("reproduce"))


def test_a_killed_run_goes_on_with_the_missing_trials(run: Run) -> None:
    assert run.done.returncode == 0, run.done.stderr
    assert 2 <= len(run.before) < N_TRIALS
    assert run.later == run.before
    after = finished(run.output)
    assert len(after) == N_TRIALS
    assert {path: after[path] for path in run.before} == run.before
    assert f"{N_TRIALS} trials, {len(run.before)} of them finished before" in run.done.stdout
    for path in after:
        assert json.loads(path.read_text())["values"]


def test_says_what_could_not_be_run(run: Run) -> None:
    for name in ("mnist", "fashion-mnist", "svhn"):
        assert f"{name} was not found on this machine and could not be run" in run.done.stdout
    assert "8 x 8 digits that come with scikit-learn" in run.done.stdout
    assert f"Report: {run.output / 'report.html'}" in run.done.stdout


def test_report_holds_every_experiment(run: Run) -> None:
    page = (run.output / "report.html").read_text()
    for title in ("Figure 1", "Figure 2", "Convergence", "Table I", "SVHN", "Streaming"):
        assert title in page
    assert "shortened" in page
    assert "figures were not at hand" in page
    assert 'class="badge' in page
    assert page.count("data:image/png;base64,") == 11
    assert len(list((run.output / "figures").glob("*.png"))) == 11
    assert len(list((run.output / "figures").glob("*.svg"))) == 11
    text = (run.docs / "reproduction.md").read_text()
    pictures = list((run.docs / "reproduction").glob("*.png"))
    assert len(pictures) == 11
    assert all(f"reproduction/{picture.name}" in text for picture in pictures)


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


def test_an_interrupt_ends_the_run_and_its_processes(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = nowhere / "out"
    options = ["table1", "--quick", "--steps", "400", "--jobs", "1", "-o", str(output)]
    process = started(command(*options), output, environment(nowhere))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert not list(output.rglob(".*"))
    assert cli.run(["reproduce", *options, "--report-only"]) == 0
    assert "trials are not finished" in capsys.readouterr().out
    assert (output / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["figure3"], "there is no experiment 'figure3': choose one of figure1"),
        (["svhn"], "svhn is not on this machine: run factormix data fetch svhn"),
        (["table1", "--report-only"], "nothing to report"),
        (["svhn", "--report-only"], "nothing to report"),
    ],
)
def test_what_cannot_be_run_is_refused(
    arguments: list[str], message: str, nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["reproduce", *arguments, "-o", str(nowhere / "out")]) == 2
    assert message in capsys.readouterr().err


def test_runs_of_two_lengths_do_not_share_a_folder(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nowhere / "trials" / "table1").mkdir(parents=True)
    report = nowhere / "report.html"
    report.write_text("of the full run")
    assert cli.run(["reproduce", "all", "--quick", "-o", str(nowhere)]) == 2
    assert "give this one a folder of its own" in capsys.readouterr().err
    assert report.read_text() == "of the full run"


def test_a_report_needs_no_data(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trials alone say on which sets they were run."""
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
    code = cli.run(["reproduce", "all", "--quick", "--report-only", "-o", str(nowhere / "out")])
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
    assert cli.run(["reproduce", "figure1", "--quick", "-o", str(nowhere / "out")]) == 2
    assert "truncated or altered" in capsys.readouterr().err
    assert not finished(nowhere / "out")
