"""What a trained mixture says about rows with missing entries."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_normal
from sklearn.exceptions import NotFittedError

from factormix import MFA, InputError
from factormix.data.sources.files import FileRows

RNG = np.random.default_rng(0)
CENTRES = RNG.normal(size=(3, 5)) * 4
X = CENTRES[RNG.integers(3, size=500)] + RNG.normal(size=(500, 2)) @ RNG.normal(size=(2, 5))
X = (X + 0.3 * RNG.normal(size=X.shape)) * np.array([1, 100, 0.01, 1, 1]) + 3
GAPS = np.where(RNG.random(X.shape) < 0.35, np.nan, X)
GAPS[5] = np.nan
GAPS[6] = X[6]


@pytest.fixture(scope="module", params=["global", "feature", None])
def model(request) -> MFA:
    # The oracle reads loadings, for which float32 has few digits.
    options = {"scaling": request.param, "dtype": "float64", "max_epochs": 60}
    return MFA(3, 2, random_state=0, **options).fit(GAPS)


def dense_joint(model: MFA, rows: np.ndarray) -> np.ndarray:
    """Compute ``log pi_k + log p_k(x_o)``, (n, K), from dense Gaussians in float64."""
    out = np.zeros((len(rows), len(model.weights_)))
    Lambda, D = model.loadings_, model.noise_variances_
    for k, (mu, pi) in enumerate(zip(model.means_, model.weights_, strict=True)):
        Sigma = Lambda[k] @ Lambda[k].T + np.diag(D[k])
        for i, row in enumerate(rows):
            o = ~np.isnan(row)
            out[i, k] = np.log(pi)
            if o.any():
                out[i, k] += multivariate_normal(mu[o], Sigma[np.ix_(o, o)]).logpdf(row[o])
    return out


def test_scores_are_densities_of_observed_entries_in_units_of_the_data(model):
    joint = dense_joint(model, GAPS)
    scores = model.score_samples(GAPS)
    np.testing.assert_allclose(scores, logsumexp(joint, axis=1), rtol=1e-8, atol=1e-8)
    assert scores[5] == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(model.score(GAPS), scores.mean(), rtol=1e-9)
    shares = model.predict_proba(GAPS)
    np.testing.assert_allclose(shares, softmax(joint, axis=1), atol=1e-8)
    np.testing.assert_array_equal(model.predict(GAPS), shares.argmax(axis=1))
    weights = RNG.random(len(GAPS))
    assert model.score(GAPS, sample_weight=weights) == pytest.approx(
        np.average(scores, weights=weights)
    )


def test_complete_rows_score_the_same_beside_incomplete_ones(model):
    for method in (model.score_samples, model.predict, model.predict_proba, model.transform):
        np.testing.assert_allclose(method(GAPS)[6], method(X[6:7])[0], rtol=1e-9, atol=1e-12)


def test_latent_codes_of_rows_with_gaps(model):
    posterior = model.posterior(GAPS)
    n, K, l = 500, 3, 2
    assert [np.shape(part) for part in posterior] == [(n, K), (n, K, l), (n, K, l)]
    best = model.predict(GAPS)
    np.testing.assert_allclose(model.transform(GAPS), posterior.means[np.arange(n), best])
    # Less is known about z the less is observed: nothing at all in an empty row.
    np.testing.assert_allclose(posterior.means[5], 0, atol=1e-9)
    np.testing.assert_allclose(posterior.variances[5], 1, rtol=1e-4)
    assert (posterior.variances > model.posterior(X).variances - 1e-5).all()


def test_every_kind_of_table_may_have_gaps(tmp_path):
    model = MFA(3, 2, random_state=0, max_epochs=60).fit(GAPS)
    expected = model.score_samples(GAPS)
    frame = pd.DataFrame(GAPS)
    nullable = frame.convert_dtypes()
    objects = frame.astype(object).where(frame.notna(), None)
    np.save(tmp_path / "rows.npy", GAPS)
    memory_map = np.load(tmp_path / "rows.npy", mmap_mode="r")
    for rows in (frame, nullable, objects, memory_map, FileRows(tmp_path / "rows.npy")):
        np.testing.assert_allclose(model.score_samples(rows), expected)
        again = MFA(3, 2, random_state=0, max_epochs=60).fit(rows)
        np.testing.assert_allclose(again.score(GAPS), expected.mean(), rtol=0.05)
    tensor = model.score_samples(torch.from_numpy(GAPS).float())
    np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-3, atol=1e-2)
    assert np.isfinite(model.bic(GAPS))
    assert model.__sklearn_tags__().input_tags.allow_nan


def test_imputation_keeps_observed_entries_and_fills_in_the_others(model):
    filled = model.impute(GAPS)
    seen = ~np.isnan(GAPS)
    np.testing.assert_array_equal(filled[seen], GAPS[seen])
    assert np.isfinite(filled).all()
    scale = X.std(axis=0)
    error = ((filled - X) / scale)[~seen]
    by_mean = ((np.nanmean(GAPS, axis=0) - X) / scale)[~seen]
    assert (error**2).mean() < 0.5 * (by_mean**2).mean()
    # Nothing observed leaves the mean of the mixture, in units of the data.
    np.testing.assert_allclose(filled[5], model.weights_ @ model.means_, rtol=1e-4)
    np.testing.assert_array_equal(model.impute(X), X)


def test_imputation_is_the_conditional_mean_spread_and_interval_of_the_mixture(model):
    found = model.impute(GAPS[:20], interval=0.8)
    for i in (0, 1, 2, 7):
        o, m = ~np.isnan(GAPS[i]), np.isnan(GAPS[i])
        if not o.any() or not m.any():
            continue
        given = model.condition(np.flatnonzero(o), GAPS[i][o])
        weights = given.weights.detach().numpy()
        means = given.means.detach().numpy()
        np.testing.assert_allclose(found.mean[i][m], weights @ means, rtol=1e-4, atol=1e-4)
        drawn = given.sample(20_000, generator=torch.Generator().manual_seed(0)).numpy()
        np.testing.assert_allclose(found.std[i][m], drawn.std(axis=0), rtol=0.05)
        for end, level in ((found.lower, 0.1), (found.upper, 0.9)):
            below = (drawn < end[i][m]).mean(axis=0)
            np.testing.assert_allclose(below, level, atol=0.01)
        np.testing.assert_array_equal(found.lower[i][o], GAPS[i][o])
        assert (found.std[i][o] == 0).all()


def test_intervals_have_the_given_coverage():
    rng = np.random.default_rng(3)
    rows = CENTRES[rng.integers(3, size=6000)] + rng.normal(size=(6000, 5))
    fitted = MFA(3, 1, random_state=0).fit(
        np.where(rng.random((4000, 5)) < 0.3, np.nan, rows[:4000])
    )
    new, gaps = rows[4000:], rng.random((2000, 5)) < 0.3
    found = fitted.impute(np.where(gaps, np.nan, new), interval=0.9)
    held = ((new >= found.lower) & (new <= found.upper))[gaps].mean()
    assert 0.88 < held < 0.92


def test_draws_are_completions():
    model = MFA(3, 2, random_state=0, max_epochs=60).fit(GAPS)
    drawn = model.impute(GAPS, n_draws=3)
    assert drawn.shape == (3, 500, 5)
    seen = ~np.isnan(GAPS)
    for one in drawn:
        np.testing.assert_array_equal(one[seen], GAPS[seen])
    assert (np.abs(drawn[0] - drawn[1])[~seen] > 0).all()
    np.testing.assert_array_equal(drawn, model.impute(GAPS, n_draws=3))
    spread = model.impute(np.vstack([GAPS[:1]] * 4000), n_draws=1)[0]
    m = ~seen[0]
    found = model.impute(GAPS[:1], interval=0.5)
    np.testing.assert_allclose(spread[:, m].std(axis=0), found.std[0][m], rtol=0.1)


def test_tensors_come_back_as_tensors_and_names_are_columns():
    frame = pd.DataFrame(GAPS, columns=list("abcde"))
    model = MFA(3, 2, random_state=0, max_epochs=20).fit(frame)
    filled = model.impute(torch.from_numpy(GAPS).float())
    assert filled.dtype == torch.float32
    np.testing.assert_allclose(filled.numpy(), model.impute(frame), rtol=1e-3, atol=1e-3)
    swapped = model.impute(frame[list("edcba")])
    np.testing.assert_array_equal(swapped, model.impute(frame))
    given = model.condition(["b", "d"], [100.0, 3.0])
    torch.testing.assert_close(given.means, model.condition([1, 3], [100.0, 3.0]).means)
    assert given.n_features == 3
    torch.testing.assert_close(model.marginal(["c"]).means, model.marginal([2]).means)
    with pytest.raises(InputError, match="no column 'z'; it has a, b, c, d, e"):
        model.marginal(["z"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_draws": 0}, "n_draws must be a whole number of at least 1"),
        ({"interval": 1.0}, "interval must lie between 0 and 1"),
        ({"interval": "0.9"}, "interval must lie between 0 and 1"),
        ({"interval": 0.9, "n_draws": 2}, "exclude each other"),
    ],
)
def test_wrong_options_of_impute(options, words):
    model = MFA(2, 1, random_state=0, max_epochs=2).fit(X)
    with pytest.raises(InputError, match=words):
        model.impute(GAPS, **options)
    with pytest.raises(NotFittedError):
        MFA().impute(GAPS)


@pytest.mark.parametrize("scaling", ["global", "feature"])
def test_marginals_of_single_precision_models_agree_with_their_scores(scaling):
    model = MFA(3, 2, random_state=0, scaling=scaling, max_epochs=20).fit(X)
    kept = [0, 2, 4]
    rows = np.full_like(X, np.nan)
    rows[:, kept] = X[:, kept]
    found = model.marginal(kept).log_prob(torch.tensor(X[:, kept])).detach().numpy()
    np.testing.assert_allclose(found, model.score_samples(rows), rtol=1e-9, atol=1e-9)
