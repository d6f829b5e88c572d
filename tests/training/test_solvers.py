"""The contract of every solver: whatever is registered in ``factormix.solvers`` passes it.

A solver starts from random values without seeing data, takes a batch and a state to the next state,
keeps what must hold however bad the data, and can be stopped, saved and resumed at any step.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from factormix import InputError, PrecisionMixture
from factormix.core.parameters import factor_major
from factormix.data.batches import Batch
from factormix.training.solvers import (
    SOLVERS,
    CovarianceGradient,
    Info,
    NaturalGradient,
    Problem,
    Solver,
    from_settings,
    resolve,
    step,
    to_settings,
)
from factormix.training.solvers.base import add, pack, unpack
from mixtures import name_tensors
from oracles import LargestTensor, assert_close, dense_M, numpy

MAX_PRECISION = 20.0
EPOCHS, BATCHES = 12, 25
"""Passes and batches per pass: every phase of a solver has its turn in 300 steps."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A solver with its options, and what is special about its problems."""

    solver: Any
    scales: int = 1
    candidates: int | str = "auto"

    def problem(
        self, n_components: int = 6, n_features: int = 5, n_factors: int = 2, **options: Any
    ) -> Problem:
        """State a small problem of this number of components in each scale."""
        default = {
            "max_precision": torch.tensor(MAX_PRECISION),
            "seed": 3,
            "epochs": EPOCHS,
            "batches_per_epoch": BATCHES,
            "candidates": self.candidates,
        }
        return Problem(n_components * self.scales, n_features, n_factors, **default | options)

    def plan(self, *sizes: int, **options: Any) -> Any:
        return self.solver.plan(self.problem(*sizes, **options))

    def stream_plan(self) -> Any:
        """Plan for unknown length, or for short passes if the solver needs passes."""
        per_epoch = 10 if self.solver.needs_passes else None
        return self.plan(epochs=None, batches_per_epoch=per_epoch)


CASES = {
    # Few passes of k-means, so that EM has its turn.
    **{
        name: Case(kind(kmeans_passes=2) if name == "em" else kind())
        for name, kind in SOLVERS.items()
    },
    # As many candidates as components: the screen changes nothing.
    "natural, screened": Case(NaturalGradient(), candidates=12),
    "covariance, in scales": Case(CovarianceGradient(scales=2), scales=2),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


kinds = pytest.mark.parametrize("kind", SOLVERS.values(), ids=SOLVERS.keys())


def blobs(n: int, d: int = 5, *, seed: int = 0) -> Tensor:
    """Draw n rows (n, d) of three clusters, stretched along one direction each."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([-1.0, 0.0, 1.0])[:, None] * torch.linspace(0.5, 1, d)
    members = torch.arange(n) % 3
    along = torch.eye(d)[members % d] + 0.3
    x = centres[members] + 0.3 * along * torch.randn(n, 1, generator=generator)
    return x + 0.25 * torch.randn(n, d, generator=generator)


def batches(X: Tensor, size: int, steps: int, *, seed: int = 0) -> Iterator[Tensor]:
    """Yield batches of rows drawn at random, one for each step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield X[torch.randint(len(X), (size,), generator=generator)]


def train(plan: Any, state: Any, X: Tensor, steps: int, *, size: int = 40, seed: int = 0) -> Any:
    for x in batches(X, size, steps, seed=seed):
        state, _ = step(plan, state, Batch(x))
    return state


@cache
def _snapshots(case: Case, dtype: torch.dtype, *steps: int) -> list[Any]:
    """Train on blobs, and pack the state after each of some numbers of steps."""
    plan = case.plan(dtype=dtype)
    state, packed = plan.init(), []
    for n, x in enumerate([*batches(blobs(400).to(dtype), 40, max(steps)), None]):
        if n in steps:
            tensors, values = pack(state)
            packed.append(({k: t.clone() for k, t in tensors.items()}, json.dumps(values)))
        if x is not None:
            state, _ = step(plan, state, Batch(x))
    return packed


SNAPSHOTS = (0, 37, 60, 97, 150, 210, 250, 290, 310)


def state_after(case: Case, steps: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return the state after steps on batches of 40 blobs, with tensors of its own."""
    tensors, values = _snapshots(case, dtype, *SNAPSHOTS)[SNAPSHOTS.index(steps)]
    copies = {name: t.clone(memory_format=torch.preserve_format) for name, t in tensors.items()}
    return unpack(case.solver.state_type, copies, json.loads(values))


def mean_log_prob(state: Any, X: Tensor) -> float:
    with torch.no_grad():
        return PrecisionMixture.from_parameters(state.parameters).log_prob(X).mean().item()


def equal(first: Any, second: Any) -> bool:
    """Return whether two states are the same, bit by bit."""
    (tensors, values), (others, other_values) = pack(first), pack(second)
    return (
        values == other_values
        and tensors.keys() == others.keys()
        and all(torch.equal(t, others[name]) for name, t in tensors.items())
    )


def check_invariants(solver: Any, state: Any, max_precision: float | Tensor) -> None:
    """Check that E is in (0, max], M diagonal and at its floor or above, pi normalised, and all of
    it finite.
    """
    values = state.mixture
    assert all(t.isfinite().all() for t in values), "finite"
    E, Gamma = values.precision_diag, values.precision_factors
    eps = torch.finfo(E.dtype).eps
    assert E.min() > 0
    assert (torch.as_tensor(max_precision).to(E) * (1 + eps) >= E).all()
    assert abs(values.log_weights.exp().sum().item() - 1) < 10 * eps * len(E)
    M = dense_M(E, Gamma)
    diagonal = np.diagonal(M, axis1=1, axis2=2)
    tolerance = 200 * eps
    assert np.abs(M - np.eye(M.shape[1]) * diagonal[:, None, :]).max(initial=0) < tolerance
    assert np.abs(diagonal - numpy(values.latent_variances)).max(initial=0) < tolerance
    floor = getattr(solver, "min_eigenvalue", 0.0)
    assert diagonal.min(initial=1) > floor - tolerance
    assert numpy(values.latent_variances).min(initial=1) >= floor - eps
    assert numpy(values.latent_variances).min(initial=1) > 0


@kinds
def test_it_has_the_names_of_a_solver(kind):
    solver = kind()
    assert isinstance(solver, Solver)
    assert dataclasses.is_dataclass(solver)
    with pytest.raises(dataclasses.FrozenInstanceError):
        solver.name_of_nothing = 1
    assert dataclasses.is_dataclass(solver.state_type)
    assert {"parameters", "steps"} <= {f.name for f in dataclasses.fields(solver.state_type)}
    assert solver.default_batch_size(None) >= 1
    assert solver.default_batch_size(50) >= 1
    assert solver.default_max_precision is None or solver.default_max_precision > 0
    assert solver.default_epochs(1) >= solver.default_epochs(10_000) >= 1


@kinds
def test_it_is_found_by_its_name_and_described_in_json(kind):
    assert SOLVERS[kind.name] is kind
    solver = resolve(kind.name)
    assert type(solver) is kind
    assert resolve(solver) is solver
    assert from_settings(json.loads(json.dumps(to_settings(solver)))) == solver


@kinds
def test_an_unknown_name_or_a_class_is_refused(kind):
    with pytest.raises(InputError, match=f"solver must be one of .*'{kind.name}'.* not 'newton'"):
        resolve("newton")
    with pytest.raises(InputError, match="solver must be a name or an object"):
        resolve(kind)


@kinds
def test_every_option_is_checked(kind):
    options = {field.name: field.default for field in dataclasses.fields(kind)}
    assert kind(**options) == kind()
    for name, default in options.items():
        no_number = 0 if isinstance(default, bool) else True
        for wrong in (
            *("much", float("nan"), float("inf"), -1, no_number),
            *([1], 10**400, torch.tensor(1)),
        ):
            with pytest.raises(InputError, match=rf"^{name} must .*, not .*\.$"):
                kind(**{name: wrong})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_state_follows_from_the_seed_and_has_the_dtype(case, dtype):
    torch.manual_seed(1)
    stream = torch.get_rng_state()
    plan = case.plan(dtype=dtype)
    first = plan.init()
    assert torch.equal(torch.get_rng_state(), stream), "the global generator is not ours"
    torch.manual_seed(2)
    assert equal(first, plan.init())
    other = case.plan(dtype=dtype, seed=4).init()
    assert not torch.equal(first.parameters.means, other.parameters.means)
    assert isinstance(first, case.solver.state_type)
    assert first.steps == 0
    assert first.parameters.shape == (6, 5, 2)
    check_invariants(case.solver, first, MAX_PRECISION)
    state = train(plan, first, blobs(200).to(dtype), 5)
    for current in (first, state):
        for name, tensor in pack(current)[0].items():
            assert tensor.dtype == dtype or not tensor.is_floating_point(), name
            assert tensor.device == torch.device("cpu"), name


def test_a_step_counts_and_reports(case):
    plan = case.plan()
    state = plan.init()
    for n, x in enumerate(batches(blobs(200), 40, 60)):
        expected = mean_log_prob(state, x)
        clustering = getattr(state, "kmeans_left", 0) > 0
        state, info = step(plan, state, Batch(x))
        assert isinstance(info, Info)
        assert info.log_likelihood.shape == ()
        assert not info.log_likelihood.requires_grad
        if not clustering:  # k-means has no likelihood of its own
            assert info.log_likelihood.item() == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert all(isinstance(v, float) and np.isfinite(v) for v in info.scalars.values())
        assert all(isinstance(name, str) for name in info.scalars)
        assert isinstance(info.converged, bool)
        assert isinstance(info.stop, bool)
        assert state.steps == n + 1


def test_the_first_phases_end_once(case):
    plan = case.plan(batch_size=40)
    state, settled = plan.init(), []
    for x in batches(blobs(200), 40, 290):
        state, _ = step(plan, state, Batch(x))
        settled.append(plan.settled(state))
    assert settled == sorted(settled)
    assert settled[0] is False
    assert settled[-1] is True


def test_a_stream_is_refused_by_a_solver_that_needs_passes(case):
    endless = case.problem(epochs=None, batches_per_epoch=None)
    if case.solver.needs_passes:
        with pytest.raises(InputError, match="needs passes over data of known length: use fit"):
            case.solver.plan(endless)
    else:
        case.solver.plan(endless)


def test_a_step_leaves_the_batch_as_it_is(case):
    x = blobs(40)
    before = x.clone()
    plan = case.stream_plan()
    state = plan.init()
    for _ in range(3):
        state, _ = step(plan, state, Batch(x))
    assert torch.equal(x, before)


def assert_same_tensors(found: Any, expected: Any) -> None:
    """Compare two contributions, which must have the same tensors."""
    ours, theirs = name_tensors(found), name_tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert_close(tensor, theirs[name], 1e-10)


@pytest.mark.parametrize("steps", [0, 150, 290])
def test_a_contribution_is_a_sum_over_rows(case, steps):
    plan = case.plan(dtype=torch.float64)
    state, twin = (state_after(case, steps, torch.float64) for _ in range(2))
    x = blobs(400).double()[:41]
    whole = plan.contribution(state, Batch(x))
    parts = [plan.contribution(state, Batch(part)) for part in x.split([1, 20, 20])]
    total = add(add(parts[0], parts[1]), parts[2])
    assert type(total) is type(whole)
    assert_same_tensors(total, whole)
    # Both ways lead to the same place.
    state, info = step(plan, state, Batch(x))
    twin, info_of_parts = plan.update(twin, total)
    assert_close(info_of_parts.log_likelihood, info.log_likelihood, 1e-10)
    for one, other in zip(state.parameters, twin.parameters, strict=True):
        # The sign of a factor column is free.
        assert_close(one.abs(), other.abs(), 1e-8)


@pytest.mark.parametrize("steps", [150, 290])
def test_a_row_of_weight_two_counts_twice_and_of_weight_zero_never(case, steps):
    plan = case.plan(dtype=torch.float64)
    state = state_after(case, steps, torch.float64)
    x, weights = blobs(400).double()[:40], torch.arange(40).remainder(3)
    weighted = plan.contribution(state, Batch(x, weights.double()))
    repeated = plan.contribution(state, Batch(x.repeat_interleave(weights, dim=0)))
    assert_same_tensors(weighted, repeated)


def test_the_order_of_rows_does_not_matter(case):
    plan = case.plan(dtype=torch.float64)
    state, x = state_after(case, 150, torch.float64), blobs(400).double()[:40]
    forward, backward = (plan.contribution(state, Batch(rows)) for rows in (x, x.flip(0)))
    assert_same_tensors(forward, backward)


@pytest.mark.parametrize("at", [0, 37, 150, 250])
def test_a_run_goes_on_from_a_file_bit_by_bit(case, at):
    tensors, values = pack(state_after(case, at))
    written = save_tensors({name: t.contiguous() for name, t in tensors.items()})
    settings = json.loads(json.dumps(to_settings(case.solver)))
    solver = from_settings(settings)
    plan = solver.plan(case.problem())
    state = unpack(solver.state_type, load_tensors(written), json.loads(json.dumps(values)))
    # A file holds row-major tensors; readers restore the layout of the factors.
    factors = factor_major(state.parameters.precision_factors)
    state.parameters = state.parameters._replace(precision_factors=factors)
    for x in list(batches(blobs(400), 40, at + 60))[at:]:
        state, _ = step(plan, state, Batch(x))
    assert equal(state, state_after(case, at + 60))


def test_the_same_seed_gives_the_same_result(case):
    torch.manual_seed(2)
    plan = case.plan()
    assert equal(train(plan, plan.init(), blobs(400), 290), state_after(case, 290))
    plan = case.plan(seed=4)
    assert not equal(train(plan, plan.init(), blobs(400), 37), state_after(case, 37))


def adversarial(name: str) -> Tensor:
    """Make rows (200, 5) of one bad sort."""
    X = blobs(200)
    if name == "constant columns":
        X[:, [0, 3]] = torch.tensor([0.0, 7.0])
    elif name == "duplicated rows":
        X = X[:2].repeat(100, 1)
    elif name == "one huge outlier":
        X[17] = 1e6
    elif name == "all zeros":
        X.zero_()
    elif name == "all the same":
        X[:] = X[0]
    elif name == "tiny":
        X *= 1e-6
    elif name == "huge":
        X *= 1e6
    elif name == "mixed scales":
        X *= torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6])
    elif name == "offset":
        X += 1e4
    elif name == "binary":
        X = (X > 0).float()
    return X


ADVERSARIAL = [
    "constant columns",
    "duplicated rows",
    "one huge outlier",
    "all zeros",
    "all the same",
    "tiny",
    "huge",
    "mixed scales",
    "offset",
    "binary",
]


@pytest.mark.parametrize(
    ("epochs", "steps"), [(6, 110), pytest.param(20, 1200, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_invariants_hold_on_bad_data(case, name, epochs, steps):
    """Raw, unscaled data: the loop would centre and scale it, but a stream can change later."""
    # The last steps come after the planned end.
    plan = case.plan(epochs=epochs, batches_per_epoch=15)
    state = plan.init()
    for n, x in enumerate(batches(adversarial(name), 20, steps)):
        state, info = step(plan, state, Batch(x))
        if n < 50 or n % 20 == 0 or n > steps - 10:
            assert info.log_likelihood.isfinite()
            check_invariants(case.solver, state, MAX_PRECISION)


@pytest.mark.parametrize("steps", [300, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["blobs", "one huge outlier", "huge", "duplicated rows"])
def test_invariants_hold_on_a_stream_of_single_rows(case, name, steps):
    plan = case.stream_plan()
    state = plan.init()
    for n, x in enumerate(batches(adversarial(name), 1, steps)):
        state, info = step(plan, state, Batch(x))
        if n < 50 or n % 20 == 0:
            assert info.log_likelihood.isfinite()
            check_invariants(case.solver, state, MAX_PRECISION)


def test_invariants_hold_when_the_data_changes_abruptly(case):
    plan = case.stream_plan()
    state = plan.init()
    for name in ["blobs", "huge", "all zeros", "tiny", "offset", "blobs"]:
        for x in batches(adversarial(name), 20, 60):
            state, info = step(plan, state, Batch(x))
            assert info.log_likelihood.isfinite(), name
        check_invariants(case.solver, state, MAX_PRECISION)


def test_each_feature_can_have_its_own_bound(case):
    bound = torch.tensor([0.1, 1.0, 10.0, 100.0, 1000.0])
    plan = case.plan(max_precision=bound, epochs=6)
    state = plan.init()
    for x in batches(blobs(400), 40, 150):
        state, _ = step(plan, state, Batch(x))
        assert (state.parameters.precision_diag <= bound * (1 + 1e-6)).all()
    check_invariants(case.solver, state, bound)


def test_the_likelihood_rises_on_easy_data(case):
    X, held_out = blobs(2000), blobs(500, seed=1)
    before = mean_log_prob(state_after(case, 0), held_out)
    # Plain gradient ascent needs the most steps.
    batches_per_epoch = 80 if case.solver.name == "sgd" else BATCHES
    plan = case.plan(batches_per_epoch=batches_per_epoch)
    state = train(plan, plan.init(), X, EPOCHS * batches_per_epoch)
    after = mean_log_prob(state, held_out)
    # A single Gaussian with the same mean and covariance.
    gaussian = torch.distributions.MultivariateNormal(X.mean(dim=0), X.mT.cov())
    single = gaussian.log_prob(held_out).mean().item()
    assert after - before > 0.8 * (single - before) > 0


@pytest.mark.parametrize(
    ("K", "d", "l"), [(1, 5, 2), (1, 5, 0), (1, 1, 0), (4, 1, 0), (6, 5, 0), (7, 5, 4), (2, 2, 1)]
)
def test_sizes_at_the_edge_work(case, K, d, l):
    X = blobs(400)[:, :d]
    plan = case.plan(K, d, l, epochs=4)
    state = plan.init()
    assert state.parameters.shape == (K, d, l)
    before = mean_log_prob(state, X)
    state = train(plan, state, X, 4 * BATCHES)
    check_invariants(case.solver, state, MAX_PRECISION)
    assert mean_log_prob(state, X) > before


def test_a_step_forms_nothing_of_batch_by_components_by_features(case):
    """At the start, in the middle and near the end of a planned run."""
    K, d, l, B = 64, 256, 3, 128
    # Parameters, batches, and a few batches kept for seeding are all far smaller.
    assert max(K * d * (l + 2), B * K * (l + 1) ** 2, 12 * B * d) < B * K * d / 4
    plan = case.plan(K, d, l, epochs=5)
    state = plan.init()
    X = torch.randn(500, d, generator=torch.Generator().manual_seed(0))
    for steps, watched in ((0, 12), (48, 12), (40, 12)):
        state = train(plan, state, X, steps, size=B)
        with LargestTensor() as largest:
            state = train(plan, state, X, watched, size=B)
        assert largest.numel < B * K * d / 4, largest.operation
