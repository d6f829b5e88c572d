"""Denoising: quality on real images, exact limits, and bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.fft import dctn
from scipy.ndimage import gaussian_filter
from scipy.signal import wiener as scipy_wiener
from sklearn.datasets import load_sample_image
from sklearn.feature_extraction.image import extract_patches_2d

import factormix
from factormix import InputError
from factormix.estimators.denoising import (
    GROUP,
    GROUP_PATCH,
    REACH,
    STEP,
    _convert_prior,
    _draw_rows,
    _filter_groups,
    _filter_patches,
    _halve,
    _learn_mixture,
    _make_basis,
    _replace_low,
    _split_evenly,
)
from oracles import LargestTensor

SIGMA = 20.0


@pytest.fixture(scope="module")
def photo():
    """A part of a photograph in colour, (120, 144, 3): a roof before the sky."""
    return load_sample_image("china.jpg")[20:140, 300:444]


def add_noise(image, seed=0):
    return image + np.random.default_rng(seed).normal(scale=SIGMA, size=image.shape)


def psnr(image, clean):
    return 10 * np.log10(255**2 / np.mean((np.asarray(image, float) - clean) ** 2))


def blur_best(noisy, clean):
    """Return the highest quality of a Gaussian blur of any width, which knows the clean image."""
    return max(psnr(gaussian_filter(noisy, w), clean) for w in np.linspace(0.3, 2, 18))


def test_a_photograph_is_denoised_by_its_own_patches(photo):
    grey = photo.mean(axis=2)
    noisy = add_noise(grey)
    known, estimated = factormix.denoise(noisy, SIGMA), factormix.denoise(noisy)
    assert psnr(known, grey) > blur_best(noisy, grey) + 1
    assert psnr(known, grey) > psnr(scipy_wiener(noisy, 5, SIGMA**2), grey) + 1
    assert psnr(estimated, grey) > psnr(known, grey) - 0.3


def test_colour_is_denoised_in_its_own_type(photo):
    noisy = add_noise(photo).round().clip(0, 255).astype(np.uint8)
    found = factormix.denoise(noisy, SIGMA)
    assert (found.shape, found.dtype) == (photo.shape, np.uint8)
    assert psnr(found, photo) > psnr(noisy, photo) + 5


def test_units_of_the_image_do_not_matter(photo):
    noisy = add_noise(photo[..., 0].astype(float))
    plain, scaled = factormix.denoise(noisy, SIGMA), factormix.denoise(noisy / 256, SIGMA / 256)
    np.testing.assert_allclose(256 * scaled, plain, atol=0.01)


def test_a_prior_of_clean_patches_denoises(photo):
    rows = extract_patches_2d(
        load_sample_image("flower.jpg").mean(axis=2), (6, 6), max_patches=9000, random_state=0
    )
    prior = factormix.MFA(8, 20, random_state=0, max_epochs=3).fit(rows.reshape(len(rows), -1))
    grey = photo.mean(axis=2)
    noisy = add_noise(grey)
    found = factormix.denoise(noisy, SIGMA, prior=prior)
    assert psnr(found, grey) > blur_best(noisy, grey) + 0.5
    assert psnr(found, grey) > psnr(factormix.denoise(noisy, SIGMA), grey)


def test_groups_of_patches_improve_the_first_result(photo):
    grey, basis = photo.mean(axis=2), _make_basis(8)
    noisy = add_noise(grey)
    plane = torch.from_numpy(noisy / SIGMA).float()
    first = SIGMA * _filter_patches(plane, _learn_mixture(plane, basis, 0), 1.0, basis)
    assert psnr(factormix.denoise(noisy, SIGMA), grey) > psnr(first, grey) + 0.1


@pytest.mark.parametrize("shape", [(9, 30), (41, 17)])
def test_patches_are_filtered_by_the_nearest_ones_around(shape):
    """Group by group, with loops over patches, in float64."""
    rng = np.random.default_rng(0)
    clean = 5 * gaussian_filter(rng.normal(size=shape), 1)
    noisy = clean + rng.normal(size=shape)
    p, (rows, columns) = GROUP_PATCH, (n - GROUP_PATCH + 1 for n in shape)
    total, weights = np.zeros(shape), np.zeros(shape)
    for top in {*range(0, rows, STEP), rows - 1}:
        for left in {*range(0, columns, STEP), columns - 1}:
            around = [
                (i, j)
                for i in range(max(0, top - REACH), min(rows, top + REACH + 1))
                for j in range(max(0, left - REACH), min(columns, left + REACH + 1))
            ]
            known, given = (
                np.array([image[i : i + p, j : j + p].ravel() for i, j in around])
                for image in (clean, noisy)
            )
            own = known[around.index((top, left))]
            chosen = np.argsort(((known - own) ** 2).sum(axis=1))[:GROUP]
            Sigma = np.cov(known[chosen].T)
            mu = known[chosen].mean(axis=0)
            gain = np.linalg.solve(Sigma + np.eye(p * p), Sigma)
            share = 1 / (1 + np.trace(gain))
            for number, row in zip(chosen, mu + (given[chosen] - mu) @ gain, strict=True):
                i, j = around[number]
                total[i : i + p, j : j + p] += share * row.reshape(p, p)
                weights[i : i + p, j : j + p] += share
    found = _filter_groups(*(torch.from_numpy(image).float() for image in (noisy, clean)))
    np.testing.assert_allclose(found, total / weights, atol=1e-4)


def test_a_prior_gains_by_weights_of_each_part_of_an_image(photo):
    grey, basis = photo.mean(axis=2), _make_basis(8)
    patches = extract_patches_2d(
        load_sample_image("flower.jpg").mean(axis=2), (8, 8), max_patches=9000, random_state=0
    )
    rows = patches.reshape(len(patches), -1)
    rows -= rows.mean(axis=1, keepdims=True)
    model = factormix.MFA(30, 20, random_state=0, max_epochs=3).fit(rows)
    prior, plane = _convert_prior(model, basis), torch.from_numpy(add_noise(grey)).float()
    same = _filter_patches(plane, prior, SIGMA, basis)
    adapted = _filter_patches(plane, prior, SIGMA, basis, adapt=True)
    assert psnr(adapted, grey) > psnr(same, grey) + 0.05


@pytest.mark.parametrize(("n", "length"), [(1, 4), (4, 4), (5, 4), (474, 32), (33, 32)])
def test_parts_are_nearly_equal_and_cover_all_places(n, length):
    bounds = _split_evenly(n, length)
    assert [i for first, end in bounds for i in range(first, end)] == list(range(n))
    sizes = [end - first for first, end in bounds]
    assert max(sizes) <= length
    assert max(sizes) - min(sizes) <= 1


def test_a_half_image_has_the_lower_frequencies_and_gives_them_back():
    rng = np.random.default_rng(0)
    plane = torch.from_numpy(rng.normal(size=(17, 24)).astype(np.float32))
    other = torch.from_numpy(rng.normal(size=(17, 24)).astype(np.float32))
    given = dctn(plane.numpy(), norm="ortho")
    half = _halve(plane)
    np.testing.assert_allclose(2 * dctn(half.numpy(), norm="ortho"), given[:8, :12], atol=1e-5)
    expected = dctn(other.numpy(), norm="ortho")
    expected[:4, :6] = given[:4, :6]
    found = _replace_low(other, half)
    np.testing.assert_allclose(dctn(found.numpy(), norm="ortho"), expected, atol=1e-5)
    # Means of pixels stay means.
    np.testing.assert_allclose(_halve(torch.ones(16, 24)).numpy(), 1, atol=1e-5)


@pytest.mark.parametrize("most", [40, 1000])
def test_rows_of_a_mixture_are_patches_with_their_places(most):
    plane = torch.randn(30, 26, generator=torch.Generator().manual_seed(0))
    basis, memory = _make_basis(8), LargestTensor()
    with memory:
        rows = _draw_rows(plane, basis, 0, most)
    assert rows.shape == (min(most, 23 * 19), 65)
    i, j = (30 * rows[:, 63:]).round().long().mT
    assert len(set(zip(i.tolist(), j.tolist(), strict=True))) == len(rows)
    patches = extract_patches_2d(plane.numpy(), (8, 8)).reshape(23, 19, 8, 8)
    expected = dctn(patches[i, j], axes=(1, 2), norm="ortho").reshape(len(rows), 64)[:, 1:]
    np.testing.assert_allclose(rows[:, :63], expected, atol=1e-5)
    # Of patches that are not drawn, there are numbers only.
    assert memory.numel <= max(len(rows) * 65, 30 * 26), memory.operation


def test_an_image_may_be_smaller_than_a_patch_of_a_group(photo):
    rows = extract_patches_2d(photo.mean(axis=2), (4, 4), max_patches=500, random_state=0)
    prior = factormix.MFA(2, 3, random_state=0, max_epochs=2).fit(rows.reshape(500, -1))
    small = photo[:8, :8].mean(axis=2)
    assert psnr(factormix.denoise(small, 5.0, prior=prior), small) > 20
    assert factormix.denoise(np.eye(5), 0.1, prior=prior).shape == (5, 5)


def test_an_image_of_a_single_patch_is_too_small():
    noisy = add_noise(np.full((9, 8), 100.0))
    assert np.isfinite(factormix.denoise(noisy, SIGMA)).all()
    with pytest.raises(InputError, match="the image has 8 x 8 pixels"):
        factormix.denoise(noisy[:8], SIGMA)


def test_a_tiny_image_needs_no_advice_on_the_sizes_of_a_mixture(
    recwarn: pytest.WarningsRecorder,
) -> None:
    image = np.random.default_rng(0).normal(128, 20, size=(9, 8))
    assert factormix.denoise(image, sigma=20).shape == image.shape
    assert not [w for w in recwarn if w.category is factormix.errors.TrainingWarning]


@pytest.mark.parametrize("value", [0, 7])
@pytest.mark.parametrize("shape", [(12, 12), (20, 27, 3)])
def test_an_image_of_one_colour_stays(value, shape):
    image = np.full(shape, value, np.uint8)
    np.testing.assert_array_equal(factormix.denoise(image, 10.0), image)


@pytest.mark.parametrize("shape", [(24, 24), (24, 24, 3)])
def test_the_mean_is_left_of_an_image_far_below_its_noise(shape):
    image = np.random.default_rng(0).random(shape)
    found = factormix.denoise(image, 1e9)
    np.testing.assert_allclose(found, np.zeros(shape) + image.mean(axis=(0, 1)), rtol=1e-5)


def test_an_image_without_noise_stays():
    flat = np.full((20, 30), 7, np.uint8)
    np.testing.assert_array_equal(factormix.denoise(flat), flat)


@pytest.mark.parametrize("sigma", [3.0, 20.0, 60.0])
def test_the_noise_is_estimated(photo, sigma):
    clean = np.zeros((128, 128)) + np.linspace(0, 99, 128)
    noisy = clean + np.random.default_rng(0).normal(scale=sigma, size=clean.shape)
    assert factormix.estimate_noise(noisy) == pytest.approx(sigma, rel=0.1)


@pytest.mark.parametrize("shape", [(16, 16), (20, 20), (12, 64), (31, 32)])
def test_the_noise_of_a_small_image_is_not_estimated_far_too_low(shape, photo):
    random = np.random.default_rng(0)
    found = list[float]()
    for _ in range(20):
        y, x = (int(random.integers(n - m)) for n, m in zip(photo.shape[:2], shape, strict=True))
        clean = photo[y : y + shape[0], x : x + shape[1], 0]
        found.append(factormix.estimate_noise(clean + random.normal(scale=30, size=shape)))
    assert 0.75 < np.median(found) / 30 < 1.25


@pytest.mark.parametrize(
    ("image", "sigma", "words"),
    [
        (np.zeros((4, 9)), 1.0, "larger image"),
        (np.zeros((9, 9, 2)), 1.0, "shape"),
        (np.full((9, 9), np.nan), 1.0, "NaN"),
        (np.zeros((9, 9)), -1.0, "sigma, the deviation of the noise, must be a positive number"),
        (np.zeros((9, 9)), "20", "must be a positive number"),
        (np.array([["a"] * 9] * 9), 1.0, "numbers"),
        (np.eye(9) * 1e300, 1.0, "largest value of the image is 1e.300"),
        (np.eye(20) * 1e-300, None, "multiply the image and sigma by a constant"),
        (np.eye(9), 1e300, "sigma, .* must be at most 1e.36, not 1e.300"),
        ([[1, 2], [3]], 1.0, "not an array of numbers"),
        (np.eye(8), None, "larger image"),
        (np.eye(15), None, "too few to estimate the noise: give sigma"),
        (np.zeros((8, 200)), None, "too few to estimate the noise: give sigma"),
    ],
)
def test_bad_images_get_one_sentence(image, sigma, words):
    with pytest.raises(InputError, match=words):
        factormix.denoise(image, sigma)


@pytest.mark.parametrize("shape", [(1, 9), (8, 8), (14, 15), (8, 200)])
def test_the_noise_of_few_pixels_is_not_estimated(shape):
    with pytest.raises(InputError, match=f"{shape[0]} x {shape[1]} pixels, too few to estimate"):
        factormix.estimate_noise(np.random.default_rng(0).normal(size=shape))


def test_a_prior_must_be_of_square_patches():
    model = factormix.MFA(1, 0, random_state=0).fit(np.random.default_rng(0).normal(size=(50, 7)))
    with pytest.raises(InputError, match="p x p"):
        factormix.denoise(np.zeros((9, 9)), 1.0, prior=model)
    for prior in (factormix.MFA(), factormix.MFA, factormix.ConvMFA, "prior.safetensors"):
        with pytest.raises(InputError, match="trained"):
            factormix.denoise(np.zeros((9, 9)), 1.0, prior=prior)  # type: ignore[arg-type]
