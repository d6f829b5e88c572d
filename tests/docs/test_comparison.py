"""What the README says of itself and of scikit-learn holds."""

from __future__ import annotations

import re
from pathlib import Path

import badges
import numpy as np
import pytest
from sklearn.mixture import GaussianMixture

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


def test_learning_batch_by_batch() -> None:
    assert not hasattr(GaussianMixture, "partial_fit")
    assert hasattr(MFA, "partial_fit")


def test_missing_values() -> None:
    with pytest.raises(ValueError, match="NaN"):
        GaussianMixture().fit(GAPS)
    assert np.isfinite(MFA(1, 1, max_epochs=2, random_state=0).fit(GAPS).score(GAPS))


def test_files_without_pickle(tmp_path: Path) -> None:
    assert not hasattr(GaussianMixture, "save")
    MFA(1, 1, max_epochs=2, random_state=0).fit(GAPS).save(tmp_path / "model.safetensors")
    # The format begins with the length of its header, and the header with a brace.
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
        ("0.877", "benchmarks-outliers.md"), ("0.867", "benchmarks-outliers.md"),
        ("0.811", "benchmarks-outliers.md"), ("0.787", "benchmarks-outliers.md"),
        ("0.706", "benchmarks-missing.md"), ("0.743", "benchmarks-missing.md"),
        ("97.9", "benchmarks-classes.md"), ("96.5", "benchmarks-classes.md"),
        ("193 of 202", "benchmarks-tables.md"),
    ],
)  # fmt: skip
def test_numbers_are_those_of_the_benchmarks(number: str, page: str) -> None:
    """A page that was measured again must not leave the README behind."""
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
