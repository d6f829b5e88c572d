"""Runs that are written down: JSON lines and TensorBoard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factormix import MFA, InputError, load, stream
from factormix.callbacks import Checkpoints, EarlyStopping, JSONLines, TensorBoard

X = np.random.default_rng(0).normal(size=(200, 4))
X[100:] += 3


def model(**options: Any) -> MFA:
    defaults = {"n_components": 2, "n_factors": 1, "batch_size": 20, "max_epochs": 20}
    return MFA(**defaults | {"random_state": 0, "solver": "sgd"} | options)


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path) -> int:
    return len(lines(path)) if path.exists() else 0


def timeless(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{**record, "seconds": 0} for record in history]


def test_every_record_is_a_line(tmp_path):
    path = tmp_path / "run.jsonl"
    seen: list[int] = []
    watchers = [EarlyStopping(X[:30], patience=99), JSONLines(path)]
    fitted = model(callbacks=[*watchers, lambda p: seen.append(written(path))]).fit(X)
    assert lines(path) == fitted.history_
    assert any("held_out" in record for record in lines(path))
    assert len(seen) > 50, "as it goes"
    assert sorted(seen) == seen


def test_a_resumed_run_has_the_lines_of_an_undisturbed_one(tmp_path):
    path, folder = tmp_path / "run.jsonl", tmp_path / "run"
    stop = [Checkpoints(folder, 0), lambda p: p.recorded and p.record["step"] >= 100]
    stopped = model(callbacks=[JSONLines(path), *stop]).fit(X)
    earlier = load(sorted(folder.iterdir())[0])
    assert earlier.n_steps_ < stopped.n_steps_
    # As if it had been killed while it wrote a line.
    with open(path, "a") as file:
        file.write('{"epoch": 1, "st')
    earlier.set_params(callbacks=[JSONLines(path)]).resume(X)
    assert timeless(lines(path)) == timeless(model().fit(X).history_)


def test_a_new_run_leaves_the_file_of_another_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("mine\n")
    with pytest.raises(InputError, match="exists already, from another run"):
        model(callbacks=[JSONLines(path)]).fit(X)
    assert path.read_text() == "mine\n"
    with pytest.raises(InputError, match="is a folder"):
        model(callbacks=[JSONLines(tmp_path)]).fit(X)
    with pytest.raises(InputError, match="does not exist"):
        model(callbacks=[JSONLines(tmp_path / "no" / "run.jsonl")]).fit(X)


def test_a_stream_is_written_down_too(tmp_path):
    path = tmp_path / "run.jsonl"
    watched = model(callbacks=[JSONLines(path)])
    list(stream(watched, (X for _ in range(30))))
    assert lines(path) == watched.history_
    assert len(watched.history_) == 30


FULL = """
import resource, signal, sys, warnings
import numpy as np
from factormix import MFA
from factormix.callbacks import JSONLines

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
X = np.random.default_rng(0).normal(size=(200, 4))
def fill(progress):
    full = 60 <= progress.record["step"] < 150
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000 if full else resource.RLIM_INFINITY, -1))
with warnings.catch_warnings(record=True) as warned:
    MFA(2, 1, solver="sgd", batch_size=20, max_epochs=20, random_state=0,
        callbacks=[fill, JSONLines(sys.argv[1])]).fit(X)
print(len(warned), warned[0].message)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limits")
def test_a_full_disk_costs_no_line(tmp_path):
    path = tmp_path / "run.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("1 ")
    assert "make room, and the missing lines follow" in done.stdout
    table = np.random.default_rng(0).normal(size=(200, 4))
    assert timeless(lines(path)) == timeless(model().fit(table).history_)


def test_tensorboard_has_the_curves(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stop = [Checkpoints(tmp_path / "run", 0), lambda p: p.recorded and p.record["step"] >= 100]
    model(callbacks=[TensorBoard(tmp_path / "board"), *stop]).fit(X)
    earlier = load(sorted((tmp_path / "run").iterdir())[0])
    earlier.set_params(callbacks=[TensorBoard(tmp_path / "board")]).resume(X)
    expected = model().fit(X).history_
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert {"log_likelihood", "components_in_use", "epoch"} <= set(board.Tags()["scalars"])
    curve = board.Scalars("log_likelihood")
    assert [event.step for event in curve] == [record["step"] for record in expected]
    np.testing.assert_allclose(
        [event.value for event in curve], [record["log_likelihood"] for record in expected], 1e-5
    )


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r'pip install "factormix\[tensorboard\]"'):
        TensorBoard(tmp_path)
