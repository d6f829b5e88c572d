"""The README and the pages: their links lead somewhere, and the paper is cited."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda p: p.name
)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [
        link
        for link in links
        if not re.match(r"[a-z]+:", link) and not (page.parent / link).exists()
    ]
    assert not missing


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
