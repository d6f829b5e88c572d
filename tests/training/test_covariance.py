"""Training of components in several scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import factormix
from densities import assert_honest
from factormix import MFA, InputError
from factormix.solvers import CovarianceGradient

S = 6


def kinds(n: int, seed: int = 0) -> np.ndarray:
    """Draw rows of three kinds of components, each a Student's t of 4 degrees of freedom."""
    random = np.random.default_rng(7)
    centres, shapes = 12 * random.normal(size=(3, 8)), random.normal(size=(3, 8, 8))
    random = np.random.default_rng(seed)
    which, tails = random.integers(3, size=n), np.sqrt(4 / random.chisquare(4, size=n))
    spread = np.einsum("ni,nij->nj", random.normal(size=(n, 8)), shapes[which])
    return centres[which] + tails[:, None] * spread


def model(n_kinds: int = 3, n_scales: int = S, **options: Any) -> MFA:
    options = {"max_epochs": 15, "random_state": 0} | options
    return MFA(n_kinds * n_scales, 6, solver=CovarianceGradient(scales=n_scales), **options)


@pytest.fixture(scope="module")
def fitted() -> MFA:
    return model().fit(kinds(6000))


@pytest.fixture(scope="module")
def plain() -> MFA:
    return model(n_scales=1).fit(kinds(6000))


def test_scales_fit_heavy_tails_better(fitted: MFA, plain: MFA):
    new = kinds(4000, seed=1)
    assert fitted.score(new) > plain.score(new) + 0.3
    # Better, too, than the same number of components without common scales.
    free = model(n_kinds=3 * S, n_scales=1).fit(kinds(6000))
    assert fitted.score(new) > free.score(new)


def test_the_result_is_an_ordinary_mixture(fitted: MFA):
    assert fitted.means_.shape == (3 * S, 8)
    assert fitted.weights_.sum() == pytest.approx(1)
    # Components of a kind have one centre, and variances that rise evenly.
    np.testing.assert_allclose(fitted.means_[:S], np.tile(fitted.means_[0], (S, 1)), rtol=1e-5)
    ratios = fitted.noise_variances_[1:S] / fitted.noise_variances_[: S - 1]
    np.testing.assert_allclose(ratios, 1.7, rtol=1e-4)
    assert fitted.history_[-1]["components"] == 3 * S
    assert_honest(fitted, kinds(500, seed=2))
    assert len(np.unique(fitted.predict(kinds(500, seed=2)) // S)) == 3


@pytest.mark.parametrize("steps", [30, 60, 100])
def test_the_narrowest_scale_obeys_the_bound(steps: int):
    """At the end of a run, and wherever it is stopped."""
    stopped = model(
        max_precision=2.0,
        batch_size=200,
        callbacks=[lambda progress: progress.record["step"] >= steps],
    ).fit(kinds(3000))
    assert (stopped.noise_variances_ >= 0.5 * (1 - 1e-5)).all()
    if steps > 30:  # before that the bound is still falling
        assert stopped.noise_variances_.min() < 0.51


@pytest.mark.parametrize("training_state", [True, False])
def test_it_is_saved_and_loaded(fitted: MFA, tmp_path: Path, training_state: bool):
    path = fitted.save(tmp_path / "model.safetensors", training_state=training_state)
    again, new = factormix.load(tmp_path / "model.safetensors"), kinds(100, seed=1)
    np.testing.assert_array_equal(again.score_samples(new), fitted.score_samples(new))
    assert path is None or Path(path).exists()


@pytest.mark.parametrize("steps", [30, 90])
def test_a_run_continues_from_a_file(tmp_path: Path, steps: int):
    rows = kinds(3000)
    stopped = model(callbacks=[lambda progress: progress.record["step"] >= steps], batch_size=300)
    stopped.fit(rows).save(tmp_path / "model.safetensors", training_state=True)
    resumed = factormix.load(tmp_path / "model.safetensors").resume(rows)
    whole = model(batch_size=300).fit(rows)
    np.testing.assert_array_equal(resumed.means_, whole.means_)
    np.testing.assert_array_equal(resumed.weights_, whole.weights_)


def test_a_stream_is_learned(plain: MFA):
    learned = MFA(3 * S, 6, solver=CovarianceGradient(scales=S), batch_size=500, random_state=0)
    for i in range(80):
        learned.partial_fit(kinds(500, seed=10 + i))
    new = kinds(2000, seed=1)
    assert len(learned.weights_) == 3 * S
    assert learned.score(new) > plain.score(new) + 0.3


def test_row_weights_count(fitted: MFA):
    rows = kinds(6000)
    weights = np.where(rows[:, 0] > np.median(rows[:, 0]), 3.0, 1.0)
    weighted = model().fit(rows, sample_weight=weights)
    heavy = rows[weights == 3]
    assert weighted.score(heavy) > fitted.score(heavy)


def test_wrong_input_is_refused():
    with pytest.raises(InputError, match=r"n_components=20 is not a multiple of scales=6.*18"):
        MFA(20, 2, solver=CovarianceGradient(scales=6)).fit(kinds(300))
    with pytest.raises(InputError, match="scales must be a whole number of 1 or more"):
        CovarianceGradient(scales=0)
    gaps = kinds(2000)
    gaps[::5, 0] = np.nan
    with pytest.raises(InputError, match=r"missing values .* several scales"):
        model().fit(gaps)


def test_halves_obey_the_bound_in_all_scales():
    solver = CovarianceGradient(scales=3, first_components=10, widening=1.5, tol=0)
    worst = []

    def watch(progress: Any) -> None:
        worst.append(1 / progress.model.noise_variances_.min())

    model = MFA(80 * 3, 6, solver=solver, batch_size=100, max_epochs=2, max_precision=100.0,
                random_state=0, callbacks=[watch])  # fmt: skip
    model.fit(kinds(6000) / 50)
    assert len(worst) > 10
    assert max(worst) <= 100 * (1 + 1e-4)


def test_scales_begin_before_a_run_has_grown(plain: MFA):
    """New kinds are halves of kinds that have scales already."""
    solver = CovarianceGradient(scales=3, first_components=10, tol=0)
    sizes = []

    def watch(progress: Any) -> None:
        sizes.append(progress.record["components"])

    learned = MFA(40 * 3, 6, solver=solver, batch_size=100, max_epochs=3, random_state=0,
                  callbacks=[watch]).fit(kinds(6000))  # fmt: skip
    assert sizes[-1] == 120
    # In scales, before all are there.
    assert any(size % 3 == 0 and 40 < size < 120 for size in sizes)
    new = kinds(2000, seed=1)
    assert learned.score(new) > plain.score(new)
