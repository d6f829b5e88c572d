"""The data sets as arrays."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from factormix.data.datasets.downloads import download_copy, missing
from factormix.data.datasets.embedded import embedded_source, read_embedded
from factormix.data.datasets.formats import Images
from factormix.data.datasets.lookup import find_copy, read_copy
from factormix.data.datasets.registry import Entry, entry_named
from factormix.errors import InputError

__all__ = ["Dataset", "load"]

_SPLITS = ("train", "test", "all")
_TEST_PERIOD = 5


@dataclass(frozen=True, eq=False)
class Dataset:
    """Hold images as rows: data float32 (n, d) in [0, 1], labels int64 (n,).

    `image_shape` is (h, w) or (h, w, 3) with product d. `source` says where the files came from,
    `note` what is special about them: it is empty for a complete, original split.
    """

    data: NDArray[np.float32]
    labels: NDArray[np.int64]
    image_shape: tuple[int, ...]
    name: str
    split: str
    source: str
    note: str = ""

    @property
    def images(self) -> NDArray[np.float32]:
        """Return a view of the data as images (n, h, w) or (n, h, w, 3)."""
        return self.data.reshape(-1, *self.image_shape)

    def __len__(self) -> int:
        return len(self.data)


def load(
    name: str,
    *,
    classes: int | Iterable[int] | None = None,
    split: str = "train",
    folder: str | os.PathLike[str] | None = None,
    download: bool = True,
) -> Dataset:
    """Load a data set, or the images of some of its classes, in the order of its files.

    `split` is "train", "test" or "all" (training images first). Where the publisher has no split
    ("digits", "olivetti", "mnist-5000"), every fifth image of each class, in file order, is a test
    image. `folder` is looked into before all other places. With `download=False` nothing is
    fetched; otherwise missing files are downloaded into the user's cache.
    """
    entry = entry_named(name)
    wanted = _checked_classes(entry, classes)
    if split not in _SPLITS:
        raise InputError(f"there is no split {split!r}: choose one of {', '.join(_SPLITS)}")
    if entry.embedded is not None:
        source = embedded_source(entry)
        images = read_embedded(entry)
    else:
        images, source = _from_files(entry, split, folder, download)
    if not entry.has_official_split and split != "all":
        images = _taken(images, _is_test(images.labels) == (split == "test"))
    if wanted is not None:
        images = _taken(images, np.isin(images.labels, wanted))
        if not len(images.labels):
            raise InputError(f"the {split} split of {name} in {source} has none of {wanted}")
    data = images.pixels.reshape(len(images.pixels), -1).astype(np.float32)
    data /= entry.levels
    return Dataset(data, images.labels, entry.image_shape, name, split, source, images.note)


def _from_files(
    entry: Entry, split: str, folder: str | os.PathLike[str] | None, may_download: bool
) -> tuple[Images, str]:
    """Read the official splits that `split` needs and say where they came from."""
    parts = [split] if split in entry.sizes else list(entry.sizes)
    copies = []
    for part in parts:
        copy = find_copy(entry, part, folder)
        if copy is None and not may_download:
            raise missing(entry, "downloading is switched off")
        copies.append(copy or download_copy(entry, part))
    images = [read_copy(entry, copy) for copy in copies]
    source = "; ".join(dict.fromkeys(copy.where for copy in copies))
    if len(images) == 1:
        return images[0], source
    notes = [f"{part}: {one.note}" for part, one in zip(parts, images, strict=True) if one.note]
    pixels = np.concatenate([one.pixels for one in images])
    labels = np.concatenate([one.labels for one in images])
    return Images(pixels, labels, "; ".join(notes)), source


def _checked_classes(entry: Entry, classes: int | Iterable[int] | None) -> list[int] | None:
    """Return the wanted classes as a sorted list, or say which ones there are."""
    if classes is None:
        return None
    try:
        given = list(classes) if isinstance(classes, Iterable) else [classes]
        wanted = sorted({operator.index(label) for label in given})
    except TypeError as error:
        raise InputError(f"classes must be whole numbers, not {classes!r}") from error
    unknown = [label for label in wanted if not 0 <= label < entry.n_classes]
    if unknown or not wanted:
        what = f"class {unknown[0]} is not among them" if unknown else "none was chosen"
        raise InputError(f"{entry.name} has the classes 0 to {entry.n_classes - 1}: {what}")
    return wanted


def _is_test(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark every fifth image of each class in file order: a split without random numbers."""
    is_test = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        is_test[np.flatnonzero(labels == label)[_TEST_PERIOD - 1 :: _TEST_PERIOD]] = True
    return is_test


def _taken(images: Images, keep: NDArray[np.bool_]) -> Images:
    return replace(images, pixels=images.pixels[keep], labels=images.labels[keep])
