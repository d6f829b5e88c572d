"""Results of a fitted ``MFA``, from every kind of input, against independent computations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_normal
from sklearn.datasets import load_digits, load_iris, load_wine, make_blobs, make_moons
from sklearn.decomposition import FactorAnalysis
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from clusters import X, fitted
from factormix import MFA, InputError, PrecisionMixture, load
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.files import FileRows
from factormix.solvers import ConstrainedSGD
from factormix.training.evaluation import SCORE_ELEMENTS


@pytest.fixture(scope="module")
def model() -> MFA:
    return fitted(dtype="float64", max_epochs=60)


class Oracle:
    """The fitted mixture as dense matrices in float64, computed by SciPy."""

    def __init__(self, model: MFA) -> None:
        self.weights, self.means = model.weights_, model.means_
        self.loadings, self.noise = model.loadings_, model.noise_variances_
        self.covariances = [
            L @ L.T + np.diag(D) for L, D in zip(self.loadings, self.noise, strict=True)
        ]

    def joint(self, x: np.ndarray) -> np.ndarray:
        columns = [
            np.log(w) + multivariate_normal(m, S).logpdf(x)
            for w, m, S in zip(self.weights, self.means, self.covariances, strict=True)
        ]
        return np.stack(columns, axis=1)

    def code(self, x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Compute mean (n, l) and covariance (l, l) of ``z | x, k`` by conditioning."""
        gain = self.loadings[k].T @ np.linalg.inv(self.covariances[k])
        l = len(gain)
        return (x - self.means[k]) @ gain.T, np.eye(l) - gain @ self.loadings[k]


def test_scores_and_assignments_equal_the_dense_computation(model):
    oracle = Oracle(model)
    joint = oracle.joint(X)
    np.testing.assert_allclose(model.score_samples(X), logsumexp(joint, axis=1), rtol=1e-9)
    np.testing.assert_allclose(model.predict_proba(X), softmax(joint, axis=1), atol=1e-9)
    np.testing.assert_array_equal(model.predict(X), joint.argmax(axis=1))
    assert model.score(X) == pytest.approx(logsumexp(joint, axis=1).mean())
    assert model.score(X) == pytest.approx(model.score_samples(X).mean())


def test_codes_equal_the_dense_posterior(model):
    oracle = Oracle(model)
    posterior = model.posterior(X)
    assert posterior.responsibilities.shape == (len(X), 3)
    assert posterior.means.shape == (len(X), 3, 2)
    assert posterior.variances.shape == (3, 2)
    for k in range(3):
        mean, covariance = oracle.code(X, k)
        np.testing.assert_allclose(posterior.means[:, k], mean, atol=1e-8)
        np.testing.assert_allclose(np.diag(posterior.variances[k]), covariance, atol=1e-8)
    best = model.predict(X)
    np.testing.assert_array_equal(model.transform(X), posterior.means[np.arange(len(X)), best])
    np.testing.assert_array_equal(model.fit(X).transform(X), fitted_again(model).transform(X))


def fitted_again(model: MFA) -> MFA:
    return MFA(**model.get_params()).fit(X)


def test_shapes_and_kinds_of_the_attributes(model):
    shapes = {
        "weights_": (3,),
        "means_": (3, 6),
        "precision_diag_": (3, 6),
        "precision_factors_": (3, 6, 2),
        "loadings_": (3, 6, 2),
        "noise_variances_": (3, 6),
    }
    for name, shape in shapes.items():
        assert getattr(model, name).shape == shape
        assert getattr(model, name).dtype == np.float64
    assert model.weights_.sum() == pytest.approx(1)
    np.testing.assert_allclose(model.noise_variances_, 1 / model.precision_diag_)
    assert model.n_features_in_ == 6
    assert model.n_iter_ == 60
    assert model.n_steps_ == 60 * 5
    assert model.n_samples_seen_ == 60 * len(X)
    assert isinstance(model.converged_, bool)


def test_mixture_is_the_density_as_a_module(model):
    mixture = model.mixture_
    assert isinstance(mixture, PrecisionMixture)
    x = torch.from_numpy(X).requires_grad_()
    scores = mixture.log_prob(x)
    np.testing.assert_allclose(scores.detach().numpy(), model.score_samples(X), rtol=1e-9)
    scores.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    np.testing.assert_allclose(
        mixture.responsibilities(x).detach().numpy(), model.predict_proba(X), atol=1e-9
    )
    np.testing.assert_allclose(mixture.loadings.detach().numpy(), model.loadings_, rtol=1e-9)
    # It is a copy: changing it does not change the model.
    before = model.means_
    with torch.no_grad():
        mixture.means += 1
    np.testing.assert_array_equal(model.means_, before)
    # Units of the data may need the digits of float64, also after training in float32.
    single = fitted(dtype="float32").mixture_
    assert single.means.dtype == torch.float64


def test_decoding_brings_rows_back(model):
    codes, components = model.transform(X), model.predict(X)
    back = model.inverse_transform(codes, components)
    assert back.shape == X.shape
    error = ((X - back) ** 2).sum(axis=1).mean()
    assert error < 0.8 * ((X - model.means_[components]) ** 2).sum(axis=1).mean()
    expected = model.means_[components] + np.einsum(
        "nl,ndl->nd", codes, model.loadings_[components]
    )
    np.testing.assert_allclose(back, expected, rtol=1e-9)


def test_one_component_needs_no_components():
    single = fitted(n_components=1)
    codes = single.transform(X)
    np.testing.assert_array_equal(
        single.inverse_transform(codes), single.inverse_transform(codes, np.zeros(len(X), int))
    )


def test_samples_have_the_moments_of_the_model(model):
    oracle = Oracle(model)
    n = 60_000
    drawn, components = model.sample(n)
    assert drawn.shape == (n, 6)
    assert components.shape == (n,)
    assert components.dtype.kind == "i"
    np.testing.assert_allclose(np.bincount(components, minlength=3) / n, model.weights_, atol=0.01)
    for k in range(3):
        own = drawn[components == k]
        deviation = np.sqrt(np.diag(oracle.covariances[k]).max())
        np.testing.assert_allclose(own.mean(axis=0), model.means_[k], atol=0.05 * deviation)
        np.testing.assert_allclose(np.cov(own.T), oracle.covariances[k], atol=0.06 * deviation**2)
    assert model.score(drawn) == pytest.approx(model.score(model.sample(n // 2)[0]), abs=0.2)


def test_samples_of_one_component_with_and_without_noise(model):
    drawn, components = model.sample(20_000, component=1)
    assert set(components.tolist()) == {1}
    smooth, _ = model.sample(20_000, component=1, noise=False)
    # Without noise the samples lie in the plane of the loadings.
    rest = (smooth - model.means_[1]) - (smooth - model.means_[1]) @ np.linalg.pinv(
        model.loadings_[1].T
    ) @ model.loadings_[1].T
    np.testing.assert_allclose(rest, 0, atol=1e-8)
    removed = drawn.var(axis=0) - smooth.var(axis=0)
    np.testing.assert_allclose(removed, model.noise_variances_[1], atol=0.1 * drawn.var())


def test_samples_are_reproducible_by_an_integer_seed(model):
    np.testing.assert_array_equal(model.sample(5)[0], model.sample(5)[0])
    drawing = fitted(random_state=np.random.RandomState(0))
    assert not np.array_equal(drawing.sample(5)[0], drawing.sample(5)[0])
    free = fitted(random_state=None)
    assert not np.array_equal(free.sample(5)[0], free.sample(5)[0])


@pytest.mark.parametrize("scaling", ["global", "feature", None])
def test_without_factors_it_is_the_diagonal_mixture_of_scikit_learn(scaling):
    model = fitted(n_factors=0, dtype="float64", scaling=scaling)
    reference = GaussianMixture(3, covariance_type="diag")
    reference.weights_, reference.means_ = model.weights_, model.means_
    reference.covariances_ = model.noise_variances_
    reference.precisions_cholesky_ = np.sqrt(model.precision_diag_)
    np.testing.assert_allclose(model.score_samples(X), reference.score_samples(X), rtol=1e-9)
    np.testing.assert_array_equal(model.predict(X), reference.predict(X))
    np.testing.assert_allclose(model.predict_proba(X), reference.predict_proba(X), atol=1e-9)
    assert model.bic(X) == pytest.approx(reference.bic(X))
    assert model.aic(X) == pytest.approx(reference.aic(X))
    assert model.transform(X).shape == (len(X), 0)
    assert model.loadings_.shape == (3, 6, 0)
    np.testing.assert_allclose(
        model.inverse_transform(model.transform(X), model.predict(X)),
        model.means_[model.predict(X)],
    )


@pytest.mark.parametrize(("K", "l"), [(1, 1), (3, 2), (2, 5)])
def test_criteria_count_free_parameters(K, l):
    model = fitted(n_components=K, n_factors=l, max_epochs=1)
    d, n = 6, len(X)
    # Covariances D + Lambda Lambda': Lambda is free up to a rotation of its l columns.
    free = K - 1 + K * d + K * (d + d * l - l * (l - 1) / 2)
    deviance = -2 * n * model.score(X)
    assert model.aic(X) == pytest.approx(deviance + 2 * free)
    assert model.bic(X) == pytest.approx(deviance + np.log(n) * free)


def factor_analysis_data() -> np.ndarray:
    draw = np.random.default_rng(0)
    loadings, noise = draw.normal(size=(2, 8)), draw.uniform(0.6, 1.2, 8)
    return draw.normal(size=(2000, 2)) @ loadings + draw.normal(size=(2000, 8)) * noise + 3


def digits() -> np.ndarray:
    # Pixels that hardly vary would have no maximum: their variance goes to zero.
    data = load_digits().data
    return StandardScaler().fit_transform(data[:, data.std(axis=0) > 1])


SHORT_SGD = {"solver": "sgd", "max_epochs": 150}


@pytest.mark.parametrize(
    ("data", "l", "options"),
    [
        (factor_analysis_data, 2, {}),
        (digits, 4, {}),
        (factor_analysis_data, 2, SHORT_SGD),
        pytest.param(digits, 4, SHORT_SGD, marks=pytest.mark.slow),
    ],
)
def test_one_component_reaches_factor_analysis(data, l, options):
    """Options have their defaults, except that SGD takes fewer epochs."""
    rows = data()
    with threadpool_limits(1):
        reference = FactorAnalysis(l, tol=1e-3, max_iter=1000).fit(rows).score(rows)
    reached = MFA(1, l, random_state=0, **options).fit(rows).score(rows)
    assert reached > reference - 0.01 * abs(reference)
    assert reached < reference + 1e-3 * abs(reference)


NUMPY_KINDS = [np.float64, np.float32, np.float16, np.int64, np.uint8, ">f8", "g", bool]


@pytest.mark.parametrize("dtype", NUMPY_KINDS)
def test_arrays_of_every_real_type(dtype):
    rows = np.round(X * 3).astype(dtype)
    model = fitted(rows, max_epochs=2)
    expected = np.float32 if dtype == np.float32 else np.float64
    for result in (
        model.score_samples(rows),
        model.predict_proba(rows),
        model.transform(rows),
        model.means_,
        model.loadings_,
        model.sample(3)[0],
        model.posterior(rows).means,
    ):
        assert isinstance(result, np.ndarray)
        assert result.dtype == expected
        assert np.isfinite(result).all()
    assert model.predict(rows).dtype == np.int64
    same = fitted(rows.astype(np.float64), max_epochs=2).score_samples(rows.astype(np.float64))
    np.testing.assert_allclose(model.score_samples(rows), same, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_in_tensors_out(dtype):
    rows = torch.from_numpy(X).to(dtype)
    model = fitted(rows)
    results = {
        "score_samples": model.score_samples(rows),
        "predict_proba": model.predict_proba(rows),
        "transform": model.transform(rows),
        "posterior": model.posterior(rows).means,
        "inverse_transform": model.inverse_transform(model.transform(rows), model.predict(rows)),
    }
    for result in results.values():
        assert isinstance(result, torch.Tensor)
        assert result.dtype == dtype
        assert result.device == rows.device
        assert not result.requires_grad
    assert model.predict(rows).dtype == torch.int64
    for name in ("weights_", "means_", "precision_diag_", "precision_factors_", "loadings_"):
        assert getattr(model, name).dtype == torch.float32
    drawn, components = model.sample(4)
    assert drawn.dtype == torch.float32
    assert components.dtype == torch.int64
    # The container asked about decides, not the one trained on.
    np.testing.assert_allclose(
        model.score_samples(rows.double().numpy()), results["score_samples"], rtol=1e-5
    )
    assert isinstance(model.score(rows), float)


OTHER_TYPES = [torch.int32, torch.uint8, torch.bool, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", OTHER_TYPES)
def test_tensors_of_other_types_get_the_default_type(dtype):
    rows = torch.from_numpy(np.abs(np.round(X))).to(dtype)
    model = fitted(rows, max_epochs=2)
    for result in (model.score_samples(rows), model.transform(rows), model.predict_proba(rows)):
        assert result.dtype == torch.get_default_dtype()
        assert result.isfinite().all()


def test_a_tensor_with_gradients_is_left_alone():
    rows = torch.from_numpy(X).requires_grad_()
    model = fitted(rows)
    assert not model.score_samples(rows).requires_grad
    assert rows.grad is None


def test_every_container_gives_the_same_model(tmp_path: Path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    expected = fitted().score_samples(X)
    containers = [
        X.tolist(),
        pd.DataFrame(X),
        np.asfortranarray(X),
        X.astype(object),
        mapped,
        ArrayRows(X),
        np.repeat(X, 2, axis=1)[:, ::2],
    ]
    for rows in containers:
        scores = fitted(rows).score_samples(rows)
        assert isinstance(scores, np.ndarray)
        assert scores.dtype == np.float64
        np.testing.assert_array_equal(scores, expected)
    # A file is mixed in another way, so that the fit differs and only its answers can be compared.
    rows = FileRows(tmp_path / "x.npy")
    model = fitted(rows)
    np.testing.assert_array_equal(model.score_samples(rows), model.score_samples(X))
    assert model.bic(rows) == model.bic(X)


def test_data_is_never_changed():
    rows = X.copy()
    model = fitted(rows, scaling="feature").partial_fit(rows)
    model.score_samples(rows)
    np.testing.assert_array_equal(rows, X)


def test_results_of_several_blocks_are_joined_in_order():
    """Evaluation takes about 300 rows of this mixture at a time."""
    rows = np.random.default_rng(0).normal(size=(800, 30))
    model = MFA(300, 10, max_epochs=1, dtype="float64", random_state=0).fit(rows[:400])
    block = SCORE_ELEMENTS // (30 + 300 * 11)
    assert len(rows) > 2 * block

    def evaluate(some: np.ndarray) -> list[np.ndarray]:
        return [model.score_samples(some), model.transform(some), model.posterior(some).means]

    parts = [evaluate(rows[first : first + 100]) for first in range(0, 800, 100)]
    joined = map(np.concatenate, zip(*parts, strict=True))
    for whole, part in zip(evaluate(rows), joined, strict=True):
        np.testing.assert_allclose(whole, part, rtol=1e-10, atol=1e-10)
    assert model.score(rows) == pytest.approx(model.score_samples(rows).mean())


def test_a_refused_fit_leaves_the_old_model():
    model = fitted()
    before = model.score_samples(X)
    for bad in (np.full((50, 3), np.nan), np.ones((2, 3)), np.ones((50, 3))):
        with pytest.raises(InputError):
            model.fit(bad)
        assert model.n_features_in_ == 6
        np.testing.assert_array_equal(model.score_samples(X), before)


def test_options_changed_after_the_fit_do_not_change_the_model():
    model = fitted()
    before = model.score_samples(X), model.sample(9, component=2)[0]
    model.set_params(n_components=1, dtype="float64", scaling=None)
    np.testing.assert_array_equal(model.score_samples(X), before[0])
    np.testing.assert_array_equal(model.sample(9, component=2)[0], before[1])
    assert model.mixture_.means.shape == (3, 6)


def test_options_of_numpy_and_torch_are_taken():
    model = MFA(
        np.int64(2),
        np.int32(1),
        batch_size=np.uint8(50),
        max_epochs=np.int16(2),
        max_precision=np.float32(9),
        dtype=np.dtype("float64"),
        device=torch.device("cpu"),
        random_state=np.int64(3),
    ).fit(X)
    assert model.mixture_.means.dtype == torch.float64
    assert fitted(dtype=torch.float64).mixture_.means.dtype == torch.float64
    assert fitted(solver=ConstrainedSGD(batch_size=30)).n_steps_ == 10 * 15


def test_adversarial_data_keeps_everything_finite():
    draw = np.random.default_rng(1)
    base = draw.normal(size=(300, 5))
    huge = base.copy()
    huge[0] = 1e9
    cases = {
        "constant columns": np.column_stack([base[:, :2], np.full((300, 3), 7.0)]),
        "duplicated rows": np.repeat(base[:3], 100, axis=0),
        "one huge outlier": huge,
        "tiny": base * 1e-30,
        "large": base * 1e30,
        "two values": (base > 0).astype(np.uint8),
    }
    for name, rows in cases.items():
        for scaling in ("global", "feature"):
            model = fitted(rows, scaling=scaling, max_epochs=30)
            for result in (
                model.score_samples(rows),
                model.means_,
                model.loadings_,
                model.noise_variances_,
                model.sample(9)[0],
            ):
                assert np.isfinite(result).all(), name
            assert model.weights_.sum() == pytest.approx(1)
            assert (model.precision_diag_ > 0).all()


@pytest.mark.parametrize(
    ("make", "K"),
    [
        (lambda: make_moons(1000, noise=0.05, random_state=0)[0], 8),
        (lambda: make_blobs(1000, centers=3, n_features=2, random_state=0)[0], 3),
        (lambda: make_blobs(5000, centers=5, n_features=3, random_state=1)[0], 5),
        (lambda: load_iris().data, 3),
        (lambda: load_wine().data, 3),
    ],
)
@pytest.mark.parametrize("n_factors", [0, 1])
def test_the_defaults_are_as_good_as_the_diagonal_mixture_of_scikit_learn(make, K, n_factors):
    X = make()
    theirs = GaussianMixture(K, covariance_type="diag", random_state=0).fit(X).score(X)
    ours = MFA(K, n_factors, random_state=0).fit(X).score(X)
    assert ours >= theirs - 0.05 * X.shape[1]


def test_a_stream_of_small_batches_is_learned_soon():
    X, _ = make_blobs(5000, centers=5, n_features=3, random_state=1)
    theirs = GaussianMixture(5, covariance_type="diag", random_state=0).fit(X).score(X)
    stream = MFA(5, 1, random_state=0)
    for part in np.split(X, 50):
        stream.partial_fit(part)
    assert stream.score(X) >= theirs - 0.15


def test_one_wild_row_does_not_spoil_the_others():
    X = np.random.default_rng(0).normal(size=(1000, 5))
    clean = MFA(2, 0, random_state=0).fit(X).score(X)
    X[0] = 1e4
    assert MFA(2, 0, random_state=0).fit(X).score(X[1:]) >= clean - 0.5


def test_a_row_far_out_has_a_score():
    X = np.random.default_rng(0).normal(size=(300, 5))
    model = MFA(2, 1, random_state=0).fit(X)
    scores = model.score_samples(np.full((1, 5), 1e25))
    assert np.isfinite(scores).all()
    assert (scores < model.score_samples(X).min()).all()
    assert np.isfinite(model.predict_proba(np.full((1, 5), 1e25))).all()


def test_results_do_not_share_memory_with_the_model():
    X = torch.randn(300, 5, generator=torch.Generator().manual_seed(0)).double()
    model = MFA(2, 1, random_state=0, dtype="float64").fit(X)
    before = model.score(X)
    model.posterior(X[:3]).variances.zero_()
    for values in model.mixture_.buffers():
        values.add_(1)
    assert model.score(X) == before


def test_resume_refuses_other_rows_of_the_same_number():
    X = np.random.default_rng(0).normal(size=(300, 4))
    model = MFA(2, 1, random_state=0, max_epochs=2).fit(X)
    with pytest.raises(InputError, match="not trained by fit on these 300 rows"):
        model.resume(X * 1000)
    with pytest.raises(InputError, match="not trained by fit on these 299 rows"):
        model.resume(X[:299])


def test_the_default_fits_iris_and_a_single_column():
    """With four features, eight factors would be too many."""
    iris = load_iris().data
    model = MFA(3, random_state=0).fit(iris)
    assert model.get_params()["n_factors"] is None
    assert model.n_factors_ == 3
    assert model.precision_factors_.shape == (3, 4, 3)
    assert model.transform(iris).shape == (150, 3)
    assert MFA(2, max_epochs=1).fit(iris[:, :1]).n_factors_ == 0
    assert MFA(2, max_epochs=1).fit(np.hstack([iris, iris[::-1], iris])).n_factors_ == 8
    assert MFA(2).partial_fit(iris).n_factors_ == 3
    with pytest.raises(InputError, match="n_factors=4 must be smaller than n_features=4"):
        MFA(2, 4).fit(iris)


def test_a_default_number_of_factors_comes_back_from_a_file(tmp_path):
    model = MFA(2, max_epochs=1).fit(load_iris().data)
    model.save(tmp_path / "m")
    copy = load(tmp_path / "m")
    assert copy.n_factors is None
    assert copy.n_factors_ == 3


def test_fit_predict_is_predict_after_fit():
    options = {"n_components": 3, "n_factors": 1, "max_epochs": 5, "random_state": 0}
    weights = np.linspace(0.5, 1, len(X))
    for given in ({}, {"sample_weight": weights}):
        expected = MFA(**options).fit(X, **given).predict(X)
        np.testing.assert_array_equal(MFA(**options).fit_predict(X, **given), expected)


def test_attributes_describe_the_training(tmp_path):
    solver = ConstrainedSGD(phases=None)
    model = MFA(2, 1, solver=solver, batch_size=20, max_epochs=3, random_state=0).fit(X)
    model.save(tmp_path / "m")
    for one in (model, load(tmp_path / "m")):
        assert one.solver_ == solver
        assert one.batch_size_ == 20
        assert one.planned_epochs_ == 3
        assert one.finished_
        assert one.seconds_ == model.seconds_ > 0
    stream = MFA(2, 1).partial_fit(X)
    assert stream.planned_epochs_ is None
    assert not stream.finished_
    assert stream.solver_.name == "natural"
    with pytest.raises(AttributeError, match="not fitted yet"):
        MFA().solver_  # noqa: B018


@pytest.mark.parametrize("solver", ["natural", "covariance", "em", "sgd"])
def test_autocast_changes_nothing(solver):
    """A hook within a network in mixed precision may train and score."""
    x = np.random.default_rng(0).normal(size=(400, 5)) * [1, 2, 3, 1, 1]

    def compute():
        model = MFA(3, 2, solver=solver, random_state=0, max_epochs=2).fit(x)
        if solver != "em":
            model.partial_fit(x[:100])
        return model.score_samples(x), model.transform(x)

    found = compute()
    with torch.autocast("cpu", torch.bfloat16):
        again = compute()
    assert all(map(np.array_equal, found, again))
