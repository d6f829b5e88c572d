"""What must hold after every step, as properties; and nothing changes that need not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factormix.core.parameters import bound_precision_, diagonalise
from oracles import TOLERANCE, assert_close, dense_M, dense_precision, numpy, random_factors

DTYPES = [torch.float64, torch.float32]


@st.composite
def factors(draw, lowest: float = 0.0, highest: float = 4.0):
    """Draw E (K, d) and Gamma (K, d, l) with eigenvalues of ``Gamma' E^-1 Gamma`` in a range."""
    K, d, l = draw(st.integers(1, 5)), draw(st.integers(1, 8)), draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(DTYPES))
    E = 10 ** rng.uniform(-1, 1, size=(K, d))
    ends = [lowest, highest, (lowest + highest) / 2, rng.uniform(lowest, highest)]
    Gamma = random_factors(rng, E, l, rng.choice(ends, size=(K, l)))
    return torch.tensor(E, dtype=dtype), torch.tensor(Gamma, dtype=dtype)


def gram(Gamma: torch.Tensor) -> np.ndarray:
    """Form ``Gamma Gamma'``, (K, d, d)."""
    return numpy(Gamma) @ np.swapaxes(numpy(Gamma), 1, 2)


@given(st.one_of(factors(), factors(highest=1e8)), st.sampled_from([1e-3, 0.05, 0.5]))
def test_M_is_diagonal_at_or_above_its_floor_with_the_strongest_column_first(drawn, floor):
    E, Gamma = drawn
    rotated, M = diagonalise(E, Gamma, floor)
    tolerance = TOLERANCE[E.dtype] * 0.1
    dense = dense_M(E, rotated)
    assert_close(torch.diag_embed(M), dense, tolerance)
    assert rotated.shape == Gamma.shape
    assert M.shape == (Gamma.shape[0], Gamma.shape[2])
    assert M.numel() == 0 or M.min() >= floor - torch.finfo(M.dtype).eps
    assert M.numel() == 0 or M.max() <= 1
    assert (M.diff(dim=1) >= 0).all()
    if M.numel():
        assert np.linalg.eigvalsh(dense).min() >= floor - tolerance
        assert np.linalg.eigvalsh(dense_precision(E, rotated)).min() > 0


@given(factors(highest=0.9))
def test_the_rotation_leaves_the_precision_as_it_is(drawn):
    E, Gamma = drawn
    rotated, _ = diagonalise(E, Gamma, 0.05)
    assert_close(
        torch.tensor(dense_precision(E, rotated)), dense_precision(E, Gamma), TOLERANCE[E.dtype]
    )


@given(factors(), st.sampled_from([0.05, 0.3]))
def test_a_column_beyond_the_floor_shrinks_by_the_exact_factor(drawn, floor):
    """With ``W' W = O s O'``, only directions with ``1 - s < floor`` are scaled, by
    ``sqrt((1 - floor) / (1 - M_ii))``.
    """
    E, Gamma = drawn
    rotated, _ = diagonalise(E, Gamma, floor)
    M, O = np.linalg.eigh(dense_M(E, Gamma))
    factor = np.sqrt(np.minimum(1, (1 - floor) / np.maximum(1 - M, 1e-300)))
    columns = numpy(Gamma) @ O * factor[:, None, :]
    expected = columns @ np.swapaxes(columns, 1, 2)
    assert_close(torch.tensor(gram(rotated)), expected, TOLERANCE[E.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_factor_in_numbers(dtype):
    """One column with ``Gamma' E^-1 Gamma = 4``, so M = -3: the floor 0.05 takes sqrt(0.95 / 4)."""
    E = torch.ones(1, 4, dtype=dtype)
    Gamma = torch.ones(1, 4, 1, dtype=dtype)
    shrunk, M = diagonalise(E, Gamma, 0.05)
    np.testing.assert_allclose(numpy(shrunk.abs()), math.sqrt(0.95 / 4), rtol=1e-6)
    np.testing.assert_allclose(numpy(M), 0.05, rtol=1e-6)


@given(factors(highest=0.9), st.integers(0, 4))
def test_a_component_that_satisfies_the_constraints_is_not_touched_by_one_that_does_not(drawn, at):
    E, Gamma = drawn
    bad = at % len(E)
    spoilt = Gamma.clone()
    spoilt[bad] *= 100
    rotated, M = diagonalise(E, spoilt, 0.05)
    alone, M_alone = diagonalise(E, Gamma, 0.05)
    others = torch.arange(len(E)) != bad
    torch.testing.assert_close(rotated[others], alone[others])
    torch.testing.assert_close(M[others], M_alone[others])


@given(factors())
def test_constraining_twice_changes_nothing_more(drawn):
    E, Gamma = drawn
    once, M = diagonalise(E, Gamma, 0.05)
    twice, M_again = diagonalise(E, once, 0.05)
    assert_close(torch.tensor(gram(twice)), gram(once), TOLERANCE[E.dtype])
    assert_close(M_again, M, TOLERANCE[E.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_identical_columns_become_one_strong_and_the_others_zero(dtype):
    E = torch.ones(1, 4, dtype=dtype)
    rotated, M = diagonalise(E, torch.full((1, 4, 3), 0.2, dtype=dtype), 0.05)
    strengths = numpy(rotated.norm(dim=1))[0]
    np.testing.assert_allclose(strengths, [math.sqrt(3 * 0.16), 0, 0], atol=1e-6)
    np.testing.assert_allclose(numpy(M)[0], [1 - 0.48, 1, 1], atol=1e-6)


def test_no_factors_and_zero_factors_are_fine():
    E = torch.rand(3, 4) + 0.5
    Gamma, M = diagonalise(E, torch.zeros(3, 4, 0), 0.05)
    assert Gamma.shape == (3, 4, 0)
    assert M.shape == (3, 0)
    Gamma, M = diagonalise(E, torch.zeros(3, 4, 2), 0.05)
    assert torch.equal(Gamma, torch.zeros(3, 4, 2))
    assert torch.equal(M, torch.ones(3, 2))


def test_rotated_factors_are_factor_major():
    Gamma, _ = diagonalise(torch.ones(3, 5), torch.rand(3, 5, 2) * 0.1, 0.05)
    assert Gamma.mT.is_contiguous()


@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=4),
    bound=st.one_of(
        st.floats(2.0**-20, 2.0**20, width=32),
        st.lists(st.floats(2.0**-20, 2.0**20, width=32), min_size=4, max_size=4),
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_precisions_stay_within_their_bounds_and_valid_ones_stay_as_they_are(values, bound, dtype):
    E = torch.tensor([values], dtype=dtype)
    before = E.clone()
    limit = torch.tensor(bound, dtype=dtype)
    returned = bound_precision_(E, limit if limit.ndim else bound)
    assert returned is E
    assert (E > 0).all()
    assert (limit >= E).all()
    assert E.reciprocal().isfinite().all(), "the noise variance exists"
    valid = (before <= limit) & (before >= limit * 1e-12)
    assert torch.equal(E[valid], before[valid])
    assert torch.equal(E[before > limit], limit.expand_as(E)[before > limit])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_number_as_a_bound_bounds_nothing(dtype):
    E = torch.tensor([[1e-3, 1.0, 1e3]], dtype=dtype)
    before = E.clone()
    assert torch.equal(bound_precision_(E, torch.finfo(dtype).max), before)
