"""The harness: results on disk, and trials in real processes that fail, die or are stopped."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np
import pytest
from harness import (
    Outcome,
    Settings,
    Store,
    Table,
    Trial,
    median,
    read_results,
    run_trials,
)


def test_tables_are_written_as_csv_and_markdown(tmp_path: Path) -> None:
    Table("t", "A caption.", ("a", "b"), [["x|y, z", None], [1, 0.5]]).save(tmp_path)
    with (tmp_path / "t.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["a", "b"], ["x|y, z", ""], ["1", "0.5"]]
    assert "| x\\|y, z | – |" in (tmp_path / "t.md").read_text()


def test_results_of_other_settings_or_damaged_ones_do_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    trial = Trial("table1", "one", {"seed": 0, "classes": (1, 2)}, work)
    assert store.read(trial) is None
    store.write(trial, Outcome({"auc": 0.5}, {"scores": np.arange(3.0)}))
    assert store.read(trial) == {"auc": 0.5}
    np.testing.assert_array_equal(store.arrays(trial)["scores"], np.arange(3.0))
    assert store.read(Trial("table1", "one", {"seed": 1, "classes": (1, 2)}, work)) is None
    whole = store.path(trial).read_bytes()
    for damaged in (whole[:-3], b"\xff" + whole, b"{}", whole.replace(b'"auc": 0.5', b"")):
        store.path(trial).write_bytes(damaged)
        assert store.read(trial) is None
    store.path(trial).write_bytes(whole)
    beside = store.path(trial, ".arrays.safetensors")
    beside.write_bytes(b"\0" * 20)
    assert store.read(trial) is None
    beside.unlink()
    assert store.read(trial) is None


WRITER = """
import sys, time
from pathlib import Path
from harness import Outcome, Store, Trial, run_trials
from factormix.files import replacing

def write(settings, data_folder):
    with replacing(settings["path"]) as temporary:
        temporary.write_text("half of it")
        time.sleep(60)
    return Outcome({})

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    names = ("one", "two")
    trials = [Trial("table1", n, {"path": str(folder / f"{n}.json")}, write) for n in names]
    run_trials(trials, Store(folder), jobs=2)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_processes_that_are_stopped_while_they_write_leave_nothing_behind(
    number: signal.Signals, tmp_path: Path
) -> None:
    """SIGTERM ends the parent at once; on SIGINT it ends its workers itself."""
    script, folder = tmp_path / "writer.py", tmp_path / "out"
    script.write_text(WRITER)
    folder.mkdir()
    path = os.pathsep.join([str(Path(harness.__file__).parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, script, folder],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: len(list(folder.iterdir())) == 2)
    process.send_signal(number)
    process.communicate()
    assert process.returncode != 0
    wait_until(lambda: not list(folder.iterdir()))


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def work(settings: Settings, data_folder: str | None) -> Outcome:
    """Do what the settings say, in a process of the harness."""
    import torch

    match settings["what"]:
        case "die":
            os._exit(7)
        case "finish and die":
            path = Path(settings["path"])
            trial = Trial("x", path.stem, settings, work)
            Store(path.parent.parent).write(trial, Outcome({"done": True}))
            os._exit(7)
        case "run out of memory":
            raise MemoryError
        case "raise":
            raise ValueError("nonsense")
    return Outcome(
        {
            "process": os.getpid(),
            "threads": torch.get_num_threads(),
            "variable": os.environ.get("OMP_NUM_THREADS"),
            "data_folder": data_folder,
        }
    )


def make_trials(*what: str) -> list[Trial]:
    return [Trial("x", f"{n}", {"what": each, "n": n}, work) for n, each in enumerate(what)]


@pytest.mark.slow
def test_a_trial_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    trials = make_trials("run", "raise", "run", "die", "run out of memory")
    settings = {"what": "finish and die", "path": str(tmp_path / "x" / "5.json"), "n": 5}
    # A trial with a result is finished, even if its process has died.
    trials.append(Trial("x", "5", settings, work))
    store, seen = Store(tmp_path), list[tuple[str, bool]]()

    def on_finish(trial: Trial, failure: str | None) -> None:
        seen.append((trial.name, failure is None))

    failures = run_trials(trials, store, "here", jobs=1, on_finish=on_finish)
    assert failures == {
        "x/1": "ValueError: nonsense",
        "x/3": "its process ended with code 7",
        "x/4": "there is not enough memory: use fewer --jobs",
    }
    passed = [True, False, True, False, False, True]
    assert seen == [(f"{n}", good) for n, good in enumerate(passed)]
    results = read_results(trials, store)
    assert [one["n"] for one in results] == [0, 2, 5]
    assert {one["data_folder"] for one in results[:2]} == {"here"}
    assert results[0]["process"] == results[1]["process"], "a process is used again"
    assert store.read(trials[5]) == {"done": True}
    assert store.read(trials[1]) is None


def test_missing_results_are_run_in_fresh_processes_with_their_threads(tmp_path: Path) -> None:
    trials, store = make_trials("run", "run"), Store(tmp_path)
    before = os.environ.get("OMP_NUM_THREADS")
    run_trials(trials, store, jobs=1, threads=2, fresh=True)
    first = read_results(trials, store)
    assert first[0]["process"] != first[1]["process"]
    assert [(one["threads"], one["variable"]) for one in first] == [(2, "2")] * 2
    store.discard(trials[1])
    assert store.read(trials[1]) is None
    run_trials(trials, store, threads=None)
    again = read_results(trials, store)
    assert again[0]["process"] == first[0]["process"]
    assert again[1]["process"] != first[1]["process"]
    assert again[1]["variable"] is None
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_median_of_nothing_is_no_number() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert math.isnan(median([]))


def test_settings_are_compared_as_json_has_them(tmp_path: Path) -> None:
    store, trial = Store(tmp_path), Trial("x", "one", {"sizes": (1, 2)}, work)
    store.write(trial, Outcome({"a": 1}))
    assert json.loads(store.path(trial).read_text())["settings"] == {"sizes": [1, 2]}
    assert store.read(trial) == {"a": 1}
