"""Mixtures that share noise variances: all solvers, screens, processes, files and the command."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import factormix
from factormix import MFA, InputError, MFAClassifier
from factormix.data.batches import Batch
from factormix.solvers import ConstrainedSGD as SGD
from factormix.solvers import CovarianceGradient, NaturalGradient, Problem
from factormix.training.solvers import SOLVERS
from factormix.training.solvers.base import Change, step
from launching import torchrun

SHARED = ["tied", "isotropic"]
SOLVERS_OF_NOISE = ["natural", "em", "sgd"]


def table(n: int = 900, d: int = 10, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    centres = 3 * random.normal(size=(8, d))
    return centres[random.integers(8, size=n)] + random.normal(size=(n, d))


def is_shared(model: MFA, noise: str) -> bool:
    """Return whether variances are equal, to the last bit of what training used."""
    E = model._run.parameters.precision_diag
    along = 0 if noise == "tied" else 1
    return torch.equal(E.amin(dim=along), E.amax(dim=along))


def fit(noise: str, solver: Any = "natural", rows: np.ndarray | None = None, **more: Any) -> MFA:
    options = {"random_state": 0, "batch_size": 150, "max_epochs": 14} | more
    size = options.pop("size", (6, 2))
    return MFA(*size, solver=solver, noise=noise, **options).fit(table() if rows is None else rows)


@pytest.mark.parametrize("noise", SHARED)
@pytest.mark.parametrize("solver", SOLVERS_OF_NOISE)
@pytest.mark.parametrize("gaps", [False, True])
def test_variances_are_equal_with_every_solver(solver, noise, gaps):
    rows = table()
    if gaps:
        rows = np.where(np.random.default_rng(1).random(rows.shape) < 0.1, np.nan, rows)
    model = fit(noise, solver, rows)
    assert is_shared(model, noise)
    D = np.asarray(model.noise_variances_)
    one = D[:1] if noise == "tied" else D[:, :1]
    np.testing.assert_allclose(D, np.broadcast_to(one, D.shape), rtol=1e-6)


@pytest.mark.parametrize("noise", SHARED)
@pytest.mark.parametrize(
    "natural",
    [
        {"first_components": 3},
        {"first_components": 20},
        {"first_components": 12, "unused_weight": 0.6},
        {"predict_variances": False},
    ],
)
def test_variances_stay_equal_when_components_come_and_go(noise, natural):
    looks = list[bool]()

    def look(progress: Any) -> None:
        looks.append(is_shared(progress.model, noise))

    callback: Any = look
    callback.report_seconds = 0.0
    solver = NaturalGradient(tol=0.0, **natural)
    model = fit(noise, solver, size=(12, 2), callbacks=[callback], max_epochs=10)
    assert len(looks) > 5
    assert all(looks)
    if "unused_weight" in natural:
        assert model.history_[-1]["revived"] > 0
    assert model.n_components_ == 12


@pytest.mark.parametrize("noise", ["isotropic"])
def test_halves_of_other_widths_have_isotropic_noise(noise):
    model = fit(noise, NaturalGradient(first_components=4, widening=1.2), size=(12, 2))
    assert is_shared(model, noise)


@pytest.mark.parametrize("noise", SHARED)
def test_few_candidates_train_nearly_as_well_as_all(noise):
    rows = table(2000)
    options = {"rows": rows, "size": (40, 2), "batch_size": 200, "max_epochs": 5}
    screened, full = (fit(noise, candidates=c, **options) for c in (20, None))
    assert is_shared(screened, noise)
    assert screened.history_[-1]["candidates"] < 40
    assert screened.score(rows) == pytest.approx(full.score(rows), rel=2e-2)


@pytest.mark.parametrize("noise", SHARED)
@pytest.mark.parametrize("scaling", ["global", "feature", None])
@pytest.mark.parametrize("solver", ["natural", "sgd"])
def test_variances_stay_equal_on_a_stream_whose_units_change(noise, scaling, solver):
    model = MFA(5, 2, solver=solver, noise=noise, scaling=scaling, random_state=0)
    for growth in (1.0, 4.0, 16.0):
        rows = table(1500) * np.linspace(1, growth, 10)
        for part in np.split(rows, 5):
            model.partial_fit(part)
            assert is_shared(model, noise)
    assert np.isfinite(model.score(rows))


@pytest.mark.parametrize("noise", SHARED)
@pytest.mark.parametrize("solver", ["natural", "sgd"])
def test_units_that_change_keep_a_state_valid(noise, solver):
    bound = torch.linspace(20, 400, 4)
    problem = Problem(3, 4, 2, max_precision=bound, noise=noise, batch_size=60)
    plan = SOLVERS[solver]().plan(problem)
    state: Any = plan.init()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        state, _ = step(plan, state, Batch(torch.randn(60, 4, generator=generator)))
    units = Change(torch.zeros(4), torch.tensor([0.5, 1.0, 2.0, 4.0]))
    state = plan.change_units(state, units)
    E = state.parameters.precision_diag
    along = 0 if noise == "tied" else 1
    assert torch.equal(E.amin(dim=along), E.amax(dim=along))
    assert (state.bound * (1 + 1e-5) >= E).all()
    if noise == "isotropic":
        assert state.bound.unique().numel() == 1


@pytest.mark.parametrize("noise", SHARED)
def test_the_floor_holds(noise):
    """A column of whole numbers has a noise floor, which isotropic noise obeys everywhere."""
    rows = table()
    rows[:, 0] = np.round(rows[:, 0] * 3)
    model = fit(noise, rows=rows, size=(6, 9))
    bound = model._run.problem.max_precision
    assert bound is not None
    E = model._run.parameters.precision_diag
    assert (bound.to(E) * (1 + 1e-5) >= E).all()


def test_sgd_moves_shared_precisions_by_the_gradient_of_the_objective():
    """By autograd through one E for all components, and through one for each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    for noise in SHARED:
        solver = SGD(phases=None, parametrisation="linear", min_sigma=0.01, sigma=0.01)
        bound = torch.tensor(20.0)
        problem = Problem(3, 4, 2, max_precision=bound, dtype=torch.float64, noise=noise)
        plan = solver.plan(problem)
        state = plan.init()
        logits, mu, E, Gamma, M = state.parameters
        free = torch.rand(4, generator=generator, dtype=torch.float64) + 1
        free = free if noise == "tied" else free[:3].unsqueeze(1)
        E = free.expand(3, 4).clone()
        Gamma = 0.3 * torch.randn(3, 2, 4, generator=generator, dtype=torch.float64).mT
        state.parameters = state.parameters._replace(precision_diag=E)
        Gamma, M = factormix.core.parameters.diagonalise(E, Gamma, solver.min_eigenvalue)
        state.parameters = state.parameters._replace(precision_factors=Gamma, latent_variances=M)
        leaf = free.clone().requires_grad_()
        precision = torch.diag_embed(leaf.expand(3, 4)) - Gamma @ Gamma.mT
        dense = torch.distributions.MultivariateNormal(mu.clone(), precision_matrix=precision)
        joint = dense.log_prob(x.unsqueeze(1)) + torch.log_softmax(logits, dim=0)
        (gradient,) = torch.autograd.grad(joint.amax(dim=1).mean(), leaf)
        # The projection of the gradient on equal values has the mean over features.
        length = gradient if noise == "tied" else gradient / 4
        rate = solver.learning_rate * solver.precision_weight
        expected = free + rate * length
        state, _ = step(plan, state, Batch(x))
        torch.testing.assert_close(state.parameters.precision_diag, expected.expand(3, 4))


@pytest.mark.parametrize("solver", SOLVERS_OF_NOISE)
@pytest.mark.parametrize("noise", SHARED)
def test_the_right_noise_model_predicts_better_from_few_rows(solver, noise):
    random = np.random.default_rng(3)
    K, d, l = 4, 12, 1
    means = 4 * random.normal(size=(K, d))
    Lambda = random.normal(size=(K, d, l))
    D = np.exp(random.normal(size=(1, d) if noise == "tied" else (K, 1))) * np.ones((K, d))

    def draw(n: int) -> np.ndarray:
        k = random.integers(K, size=n)
        z = random.normal(size=(n, l))
        mean = means[k] + np.einsum("ndl,nl->nd", Lambda[k], z)
        return mean + np.sqrt(D[k]) * random.normal(size=(n, d))

    few, new = draw(60), draw(4000)
    options: dict[str, Any] = {"rows": few, "size": (K, l), "means_init": means}
    options |= {"batch_size": 60, "max_epochs": 60}
    if solver == "sgd":
        # Long enough steps for a few passes over the rows.
        solver = SGD(phases=None, learning_rate=0.1, min_learning_rate=0.1, precision_weight=1.0)
        options |= {"max_epochs": 400}
    right, own = (fit(kind, solver, **options).score(new) for kind in (noise, "component"))
    assert right > own + 0.1


@pytest.mark.parametrize("solver", SOLVERS_OF_NOISE)
@pytest.mark.parametrize("noise", SHARED)
def test_a_file_keeps_the_noise_and_a_run_resumes_bit_by_bit(tmp_path: Path, solver, noise):
    path, steps = tmp_path / "model.safetensors", 30

    def interrupt(progress: Any) -> bool:
        return progress.run.steps >= steps

    whole = fit(noise, solver)
    stopped: Any = interrupt
    stopped.report_seconds = 0.0
    part = fit(noise, solver, callbacks=[stopped])
    assert not part.finished_
    part.save(path)
    loaded = factormix.load(path)
    assert loaded.noise == noise
    assert loaded.n_parameters_ == part.n_parameters_
    loaded.resume(table())
    for found, expected in zip(loaded._run.parameters, whole._run.parameters, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("noise", SHARED)
def test_criteria_count_shared_variances(noise):
    model = fit(noise)
    free = 5 + 6 * (10 + 20 - 1) + (10 if noise == "tied" else 6)
    assert model.n_parameters_ == free
    rows = table()
    assert model.bic(rows) == pytest.approx(
        -2 * model.score(rows) * len(rows) + free * np.log(len(rows))
    )


def test_a_classifier_passes_the_noise_on():
    y = np.arange(900) % 2
    rows = table() + 4 * y[:, None]
    model = MFAClassifier(3, 2, noise="tied", random_state=0, max_epochs=3).fit(rows, y)
    assert all(is_shared(one, "tied") for one in model.estimators_ if one is not None)


def test_a_bad_noise_gets_one_sentence():
    rows = table(50)
    with pytest.raises(InputError, match="noise must be one of component, tied, isotropic, not 3"):
        MFA(noise=3).fit(rows)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"'covariance' gives each component its own noise"):
        MFA(noise="tied", solver=CovarianceGradient()).fit(rows)
    with pytest.raises(InputError, match=r"widening=1\.2 makes the noise of components differ"):
        MFA(2, 1, noise="tied", solver=NaturalGradient(widening=1.2)).fit(rows)


def test_a_problem_has_the_noise_of_each_component_by_default():
    assert {f.name: f.default for f in dataclasses.fields(Problem)}["noise"] == "component"


PROCESSES = """
import json, os, sys
import numpy as np
from factormix import MFA
from factormix.solvers import NaturalGradient

rows = np.load("rows.npy")
for i, case in enumerate(json.loads(sys.argv[1])):
    if "natural" in case:
        case["solver"] = NaturalGradient(**case.pop("natural"))
    model = MFA(random_state=0, batch_size=150, **case).fit(rows)
    if model._run.problem.communicator.saves or case["mesh"] == "data":
        name = f"{i}-{os.environ['RANK']}" if case["mesh"] == "data" else f"{i}"
        model.save(f"{name}.safetensors")
"""


@pytest.mark.slow
def test_two_processes_share_the_noise_of_one(tmp_path: Path):
    import json

    rows = table()
    np.save(tmp_path / "rows.npy", rows)
    (tmp_path / "script.py").write_text(PROCESSES)
    size = {"n_components": 6, "n_factors": 2}
    large = {"n_components": 120, "n_factors": 2, "dtype": "float64", "max_epochs": 4}
    natural = {"first_components": 120, "seed_rows": 400, "tol": 0.0}
    grows = {"first_components": 5, "tol": 0.0}
    cases: list[dict[str, Any]] = []
    for noise in SHARED:
        for mesh in ("data", "components"):
            shared = {"noise": noise, "mesh": mesh}
            cases += [shared | size | {"max_epochs": 8}]
            cases += [shared | size | {"solver": "em", "max_epochs": 13}]
            cases += [shared | large | {"natural": natural}]
            cases += [shared | {**large, "n_components": 12} | {"natural": grows}]
        cases += [shared | size | {"mesh": "data", "solver": "sgd", "max_epochs": 8}]
        # One process has no component to step.
        few = {"n_components": 1, "n_factors": 2, "max_epochs": 8}
        cases += [{"noise": noise, "mesh": "data", "natural": {"first_components": 1}, **few}]
    torchrun(2, "script.py", json.dumps(cases), folder=tmp_path)
    for i, case in enumerate(cases):
        options = dict(case)
        if "natural" in options:
            options["solver"] = NaturalGradient(**options.pop("natural"))
        alone = MFA(random_state=0, batch_size=150, **options | {"mesh": None}).fit(rows)
        by_rows = case["mesh"] == "data"
        files = [tmp_path / f"{i}-{r}.safetensors" for r in (0, 1)]
        models = [
            factormix.load(file) for file in (files if by_rows else [tmp_path / f"{i}.safetensors"])
        ]
        for model in models:
            assert is_shared(model, case["noise"]), case
            assert model.score(rows) == pytest.approx(alone.score(rows), rel=1e-4), case
        if by_rows:
            first, second = (load_file(file) for file in files)
            torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
