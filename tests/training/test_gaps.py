"""Training on rows with missing entries: every solver, its beginning and its units."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from factormix import MFA, InputError
from factormix.callbacks import EarlyStopping
from factormix.core.missing import PreparedMixture, RowBlock
from factormix.core.parameters import Parameters
from factormix.data.batches import Batch, join_batches, mask_missing
from factormix.data.columns import Columns
from factormix.data.units import Units
from factormix.solvers import EM
from factormix.training.solvers import SOLVERS, Problem
from factormix.training.solvers.base import add
from factormix.training.solvers.sgd import likelihood_gradient, sum_incomplete_batch
from mixtures import name_tensors
from oracles import assert_close, random_case

RNG = np.random.default_rng(0)
CENTRES = np.array([[0, 0, 0, 0, 0], [6, 6, 0, -6, 3], [-6, 4, 8, 0, -5]], float)
SCALES = np.array([1.0, 10.0, 0.1, 1.0, 100.0])
WHICH = RNG.integers(3, size=900)
X = (CENTRES[WHICH] + RNG.normal(size=(900, 1)) * 0.8 + RNG.normal(size=(900, 5)) * 0.5) * SCALES
TRAIN, TEST = X[:600], X[600:]


def with_gaps(rows: np.ndarray, share: float = 0.3, seed: int = 1) -> np.ndarray:
    """Return a copy in which entries are missing at random."""
    gaps = np.random.default_rng(seed).random(rows.shape) < share
    return np.where(gaps, np.nan, rows)


def filled(rows: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(rows), np.nanmean(rows, axis=0), rows)


def model(**options) -> MFA:
    return MFA(3, 1, random_state=0, scaling="feature", **options)


@pytest.mark.parametrize("solver", ["natural", "em"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_mixture_is_learned_from_rows_with_gaps(solver, dtype):
    gaps = with_gaps(TRAIN)
    complete = model(solver=solver, dtype=dtype).fit(TRAIN).score(TEST)
    learned = model(solver=solver, dtype=dtype).fit(gaps)
    assert learned.score(TEST) > complete - 0.4
    assert model(solver=solver, dtype=dtype).fit(filled(gaps)).score(TEST) < complete - 2
    # The history counts the likelihood of observed entries in units of the data.
    assert learned.history_[-1]["log_likelihood"] == pytest.approx(learned.score(gaps), abs=0.3)


@pytest.mark.slow
def test_sgd_climbs_the_marginal_likelihood():
    gaps = with_gaps(TRAIN)
    options = {"solver": "sgd", "max_epochs": 60, "batch_size": 20}
    learned, misled = model(**options).fit(gaps), model(**options).fit(filled(gaps))
    assert learned.score(TEST) > misled.score(TEST) + 0.5
    first = learned.history_[0]["log_likelihood"]
    assert learned.score(gaps) > first + 1


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_the_gradient_of_sgd_is_that_of_the_marginal_likelihood(seed, smoothed):
    """Autograd through ``sum_nk R_nk log p_k(x_o)`` with the same R, as of complete rows."""
    case = random_case(4, 5, 2, seed=seed % 999, n=9)
    missing = torch.from_numpy(np.random.default_rng(seed).random(case.x.shape) < 0.4)
    weights = torch.rand(9, dtype=torch.float64)
    start = Parameters(*(t.detach() for t in case.mixture.precision_form))
    kernel = torch.softmax(torch.randn(4, 4).double(), dim=1) if smoothed else None
    batch = Batch(case.x.masked_fill(missing, 0), weights, missing)
    found = sum_incomplete_batch(start, batch, kernel, moving=True)
    leaves = [t.clone().requires_grad_() for t in start[1:4]]
    joint = RowBlock(PreparedMixture(start, centre=False), case.x, missing).joint()
    smooth = torch.eye(4).double() if kernel is None else kernel
    R = smooth[(joint @ smooth.mT).argmax(dim=1)] * weights.unsqueeze(1)
    moved = Parameters(start.logits, *leaves, start.latent_variances)
    log_p = RowBlock(PreparedMixture(moved, centre=False), case.x, missing).joint()
    expected = torch.autograd.grad((R * log_p).sum(), leaves)
    for one, other in zip(likelihood_gradient(start, found), expected, strict=True):
        assert_close(one, other, 1e-7)
    assert float(found.objective) == pytest.approx(float(weights @ (joint @ smooth.mT).amax(dim=1)))


@pytest.mark.parametrize("name", list(SOLVERS))
def test_contributions_of_parts_add_up(name):
    """The contribution of a batch with gaps is the sum over its parts, before and after seeding."""
    options = {"kmeans_passes": 1} if name == "em" else {}
    problem = Problem(3, 5, 1, batches_per_epoch=2, epochs=5, batch_size=300, dtype=torch.float64)
    plan = SOLVERS[name](**options).plan(problem)
    gaps = with_gaps(TRAIN)
    rows = Units.estimate(Columns(Batch(gaps)), "feature").to_working(
        Batch(gaps), torch.device("cpu"), torch.float64
    )
    assert rows.missing is not None
    state = plan.init()
    for i in range(7):
        batch = rows.take(slice(300 * (i % 2), 300 * (i % 2) + 300))
        whole = plan.contribution(state, batch)
        parts = [plan.contribution(state, batch.take(p)) for p in (slice(0, 90), slice(90, 300))]
        found, expected = name_tensors(add(*parts)), name_tensors(whole)
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, expected[key], equal_nan=True)
        state, info = plan.update(state, whole)
        assert torch.isfinite(info.log_likelihood)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_em_never_lowers_the_likelihood_of_what_is_observed(share):
    gaps = with_gaps(TRAIN, share)
    solver = EM(kmeans_passes=3, tol=0)
    fitted = model(solver=solver, dtype="float64", max_epochs=40, batch_size=200).fit(gaps)
    passes = {}
    for record in fitted.history_:
        passes.setdefault(int(np.ceil(record["epoch"])), []).append(record["log_likelihood"])
    means = [np.mean(values) for epoch, values in sorted(passes.items()) if epoch > 4]
    assert len(means) > 30
    assert np.diff(means).min() > -1e-9


def test_a_run_stops_and_goes_on_with_gaps(tmp_path):
    """Rows kept for seeding are saved with their gaps, and a resumed run is the same."""
    gaps = with_gaps(TRAIN)

    class Stop:
        def __init__(self, step):
            self.step = step

        def __call__(self, progress):
            return progress.record["step"] >= self.step

    for solver in ("natural", "em", "sgd"):
        options = {"solver": solver, "max_epochs": 12, "batch_size": 60}
        whole = model(**options).fit(gaps)
        for step in (3, 40):
            stopped = model(**options, callbacks=[Stop(step)]).fit(gaps)
            stopped.save(tmp_path / "m.safetensors")
            from factormix import load

            resumed = load(tmp_path / "m.safetensors").resume(gaps)
            np.testing.assert_array_equal(resumed.means_, whole.means_)
    with pytest.raises(InputError, match="not trained by fit on these"):
        resumed.resume(TRAIN)


def test_a_stream_may_lack_a_column_for_a_while():
    first, second = with_gaps(TRAIN), with_gaps(X)
    second[:, 2] = np.nan
    fitted = model(batch_size=50).partial_fit(first)
    for _ in range(4):
        fitted.partial_fit(second)
    assert np.isfinite(fitted.score(TEST))
    assert fitted.score(TEST) > model().fit(filled(first)).score(TEST)


def test_held_out_rows_may_have_gaps():
    watch = EarlyStopping(with_gaps(TEST))
    fitted = model(callbacks=[watch], max_epochs=200).fit(with_gaps(TRAIN))
    assert watch.best_score_ == pytest.approx(fitted.score(with_gaps(TEST)), abs=1e-4)


def test_columns_are_described_by_the_values_they_have():
    gaps = with_gaps(X, 0.5)
    found, whole = Columns(Batch(gaps)), Columns(Batch(X))
    np.testing.assert_allclose(found.mean, np.nanmean(gaps, axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.variance, np.nanvar(gaps, axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.spread, whole.spread, rtol=0.2)
    weights = np.random.default_rng(0).random(900) + 0.1
    weighted = Columns(Batch(gaps, weights))
    seen = ~np.isnan(gaps)
    mean = np.nansum(gaps * weights[:, None], axis=0) / (seen * weights[:, None]).sum(axis=0)
    np.testing.assert_allclose(weighted.mean, mean, rtol=1e-12)
    # A column of few values in many rows is discrete whether or not values are missing.
    discrete = np.random.default_rng(0).integers(0, 3, size=(900, 1)) * 7.0
    rows = np.hstack([X, discrete])
    np.testing.assert_allclose(
        Columns(Batch(with_gaps(rows))).noise_floor, Columns(Batch(rows)).noise_floor, rtol=0.7
    )
    lacking = Columns(Batch(np.where(np.arange(5) == 3, np.nan, X)))
    assert lacking.observed.tolist() == [True, True, True, False, True]
    assert torch.isfinite(lacking.noise_floor).all()


def test_a_rare_column_is_looked_for_in_all_rows():
    rows = np.vstack([TRAIN] * 10)
    rows[:, 3] = np.nan
    rows[4321, 3], rows[17, 3] = 1e6, 1e6 + 1
    fitted = model(max_epochs=1).fit(rows)
    assert np.allclose(fitted.means_[:, 3], 1e6, rtol=1e-3)
    rows[:, 3] = np.nan
    with pytest.raises(InputError, match=r"no value in column 3 \(counting from 0\), only missing"):
        model().fit(rows)
    weights = np.ones(len(rows))
    rows[17, 3], weights[17] = 1.0, 0.0
    with pytest.raises(InputError, match="no value in column 3"):
        model().fit(rows, sample_weight=weights)


def test_gaps_travel_with_their_rows():
    rows = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
    batch = mask_missing(rows, torch.ones(2))
    assert batch.missing.tolist() == [[False, True], [False, False]]
    torch.testing.assert_close(batch.rows_with_nan(), rows, equal_nan=True)
    twice = join_batches([batch, batch]).take(slice(1, 3))
    assert twice.missing.tolist() == [[False, False], [False, True]]
    assert mask_missing(rows[1:]).missing is None


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_few_rows_with_gaps_are_learned_as_well_as_by_em(share):
    """Noise predicts new rows, although the model fills gaps in; EM stops before it overfits."""
    found = {"natural": 0.0, "em": 0.0}
    for seed in range(4):
        rng = np.random.default_rng(seed)
        directions, centres = rng.normal(size=(3, 6, 2)), 3 * rng.normal(size=(3, 6))
        kind = rng.integers(3, size=2200)
        latent = np.einsum("nl,ndl->nd", rng.normal(size=(2200, 2)), directions[kind])
        rows = centres[kind] + latent + 0.5 * rng.normal(size=(2200, 6))
        gaps = with_gaps(rows[:200], share, seed)
        for solver in found:
            found[solver] += MFA(4, 2, solver=solver, random_state=seed).fit(gaps).score(rows[200:])
    assert found["natural"] > found["em"]
