"""Sample weights: a row of weight two counts as two rows and one of weight zero as none, in every
container and for every solver.
"""

from __future__ import annotations

import copy
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from factormix import MFA, InputError, load
from factormix.data.batches import Batch, drop_zero_weights, rebatch
from factormix.data.checks import normalize_weights
from factormix.data.columns import Columns
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.convert import as_rows
from factormix.data.sources.files import FileRows
from factormix.data.units import Units
from factormix.solvers import EM, SOLVERS, NaturalGradient, Problem, resolve
from factormix.training.loop import train_on_stream
from factormix.training.run import Run
from factormix.training.solvers import step

rng = np.random.default_rng(0)
CENTRES = np.array([-4.0, 0.0, 5.0])
LABELS = np.arange(240) % 3
X = CENTRES[LABELS, None] + rng.normal(size=(240, 2)) @ rng.normal(size=(2, 4))
X += 0.5 * rng.normal(size=X.shape)
COUNTS = rng.integers(0, 4, size=len(X))
REPEATED = X.repeat(COUNTS, axis=0)
WEIGHTS = COUNTS * rng.choice([0.3, 1.0, 2.5], size=len(X))
"""Unlike, and a quarter of them zero."""

ENDLESS: dict[str, Any] = {"natural": NaturalGradient(tol=0), "em": EM(tol=0)}
"""Solvers without their own criterion, so that every run is as long as planned."""


def model(**options: Any) -> MFA:
    defaults = {"n_components": 3, "n_factors": 1, "max_epochs": 12, "random_state": 0}
    return MFA(**{**defaults, "dtype": "float64", **options})


def gaussian(**options: Any) -> MFA:
    """A single diagonal Gaussian, whose fit is known in closed form."""
    return model(n_components=1, n_factors=0, **options)


def same(a: MFA, b: MFA) -> None:
    for name in ("weights_", "means_", "precision_diag_", "precision_factors_"):
        np.testing.assert_array_equal(np.asarray(getattr(a, name)), np.asarray(getattr(b, name)))
    assert (a.n_steps_, a.n_iter_, a.n_samples_seen_) == (b.n_steps_, b.n_iter_, b.n_samples_seen_)
    records = [[{**r, "seconds": 0} for r in m.history_] for m in (a, b)]
    assert records[0] == records[1]


def close(a: MFA, b: MFA, tolerance: float) -> None:
    for name in ("weights_", "means_", "precision_diag_", "noise_variances_"):
        one, other = getattr(a, name), getattr(b, name)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=name)
    np.testing.assert_allclose(
        a.score_samples(X), b.score_samples(X), rtol=tolerance, atol=tolerance
    )


def moments(weights: np.ndarray = WEIGHTS) -> tuple[np.ndarray, np.ndarray]:
    mean = np.average(X, axis=0, weights=weights)
    return mean, np.average((X - mean) ** 2, axis=0, weights=weights)


def saved(folder: Path, array: np.ndarray) -> Path:
    np.save(folder / "rows.npy", array)
    return folder / "rows.npy"


SOURCES: dict[str, Callable[[np.ndarray, Path], Any]] = {
    "array": lambda X, folder: X,
    "fortran array": lambda X, folder: np.asfortranarray(X),
    "frame": lambda X, folder: pd.DataFrame(X),
    "tensor": lambda X, folder: torch.from_numpy(X),
    "map": lambda X, folder: np.load(saved(folder, X), mmap_mode="r"),
    "file": lambda X, folder: FileRows(saved(folder, X)),
    # Buffers of 64 rows in blocks of one: the order is another one for every part of the file.
    "file of many buffers": lambda X, folder: FileRows(saved(folder, X), buffer_bytes=64),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("batch_size", [32, 240])
def test_weights_follow_their_rows_in_every_container(source, batch_size, tmp_path):
    """If weights came to other rows, these moments would differ."""
    data = SOURCES[source](X, tmp_path)
    fitted = gaussian(solver="em", batch_size=batch_size).fit(data, sample_weight=WEIGHTS)
    mean, variance = moments()
    assert np.abs(mean - X.mean(axis=0)).min() > 0.04
    np.testing.assert_allclose(np.asarray(fitted.means_)[0], mean, rtol=1e-10)
    np.testing.assert_allclose(np.asarray(fitted.noise_variances_)[0], variance, rtol=1e-10)
    assert fitted.n_samples_seen_ == fitted.n_iter_ * np.count_nonzero(WEIGHTS)
    assert fitted.score(data, sample_weight=WEIGHTS) == pytest.approx(
        np.average(fitted.score_samples(X), weights=WEIGHTS)
    )


@pytest.mark.parametrize(
    "kind",
    [list, pd.Series, np.float32, torch.as_tensor, lambda w: torch.as_tensor(w).bfloat16()],
    ids=["list", "series", "float32", "tensor", "bfloat16"],
)
def test_weights_come_in_any_container(kind):
    same(gaussian().fit(X, sample_weight=kind(COUNTS)), gaussian().fit(X, sample_weight=COUNTS))


@pytest.mark.parametrize("n_factors", [0, 2])
def test_em_treats_integer_weights_as_repeated_rows(n_factors):
    options = {"n_components": 1, "n_factors": n_factors, "solver": EM(tol=0), "batch_size": 50}
    weighted = model(**options).fit(X, sample_weight=COUNTS)
    close(weighted, model(**options).fit(REPEATED), 1e-9)


def test_gradients_of_one_batch_treat_integer_weights_as_repeated_rows():
    options = {"solver": "sgd", "batch_size": 1000, "max_epochs": 100}
    weighted = model(**options).fit(X, sample_weight=COUNTS)
    close(weighted, model(**options).fit(REPEATED), 1e-9)


@pytest.mark.parametrize("solver", ["natural", "em"])
def test_a_mixture_fitted_with_integer_weights_is_close_to_repeated_rows(solver):
    """Only nearly: the start is random, and a fixed number of rows weighs less among more rows."""
    counts = np.where(LABELS == 0, 6, COUNTS)
    repeated_rows = X.repeat(counts, axis=0)
    options = {"solver": ENDLESS[solver], "max_epochs": 120}
    weighted = model(**options).fit(X, sample_weight=counts)
    repeated = model(**options).fit(repeated_rows)
    plain = model(**options).fit(X)
    level = repeated.score(repeated_rows)
    assert weighted.score(repeated_rows) == pytest.approx(level, abs=0.1)
    assert weighted.score(X, sample_weight=counts) == pytest.approx(level, abs=0.1)
    assert plain.score(repeated_rows) < level - 0.15
    order = [np.argsort(m.means_[:, 0]) for m in (weighted, repeated)]
    np.testing.assert_allclose(weighted.weights_[order[0]], repeated.weights_[order[1]], rtol=0.03)
    np.testing.assert_allclose(weighted.means_[order[0]], repeated.means_[order[1]], atol=0.3)


@pytest.mark.parametrize("solver", ["natural", "em"])
def test_equal_rows_may_share_their_weight_in_any_way(solver):
    """With one component all starts end in the same place."""
    twice, share = np.concatenate([X, X]), np.random.default_rng(1).uniform(0, 2, size=240)
    options = {"n_components": 1, "n_factors": 2, "solver": ENDLESS[solver], "max_epochs": 100}
    heavy = np.where(LABELS == 0, 6.0, 1.0)
    evenly = model(**options).fit(twice, sample_weight=np.tile(heavy, 2))
    unevenly = model(**options).fit(
        twice, sample_weight=np.concatenate([share * heavy, (2 - share) * heavy])
    )
    close(unevenly, evenly, 0.02)
    plain = model(**options).fit(twice)
    level = evenly.score(X, sample_weight=heavy)
    assert plain.score(X, sample_weight=heavy) < level - 0.15


@pytest.mark.parametrize("solver", ["natural", "sgd"])
def test_weights_in_many_batches_have_their_effect(solver):
    """Heavy rows of the first cluster are learned as the larger part of the data."""
    weights = np.where(LABELS == 0, 8.0, 1.0)
    options = {"batch_size": 40, "max_epochs": 80 if solver == "natural" else 200}
    fitted = model(solver=solver, **options).fit(X, sample_weight=weights)
    plain = model(solver=solver, **options).fit(X)
    heavy = fitted.weights_[np.unique(fitted.predict(X[LABELS == 0]))].sum()
    assert heavy == pytest.approx(0.8, abs=0.1)
    assert fitted.score(X, sample_weight=weights) > plain.score(X, sample_weight=weights) + 0.1


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("source", ["array", "tensor", "file"])
@pytest.mark.parametrize("batch_size", [None, 32])
def test_rows_of_weight_zero_change_nothing(solver, source, batch_size, tmp_path):
    wild = np.where(COUNTS[:, None] > 0, X, 1e6 * X)
    options = {"solver": solver, "batch_size": batch_size}
    (tmp_path / "kept").mkdir()
    kept = SOURCES[source](X[COUNTS > 0], tmp_path / "kept")
    dropped = model(**options).fit(kept, sample_weight=WEIGHTS[COUNTS > 0])
    same(model(**options).fit(SOURCES[source](wild, tmp_path), sample_weight=WEIGHTS), dropped)
    masked = model(**options).fit(wild, sample_weight=COUNTS > 0)
    close(masked, model(**options).fit(X[COUNTS > 0]), 1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_only_the_proportions_of_weights_matter_to_fit(solver):
    fitted = model(solver=solver, batch_size=50).fit(X, sample_weight=WEIGHTS)
    same(model(solver=solver, batch_size=50).fit(X, sample_weight=64 * WEIGHTS), fitted)
    for scale in (1e-300, 1 / 3, 1e300):
        scaled = model(solver=solver, batch_size=50).fit(X, sample_weight=scale * WEIGHTS)
        close(scaled, fitted, 1e-6)


@pytest.mark.parametrize("equal", [1, 0.1, np.full(240, 7.0), torch.tensor(2.0), np.ones(240)])
def test_equal_weights_are_no_weights(equal):
    fitted = model(batch_size=50).fit(X)
    same(model(batch_size=50).fit(X, sample_weight=equal), fitted)
    assert fitted.score(X, sample_weight=equal) == fitted.score(X)


@pytest.mark.parametrize("solver", SOLVERS)
def test_weights_of_any_size_are_learned_from(solver):
    """In single precision too: weights that are too small count as zero."""
    weights = 10.0 ** np.linspace(-320, 300, 240)
    fitted = model(solver=solver, dtype="float32", n_components=2, batch_size=4, max_epochs=3)
    fitted.fit(X, sample_weight=weights[rng.permutation(240)])
    assert np.isfinite(fitted.score_samples(X)).all()
    assert np.isfinite([r["log_likelihood"] for r in fitted.history_]).all()


def test_fit_leaves_the_weights_as_they_were():
    weights = WEIGHTS.copy()
    weights.flags.writeable = False
    model().fit(X, sample_weight=weights).partial_fit(X, sample_weight=weights)
    np.testing.assert_array_equal(weights, WEIGHTS)


def test_working_units_follow_the_weights():
    counts = COUNTS[COUNTS > 0]
    sample = X[COUNTS > 0] * [1, 10, 0.1, 1]
    repeated = sample.repeat(counts, axis=0)
    for scaling in ("global", "feature"):
        weighted = Units.estimate(Columns(Batch(sample, counts.astype(float))), scaling)
        expected = Units.estimate(Columns(Batch(repeated)), scaling)
        np.testing.assert_allclose(weighted.offset, expected.offset, rtol=1e-12)
        np.testing.assert_allclose(weighted.scale, expected.scale, rtol=1e-12)
        np.testing.assert_allclose(
            weighted.bound(None, 100.0, Columns(Batch(sample, counts.astype(float)))),
            expected.bound(None, 100.0, Columns(Batch(repeated))),
            rtol=1e-12,
        )


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 60))
def test_the_bound_on_wild_columns_follows_the_weights(seed, n):
    """Columns whose middle half sets the bound; the order of the repeated rows does not matter."""
    draw = np.random.default_rng(seed)
    sample = draw.standard_cauchy(size=(n, 3)) ** 3
    counts = draw.integers(1, 5, size=n)
    repeated = draw.permutation(sample.repeat(counts, axis=0))
    units = Units.identity(3)
    if n > 1:
        np.testing.assert_allclose(
            units.bound(None, 100.0, Columns(Batch(sample, counts.astype(float)))),
            units.bound(None, 100.0, Columns(Batch(repeated))),
            rtol=1e-9,
        )


def test_score_is_the_weighted_mean():
    fitted = model(dtype="float32").fit(X)
    scores = fitted.score_samples(X)
    assert fitted.score(X, sample_weight=WEIGHTS) == pytest.approx(
        np.average(scores, weights=WEIGHTS)
    )
    assert fitted.score(X, None, 1e300 * WEIGHTS) == pytest.approx(
        np.average(scores, weights=WEIGHTS)
    )
    alone = np.zeros(240)
    alone[7] = 3
    assert fitted.score(ArrayRows(X), sample_weight=alone) == pytest.approx(scores[7])


def test_history_is_the_weighted_mean_over_the_steps_of_a_record():
    def run() -> Run:
        solver = resolve("sgd")
        units = Units.estimate(Columns(Batch(X)), "global")
        plan = solver.plan(
            Problem(3, 4, 1, units.bound(None, 100.0, Columns(Batch(X))), batch_size=48)
        )
        return Run(plan, plan.init(), units)

    one, levels, weights = run(), [], np.linspace(0.1, 9, 240)
    for batch in as_rows(X, weights).blocks(48):
        working = one.units.to_working(batch, torch.device("cpu"), torch.float32)
        one.state, info = step(one.plan, one.state, working)
        levels.append(float(info.log_likelihood))
    two = run()
    two.record_every = 5
    train_on_stream(two, as_rows(X, weights))
    (entry,) = two.history
    expected = np.average(levels, weights=weights.reshape(5, 48).sum(axis=1))
    assert abs(expected - np.mean(levels)) > 1e-3
    assert entry["log_likelihood"] == pytest.approx(expected - two.units.log_volume, rel=1e-5)
    settled = gaussian(solver=EM(tol=0)).fit(X, sample_weight=WEIGHTS)
    assert settled.history_[-1]["log_likelihood"] == pytest.approx(settled.score(X, None, WEIGHTS))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_blocks_with_weights_have_the_rows_that_count(source, size, tmp_path):
    data = SOURCES[source](X, tmp_path)
    blocks = list(rebatch(drop_zero_weights(as_rows(data, WEIGHTS).blocks(size)), size))
    kept = WEIGHTS > 0
    assert {len(batch) for batch in blocks[:-1]} <= {size}
    np.testing.assert_array_equal(np.concatenate([np.asarray(b.rows) for b in blocks]), X[kept])
    np.testing.assert_array_equal(np.concatenate([b.weights for b in blocks]), WEIGHTS[kept])


@pytest.mark.parametrize("solver", ["natural", "sgd"])
def test_a_stream_leaves_out_rows_of_weight_zero(solver):
    wild = np.where(COUNTS[:, None] > 0, X, 1e6 * X)
    streamed = model(solver=solver, batch_size=32)
    dropped = model(solver=solver, batch_size=32)
    for _ in range(5):
        streamed.partial_fit(wild, sample_weight=WEIGHTS)
        dropped.partial_fit(X[COUNTS > 0], sample_weight=WEIGHTS[COUNTS > 0])
    same(streamed, dropped)


def test_a_stream_takes_weights_as_they_are():
    """A batch of weight two moves the model as far as two equal batches of weight one."""
    first = gaussian(batch_size=60).partial_fit(X)
    for _ in range(20):
        first.partial_fit(X)
    step = [copy.deepcopy(first) for _ in range(3)]
    step[0].partial_fit(X[:60] + 3)
    step[1].partial_fit(X[:60] + 3, sample_weight=2)
    step[2].partial_fit(X[:60] + 3, sample_weight=np.full(60, 0.5))
    moved = [np.abs(s.means_ - first.means_).mean() for s in step]
    assert moved[1] == pytest.approx(2 * moved[0], rel=0.05)
    assert moved[2] == pytest.approx(moved[0] / 2, rel=0.05)


def test_a_weighted_stream_learns_the_weighted_data():
    streamed = gaussian(batch_size=60, dtype="float32")
    draw = np.random.default_rng(1)
    for _ in range(150):
        chosen = draw.integers(0, len(X), size=60)
        streamed.partial_fit(X[chosen], sample_weight=WEIGHTS[chosen])
    mean, variance = moments()
    np.testing.assert_allclose(streamed.means_[0], mean, atol=0.2)
    np.testing.assert_allclose(streamed.noise_variances_[0], variance, rtol=0.1)


def interrupting(at: int) -> Callable[[Any], None]:
    """Send Ctrl-C at the record of a step; training ends after the step that follows."""

    def watch(progress: Any) -> None:
        if progress.record["step"] == at and not progress.last:
            os.kill(os.getpid(), signal.SIGINT)

    return watch


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("source", ["array", "tensor", "file", "file of many buffers"])
def test_an_interrupted_fit_resumes_with_the_same_weights_only(solver, source, tmp_path):
    options = {"solver": ENDLESS.get(solver, solver), "batch_size": 32, "dtype": "float32"}
    data = SOURCES[source](X, tmp_path)
    whole = model(**options).fit(data, sample_weight=WEIGHTS)
    cut = model(**options, callbacks=[interrupting(43)])
    with pytest.raises(KeyboardInterrupt):
        cut.fit(data, sample_weight=WEIGHTS)
    assert 43 <= cut.n_steps_ < whole.n_steps_
    cut.set_params(callbacks=()).save(tmp_path / "cut.safetensors")
    other = WEIGHTS.copy()
    other[np.flatnonzero(other)[5]] *= 1.001
    for wrong in (None, other, WEIGHTS[::-1], COUNTS, 1.0):
        with pytest.raises(InputError, match="sample_weight differs from the weights of that fit"):
            cut.resume(data, sample_weight=wrong)
    with pytest.raises(InputError, match="not trained by fit on these 240 rows"):
        cut.resume(X + 1, sample_weight=WEIGHTS)
    same(load(tmp_path / "cut.safetensors").resume(data, sample_weight=WEIGHTS), whole)
    same(cut.resume(data, WEIGHTS), whole)


def test_a_fit_without_weights_resumes_without():
    fitted = model(max_epochs=3).fit(X)
    with pytest.raises(InputError, match=r"give the same weights, or none if there were none\.$"):
        fitted.resume(X, sample_weight=WEIGHTS)
    fitted.resume(X, sample_weight=5.0)
    streamed = model().partial_fit(X, sample_weight=WEIGHTS)
    with pytest.raises(InputError, match="use fit or partial_fit"):
        streamed.resume(X, sample_weight=WEIGHTS)


def with_value(value: float) -> np.ndarray:
    weights = np.ones(240)
    weights[17] = value
    return weights


BAD = [
    (np.ones(239), "sample_weight must be one number or have the shape (240,), a weight for each"),
    (np.ones((240, 1)), "row of X, not (240, 1)."),
    (torch.ones(240, 2), "not (240, 2)."),
    ([], "not (0,)."),
    (with_value(-0.5), "sample_weight has -0.5 in row 17 (counting from 0): give finite weights"),
    (with_value(np.nan), "sample_weight has nan in row 17"),
    (torch.from_numpy(with_value(np.inf)), "sample_weight has inf in row 17"),
    (np.nan, "sample_weight has nan in row 0"),
    (-1, "sample_weight has -1.0 in row 0"),
    (np.zeros(240), "every sample_weight is zero: give at least one row a positive weight."),
    (0, "every sample_weight is zero"),
    (["heavy"] * 240, "sample_weight must hold numbers only, not strings"),
    (np.ones(240, dtype=complex), "Complex data not supported"),
    (torch.ones(240).to_sparse(), "sample_weight is sparse"),
]


@pytest.mark.parametrize(("weights", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_bad_weights_raise_one_sentence_and_change_nothing(weights, sentence):
    fitted = model(max_epochs=2).fit(X)
    before = fitted.means_.copy()
    for method in (fitted.fit, fitted.resume, fitted.partial_fit, fitted.score, model().fit):
        with pytest.raises(InputError, match=re.escape(sentence)) as caught:
            method(X, sample_weight=weights)
        assert str(caught.value).endswith(".")
        assert "\n" not in str(caught.value)
    np.testing.assert_array_equal(fitted.means_, before)
    assert not hasattr(model(), "means_")


def test_weights_are_checked_before_the_rows():
    class Unread:
        n_rows, n_features, dtype = 240, 4, np.dtype(np.float64)

        def blocks(self, size: int) -> Iterator[np.ndarray]:
            raise AssertionError("the rows were read")

        shuffled = blocks

    for method in (model().fit, model().partial_fit):
        with pytest.raises(InputError, match="have the shape"):
            method(Unread(), sample_weight=np.ones(3))


@pytest.mark.parametrize("scale", [1e-40, 1e40])
def test_a_stream_refuses_weights_beyond_its_range(scale):
    with pytest.raises(InputError, match="multiply all of them by a constant"):
        model().partial_fit(X, sample_weight=scale * WEIGHTS)


def test_rows_that_count_must_be_enough():
    few = np.zeros(240)
    few[:2] = 1
    with pytest.raises(InputError, match="n_samples=2 of positive weight, fewer than the 3 rows"):
        model().fit(X, sample_weight=few)
    with pytest.raises(InputError, match="n_samples=2 of positive weight, too few for the first"):
        model().partial_fit(X, sample_weight=few)


class Foreign:
    """Rows of another class, without a method for weights."""

    n_rows, n_features, dtype = len(X), X.shape[1], X.dtype

    def blocks(self, size: int) -> Iterator[Any]:
        return ArrayRows(X).blocks(size)

    def shuffled(self, batch_size: int, *, seed: int, epoch: int, start: int = 0) -> Iterator[Any]:
        return ArrayRows(X).shuffled(batch_size, seed=seed, epoch=epoch, start=start)


def test_rows_of_unknown_order_are_weighted_in_order_only():
    fitted = model().fit(Foreign(), sample_weight=3)
    for method in (fitted.fit, fitted.resume):
        with pytest.raises(InputError, match="X is a Foreign without the method with_weights"):
            method(Foreign(), sample_weight=WEIGHTS)
    assert fitted.score(Foreign(), sample_weight=WEIGHTS) == fitted.score(X, None, WEIGHTS)
    same(
        model().partial_fit(Foreign(), sample_weight=WEIGHTS),
        model().partial_fit(X, sample_weight=WEIGHTS),
    )


def test_score_with_weights_needs_a_model():
    with pytest.raises(NotFittedError):
        MFA().score(X, sample_weight=WEIGHTS)


def test_weights_reach_the_model_through_scikit_learn():
    pipeline = make_pipeline(StandardScaler(), gaussian(solver="em"))
    pipeline.fit(X, mfa__sample_weight=WEIGHTS)
    expected = (moments()[0] - X.mean(axis=0)) / X.std(axis=0)
    np.testing.assert_allclose(pipeline[-1].means_[0], expected, rtol=1e-9)
    codes = model().fit_transform(X, sample_weight=WEIGHTS)
    np.testing.assert_array_equal(codes, model().fit(X, sample_weight=WEIGHTS).transform(X))


@pytest.mark.parametrize("solver", ["natural", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_without_weight_leaves_a_solver_where_it_is(solver, dtype):
    made = resolve(solver)
    x = torch.from_numpy(X).to(dtype) / 4
    plan = made.plan(Problem(3, 4, 1, dtype=dtype, batches_per_epoch=1, epochs=200))
    state = plan.init()
    for _ in range(100):
        state, _ = step(plan, state, Batch(x))
    before = [t.clone() for t in state.parameters]
    state, _ = step(plan, state, Batch(x[:40], torch.zeros(40, dtype=dtype)))
    for now, then in zip(state.parameters, before, strict=True):
        torch.testing.assert_close(now.abs(), then.abs(), rtol=1e-4, atol=1e-5)


def test_relative_weights_have_the_mean_one_where_they_are_not_zero():
    relative = normalize_weights(WEIGHTS)
    assert relative is not None
    assert relative[relative > 0].mean() == pytest.approx(1)
    np.testing.assert_array_equal(relative == 0, WEIGHTS == 0)
    np.testing.assert_allclose(relative * WEIGHTS.sum(), WEIGHTS * relative.sum())
