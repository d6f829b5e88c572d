"""Settings of hypothesis and signals, and fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# A job in the background of a shell is born with Ctrl-C ignored, and so is all that it starts.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "local", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
# A hosted run must not fail for an example that the change at hand did not touch.
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


LONG_FILES = (
    *("docs/test_pages.py", "training/test_processes.py", "benchmarks/test_reproduction.py"),
    *("views/test_explorer_pages.py", "training/test_solvers.py", "estimators/test_conv.py"),
    *("cli/test_survival.py", "cli/test_first_hour.py", "estimators/test_alerts.py"),
    *("cli/test_cli.py", "estimators/test_outliers.py", "benchmarks/test_harness.py"),
    *("estimators/test_sklearn.py", "training/test_loop.py", "estimators/test_classifier.py"),
)
"""Files of about ten processor seconds or more, with those of their child processes, the longest
first. They start first, so that no worker is left alone with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first."""
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Exempt modules and tests from garbage collection: a call takes 0.35 seconds with them."""
    gc.freeze()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def limit_file_size() -> Iterator[Callable[[int | None], None]]:
    """Give a function that limits the size of files, as a full disk does, or ends the limit."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal that a write beyond the limit sends.
    yield lambda size: resource.setrlimit(
        resource.RLIMIT_FSIZE, before if size is None else (size, before[1])
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's own folders, cache and proxy out of a test."""
    monkeypatch.delenv("FACTORMIX_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "share"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let captured standard error pass for a terminal, on which progress bars are drawn."""
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: True)
