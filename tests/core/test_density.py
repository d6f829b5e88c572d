"""The density and its samples against SciPy's dense Gaussians, and against its own definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from torch import Tensor
from torch.func import functional_call

from factormix import PrecisionMixture
from factormix.core import density
from factormix.core.arrays import Workspace
from factormix.core.density import decode, sample
from factormix.core.parameters import Parameters
from mixtures import draw_rows, make_mixture
from oracles import (
    TOLERANCE,
    LargestTensor,
    assert_close,
    cases,
    dense_precision,
    numpy,
    random_case,
)


@given(cases())
def test_component_log_prob_is_the_gaussian_log_density(case):
    expected = case.dense.component_log_prob(case.points)
    assert_close(case.mixture.component_log_prob(case.x), expected, TOLERANCE[case.dtype])


@given(cases())
def test_log_prob_is_the_mixture_log_density(case):
    expected = case.dense.log_prob(case.points)
    assert_close(case.mixture.log_prob(case.x), expected, TOLERANCE[case.dtype])
    assert_close(case.mixture(case.x), expected, TOLERANCE[case.dtype])


@given(cases())
def test_responsibilities_are_bayes_rule(case):
    computed = case.mixture.responsibilities(case.x)
    assert_close(computed, case.dense.responsibilities(case.points), TOLERANCE[case.dtype])
    assert_close(computed.sum(dim=1), np.ones(len(case.x)), TOLERANCE[case.dtype])


@given(cases())
def test_posterior_is_gaussian_conditioning_of_the_joint(case):
    """With ``cov [z; x] = [[I, Lambda'], [Lambda, Sigma]]``, condition densely on x."""
    mixture = case.mixture
    computed = mixture.posterior(case.x)
    # Only Lambda fixes the rotation of z; that Lambda Lambda' + D is Sigma is tested elsewhere.
    Lambda = numpy(mixture.loadings)
    tolerance = TOLERANCE[case.dtype]
    for k, (mu, Sigma) in enumerate(zip(case.dense.means, case.dense.Sigma, strict=True)):
        gain = np.linalg.solve(Sigma, Lambda[k]).T
        assert_close(computed.means[:, k], (case.points - mu) @ gain.T, tolerance)
        conditional = np.eye(Lambda.shape[2]) - gain @ Lambda[k]
        assert_close(torch.diag_embed(computed.variances[k]), conditional, tolerance)
    assert_close(computed.responsibilities, case.dense.responsibilities(case.points), tolerance)


@given(cases(dtypes=(torch.float32,), offset=1e4, spread=1.0))
def test_means_far_from_zero_cost_no_digits_in_float32(case):
    """x and the means are float32 numbers near 1e4, and the oracle sees the same numbers."""
    mixture = case.mixture
    assert_close(mixture.log_prob(case.x), case.dense.log_prob(case.points), 1e-4)
    assert_close(mixture.responsibilities(case.x), case.dense.responsibilities(case.points), 1e-4)


@settings(max_examples=20)
@given(
    K=st.integers(1, 5),
    l=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.0, 0.9, 0.95]),
)
def test_density_integrates_to_one_in_one_dimension(K, l, seed, share):
    case = random_case(K, 1, l, seed=seed, largest_share=share)
    mixture = case.mixture
    deviations = np.sqrt(case.dense.Sigma[:, 0, 0])

    @torch.no_grad()
    def evaluate(x: float) -> float:
        return float(mixture.log_prob(torch.tensor([[x]], dtype=torch.float64)).exp())

    centres = case.dense.means[:, 0]
    edges = (centres - 12 * deviations).min(), (centres + 12 * deviations).max()
    total, _ = quad(evaluate, *edges, points=centres, limit=400, epsabs=1e-9, epsrel=1e-9)
    assert total == pytest.approx(1, abs=1e-8)


@settings(max_examples=20)
@given(
    K=st.integers(1, 5),
    l=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.0, 0.9, 0.95]),
)
def test_density_integrates_to_one_in_two_dimensions(K, l, seed, share):
    """The trapezoidal rule on a grid finer than any component is exact for Gaussians."""
    case = random_case(K, 2, l, seed=seed, largest_share=share, spread=1.0)
    deviations = np.sqrt(np.diagonal(case.dense.Sigma, axis1=1, axis2=2))
    finest = np.sqrt(np.linalg.eigvalsh(case.dense.Sigma).min())
    axes = []
    for i in range(2):
        low = (case.dense.means[:, i] - 8 * deviations[:, i]).min()
        high = (case.dense.means[:, i] + 8 * deviations[:, i]).max()
        axes.append(torch.arange(low, high, 0.9 * finest, dtype=torch.float64))
    cell = 0.9 * finest * 0.9 * finest
    with torch.no_grad():
        mixture = case.mixture
        total = sum(
            float(mixture.log_prob(block).exp().sum())
            for block in torch.cartesian_prod(*axes).split(100_000)
        )
    assert total * cell == pytest.approx(1, abs=1e-8)


@settings(max_examples=6)
@given(cases(dtypes=(torch.float64,), max_features=3, n=2))
def test_gradients_agree_with_finite_differences(case):
    mixture = case.mixture
    names, values = zip(*mixture.named_buffers(), strict=True)
    inputs = [v.detach().clone().requires_grad_() for v in values]

    def densities(x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        replaced = dict(zip(names, parameters, strict=True))
        return functional_call(AllOutputs(mixture), {f"of.{n}": p for n, p in replaced.items()}, x)

    assert torch.autograd.gradcheck(densities, (case.x.requires_grad_(), *inputs))


class AllOutputs(torch.nn.Module):
    """Everything that a mixture computes from x."""

    def __init__(self, of: PrecisionMixture) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.of.log_prob(x), self.of.component_log_prob(x), *self.of.posterior(x)


@given(cases(dtypes=(torch.float64,)))
def test_gradients_are_those_of_the_dense_density(case):
    """Where M is diagonal, the derivative of its diagonal alone is the whole derivative."""
    mixture = case.mixture
    values = [v.clone().requires_grad_() for v in mixture.buffers()]
    logits, mu, E, Gamma = values
    x = case.x.clone().requires_grad_()
    gaussians = torch.distributions.MultivariateNormal(
        mu, precision_matrix=torch.diag_embed(E) - Gamma @ Gamma.mT
    )
    joint = gaussians.log_prob(x.unsqueeze(1)) + torch.log_softmax(logits, dim=0)
    expected = torch.autograd.grad(torch.logsumexp(joint, dim=1).sum(), [x, *values])
    x_own = case.x.clone().requires_grad_()
    own = [v.requires_grad_() for v in mixture.buffers()]
    computed = torch.autograd.grad(mixture.log_prob(x_own).sum(), [x_own, *own])
    for actual, dense in zip(computed, expected, strict=True):
        scale = max(1.0, float(dense.abs().max())) if dense.numel() else 1.0
        assert_close(actual / scale, dense / scale, 1e-8)


@pytest.mark.parametrize("gradients", [False, True])
def test_no_array_of_batch_by_components_by_features_is_formed(gradients):
    B, K, d, l = 64, 48, 256, 3
    case = random_case(K, d, l, n=B)
    mixture = case.mixture
    for values in mixture.buffers():
        values.requires_grad_()
    with torch.set_grad_enabled(gradients), LargestTensor() as largest:
        for compute in (mixture.log_prob, mixture.responsibilities, mixture.component_log_prob):
            value = compute(case.x)
            if gradients:
                value.sum().backward()
        mixture.posterior(case.x)
    assert largest.numel <= max(B * d, K * d * l, B * K * l), largest.operation
    assert largest.numel < B * K * d / 10


def test_the_watch_on_memory_sees_what_is_formed():
    x, mu = torch.zeros(64, 256), torch.zeros(48, 256)
    with LargestTensor() as largest:
        (x.unsqueeze(1) - mu).square().sum()
    assert largest.numel == 64 * 48 * 256


def test_a_far_point_has_a_finite_log_density():
    case = random_case(3, 4, 2, dtype=torch.float32)
    x = torch.full((1, 4), 1e6)
    with torch.no_grad():
        value, share = case.mixture.log_prob(x), case.mixture.responsibilities(x)
    assert value.isfinite().all()
    assert_close(value, case.dense.log_prob(numpy(x)), 1e-4)
    assert_close(share.sum(dim=1), np.ones(1), 1e-6)


def test_an_empty_batch_gives_empty_results():
    mixture = random_case(3, 4, 2).mixture
    x = torch.zeros(0, 4, dtype=torch.float64)
    assert mixture.log_prob(x).shape == (0,)
    assert mixture.component_log_prob(x).shape == (0, 3)
    assert mixture.posterior(x).means.shape == (0, 3, 2)


def dense_log_prob(parameters: Parameters, x: Tensor) -> np.ndarray:
    """Compute ``log p_k(x)``, (B, K), from covariances."""
    mu = parameters.means.double().numpy()
    P = dense_precision(parameters.precision_diag.double(), parameters.precision_factors.double())
    covariances = np.linalg.inv(P)
    return np.stack(
        [
            multivariate_normal(mu[k], covariances[k]).logpdf(x.double().numpy())
            for k in range(len(mu))
        ],
        axis=1,
    )


def test_quadratic_forms_pay_for_few_features_and_many_factors():
    assert density.quadratic_forms_pay((800, 63, 50))
    assert density.quadratic_forms_pay((80, 12, 9))
    assert not density.quadratic_forms_pay((800, 63, 20))
    assert not density.quadratic_forms_pay((800, 784, 500))
    assert not density.quadratic_forms_pay((5, 63, 50))


@pytest.mark.parametrize(("d", "l"), [(12, 9), (63, 40), (63, 62)])
def test_one_component_more_saves_what_it_costs_by_projection(d, l):
    """At the switch, both ways cost the same: what a form saves, times K, forms the products."""
    pays = [density.quadratic_forms_pay((K, d, l)) for K in range(1, 300)]
    assert sorted(pays) == pays
    saved = d * (l + 2) - d * (d + 1) / 2 - d
    first = pays.index(True) + 1
    assert (first - 1) * saved <= d / 2 * d * (d + 1) / 2 < first * saved


@pytest.mark.parametrize("work", [None, Workspace()])
def test_feature_products(work: Workspace | None):
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = density.feature_products(x, work)
    expected = [x[:, i] * x[:, j] for i in range(4) for j in range(i + 1)]
    assert torch.equal(found, torch.stack(expected, dim=1))


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-3)])
def test_quadratic_forms_give_dense_log_densities(centre, dtype, tolerance):
    parameters = make_mixture(K=80, d=12, l=9, dtype=dtype)
    x = draw_rows(parameters, 50)
    ops = density.operands(parameters, centre=centre, allow_forms=True)
    assert ops.forms is not None
    found = density.component_log_prob(x, ops)
    expected = dense_log_prob(parameters, x)
    assert found.dtype == dtype
    best = expected.argmax(axis=1)
    rows = np.arange(len(x))
    np.testing.assert_allclose(found.numpy()[rows, best], expected[rows, best], atol=tolerance)
    np.testing.assert_allclose(
        density.log_prob(x, ops),
        logsumexp(expected + parameters.log_weights.numpy(), axis=1),
        atol=tolerance,
    )


def test_quadratic_forms_and_projections_have_the_same_gradients():
    parameters = make_mixture(K=80, d=12, l=9)
    x = draw_rows(parameters, 9)
    gradients = []
    for allow_forms in (False, True):
        leaves = [t.clone().requires_grad_() for t in (*parameters[1:4], x)]
        used = parameters._replace(
            means=leaves[0], precision_diag=leaves[1], precision_factors=leaves[2]
        )
        ops = density.operands(used, allow_forms=allow_forms)
        gradients.append(torch.autograd.grad(density.log_prob(leaves[3], ops).sum(), leaves))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


N = 20_000
SIGMAS = 5


def check_mean(x: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> None:
    error = np.sqrt(np.diag(covariance) / len(x))
    assert (np.abs(x.mean(axis=0) - mean) <= SIGMAS * error + 1e-9).all()


def check_covariance(x: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> None:
    """The standard error of a Gaussian's sample covariance follows from Isserlis' theorem."""
    computed = (x - mean).T @ (x - mean) / len(x)
    variances = np.diag(covariance)
    error = np.sqrt((np.outer(variances, variances) + covariance**2) / len(x))
    assert (np.abs(computed - covariance) <= SIGMAS * error + 1e-9).all()


@pytest.mark.parametrize("l", [0, 1, 3])
@pytest.mark.parametrize("noise", [True, False])
def test_samples_of_a_component_have_its_mean_and_covariance(l, noise, generator):
    case = random_case(3, 5, l)
    mixture = case.mixture
    Lambda = numpy(mixture.loadings)
    for k in range(3):
        covariance = case.dense.Sigma[k] if noise else Lambda[k] @ Lambda[k].T
        x = mixture.sample(N, component=k, noise=noise, generator=generator)
        assert x.shape == (N, 5)
        assert x.dtype == torch.float64
        check_mean(numpy(x), case.dense.means[k], covariance)
        check_covariance(numpy(x), case.dense.means[k], covariance)


def test_samples_without_noise_lie_in_the_span_of_the_loadings(generator):
    case = random_case(2, 6, 2, largest_share=0.9, seed=3)
    mixture = case.mixture
    for k in range(2):
        x = mixture.sample(50, component=k, noise=False, generator=generator) - mixture.means[k]
        basis = torch.linalg.qr(mixture.loadings[k]).Q
        assert (x - x @ basis @ basis.mT).abs().max() < 1e-12


def test_components_are_drawn_by_their_weights(generator):
    case = random_case(5, 3, 2)
    x, components = sample(case.mixture.precision_form, N, generator=generator)
    p = case.dense.weights / case.dense.weights.sum()
    counts = np.bincount(components.numpy(), minlength=5)
    assert (np.abs(counts - N * p) <= SIGMAS * np.sqrt(N * p * (1 - p))).all()
    for k in np.flatnonzero(counts > 100):
        own = numpy(x[components == k])
        check_mean(own, case.dense.means[k], case.dense.Sigma[k])
        check_covariance(own, case.dense.means[k], case.dense.Sigma[k])


def test_samples_of_the_mixture_have_its_mean(generator):
    case = random_case(4, 4, 2)
    p = case.dense.weights / case.dense.weights.sum()
    mean = p @ case.dense.means
    apart = case.dense.means - mean
    covariance = np.einsum("k,kij->ij", p, case.dense.Sigma + apart[:, :, None] * apart[:, None, :])
    check_mean(numpy(case.mixture.sample(N, generator=generator)), mean, covariance)


def test_the_mean_log_density_of_samples_is_minus_the_entropy(generator):
    """For a Gaussian, ``-log p`` of a sample has variance d/2 around the entropy."""
    d = 6
    case = random_case(2, d, 3)
    for k in range(2):
        x = case.mixture.sample(N, component=k, generator=generator)
        entropy = 0.5 * (d * np.log(2 * np.pi * np.e) + np.linalg.slogdet(case.dense.Sigma[k])[1])
        mean = case.mixture.component_log_prob(x)[:, k].mean().item()
        assert abs(mean + entropy) <= SIGMAS * np.sqrt(d / 2 / N)


def test_a_seed_fixes_the_samples():
    mixture = random_case(3, 4, 2).mixture
    first, again, other = (
        mixture.sample(10, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(4)
    unseeded = mixture.sample(10)
    torch.manual_seed(4)
    assert torch.equal(mixture.sample(10), unseeded)


def test_samples_carry_no_graph_and_none_is_fine():
    mixture = random_case(3, 4, 2, dtype=torch.float32).mixture
    drawn = mixture.sample(2)
    assert not drawn.requires_grad
    assert drawn.dtype == torch.float32
    assert mixture.sample(0).shape == (0, 4)
    assert mixture.sample(0, component=1, noise=False).shape == (0, 4)


def test_decode_is_the_generative_mean(generator):
    mixture = random_case(3, 4, 2).mixture
    values = mixture.precision_form
    z = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    components = torch.randint(3, (20,), generator=generator)
    means = mixture.means.detach().clone()
    decoded = decode(values, z, components).detach()
    for row, code, k in zip(decoded, z, components, strict=True):
        expected = numpy(means[k]) + numpy(mixture.loadings[k]) @ numpy(code)
        np.testing.assert_allclose(numpy(row), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(mixture.means, means), "the means themselves stay as they are"
    diagonal = random_case(3, 4, 0).mixture
    decoded = decode(diagonal.precision_form, torch.zeros(20, 0), components)
    assert torch.equal(decoded, diagonal.means[components])


def fit_dense(X: np.ndarray, R: np.ndarray) -> PrecisionMixture:
    """Return the mixture with the weighted means and free covariances of responsibilities (n, K).

    Its precisions are ``e I - Gamma Gamma'`` with e the largest eigenvalue: d - 1 factors.
    """
    means, E, Gamma = [], [], []
    for r in R.T:
        mean = r @ X / r.sum()
        Sigma = (r[:, None] * (X - mean)).T @ (X - mean) / r.sum()
        values, vectors = np.linalg.eigh(np.linalg.inv(Sigma))
        means.append(mean)
        E.append(np.full(X.shape[1], values[-1]))
        Gamma.append(vectors[:, :-1] * np.sqrt(values[-1] - values[:-1]))
    arrays = (R.sum(axis=0) / len(X), np.array(means), np.array(E), np.array(Gamma))
    return PrecisionMixture(*(torch.from_numpy(a) for a in arrays))


@pytest.mark.parametrize("K", [1, 2])
def test_leaving_a_row_out_is_a_refit_without_it(K):
    """By brute force, with the responsibilities of the other rows as they are."""
    rng = np.random.default_rng(K)
    X = rng.normal(size=(60, 3)) @ rng.normal(size=(3, 3)) + 5.0 * rng.integers(K, size=(60, 1))
    X[7] += [2.0, -2.0, 0.0]
    R = rng.dirichlet(np.ones(K), size=len(X))
    for _ in range(1500 if K > 1 else 1):  # until responsibilities are a fixed point
        mixture = fit_dense(X, R)
        R = numpy(mixture.responsibilities(torch.from_numpy(X)))
    ops = density.operands(mixture.precision_form)
    joint, peaks = density.joint_log_prob(torch.from_numpy(X), ops), density.peak_log_prob(ops)
    found = density.leave_one_out(joint, peaks, ops.log_weights, len(X), 3)
    for i in range(len(X)):
        others = np.delete(np.arange(len(X)), i)
        refit = fit_dense(X[others], R[others])
        x = torch.from_numpy(X[i : i + 1])
        expected = numpy(refit.component_log_prob(x) + refit.weights.log())
        np.testing.assert_allclose(numpy(found[i : i + 1]), expected, rtol=1e-6, atol=1e-6)
    # The row that moved its own component is less likely than it seemed.
    assert found[7].logsumexp(0) < joint[7].logsumexp(0) - 1


def test_a_component_of_one_row_does_not_speak_for_it():
    logits = torch.tensor([0.01, 0.5, 0.49], dtype=torch.float64).log()
    parameters = make_mixture(3, 2, 1, spread=100.0)._replace(logits=logits)
    ops, x = density.operands(parameters), parameters.means[:2]
    joint, peaks = density.joint_log_prob(x, ops), density.peak_log_prob(ops)
    found = density.leave_one_out(joint, peaks, ops.log_weights, 100, 2)
    assert found[0, 0] == -torch.inf
    assert found[0, 1:].isfinite().all()
    # Some component counts for every row, however few rows there are.
    single = density.leave_one_out(joint, peaks, ops.log_weights, 1, 2)
    assert single.logsumexp(dim=1).isfinite().all()
