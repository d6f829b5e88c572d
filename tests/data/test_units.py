"""Results follow the units of the data: scale and offset change them by the Jacobian only."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from factormix import MFA, InputError, PrecisionMixture
from factormix.data.batches import Batch
from factormix.data.columns import Columns
from factormix.data.sources.convert import as_rows
from factormix.data.units import Units, precise_dtype
from factormix.solvers import SOLVERS, ConstrainedSGD, Problem
from factormix.training.solvers import step

CPU = torch.device("cpu")
CENTROIDS = ConstrainedSGD(phases=(1, 0))
"""Phase I only: E stays where it starts, at its bound."""


def clusters(seed: int = 0, d: int = 6) -> np.ndarray:
    """Draw three factor analyzers with 200 rows each, (600, d)."""
    rng = np.random.default_rng(seed)
    return np.concatenate(
        [
            rng.normal(size=(200, 2)) @ rng.normal(size=(2, d))
            + 3 * rng.normal(size=d)
            + 0.5 * rng.normal(size=(200, d))
            for _ in range(3)
        ]
    )


def fitted(X: np.ndarray, **options: object) -> MFA:
    return MFA(
        **{"n_components": 4, "n_factors": 2, "max_epochs": 10, "random_state": 0, "solver": "sgd"}
        | options
    ).fit(X)


@lru_cache
def unmoved(dtype: str, scaling: str) -> MFA:
    return fitted(clusters(), dtype=dtype, scaling=scaling)


CHANGES = [(1e6, 0.0), (1e-6, 0.0), (1.0, 1e4), (1e6, 1e10), (1e-6, -0.01), (37.0, 5.0)]


@pytest.mark.parametrize("scaling", ["global", "feature"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("scale", "offset"), CHANGES)
def test_log_likelihood_changes_by_the_jacobian_only(scale, offset, dtype, scaling):
    X = clusters()
    moved = scale * X + offset
    before = unmoved(dtype, scaling)
    after = fitted(moved, dtype=dtype, scaling=scaling)
    jacobian = X.shape[1] * np.log(scale)
    # The same steps are taken on the same numbers, up to the rounding of the input in float64.
    np.testing.assert_allclose(
        after.score_samples(moved) + jacobian, before.score_samples(X), rtol=1e-6, atol=1e-6
    )
    np.testing.assert_allclose(after.weights_, before.weights_, rtol=1e-6)
    np.testing.assert_allclose((after.means_ - offset) / scale, before.means_, atol=1e-5)
    np.testing.assert_allclose(after.precision_diag_ * scale**2, before.precision_diag_, rtol=1e-5)
    np.testing.assert_allclose(after.noise_variances_ / scale**2, before.noise_variances_, 1e-5)
    np.testing.assert_allclose(after.loadings_ / scale, before.loadings_, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(after.predict(moved), before.predict(X))
    np.testing.assert_allclose(after.transform(moved), before.transform(X), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        [record["log_likelihood"] + jacobian for record in after.history_],
        [record["log_likelihood"] for record in before.history_],
        rtol=1e-6,
    )
    drawn, components = after.sample(50)
    expected, same = before.sample(50)
    np.testing.assert_array_equal(components, same)
    np.testing.assert_allclose((drawn - offset) / scale, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("scale", "offset"), CHANGES[:3])
def test_every_solver_is_blind_to_units(scale, offset, solver):
    X = clusters()
    moved = scale * X + offset
    scores = fitted(moved, solver=solver).score_samples(moved) + X.shape[1] * np.log(scale)
    np.testing.assert_allclose(
        scores, fitted(X, solver=solver).score_samples(X), rtol=1e-3, atol=1e-3
    )


def test_features_of_unlike_units_follow_theirs():
    X = clusters()
    factors = np.array([1e-6, 1e-3, 1.0, 1e2, 1e4, 1e6])
    before, after = fitted(X, scaling="feature"), fitted(X * factors, scaling="feature")
    np.testing.assert_allclose(
        after.score_samples(X * factors) + np.log(factors).sum(),
        before.score_samples(X),
        rtol=1e-6,
    )
    np.testing.assert_allclose(after.means_ / factors, before.means_, rtol=1e-4, atol=1e-5)


def test_raw_units_of_any_size_train_by_default():
    """Float32 has no room for both precisions: the smaller column has a unit of its own."""
    X = clusters()
    factors = np.array([1e-12, 1, 1, 1, 1, 1e12])
    before = MFA(4, 2, scaling="feature", random_state=0).fit(X)
    after = MFA(4, 2, random_state=0).fit(X * factors)
    assert after.score(X * factors) == pytest.approx(before.score(X), abs=0.05)


@pytest.mark.parametrize("scaling", ["global", "feature", None])
def test_attributes_are_a_density_in_data_units(scaling):
    X = 100 * clusters() + 5000
    if scaling is None:
        X = clusters()
    model = fitted(X, dtype="float64", scaling=scaling)
    dense = [
        np.log(weight)
        + multivariate_normal(mean, np.linalg.inv(np.diag(E) - Gamma @ Gamma.T)).logpdf(X)
        for weight, mean, E, Gamma in zip(
            model.weights_,
            model.means_,
            model.precision_diag_,
            model.precision_factors_,
            strict=True,
        )
    ]
    np.testing.assert_allclose(
        model.score_samples(X), np.logaddexp.reduce(dense, axis=0), rtol=1e-8
    )
    mixture = model.mixture_
    assert isinstance(mixture, PrecisionMixture)
    scores = mixture.log_prob(torch.from_numpy(X)).detach().numpy()
    np.testing.assert_allclose(model.score_samples(X), scores, rtol=1e-8)
    covariance = np.linalg.inv(
        np.diag(model.precision_diag_[0])
        - model.precision_factors_[0] @ model.precision_factors_[0].T
    )
    generative = model.loadings_[0] @ model.loadings_[0].T + np.diag(model.noise_variances_[0])
    np.testing.assert_allclose(generative, covariance, rtol=1e-8, atol=1e-8 * covariance.max())


def test_no_scaling_leaves_the_data_untouched():
    """The solver sees X itself: a run by hand on the raw rows gives the same parameters."""
    X = clusters().astype(np.float32)
    units: list[Units] = []
    model = fitted(
        X,
        scaling=None,
        max_precision=20,
        max_epochs=3,
        batch_size=50,
        callbacks=[lambda progress: units.append(progress.run.units)],
    )
    assert units[-1].is_identity
    solver = ConstrainedSGD()
    plan = solver.plan(Problem(4, 6, 2, torch.tensor(20.0), seed=0, batches_per_epoch=12, epochs=3))
    state = plan.init()
    for epoch in range(3):
        for batch in as_rows(X).shuffled(50, seed=0, epoch=epoch):
            state, _ = step(plan, state, Batch(torch.from_numpy(batch.rows)))
    np.testing.assert_array_equal(model.means_, state.parameters.means.numpy())
    np.testing.assert_array_equal(model.precision_diag_, state.parameters.precision_diag.numpy())


@pytest.mark.parametrize("scaling", ["global", "feature", None])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_max_precision_is_in_data_units(scaling, scale):
    X = clusters() * scale
    bound = 0.7 / scale**2
    model = fitted(X, max_precision=bound, scaling=scaling, dtype="float64", solver=CENTROIDS)
    assert model.precision_diag_.max() == pytest.approx(bound, rel=1e-9)
    long = fitted(X, max_precision=bound, scaling=scaling, dtype="float64")
    assert (long.precision_diag_ <= bound * (1 + 1e-9)).all()
    assert (long.noise_variances_ >= (1 - 1e-9) / bound).all()


@pytest.mark.parametrize("scaling", ["global", None])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_default_bound_follows_the_scale_of_the_data(scaling, scale):
    X = clusters() * scale
    model = fitted(X, scaling=scaling, dtype="float64", solver=CENTROIDS)
    # The start of this solver stands at the bound: over the spread of each feature, which is its
    # variance for a compact one and at most a hundred times that for one with long tails.
    ratio = CENTROIDS.default_max_precision / X.var(axis=0) / model.precision_diag_.max(0)
    assert (ratio >= 1 - 1e-9).all()
    assert (ratio <= 100).all()
    other = fitted(clusters(), scaling=scaling, dtype="float64", solver=CENTROIDS)
    np.testing.assert_allclose(
        model.precision_diag_.max(0) * scale**2, other.precision_diag_.max(0), rtol=1e-9
    )


def test_constant_columns_are_no_obstacle():
    X = np.column_stack([clusters(), np.full(600, 1e5), np.zeros(600)])
    for scaling in ("global", "feature", None):
        units: list[Units] = []
        model = fitted(
            X,
            scaling=scaling,
            max_precision=None if scaling else 5.0,
            callbacks=[lambda progress, units=units: units.append(progress.run.units)],
        )
        assert np.isfinite(model.score_samples(X)).all()
        assert np.isfinite(model.means_).all()
        scale = units[-1].scale[6:]
        np.testing.assert_allclose(scale, 1 if scaling is None else [1e4, 0.1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("value", [0, 0.1, 1e4, 1e5])
def test_data_that_is_constant_has_no_scale(dtype, value):
    X = np.full((50, 3), value).astype(dtype)
    for scaling in ("global", "feature", None):
        with pytest.raises(InputError, match=r"every column of X is constant .*n_samples=50") as e:
            MFA(2, 1, scaling=scaling).fit(X)
        assert "\n" not in str(e.value)
    model = MFA(2, 1, scaling=None, max_precision=20, max_epochs=2).fit(X)
    assert np.isfinite(model.score_samples(X)).all()


def test_values_whose_variance_overflows_are_refused():
    with pytest.raises(InputError, match="so large that their variance overflows"):
        MFA(2, 1).fit(clusters() * 1e200)


def test_rounding_of_a_large_offset_is_no_spread():
    rng = np.random.default_rng(0)
    X = (1e4 + 1e-5 * rng.normal(size=(50, 3))).astype(np.float32)
    with pytest.raises(InputError, match="constant"):
        Units.estimate(Columns(Batch(X)), "global")
    assert (
        Units.estimate(
            Columns(Batch(X.astype(np.float64) * 1 + rng.normal(size=X.shape))), "global"
        ).scale[0]
        > 0.5
    )


@given(
    st.integers(2, 20),
    st.integers(1, 4),
    st.floats(-1e3, 1e3),
    st.floats(1e-3, 1e3),
    st.sampled_from(["global", "feature"]),
    st.integers(0, 2**16),
)
def test_working_units_are_centred_and_scaled(n, d, offset, scale, scaling, seed):
    x = offset + scale * np.random.default_rng(seed).normal(size=(n, d))
    units = Units.estimate(Columns(Batch(x)), scaling)
    working = units.to_working(Batch(x), CPU, torch.float64).rows
    np.testing.assert_allclose(working.mean(dim=0), 0, atol=1e-6)
    variance = working.var(dim=0, correction=0)
    np.testing.assert_allclose(variance if scaling == "feature" else variance.mean(), 1, rtol=1e-6)
    assert units.log_volume == pytest.approx(float(units.scale.log().sum()))
    np.testing.assert_allclose(working * units.scale + units.offset, x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "dtype", ["f8", ">f8", "f4", ">f4", "f2", "g", "u1", "i1", "i4", ">i4", "u2", "u8", "?"]
)
def test_every_real_type_and_layout_reaches_the_solver(dtype):
    values = np.arange(12).reshape(4, 3) % 2 if dtype == "?" else np.arange(12).reshape(4, 3)
    units = Units(torch.tensor([1.0, 2, 3]).double(), torch.tensor([2.0, 4, 8]).double())
    expected = (values - np.array([1, 2, 3])) / np.array([2, 4, 8])
    x = values.astype(dtype)
    frozen = x.copy()
    frozen.flags.writeable = False
    for variant in (x, np.asfortranarray(x), x[::-1][::-1], frozen, np.ascontiguousarray(x.T).T):
        kept = variant.copy()
        for target in (units, Units.identity(3)):
            working = target.to_working(Batch(variant), CPU, torch.float32).rows
            assert working.dtype == torch.float32
            assert working.is_contiguous()
            np.testing.assert_allclose(working, expected if target is units else values)
        np.testing.assert_array_equal(variant, kept)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64])
def test_every_tensor_reaches_the_solver(dtype):
    units = Units(torch.tensor([1.0, 2]).double(), torch.tensor([2.0, 4]).double())
    x = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    working = units.to_working(Batch(x), CPU, torch.float64).rows
    torch.testing.assert_close(working, (x.double() - units.offset) / units.scale)
    x = torch.ones(2, 2, requires_grad=True)
    assert not units.to_working(Batch(x), CPU, torch.float32).rows.requires_grad


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_scaled_rows_agree_with_the_formula(dtype):
    x = (100 * np.random.default_rng(0).random((37, 3))).astype(dtype)
    units = Units(torch.tensor([1.0, 20, 3]).double(), torch.tensor([3.0, 7, 11]).double())
    expected = ((x.astype(np.float64) - [1, 20, 3]) / [3, 7, 11]).astype(np.float32)
    working = units.to_working(Batch(x), CPU, torch.float32).rows
    np.testing.assert_array_equal(working, expected)


def test_untouched_data_is_not_copied():
    x = np.ones((3, 2), dtype=np.float32)
    working = Units.identity(2).to_working(Batch(x), CPU, torch.float32).rows
    assert working.data_ptr() == x.ctypes.data


def test_a_large_offset_costs_no_digits_in_float32():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 4))
    units = Units.estimate(Columns(Batch(x + 1e6)), "global")
    working = units.to_working(Batch(x + 1e6), CPU, torch.float32).rows
    exact = (
        Units.estimate(Columns(Batch(x)), "global").to_working(Batch(x), CPU, torch.float32).rows
    )
    torch.testing.assert_close(working, exact, rtol=1e-6, atol=1e-6)


def test_precise_dtype_knows_the_device_without_float64():
    assert precise_dtype(CPU) == torch.float64
    assert precise_dtype(torch.device("mps")) == torch.float32


def estimate_robust(X):
    return Units.estimate_robust(Batch(X), Units.estimate(Columns(Batch(X)), "feature"))


def test_robust_units_are_quantiles_that_outliers_hardly_move():
    rng = np.random.default_rng(0)
    X = rng.normal([5.0, -3.0, 7.0], [2.0, 0.1, 0.0], size=(5000, 3))
    units = estimate_robust(X)
    np.testing.assert_allclose(units.offset, [5.0, -3.0, 7.0], atol=0.1)
    np.testing.assert_allclose(units.scale[:2], [2.0, 0.1], rtol=0.05)
    assert units.scale[2] > 0
    X[:100] = 1e9
    moved = estimate_robust(X)
    np.testing.assert_allclose(moved.scale[:2], units.scale[:2], rtol=0.1)
    # Where nine tenths are equal, mean and deviation decide.
    rare = np.where(np.arange(1000) < 10, 1.0, 0.0)[:, None]
    assert estimate_robust(rare).scale[0] == pytest.approx(rare.std(), rel=0.01)
