"""The README: its lines run, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_line_runs() -> None:
    command = [sys.executable, ROOT / "tools" / "readme.py", ROOT / "README.md"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda p: p.name
)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [
        link
        for link in links
        if not re.match(r"[a-z]+:", link) and not (page.parent / link).exists()
    ]
    assert not missing


def test_the_paper_and_the_version_are_cited() -> None:
    import factormix

    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {factormix.__version__}\n" in text
    assert "Large-scale gradient-based training of Mixtures of Factor Analyzers" in text
