"""Folders of numbered checkpoints, and runs that continue from them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factormix import MFA, InputError, load
from factormix.callbacks import Checkpoints, EarlyStopping, Progress, checkpoints_in
from factormix.errors import TrainingWarning

X = np.random.default_rng(0).normal(size=(200, 4))
X[100:] += 3


def model(**options: Any) -> MFA:
    defaults = {"n_components": 2, "n_factors": 1, "batch_size": 20, "max_epochs": 20}
    return MFA(**defaults | {"random_state": 0, "solver": "sgd"} | options)


def same(a: MFA, b: MFA) -> None:
    for name in ("weights_", "means_", "precision_diag_", "precision_factors_"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    timeless = [{k: v for k, v in r.items() if k != "seconds"} for r in a.history_]
    assert timeless == [{k: v for k, v in r.items() if k != "seconds"} for r in b.history_]


def names(folder: Path) -> list[str]:
    assert sorted(p.name for p in folder.iterdir()) == [p.name for p in checkpoints_in(folder)]
    return [path.name for path in checkpoints_in(folder)]


def stop_at(step: int) -> Any:
    """Stop at a record of the history, which has the same steps in every run."""
    return lambda progress: progress.recorded and progress.record["step"] >= step


def test_the_last_few_stay_and_the_newest_is_the_model(tmp_path):
    folder = tmp_path / "deep" / "run"
    seen: list[int] = []

    def look(progress: Progress) -> None:
        seen.append(len(names(folder)))

    fitted = model(callbacks=[Checkpoints(folder, 0, keep=3), look]).fit(X)
    assert seen[:4] == [1, 2, 3, 3]
    assert set(seen[3:]) == {3}
    steps = [load(path).n_steps_ for path in checkpoints_in(folder)]
    assert steps == sorted(steps)
    assert steps[-1] == 200
    same(load(folder), fitted)


def test_the_end_of_a_short_run_is_saved(tmp_path):
    saving = Checkpoints(tmp_path)
    model(callbacks=[saving]).fit(X)
    assert names(tmp_path) == ["checkpoint-000001.safetensors"]
    assert saving.last_ == tmp_path / "checkpoint-000001.safetensors"
    assert not saving.failed_


@pytest.mark.parametrize("solver", ["natural", "sgd", "em"])
def test_a_run_goes_on_from_the_folder_bit_by_bit(tmp_path, solver):
    kwargs = {"solver": solver, "batch_size": None if solver == "em" else 20}
    held_out = np.random.default_rng(1).normal(size=(50, 4))

    def watchers() -> list[Any]:
        return [EarlyStopping(held_out, patience=100), Checkpoints(tmp_path, 0)]

    model(**kwargs, callbacks=[*watchers(), stop_at(7)]).fit(X)
    # The end is saved even if a later callback in the list asked for it.
    again = load(tmp_path)
    assert not again.finished_
    stopped_at = again.n_steps_
    again.set_params(callbacks=watchers()).resume(X)
    assert again.n_steps_ > stopped_at
    whole = model(**kwargs, callbacks=[EarlyStopping(held_out, patience=100), stop_at(7)]).fit(X)
    whole.set_params(callbacks=[EarlyStopping(held_out, patience=100)]).resume(X)
    same(again, whole)
    same(load(tmp_path), whole)


def test_a_new_run_refuses_the_folder_of_another(tmp_path):
    model(callbacks=[Checkpoints(tmp_path)]).fit(X)
    content = checkpoints_in(tmp_path)[0].read_bytes()
    with pytest.raises(InputError, match=r"checkpoints of an earlier run, .*000001.*: resume that"):
        model(callbacks=[Checkpoints(tmp_path)]).fit(X)
    assert checkpoints_in(tmp_path)[0].read_bytes() == content
    with pytest.raises(InputError, match="an earlier run"):
        Checkpoints(tmp_path).open(new_run=True)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text", "a folder"])
def test_the_checkpoint_before_a_damaged_one_is_used_with_a_warning(tmp_path, damage):
    model(callbacks=[Checkpoints(tmp_path, 0), stop_at(100)]).fit(X)
    before, newest = checkpoints_in(tmp_path)[-2:]
    content = newest.read_bytes()
    if damage == "a folder":
        newest.unlink()
        newest.mkdir()
    else:
        middle = len(content) * 3 // 4
        flipped = bytes([content[middle] ^ 1])
        wrong = {"truncated": content[:middle], "empty": b"", "text": b"not a model at all"}
        wrong["flipped"] = content[:middle] + flipped + content[middle + 1 :]
        newest.write_bytes(wrong[damage])
    expected = load(before).n_steps_
    with pytest.warns(
        TrainingWarning, match=f"{before.name} with .* steps is loaded instead"
    ) as warned:
        again = load(tmp_path)
    assert newest.name in str(warned[0].message)
    assert f"{expected:,} steps" in str(warned[0].message)
    assert again.n_steps_ == expected
    again.set_params(callbacks=[Checkpoints(tmp_path, 0)]).resume(X)
    # The number of the damaged one is not used again.
    assert newest.name not in names(tmp_path)
    same(load(tmp_path), model(callbacks=[stop_at(100)]).fit(X).set_params(callbacks=()).resume(X))


def test_a_folder_without_a_complete_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match="is not a file and holds no checkpoints"):
        load(tmp_path)
    for i in (1, 2):
        (tmp_path / f"checkpoint-00000{i}.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match=r"none of the 2 checkpoints in .* is whole: .*000002"):
        load(tmp_path)


def test_other_files_in_the_folder_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-best.safetensors").write_text("mine")
    model(callbacks=[Checkpoints(tmp_path, 0, keep=1)]).fit(X)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[1:] == ["checkpoint-best.safetensors", "notes.txt"]


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": 1.5}, {"seconds": -1}, {"keep": True}])
def test_wrong_options_are_refused(tmp_path, options):
    with pytest.raises(InputError, match=f"{next(iter(options))} must"):
        Checkpoints(tmp_path, **options)


def test_a_folder_that_is_a_file_is_refused_at_the_start(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    steps: list[float] = []
    watched = [lambda p: steps.append(p.record["step"]), Checkpoints(path)]
    with pytest.raises(InputError, match="folder"):
        model(callbacks=watched).fit(X)
    assert len(steps) == 1
    assert path.read_text() == "mine"


def test_a_half_written_checkpoint_is_removed(tmp_path):
    left = tmp_path / ".unfinished" / ".tmpAB12"
    left.parent.mkdir()
    left.write_bytes(b"half")
    model(callbacks=[Checkpoints(tmp_path)]).fit(X)
    assert not left.parent.exists()


@pytest.mark.parametrize(
    # A report that the clock asks for may come between two records.
    ("last", "n_warnings", "saved"),
    [(150, 1, {200}), (1000, 2, {58, 59})],
    ids=["a while", "to the end"],
)
def test_a_full_disk_does_not_end_a_run(tmp_path, limit_file_size, last, n_warnings, saved):
    def fill(progress: Progress) -> None:
        limit_file_size(1000 if 60 <= progress.record["step"] < last else None)

    with pytest.warns(TrainingWarning) as warned:
        fitted = model(callbacks=[fill, Checkpoints(tmp_path, 0)]).fit(X)
    limit_file_size(None)
    np.testing.assert_array_equal(fitted.means_, model().fit(X).means_)
    assert load(tmp_path).n_steps_ in saved
    assert len(names(tmp_path)) == 3
    assert len(warned) == n_warnings
    message = str(warned[-1].message)
    assert message.startswith("no checkpoint could be saved in")
    assert "make room or choose another path" in message


TERMINATED = """
import sys
import numpy as np
from factormix import MFA
from factormix.callbacks import Checkpoint, Checkpoints

X = np.random.default_rng(0).normal(size=(200, 4))
X[100:] += 3
print("begun", flush=True)
try:
    MFA(2, 1, batch_size=20, max_epochs=100_000, random_state=0, solver="sgd",
        callbacks=[Checkpoint("file", seconds=1000), Checkpoints("folder", seconds=1000),
                   lambda p: print(p.record["step"], flush=True)]).fit(X)
finally:
    print("cleaned up", flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_sigterm_saves_the_run_and_ends_the_process(tmp_path: Path):
    """In a script that does not handle it: cluster managers send it some time before the end."""
    with subprocess.Popen(
        [sys.executable, "-c", TERMINATED], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert process.stdout.readline().strip().isdigit()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    *_, last_step, cleaned = out.splitlines()
    assert cleaned == "cleaned up"
    saved = load(tmp_path / "folder")
    assert saved.n_steps_ == int(last_step)
    same(saved, load(tmp_path / "file"))
    end = stop_at(saved.n_steps_ + 20)
    same(
        saved.set_params(callbacks=[end]).resume(X),
        model(max_epochs=100_000, callbacks=[end]).fit(X),
    )


def test_a_program_that_handles_sigterm_keeps_its_handler(tmp_path):
    answered: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: answered.append(number))
    try:
        fitted = model(
            callbacks=[
                lambda p: os.kill(os.getpid(), signal.SIGTERM) if p.record["step"] == 60 else None
            ]
        ).fit(X)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert answered == [signal.SIGTERM]
    assert fitted.n_steps_ == 200
