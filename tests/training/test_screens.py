"""Screens in training: lazy steps, candidates that are raised, runs that go on exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from factormix.core.averages import StepOptions, natural_step
from factormix.core.density import joint_operands, log_normaliser, project
from factormix.core.expectation import expected_statistics
from factormix.core.screening import Screen
from factormix.data.batches import Batch
from factormix.training.screens import Screening, Search
from factormix.training.solvers import NaturalGradient, Problem, step
from factormix.training.solvers.base import add, pack, unpack
from mixtures import draw_rows, latent_sums, make_bound, make_mixture, start_averages

BOUND = make_bound(20, 100.0)
OPTIONS = StepOptions(0.2, BOUND, 1e-6)


def test_components_that_no_row_touches_need_no_rewriting():
    """Steps on some components give the same as steps on all of them, again and again."""
    mixture = make_mixture(K=400)
    lazy, whole = start_averages(mixture, BOUND), start_averages(mixture, BOUND)
    for seed in range(6):
        x = draw_rows(mixture, 60, seed)
        found = expected_statistics(lazy[1], x)
        assert found.sums.touched is not None
        lazy = natural_step(*lazy, found, OPTIONS)
        other = expected_statistics(whole[1], x)
        other = other._replace(sums=other.sums.spread_to_all(400))
        whole = natural_step(*whole, other, OPTIONS)
    for ours, theirs in zip((*lazy[0][1:], *lazy[1]), (*whole[0][1:], *whole[1]), strict=True):
        # The sign of a factor column is free.
        torch.testing.assert_close(ours.abs(), theirs.abs(), rtol=1e-8, atol=1e-10)


def test_untouched_components_are_the_same_bits():
    mixture = make_mixture(K=400)
    averages, parameters = start_averages(mixture, BOUND)
    found = expected_statistics(parameters, draw_rows(mixture, 60))
    touched = torch.zeros(400).bool()
    touched[found.sums.touched] = True
    before = [t.clone() for t in (averages.Theta, averages.V, *parameters[1:])]
    averages, parameters = natural_step(averages, parameters, found, OPTIONS)
    for old, new in zip(before, (averages.Theta, averages.V, *parameters[1:]), strict=True):
        assert torch.equal(old[~touched], new[~touched])
        assert not torch.equal(old[touched], new[touched])


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_step_in_parts_is_the_same_step(everywhere):
    """A few components at a time give the bits of all at once, with a new bound too."""
    mixture = make_mixture(K=1200)
    x, (_, d, l) = draw_rows(mixture, 1200), mixture.shape
    whole, parts = start_averages(mixture, BOUND), start_averages(mixture, BOUND)
    options = StepOptions(0.2, BOUND / 3, 1e-6, everywhere=everywhere)
    found = expected_statistics(whole[1], x)
    if everywhere:
        found = found._replace(sums=found.sums.spread_to_all(1200))
    expected = natural_step(*whole, found, options)
    size = 192 * d * (l + 1)
    found = expected_statistics(parts[1], x, convert=False)
    found = found._replace(sums=found.sums.to_latent(parts[1], elements=size))
    assert found.sums.touched is not None
    assert len(list(found.sums.split(found.sums.touched, size))) > 1
    got = natural_step(*parts, found, options._replace(part_elements=size))
    for ours, theirs in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(ours, theirs)


def problem(**options: Any) -> Problem:
    defaults: dict[str, Any] = {
        "batch_size": 200, "batches_per_epoch": 30, "epochs": 3, "candidates": 20,
    }  # fmt: skip
    return Problem(60, 20, 2, torch.tensor(100.0), **defaults | options)


def rows(n: int = 6000) -> Tensor:
    return draw_rows(make_mixture(K=60, spread=1.5, dtype=torch.float32), n) / 2


def trained(plan: Any, state: Any, X: Tensor, first: int, last: int) -> tuple[Any, list[Any]]:
    infos = []
    for i in range(first, last):
        batch = X[(200 * i) % len(X) :][:200]
        state, info = step(plan, state, Batch(batch))
        infos.append(info)
    return state, infos


def held_out(state: Any, X: Tensor) -> float:
    joint = project(X, joint_operands(state.parameters))[0]
    return float(log_normaliser(joint)[0].mean())


@pytest.mark.parametrize("first", [None, 30, 120])
def test_training_through_a_screen_is_as_good(first):
    """With components that grow, that are pruned, and as many as there will be."""
    X, new = rows(), rows(7000)[6000:]
    solver = NaturalGradient(first_components=first)
    found = {}
    for candidates in (20, None):
        plan = solver.plan(problem(candidates=candidates))
        state, infos = trained(plan, plan.init(), X, 0, 90)
        assert len(state.parameters.means) == 60
        found[candidates] = held_out(state, new)
        if candidates:
            assert infos[-1].scalars["candidates"] == candidates
            assert 0 <= infos[-1].scalars["screening_loss"] < 0.5
    assert found[20] > found[None] - 0.15


@pytest.mark.parametrize("at", [3, 20, 61])
def test_a_run_with_a_screen_goes_on_bit_by_bit(at):
    X = rows()
    solver = NaturalGradient(first_components=30)
    plan = solver.plan(problem())
    whole, _ = trained(plan, plan.init(), X, 0, 75)
    state, _ = trained(plan, plan.init(), X, 0, at)
    tensors, values = pack(state)
    state = unpack(
        solver.state_type,
        {name: t.clone() for name, t in tensors.items()},
        json.loads(json.dumps(values)),
    )
    state, _ = trained(solver.plan(problem()), state, X, at, 75)
    ours, theirs = pack(state), pack(whole)
    assert ours[1] == theirs[1]
    assert all(torch.equal(t, theirs[0][name]) for name, t in ours[0].items())


def test_weights_count_as_rows_through_a_screen():
    X = rows()
    plan = NaturalGradient().plan(problem())
    state, _ = trained(plan, plan.init(), X, 0, 40)
    x, times = X[:120], torch.arange(120) % 3
    weighted = plan.contribution(state, Batch(x, times.float()))
    used = plan.contribution(state, Batch(x[times > 0], times[times > 0].float()))
    assert float(weighted.n_samples) == float(used.n_samples) == times.sum()
    assert float(weighted.log_likelihood) == pytest.approx(float(used.log_likelihood), rel=5e-3)


def test_contributions_of_parts_add_up_through_a_screen():
    X = rows()
    plan = NaturalGradient().plan(problem(candidates=60))
    state, _ = trained(plan, plan.init(), X, 0, 45)
    whole = plan.contribution(state, Batch(X[:200]))
    parts = [plan.contribution(state, Batch(x)) for x in torch.split(X[:200], 100)]
    total = add(*parts)
    assert float(total.log_likelihood) == pytest.approx(float(whole.log_likelihood), rel=1e-5)
    k = len(state.parameters.means)
    for ours, theirs in zip(latent_sums(total, k), latent_sums(whole, k), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)


def test_candidates_are_as_many_as_rows_need():
    """Left open, the number follows the loss of the probes; a given number stays."""
    X, numbers = rows(), {}
    for tolerance in (1e-4, 1.0):
        screening = Screening(
            counts=(2, 6, 40),
            first_count=6,
            pair_cost=1,
            row_cost=0,
            training_cost=0,
            table_cost=0,
            tolerance=tolerance,
        )
        for candidates in ("auto", 6):
            plan = NaturalGradient().plan(problem(candidates=candidates))
            plan = replace(plan, schedule=replace(plan.schedule, screening=screening))
            _, infos = trained(plan, plan.init(), X, 0, 60)
            numbers[tolerance, candidates] = infos[-1].scalars["candidates"]
    assert numbers == {(1e-4, "auto"): 40, (1e-4, 6): 6, (1.0, "auto"): 2, (1.0, 6): 6}


def test_the_fewest_candidates_that_lose_little_are_chosen():
    """A thousandth of the gain over one Gaussian, which is 100 nats here."""
    screening, shape = Screening(counts=(8, 16, 500), tolerance=1e-3), (1600, 784, 4)
    assert screening.choose_count("auto", shape, [0.3, 0.09, 0.0], 100.0) == 16
    assert screening.choose_count("auto", shape, [0.09, 0.01, 0.0], 100.0) == 8
    assert screening.choose_count("auto", shape, [9.0, 5.0, 0.0], 100.0) == 0, "all cost less"
    assert screening.choose_count("auto", shape, [9.0, 5.0, 1.0], 100.0) == 0, "all lose too much"
    assert screening.choose_count(5, shape, [9.0], 100.0) == 5


def test_probes_change_the_number_once_they_are_enough():
    screening, shape = Screening(counts=(8, 16), enough_probes=30.0, memory=0.5), (1600, 784, 4)
    search, missed = Search(candidates=16), torch.empty(0)
    for losses, expected, loss in (
        ((0.0, 0.0), 16, 0.0), ((8.0, 2.0), 16, 2 / 30), ((800.0, 400.0), 0, 2 / 30)
    ):  # fmt: skip
        missed = search.add_probes(
            missed, torch.tensor([*losses, 2000.0, 20.0]), "auto", shape, screening
        )
        assert search.candidates == expected
        assert search.loss == pytest.approx(loss)


def test_a_screen_that_does_not_pay_is_tried_again_when_components_have_doubled():
    mixture = make_mixture(K=600, d=40, dtype=torch.float32)
    screening, screen = Screening(), Screen.empty(mixture.means)
    search, tried = Search(components=400), []
    for k in (400, 600, 800, 1600):
        shape = (k, 784, 4)
        screen = search.update_screen("auto", screen, mixture, None, 1.0, shape, screening)
        tried.append(search.candidates)
    assert tried == [0, 0, screening.first_count, screening.first_count]


def test_when_a_screen_is_used():
    screening = Screening()
    first = screening.choose_first
    assert first("auto", (200, 784, 4)) == 0
    assert first("auto", (500, 784, 4)) == first("auto", (1600, 784, 4)) == screening.first_count
    assert first("auto", (400, 784, 4)) == 0
    assert first("auto", (400, 784, 4), training=False) == screening.first_count
    assert first("auto", (30_000, 5, 2)) == 0, "the table is not small"
    assert first(None, (30_000, 784, 4)) == 0
    assert first(50, (400, 784, 4)) == 50
    assert first(50, (20, 784, 4)) == 20
