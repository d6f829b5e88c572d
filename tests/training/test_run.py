"""Units and bounds that adapt to a stream after unusual first rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from densities import assert_honest
from factormix import MFA, InputError, load
from factormix.core.density import log_prob, operands
from factormix.core.parameters import Parameters, latent_variances
from factormix.data.batches import Batch
from factormix.solvers import SOLVERS, NaturalGradient, Problem
from factormix.training.solvers import step
from factormix.training.solvers.base import Change

STREAMING = [name for name, kind in SOLVERS.items() if not kind.needs_passes]


def optimum(*deviations: float) -> float:
    """Return the mean log-density of independent normal columns under their own density."""
    return -float(np.sum(0.5 * np.log(2 * np.pi * np.e) + np.log(deviations)))


def begins_to_vary(seed: int = 0, n_batches: int = 30) -> Iterator[np.ndarray]:
    """Serve a column that is constant for 1,000 rows and then has a deviation of 1,000."""
    rng = np.random.default_rng(seed)
    first = rng.normal(size=(1000, 3))
    first[:, 1] = 7
    yield first
    for _ in range(n_batches):
        x = rng.normal(size=(500, 3))
        x[:, 1] = 7 + 1000 * x[:, 1]
        yield x


def begins_small(seed: int = 0, n_batches: int = 30) -> Iterator[np.ndarray]:
    """Serve 100 rows of deviation 1, then rows of deviation 1,000."""
    rng = np.random.default_rng(seed)
    yield rng.normal(size=(100, 3))
    for _ in range(n_batches):
        yield 1e3 * rng.normal(size=(200, 3))


def begins_elsewhere(seed: int = 0, n_batches: int = 30) -> Iterator[np.ndarray]:
    """Serve 100 rows around 0, then rows around 1,000."""
    rng = np.random.default_rng(seed)
    yield rng.normal(size=(100, 3))
    for _ in range(n_batches):
        yield 1e3 + rng.normal(size=(200, 3))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("solver", STREAMING)
@pytest.mark.parametrize("serve", [begins_to_vary, begins_small, begins_elsewhere])
def test_scores_match_the_parameters_at_any_time(serve, solver, dtype):
    model = MFA(3, 1, random_state=0, solver=solver, dtype=dtype)
    seen = []
    for i, batch in enumerate(serve(n_batches=12)):
        model.partial_fit(batch)
        seen.append(batch[:50])
        if i % 3 == 0:
            assert_honest(model, np.concatenate(seen))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("serve", "deviations"),
    [(begins_to_vary, (1, 1e3, 1)), (begins_small, (1e3,) * 3), (begins_elsewhere, (1,) * 3)],
)
def test_rows_after_misleading_first_rows_are_learned(serve, deviations, dtype, seed):
    model = MFA(3, 1, random_state=0, dtype=dtype)
    for i, batch in enumerate(serve(seed)):
        model.partial_fit(batch)
        if i > 10:
            assert model.score(batch) > optimum(*deviations) - 5
    assert model.score(batch) > optimum(*deviations) - 2


def test_first_rows_that_are_too_wide_are_overcome():
    """Three batches of deviation 1,000 and then 0.01, against units that stay as they began."""
    rng = np.random.default_rng(0)
    following = MFA(3, 1, random_state=0)
    # What the first rows say: a noise variance of a millionth of theirs.
    frozen = MFA(3, 1, random_state=0, scaling=None, max_precision=1.0)
    for i in range(400):
        x = rng.normal(size=(100, 4)) * (1000 if i < 3 else 0.01)
        following.partial_fit(x)
        frozen.partial_fit(x)
    held_out = 0.01 * rng.normal(size=(2000, 4))
    best = optimum(*[0.01] * 4)
    assert following.score(held_out) > best - 1
    assert frozen.score(held_out) < best - 10
    assert_honest(following, held_out)


@pytest.mark.parametrize("solver", STREAMING)
@pytest.mark.parametrize("cut", [1, 3, 4, 9])
def test_a_stream_saved_in_the_middle_goes_on_bit_by_bit(solver, cut, tmp_path: Path):
    """Rows collected for the next change of units are saved too."""
    batches = list(begins_to_vary(n_batches=12))
    whole = MFA(3, 1, random_state=0, solver=solver)
    for batch in batches:
        whole.partial_fit(batch)
    split = MFA(3, 1, random_state=0, solver=solver)
    for batch in batches[:cut]:
        split.partial_fit(batch)
    split.save(tmp_path / "model.safetensors", training_state=True)
    split = load(tmp_path / "model.safetensors")
    for batch in batches[cut:]:
        split.partial_fit(batch)
    for name in ("weights_", "means_", "precision_diag_", "precision_factors_"):
        np.testing.assert_array_equal(getattr(split, name), getattr(whole, name))
    np.testing.assert_array_equal(split.score_samples(batch), whole.score_samples(batch))


def exact(parameters: Parameters) -> Parameters:
    """Return parameters in float64 with the M that follows from them."""
    logits, mu, E, Gamma = (t.double() for t in parameters[:4])
    return Parameters(logits, mu, E, Gamma, latent_variances(E, Gamma))


@pytest.mark.parametrize("steps", [0, 3, 40])
@pytest.mark.parametrize("kind", STREAMING)
def test_a_change_of_units_keeps_the_density(kind, steps):
    """x becomes ``(x - offset) / scale``: densities differ by the Jacobian, now and later."""
    generator = torch.Generator().manual_seed(0)

    def rows() -> torch.Tensor:
        x = torch.randn(100, 4, generator=generator, dtype=torch.float64)
        return x + 3 * (torch.arange(100).unsqueeze(1) % 3)

    plan = SOLVERS[kind]().plan(
        Problem(3, 4, 2, torch.tensor(100.0), dtype=torch.float64, batch_size=100)
    )
    state = plan.init()
    for _ in range(steps):
        state, _ = step(plan, state, Batch(rows()))
    x, bound = rows(), state.bound.clone()
    before = log_prob(x, operands(exact(state.parameters)))
    change = Change(
        torch.tensor([1.0, -3.0, 0.0, 1e3], dtype=torch.float64),
        torch.tensor([10.0, 0.01, 1.0, 200.0], dtype=torch.float64),
    )
    state = plan.change_units(state, change)
    y = (x - change.offset) / change.scale
    after = log_prob(y, operands(exact(state.parameters), centre=True))
    torch.testing.assert_close(after - change.scale.log().sum(), before, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state.bound, bound * change.scale.square())


def test_natural_steps_do_not_depend_on_the_units():
    """A run with changed units equals a run without the change, up to rounding."""
    change = Change(
        torch.tensor([1.0, -3.0, 0.0], dtype=torch.float64),
        torch.tensor([10.0, 0.01, 1.0], dtype=torch.float64),
    )
    plan = NaturalGradient().plan(
        Problem(3, 3, 1, torch.tensor(100.0), dtype=torch.float64, batch_size=100)
    )
    scores = []
    for changed in (False, True):
        generator = torch.Generator().manual_seed(0)
        state, offset, scale = plan.init(), torch.zeros(3), torch.ones(3)
        for i in range(40):
            if changed and i in (10, 20):  # once there are components
                state = plan.change_units(state, change)
                offset, scale = offset + scale * change.offset, scale * change.scale
            x = torch.randn(100, 3, generator=generator, dtype=torch.float64)
            x += 3 * (torch.arange(100).unsqueeze(1) % 3)
            state, info = step(plan, state, Batch((x - offset) / scale))
        scores.append(float(info.log_likelihood) - float(scale.log().sum()))
    assert scores[1] == pytest.approx(scores[0], abs=1e-6)


def test_units_stay_while_rows_look_alike():
    """A stationary stream reaches the likelihood of its best density."""
    rng = np.random.default_rng(0)
    model = MFA(2, 1, random_state=0)
    for _ in range(40):
        model.partial_fit(rng.normal(size=(200, 3)) * [1, 10, 0.1] + 5)
    x = rng.normal(size=(4000, 3)) * [1, 10, 0.1] + 5
    assert model.score(x) == pytest.approx(optimum(1, 10, 0.1), abs=0.1)


@pytest.mark.parametrize("options", [{}, {"forgetting": 0.1}])
def test_rows_may_become_constant(options: dict[str, Any]):
    rng = np.random.default_rng(0)
    solver = dataclasses.replace(NaturalGradient(), **options)
    model = MFA(2, 1, random_state=0, solver=solver)
    for i in range(30):
        model.partial_fit(rng.normal(size=(200, 3)) if i < 5 else np.ones((200, 3)))
    assert np.isfinite(model.score(np.ones((3, 3))))
    assert_honest(model, np.concatenate([np.ones((3, 3)), rng.normal(size=(50, 3))]))


def test_units_follow_rows_by_their_weights():
    """Rows that hardly count do not widen the bound on the noise of the others."""
    rng = np.random.default_rng(0)
    model = MFA(2, 1, random_state=0)
    weights = np.where(np.arange(200) % 2 == 0, 1.0, 1e-9)
    for _ in range(40):
        x = rng.normal(size=(200, 3)) * np.where(weights == 1, 0.1, 1e3)[:, None]
        model.partial_fit(x, sample_weight=weights)
    assert model.score(0.1 * rng.normal(size=(2000, 3))) > optimum(0.1, 0.1, 0.1) - 0.5


def test_a_row_beyond_the_format_is_refused_and_the_model_stays():
    X = np.random.default_rng(0).normal(size=(400, 4))
    model = MFA(2, 1, random_state=0, batch_size=100).partial_fit(X)
    before = model.score_samples(X)
    bad = X[:100].copy()
    bad[7, 2] = 1e20
    with pytest.raises(InputError, match=r"row 407 of the stream .* use dtype='float64'"):
        model.partial_fit(bad)
    np.testing.assert_array_equal(model.score_samples(X), before)
    assert np.isfinite(model.partial_fit(X).score(X))
