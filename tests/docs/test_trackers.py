"""The site's examples for MLflow and Weights & Biases, run against stand-ins for both.

Neither package is installed for the tests. The stand-ins have the signatures of the real packages,
so a call that those would refuse is refused here.
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


def find_block(words: str) -> str:
    """Return the one block of the page that contains some words."""
    found = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (code,) = [one for one in found if words in one]
    return code


class Watched(MFA):
    """An estimator that records its fitted models."""

    fitted: ClassVar[list[MFA]] = []

    def fit(self, X: Any, y: Any = None, **options: Any) -> MFA:
        """Fit, and remember the model."""
        super().fit(X, y, **options)
        Watched.fitted.append(self)
        return self


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a block of the page with a module instead of a package; return the model."""

    def runs(code: str, module: ModuleType) -> MFA:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.chdir(tmp_path)
        Watched.fitted.clear()
        exec(compile(code, str(PAGE), "exec"), {"MFA": Watched, "X": X})
        (model,) = Watched.fitted
        return model

    return runs


def check_logged(logged: list[tuple[int, dict[str, float]]], model: MFA) -> None:
    """Compare the log with the history: steps and all values."""
    assert len(model.history_) > 2
    assert [step for step, _ in logged] == [record["step"] for record in model.history_]
    for (step, numbers), record in zip(logged, model.history_, strict=True):
        assert {**numbers, "step": step} == record


def test_mlflow_logs_the_history(run, tmp_path):
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
    model = run(find_block("import mlflow"), mlflow)
    check_logged(logged, model)
    assert not open_runs
    (saved,) = kept
    np.testing.assert_array_equal(saved.means_, model.means_)


def test_weights_and_biases_logs_the_history(run):
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
        # The real package drops steps that go back, with a warning.
        assert not logged or step > logged[-1][0]
        logged.append((step, dict(data)))

    def finish(exit_code: int | None = None, quiet: bool | None = None) -> None:
        calls.append("finish")

    wandb.init, wandb.log, wandb.finish = init, log, finish  # type: ignore[attr-defined]
    check_logged(logged, run(find_block("import wandb"), wandb))
    assert calls == ["init", "finish"]
