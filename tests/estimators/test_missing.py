"""What a trained mixture says about rows with missing entries."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_normal

from factormix import MFA
from factormix.data.sources import FileRows

RNG = np.random.default_rng(0)
CENTRES = RNG.normal(size=(3, 5)) * 4
X = CENTRES[RNG.integers(3, size=500)] + RNG.normal(size=(500, 2)) @ RNG.normal(size=(2, 5))
X = (X + 0.3 * RNG.normal(size=X.shape)) * np.array([1, 100, 0.01, 1, 1]) + 3
GAPS = np.where(RNG.random(X.shape) < 0.35, np.nan, X)
GAPS[5] = np.nan
GAPS[6] = X[6]


@pytest.fixture(scope="module", params=["global", "feature", None])
def model(request) -> MFA:
    return MFA(3, 2, random_state=0, scaling=request.param, max_epochs=60).fit(GAPS)


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


def test_scores_are_densities_of_what_is_observed_in_units_of_the_data(model):
    joint = dense_joint(model, GAPS)
    scores = model.score_samples(GAPS)
    np.testing.assert_allclose(scores, logsumexp(joint, axis=1), rtol=1e-5, atol=1e-5)
    assert scores[5] == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(model.score(GAPS), scores.mean(), rtol=1e-9)
    shares = model.predict_proba(GAPS)
    np.testing.assert_allclose(shares, softmax(joint, axis=1), atol=1e-5)
    np.testing.assert_array_equal(model.predict(GAPS), shares.argmax(axis=1))
    weights = RNG.random(len(GAPS))
    assert model.score(GAPS, sample_weight=weights) == pytest.approx(
        np.average(scores, weights=weights)
    )


def test_complete_rows_are_what_they_are_alone(model):
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
