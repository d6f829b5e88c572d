"""Benchmarks without a test file of their own: a small run of each script."""

from __future__ import annotations

import runpy
from dataclasses import fields
from pathlib import Path

import activations_memory
import against
import cost
import explorer
import numpy as np
import pytest
import scale
import schedule
import small
import small_trials
import step

import factormix
from explorers import CHROMIUM
from factormix.solvers import Problem

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run_many(*arguments: str) -> None:
    """Run many.py; the tests have a module of the same name."""
    runpy.run_path(str(FOLDER / "many.py"))["main"](arguments)


@pytest.mark.slow
def test_a_small_run_of_every_part_of_many_writes_the_page(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, n in (("train", 2000), ("val", 200), ("test", 200)):
        np.save(tmp_path / f"{name}.npy", rng.normal(size=(n, 20)).astype("f4"))
    parts = [
        "--quick",
        "--parts",
        "steps,images,real,race,stream,patches",
        "--patches",
        str(tmp_path),
    ]
    run_many(*parts, "-o", str(tmp_path / "out"))
    page = (tmp_path / "out" / "many.md").read_text()
    for heading in (
        "A step and scoring", "Held-out likelihood", "on real data", "One pass", "A long stream",
        "Image patches",
    ):  # fmt: skip
        assert heading in page
    assert (tmp_path / "out" / "figures" / "many-steps.png").stat().st_size > 1000
    # Finished trials do not run again.
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "many").rglob("*.json")}
    assert before
    run_many(*parts, "-o", str(tmp_path / "out"))
    assert before == {p: p.stat().st_mtime_ns for p in before}


@pytest.mark.parametrize(
    "wrong", [["--parts", "speed"], ["--parts", "patches"], ["--quick", "--write-docs"]]
)
def test_wrong_options_of_many_are_refused(wrong: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run_many(*wrong, "-o", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_cost_model_recovers_known_constants() -> None:
    known = {"products": 1e-11, "elements": 2e-9, "parameters": 3e-9}
    sizes = [dict(zip(cost.NAMES, size, strict=True), kind="dense") for size in cost.DENSE]
    for one in sizes:
        one["seconds"] = cost.predict(known, cost.count_work(one))
    found = cost.fit_constants(sizes, cost.count_work, "seconds")
    assert found == pytest.approx(known, rel=1e-6)


@pytest.mark.slow
def test_a_quick_run_of_cost_writes_the_page(tmp_path: Path) -> None:
    cost.main(["--quick", "-o", str(tmp_path)])
    page = (tmp_path / "scale-costs.md").read_text()
    assert "not measured yet" not in page
    assert page.count("Compared with four sizes") == 2


@pytest.mark.slow
def test_scale_measures_a_step_in_its_own_process() -> None:
    task = {"task": "step", "solver": "sgd", "K": 4, "d": 10, "l": 2, "B": 50, "repeats": 3}
    found = scale.run_measurement(task, threads=1)
    assert found["components"] == 4
    assert found["seconds"] > 0


def test_scale_fits_the_power_of_growth() -> None:
    rows = [scale.Row("sgd", "K", K, 1e-3 * K**0.8, 0) for K in (1, 10, 100, 1000)]
    assert scale.fit_exponent(rows) == pytest.approx(0.8)


def test_step_prints_its_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--size", "4", "10", "2", "20", "--threads", "1", "--repeats", "3"]
    step.main(["--solver", "natural", *size])
    numbers = [float(word) for word in capsys.readouterr().out.splitlines()[-1].split()]
    assert numbers[:4] == [4, 10, 2, 20]
    assert min(numbers) > 0


def test_small_scores_and_times_fits_on_its_own_tables(tmp_path: Path) -> None:
    small.write_tables(tmp_path, quick=True)
    found = small_trials.run_part("fits", tmp_path, ours_only=True)
    assert list(found) == [small_trials.OURS]
    # One fold of two tables, in four sizes.
    assert np.isfinite(found[small_trials.OURS]["score"]).sum() == 8
    assert min(found[small_trials.OURS]["seconds"]) > 0


def test_the_solvers_train_on_the_same_rows_with_gaps(tmp_path: Path) -> None:
    for seed in range(2):
        rows = small.draw_mixture(100, 3, np.random.default_rng(seed))
        train = small.hide(rows[:60], 0.3, np.random.default_rng(seed))
        np.savez(tmp_path / f"gaps-0-{seed}.npz", train=train, held_out=rows[60:])
    found = small_trials.run_part("gaps", tmp_path)
    assert found["em"]["rows"] == [60, 60]
    pairs = zip(found["natural"]["score"], found["em"]["score"], strict=True)
    for level, (ours, theirs) in zip(found["natural"]["level"], pairs, strict=True):
        assert level < np.inf or ours < theirs


def test_memory_is_measured_of_a_model_with_ranks(tmp_path: Path) -> None:
    path, ranks = tmp_path / "model.mfa", np.array([32] + 59 * [2])
    activations_memory.write_model(path, ranks, activations_memory.QUICK_SIZES)
    assert factormix.load(path).ranks_.tolist() == ranks.tolist()
    found = activations_memory.measure(path)
    assert set(found) == set(activations_memory.ROWS) - {"file"}
    assert min(found.values()) >= 0


@pytest.mark.slow
def test_a_quick_run_of_small_writes_the_page(tmp_path: Path) -> None:
    small.main(["--quick", "-o", str(tmp_path)])
    page = (tmp_path / "small.md").read_text()
    for text in ("A small fit", "IsolationForest", "KNNImputer", "| 200 x 6 |", "`import torch`"):
        assert text in page


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH")
@pytest.mark.parametrize(("K", "d", "l"), [(400, 3072, 10), (10_000, 784, 4)])
def test_the_explorer_shows_large_models(K: int, d: int, l: int, tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="Playwright drives the browser")
    explorer.write_model(tmp_path / "large.safetensors", K, d, l)
    found = explorer.measure(tmp_path / "large.safetensors", visits=3)
    assert all(value > 0 for value in found.values())
    assert found["slider move, ms"] <= found["slowest slider move, ms"]


@pytest.mark.slow
@pytest.mark.skipif(not (FOLDER.parent / ".git").exists(), reason="the sources are not in git")
def test_a_comparison_with_the_same_commit_finds_equal_scores(
    capsys: pytest.CaptureFixture[str],
) -> None:
    against.main(["HEAD", "--quick", "--seeds", "1", "--parts", "tables"])
    name, now, before, ratio = capsys.readouterr().out.splitlines()[1].rsplit(maxsplit=3)
    assert name == "iris, K = 5"
    assert now == before
    assert 0.1 < float(ratio) < 10


def test_every_number_of_the_schedule_is_varied() -> None:
    varied = {
        (group, name)
        for problem in schedule.PROBLEMS
        for group, name, _ in schedule.numbers(problem)
    }
    for group, record in schedule.GROUPS.items():
        for field in fields(record):
            number = isinstance(field.default, (int, float)) and field.name not in schedule.OPTIONS
            assert ((group, field.name) in varied) == number, field.name


def test_a_number_of_pruning_is_varied_alone() -> None:
    problem = Problem(200, 16, 10, batches_per_epoch=50, epochs=2, batch_size=1000)
    usual = schedule.Varied().schedule(problem)
    assert schedule.Varied(group="pruning", number="memory").schedule(problem) == usual
    more = schedule.Varied(group="pruning", number="rows_to_choose", factor=0.5).schedule(problem)
    assert more.first_components > usual.first_components


def test_a_varied_schedule_changes_the_score() -> None:
    task = schedule.make_problem("breast_cancer")
    usual = schedule.score(task, 0, schedule.Varied())
    same = schedule.Varied(group="seeding", number="bound_ticks")
    assert schedule.score(task, 0, same) == usual
    changed = schedule.Varied(group="seeding", number="bound_ticks", factor=0.5)
    assert schedule.score(task, 0, changed) != usual
