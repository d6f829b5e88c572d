"""Trainings that are killed, terminated, out of disk space or damaged: nothing but time is lost.

Processes are real and are ended by real signals. They are forked from one that has imported all
packages, which starts a training in a hundredth of the time that a new interpreter takes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import factormix
from factormix.callbacks import checkpoints_in
from factormix.cli import run

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")

DRIVER = """
import json, os, random, signal, sys, time
import factormix.estimators, factormix.data.readers, factormix.training.checkpoints, tqdm.auto
from factormix import cli
from factormix.callbacks import checkpoints_in

order = json.loads(sys.argv[1])
draw = random.Random(order["seed"])

def newest():
    there = checkpoints_in("run")
    return int(there[-1].stem.partition("-")[2]) if there else 0

def start():
    child = os.fork()
    if child:
        return child
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    sys.argv[1:] = order["command"]
    try:
        cli.main()
    finally:
        # As a process ends, without the exit handlers of the parent's packages.
        sys.stderr.flush()
        error = sys.exc_info()[1]
        os._exit(error.code if isinstance(error, SystemExit) and error.code else 0)

codes = []
for number in order["signals"]:
    before, child = newest(), start()
    enough = before + draw.randint(1, order["most"])
    while newest() < enough:
        done, status = os.waitpid(child, os.WNOHANG)
        assert not done, (status, open("log").read())
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.03))
    os.kill(child, number)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
order["command"][order["command"].index("--every") + 1] = "1h"
codes.append(os.waitstatus_to_exitcode(os.waitpid(start(), 0)[1]))
print(json.dumps(codes))
"""

SMALL = ["--n-components", "4", "--n-factors", "1", "--batch-size", "10", "--random-state", "0"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a table, which is the working folder."""
    random = np.random.default_rng(0)
    table = random.normal(size=(400, 4)) + 5 * random.integers(0, 3, size=(400, 1))
    np.save(tmp_path / "table.npy", table)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*more: str, solver: str = "sgd", epochs: int = 50) -> list[str]:
    start = ["train", "table.npy", "-o", "model.safetensors", *SMALL]
    return [*start, "--solver", solver, "--max-epochs", str(epochs), *more]


def disturb(signals: list[int], arguments: list[str], *, seed: int, most: int = 6) -> list[int]:
    """Stop a training by one signal after the other, then finish it; return the exit codes."""
    order: dict[str, Any] = {"signals": signals, "command": arguments, "seed": seed, "most": most}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(order)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    codes: list[int] = json.loads(done.stdout)
    return codes


def assert_same_as_undisturbed(arguments: list[str]) -> None:
    """Compare a disturbed run with the same run in this process, bit by bit."""
    plain = arguments[: arguments.index("--checkpoint")]
    plain[plain.index("-o") + 1] = "undisturbed.safetensors"
    assert run([*plain, "-q"]) == 0
    disturbed, whole = (factormix.load(f"{name}.safetensors") for name in ("model", "undisturbed"))
    assert disturbed.finished_
    for name in ("weights_", "means_", "precision_diag_", "precision_factors_"):
        np.testing.assert_array_equal(getattr(disturbed, name), getattr(whole, name))
    for one, other in zip(disturbed.history_, whole.history_, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def run_with_warnings(arguments: list[str]) -> int:
    """Run a command that prints its warnings, as it does outside of tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        return run(arguments)


CHECKPOINTS = ["--checkpoint", "run", "--every", "0s", "--keep", "2", "--resume"]


@pytest.mark.parametrize(
    ("solver", "kills"),
    [
        ("sgd", 3),
        pytest.param("sgd", 10, marks=pytest.mark.slow),
        pytest.param("natural", 4, marks=pytest.mark.slow),
    ],
)
def test_kills_at_random_moments_change_nothing(here, solver, kills):
    """A kill comes at any moment after a few checkpoints, so that some come while one is written.

    The natural solver converges before all of its passes are done, and is killed less often.
    """
    arguments = command(*CHECKPOINTS, solver=solver)
    most = 6 if solver == "sgd" else 2
    codes = disturb([signal.SIGKILL] * kills, arguments, seed=0, most=most)
    assert codes == [-signal.SIGKILL] * kills + [0]
    assert_same_as_undisturbed(arguments)
    assert len(checkpoints_in("run")) == 2
    assert sorted(path.name for path in Path("run").iterdir()) == [
        path.name for path in checkpoints_in("run")
    ], "no unfinished file is left"


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 10])
def test_terminations_change_nothing(here, times):
    arguments = command(*CHECKPOINTS)
    codes = disturb([signal.SIGTERM] * times, arguments, seed=1)
    assert codes == [143] * times + [0]
    log = Path("log").read_text()
    assert log.count("stopped, and saved run/checkpoint-") == times
    assert "continue with: factormix train table.npy -o model.safetensors" in log
    assert "--checkpoint run --every 0s --keep 2 --resume" in log
    assert "run has no checkpoints yet: the run starts from the beginning" in log
    assert_same_as_undisturbed(arguments)


def test_a_damaged_checkpoint_costs_one_interval(here, capsys):
    arguments = command(*CHECKPOINTS, epochs=5)
    assert run([*arguments, "-q"]) == 0
    newest = checkpoints_in("run")[-1]
    content = bytearray(newest.read_bytes())
    content[-100] ^= 8
    newest.write_bytes(content)
    assert run_with_warnings([*arguments, "-q"]) == 0
    err = capsys.readouterr().err
    assert "factormix: note: 1 of the 2 checkpoints in run cannot be used" in err
    assert newest.name in err
    assert "is damaged" in err
    assert_same_as_undisturbed(arguments)


def test_bad_options_are_reported_before_any_work(here, capsys):
    cases = {
        ("--every", "5m"): "--every is about checkpoints",
        ("--keep", "2"): "--keep is about checkpoints",
        ("--checkpoint", "run", "--every", "soon"): "'soon' is not a time",
        ("--checkpoint", "run", "--keep", "0"): "keep",
        ("--checkpoint", "table.npy"): "table.npy is a file",
    }
    for options, message in cases.items():
        assert run(command(*options)) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    assert sorted(os.listdir()) == ["table.npy"]


def test_a_new_run_leaves_the_checkpoints_of_another_alone(here, capsys):
    assert run(command("--checkpoint", "run", "-q", epochs=2)) == 0
    before = [(path, path.read_bytes()) for path in checkpoints_in("run")]
    assert run(command("--checkpoint", "run", "-q", epochs=2)) == 2
    assert "run holds checkpoints of an earlier run" in capsys.readouterr().err
    assert [(path, path.read_bytes()) for path in checkpoints_in("run")] == before
    # A finished run has nothing left to do; other commands read its newest checkpoint.
    assert run(command("--checkpoint", "run", "--resume", "-q", epochs=2)) == 0
    assert run(["info", "run"]) == 0
    assert "components" in capsys.readouterr().out


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, -1))
from factormix.cli import main
main()
"""


def _mounted(folder: Path, size: str) -> bool:
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    )
    return made.returncode == 0


@pytest.fixture
def small_disk(here: Path) -> Iterator[Path]:
    """A file system of 300 KiB, where mounting is allowed."""
    folder = here / "disk"
    if not _mounted(folder, "300k"):
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_small_file_system_that_is_full_does_not_end_a_run(here, small_disk, capsys):
    """The second checkpoint and a large file have no room beside each other."""
    arguments = command("--checkpoint", "disk/run", "--every", "0s", "-q", epochs=5)
    (small_disk / "filler").write_bytes(bytes(290_000))
    assert run_with_warnings(arguments) == 0
    err = capsys.readouterr().err
    assert "no checkpoint could be saved in disk/run, and training goes on without it" in err
    (small_disk / "filler").unlink()
    assert run([*arguments, "--resume"]) == 0
    assert_same_as_undisturbed(arguments)


def test_a_limit_on_the_size_of_files_does_not_end_a_run(here):
    """A quota of a user's files, where mounting is not allowed."""
    # A model of this size has room in no file; the run ends without it and says so.
    done = subprocess.run(
        [sys.executable, "-c", FULL, *command("--checkpoint", "run", "--every", "0s", epochs=3)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "no checkpoint could be saved in run, and training goes on without it" in done.stderr
    assert "cannot write model.safetensors" in done.stderr
    assert checkpoints_in("run") == []
    assert sorted(os.listdir()) == ["run", "table.npy"]
