"""Statistics of columns against plain formulas."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from factormix.data.batches import Batch
from factormix.data.columns import Columns, find_whole_ranges, to_float64
from factormix.errors import InputError


def columns(*values: Any, weights: np.ndarray | None = None) -> Columns:
    return Columns(Batch(np.column_stack(values), weights))


def normal(n: int = 1000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_moments_are_those_of_numpy(dtype, offset):
    X = (np.random.default_rng(0).normal(size=(500, 3)) * [1, 10, 100] + offset).astype(dtype)
    found = Columns(Batch(X))
    np.testing.assert_allclose(found.mean, X.astype(float).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.variance, X.astype(float).var(axis=0), rtol=1e-9)
    assert float(found.mean_variance) == pytest.approx(X.astype(float).var(axis=0).mean())


@pytest.mark.parametrize("step", [1.0, 0.1, 1 / 255, 0.3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_density_on_a_grid_exceeds_one_over_the_step(step, dtype):
    """At the floor, the highest density is 1 / step: its mass on a bin is at most one."""
    rounded = (np.round(30 * normal(2000)) * step).astype(dtype)
    floor = float(columns(rounded).noise_floor)
    assert scipy.stats.norm(scale=floor**0.5).pdf(0) * step == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("share", [0.5, 0.3, 0.1, 0.06])
def test_a_flag_is_a_column_of_one_step_or_as_wide_as_it_varies(share):
    flag = normal() > scipy.stats.norm.isf(share)
    floor = float(columns(flag.astype(float), normal(seed=1)).noise_floor[0])
    assert floor == pytest.approx(min(1 / (2 * np.pi), flag.var()))


def test_a_wild_value_does_not_hide_a_grid():
    x = np.round(3 * normal())
    x[5] = 1e9 + 0.37
    assert float(columns(x, normal()).noise_floor[0]) == pytest.approx(1 / (2 * np.pi))


@pytest.mark.parametrize("n", [20, 1000])
def test_the_floor_of_fine_values_is_a_millionth_of_the_variance(n):
    fine = normal(n)
    assert float(columns(fine).noise_floor) == pytest.approx(1e-6 * fine.var(), rel=1e-9)


def test_many_equal_values_among_fine_ones_are_not_a_grid():
    often = np.where(np.arange(1000) % 4 == 0, 3.0, normal())
    assert float(columns(often).noise_floor) == pytest.approx(1e-6 * often.var(), rel=1e-9)


def rare(n_rare: int, seed: int = 0, n: int = 1000) -> np.ndarray:
    """Make a column of zeros but for a few values."""
    rng, x = np.random.default_rng(seed), np.zeros(n)
    x[rng.choice(n, n_rare, replace=False)] = rng.uniform(1, 2, n_rare)
    return x


def test_two_nearly_constant_columns_may_have_components_of_their_own():
    X = [normal(), rare(30, 1), rare(30, 2)]
    floor = columns(*X).noise_floor
    np.testing.assert_allclose(floor, 1e-6 * np.var(X, axis=1), rtol=1e-9)


def test_where_more_columns_are_nearly_constant_the_spread_decides():
    X = [normal(), *(rare(30, seed) for seed in range(3))]
    found = columns(*X)
    np.testing.assert_allclose(found.noise_floor, 1e-4 * found.spread)
    assert (found.noise_floor[1:] > 50e-6 * found.variance[1:]).all()


def test_rare_values_too_few_for_a_component_are_noise_in_all_components():
    few, enough = rare(5), rare(40)
    found = columns(normal(), few, enough)
    assert float(found.noise_floor[1]) == pytest.approx(few.var(), rel=1e-9)
    assert float(found.noise_floor[2]) == pytest.approx(1e-6 * enough.var(), rel=1e-9)


def test_in_sparse_tables_of_one_unit_the_rarest_columns_share_the_usual_spread():
    """One tiny value says nothing about the size of the next one."""
    tiny = rare(1) / 1000
    alike = [normal(seed=1), *(rare(30, seed) for seed in range(3)), tiny]
    found = columns(*alike)
    usual = float(found.spread[:-1].quantile(0.5))
    assert float(found.noise_floor[-1]) == pytest.approx(1e-4 * usual, rel=1e-6)
    np.testing.assert_allclose(found.noise_floor[:-1], 1e-4 * found.spread[:-1])
    # Columns in units of their own say nothing about each other.
    mixed = columns(*(10.0**j * x for j, x in enumerate(alike[:-1])), tiny)
    np.testing.assert_allclose(mixed.noise_floor[:-1], 1e-4 * mixed.spread[:-1])
    assert float(mixed.noise_floor[-1]) == pytest.approx(tiny.var())


@pytest.mark.parametrize("wild", [1e6, 1e12])
def test_wild_values_set_neither_mean_nor_variance(wild):
    x = normal()
    spoilt = x.copy()
    spoilt[7] = wild
    found = columns(spoilt, x)
    # The wild value counts as one at twenty ranges of the middle half.
    assert abs(float(found.mean[0]) - x.mean()) < 0.05
    assert x.var() < float(found.variance[0]) < 2 * x.var()
    assert float(found.spread[0]) < 250
    assert float(found.variance[1]) == pytest.approx(x.var())


def test_a_far_cluster_is_not_wild():
    """Twenty of a hundred rows far away are the shape of the data, not an accident."""
    x = np.concatenate([normal(80), 1e4 + normal(20, 1)])
    assert float(columns(x).variance) == pytest.approx(x.var(), rel=1e-9)


@pytest.mark.parametrize("value", [0.1, 5.0, -1e5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_noise_of_a_constant_column_is_a_thousandth_of_its_value(value, dtype):
    X = np.column_stack([1e6 * normal(), np.full(1000, value)]).astype(dtype)
    found = Columns(Batch(X))
    assert float(found.variance[1]) == 0
    assert float(found.noise_floor[1]) == pytest.approx((1e-3 * value) ** 2, rel=1e-5)


@pytest.mark.parametrize("deviation", [1e-3, 1e6])
def test_a_column_of_zeros_is_as_fine_as_a_thousandth_or_as_the_others(deviation):
    found = columns(deviation * normal(), np.zeros(1000))
    usual = min(0.1, float(found.mean_variance) ** 0.5)
    assert float(found.noise_floor[1]) == pytest.approx((1e-2 * usual) ** 2)


def test_a_constant_pixel_has_the_spread_of_the_others():
    found = columns(normal(), *(rare(30, seed) for seed in range(3)), np.zeros(1000))
    assert float(found.variance[4]) == 0
    assert float(found.spread[4]) == float(found.mean_variance)
    assert float(found.noise_floor[4]) >= 1e-4 * float(found.mean_variance)


def test_constant_data_has_no_scale():
    with pytest.raises(InputError, match="every column of X is constant"):
        _ = columns(np.ones(50), np.zeros(50)).mean_variance


def test_values_whose_squares_overflow_raise_one_sentence():
    with pytest.raises(InputError, match="their variance overflows: divide X by a constant"):
        _ = columns(1e200 * normal()).mean_variance


def test_the_spread_of_a_mostly_constant_column_follows_its_range():
    pixel = rare(20)
    found = columns(normal(), pixel)
    assert float(found.spread[1]) == pytest.approx(
        min((0.2 * np.ptp(pixel)) ** 2, 100 * pixel.var())
    )
    assert float(found.spread[0]) < 3 * float(found.variance[0])


@pytest.mark.parametrize("wild", [None, 1e7])
def test_weighted_rows_count_as_repeated_ones(wild):
    """Weighted rows have the moments and spread of rows that are repeated."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3)) * [1, 5, 0.1]
    if wild is not None:
        X[3, 1] = wild
    weights = rng.integers(1, 4, size=200)
    weighted = Columns(Batch(X, weights.astype(float)))
    repeated = Columns(Batch(np.repeat(X, weights, axis=0)))
    for name in ("mean", "variance", "spread"):
        np.testing.assert_allclose(getattr(weighted, name), getattr(repeated, name), rtol=1e-9)
    # Wherever repetition alone does not make a value frequent, resolution is the same too.
    np.testing.assert_allclose(weighted.noise_floor, repeated.noise_floor, rtol=1e-9)


def test_a_single_row_and_two_rows_are_described():
    two = columns([1.0, 3.0])
    assert float(two.mean) == 2
    assert float(two.variance) == 1
    assert float(two.noise_floor) > 0
    assert float(columns([1.0]).variance) == 0


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_columns_of_whole_numbers_have_a_range(kind):
    x = np.array([[1, 2.5, np.nan, np.nan], [3, 4, np.nan, 7]])
    found = find_whole_ranges(x if kind == "array" else torch.from_numpy(x).bfloat16())
    expected = [[1, np.nan, np.nan, 7], [3, np.nan, np.nan, 7]]
    np.testing.assert_array_equal(found, expected)


def test_arrays_that_may_not_be_written_are_copied_without_a_word():
    x = np.arange(6.0).reshape(3, 2)
    x.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = to_float64(x)
    copied += 1
    assert x[0, 0] == 0
    tensor = torch.arange(3.0, dtype=torch.float64)
    to_float64(tensor).add_(1)
    assert tensor[0] == 0
