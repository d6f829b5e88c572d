"""Variances that are those of rows to come, where few rows were learned from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factormix.core.averages import (
    Running,
    natural_step,
    precision_form,
    prediction_widths,
    turned_form,
)
from factormix.core.density import log_prob, operands
from factormix.core.expectation import expected_statistics
from factormix.core.parameters import Parameters, loadings
from many import drawn, many

FLOOR = 1e-9


def bound(d: int, value: float = 1e6) -> Tensor:
    return torch.full((d,), value, dtype=torch.float64)


def started(truth: Parameters) -> tuple[Running, Parameters]:
    Theta = torch.cat([truth.means.unsqueeze(1), loadings(truth).mT], dim=1)
    V, weight = truth.precision_diag.reciprocal(), truth.log_weights.exp()
    return precision_form(Running(Theta, V, weight), bound(V.shape[1]), FLOOR)


@pytest.mark.parametrize("l", [0, 2])
def test_new_rows_are_explained_best_by_these_variances(l: int):
    """Of all factors by which the variances of EM on few rows could be wider, nearly the best."""
    d, n = 400, 40
    truth = many(K=1, d=d, l=l, seed=3)
    x, new = drawn(truth, n, seed=1), drawn(truth, 4000, seed=2)
    running, parameters = started(truth)
    for _ in range(300 if l else 1):
        statistics = expected_statistics(parameters, x)
        running, parameters = natural_step(
            running, parameters, statistics, 1.0, bound(d), FLOOR, expand=False
        )
    wide = float(prediction_widths(running.weight, parameters.latent_variances, n))

    def held_out(factor: float) -> float:
        copy = Running(*(t.clone() for t in running))
        widths = torch.full((1,), factor, dtype=torch.float64)
        found = precision_form(copy, bound(d), FLOOR, widths=widths)[1]
        return float(log_prob(new, operands(found)).mean())

    best = max(held_out(math.exp(i / 20)) for i in range(25))
    gain = held_out(wide) - held_out(1.0)
    assert gain > 0.001 * d
    assert gain > 0.75 * (best - held_out(1.0))


@pytest.mark.parametrize("l", [0, 1, 3])
def test_averages_are_learned_as_without_wider_variances(l: int):
    """Where there is one component, steps by all rows end at the maximum likelihood."""
    d, n = 8, 30
    x = drawn(many(K=1, d=d, l=l, seed=3), n)
    found = []
    for n_rows in (None, float(n)):
        running, parameters = started(many(K=1, d=d, l=l, seed=4))
        for _ in range(3000 if l else 2):
            statistics = expected_statistics(parameters, x)
            running, parameters = natural_step(
                running, parameters, statistics, 1.0, bound(d), FLOOR, n_rows=n_rows
            )
        found.append((running, parameters))
    (plain, _), (wide, parameters) = found
    torch.testing.assert_close(wide.V, plain.V, rtol=1e-5, atol=1e-8)
    for covariance in (lambda t: t[:, 1:].mT @ t[:, 1:], lambda t: t[:, 0]):
        torch.testing.assert_close(
            covariance(wide.Theta), covariance(plain.Theta), rtol=1e-4, atol=1e-6
        )
    widths = prediction_widths(wide.weight, parameters.latent_variances, n)
    assert widths > 1.05
    torch.testing.assert_close(
        parameters.precision_diag, 1 / (widths.unsqueeze(1) * wide.V), rtol=1e-4, atol=0
    )


@given(
    weight=st.floats(1e-9, 1.0),
    n_rows=st.floats(1.0, 1e9),
    M=st.floats(1e-6, 1.0),
    l=st.integers(0, 5),
)
def test_widths_are_between_one_and_two(weight: float, n_rows: float, M: float, l: int):
    share = torch.tensor([weight], dtype=torch.float64)
    latent = torch.full((1, l), M, dtype=torch.float64)
    wide = float(prediction_widths(share, latent, n_rows))
    p, n = 1 + l * (1 - M), weight * n_rows
    assert 1 <= wide <= 2 + 1e-12
    if n > 3 * p:
        assert wide == pytest.approx((n + p) / (n - p), rel=1e-12)


def test_a_step_widens_variances_alone_and_keeps_to_the_bound():
    K, d, l, B, n_rows = 40, 6, 2, 500, 900.0
    truth = many(K=K, d=d, l=l)
    x, most = drawn(truth, B), bound(d, float(truth.precision_diag.median()))
    (plain, _), (wide, found) = (
        natural_step(
            *started(truth),
            expected_statistics(truth, x).whole(K),
            0.1,
            most,
            FLOOR,
            n_rows=rows,
        )
        for rows in (None, n_rows)
    )
    torch.testing.assert_close(wide.V, plain.V)
    torch.testing.assert_close(wide.weight, plain.weight)
    torch.testing.assert_close(wide.Theta[:, 0], plain.Theta[:, 0])
    widths = prediction_widths(truth.log_weights.exp(), started(truth)[1].latent_variances, n_rows)
    expected = torch.minimum(1 / (plain.V * widths.unsqueeze(1)), most)
    torch.testing.assert_close(found.precision_diag, expected)
    assert (found.precision_diag == most).any()
    assert (found.precision_diag < most).any()


def wide_start(truth: Parameters, most: Tensor) -> tuple[Running, Parameters]:
    """Return averages, and parameters that are half as wide again."""
    running, _ = started(truth)
    widths = torch.full_like(running.weight, 1.5)
    return precision_form(running, most, FLOOR, widths=widths)


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_step_of_some_components_is_that_of_all(everywhere: bool):
    K, d, l = 900, 20, 2
    truth = many(K=K, d=d, l=l)
    x, most = drawn(truth, 400), bound(d, float(truth.precision_diag.median()))
    sums = [expected_statistics(wide_start(truth, most)[1], x) for _ in range(2)]
    touched = sums[0].touched
    assert touched is not None
    assert len(touched) < K
    sums[1] = sums[1].whole(K)
    few, of_all = (
        natural_step(
            *wide_start(truth, most), found, 0.1, most, FLOOR, n_rows=900.0, everywhere=everywhere
        )
        for found in sums
    )
    for one, other in zip((*few[0], *few[1][2:]), (*of_all[0], *of_all[1][2:]), strict=True):
        torch.testing.assert_close(one[touched], other[touched])


@pytest.mark.parametrize("most", [1e6, 1e-3])
def test_a_step_from_wide_variances_is_that_from_narrow_ones(most: float):
    """Given what belongs to which component, wider variances change nothing that is learned."""
    K, d, l, n = 1, 7, 2, 60
    truth = many(K=K, d=d, l=l)
    x, limit = drawn(truth, n), bound(d, most)
    found = []
    for widths in (None, torch.full((K,), 1.7, dtype=torch.float64)):
        running, parameters = precision_form(started(truth)[0], limit, FLOOR, widths=widths)
        sums = expected_statistics(parameters, x)
        rows = None if widths is None else float(n)
        found.append(natural_step(running, parameters, sums, 0.3, limit, FLOOR, n_rows=rows)[0])
    narrow, wide = found
    torch.testing.assert_close(wide.V, narrow.V)
    torch.testing.assert_close(wide.Theta[:, 0], narrow.Theta[:, 0])
    plain, other = (t.Theta[:, 1:].mT @ t.Theta[:, 1:] for t in found)
    torch.testing.assert_close(plain, other)


def test_a_new_bound_does_not_move_what_is_learned():
    d, l = 7, 2
    truth = many(K=1, d=d, l=l)
    x, last = drawn(truth, 60), bound(d, 0.5)
    V = []
    for most in (last, 2 * last):
        running, parameters = precision_form(started(truth)[0], last, FLOOR)
        sums = expected_statistics(parameters, x)
        step = natural_step(
            running, parameters, sums, 0.3, most, FLOOR, n_rows=1e12, last_bound=last
        )
        V.append(step[0].V)
    torch.testing.assert_close(*V)


def test_what_others_tell_of_components_is_as_wide():
    truth = many(K=20, d=6, l=2)
    widths = torch.linspace(1, 2, 20, dtype=torch.float64)
    running, found = precision_form(started(truth)[0], bound(6), FLOOR, widths=widths)
    E, Gamma = turned_form(running.Theta, running.V, found.latent_variances, bound(6), widths)
    torch.testing.assert_close(E, found.precision_diag)
    torch.testing.assert_close(Gamma, found.precision_factors.mT)
