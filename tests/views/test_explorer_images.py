"""The explorer of a model of whole images: its answers are those of the model, and bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import factormix
from explorers import Explorer, copy_whole, serve_model
from factormix.cli import run


@pytest.fixture(scope="module")
def flat(image_models: Path) -> Iterator[Explorer]:
    with serve_model(image_models / "flat.safetensors") as explorer:
        yield explorer


@pytest.fixture(scope="module")
def image(image_models: Path) -> np.ndarray:
    """An image that the models have not seen, (8, 8)."""
    return np.load(image_models / "whole.npy")[0]


def load_seeded(path: Path, seed: int) -> factormix.ConvMFA:
    """Load a model, and set the seed of its draws."""
    return factormix.load(path).set_params(random_state=seed)


def test_samples_are_those_of_the_model_at_every_depth(image_models: Path) -> None:
    path = image_models / "deep.safetensors"
    with serve_model(path) as explorer:
        facts, _ = explorer.ask("model")
        assert facts["images"]["depth"] == 2
        _, tiles = explorer.ask("images/samples?height=16&width=8&seed=5")
    drawn = [load_seeded(path, 5 + first).sample(4, size=(16, 8)) for first in (0, 4, 8, 12)]
    expected = np.concatenate(drawn).astype(float)
    assert list(tiles) == ["depth0", "depth1", "depth2"]
    for depth, size in ((2, (16, 8)), (1, (8, 4)), (0, (4, 2))):
        shown = tiles[f"depth{depth}"]
        assert shown.shape == (16, *size)
        levels = (expected - facts["low"]) * 255 / (facts["high"] - facts["low"])
        # A halving rounds down twice, by less than a level.
        off = (3 - depth) * 255 / (facts["high"] - facts["low"])
        np.testing.assert_allclose(shown, levels.clip(0, 255), atol=off)
        expected = expected.reshape(16, size[0] // 2, 2, size[1] // 2, 2).mean(axis=(2, 4))


def test_a_model_with_thumbnails_has_samples_of_one_size(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (100, 6, 300), np.uint8)
    sizes = {"n_features": 4, "n_neighbours": 4, "n_steps": 2, "batch_size": 50, "random_state": 0}
    model = factormix.ConvMFA(2, 2, **sizes, depth=2, thumbnails=(2, 1)).fit(images)
    model.save(tmp_path / "m.safetensors")
    with serve_model(tmp_path / "m.safetensors") as explorer:
        facts, _ = explorer.ask("model")
        assert facts["images"]["size"] == [6, 300]
        _, tiles = explorer.ask("images/samples?height=6&width=300&seed=5")
        assert [tile.shape[1:] for tile in tiles.values()] == [(2, 75), (3, 150), (6, 300)]


def test_the_surprise_of_an_image_is_that_of_the_model(flat, image_models, image) -> None:
    model = factormix.load(image_models / "flat.safetensors")
    facts, arrays = flat.ask("images/surprise?height=8&width=8", image.tobytes())
    bits = model.surprise(image[None])[0] / np.log(2)
    np.testing.assert_allclose(arrays["bits"], bits, rtol=1e-5)
    assert facts["bits_per_dim"] == pytest.approx(model.bits_per_dim(image[None]), rel=1e-5)
    assert facts["bits"] == pytest.approx(bits.sum(), rel=1e-5)
    assert facts["low"] < facts["high"] <= facts["most"] == pytest.approx(bits.max(), rel=1e-5)


def test_fillings_are_those_of_the_model(flat, image_models, image) -> None:
    wide = np.tile(image, (3, 4))
    mask = np.zeros(wide.shape, np.uint8)
    mask[10:12, 9:19] = 1
    _, arrays = flat.ask("images/fill?height=24&width=32&seed=7", wide.tobytes() + mask.tobytes())
    # Shown are the erased lines, at least eight before and after them, and no more than there are.
    part = slice(2, 20), slice(1, 27)
    for first in (0, 2, 4, 6):
        model = load_seeded(image_models / "flat.safetensors", 7 + first)
        draws = model.inpaint(wide, mask > 0, n_draws=2, n_sweeps=10)[:, *part]
        np.testing.assert_array_equal(arrays["draws"][first : first + 2], draws)
    np.testing.assert_allclose(arrays["mean"], arrays["draws"].mean(axis=0), rtol=1e-6)
    known = mask[part] == 0
    np.testing.assert_array_equal(arrays["draws"][:, known], np.tile(wide[part][known], (8, 1)))


def test_images_for_a_model_of_real_numbers_are_in_its_units(image_models, image) -> None:
    model = factormix.load(image_models / "colours.safetensors")
    colours = np.stack([image, image, 255 - image], axis=-1)
    with serve_model(image_models / "colours.safetensors") as explorer:
        facts, _ = explorer.ask("model")
        found, arrays = explorer.ask("images/surprise?height=8&width=8", colours.tobytes())
        assert explorer.ask("images/samples?height=5&width=4")[1]["depth0"].shape == (16, 5, 4, 3)
    assert not facts["images"]["eight_bit"]
    values = facts["low"] + colours * (facts["high"] - facts["low"]) / 255
    values = values.astype(np.float32)
    assert found["bits_per_dim"] == pytest.approx(model.bits_per_dim(values[None]), rel=1e-4)
    np.testing.assert_allclose(
        arrays["bits"], model.surprise(values[None])[0] / np.log(2), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(
    ("target", "size", "expected"),
    [
        ("images/surprise?height=8&width=9", 64, "64 bytes where 8 x 9 pixels of 1 channels have"),
        ("images/surprise?height=2000&width=2000", 64, "at most 1,048,576"),
        ("images/surprise", 64, "0 x 0 pixels"),
        ("images/surprise?height=x&width=8", 64, "height must be a whole number"),
        ("images/surprise?height=8&width=8", (2 << 20) + 1, "more than 1,048,576 pixels"),
        ("images/fill?height=8&width=8", 64, "the mask has 0 pixels"),
        ("images/fill?height=8&width=8", 128, "no pixel is erased"),
        ("images/samples?height=0&width=8", None, "between 1 and 256"),
        ("images/samples?height=8&width=257", None, "between 1 and 256"),
        ("map", None, "a model of whole images, without components"),
    ],
)
def test_bad_requests_get_one_sentence(flat, target: str, size: int | None, expected: str) -> None:
    method, body = ("GET", None) if size is None else ("POST", bytes(size))
    status, raw = flat.request(method, f"/{flat.token}/api/{target}", body)
    assert status == 400
    assert expected in json.loads(raw)["error"]


def test_too_many_erased_pixels_get_one_sentence(flat: Explorer) -> None:
    body = bytes(33 * 32) + b"\1" * (33 * 32)
    target = f"/{flat.token}/api/images/fill?height=33&width=32"
    status, raw = flat.request("POST", target, body)
    assert status == 400
    assert "1,056 pixels are erased, and at most 1,024" in json.loads(raw)["error"]


def test_data_beside_a_model_of_whole_images_gets_one_sentence(image_models, capsys) -> None:
    path = image_models / "flat.safetensors"
    assert run(["explore", str(path), "--data", str(image_models / "whole.npy")]) == 2
    assert "leave --data out, and drop images on the page" in capsys.readouterr().err


def test_a_model_of_rows_has_no_whole_images(folder: Path) -> None:
    with serve_model(folder / "wine.safetensors") as explorer:
        status, raw = explorer.get("api/images/samples")
    assert status == 400
    assert "a model of rows" in json.loads(raw)["error"]


def test_a_newer_model_is_followed(image_models: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with serve_model(path) as explorer:
        assert explorer.get("api/model")[0] == 202
        for name, depth in (("flat", 0), ("deep", 2)):
            copy_whole(image_models / f"{name}.safetensors", path)
            while explorer.ask("model")[0]["images"]["depth"] != depth:
                pass
            assert len(explorer.ask("images/samples?height=4&width=4")[1]) == depth + 1
        curves = explorer.ask("training")[0]["curves"]
    assert curves["step"][-1] == 20
    history = factormix.load(path).history_
    assert curves["bits_per_dim"] == [record["bits_per_dim"] for record in history]
