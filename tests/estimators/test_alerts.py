"""Alerts: thresholds from held-out scores, and what may be learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.faulty_streams import DEVIATIONS, FAULTS, draw_drift, draw_ordinary, draw_spikes

from factormix import MFA, InputError, load, stream
from factormix.estimators.alerts import complete_scores, find_threshold, predict_held_out
from factormix.solvers import NaturalGradient

Rows = np.ndarray[Any, np.dtype[np.float64]]


def draw_clusters(n: int, d: int, seed: int) -> Rows:
    shape, rng = np.random.default_rng(6), np.random.default_rng(seed)
    centres, ways = 3 * shape.normal(size=(5, d)), shape.normal(size=(5, d))
    k = rng.integers(5, size=n)
    return centres[k] + ways[k] * rng.normal(size=(n, 1)) + 0.3 * rng.normal(size=(n, d))


def draw_curve(n: int, d: int, seed: int) -> Rows:
    rng, ways = np.random.default_rng(seed), np.random.default_rng(7).normal(size=(4, d))
    t = rng.uniform(0, 6, size=n)
    curve = np.stack([np.sin(t), np.cos(t), t / 3, np.sin(2 * t)], axis=1)
    return curve @ ways + 0.1 * rng.normal(size=(n, d))


def draw_heavy(n: int, d: int, seed: int) -> Rows:
    rng, ways = np.random.default_rng(seed), np.random.default_rng(5).normal(size=(2, d))
    return rng.normal(size=(n, 2)) @ ways + 0.3 * rng.standard_t(4, size=(n, d))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], MFA]:
    """Return a function that loads a model of ordinary rows, which it trains at its first call."""
    folder = tmp_path_factory.mktemp("trained")

    def load_trained(n_components: int) -> MFA:
        path = folder / f"{n_components}.safetensors"
        if not path.exists():
            MFA(n_components, random_state=0).fit(draw_ordinary(2000, 0)).save(path)
        return load(path)

    return load_trained


@pytest.mark.parametrize("draw", [draw_clusters, draw_curve, draw_heavy])
@pytest.mark.parametrize(("n", "d"), [(500, 6), (2000, 6), (2000, 20)])
def test_new_rows_alert_at_about_the_rate(draw, n, d):
    """The default model has 25 components, each of 20 to 80 rows here.

    The scores of the training rows themselves would let 0.6% to 12% of new rows alert at 0.001.
    """
    fitted = MFA(random_state=0).fit(draw(n, d, 0))
    scores = fitted.score_samples(draw(20_000, d, 1))
    assert np.mean(scores < fitted.alert_threshold(0.001)) < 0.003
    assert (0.0001 if n < 1000 else 0.001) < np.mean(scores < fitted.alert_threshold(0.01)) < 0.015


def test_the_threshold_of_an_exponential_tail_is_its_quantile():
    below = (np.arange(100_000) + 0.5) / 100_000
    for width in (1.0, 3.0):
        scores = 5 + width * np.log(below)
        for rate in (0.3, 0.05, 1e-3, 1e-6):
            assert find_threshold(scores, rate) == pytest.approx(5 + width * np.log(rate), abs=0.01)


@pytest.mark.parametrize("d", [2, 8, 30])
def test_the_threshold_of_a_gaussian_is_at_most_a_little_too_low(d):
    """The score of a Gaussian is half of a chi-squared variable, whose tail is a little thinner."""
    scores = -stats.chi2(d).isf((np.arange(100_000) + 0.5) / 100_000) / 2
    rate = stats.chi2(d).sf(-2 * find_threshold(scores, 0.001))
    assert 0.0003 < rate < 0.0011


def test_equal_scores_do_not_alert_and_lower_ones_do():
    threshold = find_threshold(np.full(500, -3.0), 0.001)
    assert threshold == pytest.approx(-3 - np.log(100))


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_faults_among_the_training_rows_hardly_move_the_threshold(share):
    rows = draw_ordinary(4000, 0)
    clean = MFA(6, 2, random_state=0).fit(rows).alert_threshold(0.001)
    faults = np.random.default_rng(1).random(4000) < share
    rows[faults, 1] += np.random.default_rng(2).uniform(10, 5000, size=faults.sum())
    fitted = MFA(6, 2, random_state=0).fit(rows)
    assert clean - 25 < fitted.alert_threshold(0.001) < clean + 5


def test_predicted_scores_lose_twice_what_rows_lose_by_being_left_out():
    """The oracle: a Gaussian of one feature that is estimated again without each row."""
    x = np.random.default_rng(0).normal(size=200)
    scores = stats.norm(x.mean(), x.std()).logpdf(x)
    left_out = [stats.norm(y.mean(), y.std()).logpdf(x[i]) for i, y in enumerate(_without_each(x))]
    predicted = predict_held_out(
        scores, stats.zscore(x) ** 2, np.zeros(200, dtype=int), np.ones(1), 200, 1, 0
    )
    loss = np.mean(scores - predicted)
    assert loss == pytest.approx(2 * np.mean(scores - left_out), rel=0.2)
    assert loss == pytest.approx(2 * 2 / 200, rel=0.3), "Akaike: a parameter costs a nat in n rows"


def _without_each(x: Rows) -> list[Rows]:
    return [np.delete(x, i) for i in range(len(x))]


@pytest.mark.parametrize("n_factors", [0, 2])
def test_missing_entries_count_as_ordinary(n_factors):
    """In small units, a missing value would lower the log-likelihood by nine nats."""
    rows, new = (1e-4 * draw_ordinary(n, seed) for n, seed in ((4000, 0), (20_000, 1)))
    fitted = MFA(4, n_factors, random_state=0).fit(rows)
    new[np.arange(len(new)), np.arange(len(new)) % 6] = np.nan
    scores, components = fitted.score_and_predict(new)
    threshold = fitted.alert_threshold(0.001)
    assert np.mean(scores < threshold) > 0.005
    completed = complete_scores(fitted._run, new, scores, components)
    assert np.mean(completed < threshold) < 0.003
    new[:, 0] = 1.0
    assert (complete_scores(fitted._run, new, *fitted.score_and_predict(new)) < threshold).all()


def test_held_out_scores_are_kept_with_the_model(tmp_path):
    fitted = MFA(4, 2, random_state=0).fit(draw_ordinary(3000, 0))
    assert len(fitted.held_out_scores_) == 2048
    for training_state in (True, False):
        fitted.save(tmp_path / "m.safetensors", training_state=training_state)
        again = load(tmp_path / "m.safetensors")
        np.testing.assert_array_equal(again.held_out_scores_, fitted.held_out_scores_)
        assert again.alert_threshold(0.01) == fitted.alert_threshold(0.01)
    new = draw_ordinary(500, 1)
    fitted.calibrate(new)
    np.testing.assert_allclose(
        np.sort(fitted.held_out_scores_), np.sort(fitted.score_samples(new)), atol=1e-3
    )


def test_held_out_scores_are_those_of_the_fitted_model_whenever_they_are_asked_for(tmp_path):
    rows, new = draw_ordinary(3000, 0), draw_ordinary(500, 1)
    models = [MFA(4, 2, random_state=0).fit(X) for X in (rows.copy(), rows, torch.tensor(rows))]
    expected = models[0].held_out_scores_
    learned = models[1].partial_fit(new)
    learned.save(tmp_path / "m.safetensors")
    rows += 1.0
    for found in (learned, models[2], load(tmp_path / "m.safetensors")):
        np.testing.assert_array_equal(found.held_out_scores_, expected)


def test_an_interrupted_fit_has_the_same_held_out_scores_when_it_is_resumed():
    rows = draw_ordinary(1000, 0)
    whole = MFA(3, 2, random_state=0, max_epochs=4).fit(rows)
    cut = MFA(3, 2, random_state=0, max_epochs=4, callbacks=[lambda progress: True]).fit(rows)
    cut.set_params(callbacks=[]).resume(rows)
    np.testing.assert_array_equal(cut.held_out_scores_, whole.held_out_scores_)


def test_invalid_rates_and_models_without_scores_are_refused():
    fitted = MFA(2, 1, random_state=0).partial_fit(draw_ordinary(200, 0))
    with pytest.raises(InputError, match=r"no held-out scores.*calibrate"):
        fitted.alert_threshold(0.01)
    fitted.calibrate(draw_ordinary(200, 1)).alert_threshold(0.01)
    for rate in (0, 1, -1, "low", True, np.nan):
        with pytest.raises(InputError, match=r"rate is the share.*between 0 and 1"):
            fitted.alert_threshold(rate)
        with pytest.raises(InputError, match="alert is the share"):
            stream(fitted, draw_ordinary(10, 0), alert=rate)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("n_components", [2, 25])
def test_a_model_that_learns_marks_faults_before_and_after_a_restart(
    kind, n_components, trained, tmp_path
):
    fitted = trained(n_components)
    rows, faults, ordinary = FAULTS[kind](8000)
    alerts = list[Any]()
    for half in (rows[:4000], rows[4000:]):
        alerts += [part.alerts for part in stream(fitted, half, alert=0.001)]
        fitted.save(tmp_path / "m.safetensors")
        fitted = load(tmp_path / "m.safetensors")
    found = np.concatenate(alerts)
    assert np.mean(found[faults]) > 0.95
    assert np.mean(found[ordinary]) < 0.01


def test_rows_that_alert_are_learned_on_request_only():
    rows, faults, _ = draw_spikes(2000)
    fitted = MFA(2, 2, random_state=0).fit(draw_ordinary(2000, 0))
    before, means = fitted.n_samples_seen_, fitted.means_
    threshold = fitted.alert_threshold(0.001)
    n_alerts = sum(part.alerts.sum() for part in stream(fitted, rows, alert=0.001))
    assert fitted.n_samples_seen_ == before + 2000 - n_alerts
    assert fitted.position_ == 2000
    assert fitted.alert_threshold(0.001) == threshold, "it stays while a model of fit learns"
    np.testing.assert_allclose(fitted.means_, means, atol=0.2)
    other = MFA(2, 2, random_state=0).fit(draw_ordinary(2000, 0))
    parts = list(stream(other, rows, alert=0.001, learn_alerts=True))
    assert parts[0].alerts[faults[: len(parts[0].alerts)]].all()
    assert other.n_samples_seen_ == before + 2000


def test_nothing_is_learned_while_the_scores_are_low():
    """A drift of up to two deviations does not alert, but is seen in the mean of the scores."""
    fitted = MFA(2, 2, random_state=0).fit(draw_ordinary(3000, 0))
    low = draw_drift(10_000, largest=2.0).rows[-2000:]
    before = fitted.n_samples_seen_
    parts = list(stream(fitted, low, alert=0.001, batch_size=200))
    assert np.mean([part.alerts.mean() for part in parts]) < 0.1
    assert fitted.n_samples_seen_ < before + 500
    list(stream(fitted, draw_ordinary(2000, 4), alert=0.001, batch_size=200))
    assert fitted.n_samples_seen_ > before + 1500, "it goes on when they recover"


@pytest.mark.parametrize("rate", [0.001, 0.01])
@pytest.mark.parametrize("trained", [True, False])
def test_a_model_that_forgets_follows_a_drift_of_all_sensors(rate, trained):
    n = 20_000
    rows = draw_ordinary(n, 3) + np.linspace(0, 1, n)[:, None] * [4, -2.5, 1.5, 0, 3, 1]
    faults = np.random.default_rng(4).random(n) < 0.01
    faults[:2000] = False
    rows[faults, 1] += 15 * DEVIATIONS[1]
    fitted = MFA(2, 2, random_state=0, batch_size=200, solver=NaturalGradient(forgetting=0.05))
    if trained:
        fitted.fit(draw_ordinary(3000, 0))
    found = np.concatenate([part.alerts for part in stream(fitted, rows, alert=rate)])
    assert np.mean(found[faults]) > 0.95
    last = np.arange(n) >= n // 2
    assert 0 < np.mean(found[last & ~faults]) < 2 * rate


def test_a_fault_that_happened_once_in_the_training_alerts_when_it_comes_again():
    """The fault has a component of its own, and its likelihood is high."""
    x = draw_clusters(900, 4, 0)
    x[333] = 400.0
    model = MFA(9, 2, random_state=0).fit(x)
    assert model.score_samples(x[333:334]) > model.score_samples(x).mean()
    alerts = np.concatenate([part.alerts for part in stream(model, x, alert=0.001)])
    assert alerts[333]
    assert alerts.sum() < 10
