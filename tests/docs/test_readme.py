"""The README and the pages: claims and numbers hold, links lead somewhere, the paper is cited."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import badges
import numpy as np
import pytest
from sklearn.mixture import GaussianMixture

import factormix
from factormix import MFA

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = np.random.default_rng(0).normal(size=(60, 3))
GAPS = np.where(ROWS > 1.2, np.nan, ROWS)


def test_covariances() -> None:
    for kind in ("full", "tied", "diag", "spherical"):
        GaussianMixture(covariance_type=kind)._validate_params()
    with pytest.raises(ValueError, match="covariance_type"):
        GaussianMixture(covariance_type="factors")._validate_params()


def test_learning_in_batches() -> None:
    assert not hasattr(GaussianMixture, "partial_fit")
    assert hasattr(MFA, "partial_fit")


def test_missing_values() -> None:
    with pytest.raises(ValueError, match="NaN"):
        GaussianMixture().fit(GAPS)
    assert np.isfinite(MFA(1, 1, max_epochs=2, random_state=0).fit(GAPS).score(GAPS))


def test_files_without_pickle(tmp_path: Path) -> None:
    assert not hasattr(GaussianMixture, "save")
    MFA(1, 1, max_epochs=2, random_state=0).fit(GAPS).save(tmp_path / "model.safetensors")
    # The format starts with the length of its header, and the header with a brace.
    assert (tmp_path / "model.safetensors").read_bytes()[8:9] == b"{"


@pytest.mark.parametrize(("left", "right"), badges.read_facts().items())
def test_badges_are_true(left: str, right: str) -> None:
    assert f"docs/images/badges/{left.lower()}.svg" in README
    found = (badges.FOLDER / f"{left.lower()}.svg").read_text(encoding="utf-8")
    assert found == badges.draw(left, right), "run python tools/badges.py"


@pytest.mark.parametrize(
    ("number", "page"),
    [
        ("882.4 in 2.3 s", "benchmarks.md"), ("958.8 in 10.2 s", "benchmarks.md"),
        ("887.0 in 7.2 s", "benchmarks.md"), ("972.7 in 43.9 s", "benchmarks.md"),
        ("883.1 in 27.8 s", "benchmarks.md"), ("964.4 in 158.7 s", "benchmarks.md"),
        ("795.1 in 40.4 s", "benchmarks.md"), ("826.1 in 120.6 s", "benchmarks.md"),
        ("731.6 in 40.0 s", "benchmarks.md"), ("856.2 in 121.5 s", "benchmarks.md"),
        ("0.8765", "benchmarks-outliers.md"), ("0.8665", "benchmarks-outliers.md"),
        ("0.8109", "benchmarks-outliers.md"), ("0.7874", "benchmarks-outliers.md"),
        ("0.702", "benchmarks-missing.md"), ("0.743", "benchmarks-missing.md"),
        ("97.9", "benchmarks-classes.md"), ("96.5", "benchmarks-classes.md"),
        ("189 of 202", "benchmarks-tables.md"),
    ],
)  # fmt: skip
def test_numbers_of_the_readme_are_in_the_benchmarks(number: str, page: str) -> None:
    """A new measurement must update the README too."""
    assert number in README
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    if " in " in number:
        score, _, seconds = number.partition(" in ")
        assert f"| {score} | {seconds.removesuffix(' s')} |" in text
    elif re.fullmatch(r"[\d.]+", number):
        digits = len(number.partition(".")[2])
        rounded = {f"{float(n):.{digits}f}" for n in re.findall(r"\d+\.\d+", text)}
        assert number in rounded
    else:
        assert number in text


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


def test_links_py_finds_broken_links(tmp_path: Path) -> None:
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
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {factormix.__version__}\n" in text
    assert "Large-scale gradient-based training of Mixtures of Factor Analyzers" in text
