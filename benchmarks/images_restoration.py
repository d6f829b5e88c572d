"""The trials of restored photographs: noise removed, missing pixels filled, images enlarged.

Qualities are peak signal-to-noise ratios in decibels. Peers are BM3D by its authors (package
``bm3d``, with its defaults), biharmonic inpainting (``skimage``), cubic interpolation, and
iterative back-projection (Irani and Peleg, 1991). A peer that is not installed is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Outcome, Settings
from images_data import draw_text_mask, list_photographs, load_photographs, read_grey
from images_trials import load_model
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_image
from sklearn.feature_extraction.image import extract_patches_2d

import factormix
from factormix import MFA
from factormix.solvers import CovarianceGradient

Photo = NDArray[np.float32]
SHOWN = "china.jpg"
"""A photograph of scikit-learn's, for pictures: those of Set12 and BSD68 must not be published."""
SWEEPS = 20
"""Sweeps of Metropolis and Hastings of a filling."""
PROJECTIONS = 20
"""Rounds of back-projection: the mean error of blocks is below a tenth of a level by then."""


def measure_quality(restored: Any, clean: NDArray[Any]) -> float:
    """Return the peak signal-to-noise ratio in decibels."""
    error = np.asarray(restored, np.float64).clip(0, 255) - clean
    return float(10 * np.log10(255**2 / np.mean(error**2)))


def _load_photo(settings: Settings) -> Photo:
    """Load the photograph of a trial, or the middle of it if only that is wanted."""
    if settings["images"] == SHOWN:
        photo = load_sample_image(SHOWN).mean(axis=2)
    elif settings["quick"]:
        photo = load_photographs("Set12", quick=True)[settings["index"]]
    else:
        photo = read_grey(list_photographs(settings["images"])[settings["index"]])
    if side := settings.get("side"):
        top, left = (photo.shape[0] - side) // 2, (photo.shape[1] - side) // 2
        photo = photo[top : top + side, left : left + side]
    return photo.astype(np.float32)


def _compare(
    settings: Settings,
    methods: dict[str, Callable[[], Any]],
    clean: Photo,
    given: str,
    start: NDArray[Any],
) -> Outcome:
    """Run every method, and keep its quality and seconds; keep its image if that is to be shown."""
    images = {"original": clean.astype(np.uint8), given: start.clip(0, 255).astype(np.uint8)}
    values = dict[str, Any]()
    for name, method in methods.items():
        started = time.process_time()
        try:
            found = np.asarray(method(), np.float32)
        except ImportError:
            continue
        seconds = time.process_time() - started
        values[name] = {"quality": measure_quality(found, clean), "seconds": seconds}
        images[name] = np.rint(found.clip(0, 255)).astype(np.uint8)
    return Outcome(values, images if settings["images"] == SHOWN else {})


def run_prior(settings: Settings, folder: str | None) -> Outcome:
    """Train a mixture of the patches of clean photographs, none of them in BSD68 or Set12."""
    started = time.process_time()
    photos = load_photographs("bsds300/train", quick=settings["quick"])
    patches = [
        extract_patches_2d(photo, (8, 8), max_patches=settings["n_patches"], random_state=i)
        for i, photo in enumerate(photos)
    ]
    rows = np.concatenate(patches).reshape(-1, 64).astype(np.float32)
    rows -= rows.mean(axis=1, keepdims=True)
    scales = settings["n_scales"]
    model = MFA(
        settings["n_kinds"] * scales,
        settings["n_factors"],
        solver=CovarianceGradient(scales=scales),
        max_epochs=2,
        random_state=0,
    ).fit(rows)
    seconds = time.process_time() - started
    return Outcome({"seconds": seconds, "n_patches": len(rows)}, model=model)


def run_denoising(settings: Settings, folder: str | None) -> Outcome:
    """Remove the same Gaussian noise from one photograph by every method."""
    clean, sigma = _load_photo(settings), settings["sigma"]
    noise = np.random.default_rng(settings["index"]).normal(scale=sigma, size=clean.shape)
    noisy = (clean + noise).astype(np.float32)
    prior = load_model(folder, settings["model"])

    def filter_blocks() -> Any:
        from bm3d import bm3d

        return bm3d(noisy, sigma)

    methods: dict[str, Callable[[], Any]] = {
        "own patches": lambda: factormix.denoise(noisy, sigma),
        "noise estimated": lambda: factormix.denoise(noisy),
        "with a prior": lambda: factormix.denoise(noisy, sigma, prior=prior),
        "BM3D": filter_blocks,
    }
    chosen = {name: methods[name] for name in settings["methods"]}
    return _compare(settings, chosen, clean, "noisy", noisy)


def run_inpainting(settings: Settings, folder: str | None) -> Outcome:
    """Fill the missing pixels of one photograph by every method."""
    clean = _load_photo(settings)
    if settings["mask"] == "text":
        missing = draw_text_mask((clean.shape[0], clean.shape[1]))
    else:
        missing = np.random.default_rng(settings["index"]).random(clean.shape) < 0.5
    known = np.where(missing, 0, clean).astype(np.uint8)
    model = load_model(folder, settings["model"])

    def fill_smoothly() -> Any:
        from skimage.restoration import inpaint_biharmonic

        # Without the split, version 0.26.0 reads beyond its arrays for some masks.
        return 255 * inpaint_biharmonic(known / 255, missing, split_into_regions=True)

    outcome = _compare(
        settings,
        {
            "ConvMFA": lambda: model.inpaint(known, missing, n_sweeps=settings["n_sweeps"]),
            "biharmonic": fill_smoothly,
            "cubic": lambda: interpolate(known, missing),
        },
        clean,
        "known",
        known,
    )
    return Outcome({**outcome.values, "share": float(missing.mean())}, outcome.arrays)


def interpolate(known: NDArray[Any], missing: NDArray[np.bool_]) -> NDArray[Any]:
    """Fill pixels by a piecewise cubic surface through known ones, at corners by the nearest."""
    from scipy.interpolate import griddata

    points, wanted = np.argwhere(~missing), np.argwhere(missing)
    found = griddata(points, known[~missing].astype(float), wanted, method="cubic")
    nearest = griddata(points, known[~missing].astype(float), wanted, method="nearest")
    filled = known.astype(float)
    filled[missing] = np.where(np.isnan(found), nearest, found)
    return filled


def run_upsampling(settings: Settings, folder: str | None) -> Outcome:
    """Enlarge the block means of one photograph by every method."""
    clean = _load_photo(settings)
    clean = clean[: clean.shape[0] // 2 * 2, : clean.shape[1] // 2 * 2]
    small = np.rint(_halve(clean)).astype(np.uint8)
    model = load_model(folder, settings["model"])
    return _compare(
        settings,
        {
            "ConvMFA": lambda: model.upsample(small, 2),
            "bicubic": lambda: _enlarge(small.astype(np.float32)),
            "back-projection": lambda: project_back(small.astype(np.float32)),
        },
        clean,
        "halved",
        np.kron(small, np.ones((2, 2))),
    )


def _halve(image: Photo) -> Photo:
    """Return the means of 2 x 2 blocks."""
    h, w = image.shape
    means: Photo = image.reshape(h // 2, 2, w // 2, 2).mean(axis=(1, 3))
    return means


def _enlarge(image: Photo) -> Photo:
    """Double the size by bicubic interpolation."""
    h, w = image.shape
    large = Image.fromarray(image).resize((2 * w, 2 * h), Image.Resampling.BICUBIC)
    return np.asarray(large, np.float32)


def project_back(small: Photo) -> Photo:
    """Correct bicubic interpolation until the means of blocks are those given."""
    large = _enlarge(small)
    for _ in range(PROJECTIONS):
        large = large + _enlarge(small - _halve(large))
    return large
