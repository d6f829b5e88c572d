"""ConvMFA: brute-force sums over all tiny images, draws against probabilities, files, resuming."""

from __future__ import annotations

import os
import signal
import tracemalloc
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn.datasets import load_sample_image
from sklearn.exceptions import NotFittedError

import factormix
from factormix import ConvMFA, InputError
from factormix.callbacks import Checkpoints
from factormix.data.pictures import Pictures, split_blocks
from factormix.estimators import conv
from factormix.training.fillings import Fillings
from factormix.training.image_gradient import ImageGradient
from factormix.training.serialization import read_file

SMALL: dict[str, Any] = {
    "n_kinds": 3,
    "n_scales": 2,
    "n_features": 8,
    "n_neighbours": 6,
    "n_steps": 10,
    "batch_size": 200,
    "random_state": 0,
}


def make_images(n: int, h: int, w: int, c: int = 1, levels: int = 256) -> NDArray[np.uint8]:
    """Return smooth random images."""
    random = np.random.default_rng(5)
    walk = random.normal(size=(n, h, w, c)).cumsum(1).cumsum(2).cumsum(3)
    walk = (walk - walk.min()) / max(np.ptp(walk), 1e-9)
    images = (walk * levels).clip(0, levels - 1).astype(np.uint8)
    return images[..., 0] if c == 1 else images


def as_levels(images: NDArray[np.uint8], levels: int) -> Pictures:
    """Return pictures of few levels."""
    n, h, w, c = images.shape if images.ndim == 4 else (*images.shape, 1)
    return Pictures.build(images.reshape(-1, c), np.full(n, h), np.full(n, w), levels)


def every_image(h: int, w: int, c: int, levels: int) -> Pictures:
    """Return all images of a size."""
    flat = np.array(list(product(range(levels), repeat=h * w * c)), np.uint8)
    return as_levels(flat.reshape(-1, h, w, c), levels)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("c", "sizes"), [(1, [(2, 2), (1, 3), (3, 2), (1, 1)]), (2, [(1, 2)])])
def test_the_probabilities_of_all_images_sum_to_one(c, sizes, depth):
    levels = 4
    images = as_levels(make_images(50, 4, 4, c, levels), levels)
    model = ConvMFA(**SMALL, depth=depth).fit(images)
    for h, w in sizes:
        total = np.exp(model.score_samples(every_image(h, w, c, levels))).sum()
        assert total == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("size", "depth", "thumbnails", "levels"),
    [
        ((2, 2, 1), 1, (3, 0), 4),
        ((1, 4, 1), 1, (2, 1), 4),
        ((2, 3, 1), 1, (2, 1), 3),
        ((3, 2, 1), 2, (3, 0), 3),
        ((1, 2, 2), 1, (2, 1), 4),
    ],
)
def test_the_probabilities_of_all_images_with_a_mixture_of_thumbnails_sum_to_one(
    size, depth, thumbnails, levels
):
    images = as_levels(make_images(300, *size, levels), levels)
    model = ConvMFA(**SMALL, depth=depth, thumbnails=thumbnails).fit(images)
    every = every_image(*size, levels)
    p = np.exp(model.score_samples(every))
    assert p.sum() == pytest.approx(1, abs=1e-4)
    # Draws have these probabilities.
    n, (h, w, c) = 4000, size
    drawn = model.sample(n).reshape(n, -1).astype(int)
    places = levels ** np.arange(h * w * c - 1, -1, -1)
    check_frequencies(np.bincount(drawn @ places, minlength=len(p)), n * p)


def check_frequencies(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> None:
    """Compare counts with their expectations; rare ones are taken together."""
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 0.001


def test_every_depth_of_a_sample_is_the_block_means_of_the_next():
    model = ConvMFA(**SMALL, depth=2).fit(make_images(30, 8, 8, 3))
    drawn = model.sample(2, size=(7, 5), every_depth=True)
    assert [one.shape[1:3] for one in drawn] == [(2, 2), (4, 3), (7, 5)]
    for coarse, fine in pairwise(drawn):
        for i in range(2):
            np.testing.assert_array_equal(split_blocks(fine[i], whole=True).coarse, coarse[i])


@pytest.mark.parametrize("depth", [0, 1])
def test_draws_follow_the_probabilities(depth):
    levels, n = 3, 4000
    model = ConvMFA(**SMALL, depth=depth).fit(as_levels(make_images(50, 4, 4, 1, levels), levels))
    drawn = model.sample(n, size=(2, 2)).reshape(n, 4).astype(int)
    counts = np.bincount(drawn @ levels ** np.arange(3, -1, -1), minlength=levels**4)
    expected = n * np.exp(model.score_samples(every_image(2, 2, 1, levels)))
    check_frequencies(counts, expected)


@pytest.mark.parametrize(
    ("depth", "thumbnails"),
    [
        (0, None),
        (1, None),
        pytest.param(2, None, marks=pytest.mark.slow),
        (1, (2, 1)),
        pytest.param(2, (3, 0), marks=pytest.mark.slow),
    ],
)
def test_fillings_follow_the_probabilities_given_all_known_pixels(depth, thumbnails):
    levels, n = 3, 700
    size = (4, 4) if thumbnails is None else (2, 3)
    images = as_levels(make_images(50 if thumbnails is None else 300, *size, 1, levels), levels)
    model = ConvMFA(**SMALL, depth=depth, thumbnails=thumbnails).fit(images)
    scores = model.score_samples(every_image(2, 3, 1, levels)).reshape((levels,) * 6)
    # Rows are (?, 1, ?) and (2, ?, 1): the pixels after a missing one matter.
    truth = np.exp(scores[:, 1, :, 2, :, 1]).reshape(-1)
    image = np.array([[0, 1, 0], [2, 0, 1]], np.uint8)[..., None]
    mask = np.array([[1, 0, 1], [0, 1, 0]], bool)
    with torch.inference_mode():
        random, mixture = torch.Generator().manual_seed(0), model._run.thumbnails
        fillings = Fillings(model._run.stages, image, mask, n, random, mixture)
        for _ in range(20):
            fillings.sweep()
    drawn = fillings.images[..., 0].astype(int)
    codes = drawn[:, 0, 0] * levels**2 + drawn[:, 0, 2] * levels + drawn[:, 1, 1]
    counts = np.bincount(codes, minlength=levels**3)
    assert stats.chisquare(counts, n * truth / truth.sum()).pvalue > 0.001
    assert (drawn[:, ~mask] == image[~mask][:, 0]).all()


def test_fillings_of_separate_holes_follow_the_probabilities_with_a_mixture_of_thumbnails():
    """Two squares of one colour are proposed at once, and their thumbnails depend on each other."""
    levels, n = 3, 1500
    options = SMALL | {"n_neighbours": 1}
    images = as_levels(make_images(300, 1, 12, 1, levels), levels)
    model = ConvMFA(**options, depth=1, thumbnails=(2, 2)).fit(images)
    image, mask = np.ones((1, 12, 1), np.uint8), np.zeros((1, 12), bool)
    mask[0, [0, 1, 10, 11]] = True
    every = every_image(1, 4, 1, levels).values.reshape(-1, 4)
    whole = np.ones((len(every), 1, 12), np.uint8)
    whole[:, mask] = every
    truth = np.exp(model.score_samples(as_levels(whole, levels)))
    with torch.inference_mode():
        random, mixture = torch.Generator().manual_seed(0), model._run.thumbnails
        fillings = Fillings(model._run.stages, image, mask, n, random, mixture)
        for _ in range(25):
            fillings.sweep()
    assert fillings._measure_sight()[1] <= 10
    drawn = fillings.images[:, mask][..., 0].astype(int)
    counts = np.bincount(drawn @ levels ** np.arange(3, -1, -1), minlength=levels**4)
    check_frequencies(counts, n * truth / truth.sum())


@pytest.mark.parametrize("depth", [0, 2])
def test_the_score_of_a_change_is_that_of_the_image(depth):
    """Steps in squares, at odd borders and in colour: planes and scores stay those of the image."""
    images = make_images(40, 7, 9, 3)
    model = ConvMFA(**SMALL, depth=depth).fit(images)
    mask = np.zeros((7, 9), bool)
    mask[3:, 4:] = True
    with torch.inference_mode():
        fillings = Fillings(model._run.stages, images[0], mask, 4, torch.Generator().manual_seed(0))
        fillings.sweep()
        place = np.zeros(4, np.int64) + 5, np.array([3, 4, 5, 6]), np.array([8, 5, 8, 4])
        owner = np.zeros(4, np.int64)
        pixels = fillings._images.values.reshape(8, 7, 9, 3)
        seen = list[float]()
        whole = list[float]()
        for step in (0, 3):
            pixels[place] += step
            fillings._split_again(place)
            seen.append(float(fillings._score_seers(owner, place, 1)[0]))
            whole.append(float(model.score_samples(pixels[5:6].clip(0, 255).astype(np.uint8))[0]))
    assert seen[1] - seen[0] == pytest.approx(whole[1] - whole[0], abs=1e-3)
    assert seen[1] != seen[0]


def make_mixed(images: NDArray[Any], **options: Any) -> ConvMFA:
    """Train a model with a mixture of thumbnails on images of one size."""
    return ConvMFA(**SMALL | {"depth": 1, "thumbnails": (3, 2)} | options).fit(images)


@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_inpainting_keeps_known_pixels_and_is_nearer_than_a_constant(depth):
    images = make_images(60, 10, 10, 3)
    model = ConvMFA(**SMALL | {"n_steps": 100}, depth=depth).fit(images[:50])
    mask = np.zeros((10, 10), bool)
    mask[4:7, 3:6] = True
    draws = model.inpaint(images[55], mask, n_draws=3, n_sweeps=2)
    assert draws.shape == (3, 10, 10, 3)
    assert draws.dtype == np.uint8
    assert (draws[:, ~mask] == images[55][~mask]).all()
    # One sweep has a mean too, and none has that of the first draws.
    for n_sweeps in (0, 1):
        assert np.isfinite(model.inpaint(images[55], mask, n_sweeps=n_sweeps)).all()
    errors = []
    for image in images[50:52]:
        filled = model.inpaint(image, mask, n_sweeps=4)
        errors.append(
            [filled[mask] - image[mask], image[~mask].mean(0) - image[mask].astype(float)]
        )
    ours, constant = np.square(np.array(errors)).mean((0, 2, 3))
    assert ours < 0.5 * constant


def test_enlarged_images_have_the_given_block_means():
    images = make_images(40, 8, 8, 3)
    model = ConvMFA(**SMALL, depth=2).fit(images)
    draws = model.upsample(images[0], n_draws=2)
    assert draws.shape == (2, 16, 16, 3)
    for draw in draws:
        np.testing.assert_array_equal(split_blocks(draw, whole=True).coarse, images[0])
    assert model.upsample(images[0], 4).shape == (32, 32, 3)
    grey = ConvMFA(**SMALL, depth=1).fit(images[..., 0] / 255.0)
    large = grey.upsample(images[0, ..., 0] / 255.0)
    means = large.reshape(8, 2, 8, 2).mean((1, 3))
    np.testing.assert_allclose(means, images[0, ..., 0] / 255.0, atol=1e-5)


def make_rectangles(n: int) -> NDArray[np.uint8]:
    """Return images (n, 32, 32) of rectangles before each other, with a little noise."""
    random, images = np.random.default_rng(5), np.full((n, 32, 32), 40.0)
    for image in images:
        for y, x, h, w in random.integers((-6, -6, 6, 6), (32, 32, 18, 18), (4, 4)):
            level = random.integers(30, 220)
            image[max(y, 0) : max(y + h, 0), max(x, 0) : max(x + w, 0)] = level
    return (images + random.normal(size=images.shape)).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_denoising_finds_a_more_probable_image_with_less_noise(depth):
    *images, last = make_rectangles(30)
    model = ConvMFA(**SMALL | {"n_steps": 60}, depth=depth).fit(images)
    clean = last.astype(np.float32)
    noisy = clean + np.random.default_rng(0).normal(scale=20, size=clean.shape)
    found, own = model.denoise(noisy, 20), factormix.denoise(noisy, 20)
    assert np.square(found - clean).mean() < 0.4 * np.square(noisy - clean).mean()
    assert (found.shape, found.dtype) == (noisy.shape, noisy.dtype)
    density = ImageGradient(model._run.stages, clean.shape)
    scores = [
        density(torch.from_numpy(one).float()[..., None])[0] - np.square(one - noisy).sum() / 800
        for one in (found, own, noisy)
    ]
    assert scores[0] > max(scores[1:])
    np.testing.assert_array_equal(found, factormix.denoise(noisy, 20, prior=model))
    # The noise is estimated, and whole numbers stay whole.
    rounded = model.denoise(noisy.round().clip(0, 255).astype(np.uint8))
    assert rounded.dtype == np.uint8
    assert np.square(rounded - clean).mean() < 0.4 * np.square(noisy - clean).mean()


def test_colour_is_denoised_by_a_model_of_colour_or_of_grey():
    photo = load_sample_image("china.jpg")[40:136, 300:396]
    colour = ConvMFA(**SMALL | {"n_steps": 100}).fit(photo[None, 48:])
    grey = ConvMFA(**SMALL | {"n_steps": 100}).fit(photo[None, 48:, :, 1])
    clean = photo[:24, :32].astype(np.float64)
    noisy = clean + np.random.default_rng(0).normal(scale=20, size=clean.shape)
    for model in (colour, grey):
        found = model.denoise(noisy, 20)
        assert found.shape == clean.shape
        assert np.square(found - clean).mean() < 0.4 * np.square(noisy - clean).mean()
    with pytest.raises(InputError, match="1 channels where the model has 3"):
        colour.denoise(noisy[..., 0], 20)
    for wrong in (0, float("nan"), "20", 1e300):
        with pytest.raises(InputError, match="sigma, the deviation of the noise, must be"):
            grey.denoise(noisy, wrong)
    with pytest.raises(InputError, match="gave numbers that are not finite: give sigma in"):
        grey.denoise(1e30 * noisy[:9, :9, 0], 1e30)
    with pytest.raises(InputError, match=r"1e\+06 is too large for an image of values up to"):
        grey.denoise(noisy, 1e6)
    with pytest.raises(InputError, match=r"8-bit images, .* multiply the image and sigma by 255"):
        grey.denoise(noisy / 255, 20 / 255)
    # Whole levels may be floats.
    assert grey.denoise(np.eye(12), 0.1).shape == (12, 12)
    # Smaller than a patch, as large as one, and without noise.
    for h, w in ((3, 2), (8, 8)):
        assert grey.denoise(noisy[:h, :w], 20).shape == (h, w, 3)
    np.testing.assert_array_equal(grey.denoise(clean, 1e-9), clean)
    with pytest.raises(NotFittedError, match="not fitted"):
        ConvMFA().denoise(noisy)


@pytest.mark.parametrize(("kind", "unit"), [(np.uint8, 257), (np.float32, 1)])
def test_16_bits_are_denoised_in_the_units_of_the_model(kind, unit):
    images = make_images(10, 12, 12).astype(kind)
    model = ConvMFA(**SMALL).fit(images)
    noisy = np.random.default_rng(0).integers(0, 65536, (17, 18)).astype(np.uint16)
    for sigma in (None, 5000):
        found = factormix.denoise(noisy, sigma, prior=model)
        expected = model.denoise(noisy / np.float32(unit), sigma and sigma / unit)
        assert found.dtype == np.uint16
        np.testing.assert_allclose(found, (unit * expected).round().clip(0, 65535), atol=1)


def test_the_units_of_real_images_do_not_matter():
    images = make_images(30, 6, 6).astype(np.float32)
    usual = ConvMFA(**SMALL).fit(images).bits_per_dim(images)
    for unit in (1e-9, 1e6):
        scaled = (images * unit).astype(np.float32)
        found = ConvMFA(**SMALL).fit(scaled).bits_per_dim(scaled) - np.log2(unit)
        assert found == pytest.approx(usual, abs=1e-4)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_density_of_real_images_integrates_to_one(depth):
    images = make_images(60, 4, 4).astype(np.float32) / 50 - 2
    # One scale: widths are then large beside the steps of the grid.
    model = ConvMFA(**SMALL | {"n_scales": 1}, depth=depth).fit(images)
    axis = np.linspace(-12, 12, 161, dtype=np.float32)
    pairs = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 1, 2)
    density = np.exp(model.score_samples(pairs)).sum() * (axis[1] - axis[0]) ** 2
    assert density == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("depth", [0, 2])
def test_surprise_sums_to_the_score_and_training_lowers_it(depth):
    images = make_images(80, 8, 7, 3)
    options = SMALL | {"n_steps": 40}
    model = ConvMFA(**options, depth=depth).fit(images[:60])
    scores, maps = model.score_samples(images[60:]), model.surprise(images[60:])
    assert maps.shape == (20, 8, 7)
    np.testing.assert_allclose(maps.sum((1, 2)), -scores, rtol=1e-10)
    bits = -scores.sum() / (20 * 8 * 7 * 3 * np.log(2))
    assert model.bits_per_dim(images[60:]) == pytest.approx(bits)
    assert model.score(images[60:]) == pytest.approx(scores.mean())
    assert bits < model.history_[0]["bits_per_dim"] - 0.1
    assert bits < 8


def test_images_of_several_sizes_and_smaller_than_the_neighbourhood():
    sizes = [(9, 4), (2, 2), (1, 1), (5, 8)]
    images = [make_images(1, h, w)[0] for h, w in sizes]
    for depth in (0, 1):
        model = ConvMFA(**SMALL, depth=depth).fit(images)
        maps = model.surprise(images)
        assert [one.shape for one in maps] == sizes
        alone = [model.score_samples(image[None])[0] for image in images]
        np.testing.assert_allclose(model.score_samples(images), alone, rtol=1e-5)
        assert model.sample(2, size=(3, 5)).shape == (2, 3, 5)


def test_equal_seeds_give_equal_models_and_draws():
    images = make_images(20, 6, 6, 3)
    one, other = (ConvMFA(**SMALL).fit(images) for _ in range(2))
    assert [r["bits_per_dim"] for r in one.history_] == [r["bits_per_dim"] for r in other.history_]
    np.testing.assert_array_equal(one.sample(3, size=(5, 5)), other.sample(3, size=(5, 5)))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_loaded_model_scores_and_learns_as_before(tmp_path, depth):
    images = make_images(30, 6, 5, 3)
    model = ConvMFA(**SMALL, depth=depth).fit(images)
    model.save(tmp_path / "m.safetensors")
    loaded = factormix.load(tmp_path / "m.safetensors")
    assert isinstance(loaded, ConvMFA)
    assert loaded.depth == depth
    np.testing.assert_array_equal(loaded.score_samples(images), model.score_samples(images))
    first, second = (one.partial_fit(images) for one in (model, loaded))
    assert first.n_steps_ == SMALL["n_steps"] + -(-30 * 30 // 200)
    np.testing.assert_array_equal(first.score_samples(images), second.score_samples(images))
    model.save(tmp_path / "s.safetensors", training_state=False)
    small = factormix.load(tmp_path / "s.safetensors")
    np.testing.assert_array_equal(small.score_samples(images), model.score_samples(images))
    with pytest.raises(InputError, match="cannot learn"):
        small.partial_fit(images)


def test_an_interrupted_run_resumes_to_the_same_model(tmp_path):
    images = make_images(30, 6, 5)
    whole = ConvMFA(**SMALL, depth=1).fit(images)

    def interrupt(progress: Any) -> None:
        if progress.record["step"] == 7:
            os.kill(os.getpid(), signal.SIGINT)

    callbacks = [interrupt, Checkpoints(tmp_path / "run", seconds=0)]
    broken = ConvMFA(**SMALL, depth=1, callbacks=callbacks)
    with pytest.raises(KeyboardInterrupt):
        broken.fit(images)
    loaded = factormix.load(tmp_path / "run")
    assert not loaded.finished_
    with pytest.raises(InputError, match="these differ"):
        loaded.resume(images[1:])
    loaded.resume(images)
    assert loaded.finished_
    np.testing.assert_array_equal(loaded.score_samples(images), whole.score_samples(images))
    for one, other in zip(loaded.history_, whole.history_, strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}


def test_learning_from_parts_starts_from_nothing():
    images = make_images(200, 8, 8)
    model = ConvMFA(**SMALL).partial_fit(images[:100])
    before = model.bits_per_dim(images[:50])
    for _ in range(3):
        model.partial_fit(images[100:])
    assert model.bits_per_dim(images[:50]) < before


def test_a_mixture_of_thumbnails_is_that_of_an_mfa(tmp_path):
    images = make_images(300, 7, 6, 3).astype(np.float32)
    model = make_mixed(images)
    means = [split_blocks(image, whole=False).coarse.reshape(-1) for image in images]
    alone = factormix.MFA(3, 2, random_state=0).fit(np.array(means))
    mixture, (coarse, *_) = model._run.thumbnails, model.sample(2, every_depth=True)
    assert mixture is not None
    np.testing.assert_allclose(
        mixture.score(np.array(means)).sum(1), alone.score_samples(np.array(means)), atol=0.01
    )
    assert (coarse.shape, model.sample(2).shape) == ((2, 4, 3, 3), (2, 7, 6, 3))
    model.save(tmp_path / "m.safetensors", training_state=False)
    loaded = factormix.load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(loaded.score_samples(images), model.score_samples(images))
    np.testing.assert_array_equal(loaded.sample(2), model.sample(2))
    assert loaded.image_size_ == (7, 6)
    # Denoising, filling and enlarging.
    noisy = images[0] + np.random.default_rng(0).normal(scale=5, size=images[0].shape)
    found = loaded.denoise(noisy, 5)
    assert np.square(found - images[0]).mean() < 0.8 * np.square(noisy - images[0]).mean()
    mask = np.zeros((7, 6), bool)
    mask[2:5, 1:4] = True
    filled = loaded.inpaint(images[0], mask, n_sweeps=4)
    assert np.abs(filled - images[0])[mask].mean() < images[0].std()
    assert loaded.upsample(images[0]).shape == (14, 12, 3)
    maps = model.surprise(images[:4])
    np.testing.assert_allclose(maps.sum((1, 2)), -model.score_samples(images[:4]))


def test_a_model_with_thumbnails_learns_more_and_resumes_to_the_same(tmp_path):
    images = make_images(300, 6, 6)
    whole = make_mixed(images)
    assert whole.bits_per_dim(images) == pytest.approx(whole.history_[-1]["bits_per_dim"], rel=0.2)

    def interrupt(progress: Any) -> None:
        if progress.record["step"] == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        make_mixed(images, callbacks=[interrupt, Checkpoints(tmp_path / "run", seconds=0)])
    loaded = factormix.load(tmp_path / "run").resume(images)
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    for model, path in ((loaded, one), (whole, other)):
        model._run.seconds = 0.0
        model.history_[:] = [record | {"seconds": 0.0} for record in model.history_]
        model._mfa._run.seconds = 0.0
        model.save(path)
    assert read_file(one)[0].keys() == read_file(other)[0].keys()
    for name, tensor in read_file(one)[0].items():
        assert torch.equal(tensor, read_file(other)[0][name]), name
    again = factormix.load(other)
    for model in (loaded, again):
        model.partial_fit(images[:100])
    np.testing.assert_array_equal(loaded.score_samples(images), again.score_samples(images))
    assert (loaded.score_samples(images) != whole.score_samples(images)).any()
    parts = ConvMFA(**SMALL, depth=1, thumbnails=(3, 2)).partial_fit(images)
    assert np.isfinite(parts.partial_fit(images).bits_per_dim(images))


@pytest.mark.parametrize("stopped", ["fit", "partial_fit"])
def test_a_stop_while_thumbnails_are_learned_leaves_the_model_as_it_is(
    stopped, tmp_path, monkeypatch
):
    images = make_images(60, 6, 6)
    model = make_mixed(images)
    before = model.score_samples(images)

    learn = factormix.MFA.partial_fit

    def stop(*given: Any, **options: Any) -> None:
        if stopped == "partial_fit":
            learn(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        # The mixture of thumbnails has learned, and the rest of the model has not.
        if stopped == "fit":
            patched.setattr(conv, "begin_run", stop)
        else:
            patched.setattr(factormix.MFA, "partial_fit", stop)
        with pytest.raises(KeyboardInterrupt):
            getattr(model, stopped)(images[::-1][:40])
    np.testing.assert_array_equal(model.score_samples(images), before)
    model.save(tmp_path / "m.safetensors")
    loaded = factormix.load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(loaded.score_samples(images), before)


def test_wrong_thumbnails_get_one_sentence():
    images = make_images(300, 6, 6)
    several = [*images[:20], make_images(1, 5, 6)[0]]
    for given, options, message in [
        (images, {"depth": 0}, "depth of 1 or more"),
        (images, {"thumbnails": 5}, "must be .components, factors."),
        (images, {"thumbnails": (5, 2, 1)}, "must be .components, factors."),
        (images, {"thumbnails": (0, 2)}, "number of components"),
        (images, {"thumbnails": (2, -1)}, "number of factors"),
        (images, {"thumbnails": (2, 9)}, "9 numbers, and its mixture 9 factors"),
        (several, {}, "images of one size"),
        (images[:3], {"thumbnails": (5, 2)}, "5 components needs 5 images or more, and has 3"),
        (0 * images, {}, "all thumbnails are the same"),
    ]:
        with pytest.raises(InputError, match=message):
            make_mixed(given, **options)
    with pytest.raises(InputError, match=r"first call of partial_fit .* 10 images"):
        ConvMFA(**SMALL, depth=1, thumbnails=(3, 2)).partial_fit(images[:5])
    model = make_mixed(images)
    other, mask = make_images(2, 5, 6), np.zeros((5, 6), bool)
    for use in (
        lambda: model.score_samples(other),
        lambda: model.sample(1, size=(5, 6)),
        lambda: model.inpaint(other[0], mask),
        lambda: model.denoise(other[0], 5),
        lambda: model.partial_fit(other),
    ):
        with pytest.raises(InputError, match="5 x 6 pixels, and the thumbnails of this model"):
            use()


@pytest.mark.parametrize("first", ["fit", "partial_fit"])
def test_an_image_that_thumbnails_cannot_learn_is_named(first):
    images = make_images(100, 6, 6) / 255.0
    model = ConvMFA(**SMALL, depth=1, thumbnails=(2, 2))
    if first == "partial_fit":
        model.partial_fit(images)
    images[3, 2, 2] = -1e30
    with pytest.raises(InputError, match=r"so far apart: .* image 3 \(counting from 0\)"):
        getattr(model, first)(images)


def test_the_search_for_thumbnails_that_differ_needs_little_memory():
    n = 2000
    plane = Pictures.build(np.zeros((n * 64**2, 1), np.uint8), [64] * n, [64] * n, 256)
    tracemalloc.start()
    with pytest.raises(InputError, match="all thumbnails are the same"):
        conv._check_different(plane)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * conv.SCORED_PIXELS
    plane.values[-1] = 1
    conv._check_different(plane)


def test_a_large_mixture_of_thumbnails_is_a_warning_in_the_words_of_the_user():
    with pytest.warns(factormix.errors.TrainingWarning, match="30 components with 2") as found:
        ConvMFA(**SMALL, depth=1, thumbnails=(30, 2)).fit(make_images(40, 6, 6))
    assert len(found) == 1
    assert "for 40 images: use thumbnails=(3, 2), " in str(found[0].message)
    assert found[0].filename == __file__


def test_a_memory_map_and_a_folder_train_the_same_model(tmp_path):
    from PIL import Image

    images = make_images(12, 6, 5, 3)
    np.save(tmp_path / "images.npy", images)
    (tmp_path / "folder").mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "folder" / f"{i:02d}.png")
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    scores = [
        ConvMFA(**SMALL, depth=1).fit(given).score_samples(images)
        for given in (images, mapped, str(tmp_path / "folder"))
    ]
    np.testing.assert_array_equal(scores[0], scores[1])
    np.testing.assert_array_equal(scores[0], scores[2])


def test_bad_input_gets_one_sentence(tmp_path):
    images = make_images(10, 5, 5)
    with pytest.raises(AttributeError, match="not fitted"):
        ConvMFA().score_samples(images)
    for options, message in [
        ({"n_kinds": 0}, "n_kinds"),
        ({"depth": -1}, "depth"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": None}, "learning_rate must be a positive number, not None"),
        ({"device": "nowhere"}, "device"),
        ({"mesh": "components"}, "mesh must be"),
        ({"callbacks": 3}, "callbacks must be a list or tuple of callables, not 3"),
    ]:
        with pytest.raises(InputError, match=message):
            ConvMFA(**SMALL | options).fit(images)
    model = ConvMFA(**SMALL).fit(images)
    with pytest.raises(InputError, match="3 channels where the model has 1"):
        model.score_samples(make_images(2, 5, 5, 3))
    with pytest.raises(InputError, match="8-bit images"):
        model.score_samples(images / 255.0)
    with pytest.raises(InputError, match="size must be"):
        model.sample(1, size=5)
    with pytest.raises(InputError, match="n_samples"):
        model.sample(0)
    with pytest.raises(InputError, match=r"shape \(5, 5\)"):
        model.inpaint(images[0], np.zeros((4, 5), bool))
    with pytest.raises(InputError, match="booleans"):
        model.inpaint(images[0], np.zeros((5, 5)))
    with pytest.raises(InputError, match="train one with depth=1"):
        model.upsample(images[0])
    with pytest.raises(InputError, match="callbacks must be"):
        model.set_params(callbacks=print).partial_fit(images)
    deep = ConvMFA(**SMALL, depth=1).fit(images)
    with pytest.raises(InputError, match="power of 2"):
        deep.upsample(images[0], 3)


def test_an_estimator_without_a_fit_says_so():
    with pytest.raises(NotFittedError, match="not fitted"):
        ConvMFA().sample(1)
