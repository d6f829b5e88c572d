"""The demo, run whole on few digits, and its choice of data."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import factormix
from factormix.datasets import load
from factormix.errors import InputError
from factormix.studies.demo import (
    Plan,
    choose_images,
    drop_class,
    find_best_set,
    fit_gmm,
    fit_mfa,
    load_digits,
    run_demo,
)

PLAN = Plan(n_components=4, n_factors=2, rows_to_learn=15_000, data="digits")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    lines: list[str] = []
    run_demo(folder, lines.append, PLAN)
    return folder, "\n".join(lines)


def test_says_what_it_found(result: tuple[Path, str]) -> None:
    folder, shown = result
    assert "digits, 1,442 training and 355 held-out images of 8 x 8" in shown
    assert re.search(r"MFA, 4 components, 2 factors +-?\d+\.\d +\d+\.\d s", shown)
    assert re.search(r"MFA, 4 components, 0 factors +-?\d+\.\d +\d+\.\d s", shown)
    assert re.search(r"scikit-learn GaussianMixture, 4 components, diagonal +-?\d+\.\d", shown)
    for label in (0, 9):
        assert re.search(rf"class {label}: MFA [01]\.\d{{3}}, scikit-learn [01]\.\d{{3}}", shown)
    assert f"Report: {folder / 'report.html'}" in shown


def test_numbers_are_those_of_the_models(result: tuple[Path, str]) -> None:
    folder, shown = result
    held_out = load("digits", split="test").data
    ours = factormix.load(folder / "model.safetensors").score(held_out)
    scores = [float(x) for x in re.findall(r"(?:factors|diagonal) +(-?\d+\.\d)", shown)]
    assert scores[0] == pytest.approx(ours, abs=0.051)
    winner = "The MFA is" if scores[0] > scores[2] else "scikit-learn's mixture is"
    assert f"{winner} ahead by {abs(scores[0] - scores[2]):.0f}"[:-1] in shown


def test_report_is_one_page_with_all_pictures(result: tuple[Path, str]) -> None:
    page = (result[0] / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 10
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert "<script" not in page
    for title in (
        "Centroids",
        "Diagonal precisions",
        "Loading columns",
        "Samples without the noise",
        "Training curve",
        "Scores without class 0",
        "36 least likely",
    ):
        assert title in page


def test_variance_floors_are_equal() -> None:
    data = load("digits", split="train").data[:200]
    mfa = fit_mfa(data, 0, PLAN).model
    gmm = fit_gmm(data, PLAN).model
    assert mfa.noise_variances_.min() >= (1 - 1e-6) / PLAN.max_precision
    assert gmm.covariances_.min() >= (1 - 1e-6) / PLAN.max_precision
    assert gmm.covariances_.min() == pytest.approx(1 / PLAN.max_precision)


def test_a_class_that_is_left_out_is_not_seen() -> None:
    train, _ = load_digits(PLAN)
    seen = {row.tobytes() for row in drop_class(train, 0)}
    assert not seen & {row.tobytes() for row in train.data[train.labels == 0]}
    assert len(drop_class(train, 0)) == int((train.labels != 0).sum())


def test_large_sets_are_thinned_in_order() -> None:
    whole = load("digits", split="train")
    part = choose_images(whole, 50, seed=3)
    assert part.data.shape == (50, 64)
    places = [int(np.flatnonzero((whole.data == row).all(axis=1))[0]) for row in part.data]
    assert places == sorted(places)
    np.testing.assert_array_equal(part.labels, whole.labels[places])
    assert choose_images(whole, 10_000, seed=3) is whole


def test_small_digits_when_there_is_nothing_better(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("FACTORMIX_DATA", "XDG_CACHE_HOME", "XDG_DATA_DIRS"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "mlxtend", None)
    assert find_best_set() == "digits"


def test_wrong_data_folder_is_not_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FACTORMIX_DATA", str(tmp_path / "none"))
    with pytest.raises(InputError, match="FACTORMIX_DATA names the folder"):
        run_demo(tmp_path / "demo", plan=Plan())
