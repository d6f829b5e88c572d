"""The command that removes noise from image files."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

import factormix
from factormix.cli import run

CLEAN = (np.add.outer(np.arange(40), np.arange(44)) // 12 % 2 * 120 + 60).astype(np.uint8)
NOISY = (CLEAN + np.random.default_rng(0).normal(scale=15, size=CLEAN.shape)).round()
NOISY = NOISY.clip(0, 255).astype(np.uint8)


def error_of(path):
    return np.sqrt(np.mean((np.asarray(Image.open(path)).astype(float) - CLEAN) ** 2))


def test_a_file_is_denoised_as_by_the_function(tmp_path):
    Image.fromarray(NOISY).save(tmp_path / "noisy.png")
    command = ["denoise", str(tmp_path / "noisy.png"), "-o", str(tmp_path / "clean.png")]
    assert run([*command, "--sigma", "15"]) == 0
    found = np.asarray(Image.open(tmp_path / "clean.png"))
    np.testing.assert_array_equal(found, factormix.denoise(NOISY, 15.0))
    assert error_of(tmp_path / "clean.png") < 0.7 * error_of(tmp_path / "noisy.png")


def test_a_photograph_that_is_marked_as_turned_is_turned(tmp_path):
    image = Image.fromarray(NOISY)
    marks = image.getexif()
    marks[ExifTags.Base.Orientation] = 6
    image.save(tmp_path / "noisy.png", exif=marks)
    target = tmp_path / "clean.png"
    assert run(["denoise", str(tmp_path / "noisy.png"), "-o", str(target), "--sigma", "15"]) == 0
    found = np.asarray(ImageOps.exif_transpose(Image.open(target)))
    np.testing.assert_array_equal(found, factormix.denoise(np.rot90(NOISY, -1), 15.0))


def test_a_folder_is_denoised_and_resumed(tmp_path, capsys):
    folder, out = tmp_path / "scans", tmp_path / "clean"
    folder.mkdir()
    Image.fromarray(NOISY).save(folder / "grey.png")
    # As other systems leave them beside the images.
    (folder / "._grey.png").write_bytes(b"no image")
    deep = NOISY.astype(np.uint16) * 256
    Image.fromarray(deep).save(folder / "deep.png")
    Image.fromarray(np.dstack([NOISY] * 3 + [CLEAN])).save(folder / "alpha.png")
    command = ["denoise", str(folder), "-o", str(out)]
    assert run(command) == 0
    assert "3 images, 3 of them new" in capsys.readouterr().out
    np.testing.assert_array_equal(np.asarray(Image.open(out / "alpha.png"))[..., 3], CLEAN)
    assert np.asarray(Image.open(out / "deep.png")).max() > 255
    (out / "grey.png").unlink()
    before = (out / "deep.png").stat().st_mtime_ns
    assert run([*command, "--resume"]) == 0
    assert "3 images, 1 of them new" in capsys.readouterr().out
    assert (out / "deep.png").stat().st_mtime_ns == before


def test_a_density_of_whole_images_is_a_prior(tmp_path):
    model = factormix.ConvMFA(3, 1, n_features=8, n_neighbours=6, n_steps=5, random_state=0)
    model.fit(NOISY[None]).save(tmp_path / "m.safetensors")
    Image.fromarray(NOISY).save(tmp_path / "noisy.png")
    target = tmp_path / "out.png"
    options = ["--sigma", "20", "--prior", str(tmp_path / "m.safetensors")]
    assert run(["denoise", str(tmp_path / "noisy.png"), "-o", str(target), *options]) == 0
    np.testing.assert_array_equal(np.asarray(Image.open(target)), model.denoise(NOISY, 20))


@pytest.mark.parametrize("shape", [(1, 30, 4), (30, 1, 4), (1, 30, 2)])
def test_a_thin_image_keeps_its_alpha_channel(shape, tmp_path):
    model = factormix.ConvMFA(3, 1, n_features=8, n_neighbours=6, n_steps=5, random_state=0)
    model.fit(NOISY[None]).save(tmp_path / "m.safetensors")
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    Image.fromarray(pixels).save(tmp_path / "noisy.png")
    target = tmp_path / "out.png"
    options = ["--sigma", "20", "--prior", str(tmp_path / "m.safetensors")]
    assert run(["denoise", str(tmp_path / "noisy.png"), "-o", str(target), *options]) == 0
    found = np.asarray(Image.open(target))
    np.testing.assert_array_equal(found[..., -1], pixels[..., -1])
    clean = model.denoise(pixels[..., :-1], 20)
    np.testing.assert_array_equal(found[..., :-1], clean.reshape(*shape[:2], -1))


@pytest.mark.parametrize(
    ("pixels", "words"),
    [(b"no image", "not a readable image"), (NOISY[:3], "3 x 44"), (NOISY[:9, :9], "too few")],
)
def test_a_wrong_file_of_a_folder_is_found_before_any_work(pixels, words, tmp_path, capsys):
    folder, out = tmp_path / "scans", tmp_path / "clean"
    folder.mkdir()
    Image.fromarray(NOISY).save(folder / "a.png")
    if isinstance(pixels, bytes):
        (folder / "b.png").write_bytes(pixels)
    else:
        Image.fromarray(pixels).save(folder / "b.png")
    assert run(["denoise", str(folder), "-o", str(out)]) == 2
    error = capsys.readouterr().err
    assert "b.png" in error
    assert words in error
    assert not out.exists()


def test_an_image_that_a_prior_cannot_denoise_is_found_before_any_work(tmp_path, capsys):
    folder, out, path = tmp_path / "scans", tmp_path / "clean", tmp_path / "m.safetensors"
    folder.mkdir()
    random = np.random.default_rng(0)
    Image.fromarray(np.dstack([NOISY] * 3)).save(folder / "a.png")
    options = {"n_features": 8, "n_neighbours": 6, "n_steps": 5, "random_state": 0}
    command = ["denoise", str(folder), "-o", str(out), "--prior", str(path), "--sigma", "9"]
    images = random.integers(0, 256, (20, 40, 44, 3), np.uint8)
    for model, other, words in (
        (factormix.ConvMFA(3, 1, **options), NOISY, "1 channels where the model has 3"),
        (
            factormix.ConvMFA(3, 1, depth=2, thumbnails=(1, 1), **options),
            np.dstack([NOISY.T] * 3),
            "44 x 40 pixels, and the thumbnails",
        ),
    ):
        model.fit(images).save(path)
        Image.fromarray(other).save(folder / "b.png")
        assert run(command) == 2
        error = capsys.readouterr().err
        assert "b.png: " in error
        assert words in error
        assert not out.exists()


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_grey_image_with_a_transparent_level_stays_grey(kind, tmp_path):
    deep = NOISY.astype(kind) * (np.iinfo(kind).max // 255)
    Image.fromarray(deep).save(tmp_path / "noisy.png", transparency=int(deep[0, 0]))
    target = tmp_path / "clean.png"
    assert run(["denoise", str(tmp_path / "noisy.png"), "-o", str(target), "--sigma", "15"]) == 0
    found = np.asarray(Image.open(target))
    expected = factormix.denoise(deep, 15)
    np.testing.assert_array_equal(found[..., 0] if kind == np.uint8 else found, expected)


@pytest.mark.parametrize(
    ("pixels", "suffix", "words"),
    [
        (NOISY.astype(np.uint16) * 256, ".webp", "16 bits, which a file .webp cannot hold"),
        (np.dstack([NOISY] * 4), ".jpg", "an alpha channel, which a file .jpg cannot hold"),
    ],
)
def test_a_file_that_cannot_hold_the_image_is_refused(pixels, suffix, words, tmp_path, capsys):
    Image.fromarray(pixels).save(tmp_path / "noisy.png")
    target = tmp_path / f"clean{suffix}"
    assert run(["denoise", str(tmp_path / "noisy.png"), "-o", str(target)]) == 2
    assert words in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("none.png", [], "does not exist"),
        ("text.png", [], "not a readable image"),
        ("small.png", [], "small.png: the image has 3 x 3"),
        ("noisy.png", ["--sigma", "-1"], "above 0"),
        ("noisy.png", ["--prior", "MODEL"], "p x p"),
        ("empty", [], "no images"),
        ("long.tif", [], "beyond 16 bits; save it with 8 or 16 bits"),
    ],
)
def test_bad_input_gets_one_sentence(name, options, words, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.png").write_text("text")
    Image.fromarray(NOISY).save(tmp_path / "noisy.png")
    Image.fromarray(NOISY[:3, :3]).save(tmp_path / "small.png")
    Image.fromarray(NOISY.astype(np.int32) << 16).save(tmp_path / "long.tif")
    if "MODEL" in options:
        model = tmp_path / "m.safetensors"
        factormix.MFA(1, 0, random_state=0).fit(NOISY[:, :5].astype(float)).save(model)
        options = ["--prior", str(model)]
    target = tmp_path / "out.png"
    assert run(["denoise", str(tmp_path / name), "-o", str(target), *options]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not target.exists()
