"""The images of the benchmark: small sets, photographs, and noise, masks and thumbnails of them.

Everything is read from the folder in FACTORMIX_DATA. A quick run needs no folder: crops of the two
photographs that scikit-learn has stand for every set.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from factormix import datasets

Images = NDArray[np.uint8]
"""(n, h, w) grey, or (n, h, w, 3)."""

HELD_OUT = {"olivetti": 100, "svhn": 1000}
"""Images that training does not see, of sets that are in one piece: the faces of the last ten
people, and the last of the part of SVHN's test images that is at hand."""
CROP_SIDE, N_CROPS = 64, 20
"""Side and number of the squares from each photograph that samples are compared with."""
QUICK_SIZE, QUICK_IMAGES = 8, 200
"""Side and number of the crops of a quick run."""


def data_folder() -> Path:
    """Return the folder of all data."""
    return Path(os.environ["FACTORMIX_DATA"])


def load_set(name: str, split: str, *, quick: bool = False) -> Images:
    """Load the training or test images of a set; bsds300 has squares cut from photographs."""
    if quick:
        return _crop_samples(split, colour=name in ("cifar10", "svhn"))[:QUICK_IMAGES]
    if name == "cifar10":
        names = ["test_batch"] if split == "test" else [f"data_batch_{i}" for i in range(1, 6)]
        folder = data_folder() / "cifar10"
        return np.concatenate([read_cifar(folder / f"{one}.bin") for one in names])
    if name == "bsds300":
        return crop_photographs(f"bsds300/{split}")
    if name in HELD_OUT:
        # Ten faces of each person follow each other.
        images = _load_levels(name, "all" if name == "olivetti" else "test")
        return images[-HELD_OUT[name] :] if split == "test" else images[: -HELD_OUT[name]]
    return _load_levels(name, split)


def crop_photographs(name: str) -> Images:
    """Cut squares (n, h, w) from random places of every photograph of a set."""
    random, squares = np.random.default_rng(0), list[Images]()
    for photo in load_photographs(name):
        for _ in range(N_CROPS):
            y, x = (random.integers(0, length - CROP_SIDE + 1) for length in photo.shape)
            squares.append(photo[y : y + CROP_SIDE, x : x + CROP_SIDE])
    return np.stack(squares)


def read_cifar(path: Path) -> Images:
    """Read a binary file of CIFAR-10: a label and three planes of 32 x 32 for each image."""
    records = np.fromfile(path, np.uint8).reshape(-1, 3073)
    return np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def list_photographs(name: str) -> list[Path]:
    """List the grey photographs of bsds300/train, bsds300/test, BSD68 or Set12."""
    folder = data_folder() / (name if name.startswith("bsds300") else f"denoising/{name}")
    return sorted(path for path in folder.iterdir() if path.suffix in (".jpg", ".png"))


def load_photographs(name: str, every: int = 1, *, quick: bool = False) -> list[Images]:
    """Load every n-th photograph (h, w) of a set."""
    if quick:
        split = "train" if name.endswith("train") else "test"
        return list(_crop_samples(split, colour=False, size=24)[::64])
    return [read_grey(path) for path in list_photographs(name)[::every]]


def read_grey(path: Path) -> Images:
    """Read the luminance (h, w) of an image file."""
    return np.asarray(Image.open(path).convert("L"))


def draw_text_mask(size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return a mask (h, w) that is true under lines of text, as if written across the image."""
    page = Image.new("1", (size[1], size[0]))
    pen = ImageDraw.Draw(page)
    line = "the quick brown fox jumps over the lazy dog "
    for i, top in enumerate(range(0, size[0], 18)):
        pen.text((-7 * (i % 5), top), line * (size[1] // 150 + 2), fill=1)
    return np.array(page, bool)


def _load_levels(name: str, split: str) -> Images:
    """Load a set of the package as levels from 0 to 255."""
    return np.rint(255 * datasets.load(name, split=split).images).astype(np.uint8)


def _crop_samples(split: str, *, colour: bool, size: int = QUICK_SIZE) -> Images:
    """Cut one of scikit-learn's photographs, halved, into squares."""
    from sklearn.datasets import load_sample_image

    photo = load_sample_image("china.jpg" if split == "train" else "flower.jpg")[::2, ::2]
    photo = photo if colour else photo.mean(axis=2).astype(np.uint8)[:, :, None]
    rows, columns = photo.shape[0] // size, photo.shape[1] // size
    photo = photo[: rows * size, : columns * size]
    squares = photo.reshape(rows, size, columns, size, -1).swapaxes(1, 2)
    squares = squares.reshape(rows * columns, size, size, -1)
    return np.ascontiguousarray(squares if colour else squares[..., 0])
