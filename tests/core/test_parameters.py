"""Every conversion between precision form and generative form, against dense matrices."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from factormix import PrecisionMixture
from factormix.core.density import log_prob, operands
from factormix.core.parameters import (
    Parameters,
    change_units,
    factor_major,
    factor_rows,
    from_generative,
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
