"""Running averages, the natural step and its variances, against dense computations in float64."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factormix.core.averages import (
    Averages,
    StepOptions,
    factor_moments,
    hasten_variances,
    natural_step,
    prediction_widths,
    rebuild_precisions,
    rotate_averages,
)
from factormix.core.density import log_prob, operands
from factormix.core.expectation import expected_statistics
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters, is_definite, latent_matrix, loadings
from factormix.core.statistics import LatentSums
from mixtures import FLOOR, draw_rows, latent_sums, make_bound, make_mixture, start_averages

K, D, L, N = 3, 5, 2, 60
BOUND = make_bound(D)


def start(l: int = L, seed: int = 0) -> tuple[Averages, Parameters]:
    """Make running averages of a random mixture, and its parameters."""
    generator = torch.Generator().manual_seed(seed)
    Theta = torch.randn(K, l + 1, D, generator=generator, dtype=torch.float64)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    variances = torch.rand(K, D, generator=generator, dtype=torch.float64) + 0.5
    return rotate_averages(Averages(Theta, variances, weights), BOUND, FLOOR)


def wide_rows(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, D, generator=generator, dtype=torch.float64) * 1.5


@pytest.mark.parametrize("rate", [0.1, 0.7, 1.0])
def test_a_step_solves_the_averaged_least_squares(rate):
    """A running copy of ``sum R x z'`` would give the same, but none is needed."""
    averages, parameters = start()
    found = expected_statistics(parameters, wide_rows())
    Theta, V, weight = (t.numpy().copy() for t in averages)
    A = np.eye(L + 1) * weight[:, None, None]
    B_running = A @ Theta
    S_running = weight[:, None] * V + np.einsum("kjd,kjd->kd", Theta, B_running)
    mean = [t.numpy() / N for t in latent_sums(found, K)]
    A, B, S = (
        (1 - rate) * old + rate * new
        for old, new in zip((A, B_running, S_running), mean, strict=True)
    )
    solution = np.linalg.solve(A, B)
    variances = (S - np.einsum("kjd,kjd->kd", solution, B)) / A[:, 0, 0, None]

    options = StepOptions(rate, BOUND, FLOOR, expand=False)
    _, after = natural_step(averages, parameters, found, options)
    np.testing.assert_allclose(after.log_weights.exp(), A[:, 0, 0] / A[:, 0, 0].sum(), 1e-9)
    np.testing.assert_allclose(after.means, solution[:, 0], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(1 / after.precision_diag, variances, rtol=1e-6)
    ours = loadings(after)
    explained = np.einsum("kid,kie->kde", solution[:, 1:], solution[:, 1:])
    np.testing.assert_allclose(ours @ ours.mT, explained, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("expand", [False, True])
def test_steps_of_rate_one_are_em_and_never_lower_the_likelihood(expand):
    averages, parameters = start()
    x, options = wide_rows(), StepOptions(1.0, BOUND, FLOOR, expand=expand)
    before = -np.inf
    for _ in range(30):
        found = expected_statistics(parameters, x)
        now = float(found.log_likelihood)
        assert now >= before - 1e-9
        before = now
        averages, parameters = natural_step(averages, parameters, found, options)
    exact = PrecisionMixture.from_parameters(parameters).log_prob(x).sum().item()
    assert exact >= before - 1e-9


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_expansion_standardises_the_latent_variables(rate):
    """z = z_mean + L u with u standard: the same line through the data, in other coordinates."""
    averages, parameters = start()
    found = expected_statistics(parameters, wide_rows())
    A_batch, _, _ = latent_sums(found, K)
    A = rate * A_batch / N + (1 - rate) * averages.weight.view(K, 1, 1) * torch.eye(L + 1)
    same = copy.deepcopy((averages, parameters, found))
    _, plain = natural_step(*same, StepOptions(rate, BOUND, FLOOR, expand=False))
    _, expanded = natural_step(averages, parameters, found, StepOptions(rate, BOUND, FLOOR))
    torch.testing.assert_close(expanded.precision_diag, plain.precision_diag)
    torch.testing.assert_close(expanded.log_weights, plain.log_weights)
    # E[x] of the component is Theta' E[1, z] in any coordinates.
    r = A[:, 0, 0]
    z_mean, second = A[:, 0, 1:] / r.unsqueeze(-1), A[:, 1:, 1:] / r.view(K, 1, 1)
    covariance = second - z_mean.unsqueeze(1) * z_mean.unsqueeze(2)
    assert torch.linalg.eigvalsh(covariance).min() > 0
    shift = expanded.means - plain.means
    inside = torch.linalg.lstsq(loadings(plain), shift.unsqueeze(-1)).solution
    torch.testing.assert_close(loadings(plain) @ inside, shift.unsqueeze(-1))
    ours = torch.logdet(loadings(expanded).mT @ loadings(expanded))
    theirs = torch.logdet(loadings(plain).mT @ loadings(plain))
    torch.testing.assert_close(ours, theirs + torch.logdet(covariance))


def test_expansion_finds_the_mean_of_a_strong_factor_at_once():
    """The mean is wrong along its loading, where classical EM leaves it."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.ones(1, D, dtype=torch.float64)
    z = torch.randn(500, 1, generator=generator, dtype=torch.float64)
    noise = 0.01 * torch.randn(500, D, generator=generator, dtype=torch.float64)
    x = z @ direction + noise
    errors = {}
    for expand in (False, True):
        Theta = torch.cat([0.5 * direction, direction]).unsqueeze(0)
        one = torch.ones(1, dtype=torch.float64)
        averages = Averages(Theta, torch.full((1, D), 1e-4, dtype=torch.float64), one)
        averages, parameters = rotate_averages(averages, BOUND, FLOOR)
        for _ in range(5):
            found = expected_statistics(parameters, x)
            options = StepOptions(1.0, BOUND, FLOOR, expand=expand)
            averages, parameters = natural_step(averages, parameters, found, options)
        errors[expand] = float((parameters.means - x.mean(dim=0)).norm())
    assert errors[True] < 1e-3
    assert errors[False] > 0.5


def test_the_bound_and_the_floor_hold_after_a_step():
    averages, parameters = start()
    bound = torch.tensor([0.1, 1.0, 2.0, 3.0, 1e3], dtype=torch.float64)
    found = expected_statistics(parameters, wide_rows())
    _, after = natural_step(averages, parameters, found, StepOptions(0.5, bound, 0.3))
    assert (after.precision_diag <= bound * (1 + 1e-12)).all()
    assert (after.latent_variances >= 0.3).all()
    E, Gamma = after.precision_diag, after.precision_factors
    M = torch.eye(L, dtype=E.dtype) - Gamma.mT @ (Gamma / E.unsqueeze(-1))
    torch.testing.assert_close(M, torch.diag_embed(after.latent_variances))


def test_a_row_very_far_away_reaches_one_component_only():
    """Even a share of 1e-30 of its square would change the variances of the others."""
    variances = {}
    for far in (1e2, 1e15):
        Theta = torch.zeros(3, 2, D, dtype=torch.float64)
        Theta[:, 0] = torch.tensor([-20.0, 0.0, 20.0]).unsqueeze(-1)
        Theta[:, 1, 0] = 0.5
        third = torch.full((3,), 1 / 3, dtype=torch.float64)
        averages = Averages(Theta, third.unsqueeze(-1).repeat(1, D), third)
        averages, parameters = rotate_averages(averages, BOUND, FLOOR)
        x = torch.cat([wide_rows(), torch.full((1, D), far, dtype=torch.float64)])
        found = expected_statistics(parameters, x)
        _, after = natural_step(averages, parameters, found, StepOptions(0.1, BOUND, FLOOR))
        variances[far] = 1 / after.precision_diag[:2]
    torch.testing.assert_close(variances[1e15], variances[1e2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("spoil", ["indefinite", "empty", "one sample", "far"])
def test_moments_without_a_factor_leave_a_valid_mixture(spoil, expand, dtype):
    """Rounding can make second moments indefinite; few or far samples make them singular."""
    averages, parameters = start()
    averages = Averages(*(t.to(dtype) for t in averages))
    parameters = Parameters(*(t.to(dtype) for t in parameters))
    x = wide_rows().to(dtype)
    x = {"one sample": x[:1], "far": x * 1e4}.get(spoil, x)
    found = expected_statistics(parameters, x)
    assert isinstance(found.sums, LatentSums)
    A = found.sums.A
    if spoil == "indefinite":
        A[0, 1, 2] = A[0, 2, 1] = 2 * A[0].diagonal().max()
    if spoil == "empty":
        for tensor in found.sums.tensors.values():
            tensor[0].zero_()
    bound, floor = BOUND.to(dtype), 1e-6
    options = StepOptions(1.0, bound, floor, expand=expand)
    averages, after = natural_step(averages, parameters, found, options)
    for tensor in (*averages, *after):
        assert tensor.isfinite().all()
    M = after.latent_variances
    assert ((floor <= M) & (M <= 1)).all()
    assert ((after.precision_diag > 0) & (after.precision_diag <= 1.001 * bound)).all()
    assert expected_statistics(after, x).log_likelihood.isfinite()


def moments(rows: Tensor) -> Tensor:
    """Average ``[1, z][1, z]'`` over rows of z, (1, l+1, l+1)."""
    one_z = torch.cat([torch.ones_like(rows[:, :1]), rows], dim=1)
    return (one_z.mT @ one_z / len(rows)).unsqueeze(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight", [1.0, 1e-3])
def test_second_moments_are_factored_and_inverted(weight, dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 3, generator=generator, dtype=torch.float64).to(dtype)
    A = weight * moments(rows @ rows[:3] + 0.5)
    T, inverse = factor_moments(A)
    tolerance = 1e3 * torch.finfo(dtype).eps
    torch.testing.assert_close(weight * T @ T.mT, A, rtol=tolerance, atol=tolerance * weight)
    torch.testing.assert_close(
        inverse @ A, torch.eye(4, dtype=dtype)[None], rtol=0, atol=50 * tolerance
    )
    torch.testing.assert_close(T[:, 1:, 0], A[:, 0, 1:] / weight, rtol=tolerance, atol=tolerance)
    assert (T.triu(diagonal=1) == 0).all()


def test_singular_moments_have_a_factor():
    """With all samples in one place, only rounding is left on the diagonal."""
    A = moments(torch.tensor([[1.3, -0.7, 0.9]]).repeat(7, 1))
    T, inverse = factor_moments(A)
    torch.testing.assert_close(T @ T.mT, A, rtol=1e-4, atol=1e-4)
    assert inverse.isfinite().all()


def test_only_the_diagonal_of_indefinite_moments_is_used():
    A = torch.tensor([[[2.0, 1.0, 0.0], [1.0, 8.0, 50.0], [0.0, 50.0, 18.0]]])
    T, inverse = factor_moments(A)
    torch.testing.assert_close(T, torch.diag_embed(torch.tensor([[1.0, 2.0, 3.0]])))
    torch.testing.assert_close(inverse, torch.diag_embed(torch.tensor([[1 / 2, 1 / 8, 1 / 18]])))


def test_components_without_samples_have_a_finite_inverse():
    T, inverse = factor_moments(torch.zeros(2, 3, 3))
    torch.testing.assert_close(T, torch.eye(3).repeat(2, 1, 1))
    torch.testing.assert_close(inverse, 2e6 * torch.eye(3).repeat(2, 1, 1))


@pytest.mark.parametrize("widths", [None, torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64)])
@pytest.mark.parametrize("bound", [1e6, 1.2])
def test_turned_averages_give_the_precision_form_to_the_last_digit(bound, widths):
    (Theta, V, weight), _ = start()
    # A column that explains nothing is set to zero.
    Theta[1, 2] = 1e-12
    most = make_bound(D, bound)
    averages, parameters = rotate_averages(Averages(Theta, V, weight), most, FLOOR, widths=widths)
    E, Gamma = rebuild_precisions(
        averages.Theta, averages.V, parameters.latent_variances, most, widths
    )
    assert (parameters.precision_factors == 0).any()
    assert torch.equal(E, parameters.precision_diag)
    assert torch.equal(Gamma, parameters.precision_factors.mT)
    out = torch.empty_like(E), torch.empty_like(Gamma)
    rebuild_precisions(
        averages.Theta, averages.V, parameters.latent_variances, most, widths, out=out
    )
    assert torch.equal(out[0], E)
    assert torch.equal(out[1], Gamma)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("floor", [1e-6, 1e-9])
@pytest.mark.parametrize("seed", range(3))
def test_collapsing_variances_leave_a_definite_precision(seed, dtype, floor):
    """A few variances far below the others make all columns of Lambda nearly parallel."""
    generator = torch.Generator().manual_seed(seed)
    Theta, most = torch.randn(K, 9, 30, generator=generator).to(dtype), make_bound(30, 1e16)
    V = torch.full((K, 30), 1e-5, dtype=dtype)
    V[:, :3] = torch.tensor([1e-14, 1e-12, 1e-10])
    averages = Averages(Theta.clone(), V, torch.full((K,), 1 / K, dtype=dtype))
    averages, parameters = rotate_averages(averages, most.to(dtype), floor)
    E, Gamma, M = parameters[2:]
    assert is_definite(parameters)
    full = latent_matrix(E, Gamma) / (M.sqrt().unsqueeze(1) * M.sqrt().unsqueeze(2))
    torch.testing.assert_close(full, torch.eye(8).double().expand_as(full), rtol=0, atol=0.5)
    rebuilt = rebuild_precisions(*averages[:2], M, most.to(dtype))
    assert torch.equal(rebuilt[1], Gamma.mT)
    # The format bounds the floor. Nothing else is lost.
    floor = max(floor, 8 * torch.finfo(dtype).eps)
    whitened = torch.linalg.svdvals(Theta[:, 1:].double() * E.double().sqrt().unsqueeze(1))
    expected = 1 / (1 + whitened.square().clamp(max=1 / floor - 1))
    torch.testing.assert_close(M.double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("l", [1, 3, 4])
def test_hastened_steps_never_lose_and_arrive_sooner(l: int):
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(D, D, generator=generator, dtype=torch.float64)
    x = torch.randn(500, D, generator=generator, dtype=torch.float64) @ mixing
    runs = {}
    for hasten in (False, True):
        averages, parameters = start(l, seed=4)
        options = StepOptions(1.0, BOUND, FLOOR, hasten=hasten)
        likelihoods = []
        for _ in range(60):
            found = expected_statistics(parameters, x)
            likelihoods.append(found.log_likelihood.item() / len(x))
            averages, parameters = natural_step(averages, parameters, found, options)
        runs[hasten] = np.array(likelihoods)
        assert (np.diff(runs[hasten]) > -1e-6).all()
    if l >= 3:
        assert runs[True][20] > runs[False][20]


def test_a_hastened_variance_goes_at_least_as_far_as_em():
    before = torch.tensor([[1e-6, 1.0, 1.0, 0.0, -1e-9]], dtype=torch.float64)
    em = torch.tensor([[0.5, 0.1, 1.1, 0.3, 1.0]], dtype=torch.float64)
    V = hasten_variances(em, before, torch.full_like(em, 0.5))
    torch.testing.assert_close(V, torch.tensor([[0.5, 0.1, 1.2, 0.3, 1.0]], dtype=torch.float64))


@pytest.mark.parametrize("l", [0, 2])
def test_prediction_widths_are_nearly_the_best_for_new_rows(l: int):
    """Variances that EM finds on few rows are too small; compare other factors."""
    d, n = 400, 40
    truth = make_mixture(K=1, d=d, l=l, seed=3)
    x, new = draw_rows(truth, n, seed=1), draw_rows(truth, 4000, seed=2)
    averages, parameters = start_averages(truth)
    options = StepOptions(1.0, make_bound(d), FLOOR, expand=False)
    for _ in range(300 if l else 1):
        found = expected_statistics(parameters, x)
        averages, parameters = natural_step(averages, parameters, found, options)
    width = float(prediction_widths(averages.weight, parameters.latent_variances, n))

    def score_new_rows(factor: float) -> float:
        widths = torch.full((1,), factor, dtype=torch.float64)
        _, wider = rotate_averages(copy.deepcopy(averages), make_bound(d), FLOOR, widths=widths)
        return float(log_prob(new, operands(wider)).mean())

    best = max(score_new_rows(math.exp(i / 20)) for i in range(25))
    plain = score_new_rows(1.0)
    gain = score_new_rows(width) - plain
    assert gain > 0.001 * d
    assert gain > 0.75 * (best - plain)


@pytest.mark.parametrize("l", [0, 1, 3])
def test_averages_are_learned_as_without_wider_variances(l: int):
    """With one component, steps by all rows end at the maximum likelihood."""
    d, n = 8, 30
    x = draw_rows(make_mixture(K=1, d=d, l=l, seed=3), n)
    found = []
    for n_rows in (None, float(n)):
        averages, parameters = start_averages(make_mixture(K=1, d=d, l=l, seed=4))
        options = StepOptions(1.0, make_bound(d), FLOOR, n_rows=n_rows)
        for _ in range(1000 if l else 2):
            statistics = expected_statistics(parameters, x)
            averages, parameters = natural_step(averages, parameters, statistics, options)
        found.append((averages, parameters))
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
    width = float(prediction_widths(share, latent, n_rows))
    p, n = 1 + l * (1 - M), weight * n_rows
    assert 1 <= width <= 2 + 1e-12
    if n > 3 * p:
        assert width == pytest.approx((n + p) / (n - p), rel=1e-12)


def test_a_step_widens_only_variances_and_keeps_to_the_bound():
    K, d, l, B, n_rows = 40, 6, 2, 500, 900.0
    truth = make_mixture(K=K, d=d, l=l)
    x, bound = draw_rows(truth, B), make_bound(d, float(truth.precision_diag.median()))
    (plain, _), (wide, found) = (
        natural_step(
            *start_averages(truth),
            expected_statistics(truth, x),
            StepOptions(0.1, bound, FLOOR, n_rows=rows, everywhere=True),
        )
        for rows in (None, n_rows)
    )
    torch.testing.assert_close(wide.V, plain.V)
    torch.testing.assert_close(wide.weight, plain.weight)
    torch.testing.assert_close(wide.Theta[:, 0], plain.Theta[:, 0])
    M = start_averages(truth)[1].latent_variances
    widths = prediction_widths(truth.log_weights.exp(), M, n_rows)
    expected = torch.minimum(1 / (plain.V * widths.unsqueeze(1)), bound)
    torch.testing.assert_close(found.precision_diag, expected)
    assert (found.precision_diag == bound).any()
    assert (found.precision_diag < bound).any()


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_step_of_some_components_equals_the_step_of_all(everywhere: bool):
    K, d, l = 900, 20, 2
    truth = make_mixture(K=K, d=d, l=l)
    x, bound = draw_rows(truth, 400), make_bound(d, float(truth.precision_diag.median()))
    widths = torch.full((K,), 1.5, dtype=torch.float64)
    some, of_all = (start_averages(truth, bound, widths) for _ in range(2))
    statistics = expected_statistics(some[1], x)
    touched = statistics.sums.touched
    assert touched is not None
    assert len(touched) < K
    spread = statistics._replace(sums=statistics.sums.spread_to_all(K))
    options = StepOptions(0.1, bound, FLOOR, n_rows=900.0, everywhere=everywhere)
    some = natural_step(*some, statistics, options)
    of_all = natural_step(*of_all, spread, options)
    for one, other in zip((*some[0], *some[1][2:]), (*of_all[0], *of_all[1][2:]), strict=True):
        torch.testing.assert_close(one[touched], other[touched])


@pytest.mark.parametrize("most", [1e6, 1e-3])
def test_a_step_from_wide_variances_equals_the_step_from_narrow_ones(most: float):
    """Once rows are assigned to components, wider variances do not change the averages."""
    d, l, n = 7, 2, 60
    truth = make_mixture(K=1, d=d, l=l)
    x, bound = draw_rows(truth, n), make_bound(d, most)
    found = []
    for widths in (None, torch.full((1,), 1.7, dtype=torch.float64)):
        averages, _ = start_averages(truth)
        averages, parameters = rotate_averages(averages, bound, FLOOR, widths=widths)
        options = StepOptions(0.3, bound, FLOOR, n_rows=None if widths is None else float(n))
        statistics = expected_statistics(parameters, x)
        found.append(natural_step(averages, parameters, statistics, options)[0])
    narrow, wide = found
    torch.testing.assert_close(wide.V, narrow.V)
    torch.testing.assert_close(wide.Theta[:, 0], narrow.Theta[:, 0])
    torch.testing.assert_close(*(t.Theta[:, 1:].mT @ t.Theta[:, 1:] for t in found))


def test_a_new_bound_does_not_change_the_averages():
    d = 7
    truth = make_mixture(K=1, d=d)
    x, last = draw_rows(truth, 60), make_bound(d, 0.5)
    V = []
    for bound in (last, 2 * last):
        averages, parameters = start_averages(truth, last)
        statistics = expected_statistics(parameters, x)
        options = StepOptions(0.3, bound, FLOOR, n_rows=1e12, last_bound=last)
        V.append(natural_step(averages, parameters, statistics, options)[0].V)
    torch.testing.assert_close(*V)
