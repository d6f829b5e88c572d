"""Callbacks: progress bar, checkpoints, early stopping, JSON lines and TensorBoard."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors import safe_open

from factormix import MFA, InputError, load, select, stream
from factormix.callbacks import (
    Checkpoint,
    Checkpoints,
    EarlyStopping,
    JSONLines,
    Progress,
    ProgressBar,
    TensorBoard,
)
from factormix.data.sources.convert import as_rows
from factormix.errors import TrainingWarning
from factormix.solvers import NaturalGradient
from factormix.training.evaluation import mean_log_likelihood

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
    # The last call gets the last record, not an empty window.
    assert seen[-1].record == fitted.history_[-1]


def test_a_callback_may_be_called_after_every_step():
    class Watch(list[int]):
        report_seconds = 0

        def __call__(self, progress: Progress) -> None:
            self.append(int(progress.record["step"]))

    watch = Watch()
    fitted = model(callbacks=[watch]).fit(X)
    assert watch == [*range(1, 201), 200]
    assert [record["step"] for record in fitted.history_] == list(range(2, 201, 2))


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
    # Without the callback the run ends where it would have ended.
    np.testing.assert_array_equal(
        stopped.set_params(callbacks=()).resume(X).means_, model().fit(X).means_
    )


@pytest.mark.parametrize("answer", [None, False, 0, "text", {}])
def test_other_answers_do_not_end_the_run(answer):
    assert model(max_epochs=2, callbacks=[lambda progress: answer]).fit(X).n_steps_ == 20


def test_an_exception_in_a_callback_leaves_a_complete_model():
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


def test_an_interrupt_is_the_last_call_and_leaves_a_checkpoint(tmp_path):
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if progress.record["step"] == 30:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = model(callbacks=[Checkpoint(tmp_path / "run"), interrupt])
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(X)
    assert load(tmp_path / "run").n_steps_ == 30
    assert seen[-1].last
    assert seen[-1].record["step"] == stopped.n_steps_ == 30


@pytest.mark.parametrize("callbacks", [5, "abc", [3], lambda progress: None, None])
def test_callbacks_must_be_callable(callbacks):
    with pytest.raises(InputError, match="callbacks must be a list or tuple of callables"):
        model(callbacks=callbacks).fit(X)


def test_the_progress_bar_shows_likelihood_and_components(terminal, capsys):
    model(verbose=1).fit(X)
    out, err = capsys.readouterr()
    assert out == ""
    assert "200/200" in err
    assert "100%" in err
    assert re.search(r"ll=-?\d+\.?\d*, used=2/2", err)


def test_the_progress_bar_of_a_resumed_run_starts_at_its_step(terminal, capsys):
    stopped = model(callbacks=[lambda p: p.record["step"] >= 100]).fit(X)
    capsys.readouterr()
    stopped.set_params(callbacks=(), verbose=1).resume(X)
    err = capsys.readouterr().err
    assert "200/200" in err
    first = re.search(r"(\d+)/200", err)
    assert first is not None
    assert int(first[1]) >= 100


def test_no_bar_is_drawn_into_a_log(capsys):
    model(verbose=1).fit(X)
    select(X, [1, 2], [1], estimator=model(), verbose=1)
    assert capsys.readouterr() == ("", "")


def test_without_verbose_nothing_is_printed(capsys):
    model().fit(X).partial_fit(X)
    assert capsys.readouterr() == ("", "")


def test_a_bar_that_was_never_shown_closes():
    ProgressBar().close()


def test_a_checkpoint_is_written_when_due(tmp_path):
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


def test_a_checkpoint_in_a_missing_folder_is_refused(tmp_path):
    steps: list[float] = []
    watched = [lambda p: steps.append(p.record["step"]), Checkpoint(tmp_path / "no" / "run")]
    with pytest.raises(InputError, match="does not exist"):
        model(callbacks=watched).fit(X)
    assert len(steps) == 1, "at the start"


def test_training_goes_on_without_checkpoints_and_tries_again(tmp_path):
    """The folder is away for a while, as on a drive that was removed."""
    folder, away = tmp_path / "runs", tmp_path / "away"
    folder.mkdir()
    saved: list[bool] = []

    def move(progress: Progress) -> None:
        saved.append((folder / "m").exists())
        if progress.record["step"] in (60, 140):
            folder.rename(away)
        if progress.record["step"] in (100, 180):
            away.rename(folder)

    with pytest.warns(TrainingWarning) as warned:
        fitted = model(callbacks=[move, Checkpoint(folder / "m", seconds=0)]).fit(X)
    assert len(warned) == 2, "once for each absence"
    assert all("does not exist" in str(warning.message) for warning in warned)
    assert saved[0] is False
    assert saved[-1] is True
    assert load(folder / "m").n_steps_ == fitted.n_steps_ == 200
    np.testing.assert_array_equal(fitted.means_, model().fit(X).means_)


def test_the_last_checkpoint_must_be_written(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()

    def remove(progress: Progress) -> None:
        if progress.record["step"] == 100:
            shutil.rmtree(folder)

    watched = model(callbacks=[remove, Checkpoint(folder / "m", seconds=0)])
    with pytest.warns(TrainingWarning), pytest.raises(InputError, match="does not exist"):
        watched.fit(X)
    assert watched.n_steps_ == 200


def test_a_full_disk_does_not_end_a_run(tmp_path, limit_file_size):
    path = tmp_path / "run.safetensors"

    def fill(progress: Progress) -> None:
        limit_file_size(1000 if 60 <= progress.record["step"] < 150 else None)

    with pytest.warns(TrainingWarning, match="make room or choose another path") as warned:
        model(callbacks=[fill, Checkpoint(path, seconds=0)]).fit(X)
    assert len(warned) == 1
    assert str(warned[0].message).startswith("no checkpoint could be saved, and training goes on")
    assert load(path).n_steps_ == 200
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_callback_finds_what_it_needs_in_progress():
    seen: list[Progress] = []
    fitted = model(callbacks=[seen.append]).fit(X)
    for progress in seen:
        assert progress.recorded == any(progress.record is one for one in fitted.history_)
        assert progress.run is seen[0].run
        assert progress.features.count == 4
    run = seen[-1].run
    assert mean_log_likelihood(run.parameters, run.units, as_rows(X[:7])) == fitted.score(X[:7])


def test_held_out_columns_of_other_names_are_refused():
    frame = pd.DataFrame(X, columns=list("abcd"))
    watched = model(callbacks=[EarlyStopping(frame.rename(columns={"d": "e"}))])
    with pytest.raises(ValueError, match="feature names"):
        watched.fit(frame)


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


def test_a_killed_process_leaves_its_checkpoint(tmp_path: Path):
    path = tmp_path / "run.safetensors"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)]) as process:
        while not path.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    assert process.returncode != 0
    saved = load(path)
    assert saved.n_steps_ > 0
    assert np.isfinite(saved.score(X))
    saved.set_params(callbacks=[lambda progress: True])
    assert saved.resume(X).n_steps_ > 0


def overfitting(seed: int = 0, **options: Any) -> tuple[MFA, np.ndarray, np.ndarray]:
    """Few rows of noise and many parameters: training soon harms other rows."""
    draw = np.random.default_rng(seed)
    train, held_out = draw.normal(size=(120, 12)), draw.normal(size=(400, 12))
    defaults = {"n_components": 6, "n_factors": 4, "random_state": 0, "max_epochs": 300}
    solver = NaturalGradient(tol=0, offset=40.0)
    return MFA(**defaults | {"solver": solver} | options), train, held_out


def test_held_out_rows_end_a_run_and_the_best_model_stays():
    model, train, held_out = overfitting()
    whole = model.fit(train).score(held_out)
    watch = EarlyStopping(held_out)
    model.set_params(callbacks=[watch]).fit(train)
    assert model.n_iter_ < 300
    assert model.score(held_out) == watch.best_score_ > whole
    scores = {r["epoch"]: r["held_out"] for r in model.history_ if "held_out" in r}
    assert max(scores.values()) == scores[watch.best_epoch_] == watch.best_score_
    assert list(scores)[-1] - watch.best_epoch_ >= watch.patience * watch.epochs
    assert len(scores) > watch.patience
    # It is over: nothing is left to resume.
    before = model.means_.copy()
    np.testing.assert_array_equal(model.resume(train).means_, before)
    assert np.isfinite(model.partial_fit(train).score(held_out))


def test_early_stopping_serves_another_fit():
    model, train, held_out = overfitting()
    watch = EarlyStopping(held_out, patience=2)
    first = model.set_params(callbacks=[watch]).fit(train).means_
    epoch = watch.best_epoch_
    np.testing.assert_array_equal(model.fit(train).means_, first)
    assert watch.best_epoch_ == epoch
    # Even if its first evaluation comes later than the last one of the other fit.
    model.set_params(n_components=2, max_epochs=2000).fit(train)
    assert model.weights_.shape == (2,)
    fresh = EarlyStopping(held_out, patience=2)
    np.testing.assert_array_equal(
        model.means_, model.set_params(callbacks=[fresh]).fit(train).means_
    )


def test_a_run_that_ends_in_its_first_phase_is_scored_once():
    watch = EarlyStopping(X[::2])
    trained = model(solver="em", max_epochs=5, callbacks=[watch]).fit(X[1::2])
    assert watch.best_score_ == trained.score(X[::2]) == trained.history_[-1]["held_out"]
    assert watch.best_epoch_ == 5


def test_the_best_model_stays_however_small_its_gain():
    watch = EarlyStopping(X[::2], tol=1.0)
    trained = model(solver="em", max_epochs=40, callbacks=[watch]).fit(X[1::2])
    scores = [r["held_out"] for r in trained.history_ if "held_out" in r]
    assert len(scores) == 4
    assert trained.score(X[::2]) == max(scores) > scores[0]


@pytest.mark.parametrize("solver", ["natural", "sgd", "em"])
def test_the_first_phases_of_a_run_do_not_count(solver):
    """Centroids alone do not raise the likelihood, and must not end the training."""
    watch = EarlyStopping(X[::2], patience=1, epochs=0.1)
    trained = model(solver=solver, max_epochs=40, callbacks=[watch]).fit(X[1::2])
    scores = [r["epoch"] for r in trained.history_ if "held_out" in r]
    assert scores[0] >= {"natural": 2.0, "sgd": 9.0, "em": 10.0}[solver]
    assert watch.best_score_ == trained.score(X[::2])


@pytest.mark.parametrize("by_file", [False, True])
def test_an_interrupted_run_keeps_its_last_model(by_file, tmp_path):
    """The resumed run ends where it would have ended."""
    model, train, held_out = overfitting()
    expected = model.set_params(callbacks=[EarlyStopping(held_out)]).fit(train)
    means, late = expected.means_.copy(), expected.history_[-2]["step"]

    def interrupt(progress: Progress) -> None:
        if progress.record["step"] == late:
            os.kill(os.getpid(), signal.SIGINT)

    model.set_params(callbacks=[EarlyStopping(held_out), interrupt])
    with pytest.raises(KeyboardInterrupt):
        model.fit(train)
    assert model.n_steps_ == late
    if by_file:
        model.save(tmp_path / "m")
        model = load(tmp_path / "m").set_params(callbacks=[EarlyStopping(held_out)])
    np.testing.assert_array_equal(model.resume(train).means_, means)
    model.save(tmp_path / "n")
    assert not [name for name in tensor_names(tmp_path / "n") if name.startswith("best.")]


def tensor_names(path: Path) -> list[str]:
    with safe_open(path, framework="np") as file:
        return list(file.keys())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patience": 0}, "patience must be a whole number of 1 or more, not 0"),
        ({"patience": 1.5}, "patience must be a whole number"),
        ({"tol": -1.0}, "tol must be 0 or more"),
        ({"epochs": 0}, "epochs must be positive"),
        ({"held_out": np.full((3, 4), np.inf)}, "held_out cannot be used: .*infinite value"),
        ({"held_out": X[0]}, "held_out .*X.reshape"),
        ({"held_out": "val.npy"}, "held_out .*is the path .*read_rows"),
    ],
)
def test_wrong_options_of_early_stopping_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        EarlyStopping(**{"held_out": X} | options)


def test_held_out_rows_of_another_width_are_refused_at_the_start():
    steps: list[float] = []
    watched = [lambda p: steps.append(p.record["step"]), EarlyStopping(X[:, :3])]
    with pytest.raises(
        InputError, match="held_out has 3 features, but MFA is expecting 4 features"
    ):
        model(callbacks=watched).fit(X)
    assert len(steps) == 1


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_seconds(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{**record, "seconds": 0} for record in history]


def test_every_record_is_a_line(tmp_path):
    path = tmp_path / "run.jsonl"
    seen: list[int] = []

    def count_lines(progress: Progress) -> None:
        seen.append(len(lines(path)) if path.exists() else 0)

    watchers = [EarlyStopping(X[:30], patience=99), JSONLines(path), count_lines]
    fitted = model(callbacks=watchers).fit(X)
    assert lines(path) == fitted.history_
    assert any("held_out" in record for record in lines(path))
    assert len(seen) > 50, "during the run"
    assert sorted(seen) == seen


def test_a_resumed_run_has_the_lines_of_an_uninterrupted_one(tmp_path):
    path, folder = tmp_path / "run.jsonl", tmp_path / "run"
    stop = [Checkpoints(folder, 0), lambda p: p.recorded and p.record["step"] >= 100]
    stopped = model(callbacks=[JSONLines(path), *stop]).fit(X)
    earlier = load(sorted(folder.iterdir())[0])
    assert earlier.n_steps_ < stopped.n_steps_
    # As if the process had been killed while it wrote a line.
    with open(path, "a") as file:
        file.write('{"epoch": 1, "st')
    earlier.set_params(callbacks=[JSONLines(path)]).resume(X)
    assert without_seconds(lines(path)) == without_seconds(model().fit(X).history_)


def test_a_new_run_refuses_the_file_of_another(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("mine\n")
    with pytest.raises(InputError, match="exists already, from another run"):
        model(callbacks=[JSONLines(path)]).fit(X)
    assert path.read_text() == "mine\n"
    with pytest.raises(InputError, match="is a folder"):
        model(callbacks=[JSONLines(tmp_path)]).fit(X)
    with pytest.raises(InputError, match="does not exist"):
        model(callbacks=[JSONLines(tmp_path / "no" / "run.jsonl")]).fit(X)


def test_records_of_a_stream_are_lines_too(tmp_path):
    path = tmp_path / "run.jsonl"
    watched = model(callbacks=[JSONLines(path)])
    list(stream(watched, (X for _ in range(30))))
    assert lines(path) == watched.history_
    assert len(watched.history_) == 30


def test_a_full_disk_costs_no_line(tmp_path, limit_file_size):
    path = tmp_path / "run.jsonl"

    def fill(progress: Progress) -> None:
        limit_file_size(3000 if 60 <= progress.record["step"] < 150 else None)

    with pytest.warns(TrainingWarning, match="make room, and the missing lines follow") as warned:
        fitted = model(callbacks=[fill, JSONLines(path)]).fit(X)
    assert len(warned) == 1
    assert lines(path) == fitted.history_


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
