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


TESTED_ELSEWHERE = ("choosing.md", "missing.md")
"""Pages whose shell lines run too, by tests of their own."""


def examples() -> dict[str, str]:
    """Gather the Python of each page, from top to bottom."""
    pages = [p for p in sorted(ROOT.glob("docs/**/*.md")) if p.name not in TESTED_ELSEWHERE]
    blocks = {p: re.findall(r"^```python\n(.*?)^```", p.read_text(), re.M | re.S) for p in pages}
    return {p.name: "\n".join(found) for p, found in blocks.items() if found}


@pytest.mark.parametrize("page", examples())
def test_examples_of_the_documentation_run(page: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", examples()[page]], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, f"{page}: {done.stderr}"


def test_broken_links_of_a_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.html").write_text('<h1 id="there"></h1><a href="../a.html">a</a>')
    good = '<a href="b/#there">b</a><a href="b/">b</a><a href="https://example.org/">e</a>'
    (tmp_path / "a.html").write_text(good)
    command = [sys.executable, ROOT / "tools" / "links.py", tmp_path]
    assert subprocess.run(command, capture_output=True).returncode == 0
    (tmp_path / "a.html").write_text(good + '<a href="b/#gone">b</a><img src="none.png">')
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == ["a.html: b/#gone", "a.html: none.png"]


def test_the_paper_and_the_version_are_cited() -> None:
    import factormix

    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {factormix.__version__}\n" in text
    assert "Large-scale gradient-based training of Mixtures of Factor Analyzers" in text
