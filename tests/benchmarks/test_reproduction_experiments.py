"""The experiments: AUC against scikit-learn, rules of the verdicts, and plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reproduction_figure1 as figure1
import reproduction_table1 as table1
import reproduction_verdicts as verdicts
import torch
from harness import Result, Trial
from hypothesis import given
from hypothesis import strategies as st
from reproduction_plan import FULL, QUICK, Scale, choose_training_rows, load_images
from reproduction_streaming import (
    dense_log_prob,
    order_batches,
    time_scoring,
)
from reproduction_table1 import threshold_auc, threshold_curve
from reproduction_tables import (
    Spread,
    make_class_table,
    make_main_table,
    mean_over_classes,
    summarise,
    summarise_auc,
)
from reproduction_verdicts import judge_claims, write_summary
from sklearn.metrics import roc_auc_score

from factormix import MFA
from factormix.datasets import load
from factormix.errors import InputError

SETS = ["mnist", "fashion-mnist"]


def sides(draw_from: st.SearchStrategy[float]) -> Any:
    return st.tuples(
        st.lists(draw_from, min_size=1, max_size=30), st.lists(draw_from, min_size=1, max_size=30)
    )


def sklearn_auc(inliers: Any, outliers: Any) -> float:
    truth = np.repeat([1, 0], [len(inliers), len(outliers)])
    return float(roc_auc_score(truth, np.concatenate([inliers, outliers])))


@given(sides(st.floats(-1e3, 1e3)), st.integers(2, 120))
def test_threshold_curve_is_the_definition(scores: tuple[list[float], list[float]], n: int) -> None:
    inliers, outliers = map(np.asarray, scores)
    both = np.concatenate([inliers, outliers])
    thresholds = np.linspace(both.min(), both.max(), n)
    kept, rejected = threshold_curve(inliers, outliers, n)
    np.testing.assert_allclose(kept, [(inliers >= t).mean() for t in thresholds], atol=1e-12)
    np.testing.assert_allclose(rejected, [(outliers < t).mean() for t in thresholds], atol=1e-12)
    area = -np.trapezoid(rejected, kept) if hasattr(np, "trapezoid") else None
    if area is not None:
        assert threshold_auc(inliers, outliers, n) == pytest.approx(area, abs=1e-12)


def test_threshold_auc_nears_the_exact_one_from_below() -> None:
    rng = np.random.default_rng(0)
    inliers, outliers = rng.normal(1, 1, 4000), rng.normal(0, 1, 1000)
    exact = sklearn_auc(inliers, outliers)
    assert exact - 0.01 < threshold_auc(inliers, outliers) < exact
    assert threshold_auc(inliers, outliers, 100_000) == pytest.approx(exact, abs=1 / 4000)


@pytest.mark.parametrize("bad", [[], [np.nan], [[1.0]]])
def test_scores_that_cannot_be_ranked_are_refused(bad: Any) -> None:
    with pytest.raises(InputError, match="outliers must be one or more finite"):
        threshold_auc([1.0], bad)


def test_auc_verdict_follows_its_rule() -> None:
    held = Spread(0.91, 0.005, 5)
    far = Spread(0.70, 0.005, 5)
    assert verdicts.judge_auc(0.922, held, {}) == ("held", None)
    assert verdicts.judge_auc(0.922, far, {"a": Spread(0.94, 0, 1), "b": Spread(0.93, 0, 1)}) == (
        "held with a change",
        "b",
    )
    assert verdicts.judge_auc(0.922, far, {"a": Spread(0.97, 0.01, 5)}) == ("not found", None)
    assert verdicts.judge_auc(0.922, Spread(0.89, 0.04, 5), {})[0] == "held"
    assert verdicts.judge_auc(0.922, Spread(0.86, 0.04, 5), {})[0] == "not found"


def test_comparison_verdict_follows_its_rule() -> None:
    low, high, wide = Spread(0.70, 0.01, 4), Spread(0.72, 0.01, 4), Spread(0.72, 0.2, 4)
    assert verdicts.judge_better(high, low, None, None) == "held"
    assert verdicts.judge_better(wide, low, 0.90, 0.88) == "held with a change"
    assert verdicts.judge_better(wide, low, 0.88, 0.90) == "not found"
    assert verdicts.judge_better(low, high, None, None) == "not found"
    assert verdicts.judge_better(Spread(0.703, 0, 1), Spread(0.70, 0, 1), 0.9, 0.9) == "not found"


def test_share_and_cost_verdicts_follow_their_rules() -> None:
    assert verdicts.judge_share([True, True]) == "held"
    assert verdicts.judge_share([True, False]) == "held with a change"
    assert verdicts.judge_share([True, False], enough=0.8) == "not found"
    assert verdicts.judge_cost(1.2, 50) == "held"
    assert verdicts.judge_cost(1.0, 50) == "held with a change"
    assert verdicts.judge_cost(0.9, 1.0) == "not found"


def results_of(values: dict[tuple[str, int, int], float]) -> list[Result]:
    """Make results of MNIST, E ≤ 20, from {(model, class held out, seed): AUC}."""
    found = []
    for (model, held_out, seed), auc in values.items():
        settings = {"dataset": "mnist", "model": model, "held_out": held_out, "seed": seed}
        both = {"thresholds": auc - 0.01, "rank": auc}
        content = {"auc": {"log-sum-exp": both, "max-component": both}}
        trial = Trial("table1", f"{model}{held_out}{seed}", {**settings, "variant": "E ≤ 20"}, None)  # type: ignore[arg-type]
        found.append(Result(trial, content))
    return found


def test_tables_hold_means_and_deviations() -> None:
    runs = results_of(
        {("MFA", 9, 0): 0.70, ("MFA", 9, 1): 0.74, ("GMM", 9, 0): 0.69}
        | {("MFA", c, 0): 0.9 for c in range(9)}
    )
    assert summarise_auc(runs, "mnist", "MFA", 9, area="rank") == summarise([0.70, 0.74])
    assert summarise([0.70, 0.74]) == Spread(
        pytest.approx(0.72), pytest.approx(0.0282843, abs=1e-6), 2
    )  # type: ignore[arg-type]
    assert summarise([]) is None
    assert mean_over_classes(runs, "mnist", "MFA") == pytest.approx((0.72 + 9 * 0.9) / 10)
    assert mean_over_classes(runs, "mnist", "GMM") is None
    row = next(
        r for r in make_main_table(runs).rows if r[1:5] == [9, "E ≤ 20", "log-sum-exp", "exact"]
    )
    assert row[5:] == ["69.0 (1)", "72.0 ± 2.8 (2)"]
    assert make_class_table(runs, "E ≤ 20", "x").rows[-1] == ["mean of the ten", None, "88.2"]


def verdicts_of(values: dict[tuple[str, int, int], float]) -> dict[str, verdicts.Finding]:
    found = {one.full_claim: one for one in judge_claims(results_of(values))}
    return {model: found[f"mnist: the {model}'s AUC for class 9 is {auc}%"]
            for model, auc in (("GMM", "90.1"), ("MFA", "92.2"))}  # fmt: skip


def test_verdict_names_the_reading_that_agrees() -> None:
    main = {("MFA", 9, 0): 0.70, ("GMM", 9, 0): 0.69}
    found = verdicts_of(main | {("MFA", 0, 0): 0.925, ("GMM", 0, 0): 0.91})
    assert {one.status for one in found.values()} == {"held with a change"}
    assert found["MFA"].number == "69.0 (1); 91.5 (1) with class 0 held out"


def test_a_reading_must_bring_both_models_to_the_paper() -> None:
    main = {("MFA", 9, 0): 0.70, ("GMM", 9, 0): 0.69}
    found = verdicts_of(main | {("MFA", 0, 0): 0.925, ("GMM", 0, 0): 0.80})
    assert {one.status for one in found.values()} == {"not found"}
    assert found["MFA"].number.endswith("closest other reading: 91.5 (1) with class 0 held out")


def test_classes_that_the_paper_did_not_hold_out_are_no_reading() -> None:
    found = verdicts_of({("MFA", 9, 0): 0.70, ("GMM", 9, 0): 0.69, ("MFA", 8, 0): 0.93,
                         ("GMM", 8, 0): 0.91})  # fmt: skip
    assert {one.status for one in found.values()} == {"not found"}


def test_the_summary_lists_claims_by_verdict() -> None:
    main = {("MFA", 9, 0): 0.70, ("GMM", 9, 0): 0.69}
    text = write_summary(judge_claims(results_of(main)))
    assert text.startswith("**Of 3 claims 1 held, 0 held with a change, and 2 were not found.**")
    lines = text.splitlines()[2:]
    assert lines[0] == "- Held: the MFA is slightly better than a GMM of the same K (mnist)."
    assert lines[2] == "- Not found: the MFA's AUC for class 9 is 92.2% (mnist)."
    twice = [verdicts.Finding("it works", "held", "", about) for about in ("mnist", "svhn")]
    assert write_summary(twice).endswith("- Held: it works (mnist; svhn).")


def test_table_1_is_complete() -> None:
    trials = table1.plan_trials(SETS, Scale(seeds=5))
    assert len({trial.name for trial in trials}) == len(trials)
    for dataset in SETS:
        for model in table1.MODELS:
            for variant in ("E ≤ 20", "E ≤ 400"):
                seeds = [
                    [t.settings["seed"] for t in trials
                     if (t.settings["dataset"], t.settings["model"], t.settings["variant"],
                         t.settings["held_out"]) == (dataset, model, variant, c)]
                    for c in range(10)
                ]  # fmt: skip
                assert [sorted(s) for s in seeds] == [
                    list(range(5)) if c in (9, 0) else [0] for c in range(10)
                ]
    first = trials[0].settings
    assert (first["held_out"], first["max_precision"], first["n_components"]) == (9, 20.0, 49)
    assert (first["steps"], first["rows"]) == (None, None)
    assert all(t.settings["model"] == "MFA" for t in trials if t.settings["min_eigenvalue"] != 0.05)


def test_scale_says_what_is_less_than_in_the_paper() -> None:
    assert FULL.change is None
    assert QUICK.change == (
        "2,200 training steps instead of 15 + 50 epochs and at most 10,000 training images"
    )


def test_training_never_sees_the_class_held_out() -> None:
    source = load_images("digits")
    rows = choose_training_rows(source, [c for c in range(10) if c != 4], {"rows": None})
    held = {row.tobytes() for row in load("digits", classes=4, split="train").data}
    assert len(rows) == (source.train_labels != 4).sum()
    assert not held & {row.tobytes() for row in rows}
    assert len(choose_training_rows(source, [0, 1], {"rows": 50})) == 50


def test_a_part_of_svhn_is_pooled_and_split(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "svhn").mkdir()
    for name, n in (("svhn_train_first30_exact", 30), ("svhn_test_first20", 20)):
        x, y = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), np.arange(n) % 10
        np.savez(tmp_path / "svhn" / f"{name}.npz", x=x, y=y, exact=np.ones(n, dtype=bool))
    source = load_images("svhn", str(tmp_path))
    assert (len(source.train), len(source.test), source.train.shape[1]) == (40, 10, 3072)
    assert "only a part was at hand" in source.note


def test_grid_order_is_measured() -> None:
    angle = 2 * np.pi * np.arange(5) / 5
    ring = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    means = np.concatenate([np.repeat(ring, 5, axis=0), np.tile(ring, (5, 1))], axis=1)
    shuffled = means[np.random.default_rng(0).permutation(25)]
    assert figure1.neighbour_ratio(means) < 0.7
    assert 0.8 < figure1.neighbour_ratio(shuffled) < 1.2
    assert figure1.neighbour_chance(means) == pytest.approx(1 / 1001)
    assert figure1.neighbour_chance(shuffled) > 0.01


def test_a_run_that_falls_has_not_levelled_off() -> None:
    assert figure1.late_rise([0.0, *np.linspace(5, -3, 9)]) == np.inf


def test_late_rise_leaves_out_the_start() -> None:
    flat = [-1e6] + [0.0] * 9 + [50.0] * 80 + [100.0] * 10
    assert figure1.late_rise([*flat[:-10], *[50.0] * 10]) == 0
    assert figure1.late_rise(list(np.linspace(0, 1, 100))) == pytest.approx(0.11, abs=0.015)


def test_streams_bring_the_new_class_half_way() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 5000)
    settings = {"new_class": 3, "rows": None, "passes": 2}
    batches = list(order_batches(labels, settings, np.random.default_rng(1)))
    early = np.concatenate([rows for rows, late in batches if not late])
    late = np.concatenate([rows for rows, late in batches if late])
    assert (labels[early] != 3).all()
    assert (labels[late] == 3).any()
    assert not set(early) & set(late)
    assert all(len(rows) == 100 for rows, _ in batches)


def test_ways_to_score_agree_and_are_timed() -> None:
    data = load("digits", split="train").data
    model = MFA(4, 2, solver="sgd", max_precision=20, scaling=None, random_state=0)
    model.partial_fit(data)
    mixture, x = model.mixture_, torch.as_tensor(data[:50])
    dense = dense_log_prob(
        x, mixture.weights, mixture.means, mixture.loadings, mixture.noise_variances
    )
    torch.testing.assert_close(dense, mixture.log_prob(x), rtol=1e-4, atol=1e-3)
    costs = time_scoring(model, data[:50], repeats=2)
    assert set(costs) == {"precision", "factored", "dense", "update"}
    assert min(costs.values()) > 0
