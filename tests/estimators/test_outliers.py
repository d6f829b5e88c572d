"""The outlier detector: scikit-learn's conventions, thresholds, explanations, files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom
from sklearn.base import clone, is_outlier_detector
from sklearn.exceptions import NotFittedError
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import factormix
from factormix import MFA, InputError, MFAOutlierDetector
from factormix.cli.outliers import make_judge
from factormix.data.sources.convert import as_rows
from factormix.estimators.ensemble import CONTAMINATED, NOVELTY, Kind, Recipe, keep_heaviest
from factormix.estimators.outliers import DETECTOR_SCORES

SMALL = Recipe(kinds=(Kind(0.1, 20, 4, 1), Kind(0.1, 1, 100)), n_parts=2)


@parametrize_with_checks(
    [
        MFAOutlierDetector(recipe=replace(CONTAMINATED, n_parts=2)),
        # Among rows that it has learned, it finds fewer outliers than among new ones.
        MFAOutlierDetector(novelty=True, contamination=0.1, recipe=SMALL),
        # Clean rows need not have any below the fence.
        MFAOutlierDetector(scoring="calibrated", contamination=0.1, recipe=SMALL, dtype="float64"),
    ]
)
def test_scikit_learn_check(estimator, check):
    check(estimator)


def table(n: int, seed: int = 0) -> np.ndarray:
    """Rows of two correlated clusters in units of very different size, (n, 4)."""
    rng = np.random.default_rng(seed)
    latent = rng.normal(size=(n, 2)) + 6.0 * rng.integers(2, size=(n, 1))
    X = latent[:, [0, 0, 1, 1]]
    return (X + 0.3 * rng.normal(size=(n, 4))) * [1.0, 1e3, 1e-4, 10.0] + [0, 5e4, 0, 1]


@pytest.fixture(scope="module")
def detector() -> MFAOutlierDetector:
    return MFAOutlierDetector(novelty=True, random_state=0, contamination=0.01).fit(table(1000))


def test_is_an_outlier_detector_that_only_stores_its_options():
    assert is_outlier_detector(MFAOutlierDetector())
    options = {"contamination": "many", "novelty": 3, "scoring": object(), "recipe": 5}
    assert MFAOutlierDetector(**options).get_params()["recipe"] == 5
    model = MFAOutlierDetector(recipe=SMALL, contamination=0.1)
    assert clone(model).get_params() == model.get_params()


@pytest.mark.parametrize(("share", "n"), [(0.01, 2000), (0.1, 1000)])
def test_contamination_is_the_share_of_outliers_among_clean_new_rows(share, n):
    """The count lies within the random error of n held-out and 5,000 new rows."""
    model = MFAOutlierDetector(novelty=True, contamination=share, random_state=1).fit(table(n))
    called = float((model.predict(table(5000, seed=7)) == -1).mean())
    spread = np.sqrt(share * (1 - share) * (1 / n + 1 / 5000))
    assert abs(called - share) < 3.5 * spread, (called, share)


def test_scores_of_training_rows_would_set_a_wrong_threshold():
    """The reason for held-out rows: sixty rows in ten dimensions are learned by heart."""
    rng = np.random.default_rng(0)
    X, new = rng.normal(size=(60, 10)), rng.normal(size=(4000, 10))
    model = MFAOutlierDetector(novelty=True, contamination=0.1, random_state=0).fit(X)
    naive = np.quantile(model.score_samples(X), 0.1)
    called = float((model.predict(new) == -1).mean())
    assert binom.sf(int(called * 60), 60, 0.1) > 1e-3
    assert (model.score_samples(new) < naive).mean() > 1.5 * called


def test_tail_probabilities_of_clean_new_rows_are_uniform(detector):
    tail = detector.tail_probability(table(5000, seed=3))
    for share in (0.02, 0.1, 0.5, 0.9):
        assert (tail < share).mean() == pytest.approx(share, abs=0.035)
    assert tail.min() >= 0
    assert tail.max() <= 1


def test_contamination_is_the_share_of_outliers_among_training_rows():
    X = np.concatenate([table(950), table(50, seed=1) + np.array([5, 5e3, 5e-4, -50])])
    model = MFAOutlierDetector(contamination=0.05, random_state=0)
    found = model.fit_predict(X)
    assert (found == -1).sum() == 50
    assert (found[950:] == -1).mean() > 0.9
    auto = MFAOutlierDetector(random_state=0).fit_predict(X)
    assert (auto[950:] == -1).mean() > 0.8
    assert (auto[:950] == -1).mean() < 0.08


def test_a_clump_of_outliers_does_not_explain_itself():
    """Thirty equal outliers: a component of their own would make them usual."""
    X = np.concatenate([table(970), np.tile([[3.0, 6.2e4, 6e-4, 1.0]], (30, 1))])
    y = np.repeat([0, 1], [970, 30])
    robust = MFAOutlierDetector(random_state=0).fit(X)
    trusting = MFAOutlierDetector(novelty=True, random_state=0).fit(X)
    good = roc_auc_score(y, -robust.score_samples(X))
    assert good > 0.95
    assert good > roc_auc_score(y, -trusting.score_samples(X))


@pytest.mark.parametrize("scoring", DETECTOR_SCORES)
@pytest.mark.parametrize("novelty", [True, False])
def test_every_score_finds_far_rows_and_its_contributions_sum_to_it(scoring, novelty):
    X = table(600)
    recipe = NOVELTY if novelty else replace(CONTAMINATED, n_parts=4)
    options = {"scoring": scoring, "recipe": recipe, "random_state": 0}
    model = MFAOutlierDetector(novelty=novelty, **options).fit(X)
    new = np.concatenate([table(40, seed=5), table(40, seed=6) + np.array([0, 4e4, 0, 0])])
    scores = model.score_samples(new)
    assert roc_auc_score(np.repeat([0, 1], 40), -scores) > 0.97
    found = model.explain(new)
    np.testing.assert_allclose(found.contributions.sum(axis=1), scores, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found.score, scores, rtol=1e-9, atol=1e-9)
    # The shifted column comes first for every score.
    assert (found.ranking()[40:, 0] == 1).mean() > 0.9
    np.testing.assert_array_equal(model.predict(new), np.where(scores < model.offset_, -1, 1))


def test_novelty_has_no_fit_predict():
    assert not hasattr(MFAOutlierDetector(novelty=True), "fit_predict")
    assert hasattr(MFAOutlierDetector(), "fit_predict")


def test_equal_seeds_give_equal_scores_in_any_blocks(detector):
    again = clone(detector).fit(table(1000))
    X = table(100, seed=2)
    np.testing.assert_array_equal(again.score_samples(X), detector.score_samples(X))
    np.testing.assert_allclose(
        detector.score_samples(X[50:]), detector.score_samples(X)[50:], rtol=1e-12
    )


def test_a_loaded_detector_is_the_same(detector, tmp_path):
    detector.save(tmp_path / "d.safetensors")
    loaded = factormix.load(tmp_path / "d.safetensors")
    assert isinstance(loaded, MFAOutlierDetector)
    assert loaded.get_params() == detector.get_params()
    X = table(50, seed=2)
    for method in ("score_samples", "decision_function", "predict", "tail_probability"):
        np.testing.assert_allclose(getattr(loaded, method)(X), getattr(detector, method)(X))
    np.testing.assert_array_equal(loaded.held_out_scores_, detector.held_out_scores_)
    assert loaded.explain(X).sentences() == detector.explain(X).sentences()


def test_a_file_keeps_names_recipe_and_calibration(tmp_path):
    frame = pd.DataFrame(table(300), columns=["a", "b", "c", "d"])
    model = MFAOutlierDetector(
        recipe=SMALL, scoring="calibrated", contamination=0.2, random_state=0
    )
    model.fit(frame).save(tmp_path / "d.safetensors")
    loaded = factormix.load(tmp_path / "d.safetensors")
    assert loaded.recipe == SMALL
    assert loaded.feature_names_in_.tolist() == ["a", "b", "c", "d"]
    np.testing.assert_allclose(
        loaded.score_samples(frame[list("dcba")]), model.score_samples(frame)
    )
    with pytest.raises(InputError, match="feature names should match"):
        loaded.predict(frame.rename(columns={"a": "z"}))


def test_a_truncated_file_is_refused(detector, tmp_path):
    path = tmp_path / "d.safetensors"
    detector.save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(InputError, match="truncated"):
        factormix.load(path)


def test_torch_in_torch_out(detector):
    X = torch.tensor(table(20))
    scores = detector.score_samples(X)
    assert isinstance(scores, torch.Tensor)
    np.testing.assert_allclose(scores.numpy(), detector.score_samples(X.numpy()))
    assert detector.predict(X).dtype == torch.int64


def test_many_rows_are_learned_from_a_random_choice():
    recipe = Recipe(SMALL.kinds, n_parts=2, max_rows=500)
    model = MFAOutlierDetector(novelty=True, recipe=recipe, random_state=0).fit(table(3000))
    assert len(model.held_out_scores_) == 500
    assert sum(m.n_components for m in model.mixtures_) == 2 * (4 + 100)


def test_constant_columns_and_wild_values_are_allowed():
    X = np.column_stack([table(300), np.full(300, 7.0)])
    X[0, 0] = 1e100
    model = MFAOutlierDetector(contamination=0.1, random_state=0).fit(X)
    assert np.isfinite(model.score_samples(X)).all()
    assert model.score_samples(X).argmin() == 0
    moved = X[1:2].copy()
    moved[0, 4] = 8.0
    assert model.score_samples(moved) < model.score_samples(X[1:2])


def shop(n: int, seed: int = 0) -> np.ndarray:
    """Three columns that agree to 3%, (n, 3)."""
    rng = np.random.default_rng(seed)
    base = np.exp(rng.normal(3, 0.5, size=(n, 1)))
    return base * [1.0, 2.0, 0.3] * (1 + 0.03 * rng.normal(size=(n, 3)))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("novelty", [False, True])
def test_expected_values_are_what_the_other_columns_imply(novelty, seed):
    X = shop(500, seed)
    usual = np.median(X, axis=0)
    X = np.vstack([X, 10 * usual])
    model = MFAOutlierDetector(novelty=novelty, random_state=seed).fit(X)
    # Ten times the usual in all columns: a rare row, but its columns agree.
    found = model.explain(X[-1:])
    assert model.score_samples(X).argmin() == 500
    np.testing.assert_allclose(found.expected, X[-1:], rtol=0.15)
    assert found.sentences()[0].startswith("no column stands out")
    # The column that breaks the relation comes first.
    rows = np.tile(usual, (3, 1)) * (1 + 0.6 * np.eye(3))
    found = model.explain(rows)
    np.testing.assert_array_equal(found.ranking()[:, 0], [0, 1, 2])
    np.testing.assert_allclose(np.diag(found.expected), usual, rtol=0.1)
    assert all(s.startswith(f"x{j} is ") for j, s in enumerate(found.sentences()))


@pytest.mark.parametrize("error", ["all columns", "one column"])
def test_gross_errors_among_the_training_rows_do_not_move_expected_values(error):
    X, rng = shop(500), np.random.default_rng(1)
    wrong = rng.permutation(500)[:25]
    columns = rng.integers(3, size=25) if error == "all columns" else 0
    X[wrong, columns] *= 30
    model = MFAOutlierDetector(random_state=0).fit(X)
    new = shop(400, seed=5)
    found = model.explain(new)
    # The columns agree to 3%, so two of them imply the third to 3.7%.
    assert np.median(np.abs(found.expected / new - 1)) < 0.05
    broken = new.copy()
    broken[:, 1] *= 3
    assert (model.explain(broken).ranking()[:, 0] == 1).mean() > 0.95


@pytest.mark.parametrize("novelty", [False, True])
def test_a_changed_constant_is_the_first_reason(novelty):
    X = np.column_stack([1e4 * shop(400), np.full(400, 5.0)])
    model = MFAOutlierDetector(novelty=novelty, random_state=0).fit(X)
    row = X[:1].copy()
    row[0, 3] = 100.0
    found = model.explain(row)
    assert found.ranking()[0, 0] == 3
    assert found.expected[0, 3] == pytest.approx(5.0)
    assert model.predict(row) == [-1]


def test_seeds_flag_nearly_the_same_share_of_clean_rows():
    """Tukey's fence leaves 0.35% of Gaussian values below; scores are skewed, so a few more."""
    X = np.random.default_rng(0).normal(size=(800, 4))
    shares = [
        (MFAOutlierDetector(random_state=seed).fit_predict(X) == -1).mean() for seed in range(3)
    ]
    assert max(shares) < 0.03
    assert np.ptp(shares) < 0.01


def houses(n: int, seed: int) -> pd.DataFrame:
    """Houses with an area, a price that depends on it and a year; the last year is a misprint."""
    rng = np.random.default_rng(seed)
    area, built = np.exp(rng.normal(4.7, 0.4, size=n)), rng.normal(1980, 20, size=n).round()
    price = 2500 * area * np.exp(0.1 * rng.normal(size=n)) * (1 + 0.004 * (built - 1980))
    built[-1] = 20190
    return pd.DataFrame({"area": area, "price": price, "built": built})


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("K", [5, 25])
def test_a_lone_row_is_found_among_the_training_rows_of_a_mixture(K, seed):
    X = houses(400, seed)
    model = MFA(K, random_state=seed).fit(X)
    # It has a component of its own, in which it is as likely as can be.
    assert model.score_samples(X).argmin() != 399
    assert model.leave_one_out_scores(X).argmin() == 399
    (sentence,) = model.explain(X[-1:]).sentences()
    assert sentence.startswith("built is 20190 where 19")
    rows = as_rows(X)
    judged = make_judge(model, rows, 0.01)(rows)
    assert judged.outlier[399]
    np.testing.assert_allclose(judged.score, model.leave_one_out_scores(X), rtol=1e-6)
    # Other rows than those of the training are scored as they are.
    rows = as_rows(X[:-1])
    judged = make_judge(model, rows, None)(rows)
    np.testing.assert_allclose(judged.score, model.score_samples(X[:-1]), rtol=1e-6)


def test_leave_one_out_scores_are_those_of_refits():
    """Of a mixture of three clusters by EM, for ordinary and rare rows, to 0.02 nats."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(240, 3)) @ np.diag([1.0, 2.0, 0.5]) + 12 * rng.integers(3, size=(240, 1))
    X[5] += [3.5, 0, 0]
    gaps = X.copy()
    gaps[5, 1] = np.nan
    # The best of several starts, so that both find the same clusters.
    options = {"solver": "em", "max_epochs": 60, "n_init": 5, "random_state": 0}
    for rows in (X, gaps):
        model = MFA(3, 2, **options).fit(rows)
        found = model.leave_one_out_scores(rows)
        for i in (0, 5, 100, 150):
            refit = MFA(3, 2, **options).fit(np.delete(rows, i, axis=0))
            expected = refit.score_samples(rows[i : i + 1])[0]
            assert found[i] == pytest.approx(expected, abs=0.02), i
        assert found[5] < model.score_samples(rows)[5] - 0.1


def test_works_in_a_pipeline():
    pipeline = make_pipeline(StandardScaler(), MFAOutlierDetector(recipe=SMALL, random_state=0))
    assert set(pipeline.fit_predict(table(100))) <= {-1, 1}


def test_light_components_are_dropped():
    mixture = factormix.PrecisionMixture(
        torch.tensor([0.05, 0.5, 0.1, 0.35]), torch.arange(8.0).view(4, 2), torch.ones(4, 2)
    )
    kept = keep_heaviest(mixture, 0.85)
    assert kept.means[:, 0].tolist() == [2.0, 6.0]
    assert kept.weights.sum().item() == pytest.approx(1.0)
    assert keep_heaviest(mixture, 0.86).n_components == 3
    assert keep_heaviest(mixture, 1.0) is mixture


@pytest.mark.parametrize("recipe", [NOVELTY, CONTAMINATED, SMALL])
@pytest.mark.parametrize("n", [4, 5, 37, 3000])
def test_every_row_is_left_out_by_some_part(recipe, n):
    left_out = np.zeros(n)
    for seen, unseen in recipe.split(n, np.random.default_rng(0)):
        assert len(seen)
        assert sorted([*seen, *unseen]) == list(range(n))
        left_out[unseen] += 1
    assert left_out.min() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contamination": 0.7}, "contamination must be 'auto' or a number above 0 and up to 0.5"),
        ({"contamination": "few"}, "contamination must be"),
        ({"contamination": True}, "contamination must be"),
        ({"novelty": "yes"}, "novelty must be True or False"),
        ({"scoring": "loglik"}, "scoring must be one of 'log_likelihood'"),
        ({"recipe": {"noise_floor": 1}}, "recipe must be a Recipe"),
        ({"recipe": Recipe((), 2)}, "recipe needs kinds"),
        ({"recipe": Recipe((Kind(-1.0, 2, 2),), 2)}, "recipe: noise_floor must be positive"),
        ({"recipe": Recipe((Kind(1.0, 0, 2),), 2)}, "rows_per_component"),
        ({"recipe": Recipe((Kind(1.0, 2, 2),), 1)}, "n_parts"),
        ({"recipe": Recipe((Kind(1.0, 2, 2),), 2, 0)}, "rows_per_part"),
        ({"recipe": Recipe((Kind(1.0, 2, 2),), 2, None, 0.0)}, "kept_weight"),
        ({"recipe": Recipe((Kind(1.0, 2, 2),), 2, max_epochs=0)}, "max_epochs"),
        ({"dtype": "int8"}, "dtype must be"),
        ({"device": "nowhere"}, "device must be"),
        ({"random_state": "x"}, "random_state must be"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(options, message):
    with pytest.raises(InputError, match=message):
        MFAOutlierDetector(**options).fit(table(50))


def test_invalid_rows_are_refused_in_one_sentence(detector):
    with pytest.raises(InputError, match="n_samples=3"):
        MFAOutlierDetector().fit(table(3))
    with pytest.raises(InputError, match="every column of X is constant"):
        MFAOutlierDetector().fit(np.ones((20, 3)))
    with pytest.raises(InputError, match="infinite"):
        detector.predict([[1.0, np.inf, 0.0, 0.0]])
    with pytest.raises(InputError, match="features"):
        detector.explain(np.zeros((2, 3)))
    for method in ("predict", "score_samples", "explain", "tail_probability"):
        with pytest.raises(NotFittedError):
            getattr(MFAOutlierDetector(), method)(table(5))
    with pytest.raises(NotFittedError):
        MFAOutlierDetector().save("nowhere.safetensors")


@pytest.fixture(scope="module", params=[True, False], ids=["novelty", "contaminated"])
def with_gaps(request) -> MFAOutlierDetector:
    X = table(600)
    X[np.random.default_rng(1).random(X.shape) < 0.2] = np.nan
    return MFAOutlierDetector(novelty=request.param, random_state=0).fit(X)


def test_rows_with_gaps_are_scored_by_their_observed_entries(with_gaps):
    usual, strange = table(200, seed=3), table(200, seed=4) + np.array([0, 4e4, 0, 0])
    X = np.concatenate([usual, strange])
    X[:, 0] = np.nan
    assert roc_auc_score(np.repeat([0, 1], 200), -with_gaps.score_samples(X)) > 0.97
    # Without the column in which they are strange, they are as usual as others.
    strange[:, 1] = np.nan
    low = np.quantile(with_gaps.score_samples(usual), 0.1)
    assert np.median(with_gaps.score_samples(strange)) > low
    assert with_gaps.score_samples(np.full((1, 4), np.nan)).item() == 0.0


def test_contributions_of_rows_with_gaps_sum_to_the_score(with_gaps):
    X = table(60, seed=3)
    X[::2, 1] = np.nan
    X[5] = np.nan
    found = with_gaps.explain(X)
    np.testing.assert_allclose(
        found.contributions.sum(axis=1), with_gaps.score_samples(X), rtol=1e-5, atol=1e-9
    )
    gaps = np.isnan(X)
    assert (found.contributions[gaps] == 0).all()
    assert np.isnan(found.z_score[gaps]).all()
    assert np.isfinite(found.z_score[~gaps]).all()
    # A missing value is expected to follow the column beside it.
    known = gaps[:, 1] & ~gaps[:, 0]
    expected = found.expected[known, 1]
    assert np.corrcoef(expected, X[known, 0])[0, 1] > 0.9
    assert all(found.sentences())


def test_an_empty_column_is_refused_and_a_rare_one_is_learned():
    X = table(300)
    X[:, 2] = np.nan
    with pytest.raises(InputError, match="no value in column 2"):
        MFAOutlierDetector().fit(X)
    X[:3, 2] = [1e-4, 2e-4, 3e-4]
    model = MFAOutlierDetector(random_state=0).fit(X)
    assert np.isfinite(model.score_samples(X)).all()
    assert np.isfinite(model.explain(X[:2]).expected).all()


@pytest.mark.parametrize("novelty", [False, True])
def test_empty_rows_change_nothing(novelty):
    X = table(300)
    empty = np.full((150, X.shape[1]), np.nan)
    options = {"contamination": 0.05, "novelty": novelty, "recipe": SMALL, "random_state": 0}
    without = MFAOutlierDetector(**options).fit(X)
    found = MFAOutlierDetector(**options).fit(np.concatenate([X, empty]))
    new = table(200, 1)
    np.testing.assert_allclose(found.score_samples(new), without.score_samples(new), atol=0.2)
    assert found.offset_ == pytest.approx(without.offset_, abs=0.2)
    sentences = found.explain(np.vstack([empty[:1], new[:1]])).sentences()
    assert sentences[0] == "nothing of this row is observed"
    half = new[:1].copy()
    half[0, 1:] = np.nan
    assert "x1" not in found.explain(half).sentences()[0]
    with pytest.raises(InputError, match="top must be at least 1"):
        found.explain(new[:1]).sentences(top=0)


def test_complete_and_incomplete_rows_score_on_nearly_the_same_scale():
    X = np.random.default_rng(0).normal(size=(600, 8))
    detector = MFAOutlierDetector(novelty=True, random_state=0).fit(X)
    new = np.random.default_rng(1).normal(size=(2000, 8))
    half = new.copy()
    half[:, ::2] = np.nan
    ranges = [np.quantile(detector.score_samples(rows), [0.25, 0.75]) for rows in (new, half)]
    # Half of the columns have 0.7 of the spread; without the correction it would be 0.43.
    assert np.ptp(ranges[1]) > 0.5 * np.ptp(ranges[0])


@pytest.mark.parametrize("novelty", [False, True])
def test_mixtures_that_are_trained_at_the_same_time_are_the_same(novelty):
    X = np.random.default_rng(0).normal(size=(300, 4))
    one, several = (
        MFAOutlierDetector(novelty=novelty, random_state=0, n_jobs=n).fit(X) for n in (None, 2)
    )
    np.testing.assert_array_equal(one.score_samples(X), several.score_samples(X))
    np.testing.assert_array_equal(one.held_out_scores_, several.held_out_scores_)
    assert one.offset_ == several.offset_
    with pytest.raises(InputError, match="n_jobs must be None, a whole number"):
        MFAOutlierDetector(n_jobs=0).fit(X)
