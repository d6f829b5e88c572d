"""The gradient of the density of images: scores of the estimator, and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from factormix import ConvMFA
from factormix.data.pictures import split_blocks
from factormix.training.image_gradient import ImageGradient, raise_density, split_tensor

SMALL = {"n_kinds": 3, "n_scales": 2, "n_features": 8, "n_neighbours": 6, "n_steps": 5}


def fit(
    depth: int, c: int, thumbnails: tuple[int, int] | None = None
) -> tuple[ConvMFA, np.ndarray]:
    """Return a model of real-valued images and these, (n, 9, 7, c)."""
    n = 20 if thumbnails is None else 200
    images = np.random.default_rng(5).normal(size=(n, 9, 7, c)).cumsum(1).cumsum(2)
    images = images.astype(np.float32)
    model = ConvMFA(
        **SMALL, batch_size=100, random_state=0, depth=depth, thumbnails=thumbnails
    ).fit(images)
    return model, images


@pytest.mark.parametrize(
    ("depth", "c", "thumbnails"),
    [(0, 3, None), (1, 1, None), (2, 3, None), (1, 1, (3, 2)), (2, 3, (2, 0))],
)
def test_the_density_is_the_score_and_its_gradient_that_of_differences(depth, c, thumbnails):
    model, images = fit(depth, c, thumbnails)
    stages, mixture = model._run.stages, model._run.thumbnails
    for h, w in [(9, 7), (1, 3), (3, 1), (1, 1)][: 4 if mixture is None else 1]:
        value, _ = ImageGradient(stages, (h, w), mixture)(torch.from_numpy(images[0, :h, :w]))
        assert value == pytest.approx(model.score_samples(images[:1, :h, :w])[0], abs=1e-3)
    for stage in [stage for several in stages for stage in several]:
        stage.mixtures = [mixture.to(dtype=torch.float64) for mixture in stage.mixtures]
    density, image = ImageGradient(stages, (9, 7), mixture), torch.from_numpy(images[1]).double()
    _, gradient = density(image)
    for seed in range(3):
        step = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed)).double()
        change = (density(image + 1e-6 * step)[0] - density(image - 1e-6 * step)[0]) / 2e-6
        assert float((gradient * step).sum()) == pytest.approx(change, rel=1e-5)


@pytest.mark.parametrize("size", [(4, 6), (5, 3), (1, 4), (1, 1)])
def test_tensors_are_split_like_arrays(size):
    image = np.random.default_rng(0).normal(size=(*size, 2))
    for found, expected in zip(
        split_tensor(torch.from_numpy(image)), split_blocks(image, whole=False), strict=True
    ):
        np.testing.assert_array_equal(found.numpy(), expected)


def test_steps_raise_the_density_of_the_clean_image():
    model, images = fit(1, 1)
    random = np.random.default_rng(0)
    noisy = images[0] + random.normal(size=images[0].shape).astype(np.float32)

    def score(image: np.ndarray) -> float:
        return float(model.score_samples(image[None])[0] - np.square(image - noisy).sum() / 2)

    found = raise_density(model._run.stages, noisy, noisy, 1.0)
    assert score(found) > score(noisy) + 10
    assert score(found) > score(images[0])


@pytest.mark.parametrize("unit", [1e3, 1e9])
def test_units_of_the_pixels_do_not_matter(unit):
    model, images = fit(1, 1)
    other = ConvMFA(**model.get_params()).fit(images * np.float32(unit))
    found = other.denoise(images[0] * np.float32(unit), unit) / unit
    np.testing.assert_allclose(found, model.denoise(images[0], 1.0), atol=0.01)
