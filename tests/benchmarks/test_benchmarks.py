"""The benchmark: its scorers against SciPy, its bookkeeping, and a small run in real processes."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import adam
import curves
import methods
import models
import numpy as np
import ours
import problems
import pytest
import quality
import results
import runs
import settings
import targets
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from factormix.studies.harness import Outcome, Store, Trial

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.fixture(scope="module")
def mixture() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "weights": rng.dirichlet(np.ones(3)),
        "means": rng.normal(size=(3, 5)),
        "loadings": rng.normal(size=(3, 5, 2)),
        "noise_variances": settings.FLOOR + rng.uniform(0.1, 1, size=(3, 5)),
    }


def covariances(mixture: dict[str, np.ndarray]) -> np.ndarray:
    Lambda = mixture["loadings"]
    diagonal = mixture["noise_variances"][:, :, None] * np.eye(5)
    return Lambda @ np.swapaxes(Lambda, 1, 2) + diagonal


def dense_log_prob(mixture: dict[str, np.ndarray], x: np.ndarray, Sigma: np.ndarray) -> np.ndarray:
    parts = [
        np.log(pi) + multivariate_normal(mu, S).logpdf(x)
        for pi, mu, S in zip(mixture["weights"], mixture["means"], Sigma, strict=True)
    ]
    return logsumexp(parts, axis=0)


@pytest.mark.parametrize("kind", ["low rank", "diagonal", "full"])
def test_scorers_agree_with_scipy(mixture: dict[str, np.ndarray], kind: str) -> None:
    x = np.random.default_rng(1).normal(size=(50, 5))
    Sigma = covariances(mixture)
    if kind == "diagonal":
        Sigma = mixture["noise_variances"][:, :, None] * np.eye(5)
        model: models.Model = models.LowRankMixture.from_diagonal(
            mixture["weights"], mixture["means"], mixture["noise_variances"]
        )
    elif kind == "full":
        model = models.FullMixture(mixture["weights"], mixture["means"], Sigma)
    else:
        model = models.LowRankMixture.from_generative(**mixture)
    expected = dense_log_prob(mixture, x, Sigma).mean()
    assert model.score(torch.tensor(x)) == pytest.approx(expected, rel=1e-5)


def test_covariance_form_agrees_with_scipy(mixture: dict[str, np.ndarray]) -> None:
    x = np.random.default_rng(1).normal(size=(20, 5))
    parts = {name: torch.tensor(values, dtype=torch.float32) for name, values in mixture.items()}
    model = adam.CovarianceMFA(
        parts["means"], parts["noise_variances"], parts["weights"], 2, torch.Generator()
    )
    with torch.no_grad():
        model.loadings.copy_(parts["loadings"])
        found = model(torch.tensor(x, dtype=torch.float32)).numpy()
    expected = dense_log_prob(mixture, x, covariances(mixture))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert model.described().score(torch.tensor(x)) == pytest.approx(expected.mean(), rel=1e-4)


def test_noise_of_the_covariance_form_stays_above_the_floor() -> None:
    tiny = torch.full((2, 3), 1e-9)
    model = adam.CovarianceMFA(torch.zeros(2, 3), tiny, torch.ones(2), 1, torch.Generator())
    with torch.no_grad():
        model.free_noise.fill_(-100.0)
    assert (model.noise_variances >= settings.FLOOR).all()


def test_synthetic_rows_have_the_moments_of_the_true_mixture() -> None:
    problem = problems.synthetic(3, 6, 2, 40_000)
    truth = problem.truth
    assert truth is not None
    mean = truth.weights @ truth.means
    assert problem.train.mean(axis=0) == pytest.approx(mean, abs=0.01)
    # No other mixture scores better on many rows of the truth than the truth itself.
    shifted = models.LowRankMixture.from_diagonal(
        truth.weights, truth.means, np.tile(problem.train.var(axis=0), (3, 1))
    )
    held_out = torch.from_numpy(problem.held_out)
    assert truth.score(held_out) > shifted.score(held_out)


def test_matched_share_sees_permuted_merged_and_split_components() -> None:
    weights, means = np.full(4, 0.25), 10.0 * np.eye(4, 5)
    variances = np.ones((4, 5))
    truth = models.LowRankMixture.from_diagonal(weights, means, variances)
    order = [2, 0, 3, 1]
    permuted = models.LowRankMixture.from_diagonal(weights, means[order] + 0.1, variances)
    assert models.matched_share(permuted, truth) == 1
    merged = means.copy()
    merged[0] = merged[1] = (means[0] + means[1]) / 2
    bad = models.LowRankMixture.from_diagonal(weights, merged, variances)
    assert models.matched_share(bad, truth) == 0.5
    light = np.array([0.1, 0.4, 0.25, 0.25])
    uneven = models.LowRankMixture.from_diagonal(light, means, variances)
    assert models.matched_share(uneven, truth) == 0.5


def test_clock_stands_still_while_paused() -> None:
    clock = curves.Clock()
    clock.start()
    with clock.paused():
        before = clock.seconds
        time.sleep(0.05)
        assert clock.seconds == before
    clock.stop()
    assert clock.seconds < 0.05


class Counted:
    """A model that counts how often it is scored."""

    weights = np.ones(1)
    means = np.zeros((1, 1))

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def score(self, x: torch.Tensor) -> float:
        return self.value


def test_checkpoints_are_taken_at_whole_passes_and_grow_apart() -> None:
    recorder = curves.Recorder(torch.zeros(1, 1), limit=60)
    recorder.clock.start()
    for step in range(1, 2001):
        recorder.checkpoint(step / 100, Counted, step=0.01)
    recorder.checkpoint(20, Counted, last=True)
    passes = [p.passes for p in recorder.points]
    assert {1.0, 2.0, 3.0, 4.0, 5.0, 20.0} <= set(passes)
    assert passes == sorted(set(passes))
    assert len(passes) < 40


def test_checkpoint_ends_a_method_whose_time_is_over_and_keeps_its_model() -> None:
    recorder = curves.Recorder(torch.zeros(1, 1), limit=0.0)
    recorder.clock.start()
    with pytest.raises(curves.BudgetUsedError):
        recorder.checkpoint(1, Counted)
    assert len(recorder.points) == 1


def test_checkpoint_refuses_a_likelihood_that_is_no_number() -> None:
    recorder = curves.Recorder(torch.zeros(1, 1), limit=60)
    recorder.clock.start()
    with pytest.raises(curves.DivergedError, match="after 1 passes"):
        recorder.checkpoint(1, lambda: Counted(float("nan")))
    assert recorder.points == []


def test_median_curve_holds_values_and_ends_with_the_longest_run() -> None:
    point = curves.Point
    runs = [
        [point(1, 1, 10.0), point(3, 2, 30.0)],
        [point(2, 1, 20.0), point(4, 2, 40.0)],
    ]
    x, y = curves.median_curve(runs, "seconds")
    assert x.tolist() == [2, 3, 4]
    assert y.tolist() == [15, 25, 35]


def result(method: str, points: list[tuple[float, float, float]], used: int = 49) -> results.Result:
    plan = {"dataset": "mnist", "components": 49, "method": method, "seed": 0}
    listed = [curves.Point(*p) for p in points]
    return results.Result(plan, "finished", "", listed, 1.0, used, None, None, 9, 9, 9, 1)


def test_targets_tell_met_from_not_met() -> None:
    setting = settings.Setting("mnist", 49)
    em = result("em", [(5, 10, 700.0), (50, 30, 900.0)])
    good = result("natural", [(1, 1, 895.0), (4, 3, 905.0), (6, 5, 910.0)])
    poor = result("natural", [(9, 1, 800.0), (30, 5, 899.0)], used=40)

    def verdicts(ours: results.Result) -> list[bool | None]:
        groups = results.group([em, ours])["mnist-k49"]
        return [t.met for t in targets.targets(setting, groups)]

    assert verdicts(good) == [True] * 6
    assert verdicts(poor) == [False] * 6
    only_em = results.group([em])["mnist-k49"]
    assert {t.met for t in targets.targets(setting, only_em)} == {None}


def test_negative_likelihoods_are_compared_on_the_right_side() -> None:
    setting = settings.Setting("mnist", 49)
    em = result("em", [(50, 30, -100.0)])
    worse = results.group([em, result("natural", [(1, 1, -110.0)])])["mnist-k49"]
    assert targets.targets(setting, worse)[0].met is False


def test_race_is_lost_when_the_peer_is_there_first() -> None:
    setting = settings.Setting("mnist", 49)
    peer = result("sklearn-full", [(2, 10, 500.0)])
    ours = result("natural", [(1, 1, 400.0), (3, 2, 600.0)])
    line = targets.targets(setting, results.group([peer, ours])["mnist-k49"])[-1]
    assert line.met is False
    assert line.verdict == "**not met**"
    assert line.note == methods.METHODS["sklearn-full"].why_ahead


def test_race_against_a_method_without_a_model() -> None:
    setting = settings.Setting("mnist", 49)
    ours = result("natural", [(1, 1, 400.0)])
    for status, word in (("unfinished", "ahead, its end unknown"), ("failed", "not measured")):
        other = dataclasses.replace(result("tgmm", []), status=status, message="said so")
        line = targets.targets(setting, results.group([ours, other])["mnist-k49"])[-1]
        assert (line.met, line.verdict) == (None, word)
        assert "said so" in line.measured


def test_race_is_not_won_by_a_likelihood_that_is_lost_again() -> None:
    setting = settings.Setting("mnist", 49)
    peer = result("adam", [(9, 10, 500.0)])
    ours = result("natural", [(1, 1, 510.0), (3, 2, 490.0)])
    line = targets.targets(setting, results.group([peer, ours])["mnist-k49"])[-1]
    assert line.met is False
    assert "but ours ends at 490.0" in line.measured


def trial_of(method: str, limit: float = 120.0) -> Trial:
    plan = settings.planned(settings.SETTINGS[2], method, 1, limit, threads=2, jobs=1, quick=False)
    return Trial("quality", "one", plan, runs.run)


def values_of(result: results.Result) -> dict[str, object]:
    return {name: value for name, value in vars(result).items() if name != "plan"}


def test_results_of_other_plans_and_damaged_ones_are_not_used(tmp_path: Path) -> None:
    store, trial = Store(tmp_path), trial_of("sgd")
    store.write(trial, Outcome(values_of(result("sgd", [(1, 1, -70.0)]))))
    found = results.read(store, trial)
    assert found is not None
    assert found.points == [curves.Point(1, 1, -70.0)]
    assert found.plan["method"] == "sgd"
    assert results.read(store, trial_of("sgd", limit=60)) is None
    store.write(trial, Outcome({"points": []}))
    assert results.read(store, trial) is None


def test_a_plan_keeps_the_sizes_of_its_setting() -> None:
    for setting in settings.SETTINGS:
        plan = settings.planned(setting, "em", 0, 120.0, threads=1, jobs=1, quick=False)
        rebuilt = settings.setting_of(json.loads(json.dumps(plan)))
        assert dataclasses.replace(setting, only=None, patience=1.0) == rebuilt


def test_our_solvers_are_watched_at_every_step() -> None:
    """Half a second between reports, as the library has it, would miss what is due here."""
    problem = problems.synthetic(3, 6, 2, 4000)
    recorder = curves.Recorder(torch.from_numpy(problem.held_out), limit=60)
    ours.train_one_pass(problem, settings.Setting("synthetic", 3, factors=2), 0, recorder)
    assert len(recorder.points) >= 5


def slow(problem: problems.Problem, setting: object, seed: int, recorder: curves.Recorder) -> None:
    recorder.clock.start()
    time.sleep(60)


def test_a_method_that_does_not_come_back_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.METHODS, "slow", methods.Method("slow", slow, "#000000"))
    problem = problems.synthetic(3, 6, 2, 400)
    recorder = curves.Recorder(torch.from_numpy(problem.held_out), limit=0.2)
    plan = settings.planned(settings.QUICK_SETTINGS[0], "slow", 0, 0.2, 1, 1, quick=True)
    begun = time.monotonic()
    assert runs.watched(plan, problem, recorder) == ("unfinished", "did not finish in 0 s")
    assert time.monotonic() - begun < 10


def test_quick_run_writes_everything_and_keeps_what_is_done(tmp_path: Path) -> None:
    plan = settings.planned(
        settings.QUICK_SETTINGS[0], "sgd", 0, quality.QUICK_BUDGET, threads=1, jobs=1, quick=True
    )
    kept, store = (
        Trial("quality", "synthetic-k6-sgd-seed0", plan, runs.run),
        Store(tmp_path / "trials"),
    )
    store.write(kept, Outcome(values_of(result("sgd", [(1, 1, -70.0), (2, 2, -60.0)]))))
    path = store.path(kept)

    arguments = ("--quick", "--threads", "1", "--methods", "sgd,sklearn-diag", "-o", str(tmp_path))
    done = run_script("quality.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["values"]["points"] == [[1, 1, -70.0], [2, 2, -60.0]]
    other = path.with_name("synthetic-k6-sklearn-diag-seed0.json")
    content = json.loads(other.read_text())["values"]
    assert content["status"] in ("finished", "stopped")
    seconds, passes, scores = zip(*content["points"], strict=True)
    assert list(seconds) == sorted(seconds)
    assert list(passes) == sorted(passes)
    assert np.isfinite(scores).all()
    assert max(scores) < content["true_log_likelihood"]

    with (tmp_path / "trials.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["sgd", "sklearn-diag"]
    page = (tmp_path / "benchmarks.md").read_text()
    assert "| factormix SGD | -60.0 | 2.0 |" in page
    assert "| scikit-learn GMM diagonal |" in page
    assert str(Path.home()) not in page
    assert str(tmp_path) not in page
    picture = (tmp_path / "figures" / "synthetic-k6.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_unknown_names_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quality.py", "--methods", "magic"])
    with pytest.raises(SystemExit):
        quality.main()
    assert "magic is not one of natural" in capsys.readouterr().err


def test_growth_measures_a_step_in_a_process_of_its_own() -> None:
    task = {"task": "step", "solver": "sgd", "K": 4, "d": 10, "l": 2, "B": 50}
    done = run_script("growth.py", json.dumps(task | {"repeats": 3, "threads": 1}))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["components"] == 4
    assert 0 < found["seconds"] < 1


def test_step_prints_its_ratios() -> None:
    size = ["--size", "4", "10", "2", "20", "--threads", "1", "--repeats", "3"]
    done = run_script("step.py", "--solver", "natural", *size)
    assert done.returncode == 0, done.stderr
    numbers = [float(word) for word in done.stdout.splitlines()[-1].split()]
    assert numbers[:4] == [4, 10, 2, 20]
    assert min(numbers) > 0
