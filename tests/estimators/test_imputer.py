"""The imputer of tables: scikit-learn's conventions, imputations and files."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.impute import KNNImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from factormix import InputError, MFAImputer, load
from factormix.core.conditionals import Imputer, side_by_side
from factormix.core.missing import PreparedMixture, RowBlock
from factormix.core.parameters import Parameters

X, Y = load_iris(return_X_y=True)
GAPS = np.where(np.random.default_rng(0).random(X.shape) < 0.3, np.nan, X)


@pytest.fixture(scope="module")
def imputer() -> MFAImputer:
    return MFAImputer(random_state=0, max_epochs=60).fit(GAPS)


@parametrize_with_checks([MFAImputer(n_components=[1, 2], max_epochs=3)])
def test_scikit_learn_check(estimator, check):
    check(estimator)


def test_imputation_is_better_than_by_neighbours(imputer):
    filled, lost = imputer.transform(GAPS), np.isnan(GAPS)
    np.testing.assert_array_equal(filled[~lost], GAPS[~lost])
    error = ((filled - X)[lost] ** 2).mean()
    assert error < ((KNNImputer().fit_transform(GAPS) - X)[lost] ** 2).mean()
    assert error < 0.3 * ((np.nanmean(GAPS, axis=0) - X)[lost] ** 2).mean()


def test_the_distribution_is_the_mean_over_the_mixtures(imputer):
    mixtures = [m.double() for m in imputer.mixtures_]
    assert len(mixtures) == 2
    o, m = [0, 2], [1, 3]
    row = np.array([[5.5, np.nan, 3.0, np.nan]])
    expected = 0
    for mixture in mixtures:
        given = mixture.condition(o, row[0, o])
        expected = expected + (given.weights @ given.means).detach().numpy() / len(mixtures)
    np.testing.assert_allclose(imputer.transform(row)[0, m], expected, rtol=1e-4)
    drawn = imputer.impute(np.repeat(row, 8000, axis=0), n_draws=1)[0]
    np.testing.assert_allclose(drawn[:, m].mean(axis=0), expected, atol=0.03)


def test_mixtures_side_by_side_are_the_mixture_of_all():
    """Factors that one of them lacks change nothing."""
    first, second = MFAImputer([1], 0, max_epochs=2), MFAImputer([3], 2, max_epochs=2)
    parts = [one.fit(X).mixtures_[0].precision_form for one in (first, second)]
    parts = [Parameters(*(t.detach() for t in one)) for one in parts]
    x = torch.from_numpy(X[:20])
    missing = torch.from_numpy(np.isnan(GAPS[:20]))
    whole, *each = (
        RowBlock(PreparedMixture(one), x, missing).joint().logsumexp(dim=1)
        for one in (side_by_side(parts), *parts)
    )
    torch.testing.assert_close(whole, torch.stack(each).logsumexp(dim=0) - np.log(2))


def test_levels_of_hidden_entries_are_uniform_where_the_model_is_true():
    generator = torch.Generator().manual_seed(0)
    mixture = MFAImputer([2], 1, random_state=0, max_epochs=30).fit(X).mixtures_[0]
    x = mixture.sample(3000, generator=generator)
    hidden = torch.rand(x.shape, generator=generator) < 0.3
    missing = ~hidden & (torch.rand(x.shape, generator=generator) < 0.2)
    form = Parameters(*(t.detach() for t in mixture.precision_form))
    levels = Imputer(form).levels(x, hidden, missing)
    assert len(levels) == int(hidden.sum())
    grid = torch.linspace(0, 1, 11)[1:-1].double()
    np.testing.assert_allclose(torch.quantile(levels, grid), grid, atol=0.03)


def test_intervals_of_new_rows_have_the_given_coverage():
    """Tails so heavy that the intervals of Gaussians, which follow the variance, are too wide."""
    rng = np.random.default_rng(0)
    rows = rng.standard_t(2.5, size=(3800, 5)) + rng.normal(size=(3800, 1)) * [3, 2, 1, 0, -2]
    train, new = rows[:800], rows[800:]
    imputer = MFAImputer([1], 1, random_state=0, max_epochs=60)
    imputer.fit(np.where(rng.random(train.shape) < 0.3, np.nan, train))
    lost = rng.random(new.shape) < 0.3
    given = np.where(lost, np.nan, new)
    found = imputer.impute(given, interval=0.9)
    held = ((new >= found.lower) & (new <= found.upper))[lost].mean()
    # The calibration itself rests on about 200 hidden entries.
    assert abs(held - 0.9) < 0.03
    plain = np.abs(new - found.mean)[lost] < 1.645 * found.std[lost]
    assert plain.mean() > 0.93


def test_a_table_with_names_in_a_pipeline():
    frame = pd.DataFrame(GAPS, columns=list("abcd"))
    imputer = MFAImputer([1], max_epochs=20, random_state=0).set_output(transform="pandas")
    filled = imputer.fit_transform(frame)
    assert list(filled.columns) == list("abcd")
    assert not filled.isna().any().any()
    pipeline = make_pipeline(clone(imputer), LogisticRegression(max_iter=1000)).fit(frame, Y)
    assert pipeline.score(frame, Y) > 0.85


def test_an_imputer_comes_back_from_its_file(imputer, tmp_path):
    imputer.save(tmp_path / "i.safetensors")
    again = load(tmp_path / "i.safetensors")
    assert isinstance(again, MFAImputer)
    assert again.get_params() == imputer.get_params()
    for one, other in zip(
        again.impute(GAPS, interval=0.8), imputer.impute(GAPS, interval=0.8), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_components": []}, "n_components must be None, a number or a list"),
        ({"n_components": "many"}, "n_components must be a whole number"),
        ({"n_components": [0]}, "n_components must be a whole number of at least 1"),
        ({"noise_floor": 0}, "noise_floor must be a positive number"),
        ({"n_factors": 4}, "n_factors=4 must be smaller than n_features=4"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(options, words):
    with pytest.raises(InputError, match=words):
        MFAImputer(**options).fit(GAPS)


def test_invalid_tables_are_refused_in_one_sentence(imputer):
    with pytest.raises(InputError, match="no value in column 1"):
        MFAImputer().fit(np.where(np.arange(4) == 1, np.nan, X))
    with pytest.raises(InputError, match="infinite value in row 0, column 0"):
        imputer.transform(np.where(X[0, 0] == X, np.inf, X))
    with pytest.raises(InputError, match="4 features"):
        imputer.transform(X[:, :3])
    with pytest.raises(InputError, match="too few"):
        MFAImputer().fit(X[:1])
    with pytest.raises(NotFittedError):
        MFAImputer().transform(X)


def test_the_bar_shows_training_and_calibration(terminal, capsys):
    plain = MFAImputer([1, 2], max_epochs=20, random_state=0).fit(GAPS)
    assert capsys.readouterr().err == ""
    shown = MFAImputer([1, 2], max_epochs=20, random_state=0, verbose=1).fit(GAPS)
    drawn = capsys.readouterr().err
    assert "100%" in drawn
    assert "calibration, K=2, ll=" in drawn
    np.testing.assert_array_equal(plain.transform(GAPS), shown.transform(GAPS))


def test_mixtures_are_trained_in_the_dtype(tmp_path):
    single, double = (
        MFAImputer(1, max_epochs=60, random_state=0, dtype=dtype).fit(GAPS)
        for dtype in ("float32", "float64")
    )
    assert double._members[0].means.dtype == torch.float64
    assert single._members[0].means.dtype == torch.float32
    np.testing.assert_allclose(single.transform(GAPS), double.transform(GAPS), atol=0.02)
    double.save(tmp_path / "imputer")
    np.testing.assert_array_equal(
        load(tmp_path / "imputer").transform(GAPS), double.transform(GAPS)
    )
    with pytest.raises(InputError, match="dtype must be 'float32' or 'float64'"):
        MFAImputer(dtype="float16").fit(GAPS)
