"""Explanations of a mixture: contributions sum to scores; tables and sentences."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.special import softmax
from scipy.stats import multivariate_normal

from clusters import X, fitted
from densities import exact_scores
from factormix import MFA, InputError, datasets
from factormix.core.attribution import SCORES


@pytest.mark.parametrize("scoring", SCORES)
@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_contributions_sum_to_the_score_in_units_of_the_data(scoring, scale):
    data = X * scale + 1e3 * scale
    model = fitted(data)
    found = model.explain(data[:60], scoring)
    np.testing.assert_allclose(found.contributions.sum(axis=1), found.score, rtol=1e-9)
    if scoring == "log_likelihood":
        np.testing.assert_allclose(found.score, model.score_samples(data[:60]), rtol=1e-5)
        np.testing.assert_allclose(found.score, exact_scores(model, data[:60]), rtol=1e-5)


def test_distances_do_not_depend_on_units():
    near, far = fitted(X), fitted(X * 1e4)
    for scoring in ("mahalanobis", "reconstruction"):
        a, b = near.explain(X[:20], scoring), far.explain(X[:20] * 1e4, scoring)
        np.testing.assert_allclose(a.contributions, b.contributions, rtol=1e-3, atol=1e-3)


def test_expected_values_are_conditional_means():
    model, rows = fitted(X), X[::40]
    found, mixture = model.explain(rows), model.mixture_
    E, Gamma = (t.detach().numpy() for t in (mixture.precision_diag, mixture.precision_factors))
    Sigma = np.linalg.inv(E[:, :, None] * np.eye(6) - Gamma @ np.swapaxes(Gamma, 1, 2))
    for row, x in enumerate(rows):
        for j in (0, 3):
            others = [i for i in range(6) if i != j]
            joint, means, variances = [], [], []
            for pi, mu, S in zip(model.weights_, model.means_, Sigma, strict=True):
                inner = S[np.ix_(others, others)]
                gain = np.linalg.solve(inner, S[others, j])
                means.append(mu[j] + gain @ (x[others] - mu[others]))
                far = x[others] - mu[others]
                leverage = (1 + far @ np.linalg.solve(inner, far)) / (pi * len(X))
                variances.append((S[j, j] - gain @ S[others, j]) * (1 + leverage))
                known = multivariate_normal(mu[others], inner).logpdf(x[others])
                joint.append(np.log(pi) + known)
            R, m = softmax(joint), np.array(means)
            deviation = np.sqrt(R @ (np.array(variances) + (m - R @ m) ** 2))
            assert found.expected[row, j] == pytest.approx(R @ m, abs=1e-5)
            assert found.deviation[row, j] == pytest.approx(deviation, rel=1e-5)
            z = (x[j] - R @ m) / deviation
            assert found.z_score[row, j] == pytest.approx(z, abs=1e-4)


@pytest.fixture(scope="module")
def patients() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    age = rng.uniform(20, 80, size=800)
    glucose = 90 + age + 18 * rng.normal(size=800)
    weight = 60 + 12 * rng.normal(size=800)
    return pd.DataFrame({"age": age, "glucose": glucose, "weight": weight})


def test_a_sentence_about_a_single_column_names_no_others():
    rng = np.random.default_rng(0)
    model = MFA(1, 0, random_state=0).fit(rng.normal(50, 10, size=(200, 1)))
    for value in (55, 500):
        (sentence,) = model.explain(np.array([[value]])).sentences()
        assert sentence.startswith(f"x0 is {value}.0 where ")
        assert sentence.endswith(" is expected")


def test_a_sentence_names_the_column_and_its_expected_value(patients):
    model = MFA(3, 2, random_state=0).fit(patients)
    row = pd.DataFrame({"age": [51.0], "glucose": [312.0], "weight": [60.0]})
    found = model.explain(row)
    assert found.features == ("age", "glucose", "weight")
    assert found.expected[0, 1] == pytest.approx(141, abs=8)
    assert found.deviation[0, 1] == pytest.approx(18, abs=3)
    (sentence,) = found.sentences(top=1)
    expected, deviation = f"{found.expected[0, 1]:.0f}", f"{found.deviation[0, 1]:.0f}"
    assert sentence == (
        f"glucose is 312 where {expected} ± {deviation} is expected from the other columns"
    )


def test_a_row_without_a_reason_says_so(patients):
    model = MFA(3, 2, random_state=0).fit(patients)
    usual = pd.DataFrame({"age": [50.0], "glucose": [140.0], "weight": [60.0]})
    (sentence,) = model.explain(usual).sentences()
    assert sentence.startswith("no column stands out")


def test_a_frame_has_a_line_for_each_feature_lowest_contribution_first(patients):
    model = MFA(3, 2, random_state=0).fit(patients)
    found = model.explain(patients.iloc[:5])
    frame = found.to_frame()
    assert list(frame.columns) == [
        *("row", "feature", "value", "expected", "deviation", "z_score", "contribution"),
    ]
    assert len(frame) == 15
    assert len(found.to_frame(top=2)) == 10
    for row, part in frame.groupby("row"):
        assert part.contribution.is_monotonic_increasing
        assert part.contribution.sum() == pytest.approx(found.score[row])
        np.testing.assert_allclose(
            part.z_score, (part.value - part.expected) / part.deviation, rtol=1e-9
        )
    some = found[[3, 1]]
    assert len(some) == 2
    np.testing.assert_array_equal(some.values, patients.iloc[[3, 1]])
    assert len(found[2]) == 1


def test_columns_without_names_and_pixels_have_labels():
    assert fitted(X).explain(X[:1]).features[:2] == ("x0", "x1")
    digits = datasets.load("digits")
    model = MFA(2, 1, max_epochs=2, random_state=0).fit(digits.data)
    assert model.explain(digits.data[:1]).image_shape is None


def test_invalid_input_is_refused():
    model = fitted(X)
    with pytest.raises(InputError, match="scoring must be one of 'log_likelihood'"):
        model.explain(X, "calibrated")
    with pytest.raises(InputError, match="features"):
        model.explain(X[:, :2])
    with pytest.raises(InputError, match="infinite"):
        model.explain(np.full((1, 6), np.inf))


def test_contributions_of_rows_with_gaps_sum_to_their_marginal_likelihood():
    model = fitted(X * 1e3, scaling="feature")
    rows = X[:40] * 1e3
    rows[np.random.default_rng(0).random(rows.shape) < 0.3] = np.nan
    found = model.explain(rows)
    np.testing.assert_allclose(
        found.contributions.sum(axis=1), model.score_samples(rows), rtol=1e-5, atol=1e-6
    )
    assert (found.contributions[np.isnan(rows)] == 0).all()
