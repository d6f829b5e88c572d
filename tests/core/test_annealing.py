"""The grid, the kernel and the window rule, against literal transcriptions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from factormix.core.annealing import (
    COLLAPSED,
    Window,
    grid_shape,
    smoothing_kernel,
    torus_distances,
)


@given(st.integers(1, 2000))
def test_the_grid_is_the_rectangle_nearest_to_a_square(K):
    pairs = [(r, K // r) for r in range(1, K + 1) if K % r == 0 and r * r <= K]
    assert grid_shape(K) == min(pairs, key=lambda pair: pair[1] - pair[0])


@pytest.mark.parametrize(
    ("K", "shape"), [(1, (1, 1)), (25, (5, 5)), (49, (7, 7)), (12, (3, 4)), (7, (1, 7))]
)
def test_the_grid_in_numbers(K, shape):
    assert grid_shape(K) == shape


@pytest.mark.parametrize("K", [1, 2, 3, 6, 7, 12, 25, 30])
def test_distances_on_the_torus_are_those_to_the_nearest_image(K):
    rows, columns = grid_shape(K)
    expected = np.empty((K, K))
    for a, b in itertools.product(range(K), repeat=2):
        down, right = b // columns - a // columns, b % columns - a % columns
        expected[a, b] = min(
            (down + i * rows) ** 2 + (right + j * columns) ** 2
            for i, j in itertools.product((-1, 0, 1), repeat=2)
        )
    np.testing.assert_array_equal(torus_distances(K).numpy(), expected)


@given(st.integers(1, 60), st.floats(0.01, 10))
def test_kernel_rows_are_normalised_gaussians_of_the_distance(K, sigma):
    distances = torus_distances(K).double()
    kernel = smoothing_kernel(distances, sigma)
    assert kernel.shape == (K, K)
    np.testing.assert_allclose(kernel.sum(dim=1).numpy(), 1, rtol=1e-12)
    unnormalised = np.exp(-distances.numpy() / (2 * sigma**2))
    expected = unnormalised / unnormalised.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(kernel.numpy(), expected, rtol=1e-10, atol=1e-300)
    # Every component is at the centre of its own neighbourhood, all alike on a torus.
    np.testing.assert_allclose(kernel.numpy(), kernel.mT.numpy(), rtol=1e-12)
    assert (kernel.argmax(dim=1) == torch.arange(K)).all()


@given(st.integers(1, 60), st.floats(0.01, COLLAPSED, exclude_max=True))
def test_a_narrow_kernel_is_close_to_the_identity(K, sigma):
    assert COLLAPSED == 0.3
    kernel = smoothing_kernel(torus_distances(K), sigma)
    neighbour = math.exp(-1 / (2 * COLLAPSED**2))
    assert neighbour < 0.004
    assert (kernel - torch.eye(K)).fill_diagonal_(0).max() <= neighbour
    # At most four neighbours at distance one, four at two and eight at more.
    assert kernel.diagonal().min() > 1 - 5 * neighbour


def test_the_narrowest_kernel_is_the_identity():
    assert torch.equal(smoothing_kernel(torus_distances(25), 0.01), torch.eye(25))


def stationary(means: list[float], delta: float) -> list[bool]:
    """Transcribe section 4: ``delta_L = (this - last) / (last - l0)`` with l0 the first mean; act
    whenever ``-2 delta < delta_L < delta``; the first two windows take no action.
    """
    verdicts = [False, False]
    for i in range(2, len(means)):
        delta_L = (means[i] - means[i - 1]) / (means[i - 1] - means[0])
        verdicts.append(-2 * delta < delta_L < delta)
    return verdicts[: len(means)]


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30),
    st.sampled_from([0.01, 0.05, 0.5]),
)
def test_the_window_rule_is_the_papers(means, delta):
    assume(all(mean != means[0] for mean in means[1:]))
    window = Window(delta)
    assert [window.close(mean) for mean in means] == stationary(means, delta)


def test_the_window_rule_in_numbers():
    """Rise by 100, then by 4 per cent of that (act), by 8 (no), fall by 5 (act), by 20 (no)."""
    window = Window(0.05)
    means = [0.0, 100.0, 104.0, 112.32, 106.7, 85.4]
    assert [window.close(mean) for mean in means] == [False, False, True, False, True, False]


def test_an_objective_that_never_moves_is_stationary():
    window = Window(0.05)
    assert [window.close(1.0) for _ in range(4)] == [False, False, True, True]
    assert not window.close(2.0)
