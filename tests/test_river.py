"""The anomaly detector of river, by river's own checks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import pytest

river = pytest.importorskip("river")

from river import anomaly, checks, compose, datasets, metrics, preprocessing  # noqa: E402

from factormix import MFA, InputError  # noqa: E402
from factormix.river import MFAAnomaly  # noqa: E402

NAMES = ["Time", *(f"V{j}" for j in range(1, 29)), "Amount"]


class CreditCard:
    """Stand in for the data set of the same name, which river downloads.

    Rows have its 30 features, and 1 row in 50 is a fraud, whose components are uncorrelated.
    """

    def take(self, n: int) -> Iterator[tuple[dict[str, float], int]]:
        return islice(iter(self), n)

    def __iter__(self) -> Iterator[tuple[dict[str, float], int]]:
        draw = np.random.default_rng(0)
        turn = draw.normal(size=(28, 28)) / 5
        for i in range(20_000):
            fraud = i % 50 == 37
            v = 2 * draw.normal(size=28) if fraud else draw.normal(size=28) @ turn
            values = [float(i), *v.tolist(), float(draw.gamma(1.0, 88.0))]
            yield dict(zip(NAMES, values, strict=True)), int(fraud)


class FewCreditCards(CreditCard):
    """The same rows, and no more than the checks need."""

    def take(self, n: int) -> Iterator[tuple[dict[str, float], int]]:
        return super().take(min(n, 300))


CHECKS = list(checks.yield_checks(MFAAnomaly(n_components=2, n_factors=1, seed=42)))


@pytest.mark.parametrize("number", range(len(CHECKS)), ids=[c.__name__ for c in CHECKS])
def test_the_checks_of_river_pass(number, monkeypatch):
    monkeypatch.setattr(datasets, "CreditCard", FewCreditCards)
    detector = MFAAnomaly(n_components=2, n_factors=1, seed=42)
    # Made again, because a check reads the rows of its data set once.
    check = list(checks.yield_checks(detector))[number]
    assert check.__name__ == CHECKS[number].__name__
    check(detector.clone())


def test_no_check_is_left_out():
    assert MFAAnomaly(seed=0)._unit_test_skips() == set()
    assert len(CHECKS) > 20


def test_scores_are_negative_log_likelihoods():
    rows = [x for x, _ in CreditCard().take(500)]
    frame = pd.DataFrame(rows)
    one, many = MFAAnomaly(2, 1, seed=0), MFAAnomaly(2, 1, seed=0)
    for x in rows:
        one.learn_one(x)
    many.learn_many(frame)
    assert one.model is not None
    assert many.model is not None
    np.testing.assert_array_equal(one.model.means_, many.model.means_)
    order = sorted(NAMES)
    expected = -one.model.score_samples(frame[order].to_numpy())
    np.testing.assert_allclose(many.score_many(frame), expected, rtol=1e-9)
    np.testing.assert_allclose([one.score_one(x) for x in rows[:20]], expected[:20], rtol=1e-9)
    assert list(many.score_many(frame.set_index("Time", drop=False)).index) == list(frame["Time"])


def test_it_learns_the_same_as_partial_fit():
    rows = pd.DataFrame([x for x, _ in CreditCard().take(400)])[sorted(NAMES)].to_numpy()
    detector = MFAAnomaly(2, 1, batch_size=100, forgetting=None, seed=3)
    detector.learn_many(pd.DataFrame(rows, columns=sorted(NAMES)))
    by_hand = MFA(2, 1, batch_size=100, random_state=3)
    for first in range(0, 400, 100):
        by_hand.partial_fit(rows[first : first + 100])
    assert detector.model is not None
    np.testing.assert_array_equal(detector.model.means_, by_hand.means_)


def test_missing_features_are_left_out_of_a_score():
    detector = MFAAnomaly(2, 1, seed=0)
    for x, _ in CreditCard().take(300):
        detector.learn_one(x)
    x, _ = next(CreditCard().take(1))
    part = {name: value for name, value in x.items() if name != "V3"}
    assert detector.score_one(part) == detector.score_one({**x, "V3": None})
    assert detector.score_one(part) == detector.score_one({**x, "V3": float("nan"), "new": 7.0})
    assert detector.score_one(part) != detector.score_one(x)
    assert detector.score_one({}) == pytest.approx(0.0)


def test_frauds_stand_out_in_a_pipeline_as_river_measures_it():
    model = compose.Pipeline(preprocessing.StandardScaler(), MFAAnomaly(3, 2, seed=0))
    measured = metrics.RollingROCAUC(window_size=2000)
    for i, (x, y) in enumerate(CreditCard().take(1500)):
        if i >= 200:
            measured.update(bool(y), model.score_one(x))
        model.learn_one(x)
    assert measured.get() > 0.9


def test_it_works_in_a_filter_of_river():
    model = anomaly.QuantileFilter(MFAAnomaly(2, 1, seed=0), q=0.95)
    for x, _ in CreditCard().take(400):
        model.learn_one(x)
    assert isinstance(model.classify(model.score_one(x)), bool)


def test_equal_rows_wait_until_others_come():
    detector = MFAAnomaly(2, 0, warm_up=20, seed=0)
    for _ in range(50):
        detector.learn_one({"a": 1.0, "b": 2.0})
    assert detector.score_one({"a": 1.0, "b": 2.0}) == 0.0
    draw = np.random.default_rng(0)
    for a, b in draw.normal(size=(50, 2)).tolist():
        detector.learn_one({"a": a, "b": b})
    assert detector.score_one({"a": 0.0, "b": 0.0}) < detector.score_one({"a": 9.0, "b": 0.0})


@pytest.mark.parametrize(
    ("value", "message"), [("x", "which is not a number"), (float("inf"), "is infinite")]
)
def test_a_value_that_is_no_number_is_refused(value: Any, message):
    detector = MFAAnomaly(seed=0)
    with pytest.raises(InputError, match=message):
        detector.learn_one({"a": value})
