"""The estimator keeps scikit-learn's conventions, alone and inside its tools."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy.stats import multivariate_normal
from sklearn.base import clone, is_classifier
from sklearn.datasets import make_blobs
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import factormix
from factormix import MFA, InputError, load, select
from factormix.solvers import (
    EM,
    SOLVERS,
    ConstrainedSGD,
    CovarianceGradient,
    NaturalGradient,
    resolve,
)

SMALL = {"n_components": 2, "n_factors": 1, "max_epochs": 3, "batch_size": 32}

EQUIVALENCE = "check_sample_weight_equivalence_on_dense_data"
START = (
    "Fits to weighted and to repeated rows are compared to seven digits after a few epochs. The"
    " start is drawn at random from the rows, and other rows in another order give another one."
    " What does not hang on it agrees to rounding; see tests/test_weights.py."
)
ROWS = (
    "Noise variances allow for the number of rows, and repeated rows are more rows. Weights say"
    " proportions only. With predict_variances=False the fits agree."
)
EXPECTED_FAILURES = {
    "covariance": {EQUIVALENCE: START},
    "natural": {EQUIVALENCE: START},
    "em": {
        EQUIVALENCE: START,
        "check_n_features_in_after_fitting": "The check ends with a call of partial_fit. Batch EM"
        " learns from whole passes over the same rows, so that it turns a stream down in one"
        " sentence; what the check asks of fit holds, as the other solvers show.",
    },
    "sgd": {},
}
"""By solver, the checks that are not to pass, each with the reason."""


LIKELIEST = NaturalGradient(predict_variances=False)
"""Maximum likelihood, which does not depend on the number of rows."""


def expected_failures(estimator: MFA) -> dict[str, str]:
    solver = resolve(estimator.solver)
    if solver.name == "natural" and estimator.batch_size is None:
        # All rows are in one batch, so that their order does not matter.
        return {} if solver == LIKELIEST else {EQUIVALENCE: ROWS}
    return EXPECTED_FAILURES[solver.name]


@parametrize_with_checks(
    [
        MFA(**SMALL, dtype="float64"),
        MFA(**SMALL, dtype="float32"),
        MFA(**SMALL, scaling="feature"),
        MFA(**SMALL, scaling=None),
        MFA(**SMALL, solver=ConstrainedSGD(phases=None)),
        *(MFA(**SMALL, solver=name) for name in SOLVERS if name != MFA().solver),
        MFA(**SMALL, solver="sgd", dtype="float64"),
        MFA(3, 0, max_epochs=1),
        MFA(3, 0, max_epochs=1, solver=LIKELIEST),
    ],
    expected_failed_checks=expected_failures,
)
def test_scikit_learn_check(estimator, check):
    single = resolve(estimator.solver).name == "sgd" and estimator.dtype == "float32"
    if single and EQUIVALENCE in str(check):
        pytest.skip("compares seven digits, which is more than float32 has: float64 runs it")
    check(estimator)


@pytest.fixture
def X() -> np.ndarray:
    return make_blobs(200, n_features=5, centers=2, random_state=0)[0]


def test_parameters_can_be_read_set_and_cloned():
    solver = ConstrainedSGD(min_eigenvalue=0.01)
    model = MFA(7, 2, solver=solver, scaling=None, max_precision=20.0, random_state=3)
    parameters = model.get_params()
    assert parameters["solver"] is solver
    assert len(model.get_params(deep=False)) == 19
    assert parameters["solver__min_eigenvalue"] == 0.01
    copy = clone(model)
    assert copy is not model
    assert copy.get_params() == parameters
    copy.set_params(n_components=9, dtype="float64")
    assert (copy.n_components, copy.dtype) == (9, "float64")
    with pytest.raises(ValueError, match="Invalid parameter 'components'"):
        copy.set_params(components=3)


def test_constructor_only_stores():
    MFA(n_components="many", solver=object(), max_precision=-1, callbacks=5)


def test_clone_of_a_fitted_model_is_not_fitted(X):
    model = MFA(**SMALL).fit(X)
    with pytest.raises(NotFittedError):
        clone(model).score(X)


@pytest.mark.parametrize(
    "method",
    [
        *("score_samples", "score", "predict", "predict_proba", "transform", "posterior"),
        *("inverse_transform", "bic", "aic", "icl", "resume"),
    ],
)
def test_an_unfitted_model_says_so(method, X):
    with pytest.raises(NotFittedError, match="not fitted"):
        getattr(MFA(), method)(X)


def test_an_unfitted_model_neither_samples_nor_saves(tmp_path):
    with pytest.raises(NotFittedError):
        MFA().sample()
    with pytest.raises(NotFittedError):
        MFA().save(tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []
    assert not hasattr(MFA(), "weights_")
    assert not hasattr(MFA(), "history_")


def test_works_in_a_pipeline_and_a_grid_search(X):
    pipeline = make_pipeline(StandardScaler(), MFA(2, 1, max_epochs=5, random_state=0))
    search = GridSearchCV(pipeline, {"mfa__n_components": [1, 2], "mfa__n_factors": [0, 2]}, cv=2)
    search.fit(X)
    best = search.best_estimator_
    assert best.score(X) == pytest.approx(best.score_samples(X).mean())
    assert len(search.cv_results_["mean_test_score"]) == 4
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


def test_a_grid_search_reaches_the_options_of_a_solver(X):
    model = MFA(2, 1, solver=NaturalGradient(patience=1), random_state=0)
    grid = {"solver__tol": [0.0, 1.0]}
    search = GridSearchCV(model, grid, cv=2, refit=False).fit(X)
    by_hand = [
        GridSearchCV(model, {"solver": [NaturalGradient(patience=1, tol=tol)]}, cv=2).fit(X)
        for tol in grid["solver__tol"]
    ]
    expected = [found.cv_results_["mean_test_score"][0] for found in by_hand]
    np.testing.assert_array_equal(search.cv_results_["mean_test_score"], expected)
    assert expected[0] != expected[1]
    assert model.solver == NaturalGradient(patience=1)


def test_options_of_a_solver_are_set_by_name_too(X):
    pipeline = make_pipeline(StandardScaler(), MFA(2, 1, solver="em"))
    pipeline.set_params(mfa__solver__tol=0.5, mfa__n_components=3)
    assert pipeline[-1].solver == EM(tol=0.5)
    assert pipeline[-1].n_components == 3
    both = MFA().set_params(solver="em", solver__iterations=7)
    assert both.solver == EM(iterations=7)
    fitted = MFA(2, 1, solver=NaturalGradient(tol=0.1), max_epochs=2).fit(X)
    fitted.set_params(solver__tol=0.2)
    assert (fitted.solver.tol, fitted.solver_.tol) == (0.2, 0.1)
    assert EM().set_params(tol=0.1).get_params() == EM(tol=0.1).get_params()
    with pytest.raises(InputError, match="the solver EM has no option 'rate': use one of kmeans"):
        MFA(solver="em").set_params(solver__rate=1)
    with pytest.raises(InputError, match="tol must be 0 or more"):
        MFA(solver="em").set_params(solver__tol=-1)


@pytest.mark.parametrize("kind", SOLVERS.values())
def test_solvers_show_what_differs_from_their_defaults_and_are_cloned(kind):
    assert repr(kind()) == f"{kind.__name__}()"
    solver = kind(min_eigenvalue=0.25)
    assert repr(solver) == f"{kind.__name__}(min_eigenvalue=0.25)"
    assert clone(solver) == solver


def test_results_have_names_in_the_package_and_short_texts(X):
    model = MFA(2, 1, max_epochs=3, random_state=0).fit(X)
    gaps = np.where(np.arange(5) == 2, np.nan, X)
    seen = []
    MFA(1, 0, max_epochs=1, callbacks=[seen.append]).fit(X)
    results = {
        "Explanation": model.explain(X),
        "Imputation": model.impute(gaps, interval=0.9),
        "Posterior": model.posterior(X),
        "Progress": seen[-1],
        "Scored": next(factormix.stream(MFA(2, 1), X)),
        "Selection": select(X, [1, 2], [0, 1], estimator=MFA(max_epochs=2, random_state=0)),
        "PrecisionMixture": model.mixture_,
    }
    for name, result in results.items():
        assert type(result) is getattr(factormix, name)
        # About two lines: nobody wants a page of numbers.
        assert repr(result).startswith(name)
        assert len(repr(result)) < 400, repr(result)
    assert repr(results["Explanation"]) == "Explanation(n_rows=200, n_features=5)"
    assert isinstance(factormix.NOVELTY, factormix.Recipe)


def test_is_a_density_estimator():
    assert MFA().__sklearn_tags__().estimator_type == "density_estimator"
    assert not is_classifier(MFA())


def test_frames_keep_names(X):
    frame = pd.DataFrame(X, columns=list("abcde"), index=np.arange(len(X)) + 10)
    model = MFA(2, 2, max_epochs=2, random_state=0).fit(frame)
    assert model.feature_names_in_.tolist() == list("abcde")
    assert model.get_feature_names_out().tolist() == ["mfa0", "mfa1"]
    codes = model.set_output(transform="pandas").transform(frame)
    assert codes.columns.tolist() == ["mfa0", "mfa1"]
    assert codes.index.equals(frame.index)
    plain = MFA(2, 2, max_epochs=2, random_state=0).fit(X)
    np.testing.assert_array_equal(codes.to_numpy(), plain.transform(X))
    np.testing.assert_array_equal(model.score_samples(frame), plain.score_samples(X))
    # The same names in another order are put in order, unlike in scikit-learn.
    np.testing.assert_array_equal(
        model.score_samples(frame[list("edcba")]), model.score_samples(frame)
    )
    with pytest.raises(ValueError, match=r"feature names should match .* passed during fit"):
        model.score(frame.rename(columns={"a": "f"}))
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        model.score(X)
    # Training again without names forgets them.
    assert not hasattr(model.fit(X), "feature_names_in_")


def test_survives_pickling_and_goes_on(X):
    model = MFA(**SMALL, random_state=0).partial_fit(X)
    copy = pickle.loads(pickle.dumps(model))
    model.partial_fit(X)
    copy.partial_fit(X)
    np.testing.assert_array_equal(model.means_, copy.means_)


def test_covariances_and_precisions_are_those_of_the_density(X):
    model = MFA(2, 2, dtype="float64", random_state=0).fit(X)
    Lambda, D = model.loadings_, model.noise_variances_
    assert model.covariances_.shape == model.precisions_.shape == (2, 5, 5)
    for k in range(2):
        np.testing.assert_allclose(model.covariances_[k], Lambda[k] @ Lambda[k].T + np.diag(D[k]))
        np.testing.assert_allclose(model.precisions_[k], np.linalg.inv(model.covariances_[k]))
    densities = [
        multivariate_normal(m, C) for m, C in zip(model.means_, model.covariances_, strict=True)
    ]
    density = sum(w * p.pdf(X) for w, p in zip(model.weights_, densities, strict=True))
    np.testing.assert_allclose(model.score_samples(X), np.log(density))


def test_a_diagonal_mixture_has_the_covariances_of_gaussian_mixture(X):
    theirs = GaussianMixture(2, covariance_type="diag", tol=1e-9, max_iter=500, random_state=0)
    theirs.fit(X)
    solver = EM(tol=0, iterations=300)
    ours = MFA(2, 0, solver=solver, dtype="float64", max_precision=1e6, random_state=0).fit(X)
    order = np.argsort(ours.means_[:, 0]), np.argsort(theirs.means_[:, 0])
    expected = np.stack([np.diag(v) for v in theirs.covariances_[order[1]]])
    np.testing.assert_allclose(ours.covariances_[order[0]], expected, rtol=1e-3, atol=1e-6)
    assert ours.lower_bound_ == pytest.approx(theirs.lower_bound_, abs=1e-4)


def test_matrices_that_are_too_large_are_refused():
    # 12,000 squared is a little more than 2**27.
    model = MFA(1, 0, max_epochs=1).fit(np.random.default_rng(0).normal(size=(40, 12_000)))
    for name in ("covariances_", "precisions_"):
        with pytest.raises(InputError, match=r"1 matrices of 12,000 x 12,000 .*: use loadings_"):
            getattr(model, name)


@pytest.mark.parametrize("batch_size", [200, 64])
def test_the_lower_bound_is_the_likelihood_before_the_last_iteration(X, batch_size, tmp_path):
    options = {"dtype": "float64", "batch_size": batch_size, "random_state": 0}
    before, after = (
        MFA(3, 1, solver=EM(tol=0), max_epochs=epochs, **options).fit(X) for epochs in (14, 15)
    )
    # Batch EM scores all rows by the mixture that the pass before has left.
    assert after.lower_bound_ == pytest.approx(before.score(X), rel=1e-9)
    after.save(tmp_path / "m.safetensors")
    assert load(tmp_path / "m.safetensors").lower_bound_ == after.lower_bound_


def test_the_lower_bound_counts_rows_by_their_weights_and_follows_a_stream(X):
    weights = np.where(np.arange(len(X)) % 3, 1.0, 4.0)
    options = {"solver": EM(tol=0), "dtype": "float64", "batch_size": 70, "random_state": 0}
    before, after = (
        MFA(2, 1, max_epochs=epochs, **options).fit(X, sample_weight=weights) for epochs in (12, 13)
    )
    assert after.lower_bound_ == pytest.approx(before.score(X, sample_weight=weights), rel=1e-6)
    streamed = MFA(2, 1, dtype="float64", batch_size=100, random_state=0).partial_fit(X)
    score = streamed.score(X[:100])
    assert streamed.partial_fit(X[:100]).lower_bound_ == pytest.approx(score)


def test_sample_takes_a_seed_of_its_own(X):
    model = MFA(2, 1, random_state=0).fit(X)
    first, second, other = (model.sample(5, random_state=seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(model.sample(5)[0], model.sample(5, random_state=0)[0])
    random = np.random.RandomState(3)
    assert not np.array_equal(*(model.sample(5, random_state=random)[0] for _ in range(2)))
    # The moments of the mixture are weighted means of those of its components.
    rows, _ = model.sample(200_000, random_state=5)
    np.testing.assert_allclose(rows.mean(axis=0), model.weights_ @ model.means_, atol=0.05)


@pytest.mark.parametrize("batch_size", [200, 64])
def test_a_warm_start_of_batch_em_is_one_longer_fit(X, batch_size):
    options = {"solver": EM(tol=0), "dtype": "float64", "batch_size": batch_size}
    whole = MFA(3, 1, max_epochs=20, random_state=0, **options).fit(X)
    parts = MFA(3, 1, max_epochs=12, random_state=0, warm_start=True, **options).fit(X)
    parts.set_params(max_epochs=8).fit(X)
    assert parts.n_iter_ == whole.n_iter_ == 20
    np.testing.assert_allclose(parts.means_, whole.means_, rtol=1e-9)
    # As in scikit-learn: each further fit begins where the last has ended.
    theirs = GaussianMixture(3, max_iter=1, tol=0, warm_start=True, random_state=0)
    ours = MFA(3, 1, max_epochs=1, random_state=0, warm_start=True, **options).fit(X)
    for model in (ours, theirs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            bounds = [model.fit(X).lower_bound_ for _ in range(25)][11:]
        assert (np.diff(bounds) > -1e-9).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_warm_start_goes_on_with_other_rows(X, solver, tmp_path):
    rows = make_blobs(3000, n_features=5, centers=2, random_state=0)[0]
    options = {"solver": solver, "random_state": 0, "warm_start": True}
    model = MFA(2, 1, max_epochs=10, batch_size=100, **options).fit(rows)
    before, steps, start = model.score(rows), model.n_steps_, model.means_.copy()
    model.set_params(max_epochs=3, batch_size=50).fit(rows[:1000])
    assert (model.n_steps_, model.batch_size_, model.n_iter_) == (steps + 60, 50, 13)
    assert model.score(rows) > before - 0.05
    assert 0 < np.abs(model.means_ - start).max() < 0.5
    # What is saved can be continued, too.
    model.save(tmp_path / "m.safetensors")
    copy = load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(copy.fit(rows).means_, model.fit(rows).means_)
    cold = clone(model).set_params(warm_start=False).fit(rows)
    again = cold.means_.copy()
    np.testing.assert_array_equal(cold.fit(rows).means_, again)


def test_a_warm_start_with_other_options_is_refused(X, tmp_path):
    model = MFA(2, 1, max_epochs=2, random_state=0, warm_start=True).fit(X)
    for changed in ({"n_components": 3}, {"n_factors": 2}, {"solver": "em"}):
        (name,) = changed
        with pytest.raises(InputError, match=f"warm_start continues a model with {name}="):
            clone(model).fit(X).set_params(**changed).fit(X)
    with pytest.raises(ValueError, match="features"):
        model.fit(X[:, :3])
    model.save(tmp_path / "m.safetensors", training_state=False)
    with pytest.raises(InputError, match="saved without its training state"):
        load(tmp_path / "m.safetensors").fit(X)


MEANS = np.array([[0.0] * 5, [3.0] * 5, [-3.0] * 5])


def test_given_means_begin_as_in_gaussian_mixture(X):
    theirs = GaussianMixture(
        2, covariance_type="diag", means_init=X[[3, 50]], tol=1e-10, max_iter=500, random_state=0
    )
    theirs.fit(X)
    solver = EM(tol=0, iterations=300)
    options = {"solver": solver, "dtype": "float64", "max_precision": 1e6}
    ours = MFA(2, 0, means_init=X[[3, 50]], **options).fit(X)
    # No permutation: the components stand in the order of the given means.
    np.testing.assert_allclose(ours.means_, theirs.means_, atol=1e-3)
    # Without n_components, there are as many as means.
    assert MFA(means_init=X[[3, 50, 70]], max_epochs=1).fit(X).means_.shape == (3, 5)
    swapped = MFA(2, 0, means_init=X[[50, 3]], **options).fit(X)
    np.testing.assert_allclose(swapped.means_, theirs.means_[::-1], atol=1e-3)


def test_batch_em_sums_the_rows_nearest_to_given_means(X):
    # The first of two passes takes variances and weights, and the second makes one step of EM.
    means = X[[3, 50, 120]] + 0.1
    options = {"solver": EM(tol=0), "dtype": "float64", "max_precision": 1e9, "scaling": None}
    first = MFA(3, 0, means_init=means, max_epochs=1, **options).fit(X)
    np.testing.assert_allclose(first.means_, means, atol=1e-12)
    nearest = ((X[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    counts = np.bincount(nearest, minlength=3) + 1
    np.testing.assert_allclose(first.weights_, counts / counts.sum())
    clusters = [X[nearest == k] for k in range(3)]
    squares = np.stack([len(rows) * rows.var(axis=0) for rows in clusters])
    # The pooled variance counts as one more row.
    expected = (squares + squares.sum(axis=0) / len(X)) / counts[:, None]
    np.testing.assert_allclose(first.noise_variances_, expected)
    shares = first.predict_proba(X)
    second = MFA(3, 0, means_init=means, max_epochs=2, **options).fit(X)
    np.testing.assert_allclose(second.means_, shares.T @ X / shares.sum(axis=0)[:, None])


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_components_stay_near_their_given_means(solver, method, tmp_path):
    if (solver, method) == ("em", "partial_fit"):
        pytest.skip("batch EM needs passes")
    rng = np.random.default_rng(0)
    places = 10 * rng.normal(size=(6, 4))
    rows = 100 + places[rng.integers(6, size=3000)] + rng.normal(size=(3000, 4))
    options = {"means_init": 100 + places, "random_state": 0, "batch_size": 100, "max_epochs": 20}
    model = MFA(6, 1, solver=solver, **options)
    getattr(model, method)(rows)
    assert np.abs(model.means_ - 100 - places).max() < 0.6
    model.save(tmp_path / "m.safetensors")
    copy = load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(copy.means_, model.means_)
    np.testing.assert_array_equal(clone(model).means_init, model.means_init)


def test_an_interrupted_fit_keeps_its_given_means(X, tmp_path):
    options = {"means_init": MEANS, "batch_size": 20, "max_epochs": 3, "random_state": 0}
    whole = MFA(3, 1, **options).fit(X)
    # The first batches are still collected when this run ends.
    part = MFA(3, 1, callbacks=[lambda progress: True], **options).fit(X)
    assert part.n_steps_ < whole.n_steps_
    part.save(tmp_path / "m.safetensors")
    rest = load(tmp_path / "m.safetensors").resume(X)
    np.testing.assert_array_equal(rest.means_, whole.means_)


def test_means_of_another_shape_are_refused(X):
    with pytest.raises(InputError, match=r"means_init must have the shape \(2, 5\)"):
        MFA(2, 1, means_init=MEANS).fit(X)
    with pytest.raises(InputError, match="means_init holds NaN"):
        MFA(3, 1, means_init=np.full((3, 5), np.nan)).fit(X)
    with pytest.raises(InputError, match="scales=3 of the solver shares"):
        MFA(3, 1, means_init=MEANS, solver=CovarianceGradient(scales=3)).fit(X)
