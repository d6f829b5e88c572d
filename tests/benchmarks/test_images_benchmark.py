"""The benchmark of whole images: codes, bits, judges, restorations, and quick runs of parts."""

from __future__ import annotations

from pathlib import Path

import images
import images_page as page
import images_restoration as restoration
import images_trials as trials
import numpy as np
import pytest
import torch
from harness import Result, Trial
from images_data import draw_text_mask, load_photographs, load_set

from factormix import ConvMFA
from factormix.core.conditional_mixture import bin_log_masses
from factormix.data.pictures import as_pictures

HEADINGS = {
    "bits": "Bits per dimension of CIFAR-10",
    "coding": "Images coded without loss",
    "photographs": "Photographs",
    "samples": "Samples",
    "outliers": "Outliers",
    "restoration": "Images enlarged",
    "denoising": "Noise removed",
}


@pytest.fixture(scope="module")
def model() -> ConvMFA:
    """A small model of colour images."""
    train = load_set("cifar10", "train", quick=True)
    return ConvMFA(3, 2, n_features=4, n_neighbours=6, n_steps=30, random_state=0).fit(train)


@pytest.mark.parametrize("part", HEADINGS)
def test_a_quick_run_of_a_part_writes_its_section(part: str, tmp_path: Path) -> None:
    if part == "coding":
        pytest.importorskip("constriction")
    images.main(["--quick", "--parts", part, "-o", str(tmp_path)])
    text = (tmp_path / "benchmarks-images.md").read_text()
    assert f"## {HEADINGS[part]}" in text
    for line in text.splitlines():
        if line.startswith("!["):
            assert (tmp_path / line.split("(")[1].rstrip(")")).stat().st_size > 100
    # Finished trials do not run again.
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "images").rglob("*.json")}
    assert before
    images.main(["--quick", "--parts", part, "-o", str(tmp_path)])
    assert before == {file: file.stat().st_mtime_ns for file in before}


@pytest.mark.parametrize("wrong", [["--parts", "speed"], ["--quick", "--write-docs"]])
def test_wrong_options_are_refused(wrong: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        images.main([*wrong, "-o", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_bits_lie_between_the_noise_and_png_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes = np.arange(32 * 32).reshape(32, 32) // 8 % 200
    noise = np.random.default_rng(0).integers(0, 6, (4, 3, 32, 32))
    records = np.concatenate([np.zeros((4, 1)), (planes + noise).reshape(4, -1)], axis=1)
    (tmp_path / "cifar10").mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        records.astype(np.uint8).tofile(tmp_path / "cifar10" / f"{name}.bin")
    monkeypatch.setenv("FACTORMIX_DATA", str(tmp_path))
    sizes = {"n_kinds": 3, "n_features": 8, "n_neighbours": 4, "n_steps": 60, "batch_size": 300}
    settings = {"images": "cifar10", "quick": False, **sizes}
    outcome = trials.run_training(settings, None)
    assert outcome.model is not None
    (tmp_path / "models").mkdir()
    outcome.model.save(tmp_path / "models" / "small.safetensors")
    judged = {"images": "cifar10", "quick": False, "model": "small", "n_images": 4}
    found = trials.run_bits(judged, str(tmp_path)).values
    # Six levels of noise have log2(6) = 2.58 bits.
    assert 2.5 < found["bits"] < found["png"]


def test_the_masses_of_all_levels_are_those_of_the_density(model: ConvMFA) -> None:
    [[stage]] = model._run.stages
    plane = as_pictures(load_set("cifar10", "test", quick=True)[:2])
    rows = stage.read([plane], plane.locate(np.arange(20)))
    x = rows.x[:, : stage.neighbourhood.width]
    masses = trials.list_masses(stage.mixtures[0], x)
    torch.testing.assert_close(masses.sum(1), torch.ones(20))
    for level in (0, 1, 100, 255):
        y = torch.full((20,), float(level))
        expected = bin_log_masses(stage.mixtures[0], x, y, 0.0, 255.0).exp()
        torch.testing.assert_close(masses[:, level], expected, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("colour", [True, False])
def test_codes_are_decoded_to_the_same_images_and_are_as_long_as_stated(
    model: ConvMFA, colour: bool
) -> None:
    pytest.importorskip("constriction")
    pictures = load_set("cifar10" if colour else "mnist", "test", quick=True)[:3]
    if not colour:
        model = ConvMFA(2, 2, n_features=2, n_neighbours=4, n_steps=10, random_state=0)
        model.fit(load_set("mnist", "train", quick=True))
    words = trials.encode(model, pictures)
    np.testing.assert_array_equal(trials.decode(model, words, (8, 8)), pictures)
    stated = -model.score_samples(pictures) / np.log(2)
    lengths = np.array([32 * len(one) for one in words])
    # The last word and the one before it are not full.
    assert (np.abs(lengths - stated) <= 64).all()


def test_the_levels_of_an_mcgsm_sum_to_one() -> None:
    train = as_pictures(load_photographs("bsds300/train", quick=True))
    [shape] = trials.plan_level(6, coarsest=True)
    device = torch.device("cpu")
    stage = trials.begin_stage(
        shape, [train], n_kinds=1, n_scales=1, n_features=1, seed=0, device=device
    )
    settings = {"n_kinds": 3, "n_scales": 2, "n_features": 4}
    rows = stage.read([train], train.locate(np.repeat([5, 700, 1100], 256)))
    rows.y[:, 0] = torch.arange(256).repeat(3).float()
    found = trials.score_mcgsm(trials.draw_mcgsm(stage, settings), stage, rows)
    total = found.exp().view(3, 256).sum(1).detach()
    torch.testing.assert_close(total, torch.ones(3), atol=1e-4, rtol=0)


def test_samples_are_judged_by_frequencies_and_by_distances() -> None:
    rng = np.random.default_rng(0)
    first, second, third = rng.normal(size=(3, 400, 3))
    assert trials.count_different_bins(first, second, third, 10) <= 0.3
    assert trials.count_different_bins(first, second + np.array([3, 0, 0]), third, 10) > 0.7
    assert trials.share_within(first, first) == 1
    assert trials.share_within(second, third) > 0.8
    assert trials.share_within(second + 100, third) == 0


def test_the_gaussian_has_the_moments_of_the_images() -> None:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (50, 2, 2), dtype=np.uint8)
    rows, drawn = pictures.reshape(50, 4), trials.draw_gaussian(pictures, 20_000)
    np.testing.assert_allclose(drawn.mean(axis=0), rows.mean(axis=0), atol=2)
    expected = np.cov(rows.T, bias=True)
    np.testing.assert_allclose(np.cov(drawn.T), expected, atol=0.05 * expected.max())


def test_scores_of_maps_rise_with_what_they_measure() -> None:
    rng = np.random.default_rng(0)
    train, maps = rng.gamma(2.0, size=(2, 200, 8, 8))
    maps[0] += 1
    maps[1, :4, :4] += 5
    found = trials.score_maps(maps, np.arange(200.0), train)
    np.testing.assert_allclose(found["likelihood"], maps.sum(axis=(1, 2)))
    assert found["map: most surprising block"].argmax() == 1
    assert (found["map: shape"][:2] > np.quantile(found["map: shape"], 0.9)).all()


def test_restored_images_keep_what_is_known() -> None:
    rng = np.random.default_rng(0)
    small = rng.uniform(50, 200, (6, 8)).astype(np.float32)
    large = restoration.project_back(small)
    means = large.reshape(6, 2, 8, 2).mean(axis=(1, 3))
    np.testing.assert_allclose(means, small, atol=0.5)
    plane = np.add.outer(3 * np.arange(20), 2 * np.arange(30)).astype(np.uint8)
    missing = draw_text_mask((20, 30))
    assert 0 < missing.mean() < 0.4
    filled = restoration.interpolate(np.where(missing, 0, plane), missing)
    np.testing.assert_allclose(filled[1:-1, 1:-1], plane[1:-1, 1:-1], atol=1e-6)
    assert restoration.measure_quality(plane + 5.0, plane) == pytest.approx(34.15, abs=0.01)


def test_goals_are_judged_by_their_figures() -> None:
    def result(experiment: str, name: str, values: dict[str, object], **settings: object) -> Result:
        return Result(Trial(experiment, name, settings, trials.run_bits), values)

    several = [
        result("bits", "cifar10-0", {"bits": 3.37, "n_images": 10}),
        result("models", "cifar10-0", {"seconds": 100.0}),
        result(
            "coding",
            "cifar10",
            {
                "identical": True,
                "stated": 1000.0,
                "coded": 1005.0,
                "dims": 300,
                "n_images": 1,
                "formats": {"PNG": {"files": 2000.0, "mosaic": 900.0}},
            },
        ),
        *(
            result(
                "denoising",
                str(i),
                {
                    "own patches": {"quality": 28.0 + i},
                    "with a prior": {"quality": 29.0},
                    "BM3D": {"quality": 28.4},
                },
                images="BSD68",
                sigma=25,
                methods=["own patches", "with a prior", "BM3D"],
            )
            for i in range(2)
        ),
    ]
    results = {one.trial.title: one for one in several}
    assert [met for *_, met in page.judge_bits(results)] == [True, False]
    # A mosaic that is shorter is shorter.
    assert [met for *_, met in page.judge_coding(results)] == [True, False]
    assert [met for *_, met in page.judge_denoising(results)] == [True, True]
    # What is not measured is neither met nor missed.
    assert [met for *_, met in page.judge_photographs(results)] == [None]
    assert [met for judge in page.JUDGES for *_, met in judge({})].count(True) == 0
