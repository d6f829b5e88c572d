"""The paper's constrained SGD: its gradients, its phases, its schedule and its random start."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import FactorAnalysis
from torch import Tensor

from factormix import MFA, InputError, datasets
from factormix.core.annealing import smoothing_kernel, torus_distances
from factormix.core.parameters import Parameters, factor_major, latent_variances
from factormix.data.batches import Batch
from factormix.solvers import ConstrainedSGD, Problem
from factormix.training.solvers import step
from factormix.training.solvers.sgd import SGDContribution, SGDPlan, SGDState, likelihood_gradient
from oracles import assert_close, cases, dense_M, numpy, random_case


def dense_joint(x: Tensor, logits: Tensor, mu: Tensor, E: Tensor, Gamma: Tensor) -> Tensor:
    """Compute ``log pi_k + log p_k(x)``, (B, K), by torch's dense Gaussians."""
    gaussians = torch.distributions.MultivariateNormal(
        mu, precision_matrix=torch.diag_embed(E) - Gamma @ Gamma.mT
    )
    return gaussians.log_prob(x.unsqueeze(1)) + torch.log_softmax(logits, dim=0)


def leaves(values: Parameters) -> list[Tensor]:
    """Return logits, mu, E and Gamma as leaves that take gradients."""
    return [t.detach().clone().requires_grad_() for t in values[:4]]


def assert_gradient(actual: Tensor, expected: Tensor) -> None:
    """Compare to 1e-8 of the largest entry."""
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    assert_close(actual / scale, expected / scale, 1e-8)


def problem(K: int, d: int, l: int, **options: Any) -> Problem:
    options = {"dtype": torch.float64, "max_precision": torch.tensor(20.0)} | options
    return Problem(K, d, l, **options)


def state_of(
    values: Parameters, solver: ConstrainedSGD, **options: Any
) -> tuple[SGDPlan, SGDState]:
    """Return a plan and its first state with other parameters in it."""
    plan = solver.plan(problem(*values.shape, **options))
    state = plan.init()
    state.parameters = Parameters(*(t.detach().clone() for t in values))
    factors = factor_major(state.parameters.precision_factors)
    state.parameters = state.parameters._replace(precision_factors=factors)
    return plan, state


def values_of(*args: Any, **options: Any) -> tuple[Parameters, Tensor]:
    case = random_case(*args, **options)
    return Parameters(*(t.detach() for t in case.mixture.precision_form)), case.x


@given(cases(dtypes=(torch.float64,)), st.integers(0, 2**32 - 1))
def test_closed_form_gradients_equal_autograd_of_the_weighted_likelihood(case, seed):
    values = Parameters(*(t.detach() for t in case.mixture.precision_form))
    K, d, l = values.shape
    x, B = case.x, len(case.x)
    R = torch.tensor(np.random.default_rng(seed).exponential(size=(B, K)))
    Y = torch.einsum("kdl,bkd->bkl", values.precision_factors, x.unsqueeze(1) - values.means)
    contribution = SGDContribution(
        n_samples=torch.tensor(float(B)),
        log_likelihood=torch.zeros(()),
        objective=torch.zeros(()),
        R=R.sum(dim=0),
        RX=R.mT @ x,
        RY=torch.einsum("bk,bkl->kl", R, Y),
        RX2=R.mT @ x.square(),
        RYX=torch.einsum("bk,bkl,bd->kld", R, Y, x).reshape(K, l, d),
    )
    computed = likelihood_gradient(values, contribution)
    inputs = leaves(values)
    expected = torch.autograd.grad((R * dense_joint(x, *inputs)).sum(), inputs)
    for actual, dense in zip(computed, expected[1:], strict=True):
        assert_gradient(actual, dense)


@pytest.mark.parametrize("sigma", [2.0, 0.8, 0.31, 0.1])
@pytest.mark.parametrize("l", [0, 2])
def test_a_contribution_holds_the_gradient_of_the_annealed_objective(sigma, l):
    """For fixed winners, ``L = sum_n sum_j g_(k*_n, j) [log pi_j + log p_j(x_n)]``."""
    values, x = values_of(6, 4, l, n=30, largest_share=0.9)
    solver = ConstrainedSGD(sigma=sigma, phases=None)
    plan, state = state_of(values, solver)
    contribution = plan.contribution(state, Batch(x))
    inputs = leaves(values)
    joint = dense_joint(x, *inputs)
    kernel = smoothing_kernel(torus_distances(6).double(), sigma)
    if sigma < 0.3:
        kernel = torch.eye(6, dtype=torch.float64)
    smoothed = joint @ kernel.mT
    objective = smoothed.gather(1, smoothed.argmax(dim=1, keepdim=True)).sum()
    assert len(smoothed.argmax(dim=1).unique()) > 1
    expected = torch.autograd.grad(objective, inputs)
    assert_close(contribution.objective, objective, 1e-10)
    assert_close(contribution.log_likelihood, torch.logsumexp(joint, dim=1).sum(), 1e-10)
    logits = contribution.R - contribution.R.sum() * values.log_weights.exp()
    computed = [logits, *likelihood_gradient(values, contribution)]
    for actual, dense in zip(computed, expected, strict=True):
        assert_gradient(actual, dense)


@pytest.mark.parametrize("parametrisation", ["square", "linear"])
@pytest.mark.parametrize("phases", [(0, 1), None])
def test_a_step_is_the_gradient_times_rate_and_weight(parametrisation, phases):
    """E moves on its root, ``d/d(root) = 2 root d/dE``, or on itself; away from every bound."""
    values, x = values_of(4, 3, 2, n=20, largest_share=0.3, spread=0.5)
    solver = ConstrainedSGD(
        parametrisation=parametrisation,
        phases=phases,
        learning_rate=1e-4,
        min_learning_rate=1e-5,
        precision_weight=0.1,
        factor_weight=0.3,
    )
    plan, state = state_of(values, solver, batches_per_epoch=10, epochs=2)
    contribution = plan.contribution(state, Batch(x))
    pi = values.log_weights.exp()
    d_logits = (contribution.R - contribution.R.sum() * pi) / len(x)
    gradient = likelihood_gradient(values, contribution)
    d_mu, d_E, d_Gamma = (g / len(x) for g in gradient)
    moved, _ = step(plan, state, Batch(x))
    weights = (0.1, 0.3) if phases is None else (1.0, 1.0)
    rate = 1e-4
    expected_E = values.precision_diag + rate * weights[0] * d_E
    if parametrisation == "square":
        root = values.precision_diag.sqrt()
        expected_E = (root + rate * weights[0] * 2 * root * d_E).square()
    after = moved.parameters
    assert_close(after.logits, values.logits + rate * 0.5 * d_logits, 1e-12)
    assert_close(after.means, values.means + rate * d_mu, 1e-12)
    assert_close(after.precision_diag, expected_E, 1e-12)
    Gamma = values.precision_factors + rate * weights[1] * d_Gamma
    # The constraint rotates the columns, which leaves their products as they are.
    products = after.precision_factors @ after.precision_factors.mT
    assert_close(products, Gamma @ Gamma.mT, 1e-12)


def test_the_defaults_are_the_papers_values():
    solver = ConstrainedSGD()
    assert solver == ConstrainedSGD(
        phases=(15, 50),
        learning_rate=0.011,
        min_learning_rate=0.010,
        mean_weight=1.0,
        precision_weight=0.1,
        factor_weight=0.1,
        phase_weight=1.0,
        logit_weight=0.5,
        sigma=None,
        min_sigma=0.01,
        decay=0.9,
        delta=0.05,
        alpha=0.01,
        min_eigenvalue=0.05,
        initial_mean=0.1,
        initial_precision=None,
        initial_factor=1e-4,
        parametrisation="square",
        batch_size=100,
    )
    assert solver.window_steps == 100
    assert solver.default_epochs(600) == 65


def test_the_start_is_the_papers():
    solver = ConstrainedSGD()
    plan = solver.plan(problem(25, 10, 3))
    state = plan.init()
    values = state.parameters
    assert state.sigma == 0.25 * math.sqrt(2 * 25)
    assert_close(values.log_weights.exp(), np.full(25, 1 / 25), 1e-12)
    assert values.means.abs().max() <= 0.1
    assert values.means.std() == pytest.approx(0.2 / math.sqrt(12), rel=0.1)
    assert (values.precision_diag == 20).all()
    expected = np.broadcast_to((1 - 1e-4) * np.eye(3), (25, 3, 3))
    assert_close(torch.tensor(dense_M(*values[2:4])), expected, 1e-12)
    assert_close(values.latent_variances, np.full((25, 3), 1 - 1e-4), 1e-12)
    lower = ConstrainedSGD(initial_precision=5.0, initial_mean=0.5, sigma=3.0)
    state = lower.plan(problem(25, 10, 3)).init()
    assert (state.parameters.precision_diag == 5).all()
    assert 0.4 < state.parameters.means.abs().max() <= 0.5
    assert state.sigma == 3.0


def test_phase_one_moves_only_means_and_weights():
    solver = ConstrainedSGD(phases=(1, 2))
    plan = solver.plan(problem(4, 3, 2, batches_per_epoch=5, epochs=6))
    state = plan.init()
    assert plan.centroid_steps == 10, "a run of another length keeps the proportion"
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = Parameters(*(t.clone() for t in state.parameters))
    for _ in range(10):
        contribution = plan.contribution(state, Batch(x))
        assert contribution.RX2 is None
        assert contribution.RYX is None
        state, _ = plan.update(state, contribution)
    assert torch.equal(state.parameters.precision_diag, before.precision_diag)
    assert torch.equal(state.parameters.precision_factors, before.precision_factors)
    assert not torch.equal(state.parameters.means, before.means)
    assert not torch.equal(state.parameters.logits, before.logits)
    state, _ = step(plan, state, Batch(x))
    assert not torch.equal(state.parameters.precision_diag, before.precision_diag)
    assert not torch.equal(state.parameters.precision_factors, before.precision_factors)


@pytest.mark.parametrize(
    ("solver", "length"),
    [
        (ConstrainedSGD(phases=None), {"batches_per_epoch": 5, "epochs": 6}),
        (ConstrainedSGD(), {"batches_per_epoch": None, "epochs": None}),
    ],
)
def test_one_phase_and_streams_move_everything_from_the_first_step(solver, length):
    plan = solver.plan(problem(4, 3, 2, **length))
    state = plan.init()
    before = Parameters(*(t.clone() for t in state.parameters))
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state, _ = step(plan, state, Batch(x))
    assert not torch.equal(state.parameters.precision_diag, before.precision_diag)
    assert not torch.equal(state.parameters.precision_factors, before.precision_factors)


def test_sigma_and_rate_fall_by_the_window_rule_each_to_its_own_floor():
    """On a batch that never changes, the objective ends up stationary in every window."""
    solver = ConstrainedSGD(alpha=0.2, min_sigma=0.4, phases=None)
    assert solver.window_steps == 5
    plan = solver.plan(problem(9, 3, 1))
    state = plan.init()
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    means, objectives, schedule = [], [], []
    for n in range(400):
        contribution = plan.contribution(state, Batch(x))
        objectives.append(contribution.objective.item() / len(x))
        state, info = plan.update(state, contribution)
        if n % 5 == 4:
            means.append(np.mean(objectives[-5:]))
        schedule.append((info.scalars["sigma"], info.scalars["learning_rate"]))
    sigma, rate, expected = 0.25 * math.sqrt(18), 0.011, []
    for i, mean in enumerate(means):
        if i >= 2:
            delta_L = (mean - means[i - 1]) / (means[i - 1] - means[0])
            if -0.1 < delta_L < 0.05:
                sigma, rate = max(0.4, sigma * 0.9), max(0.010, rate * 0.9)
        expected.append((sigma, rate))
    np.testing.assert_allclose(schedule[4::5], expected, rtol=1e-12)
    assert schedule[-1] == (0.4, 0.010)
    assert all(schedule[n] == schedule[n - 1] for n in range(1, 400) if n % 5 != 4)


def three_factor_data(n: int, d: int = 6) -> Tensor:
    """Draw rows (n, d) with three strong independent factors and little noise, mean zero."""
    generator = torch.Generator().manual_seed(5)
    directions = torch.linalg.qr(torch.randn(d, 3, generator=generator)).Q
    strengths = torch.tensor([1.0, 0.8, 0.6])
    latent = torch.randn(n, 3, generator=generator) * strengths
    return latent @ directions.mT + 0.3 * torch.randn(n, d, generator=generator)


def smallest_angle(Gamma: Tensor) -> float:
    """Return the smallest angle between two columns of a component, in degrees."""
    columns = torch.nn.functional.normalize(Gamma.double(), dim=1)
    cosines = (columns.mT @ columns).abs()
    cosines.diagonal(dim1=1, dim2=2).zero_()
    return math.degrees(math.acos(min(1.0, cosines.max().item())))


def make_columns_identical(state: SGDState) -> None:
    E, Gamma = state.parameters[2:4]
    same = factor_major(Gamma[:, :, :1].expand_as(Gamma).contiguous())
    state.parameters = state.parameters._replace(
        precision_factors=same, latent_variances=latent_variances(E, same)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("phases", [(0, 1), None])
def test_from_identical_columns_the_columns_separate(phases, dtype):
    """Identical columns are a stationary point of plain ascent: all get the same gradient."""
    X = three_factor_data(2000).to(dtype)
    solver = ConstrainedSGD(
        phases=phases,
        factor_weight=1.0,
        precision_weight=1.0,
        learning_rate=0.05,
        min_learning_rate=0.02,
    )
    plan = solver.plan(problem(1, 6, 3, dtype=dtype, batches_per_epoch=15, epochs=100, seed=1))
    state = plan.init()
    make_columns_identical(state)
    generator = torch.Generator().manual_seed(0)
    for _ in range(1500):
        state, _ = step(plan, state, Batch(X[torch.randint(2000, (100,), generator=generator)]))
    values = state.parameters
    # How much a column explains is 1 - M, in truth 0.92, 0.88 and 0.8: none may stay at nothing.
    assert (1 - values.latent_variances).min() > 0.5
    assert smallest_angle(values.precision_factors) > 30
    assert np.linalg.matrix_rank(numpy(values.precision_factors[0]), tol=0.1) == 3


def test_columns_that_start_again_follow_from_the_seed():
    X = three_factor_data(100).double()
    solver = ConstrainedSGD(phases=None, alpha=0.5)
    ends = []
    for seed, unrelated in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(unrelated)
        plan = solver.plan(problem(1, 6, 3, seed=seed))
        state = plan.init()
        make_columns_identical(state)
        for _ in range(3):
            state, _ = step(plan, state, Batch(X))
        assert (state.parameters.latent_variances < 1 - 1e-8).all(), "all columns live again"
        ends.append(state.parameters.precision_factors)
    assert torch.equal(ends[0], ends[1])
    assert not torch.allclose(ends[0].abs(), ends[2].abs())


def test_a_mean_never_steps_beyond_the_mean_of_its_samples():
    """Plain ascent on a precision of 1e4 would overshoot by a factor of a hundred, and diverge."""
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 2
    for bound in (1.0, 1e4):
        solver = ConstrainedSGD(phases=(1, 0))
        plan = solver.plan(
            problem(1, 3, 0, max_precision=torch.tensor(bound), batches_per_epoch=9, epochs=1)
        )
        state = plan.init()
        start = state.parameters.means[0].clone()
        state, _ = step(plan, state, Batch(x))
        moved = (state.parameters.means[0] - start) / (x.mean(dim=0) - start)
        assert_close(moved, np.full(3, min(1.0, 0.011 * bound)), 1e-10)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("phases", (-1, 2), "phases must be two whole numbers of epochs"),
        ("min_eigenvalue", 0.0, "min_eigenvalue must lie between 0 and 1, not 0.0"),
        ("min_eigenvalue", 1.5, "min_eigenvalue must lie between 0 and 1"),
        ("initial_factor", 0.0, "initial_factor must lie between 0 and 1"),
        ("parametrisation", "cubic", "parametrisation must be 'square' or 'linear', not 'cubic'"),
        ("learning_rate", 0.0, "learning_rate must be positive"),
        ("learning_rate", float("nan"), "learning_rate must be positive"),
        ("min_sigma", -1.0, "min_sigma must be positive"),
        ("alpha", 0.0, "alpha must be positive"),
        ("delta", 0.0, "delta must be positive"),
        ("decay", 0.0, "decay must lie between 0 and 1"),
        ("phases", (1, 2, 3), "phases must be two whole numbers of epochs"),
        ("decay", 1.5, "decay must"),
        ("sigma", -1.0, "sigma must be positive"),
        ("initial_precision", -1.0, "initial_precision must be positive"),
        ("batch_size", 0, "batch_size must be"),
        ("phases", 5, "phases must be two whole numbers of epochs"),
        ("mean_weight", -1.0, "mean_weight must be 0 or more"),
        ("learning_rate", "fast", "learning_rate must be positive, not 'fast'"),
    ],
)
def test_bad_options_get_one_sentence(option, value, message):
    with pytest.raises(InputError, match=message) as raised:
        ConstrainedSGD(**{option: value})
    assert "\n" not in str(raised.value)


def test_one_component_reaches_the_likelihood_of_factor_analysis():
    X = three_factor_data(2000).numpy()
    theirs = FactorAnalysis(3, svd_method="lapack", tol=1e-3).fit(X).score(X)
    ours = MFA(1, 3, solver=ConstrainedSGD(), max_epochs=100, random_state=0).fit(X).score(X)
    assert ours == pytest.approx(theirs, rel=0.01)


def check_random_start(model: MFA, angle: float) -> None:
    """Check that 95% of the components are in use, and their columns pairwise independent."""
    weights = np.asarray(model.weights_)
    assert (weights >= 0.1 / len(weights)).mean() >= 0.95
    assert smallest_angle(torch.tensor(np.asarray(model.loadings_))) > angle
    # A column of zeros would be independent of the others in name only.
    assert np.linalg.norm(model.loadings_, axis=1).min() > 1e-4


def test_a_random_start_uses_all_components_on_small_digits():
    digits = datasets.load("digits", classes=[0, 1, 2], split="train")
    model = MFA(
        9,
        2,
        solver="sgd",
        max_precision=20,
        scaling=None,
        max_epochs=250,
        batch_size=50,
        random_state=0,
    )
    check_random_start(model.fit(digits.data), angle=30)


@pytest.mark.slow
@pytest.mark.skipif("FACTORMIX_DATA" not in os.environ, reason="needs the real MNIST")
def test_a_random_start_uses_all_components_on_mnist():
    """The paper's settings on classes 0 to 2, with a fifth of its epochs."""
    mnist = datasets.load("mnist", classes=[0, 1, 2], split="train")
    model = MFA(25, 4, solver="sgd", max_precision=20, scaling=None, max_epochs=13, random_state=0)
    check_random_start(model.fit(mnist.data), angle=30)


def test_the_bound_is_an_option_that_the_problem_overrides():
    state = ConstrainedSGD().plan(Problem(2, 3, 1)).init()
    assert (state.parameters.precision_diag == 20).all()
    state = ConstrainedSGD(max_precision=7).plan(Problem(2, 3, 1)).init()
    assert (state.parameters.precision_diag == 7).all()
    state = ConstrainedSGD(max_precision=7).plan(Problem(2, 3, 1, torch.tensor(5.0))).init()
    assert (state.parameters.precision_diag == 5).all()
