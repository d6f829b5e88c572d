"""The complete-data statistics and the natural step, against dense computations in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from factormix.core.averages import (
    Running,
    factor_moments,
    natural_step,
    precision_form,
    turned_form,
)
from factormix.core.expectation import expected_statistics
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters, loadings
from factormix.core.statistics import Statistics

K, D, L, N = 3, 5, 2, 60
BOUND = torch.full((D,), 1e6, dtype=torch.float64)
FLOOR = 1e-9


def start(l: int = L, seed: int = 0) -> tuple[Running, Parameters]:
    """Make running averages of a random mixture, and its parameters."""
    generator = torch.Generator().manual_seed(seed)
    Theta = torch.randn(K, l + 1, D, generator=generator, dtype=torch.float64)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    variances = torch.rand(K, D, generator=generator, dtype=torch.float64) + 0.5
    running = Running(Theta, variances, weights)
    return precision_form(running, BOUND, FLOOR)


def rows(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, D, generator=generator, dtype=torch.float64) * 1.5


def dense_statistics(parameters: Parameters, x: Tensor) -> tuple[np.ndarray, ...]:
    """Compute log-likelihood, A, B and S from d x d covariances, component by component."""
    pi = parameters.log_weights.exp().numpy()
    Lambda, mu = loadings(parameters).numpy(), parameters.means.numpy()
    noise = 1 / parameters.precision_diag.numpy()
    X, l = x.numpy(), Lambda.shape[2]
    Sigma = [np.diag(noise[k]) + Lambda[k] @ Lambda[k].T for k in range(K)]
    joint = np.stack(
        [pi[k] * multivariate_normal(mu[k], Sigma[k]).pdf(X) for k in range(K)], axis=1
    )
    R = joint / joint.sum(axis=1, keepdims=True)
    A, B = np.zeros((K, l + 1, l + 1)), np.zeros((K, l + 1, D))
    for k in range(K):
        gain = Lambda[k].T @ np.linalg.inv(Sigma[k])
        covariance = np.eye(l) - gain @ Lambda[k]
        one_z = np.concatenate([np.ones((len(X), 1)), (X - mu[k]) @ gain.T], axis=1)
        A[k] = (R[:, k, None] * one_z).T @ one_z
        A[k, 1:, 1:] += R[:, k].sum() * covariance
        B[k] = (R[:, k, None] * one_z).T @ X
    return np.log(joint.sum(axis=1)).sum(), A, B, R.T @ X**2


@pytest.mark.parametrize("l", [0, 1, 2, 3])
def test_statistics_equal_dense_ones(l):
    _, parameters = start(l)
    x = rows()
    found = expected_statistics(parameters, x)
    assert float(found.n_samples) == N
    for ours, theirs in zip(found[1:5], dense_statistics(parameters, x), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-9, atol=1e-9)


def test_weights_count_as_repetitions():
    _, parameters = start()
    x = rows()
    times = torch.arange(N) % 3
    weighted = expected_statistics(parameters, x, times.double())
    repeated = expected_statistics(parameters, x.repeat_interleave(times, dim=0))
    for ours, theirs in zip(weighted[:7], repeated[:7], strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rate", [0.1, 0.7, 1.0])
def test_a_step_solves_the_averaged_least_squares(rate):
    """What a running copy of ``sum R x z'`` would give, without keeping one."""
    running, parameters = start()
    found = expected_statistics(parameters, rows())
    Theta, V, weight = (t.numpy().copy() for t in running)
    A = np.eye(L + 1) * weight[:, None, None]
    B_running = A @ Theta
    S_running = weight[:, None] * V + np.einsum("kjd,kjd->kd", Theta, B_running)
    mean = [t.numpy() / N for t in found[2:5]]
    A, B, S = (
        (1 - rate) * old + rate * new
        for old, new in zip((A, B_running, S_running), mean, strict=True)
    )
    solution = np.linalg.solve(A, B)
    variances = (S - np.einsum("kjd,kjd->kd", solution, B)) / A[:, 0, 0, None]

    _, after = natural_step(running, parameters, found, rate, BOUND, FLOOR, expand=False)
    np.testing.assert_allclose(after.log_weights.exp(), A[:, 0, 0] / A[:, 0, 0].sum(), 1e-9)
    np.testing.assert_allclose(after.means, solution[:, 0], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(1 / after.precision_diag, variances, rtol=1e-6)
    ours = loadings(after)
    explained = np.einsum("kid,kie->kde", solution[:, 1:], solution[:, 1:])
    np.testing.assert_allclose(ours @ ours.mT, explained, rtol=1e-5, atol=1e-7)


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
    """All samples in one place leave nothing but rounding on the diagonal."""
    A = moments(torch.tensor([[1.3, -0.7, 0.9]]).repeat(7, 1))
    T, inverse = factor_moments(A)
    torch.testing.assert_close(T @ T.mT, A, rtol=1e-4, atol=1e-4)
    assert inverse.isfinite().all()


def test_of_indefinite_moments_the_diagonal_is_used():
    A = torch.tensor([[[2.0, 1.0, 0.0], [1.0, 8.0, 50.0], [0.0, 50.0, 18.0]]])
    T, inverse = factor_moments(A)
    torch.testing.assert_close(T, torch.diag_embed(torch.tensor([[1.0, 2.0, 3.0]])))
    torch.testing.assert_close(inverse, torch.diag_embed(torch.tensor([[1 / 2, 1 / 8, 1 / 18]])))


def test_components_without_samples_have_a_small_but_finite_inverse():
    T, inverse = factor_moments(torch.zeros(2, 3, 3))
    torch.testing.assert_close(T, torch.eye(3).repeat(2, 1, 1))
    torch.testing.assert_close(inverse, 2e6 * torch.eye(3).repeat(2, 1, 1))


def test_a_row_at_the_end_of_the_world_reaches_one_component_only():
    """Even a share of 1e-30 of its square would be felt."""
    variances = {}
    for far in (1e2, 1e15):
        Theta = torch.zeros(3, 2, D, dtype=torch.float64)
        Theta[:, 0] = torch.tensor([-20.0, 0.0, 20.0]).unsqueeze(-1)
        Theta[:, 1, 0] = 0.5
        third = torch.full((3,), 1 / 3, dtype=torch.float64)
        running = Running(Theta, third.unsqueeze(-1).repeat(1, D), third)
        running, parameters = precision_form(running, BOUND, FLOOR)
        x = torch.cat([rows(), torch.full((1, D), far, dtype=torch.float64)])
        found = expected_statistics(parameters, x)
        _, after = natural_step(running, parameters, found, 0.1, BOUND, FLOOR)
        variances[far] = 1 / after.precision_diag[:2]
    torch.testing.assert_close(variances[1e15], variances[1e2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("spoil", ["indefinite", "empty", "one sample", "far"])
def test_moments_that_have_no_factor_leave_a_sound_mixture(spoil, expand, dtype):
    """Rounding can make second moments indefinite; few or far samples make them singular."""
    running, parameters = start()
    running = Running(*(t.to(dtype) for t in running))
    parameters = Parameters(*(t.to(dtype) for t in parameters))
    x = rows().to(dtype)
    x = {"one sample": x[:1], "far": x * 1e4}.get(spoil, x)
    found = expected_statistics(parameters, x)
    if spoil == "indefinite":
        found.A[0, 1, 2] = found.A[0, 2, 1] = 2 * found.A[0].diagonal().max()
    if spoil == "empty":
        for sums in (found.A[0], found.B[0], found.S[0]):
            sums.zero_()
    bound, floor = BOUND.to(dtype), 1e-6
    running, after = natural_step(running, parameters, found, 1.0, bound, floor, expand=expand)
    for tensor in (*running, *after):
        assert tensor.isfinite().all()
    M = after.latent_variances
    assert ((floor <= M) & (M <= 1)).all()
    assert ((after.precision_diag > 0) & (after.precision_diag <= 1.001 * bound)).all()
    assert expected_statistics(after, x).log_likelihood.isfinite()


@pytest.mark.parametrize("expand", [False, True])
def test_steps_of_rate_one_are_em_and_never_lower_the_likelihood(expand):
    running, parameters = start()
    x = rows()
    before = -np.inf
    for _ in range(30):
        found = expected_statistics(parameters, x)
        now = float(found.log_likelihood)
        assert now >= before - 1e-9
        before = now
        running, parameters = natural_step(
            running, parameters, found, 1.0, BOUND, FLOOR, expand=expand
        )
    exact = PrecisionMixture.from_parameters(parameters).log_prob(x).sum().item()
    assert exact >= before - 1e-9


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_expansion_standardises_the_latent_variables(rate):
    """z = z_mean + L u with u standard: the same line through the data, in other coordinates."""
    running, parameters = start()
    found = expected_statistics(parameters, rows())
    A = rate * found.A / N + (1 - rate) * running.weight.view(K, 1, 1) * torch.eye(L + 1)
    copies = [tuple(t.clone() for t in part) for part in (running, parameters, found[:7])]
    _, plain = natural_step(
        Running(*copies[0]), Parameters(*copies[1]), Statistics(*copies[2]),
        rate, BOUND, FLOOR, expand=False,
    )  # fmt: skip
    _, expanded = natural_step(running, parameters, found, rate, BOUND, FLOOR)
    torch.testing.assert_close(expanded.precision_diag, plain.precision_diag)
    torch.testing.assert_close(expanded.log_weights, plain.log_weights)
    # E[x] of the component is Theta' E[1, z], whatever the coordinates.
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


def test_the_mean_of_a_strong_factor_is_found_at_once():
    """A mean that is wrong along its loading: classical EM leaves it there."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.ones(1, D, dtype=torch.float64)
    z = torch.randn(500, 1, generator=generator, dtype=torch.float64)
    noise = 0.01 * torch.randn(500, D, generator=generator, dtype=torch.float64)
    x = z @ direction + noise
    errors = {}
    for expand in (False, True):
        Theta = torch.cat([0.5 * direction, direction]).unsqueeze(0)
        one = torch.ones(1, dtype=torch.float64)
        running = Running(Theta, torch.full((1, D), 1e-4, dtype=torch.float64), one)
        running, parameters = precision_form(running, BOUND, FLOOR)
        for _ in range(5):
            found = expected_statistics(parameters, x)
            running, parameters = natural_step(
                running, parameters, found, 1.0, BOUND, FLOOR, expand=expand
            )
        errors[expand] = float((parameters.means - x.mean(dim=0)).norm())
    assert errors[True] < 1e-3
    assert errors[False] > 0.5


def test_losses_are_what_samples_lose_without_components():
    _, parameters = start()
    x = 10 * rows()
    times = (torch.arange(N) % 3).double()
    candidates = torch.tensor([True, False, True])
    found = expected_statistics(parameters, x, times, candidates=candidates)
    mixture = PrecisionMixture.from_parameters(parameters)
    winner = mixture.responsibilities(x).argmax(dim=1)
    weights = parameters.log_weights
    for k in range(K):
        rest = [j for j in range(K) if j != k]
        left = PrecisionMixture.from_parameters(Parameters(*(t[rest] for t in parameters)))
        # Weights of what is left add up to less than one.
        without = left.log_prob(x) + weights[rest].logsumexp(dim=0)
        loss = (mixture.log_prob(x) - without)[winner == k] @ times[winner == k]
        assert float(found.loss_alone[k]) == pytest.approx(loss.item(), rel=0.02, abs=0.5)
    left = PrecisionMixture.from_parameters(Parameters(*(t[1:2] for t in parameters)))
    without = left.log_prob(x) + weights[1]
    for k in (0, 2):
        loss = (mixture.log_prob(x) - without)[winner == k] @ times[winner == k]
        assert float(found.loss_together[k]) == pytest.approx(loss.item(), rel=0.02, abs=0.5)
    assert found.loss_together[1] == 0


def test_twins_cost_much_together_where_each_costs_little_alone():
    _, parameters = start()
    twins = Parameters(*(t[[0, 1, 2, 2]] for t in parameters))
    x = twins.means[2:3] + 0.1 * rows()[:20]
    candidates = torch.tensor([False, False, True, True])
    found = expected_statistics(twins, x, candidates=candidates)
    assert found.loss_alone[2:].sum() < 1.0 * len(x)
    assert found.loss_together.sum() > 2 * found.loss_alone[2:].sum()


def test_the_bound_and_the_floor_hold_after_a_step():
    running, parameters = start()
    bound = torch.tensor([0.1, 1.0, 2.0, 3.0, 1e3], dtype=torch.float64)
    found = expected_statistics(parameters, rows())
    _, after = natural_step(running, parameters, found, 0.5, bound, 0.3)
    assert (after.precision_diag <= bound * (1 + 1e-12)).all()
    assert (after.latent_variances >= 0.3).all()
    E, Gamma = after.precision_diag, after.precision_factors
    M = torch.eye(L, dtype=E.dtype) - Gamma.mT @ (Gamma / E.unsqueeze(-1))
    torch.testing.assert_close(M, torch.diag_embed(after.latent_variances))


def test_statistics_of_parts_add_up():
    _, parameters = start()
    x = rows()
    whole = expected_statistics(parameters, x)
    first, second = (expected_statistics(parameters, part) for part in (x[:13], x[13:]))
    for ours, theirs in zip(first.joined(second)[:7], whole[:7], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("bound", [1e6, 1.2])
def test_precisions_follow_from_what_was_turned_to_the_last_digit(bound: float):
    (Theta, V, weight), _ = start()
    # A column that explains nothing is set to zero.
    Theta[1, 2] = 1e-12
    most = torch.full((D,), bound, dtype=torch.float64)
    running, parameters = precision_form(Running(Theta, V, weight), most, FLOOR)
    E, Gamma = turned_form(running.Theta, running.V, parameters.latent_variances, most)
    assert (parameters.precision_factors == 0).any()
    assert torch.equal(E, parameters.precision_diag)
    assert torch.equal(Gamma, parameters.precision_factors.mT)
    out = torch.empty_like(E), torch.empty_like(Gamma)
    turned_form(running.Theta, running.V, parameters.latent_variances, most, out=out)
    assert torch.equal(out[0], E)
    assert torch.equal(out[1], Gamma)
