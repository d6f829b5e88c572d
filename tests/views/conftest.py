"""Models that are trained once, and servers and a browser that each test file starts once.

Neither servers nor browser stay for other files: both keep threads or an event loop running.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from explorers import (
    CHROMIUM,
    Explorer,
    serve_model,
    write_activations,
    write_image_models,
    write_models,
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and rows of ``write_models``."""
    folder = tmp_path_factory.mktemp("explorer")
    write_models(folder)
    return folder


@pytest.fixture(scope="session")
def image_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models of ``write_image_models``."""
    folder = tmp_path_factory.mktemp("images")
    write_image_models(folder)
    return folder


@pytest.fixture(scope="module")
def digits(folder: Path) -> Iterator[Explorer]:
    with serve_model(folder / "digits.safetensors", folder / "digits.npy") as explorer:
        yield explorer


@pytest.fixture(scope="module")
def wine(folder: Path) -> Iterator[Explorer]:
    with serve_model(folder / "wine.safetensors", folder / "wine.csv") as explorer:
        yield explorer


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explorer]:
    folder = tmp_path_factory.mktemp("words")
    write_activations(folder)
    with serve_model(folder / "words.safetensors", folder / "layer") as explorer:
        explorer.folder = folder
        yield explorer


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium that Playwright drives."""
    if CHROMIUM is None:
        pytest.skip("chromium is not on PATH")
    playwright = pytest.importorskip("playwright.sync_api")
    flags = [
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
    ]
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()
