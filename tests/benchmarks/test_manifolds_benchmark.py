"""The toy manifolds: their dimensions, the noise, and the rank rule on clusters that are known."""

from __future__ import annotations

import activations_manifolds as manifolds
import numpy as np
import pytest


@pytest.mark.parametrize("kind", manifolds.KINDS)
def test_small_neighbourhoods_have_the_dimension_of_the_kind(kind):
    dimension, draw = manifolds.KINDS[kind]
    rng = np.random.default_rng(0)
    middle = rng.uniform(0.3, 0.7, size=(5, 1))
    points = np.stack(draw(*(middle + 1e-4 * rng.normal(size=(5, 200)))), axis=1)
    values = np.linalg.svd(points - points.mean(axis=0), compute_uv=False)
    assert (values > 1e-2 * values[0]).sum() == dimension


def test_rows_have_noise_in_the_given_ratio_to_their_distance():
    rows, points, kinds = manifolds.draw_manifolds(8000, seed=0)
    assert (rows - points).std() == pytest.approx(1 / manifolds.NOISE_RATIO, rel=0.01)
    assert set(kinds) == set(range(8))
    # The mean square distance of a component's rows from the centre of two manifolds.
    box = points[kinds == 7]
    assert np.linalg.matrix_rank(box - box.mean(axis=0), tol=1e-6) == 11, "two cubes, and a line"


def test_judging_counts_directions_above_the_noise():
    train = manifolds.draw_manifolds(16_000, seed=0)
    labels = np.minimum(train.kinds, 7)
    weights = np.bincount(labels) / len(labels)
    found = manifolds.Fitted(np.zeros(8, dtype=int), labels, weights, np.nan, 0.0)
    used, kinds, pieces = manifolds.judge(found, train)
    assert used.all()
    assert kinds.tolist() == list(range(8))
    # Both manifolds of a kind are one piece here: two bases, and the line between their centres.
    coordinates = np.array([1, 2, 3, 3, 4, 3, 3, 5])
    assert pieces.tolist() == (2 * coordinates + 1).tolist()


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_the_rank_rule_finds_strong_principal_components(rank):
    rng = np.random.default_rng(rank)
    rows = rng.normal(size=(1500, 128))
    rows[:, :rank] *= 2
    variances = np.linalg.eigvalsh(np.cov(rows.T))[::-1]
    assert manifolds.find_rank(variances, len(rows)) == rank
