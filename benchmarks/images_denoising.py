"""Remove Gaussian noise from the photographs of BSD68 and Set12, beside BM3D.

    FACTORMIX_DATA=folder python benchmarks/images_denoising.py         # all images, three levels
    python benchmarks/images_denoising.py --sigmas 25 --every 4         # every fourth image
    python benchmarks/images_denoising.py --prior patches.safetensors   # keep the prior

Prints peak signal-to-noise ratios in decibels, and processor seconds per image in one thread. BM3D
is the package ``bm3d``, by its authors, with its defaults; it is left out if it is not installed.
The prior is trained on patches of the 200 training photographs of BSDS300, none of which is in
BSD68 or Set12.
"""

from __future__ import annotations

import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import make_parser
from numpy.typing import NDArray
from PIL import Image
from sklearn.feature_extraction.image import extract_patches_2d

import factormix
from factormix.solvers import CovarianceGradient

Array = NDArray[np.float32]
KINDS, SCALES, PATCHES = 100, 9, 3000
"""Kinds of components of the prior, scales of each, and patches of a photograph."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="+", default=["BSD68", "Set12"])
    parser.add_argument("--sigmas", nargs="+", type=float, default=[15, 25, 50])
    parser.add_argument("--every", type=int, default=1, help="use every n-th image")
    parser.add_argument("--prior", type=Path, help="read the prior from here, or write it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    methods = list_methods(options)
    for name in options.sets:
        files = sorted((data_folder() / "denoising" / name).glob("*.png"))[:: options.every]
        for sigma in options.sigmas:
            print_row(
                f"{name}, {len(files)} images, sigma {sigma:g}", measure(files, sigma, methods)
            )


def data_folder() -> Path:
    return Path(os.environ["FACTORMIX_DATA"])


def list_methods(options: Namespace) -> dict[str, Callable[[Array, float], Any]]:
    """Return the functions of a noisy image and its noise to compare, by name."""
    prior = load_prior(options)
    methods: dict[str, Callable[[Array, float], Any]] = {
        "own patches": factormix.denoise,
        "own patches, noise estimated": lambda image, sigma: factormix.denoise(image),
        "with the prior": lambda image, sigma: factormix.denoise(image, sigma, prior=prior),
    }
    try:
        from bm3d import bm3d
    except ImportError:
        print("bm3d is not installed and is left out", flush=True)
    else:
        methods["BM3D"] = bm3d
    return methods


def load_prior(options: Namespace) -> factormix.MFA:
    """Read the mixture of clean patches, or train it."""
    if options.prior is not None and options.prior.exists():
        return factormix.load(options.prior)
    files = sorted((data_folder() / "bsds300" / "train").glob("*.jpg"))
    patches = [
        extract_patches_2d(read(file), (8, 8), max_patches=PATCHES, random_state=i)
        for i, file in enumerate(files[:10] if options.quick else files)
    ]
    rows = np.concatenate(patches).reshape(-1, 64)
    rows -= rows.mean(axis=1, keepdims=True)
    kinds = 4 if options.quick else KINDS
    model = factormix.MFA(
        kinds * SCALES, 62, solver=CovarianceGradient(scales=SCALES), max_epochs=2, random_state=0
    ).fit(rows)
    if options.prior is not None:
        model.save(options.prior)
    return model


def read(path: Path) -> Array:
    return np.asarray(Image.open(path).convert("L"), np.float32)


def measure(
    files: Sequence[Path], sigma: float, methods: dict[str, Callable[[Array, float], Any]]
) -> dict[str, tuple[float, float]]:
    """Return the mean quality in dB and the median seconds of every method."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for i, file in enumerate(files):
        clean = read(file)
        noise = np.random.default_rng(i).normal(scale=sigma, size=clean.shape)
        noisy = (clean + noise).astype(np.float32)
        for name, method in methods.items():
            started = time.process_time()
            result = np.asarray(method(noisy, sigma)).clip(0, 255)
            seconds = time.process_time() - started
            found[name].append((10 * np.log10(255**2 / np.mean((result - clean) ** 2)), seconds))
    return {
        name: (statistics.fmean(q for q, _ in all_), statistics.median(s for _, s in all_))
        for name, all_ in found.items()
    }


def print_row(title: str, results: dict[str, tuple[float, float]]) -> None:
    cells = [
        f"{name} {quality:.2f} dB ({seconds:.1f} s)" for name, (quality, seconds) in results.items()
    ]
    print(f"{title}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
