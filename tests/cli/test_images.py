"""The commands of whole images: files in, files out, as by the estimator."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import factormix
from factormix.callbacks import checkpoints_in
from factormix.cli import run
from factormix.errors import InputError
from factormix.training.serialization import read_file

SIZES = ["--n-kinds", "3", "--n-scales", "2", "--n-features", "8", "--n-neighbours", "6"]
LENGTH = ["--n-steps", "20", "--batch-size", "200", "--random-state", "0", "--quiet"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for i, size in enumerate([(8, 9), (6, 6), (10, 7)]):
        walk = random.normal(size=(*size, 3)).cumsum(0).cumsum(1)
        pixels = (128 + 12 * walk).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png")
    return tmp_path


def train(folder: Path, *options: str) -> Path:
    output = folder / "model.safetensors"
    command = ["images", "train", str(folder / "images"), "-o", str(output), *SIZES, *LENGTH]
    assert run([*command, *options]) == 0
    return output


def test_train_and_score_a_folder(folder, capsys):
    path = train(folder)
    model = factormix.load(path)
    assert model.n_steps_ == 20
    assert run(["info", str(path)]) == 0
    assert re.search(r"kind +density of images", capsys.readouterr().out)
    assert run(["images", "score", str(path), str(folder / "images")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "image,log_likelihood,bits_per_dim"
    assert [line.split(",")[0] for line in lines[1:]] == ["0.png", "1.png", "2.png"]
    scores = folder / "scores.csv"
    assert run(["images", "score", str(path), str(folder / "images"), "-o", str(scores)]) == 0
    found = pd.read_csv(scores)
    np.testing.assert_allclose(found.log_likelihood, model.score_samples(folder / "images"))
    bits = -found.log_likelihood[1] / (6 * 6 * 3 * np.log(2))
    assert found.bits_per_dim[1] == pytest.approx(bits)


def test_sample_inpaint_and_upsample_write_images(folder):
    path, image = str(train(folder)), str(folder / "images" / "0.png")
    drawn = folder / "drawn.npy"
    options = ["-n", "2", "--size", "5x4"]
    assert run(["images", "sample", path, *options, "-o", str(drawn)]) == 0
    assert np.load(drawn).shape == (2, 5, 4, 3)
    assert run(["images", "sample", path, *options, "-o", str(folder / "drawn.png")]) == 0
    mask = np.zeros((8, 9), np.uint8)
    mask[3:5, 3:5] = 255
    Image.fromarray(mask).save(folder / "mask.png")
    filled = folder / "filled.png"
    command = ["images", "inpaint", path, image, str(folder / "mask.png"), "--n-sweeps", "2"]
    assert run([*command, "-o", str(filled)]) == 0
    before, after = (np.asarray(Image.open(one)) for one in (image, filled))
    assert (before[mask == 0] == after[mask == 0]).all()
    deep, large = str(train(folder, "--depth", "1")), folder / "large.png"
    assert run(["images", "upsample", deep, image, "-o", str(large)]) == 0
    assert Image.open(large).size == (18, 16)


def test_the_bar_of_inpaint_counts_sweeps(folder, terminal, capsys):
    path, image = str(train(folder)), str(folder / "images" / "0.png")
    mask = np.zeros((8, 9), np.uint8)
    mask[3, 3] = 255
    Image.fromarray(mask).save(folder / "mask.png")
    command = ["images", "inpaint", path, image, str(folder / "mask.png"), "--n-sweeps", "4"]
    capsys.readouterr()
    assert run([*command, "-o", str(folder / "filled.png")]) == 0
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "sweep" in shown


def test_arrays_are_inpainted_and_enlarged(folder, capsys):
    images, output = np.random.default_rng(1).random((20, 6, 5)), folder / "m.safetensors"
    np.save(folder / "images.npy", images)
    command = ["images", "train", str(folder / "images.npy"), "-o", str(output), *SIZES, *LENGTH]
    assert run([*command, "--depth", "1"]) == 0
    mask = np.zeros((6, 5), bool)
    mask[2, 3] = True
    np.save(folder / "image.npy", images[0])
    np.save(folder / "mask.npy", mask)
    np.save(folder / "levels.npy", mask * 255)
    filled, image = folder / "filled.npy", str(folder / "image.npy")
    for name in ("mask", "levels"):
        command = ["images", "inpaint", str(output), image, str(folder / f"{name}.npy")]
        assert run([*command, "-o", str(filled), "--n-sweeps", "2"]) == 0
        np.testing.assert_array_equal(np.load(filled)[~mask], images[0][~mask])
    large = ["images", "upsample", str(output), image, "-o"]
    assert run([*large, str(folder / "large.npy")]) == 0
    assert np.load(folder / "large.npy").shape == (12, 10)
    assert run([*large, str(folder / "large.png")]) == 2
    assert "has real numbers, and a .png has 8 bits: name" in capsys.readouterr().err


def test_a_grey_file_is_read_in_colour_for_a_model_of_both(folder, capsys):
    grey = np.random.default_rng(2).integers(0, 256, (6, 7), np.uint8)
    Image.fromarray(grey).save(folder / "images" / "grey.png")
    path, image = str(train(folder)), str(folder / "images" / "grey.png")
    assert run(["images", "score", path, image]) == 0
    score = float(capsys.readouterr().out.splitlines()[1].split(",")[1])
    model = factormix.load(path)
    expected = model.score_samples(np.repeat(grey[None, :, :, None], 3, axis=3))
    assert score == pytest.approx(expected[0])
    np.testing.assert_array_equal(model.score_samples([image]), expected)
    with pytest.raises(InputError, match="1 channels where the model has 3"):
        model.score_samples(grey[None])
    one = factormix.ConvMFA(2, 1, n_features=4, n_neighbours=4, n_steps=2).fit(grey[None])
    one.save(folder / "grey.safetensors")
    assert run(["images", "score", str(folder / "grey.safetensors"), str(folder / "images")]) == 2
    assert "0.png is in colour, and the model is of grey images" in capsys.readouterr().err


def test_surprise_is_a_picture_of_one_image_or_maps_of_all(folder, capsys):
    path, images = train(folder), folder / "images"
    maps = folder / "maps.npz"
    assert run(["images", "surprise", str(path), str(images), "-o", str(maps)]) == 0
    expected = factormix.load(path).surprise(images)
    with np.load(maps) as found:
        assert list(found) == ["0.png", "1.png", "2.png"]
        for one, other in zip(found.values(), expected, strict=True):
            np.testing.assert_array_equal(one, other)
    picture = folder / "map.png"
    assert run(["images", "surprise", str(path), str(images / "1.png"), "-o", str(picture)]) == 0
    shown = np.asarray(Image.open(picture)).astype(float)
    assert (shown.min(), shown.max(), shown.shape) == (0, 255, (6, 6))
    # Brighter means more surprising, up to the brightest.
    assert (np.diff(shown.flatten()[expected[1].flatten().argsort()]) >= 0).all()
    capsys.readouterr()
    assert run(["images", "surprise", str(path), str(images), "-o", str(picture)]) == 2
    assert "a .png has the map of one" in capsys.readouterr().err


def test_samples_of_every_depth_stand_side_by_side(folder):
    path, drawn = train(folder, "--depth", "2"), folder / "drawn.npy"
    command = ["images", "sample", str(path), "-n", "2", "--size", "6x5", "--every-depth"]
    assert run([*command, "-o", str(drawn)]) == 0
    thumbnails, half, whole = factormix.load(path).sample(2, size=(6, 5), every_depth=True)
    assert (thumbnails.shape, half.shape) == ((2, 2, 2, 3), (2, 3, 3, 3))
    tiles = np.load(drawn)
    assert tiles.shape == (2, 6, 15, 3)
    np.testing.assert_array_equal(tiles[:, :, 10:], whole)
    np.testing.assert_array_equal(tiles[:, 3, 7], half[:, 1, 1])
    np.testing.assert_array_equal(tiles[:, 5, 3], thumbnails[:, 1, 0])


def test_a_mixture_of_thumbnails(folder):
    images = np.random.default_rng(1).integers(0, 256, (200, 6, 5), np.uint8)
    path, output = folder / "images.npy", folder / "m.safetensors"
    np.save(path, images)
    command = ["images", "train", str(path), "-o", str(output), *SIZES, *LENGTH, "--depth", "1"]
    assert run([*command, "--thumbnails", "3,2"]) == 0
    assert factormix.load(output).thumbnails == [3, 2]
    drawn = folder / "drawn.npy"
    assert run(["images", "sample", str(output), "-n", "2", "-o", str(drawn)]) == 0
    assert np.load(drawn).shape == (2, 6, 5)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_stop_before_the_first_model_says_that_nothing_is_saved(
    folder, monkeypatch, capsys, checkpoint
):
    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    np.save(folder / "images.npy", np.random.default_rng(1).integers(0, 256, (50, 6, 5), np.uint8))
    output, run_folder = folder / "m.safetensors", folder / "run"
    command = ["images", "train", str(folder / "images.npy"), "-o", str(output), *SIZES, *LENGTH]
    command += ["--depth", "1", "--thumbnails", "3,2"]
    command += ["--checkpoint", str(run_folder), "--resume"] if checkpoint else []
    with monkeypatch.context() as patched:
        patched.setattr(factormix.MFA, "fit", stop)
        assert run(command) == 130
    assert "stopped at once, and nothing is saved yet" in capsys.readouterr().err
    assert run(command) == 0
    assert factormix.load(output).finished_


def test_arrays_and_checkpoints(folder):
    images = np.random.default_rng(1).integers(0, 256, (20, 5, 5), np.uint8)
    np.save(folder / "images.npy", images)
    output, run_folder = folder / "m.safetensors", folder / "run"
    command = ["images", "train", str(folder / "images.npy"), "-o", str(output), *SIZES, *LENGTH]
    assert run([*command, "--checkpoint", str(run_folder), "--resume"]) == 0
    assert factormix.load(run_folder).finished_
    np.testing.assert_array_equal(
        factormix.load(run_folder).score_samples(images),
        factormix.load(output).score_samples(str(folder / "images.npy")),
    )


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_file(folder):
    output, whole, steps = folder / "m.safetensors", folder / "whole.safetensors", folder / "run"
    command = ["images", "train", str(folder / "images"), *SIZES, *LENGTH, "--n-steps", "600"]
    broken = [*command, "-o", str(output), "--checkpoint", str(steps), "--every", "0.1s"]
    with subprocess.Popen([sys.executable, "-m", "factormix", *broken]) as running:
        while not checkpoints_in(steps):
            assert running.poll() is None
            time.sleep(0.01)
        running.kill()
    assert not output.exists()
    assert run([*broken, "--resume"]) == 0
    assert run([*command, "-o", str(whole)]) == 0
    (one, its), (other, theirs) = (read_file(path) for path in (output, whole))
    assert all(torch.equal(one[name], other[name]) for name in one | other)
    for settings in (its, theirs):
        # Only the clock differs.
        history = [record | {"seconds": 0} for record in settings["run"]["history"]]
        settings["run"] |= {"seconds": 0, "history": history}
    assert its == theirs


def test_samples_of_two_channels_are_no_picture(folder, capsys):
    np.save(folder / "images.npy", np.random.default_rng(1).random((20, 5, 5, 2)))
    output = folder / "m.safetensors"
    command = ["images", "train", str(folder / "images.npy"), "-o", str(output), *SIZES, *LENGTH]
    assert run(command) == 0
    assert run(["images", "sample", str(output), "-n", "2", "-o", str(folder / "s.png")]) == 2
    assert "2 channels, and a .png has 1 or 3: name" in capsys.readouterr().err
    assert run(["images", "sample", str(output), "-n", "2", "-o", str(folder / "s.npy")]) == 0


def test_wrong_input_is_one_sentence(folder, capsys):
    path = train(folder)
    empty = folder / "empty"
    empty.mkdir()
    (folder / "broken.npy").write_bytes(b"nothing")
    with (folder / "several.npy").open("wb") as file:
        np.savez(file, image=np.zeros((5, 5)))
    np.save(folder / "words.npy", np.full((5, 5), "word"))
    fill = ["inpaint", str(path), str(folder / "images/0.png"), "-o", str(folder / "f.png")]
    for command, message in [
        (["train", str(empty), "-o", str(folder / "x.safetensors")], "has no images in it"),
        (["train", str(folder / "broken.npy"), "-o", str(folder / "x.safetensors")], "not a read"),
        ([*fill, str(folder / "several.npy")], "several.npy is not an array of numbers"),
        ([*fill, str(folder / "words.npy")], "words.npy is not an array of numbers"),
        (["score", str(path), str(folder / "no")], "no such file"),
        (["sample", str(path), "-o", str(folder / "s.png"), "--size", "5"], "not an image shape"),
        (
            ["train", str(folder / "images"), "-o", "x.safetensors", "--thumbnails", "5"],
            "as in 400",
        ),
        # Options are wrong whatever the images are.
        (["train", str(folder / "no"), "-o", "x.safetensors", "--thumbnails", "5,2"], "depth of 1"),
        (["upsample", str(path), str(folder / "images/0.png"), "-o", str(folder / "u.png")], "dep"),
    ]:
        assert run(["images", *command]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    factormix.MFA(1, 1, max_epochs=1).fit(np.random.default_rng(0).normal(size=(50, 3))).save(path)
    assert run(["images", "score", str(path), str(folder / "images")]) == 2
    assert "needs a density of images" in capsys.readouterr().err
