"""Which data sets are on this machine, and how to bring the others here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from factormix.data.datasets.downloads import download_copy, download_folder
from factormix.data.datasets.embedded import embedded_source
from factormix.data.datasets.lookup import Copy, contents_of, find_copy, read_copy
from factormix.data.datasets.registry import REGISTRY, Entry, entry_named
from factormix.errors import InputError

__all__ = ["Availability", "available", "fetch"]


@dataclass(frozen=True)
class Availability:
    """Say whether a data set is on this machine: `where` is None if no split of it is.

    `checksum_ok` is None where there is no checksum to compare with: nothing was found, a Python
    package carries the set, or only a part of it is there.
    """

    name: str
    where: str | None
    n_samples: int
    checksum_ok: bool | None
    note: str = ""


def available(folder: str | os.PathLike[str] | None = None) -> list[Availability]:
    """List all data sets: where they were found, how many images, whether they are intact."""
    return [
        _files_availability(entry, folder)
        if entry.embedded is None
        else _embedded_availability(entry)
        for entry in REGISTRY.values()
    ]


def fetch(name: str, folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Make sure that all files of a data set are here and return their paths.

    Without `folder`, a complete copy in any of the places will do, and what is missing goes into
    the user's cache. With `folder`, the files go into FOLDER/NAME unless the folder has them. A
    set that a Python package carries has no files to fetch.
    """
    entry = entry_named(name)
    if entry.embedded is not None:
        embedded_source(entry)
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
        contents_of(copy)
    except InputError:
        if any(
            path != target / file.name for path, file in zip(copy.paths, copy.files, strict=True)
        ):
            raise
        return False
    return True


def _embedded_availability(entry: Entry) -> Availability:
    try:
        return Availability(entry.name, embedded_source(entry), entry.sizes["all"], None)
    except InputError as error:
        return Availability(entry.name, None, 0, None, str(error))


def _files_availability(entry: Entry, folder: str | os.PathLike[str] | None) -> Availability:
    copies = {split: find_copy(entry, split, folder) for split in entry.sizes}
    found = {split: copy for split, copy in copies.items() if copy is not None}
    if not found:
        return Availability(entry.name, None, 0, None, f"factormix data fetch {entry.name}")
    where = "; ".join(dict.fromkeys(copy.where for copy in found.values()))
    notes = [f"no {split} split" for split in copies if split not in found]
    n_samples = 0
    for split, copy in found.items():
        try:
            count, note = _content(entry, split, copy)
        except InputError as error:
            return Availability(entry.name, where, 0, False, str(error))
        n_samples += count
        notes += [f"{split}: {note}"] if note else []
    is_checked = all(copy.complete for copy in found.values())
    return Availability(entry.name, where, n_samples, is_checked or None, "; ".join(notes))


def _content(entry: Entry, split: str, copy: Copy) -> tuple[int, str]:
    """Check a copy and return how many images it holds and what is special about them."""
    if copy.complete:
        contents_of(copy)
        return entry.sizes[split], ""
    images = read_copy(entry, copy)
    return len(images.labels), images.note
