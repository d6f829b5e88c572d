"""Batches keep their rows and weights when they are taken, joined and cut anew."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factormix.data.batches import Batch, drop_zero_weights, join_batches, rebatch


def cut(n: int, sizes: list[int], *, tensors: bool, weighted: bool) -> list[Batch]:
    """Number the rows of batches of the given sizes, and their weights with them."""
    bounds = np.minimum(np.cumsum([0, *sizes]), n)
    X = np.stack([np.arange(n), -np.arange(n)], axis=1).astype(float)
    weights = np.arange(n) % 3.0 if weighted else None
    return [
        Batch(
            torch.from_numpy(X[a:b]) if tensors else X[a:b],
            None if weights is None else weights[a:b],
        )
        for a, b in itertools.pairwise(bounds)
        if a < b
    ]


@given(
    st.integers(1, 40),
    st.lists(st.integers(1, 15), min_size=1, max_size=10),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
)
def test_rebatching_keeps_the_rows(n, sizes, size, tensors, weighted):
    batches = cut(n, sizes, tensors=tensors, weighted=weighted)
    whole = join_batches(batches)
    again = list(rebatch(iter(batches), size))
    assert [len(batch) for batch in again[:-1]] == [size] * (len(again) - 1)
    assert 1 <= len(again[-1]) <= size
    np.testing.assert_array_equal(join_batches(again).rows, whole.rows)
    assert isinstance(again[0].rows, torch.Tensor) == tensors
    if weighted:
        np.testing.assert_array_equal(join_batches(again).weights, whole.weights)
    else:
        assert all(batch.weights is None for batch in again)


@pytest.mark.parametrize("tensors", [False, True])
def test_rows_of_weight_zero_are_left_out(tensors):
    batches = [*cut(7, [3, 4], tensors=tensors, weighted=True)]
    batches.insert(1, Batch(batches[0].rows, np.zeros(3)))
    kept = list(drop_zero_weights(batches))
    assert [len(batch) for batch in kept] == [2, 2]
    np.testing.assert_array_equal(join_batches(kept).rows[:, 0], [1, 2, 4, 5])
    np.testing.assert_array_equal(join_batches(kept).weights, [1, 2, 1, 2])
    plain = cut(7, [3, 4], tensors=tensors, weighted=False)
    assert list(drop_zero_weights(plain)) == plain


def test_rebatching_a_stream_waits_for_no_more_than_it_serves():
    served = []

    def stream():
        for i in range(10):
            served.append(i)
            yield Batch(np.full((5, 1), float(i)))

    batches = rebatch(stream(), 10)
    assert len(next(batches)) == 10
    assert served == [0, 1]
