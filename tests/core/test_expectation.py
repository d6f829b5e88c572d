"""Statistics of the pairs that matter against those of all pairs, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conftest import LargestTensor
from factormix.core.expectation import expected_statistics
from factormix.core.pairs import Pairs, segment_sums
from factormix.core.statistics import Statistics
from many import brute, drawn, many


@pytest.mark.parametrize("l", [0, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_pairs_that_matter_give_the_sums_over_all_pairs(l, weighted):
    parameters = many(K=300, l=l)
    x = drawn(parameters, 100)
    times = np.arange(100) % 3 if weighted else np.ones(100)
    weights = torch.from_numpy(times).double() if weighted else None
    found = expected_statistics(parameters, x, weights)
    assert found.touched is not None, "most of 300 components have no row of 100"
    assert float(found.n_samples) == times.sum()
    whole = found.whole(300)
    scale = times.sum()
    for ours, theirs in zip((whole.A, whole.B, whole.S), brute(parameters, x, times), strict=True):
        # What is left out is less than a millionth of a row for each pair.
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6 * scale)


def test_where_many_pairs_matter_nothing_is_left_out():
    parameters = many(K=120, spread=0.02)
    x = drawn(parameters, 200)
    found = expected_statistics(parameters, x)
    assert found.touched is None
    for ours, theirs in zip(found[2:5], brute(parameters, x, np.ones(200)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_rows_are_taken_in_parts_where_features_are_few():
    """With many factors, arrays of all projections would cost more than the products."""
    parameters = many(K=200, d=24, l=15)
    x = drawn(parameters, 600)
    with LargestTensor() as largest:
        found = expected_statistics(parameters, x)
    assert largest.numel < 600 * 200 * 15 / 1.5
    for ours, theirs in zip(found.whole(200)[2:5], brute(parameters, x, np.ones(600)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-3)


def test_sums_by_component_are_those_of_their_pairs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    rows, components = torch.tensor([3, 1, 1, 9, 3]), torch.tensor([5, 2, 5, 2, 7])
    shares = torch.rand(5, generator=generator, dtype=torch.float64)
    Y = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    sums = segment_sums(Pairs(rows, components, shares, Y), x, x.square())
    assert sums.touched.tolist() == [2, 5, 7]
    for i, k in enumerate([2, 5, 7]):
        mine = components == k
        one_y = torch.cat([torch.ones(int(mine.sum()), 1).double(), Y[mine]], dim=1)
        weighted = one_y * shares[mine, None]
        torch.testing.assert_close(sums.first[i], weighted.sum(dim=0))
        torch.testing.assert_close(sums.B[i], weighted.mT @ x[rows[mine]])
        torch.testing.assert_close(sums.S[i], shares[mine] @ x[rows[mine]].square())
    whole = segment_sums(Pairs(rows, components, shares, Y), x, x.square(), 9)
    assert whole.touched is None
    for every, some in zip(whole[1:], sums[1:], strict=True):
        assert len(every) == 9
        assert torch.equal(every[[2, 5, 7]], some)
        assert not every[[0, 1, 3, 4, 6, 8]].any()


@pytest.mark.parametrize("spread", [None, 0.02])
def test_sums_can_be_finished_after_they_are_added(spread):
    """The statistics of all rows are those of parts that were finished together."""
    parameters = many(K=300) if spread is None else many(K=120, spread=spread)
    x = drawn(parameters, 200)
    parts = [expected_statistics(parameters, part, finish=False) for part in torch.split(x, 120)]
    assert not parts[0].is_finished
    found = parts[0].joined(parts[1]).finished(parameters)
    assert found.finished(parameters) is found
    whole = found.whole(len(parameters.means))
    for ours, theirs in zip(whole[2:5], brute(parameters, x, np.ones(200)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-4)


def test_statistics_of_some_components_add_to_those_of_others():
    parameters = many(K=400)
    x = drawn(parameters, 240)
    parts = [expected_statistics(parameters, part) for part in torch.split(x, 80)]
    together = parts[0].joined(parts[1]).joined(parts[2])
    assert together.touched is not None
    assert together.touched.tolist() == sorted(set(torch.cat([p.touched for p in parts]).tolist()))
    expected = [sum(p.whole(400)[i] for p in parts) for i in (2, 3, 4)]
    for ours, theirs in zip(together.whole(400)[2:5], expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    mixed = parts[0].whole(400).joined(parts[1]).joined(parts[2].whole(400))
    assert isinstance(mixed, Statistics)
    assert mixed.touched is None
    for ours, theirs in zip(mixed[2:5], expected, strict=True):
        torch.testing.assert_close(ours, theirs)
