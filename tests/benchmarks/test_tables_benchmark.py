"""The benchmark on tables: folds, densities against SciPy, verdicts, and a quick run."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
import tables_page as page
import tables_trials as trials
from common import busy_process
from harness import Result, Trial
from scipy.special import logsumexp
from scipy.stats import norm


@pytest.fixture
def adbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tables in ADBench's format, in a data folder of its own."""
    folder = tmp_path / "adbench"
    folder.mkdir()
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=(300, 2)), np.full(300, 7.0)])
    np.savez(folder / "10_ten.npz", X=X, y=np.repeat([0, 1], [250, 50]))
    np.savez(folder / "2_two.npz", X=X[:, :1], y=np.zeros(300))
    monkeypatch.setenv("FACTORMIX_DATA", str(tmp_path))
    return folder


def test_tables_have_inliers_and_varying_columns(adbench: Path) -> None:
    assert trials.list_tables()[-2:] == ["2_two", "10_ten"]
    with np.load(adbench / "10_ten.npz") as file:
        inliers = file["X"][:250, :2]
    np.testing.assert_array_equal(trials.load_table("10_ten", 1000), inliers)
    part = trials.load_table("10_ten", 40)
    assert part.shape == (40, 2)
    np.testing.assert_array_equal(part, trials.load_table("10_ten", 40))
    assert {row.tobytes() for row in part} <= {row.tobytes() for row in inliers}


def test_folds_hold_out_every_row_once_and_drop_columns_constant_in_training() -> None:
    rows = np.random.default_rng(0).normal(size=(20, 3))
    held = np.concatenate([trials.split_fold(rows, "raw", k, 5)[1] for k in range(5)])
    assert {row.tobytes() for row in held} == {row.tobytes() for row in rows}
    train, _ = trials.split_fold(rows, "standardised", 0, 5)
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(train.std(axis=0), 1)
    rare = np.zeros((20, 1))
    rare[3] = 1.0
    sizes = [trials.split_fold(np.hstack([rows, rare]), "raw", k, 5)[0].shape[1] for k in range(5)]
    assert sorted(sizes) == [3, 4, 4, 4, 4]


def test_near_discrete_columns_are_counted() -> None:
    rng = np.random.default_rng(0)
    mostly_zero = np.where(np.arange(100) < 60, 0.0, rng.normal(size=100))
    rows = np.column_stack([rng.normal(size=100), np.arange(100) % 5, mostly_zero])
    assert trials.count_discrete(rows) == 2


def test_linearly_dependent_columns_are_counted() -> None:
    rows = np.random.default_rng(0).normal(size=(100, 3)) * [1.0, 1e3, 1e-3]
    assert trials.count_dependent(rows) == 0
    assert trials.count_dependent(np.column_stack([rows, rows[:, 0] - 2 * rows[:, 2]])) == 1


def test_kernel_density_is_scotts_on_scaled_columns() -> None:
    rng = np.random.default_rng(0)
    x, at = rng.normal(size=(30, 2)) * [3.0, 0.01], rng.normal(size=(5, 2)) * [3.0, 0.01]
    width = 30 ** (-1 / 6) * x.std(axis=0)
    expected = logsumexp(norm.logpdf(at[:, None], x, width).sum(axis=2), axis=1) - np.log(30)
    np.testing.assert_allclose(trials.ScaledDensity().fit(x).score_samples(at), expected)


def test_a_table_limits_the_numbers_of_factors() -> None:
    wanted = ("0", "1", "2", "5", "10", "d-1")
    assert trials.choose_factor_labels(3, wanted) == ["0", "1", "2"]
    assert trials.choose_factor_labels(5, wanted) == ["0", "1", "2", "d-1"]
    assert trials.choose_factor_labels(64, wanted)[-1] == "d-1"
    assert trials.choose_factor_labels(65, wanted)[-1] == "10"


def test_a_fold_fits_every_model_that_its_size_allows() -> None:
    settings = {"table": "linnerud", "scaling": "raw", "fold": 0, "folds": 5, "rows": 2000,
                "components": [1, 9], "factors": ["0", "d-1"], "seed": 0}  # fmt: skip
    values = json.loads(json.dumps(trials.run_fold(settings).values))
    assert (values["features"], values["training_rows"]) == (3, 16)
    sizes = [(f["model"], f.get("components"), f.get("factors")) for f in values["fits"]]
    assert sizes == [
        ("MFA", 1, "0"),
        ("MFA", 1, "d-1"),
        ("full", 1, None),
        ("diag", 1, None),
        ("FactorAnalysis", None, "0"),
        ("FactorAnalysis", None, "d-1"),
        ("KernelDensity", None, None),
    ]


def test_a_fold_without_bounds_has_our_sizes_with_the_least_variance_of_scikit_learn() -> None:
    settings = {"table": "linnerud", "scaling": "standardised", "fold": 0, "folds": 5,
                "rows": 2000, "components": [1, 2], "factors": ["0"], "seed": 0}  # fmt: skip
    free = trials.run_unbounded(settings).values["fits"]
    assert [(f["model"], f["components"], f["factors"]) for f in free] == [
        ("MFA", 1, "0"),
        ("MFA", 2, "0"),
    ]
    train, held_out = trials.split_fold(trials.load_table("linnerud", 2000), "standardised", 0, 5)
    model = trials.MFA(2, 0, max_precision=1e6, random_state=0).fit(train)
    assert free[1]["score"] == np.mean(model.score_samples(held_out))


def test_a_fit_that_fails_is_recorded() -> None:
    class Broken:
        def fit(self, x: object) -> Broken:
            return self

        def score_samples(self, x: object) -> list[float]:
            return [1.0, np.nan]

    found = trials.fit_and_score(Broken, np.zeros((2, 1)), np.zeros((2, 1)), model="MFA")
    assert found["score"] is None
    assert found["failure"] == "ArithmeticError: the held-out log-likelihood is nan"
    found = trials.fit_and_score(lambda: 1 / 0, np.zeros((2, 1)), np.zeros((2, 1)))
    assert found["failure"].startswith("ZeroDivisionError")


def fit(model: str, score: float | None, factors: str | None = None) -> dict[str, Any]:
    failure = "LinAlgError: it did not converge" if score is None else None
    seconds = None if score is None else 0.1
    found = {"model": model, "components": 2, "score": score, "seconds": seconds}
    return found | {"failure": failure} | ({} if factors is None else {"factors": factors})


def fold(ours: dict[str, float | None], full: float | None, diag: float | None) -> dict[str, Any]:
    found = [fit("MFA", score, label) for label, score in ours.items()]
    found += [fit("full", full), fit("diag", diag)]
    return {
        "features": 10,
        "training_rows": 80,
        "discrete_columns": 0,
        "dependent_columns": 0,
        "fits": found,
    }


def table(*folds: dict[str, Any], name: str = "some") -> page.ScaledTable:
    return page.ScaledTable(name, "raw", folds)


def test_a_comparison_takes_the_best_of_each_side() -> None:
    [found] = table(
        fold({"0": -9.0, "1": -4.0}, -4.0, -8.0), fold({"0": -1.0, "1": -4.8}, -4.0, -8.0)
    ).comparisons()
    assert (found.ours.label, found.ours.mean) == ("1", -4.4)  # type: ignore[union-attr]
    assert (found.theirs.label, found.theirs.mean) == ("full", -4.0)  # type: ignore[union-attr]
    assert found.difference == pytest.approx(-0.04)
    assert found.holds
    assert found.reason == ""
    [short] = table(fold({"0": -4.6}, -4.0, None), fold({"0": -4.6}, -4.0, None)).comparisons()
    assert not short.holds
    assert "full covariances" in short.reason
    assert "follow exactly" not in short.reason
    exact = fold({"0": -4.6}, -4.0, None) | {"dependent_columns": 2}
    [surer] = table(exact, exact).comparisons()
    assert "2 of 10 columns follow exactly from others" in surer.reason


def test_a_size_that_fails_on_a_fold_has_no_model() -> None:
    [found] = table(fold({"0": -9.0}, -4.0, -8.0), fold({"0": None}, -4.0, -8.0)).comparisons()
    assert found.ours is None
    assert not found.holds
    assert found.reason == "ours has no model: LinAlgError: it did not converge"
    [alone] = table(fold({"0": -9.0}, None, None)).comparisons()
    assert alone.holds
    assert alone.difference == np.inf


def test_one_bad_fold_is_named() -> None:
    good, bad = fold({"0": -4.0}, None, -4.0), fold({"0": -168.0}, None, -4.0)
    [found] = table(good, bad, good).comparisons()
    assert found.reason.startswith("one fold alone: fold 2 at -168.0")


def test_tables_with_a_missing_fold_are_left_out() -> None:
    def result(number: int) -> Result:
        settings = {"table": "some", "scaling": "raw", "fold": number, "folds": 2}
        return Result(
            Trial("tables", f"{number}", settings, trials.run_fold), fold({"0": 1.0}, 1.0, 1.0)
        )

    assert page.gather_tables([result(0)]) == []
    assert [len(each.folds) for each in page.gather_tables([result(1), result(0)])] == [2]


def test_the_page_counts_test_tables_and_shows_failures_in_bold() -> None:
    chosen = [
        table(fold({"0": -4.0}, -4.0, -5.0), name="iris"),
        table(fold({"0": None}, -4.0, -5.0), name="other"),
    ]
    text = page.compose_page(chosen, [], [], ["iris"], {}, [])
    assert "**1 of 2** comparisons hold; on test tables, **0 of 1**." in text
    assert "| **MFA** | **1 of 2** | 1 x LinAlgError: it did not converge |" in text
    assert "**no model / -4.00 (full) / -inf**" in text
    assert "| tuning | raw | 1 of 1 |" in text


def test_the_page_compares_tables_with_their_fits_without_a_bound() -> None:
    def free(number: int) -> Result:
        settings = {"table": "some", "scaling": "raw", "fold": number}
        values = {"fits": [fit("MFA", 6.0 + number, "0")]}
        return Result(Trial("unbounded", f"{number}", settings, trials.run_unbounded), values)

    bounded = table(*[fold({"0": -4.0, "1": -5.0}, -3.0, -5.0)] * 2)
    text = "\n".join(page.compare_unbounded([bounded], [free(1), free(0)]))
    assert "| some | **0 of 1** | 1 of 1 | +1.050 |" in text
    assert "| some | 2 | -4.00 (l = 0) | 6.50 (l = 0) | -3.00 (full) |" in text
    assert list(page.compare_unbounded([bounded], [free(0)])) == []


def timing(condition: str, values: dict[str, Any], kind: str = "small") -> Result:
    trial = Trial("seconds", f"{kind}-x", {"condition": condition}, trials.run_small)
    return Result(trial, {"torch_threads": 1, **values})


def test_time_targets_follow_the_medians() -> None:
    alone, _, busy = trials.CONDITIONS

    def small(condition: str, *ours: float | None) -> Result:
        found = [{"table": "iris", "components": 1, "MFA": s, "full": 0.1, "diag": 0.2}
                 for s in ours]  # fmt: skip
        return timing(condition, {"fits": found})

    def section(*results: Result) -> str:
        return "\n".join(page.compose_seconds(results))

    text = section(small(alone, 0.01, 0.05, 9.0), small(busy, 0.07, None, 0.07))
    assert "in one warm thread: met, 50.0 ms" in text
    assert "in one thread alone: met, 1.40 times" in text
    assert "| **1** |" in text
    text = section(small(alone, 0.07), small(busy, 0.14))
    assert "in one warm thread: **not met**, 70.0 ms" in text
    assert "in one thread alone: **not met**, 2.00 times" in text
    passes = [timing(c, {"seconds": s, "log_likelihood": 882.0}, "pass")
              for c, s in ((alone, 2.0), (busy, 2.5))]  # fmt: skip
    assert "one pass beside a busy process" in section(*passes)
    assert "met, 1.25 times" in section(*passes)
    assert section() == ""


def test_a_busy_process_ends_with_its_parent() -> None:
    with busy_process() as process:
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_timings_use_default_threads_beside_a_busy_process() -> None:
    found = trials.plan_timings(["iris"], (1, 2, 25), 1, images=True)
    assert len(found) == 2 * len(trials.CONDITIONS)
    busy = [trial for trial in found if trial.settings["busy"]]
    assert [trial.settings["threads"] for trial in busy] == [None, None]
    assert found[0].settings["components"] == [1, 2]
    assert trials.choose_small(["iris", "digits", "linnerud"], 2000) == ["iris", "linnerud"]


@pytest.mark.slow
def test_a_quick_run_is_complete_and_continues_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--quick", "--jobs", "1", "--tables", "iris", "-o", str(tmp_path)]
    tables.main(quick)
    files = sorted((tmp_path / "trials" / "tables").iterdir())
    assert [path.stem for path in files] == [
        f"iris-{scaling}-fold{n}" for scaling in ("raw", "standardised") for n in (0, 1)
    ]
    text = (tmp_path / "tables.md").read_text()
    assert "| iris | tuning | 4 | 75 |" in text
    assert "## Seconds" in text
    assert "not finished" not in text
    assert str(tmp_path) not in text
    with (tmp_path / "tables.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    ours = [float(r["score"]) for r in rows if (r["model"], r["scaling"], r["components"],
            r["factors"]) == ("MFA", "raw", "1", "1")]  # fmt: skip
    shown = next(line for line in text.split("## Raw")[1].splitlines() if "| iris | 1 |" in line)
    assert f"{np.mean(ours):.2f}" in shown
    files[0].write_text("{")
    before = {path: path.stat().st_mtime_ns for path in files}
    capsys.readouterr()
    tables.main([*quick, "--no-seconds"])
    assert capsys.readouterr().out.splitlines()[0] == f"tables/{files[0].stem}: done"
    changed = [path for path in files if path.stat().st_mtime_ns != before[path]]
    assert changed == files[:1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--tables", "magic"], "magic is not one of iris"),
        (["--quick", "--write-docs"], "--quick is too small"),
        (["--folds", "1"], "at least 2 folds"),
    ],
)
def test_wrong_options_are_refused(
    wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tables.main(wrong)
    assert message in capsys.readouterr().err
