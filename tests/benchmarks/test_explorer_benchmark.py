"""How fluid the explorer is with large models, in a real browser of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from explorer import measure, write_model

from explorers import CHROMIUM

pytest.importorskip("playwright.sync_api", reason="Playwright drives the browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH")


@pytest.mark.slow
@pytest.mark.parametrize(("K", "d", "l"), [(400, 3072, 10), (10_000, 784, 4)])
def test_large_models_are_fluid(K: int, d: int, l: int, tmp_path: Path) -> None:
    write_model(tmp_path / "large.safetensors", K, d, l)
    found = measure(tmp_path / "large.safetensors", visits=3)
    assert found["first picture, ms"] < (1000 if K == 400 else 5000)
    assert found["slider move, ms"] < 50
