"""Conversions against dense matrices, and the constraints that hold after every step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factormix import PrecisionMixture
from factormix.core.density import log_prob, operands
from factormix.core.parameters import (
    Parameters,
    bound_precision_,
    change_units,
    diagonalise,
    effective_factors,
    factor_major,
    factor_rows,
    from_generative,
    is_definite,
    latent_variances,
    loadings,
    noise_variances,
)
from oracles import (
    TOLERANCE,
    Case,
    assert_close,
    cases,
    dense_M,
    dense_precision,
    numpy,
    random_case,
    random_factors,
)


def parameters_of(case: Case) -> Parameters:
    return Parameters(*(t.detach() for t in case.mixture.precision_form))


def covariance(Lambda: torch.Tensor, D: torch.Tensor) -> np.ndarray:
    """Form ``Sigma = D + Lambda Lambda'``, (K, d, d)."""
    L, D64 = numpy(Lambda), numpy(D)
    return D64[:, :, None] * np.eye(D64.shape[1]) + L @ np.swapaxes(L, 1, 2)


@given(cases())
def test_loadings_and_noise_variances_make_the_covariance(case):
    values = parameters_of(case)
    Sigma = covariance(loadings(values), noise_variances(values.precision_diag))
    assert_close(torch.tensor(Sigma), case.dense.Sigma, TOLERANCE[case.dtype])


@given(cases())
def test_latent_variances_are_the_diagonal_of_M(case):
    values = parameters_of(case)
    M = dense_M(values.precision_diag, values.precision_factors)
    expected = np.diagonal(M, axis1=1, axis2=2)
    computed = latent_variances(values.precision_diag, values.precision_factors)
    assert_close(computed, expected, TOLERANCE[case.dtype])
    # Relative to M itself, whose logarithm enters the likelihood.
    np.testing.assert_allclose(numpy(computed), expected, rtol=TOLERANCE[case.dtype])


def test_a_small_latent_variance_keeps_its_digits_in_float32():
    d, M = 784, 1e-3
    generator = torch.Generator().manual_seed(1)
    E = torch.rand(1, d, generator=generator) + 0.5
    w = torch.nn.functional.normalize(torch.randn(1, d, 1, generator=generator), dim=1)
    Gamma = w * np.sqrt(1 - M) * E.sqrt().unsqueeze(-1)
    np.testing.assert_allclose(
        numpy(latent_variances(E, Gamma)), np.diagonal(dense_M(E, Gamma), axis1=1, axis2=2), 1e-6
    )


@given(cases())
def test_generative_form_comes_back_as_the_same_precision(case):
    values = parameters_of(case)
    again = from_generative(
        values.logits, values.means, loadings(values), noise_variances(values.precision_diag)
    )
    tolerance = TOLERANCE[case.dtype]
    assert_close(again.precision_diag, case.dense.E, tolerance)
    P = dense_precision(again.precision_diag, again.precision_factors)
    assert_close(torch.tensor(P), case.dense.P, tolerance)
    assert_close(again.latent_variances, values.latent_variances, tolerance)


@given(
    K=st.integers(1, 5),
    d=st.integers(1, 8),
    l=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_any_generative_model_has_a_precision_form(K, d, l, seed, dtype):
    rng = np.random.default_rng(seed)
    Lambda = torch.tensor(rng.normal(size=(K, d, l)), dtype=dtype)
    D = torch.tensor(10 ** rng.uniform(-0.5, 0.5, size=(K, d)), dtype=dtype)
    made = from_generative(torch.zeros(K), torch.zeros(K, d), Lambda, D)
    tolerance = TOLERANCE[dtype]
    P = dense_precision(made.precision_diag, made.precision_factors)
    assert_close(torch.tensor(P), np.linalg.inv(covariance(Lambda, D)), tolerance)
    M = dense_M(made.precision_diag, made.precision_factors)
    assert_close(torch.diag_embed(made.latent_variances), M, tolerance)
    assert (made.latent_variances > 0).all()
    assert (made.latent_variances.diff(dim=1) >= 0).all(), "the strongest column comes first"


def test_loadings_of_zero_make_a_diagonal_mixture():
    zeros = torch.zeros(2, 3)
    made = from_generative(torch.zeros(2), zeros, torch.zeros(2, 3, 2), torch.ones(2, 3))
    assert torch.equal(made.precision_factors, torch.zeros(2, 3, 2))
    assert torch.equal(made.latent_variances, torch.ones(2, 2))


@given(
    cases(dtypes=(torch.float64,)),
    st.floats(-1e4, 1e4),
    st.floats(1e-3, 1e3),
    st.booleans(),
)
def test_other_units_change_the_density_by_the_jacobian_alone(case, offset, scale, per_feature):
    d = case.x.shape[1]
    factor = torch.linspace(0.5, 2, d, dtype=torch.float64) if per_feature else torch.ones(())
    scales = (scale * factor).double()
    values = parameters_of(case)
    shift = torch.full((d,), offset, dtype=torch.float64)
    changed = change_units(values, shift, scales)
    jacobian = scales.expand(d).log().sum()
    before = log_prob(case.x, operands(values))
    after = log_prob(shift + scales * case.x, operands(changed))
    # Adding the offset rounds x itself, by this much in units of the mixture.
    rounding = 1e3 * abs(offset) / scale * np.finfo(np.float64).eps
    assert_close(after + jacobian, before, 1e-10 + rounding)


def test_factors_lie_in_memory_as_rows():
    factors = torch.arange(24.0).view(2, 4, 3)
    laid_out = factor_major(factors)
    assert torch.equal(laid_out, factors)
    rows = factor_rows(laid_out)
    assert rows.data_ptr() == laid_out.data_ptr(), "rows of factor-major factors are a view"
    assert torch.equal(rows, torch.stack([factors[k, :, j] for k in range(2) for j in range(3)]))
    assert torch.equal(factor_rows(factors), rows), "any layout gives the same rows"


def test_the_mixture_keeps_its_factors_in_that_layout():
    case = random_case(3, 5, 2)
    mixtures = {
        "constructor": case.mixture,
        "other dtype": case.mixture.to(torch.float32),
        "generative": PrecisionMixture.from_generative(
            torch.ones(2), torch.zeros(2, 4), torch.ones(2, 4, 2), torch.ones(2, 4)
        ),
    }
    for name, mixture in mixtures.items():
        factors = mixture.precision_factors
        assert factor_rows(factors).data_ptr() == factors.data_ptr(), name


def test_log_weights_are_normalised():
    values = Parameters(
        torch.tensor([0.0, 700.0, 701.0]),
        *[torch.zeros(3, 1)] * 2,
        *[torch.zeros(3, 1, 0), torch.zeros(3, 0)],
    )
    assert values.shape == (3, 1, 0)
    np.testing.assert_allclose(values.log_weights.exp().sum(), 1, rtol=1e-6)


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


@given(cases())
def test_effective_factors_are_a_trace(case):
    """The sum of ``1 - M_jj`` is the trace of ``Sigma^-1 Lambda Lambda'``."""
    E, Sigma = case.dense.E, case.dense.Sigma
    explained = Sigma - np.eye(E.shape[1]) / E[:, :, None]
    expected = np.trace(case.dense.P @ explained, axis1=1, axis2=2)
    found = effective_factors(case.mixture.precision_form).detach()
    assert_close(found, expected, 10 * TOLERANCE[case.dtype])
    assert (found <= case.mixture.n_factors + 1e-6).all()


@pytest.mark.parametrize("l", [1, 2])
@pytest.mark.parametrize(("least", "definite"), [(1e-6, True), (-1e-6, False)])
def test_a_precision_is_definite_if_the_least_eigenvalue_of_M_is_positive(l, least, definite):
    case = random_case(3, 5, l, seed=0, largest_share=0.5)
    E, Gamma = case.arguments[2:]
    share = torch.linalg.eigvalsh(Gamma[1].mT @ (Gamma[1] / E[1].unsqueeze(-1))).max()
    Gamma[1] *= ((1 - least) / share).sqrt()
    values = Parameters(torch.zeros(3), case.arguments[1], E, Gamma, torch.ones(3, l))
    assert is_definite(values) == definite
    assert (np.linalg.eigvalsh(dense_precision(E, Gamma)) > 0).all() == definite


def test_a_precision_without_factors_is_definite():
    case = random_case(3, 5, 0)
    assert is_definite(case.mixture.precision_form)
