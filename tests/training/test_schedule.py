"""When what happens in a run of natural-gradient steps, for every size of problem."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factormix.solvers import NaturalGradient, Problem
from factormix.training.solvers.schedule import (
    Rates,
    Schedule,
    Seeding,
    choose_first,
    hastening_pays,
)


def schedule(**options: Any) -> Schedule:
    sizes = {
        "n_components": 10,
        "first_components": 20,
        "tick_rows": 100,
        "batches_per_epoch": 10,
        "planned": 200.0,
    }
    return Schedule(**sizes | options)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    batches = draw(st.sampled_from([0, 1, 2, 10, 600]))
    epochs = draw(st.sampled_from([1, 2, 20, 400]))
    return schedule(
        n_components=draw(st.integers(1, 600)),
        first_components=draw(st.integers(1, 600)),
        batches_per_epoch=batches,
        planned=float(batches * epochs) or math.inf,
        rates=Rates(forgetting=draw(st.sampled_from([0.0, 0.05]))),
    )


def ticks(plan: Schedule) -> list[float]:
    """Return times from the seeding to the end, or well past all changes of a stream."""
    end = min(plan.planned, 3 * max(plan.resizing, plan.bound_ticks, 10.0))
    return [end * i / 200 for i in range(201)]


@given(schedules())
def test_the_number_of_components_goes_one_way_from_the_first_to_k(plan):
    numbers = [plan.components(t) for t in ticks(plan)]
    assert numbers[0] == plan.first_components
    assert numbers[-1] == plan.n_components
    falling = plan.first_components >= plan.n_components
    assert sorted(numbers, reverse=falling) == numbers


@given(schedules())
def test_rate_and_looseness_only_fall_and_stay_in_range(plan):
    rates = [plan.rate(t) for t in ticks(plan)]
    assert sorted(rates, reverse=True) == rates
    assert all(0 < rate <= 1 for rate in rates)
    assert min(rates) >= plan.rates.forgetting
    loose = [plan.looseness(t) for t in ticks(plan)]
    assert loose[0] == 1
    assert loose[-1] == 0
    assert sorted(loose, reverse=True) == loose


@given(schedules())
def test_a_settled_schedule_changes_nothing_any_more(plan):
    for t in ticks(plan):
        if plan.is_settled(t):
            assert plan.components(t) == plan.n_components
            assert plan.looseness(t) == 0
    assert plan.is_settled(ticks(plan)[-1])


@given(schedules())
def test_no_component_is_replaced_near_the_end(plan):
    if plan.planned == math.inf:
        assert plan.may_replace(1e9)
        return
    assert not plan.may_replace(plan.planned)
    assert not plan.may_replace(0.9 * plan.planned)
    allowed = [plan.may_replace(t) for t in ticks(plan)]
    assert sorted(allowed, reverse=True) == allowed


def test_the_rate_is_a_power_of_the_ticks_until_it_cools():
    plan = schedule(planned=1000.0, batches_per_epoch=100, rates=Rates(0.6, cooling=0.5))
    assert plan.rate(0) == pytest.approx(5**-0.6)
    assert plan.rate(95) == pytest.approx(100**-0.6)
    assert plan.rate(1000) == pytest.approx(0.5 * 1005**-0.6)


def test_a_whole_batch_is_believed_whole():
    """Where each tick is all of the data, running averages would only be late."""
    assert schedule(batches_per_epoch=1).rate(100) == 1


def test_the_rows_of_a_pass_are_all_there_is_to_see():
    assert schedule().pass_rows == 1000
    assert schedule(batches_per_epoch=0, planned=math.inf).pass_rows == math.inf


def test_few_components_begin_with_twice_as_many_and_many_with_fewer_in_excess():
    for K in range(2, 500):
        first = choose_first(K, 0, 10**9)
        # Filling up the grid adds less than a row of it.
        assert K <= first < min(2 * K, 500) + 30
        assert first >= (2 * K if K <= 32 else min(5 * K // 3, 500))
    assert choose_first(49, 4, 54_000) == 81
    # A stream has no rows to spare, and factors need some.
    assert choose_first(49, 4, 0) == 49
    assert choose_first(49, 4, 3_000) == 60


def test_many_components_begin_with_as_many_in_excess_as_there_are_rows_to_choose_by():
    sides = [choose_first(200, 10, n) for n in (22_000, 100_000, 120_000, 10**6)]
    assert sides == [200, 16 * 16, 17 * 18, 18 * 19]
    # Rows count in every pass.
    assert choose_first(200, 10, 50_000, n_passes=2) == 16 * 16
    # Up to 96 components, 5/3 of them are at most 64 more, of which the first 32 are always there.
    assert choose_first(96, 0, 96 * 36) == choose_first(96, 0, 128 * 36) == 11 * 12
    assert choose_first(96, 0, 160 * 36) == 13 * 13


def test_on_a_stream_components_are_there_after_twelve_ticks():
    for K, tick_rows in ((600, 1000), (25_600, 4000), (25_600, 50)):
        plan = schedule(n_components=K, first_components=500, batches_per_epoch=0,
                        planned=math.inf, tick_rows=tick_rows)  # fmt: skip
        assert plan.resizing == 12
        assert plan.components(0) == 500
        assert plan.components(12) == K


def test_choices_are_continuous_in_the_number_of_components():
    """One component more changes no number of the schedule by much."""
    for stream in (False, True):
        options: dict[str, Any] = {"batch_size": 1000}
        options |= {} if stream else {"batches_per_epoch": 54, "epochs": 1}
        plans = [NaturalGradient().plan(Problem(K, 64, 4, **options)) for K in range(2, 1200)]
        for one, other in pairwise(plan.schedule for plan in plans):
            assert abs(one.exponent - other.exponent) < 0.002
            assert one.rates.cooling == other.rates.cooling
            assert one.hasten_variances == other.hasten_variances
            # The first components fill up a grid that is nearly square.
            change = abs(one.first_components - other.first_components)
            assert change <= 2 + 2 * math.sqrt(one.first_components)


def test_the_exponent_rises_where_components_meet_few_rows():
    rates = Rates()
    for stream, least in ((False, 0.55), (True, 0.6)):
        found = [rates.choose_exponent(rows, stream=stream) for rows in (1e9, 150, 0)]
        assert found == pytest.approx([least, (least + 0.7) / 2, 0.7])
    assert Rates(exponent=0.9).choose_exponent(150, stream=False) == 0.9
    assert schedule(planned=150.0, n_components=100).exponent == pytest.approx(0.625)


def test_variances_are_hastened_where_factors_are_half_of_the_features():
    factors = {0: False, 49: False, 50: True, 100: True}
    assert {l: hastening_pays(100, l) for l in factors} == factors


def test_a_pass_of_one_batch_must_gain_more():
    def tol(batches_per_epoch: int, **options: float) -> float:
        problem = Problem(5, 8, 2, batches_per_epoch=batches_per_epoch, epochs=10)
        return NaturalGradient(**options).schedule(problem).tol  # type: ignore[arg-type]

    assert tol(1) == 1e-4
    assert tol(10) == 2e-5
    assert tol(10, tol=0.0) == 0


def test_the_number_of_batches_grows_without_a_jump():
    solver = NaturalGradient()
    batches = [math.ceil(n / solver.default_batch_size(n)) for n in range(900, 9000)]
    assert batches[0] == 1
    assert batches[-1] >= 75
    assert max(abs(b - a) for a, b in pairwise(batches)) <= 2


def test_a_second_batch_changes_rates_and_speed_by_less_than_a_whole_pass():
    one, two = (schedule(batches_per_epoch=n) for n in (1, 2))
    assert one.rate(50) == 1
    assert two.rate(1e9) == pytest.approx(1 / 3)
    assert one.resizing < two.resizing < schedule(batches_per_epoch=10).resizing


def test_centroids_sweep_over_all_rows_where_that_looks_at_no_more_rows():
    # 20 sweeps against 500 steps of 100 rows, and 10 against 400 of 16.
    for seeding, most in ((Seeding(), 2500), (Seeding(steps=400, step_rows=16, sweeps=10), 640)):
        assert seeding.sweeping_pays(most)
        assert not seeding.sweeping_pays(most + 1)
