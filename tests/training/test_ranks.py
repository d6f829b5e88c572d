"""``n_factors="auto"``: ranks that are known, every way to train, files, processes and commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.densities import exact_scores
from tests.launching import torchrun
from typer.testing import CliRunner

import factormix
from factormix import MFA, select
from factormix.cli import app
from factormix.errors import InputError
from factormix.solvers import NaturalGradient

RANKS = (0, 1, 2, 3, 5, 8)
WIDTH = 20


def make_rows(
    n: int = 3000, *, seed: int = 0, d: int = WIDTH, noise: str = "component", spread: float = 4.0
) -> np.ndarray:
    """Draw rows (n, d) of one component for each of ``RANKS``."""
    rng, rows = np.random.default_rng(seed), list[np.ndarray]()
    tied = rng.uniform(0.5, 1.5, d)
    for i, rank in enumerate(RANKS):
        own = {"component": rng.uniform(0.5, 1.5, d), "tied": tied, "isotropic": np.ones(d)}[noise]
        loadings, centre = rng.normal(size=(rank, d)), spread * rng.normal(size=d)
        m = n // len(RANKS)
        codes = np.random.default_rng(1000 * n + i).normal(size=(m, rank + d))
        rows.append(centre + codes[:, :rank] @ loadings + codes[:, rank:] * np.sqrt(own))
    return rng.permutation(np.concatenate(rows))


def fit(rows: np.ndarray, **options: Any) -> MFA:
    return MFA(len(RANKS), "auto", **{"max_factors": 14, "random_state": 0} | options).fit(rows)


def ranks_of(model: MFA) -> list[int]:
    return sorted(model.ranks_.tolist())


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_known_ranks_are_found(seed):
    model = fit(make_rows(seed=seed))
    assert ranks_of(model) == list(RANKS)
    assert model.n_factors_ == 8
    assert model.loadings_.shape == (6, WIDTH, 8)
    used = (np.abs(model.loadings_).sum(axis=1) > 0).sum(axis=1)
    np.testing.assert_array_equal(used, model.ranks_)
    assert (model.effective_factors_ <= model.ranks_).all()
    free = 5 + sum(2 * WIDTH + WIDTH * r - r * (r - 1) // 2 for r in RANKS)
    assert model.n_parameters_ == free


@pytest.mark.parametrize("options", [{"solver": "em"}, {"noise": "tied"}, {"noise": "isotropic"}])
def test_known_ranks_are_found_by_em_and_with_shared_noise(options):
    rows = make_rows(noise=options.get("noise", "component"), spread=12.0)
    assert ranks_of(fit(rows, **options)) == list(RANKS)


def test_known_ranks_are_found_in_rows_with_gaps():
    rows = make_rows(6000)
    rows[np.random.default_rng(0).random(rows.shape) < 0.1] = np.nan
    assert ranks_of(fit(rows, max_epochs=10)) == list(RANKS)


def test_ranks_predict_new_rows_at_least_as_well_as_one_number_of_factors():
    train, new = make_rows(1200), make_rows(3000)
    own = fit(train).score(new)
    for l in (2, 8, 14):
        assert own > MFA(6, l, random_state=0).fit(train).score(new)


def test_few_rows_limit_the_factors_to_begin_with():
    rows = make_rows(240)
    model = fit(rows)
    # Forty rows of each component, four for the mean and each factor.
    assert model._run.problem.n_factors == 9
    assert model.n_factors_ <= 9


def test_screened_components_have_ranks():
    rows = make_rows(6000, d=32)
    options: dict[str, Any] = {"candidates": 12, "max_epochs": 4, "max_factors": 12}
    model = MFA(24, "auto", random_state=0, **options).fit(rows)
    run = model._run
    assert run.state.screen.active
    assert run.state.screen.Gamma_mu.shape == (24, model.n_factors_)
    assert model.n_factors_ < 12
    exact = exact_scores(model, rows[:500])
    np.testing.assert_allclose(model.score_samples(rows[:500]), exact, atol=0.1)


def test_a_stream_loses_factors_without_support():
    rows = make_rows(24_000)
    solver = NaturalGradient()
    model = MFA(6, "auto", max_factors=14, random_state=0, batch_size=100, solver=solver)
    model.partial_fit(rows[:2000])
    assert model.ranks_.max() == 14
    for first in range(2000, len(rows), 2000):
        model.partial_fit(rows[first : first + 2000])
    assert ranks_of(model) == pytest.approx(list(RANKS), abs=3)
    assert model.n_factors_ < 14
    fixed = MFA(6, 8, random_state=0, batch_size=100).partial_fit(rows)
    assert model.score(make_rows()) > fixed.score(make_rows()) - 0.1


@pytest.mark.parametrize(("solver", "steps"), [(NaturalGradient(tol=0.0), 60), ("em", 165)])
def test_a_file_keeps_ranks_and_a_run_resumes_bit_by_bit(tmp_path: Path, solver, steps):
    rows, path = make_rows(1200), tmp_path / "model.safetensors"
    options: dict[str, Any] = {"solver": solver, "max_epochs": 22, "batch_size": 150}

    def interrupt(progress: Any) -> bool:
        return progress.run.steps >= steps

    stopped: Any = interrupt
    stopped.report_seconds = 0.0
    whole = fit(rows, **options)
    part = fit(rows, callbacks=[stopped], **options)
    assert not part.finished_
    assert part.n_factors_ < 14
    part.save(path)
    loaded = factormix.load(path)
    np.testing.assert_array_equal(loaded.ranks_, part.ranks_)
    np.testing.assert_array_equal(loaded.score_samples(rows), part.score_samples(rows))
    loaded.resume(rows)
    for found, expected in zip(loaded._run.parameters, whole._run.parameters, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("training_state", [True, False])
def test_files_follow_the_sum_of_the_ranks(tmp_path: Path, training_state):
    rows, path = make_rows(1200), tmp_path / "model.safetensors"
    model = fit(rows)
    model.save(path, training_state=training_state)
    tensors, n = load_file(path), int(model.ranks_.sum())
    assert n < 6 * model.n_factors_
    assert tensors["parameters.ranks"].tolist() == model.ranks_.tolist()
    assert tensors["parameters.precision_factors"].shape == (n, WIDTH)
    if training_state:
        assert tensors["averages.Theta"].shape == (n + 6, WIDTH)
    loaded = factormix.load(path)
    for found, expected in zip(loaded._run.parameters, model._run.parameters, strict=True):
        assert torch.equal(found, expected)
    factors = loaded._run.parameters.precision_factors
    assert factors.stride() == model._run.parameters.precision_factors.stride()


def test_a_file_without_any_factor_loads(tmp_path: Path):
    rows, path = np.random.default_rng(0).normal(size=(400, 5)), tmp_path / "model.safetensors"
    model = MFA(1, "auto", max_factors=3, random_state=0).fit(rows)
    assert not model.ranks_.any()
    model.save(path)
    loaded = factormix.load(path)
    np.testing.assert_array_equal(loaded.score_samples(rows), model.score_samples(rows))
    loaded.partial_fit(rows)


def test_another_fit_goes_on_with_the_ranks_so_far():
    rows = make_rows()
    model = fit(rows, max_epochs=5, warm_start=True)
    before = model.n_factors_
    model.fit(rows)
    assert model.n_factors_ <= before
    with pytest.raises(InputError, match="warm_start continues a model with n_factors="):
        model.set_params(n_factors=3, max_factors=None).fit(rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_factors": "auto", "solver": "sgd"}, "'sgd' does not count the rows that support"),
        ({"n_factors": "auto", "solver": "covariance"}, "'covariance' does not count"),
        ({"n_factors": "many"}, "of at least 0, 'auto' or None, not 'many'"),
        ({"n_factors": 3, "max_factors": 8}, "max_factors=8 limits ranks"),
        ({"n_factors": "auto", "max_factors": 0}, "max_factors must be a whole number of at least"),
    ],
)
def test_bad_ranks_get_one_sentence(options, words):
    with pytest.raises(InputError, match=words):
        MFA(2, **options).fit(make_rows(60))


def test_select_tries_numbers_of_components_with_their_own_ranks():
    rows = make_rows(1200)
    found = select(
        rows, [2, 6], "auto", estimator=MFA(n_factors="auto", max_factors=10, random_state=0)
    )
    assert found.best_params_ == {"n_components": 6, "n_factors": "auto"}
    assert ranks_of(found.best_estimator_)[0] < found.best_estimator_.n_factors_
    assert "auto" in str(found)


def test_commands_choose_ranks(tmp_path: Path):
    np.save(tmp_path / "rows.npy", make_rows(1200))
    model, rows = str(tmp_path / "model.safetensors"), str(tmp_path / "rows.npy")
    size = ["--n-factors", "auto", "--max-factors", "14", "--random-state", "0"]
    runner = CliRunner()
    done = runner.invoke(app, ["train", rows, "-o", model, "--n-components", "6", *size, "-q"])
    assert done.exit_code == 0, done.output
    loaded = factormix.load(model)
    assert loaded.n_factors == "auto"
    assert loaded.max_factors == 14
    facts = runner.invoke(app, ["info", model, "--json"])
    assert json.loads(facts.output)["ranks"] == loaded.ranks_.tolist()
    text = runner.invoke(app, ["info", model]).output
    assert f"{loaded.ranks_.min()} to {loaded.ranks_.max()} per component" in text
    chosen = runner.invoke(app, ["select", rows, "--n-components", "2,6", *size, "-q", "-o", model])
    assert chosen.exit_code == 0, chosen.output
    assert factormix.load(model).n_factors == "auto"
    wrong = runner.invoke(app, ["train", rows, "-o", model, "--n-factors", "3.5"])
    assert isinstance(wrong.exception, InputError)
    assert (
        str(wrong.exception)
        == "n_factors must be a whole number of at least 0, 'auto' or None, not '3.5'."
    )


PROCESSES = """
import json, os, sys
import numpy as np
from factormix import MFA

rows = np.load("rows.npy")
for i, case in enumerate(json.loads(sys.argv[1])):
    model = MFA(6, "auto", max_factors=14, random_state=0, batch_size=300, **case).fit(rows)
    if model._run.problem.communicator.saves or case["mesh"] == "data":
        name = f"{i}-{os.environ['RANK']}" if case["mesh"] == "data" else f"{i}"
        model.save(f"{name}.safetensors")
"""


@pytest.mark.slow
def test_two_processes_find_the_ranks_of_one(tmp_path: Path):
    rows = make_rows(900, spread=12.0)
    np.save(tmp_path / "rows.npy", rows)
    (tmp_path / "script.py").write_text(PROCESSES)
    cases: list[dict[str, Any]] = [
        {"mesh": mesh, "max_epochs": 22, "dtype": "float64"} | more
        for mesh in ("data", "components")
        for more in ({"solver": "em"}, {"noise": "tied"})
    ]
    torchrun(2, "script.py", json.dumps(cases), folder=tmp_path)
    for i, case in enumerate(cases):
        alone = fit(rows, batch_size=300, **case | {"mesh": None})
        files = [tmp_path / f"{i}-{r}.safetensors" for r in (0, 1)]
        by_rows = case["mesh"] == "data"
        model = factormix.load(files[0] if by_rows else tmp_path / f"{i}.safetensors")
        assert ranks_of(model) == ranks_of(alone), case
        assert model.n_factors_ < 14
        assert model.score(rows) == pytest.approx(alone.score(rows), rel=1e-4), case
        if by_rows:
            first, second = (load_file(file) for file in files)
            torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
