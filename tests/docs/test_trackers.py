"""The lines that the site gives for MLflow and Weights & Biases, run against stand-ins for both.

Neither package is installed for the tests. The stand-ins have the signatures of the real ones, so
that a call which these would refuse is refused here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

from factormix import MFA, load

PAGE = Path(__file__).resolve().parents[2] / "docs" / "streams.md"
X = np.random.default_rng(0).normal(size=(400, 6)) + 3 * (np.arange(400)[:, None] % 4)


def block_with(words: str) -> str:
    """Return the one block of the page that has some words."""
    found = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (code,) = [one for one in found if words in one]
    return code


class Watched(MFA):
    """An estimator that leaves what it was fitted to where a test finds it."""

    fitted: ClassVar[list[MFA]] = []

    def fit(self, X: Any, y: Any = None, **options: Any) -> MFA:
        """Fit, and remember the model."""
        super().fit(X, y, **options)
        Watched.fitted.append(self)
        return self


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a block of the page with a module in the place of a package; return the model."""

    def runs(code: str, module: ModuleType) -> MFA:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.chdir(tmp_path)
        Watched.fitted.clear()
        exec(compile(code, str(PAGE), "exec"), {"MFA": Watched, "X": X})
        (model,) = Watched.fitted
        return model

    return runs


def check_logged(logged: list[tuple[int, dict[str, float]]], model: MFA) -> None:
    """Compare what was logged with the history: steps, log-likelihoods, and all else."""
    assert len(model.history_) > 2
    assert [step for step, _ in logged] == [record["step"] for record in model.history_]
    told = [numbers["log_likelihood"] for _, numbers in logged]
    assert told == [record["log_likelihood"] for record in model.history_]
    for (step, numbers), record in zip(logged, model.history_, strict=True):
        assert {**numbers, "step": step} == record


def test_mlflow_is_told_the_history(run, tmp_path):
    mlflow, logged, kept, open_runs = ModuleType("mlflow"), [], [], []

    @contextmanager
    def start_run(
        run_id: str | None = None,
        experiment_id: str | None = None,
        run_name: str | None = None,
        nested: bool = False,
    ) -> Iterator[None]:
        open_runs.append(run_name)
        yield
        open_runs.pop()

    def log_metrics(
        metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None
    ) -> None:
        assert open_runs, "outside of a run"
        assert type(step) is int
        # MLflow takes numbers only.
        logged.append((step, {name: float(value) for name, value in metrics.items()}))

    def log_artifact(local_path: str, artifact_path: str | None = None) -> None:
        assert open_runs, "outside of a run"
        kept.append(load(local_path))

    mlflow.start_run, mlflow.log_metrics = start_run, log_metrics  # type: ignore[attr-defined]
    mlflow.log_artifact = log_artifact  # type: ignore[attr-defined]
    model = run(block_with("import mlflow"), mlflow)
    check_logged(logged, model)
    assert not open_runs
    (saved,) = kept
    np.testing.assert_array_equal(saved.means_, model.means_)


def test_weights_and_biases_are_told_the_history(run):
    wandb, logged, calls = ModuleType("wandb"), [], []

    def init(
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        assert project
        calls.append("init")

    def log(data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert calls == ["init"], "outside of a run"
        assert type(step) is int
        # Steps that go back are dropped by the real one, with a warning.
        assert not logged or step > logged[-1][0]
        logged.append((step, dict(data)))

    def finish(exit_code: int | None = None, quiet: bool | None = None) -> None:
        calls.append("finish")

    wandb.init, wandb.log, wandb.finish = init, log, finish  # type: ignore[attr-defined]
    check_logged(logged, run(block_with("import wandb"), wandb))
    assert calls == ["init", "finish"]
