"""The quality benchmark: scorers against SciPy, checkpoints, targets, and a small run."""

from __future__ import annotations

import csv
import dataclasses
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import quality
import torch
from harness import Outcome, Store, Trial
from quality_methods import METHODS, CovarianceMFA, run_method, train_one_pass, train_within_limit
from quality_page import Result, group_results, list_targets, read_result
from quality_problems import (
    FLOOR,
    QUICK_SETTINGS,
    SETTINGS,
    BudgetUsedError,
    Clock,
    DivergedError,
    FullMixture,
    LowRankMixture,
    Model,
    Point,
    Recorder,
    Setting,
    build_plan,
    compute_matched_share,
    compute_median_curve,
    make_synthetic,
    read_setting,
)
from scipy.special import logsumexp
from scipy.stats import multivariate_normal


@pytest.fixture(scope="module")
def mixture() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "weights": rng.dirichlet(np.ones(3)),
        "means": rng.normal(size=(3, 5)),
        "loadings": rng.normal(size=(3, 5, 2)),
        "noise_variances": FLOOR + rng.uniform(0.1, 1, size=(3, 5)),
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
        model: Model = LowRankMixture.from_diagonal(
            mixture["weights"], mixture["means"], mixture["noise_variances"]
        )
    elif kind == "full":
        model = FullMixture(mixture["weights"], mixture["means"], Sigma)
    else:
        model = LowRankMixture.from_generative(**mixture)
    expected = dense_log_prob(mixture, x, Sigma).mean()
    assert model.score(torch.tensor(x)) == pytest.approx(expected, rel=1e-5)


def test_covariance_form_agrees_with_scipy(mixture: dict[str, np.ndarray]) -> None:
    x = np.random.default_rng(1).normal(size=(20, 5))
    parts = {name: torch.tensor(values, dtype=torch.float32) for name, values in mixture.items()}
    model = CovarianceMFA(
        parts["means"], parts["noise_variances"], parts["weights"], 2, torch.Generator()
    )
    with torch.no_grad():
        model.loadings.copy_(parts["loadings"])
        found = model(torch.tensor(x, dtype=torch.float32)).numpy()
    expected = dense_log_prob(mixture, x, covariances(mixture))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert model.copy_model().score(torch.tensor(x)) == pytest.approx(expected.mean(), rel=1e-4)


def test_noise_of_the_covariance_form_stays_above_the_floor() -> None:
    tiny = torch.full((2, 3), 1e-9)
    model = CovarianceMFA(torch.zeros(2, 3), tiny, torch.ones(2), 1, torch.Generator())
    with torch.no_grad():
        model.free_noise.fill_(-100.0)
    assert (model.noise_variances >= FLOOR).all()


def test_synthetic_rows_have_the_moments_of_the_true_mixture() -> None:
    problem = make_synthetic(3, 6, 2, 40_000)
    truth = problem.truth
    assert truth is not None
    mean = truth.weights @ truth.means
    assert problem.train.mean(axis=0) == pytest.approx(mean, abs=0.01)
    # No other mixture scores better on many rows of the truth than the truth itself.
    shifted = LowRankMixture.from_diagonal(
        truth.weights, truth.means, np.tile(problem.train.var(axis=0), (3, 1))
    )
    held_out = torch.from_numpy(problem.held_out)
    assert truth.score(held_out) > shifted.score(held_out)


def test_matched_share_sees_permuted_merged_and_split_components() -> None:
    weights, means = np.full(4, 0.25), 10.0 * np.eye(4, 5)
    variances = np.ones((4, 5))
    truth = LowRankMixture.from_diagonal(weights, means, variances)
    order = [2, 0, 3, 1]
    permuted = LowRankMixture.from_diagonal(weights, means[order] + 0.1, variances)
    assert compute_matched_share(permuted, truth) == 1
    merged = means.copy()
    merged[0] = merged[1] = (means[0] + means[1]) / 2
    bad = LowRankMixture.from_diagonal(weights, merged, variances)
    assert compute_matched_share(bad, truth) == 0.5
    light = np.array([0.1, 0.4, 0.25, 0.25])
    uneven = LowRankMixture.from_diagonal(light, means, variances)
    assert compute_matched_share(uneven, truth) == 0.5


def test_the_clock_stops_while_paused() -> None:
    clock = Clock()
    clock.start()
    with clock.pause():
        before = clock.seconds
        time.sleep(0.01)
        assert clock.seconds == before
    clock.stop()
    assert clock.seconds >= before


class Counted:
    """A model that counts how often it is scored."""

    weights = np.ones(1)
    means = np.zeros((1, 1))

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def score(self, x: torch.Tensor) -> float:
        return self.value


def test_checkpoints_are_taken_at_whole_passes_and_grow_apart() -> None:
    recorder = Recorder(torch.zeros(1, 1), limit=60)
    recorder.clock.start()
    for step in range(1, 2001):
        recorder.checkpoint(step / 100, Counted, step=0.01)
    recorder.checkpoint(20, Counted, last=True)
    passes = [p.passes for p in recorder.points]
    assert {1.0, 2.0, 3.0, 4.0, 5.0, 20.0} <= set(passes)
    assert passes == sorted(set(passes))
    assert len(passes) < 40


def test_a_checkpoint_ends_a_method_when_its_time_is_up() -> None:
    recorder = Recorder(torch.zeros(1, 1), limit=0.0)
    recorder.clock.start()
    with pytest.raises(BudgetUsedError):
        recorder.checkpoint(1, Counted)
    assert len(recorder.points) == 1


def test_a_checkpoint_refuses_a_likelihood_that_is_not_finite() -> None:
    recorder = Recorder(torch.zeros(1, 1), limit=60)
    recorder.clock.start()
    with pytest.raises(DivergedError, match="after 1 passes"):
        recorder.checkpoint(1, lambda: Counted(float("nan")))
    assert recorder.points == []


def test_median_curve_holds_values_and_ends_with_the_longest_run() -> None:
    point = Point
    runs = [
        [point(1, 1, 10.0), point(3, 2, 30.0)],
        [point(2, 1, 20.0), point(4, 2, 40.0)],
    ]
    x, y = compute_median_curve(runs, "seconds")
    assert x.tolist() == [2, 3, 4]
    assert y.tolist() == [15, 25, 35]


def result(method: str, points: list[tuple[float, float, float]], used: int = 49) -> Result:
    plan = {"dataset": "mnist", "components": 49, "method": method, "seed": 0}
    listed = [Point(*p) for p in points]
    return Result(plan, "finished", "", listed, 1.0, used, None, None, 9, 9, 9, 1)


def test_targets_are_met_or_not_met() -> None:
    setting = Setting("mnist", 49)
    em = result("em", [(5, 10, 700.0), (50, 30, 900.0)])
    good = result("natural", [(1, 1, 895.0), (4, 3, 905.0), (6, 5, 910.0)])
    poor = result("natural", [(9, 1, 800.0), (30, 5, 899.0)], used=40)

    def verdicts(ours: Result) -> list[bool | None]:
        groups = group_results([em, ours])["mnist-k49"]
        return [t.met for t in list_targets(setting, groups)]

    assert verdicts(good) == [True] * 6
    assert verdicts(poor) == [False] * 6
    only_em = group_results([em])["mnist-k49"]
    assert {t.met for t in list_targets(setting, only_em)} == {None}


def test_negative_likelihoods_are_compared_on_the_right_side() -> None:
    setting = Setting("mnist", 49)
    em = result("em", [(50, 30, -100.0)])
    worse = group_results([em, result("natural", [(1, 1, -110.0)])])["mnist-k49"]
    assert list_targets(setting, worse)[0].met is False


def test_a_time_target_is_not_met_when_the_peer_is_first() -> None:
    setting = Setting("mnist", 49)
    peer = result("sklearn-full", [(2, 10, 500.0)])
    ours = result("natural", [(1, 1, 400.0), (3, 2, 600.0)])
    line = list_targets(setting, group_results([peer, ours])["mnist-k49"])[-1]
    assert line.met is False
    assert line.verdict == "**not met**"
    assert line.note == METHODS["sklearn-full"].why_ahead


def test_time_targets_against_a_method_without_a_model() -> None:
    setting = Setting("mnist", 49)
    ours = result("natural", [(1, 1, 400.0)])
    for status, word in (
        ("unfinished", "ahead of a peer that did not finish"),
        ("failed", "not measured"),
    ):
        other = dataclasses.replace(result("tgmm", []), status=status, message="out of time")
        line = list_targets(setting, group_results([ours, other])["mnist-k49"])[-1]
        assert (line.met, line.verdict) == (None, word)
        assert "out of time" in line.measured


def test_a_time_target_is_not_met_when_our_likelihood_falls_again() -> None:
    setting = Setting("mnist", 49)
    peer = result("adam", [(9, 10, 500.0)])
    ours = result("natural", [(1, 1, 510.0), (3, 2, 490.0)])
    line = list_targets(setting, group_results([peer, ours])["mnist-k49"])[-1]
    assert line.met is False
    assert "but ours ends at 490.0" in line.measured


def trial_of(method: str, limit: float = 120.0) -> Trial:
    plan = build_plan(SETTINGS[2], method, 1, limit, threads=2, jobs=1, quick=False)
    return Trial("quality", "one", plan, run_method)


def values_of(result: Result) -> dict[str, object]:
    return {name: value for name, value in vars(result).items() if name != "plan"}


def test_results_of_other_plans_and_damaged_ones_are_not_used(tmp_path: Path) -> None:
    store, trial = Store(tmp_path), trial_of("sgd")
    store.write(trial, Outcome(values_of(result("sgd", [(1, 1, -70.0)]))))
    found = read_result(store, trial)
    assert found is not None
    assert found.points == [Point(1, 1, -70.0)]
    assert found.plan["method"] == "sgd"
    assert read_result(store, trial_of("sgd", limit=60)) is None
    store.write(trial, Outcome({"points": []}))
    assert read_result(store, trial) is None


def test_a_plan_holds_the_sizes_of_its_setting() -> None:
    for setting in SETTINGS:
        plan = build_plan(setting, "em", 0, 120.0, threads=1, jobs=1, quick=False)
        rebuilt = read_setting(json.loads(json.dumps(plan)))
        assert dataclasses.replace(setting, only=None, patience=1.0) == rebuilt


def test_our_solvers_report_after_every_step() -> None:
    """The library's half second between reports would miss checkpoints."""
    problem = make_synthetic(3, 6, 2, 4000)
    recorder = Recorder(torch.from_numpy(problem.held_out), limit=60)
    train_one_pass(problem, Setting("synthetic", 3, factors=2), 0, recorder)
    assert len(recorder.points) >= 5


def test_a_method_that_does_not_return_is_abandoned() -> None:
    recorder = Recorder(torch.zeros(1, 1), limit=0.2)
    end = threading.Event()

    def wait() -> None:
        recorder.clock.start()
        end.wait()

    try:
        ended = train_within_limit(wait, recorder)
    finally:
        end.set()
    assert ended == ("unfinished", "did not finish in 0 s")


@pytest.mark.slow
def test_a_quick_run_writes_everything_and_reuses_finished_trials(tmp_path: Path) -> None:
    plan = build_plan(QUICK_SETTINGS[0], "sgd", 0, quality.QUICK_BUDGET, 1, 1, quick=True)
    finished = Trial("quality", "synthetic-k6-sgd-seed0", plan, run_method)
    store = Store(tmp_path / "trials")
    store.write(finished, Outcome(values_of(result("sgd", [(1, 1, -70.0), (2, 2, -60.0)]))))

    methods = ("--methods", "sgd,sklearn-diag")
    quality.main(["--quick", "--threads", "1", *methods, "-o", str(tmp_path)])
    path = store.path(finished)
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


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quality.main(["--methods", "magic"])
    assert "magic is not one of natural" in capsys.readouterr().err
