"""What watches a run: callbacks that stop it, the progress bar, checkpoints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factormix import MFA, InputError, load
from factormix.callbacks import Checkpoint, Progress, ProgressBar

X = np.random.default_rng(0).normal(size=(200, 4))
X[100:] += 3


def model(**options: Any) -> MFA:
    return MFA(
        **{
            "n_components": 2,
            "n_factors": 1,
            "batch_size": 20,
            "max_epochs": 20,
            "random_state": 0,
            "solver": "sgd",
        }
        | options
    )


def test_a_callback_sees_the_run():
    seen: list[Progress] = []
    fitted = model(callbacks=[seen.append]).fit(X)
    assert all(progress.model is fitted for progress in seen)
    assert [progress.steps for progress in seen] == [200] * len(seen)
    assert [progress.last for progress in seen] == [False] * (len(seen) - 1) + [True]
    steps = [progress.record["step"] for progress in seen]
    assert steps == sorted(steps)
    assert steps[-1] == 200
    kept = [progress.record for progress in seen if progress.record in fitted.history_]
    assert [r["step"] for r in fitted.history_] == sorted({r["step"] for r in kept})
    # The last call tells what the last record tells, not an empty window.
    assert seen[-1].record == fitted.history_[-1]


def test_a_callback_can_use_the_model():
    scores = []

    def watch(progress: Progress) -> None:
        scores.append(progress.model.score(X))
        progress.model.sample(3)

    watched = model(callbacks=(watch,)).fit(X)
    np.testing.assert_array_equal(watched.means_, model().fit(X).means_)
    assert scores[-1] > scores[0]


@pytest.mark.parametrize("answer", [True, np.True_])
def test_returning_true_ends_the_run(answer):
    def stop(progress: Progress) -> object:
        return answer if progress.record["step"] >= 60 else None

    others: list[int] = []
    stopped = model(
        callbacks=[stop, lambda progress: others.append(int(progress.record["step"]))]
    ).fit(X)
    assert stopped.n_steps_ == 60
    assert stopped.n_iter_ == 6
    assert others[-1] == 60
    assert stopped.history_[-1]["step"] == 60
    assert np.isfinite(stopped.score(X))
    # Without the callback the run goes on to where it would have ended.
    np.testing.assert_array_equal(
        stopped.set_params(callbacks=()).resume(X).means_, model().fit(X).means_
    )


@pytest.mark.parametrize("answer", [None, False, 0, "text", {}])
def test_other_answers_do_not_end_the_run(answer):
    assert model(max_epochs=2, callbacks=[lambda progress: answer]).fit(X).n_steps_ == 20


def test_an_exception_of_a_callback_leaves_a_whole_model():
    def fail(progress: Progress) -> None:
        if progress.record["step"] >= 50:
            raise RuntimeError("no")

    failed = model(callbacks=[fail])
    with pytest.raises(RuntimeError, match="no"):
        failed.fit(X)
    assert failed.n_steps_ == 50
    np.testing.assert_array_equal(
        failed.set_params(callbacks=()).resume(X).means_, model().fit(X).means_
    )


def test_callbacks_are_told_of_an_interrupt():
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if progress.record["step"] == 30:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = model(callbacks=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(X)
    assert seen[-1].last
    assert seen[-1].record["step"] == stopped.n_steps_ == 30


@pytest.mark.parametrize("callbacks", [5, "abc", [3], lambda progress: None, None])
def test_callbacks_must_be_callable(callbacks):
    with pytest.raises(InputError, match="callbacks must be a list or tuple of callables"):
        model(callbacks=callbacks).fit(X)


def test_the_progress_bar_shows_likelihood_and_components(capsys):
    model(verbose=1).fit(X)
    out, err = capsys.readouterr()
    assert out == ""
    assert "200/200" in err
    assert "100%" in err
    assert re.search(r"ll=-?\d+\.?\d*, used=2/2", err)


def test_the_progress_bar_goes_on_where_the_run_stood(capsys):
    stopped = model(callbacks=[lambda p: p.record["step"] >= 100]).fit(X)
    capsys.readouterr()
    stopped.set_params(callbacks=(), verbose=1).resume(X)
    err = capsys.readouterr().err
    assert "200/200" in err
    first = re.search(r"(\d+)/200", err)
    assert first is not None
    assert int(first[1]) >= 100


def test_without_verbose_nothing_is_printed(capsys):
    model().fit(X).partial_fit(X)
    assert capsys.readouterr() == ("", "")


def test_a_bar_that_was_never_shown_closes():
    ProgressBar().close()


def test_a_checkpoint_is_written_when_it_is_time(tmp_path):
    path = tmp_path / "run.safetensors"
    seen: list[tuple[int, int]] = []

    def look(progress: Progress) -> None:
        seen.append((load(path).n_steps_, int(progress.record["step"])))

    fitted = model(callbacks=[Checkpoint(path, seconds=0), look]).fit(X)
    assert all(saved == now for saved, now in seen)
    assert len(seen) > 50
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    np.testing.assert_array_equal(load(path).means_, fitted.means_)


def test_a_checkpoint_is_written_at_the_end_only_of_a_short_run(tmp_path):
    path = tmp_path / "run.safetensors"
    exists: list[bool] = []
    model(callbacks=[lambda p: exists.append(path.exists()), Checkpoint(path)]).fit(X)
    assert not any(exists)
    assert load(path).n_steps_ == 200


@pytest.mark.parametrize("cut", [70, 190])
def test_a_run_goes_on_from_any_checkpoint(tmp_path, cut):
    path = tmp_path / "run.safetensors"

    def keep(progress: Progress) -> None:
        if progress.record["step"] == cut:
            progress.model.save(path)

    whole = model(callbacks=[keep]).fit(X)
    again = load(path)
    assert again.n_steps_ == cut
    np.testing.assert_array_equal(again.resume(X).means_, whole.means_)
    np.testing.assert_array_equal(again.score_samples(X), whole.score_samples(X))


def test_a_checkpoint_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        model(callbacks=[Checkpoint(tmp_path / "no" / "run", seconds=0)]).fit(X)


KILLED = """
import sys
import numpy as np
from factormix import MFA
from factormix.callbacks import Checkpoint

X = np.random.default_rng(0).normal(size=(200, 4))
X[100:] += 3
MFA(2, 1, batch_size=20, max_epochs=100_000, random_state=0,
    callbacks=[Checkpoint(sys.argv[1], seconds=0.05)]).fit(X)
"""


@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_a_process_that_is_cut_off_leaves_its_checkpoint(tmp_path: Path, how: str):
    path = tmp_path / "run.safetensors"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert ("KeyboardInterrupt" in err) == (how == "interrupt")
    saved = load(path)
    assert saved.n_steps_ > 0
    assert np.isfinite(saved.score(X))
    saved.set_params(callbacks=[lambda progress: True])
    assert saved.resume(X).n_steps_ > 0
