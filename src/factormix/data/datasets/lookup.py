"""Where copies of a data set lie on this machine, and whether they are good."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from factormix.data.datasets.formats import Images
from factormix.data.datasets.registry import REGISTRY, Entry, Form, PublishedFile
from factormix.errors import InputError

__all__ = ["Copy", "cache_folder", "contents_of", "find_copy", "read_copy"]

_VARIABLE = "FACTORMIX_DATA"


@dataclass(frozen=True)
class Copy:
    """Name the files of one split of a data set as they lie in one folder.

    `where` is what a reader is told: a folder that the user named is given as the user named it.
    """

    files: tuple[PublishedFile, ...]
    paths: tuple[Path, ...]
    form: Form
    where: str
    complete: bool = True


@dataclass(frozen=True)
class _Place:
    """Name a folder to look into; a `shared` one may hold other sets under the same names."""

    path: Path
    where: str
    shared: bool = False


def find_copy(
    entry: Entry, split: str, folder: str | os.PathLike[str] | None, *, only_folder: bool = False
) -> Copy | None:
    """Find the first copy of an official split, in the order that the package describes.

    A part in the folder given as an argument is used at once. Otherwise a complete copy, wherever
    it lies, comes before a part.
    """
    if entry.form is None:
        return None
    given = _user_places(entry, _user_folder(folder), str(folder)) if folder is not None else []
    groups = [given] if only_folder else [given, _other_places(entry)]
    for places in groups:
        copy = _first(entry, entry.form, split, places)
        if copy is None and places is not given:
            copy = _package_copy(entry, split)
        if copy is None and entry.part is not None:
            copy = _first(entry, entry.part, split, places, complete=False)
        if copy is not None:
            return copy
    return None


def cache_folder() -> Path | None:
    """Return factormix's folder in the user's cache, None if platformdirs is not installed."""
    try:
        import platformdirs
    except ImportError:
        return None
    return Path(platformdirs.user_cache_dir("factormix", appauthor=False))


def contents_of(copy: Copy) -> list[bytes]:
    """Read the files of a copy, check each against its checksum and return what is inside."""
    return [
        _checked_content(path, file, copy.form)
        for path, file in zip(copy.paths, copy.files, strict=True)
    ]


def read_copy(entry: Entry, copy: Copy) -> Images:
    """Read a copy and check that its images and labels are like those of the data set."""
    images = copy.form.decode(contents_of(copy), copy.paths)
    shape, labels = images.pixels.shape[1:], images.labels
    if shape != entry.image_shape:
        raise InputError(
            f"{copy.paths[0]} has images of shape {shape}, but those of {entry.name} are "
            f"{entry.image_shape}: replace it"
        )
    if not len(labels) or labels.min() < 0 or labels.max() >= entry.n_classes:
        raise InputError(
            f"{copy.paths[-1]} has labels outside 0 to {entry.n_classes - 1} or none: replace it"
        )
    return images


def _digest(raw: bytes, algorithm: str = "md5") -> str:
    """Return the hexadecimal checksum of some bytes."""
    return hashlib.new(algorithm, raw, usedforsecurity=False).hexdigest()


def _checked_content(path: Path, file: PublishedFile, form: Form) -> bytes:
    """Read one file and return its content, if one of its checksums is right."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check the file") from error
    content = form.unpack(raw, path)
    if not _is_known(raw, content, file):
        algorithm, _, expected = (file.checksum or "").partition(":")
        raise InputError(
            f"{path} is truncated or altered: its {algorithm} sum is {_digest(raw, algorithm)}, "
            f"published is {expected}; replace it, or delete it to have another copy used"
        )
    return content


def _is_known(raw: bytes, content: bytes, file: PublishedFile) -> bool:
    """Tell whether a file's bytes or their content have the known checksum, if there is one."""
    if file.checksum is None:
        return True
    algorithm, _, expected = file.checksum.partition(":")
    return _digest(raw, algorithm) == expected or _digest(content) == file.content_md5


def _other_places(entry: Entry) -> list[_Place]:
    """List the folders that do not come from an argument: variable, cache, distribution."""
    places = []
    variable = os.environ.get(_VARIABLE)
    if variable:
        places += _user_places(entry, _variable_folder(variable), _VARIABLE)
    cache = cache_folder()
    if cache is not None:
        places.append(_Place(cache / entry.name, "the user's cache"))
    for base in _data_folders():
        path = base / "datasets" / entry.name
        places.append(_Place(path, f"the distribution's package in {path}"))
    return places


def _user_folder(folder: str | os.PathLike[str]) -> Path:
    """Return an existing folder that the user named, or say that there is none."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise InputError(f"the data folder {folder} does not exist: create it or name another one")
    return path


def _variable_folder(variable: str) -> Path:
    path = Path(variable).expanduser()
    if not path.is_dir():
        raise InputError(
            f"{_VARIABLE} names the folder {variable}, which does not exist: correct or unset it"
        )
    return path


def _data_folders() -> list[Path]:
    """List the folders for shared data, as the XDG base directory specification names them."""
    bases = os.environ.get("XDG_DATA_DIRS", "").split(os.pathsep)
    absolute = [Path(base) for base in bases if os.path.isabs(base)]
    # Packages of the distribution go there even where a desktop session names other folders.
    return list(dict.fromkeys([*absolute, Path("/usr/local/share"), Path("/usr/share")]))


def _user_places(entry: Entry, folder: Path, where: str) -> list[_Place]:
    inner = [_Place(folder / name, f"{where}/{name}") for name in entry.subfolders]
    return [*inner, _Place(folder, where, shared=True)]


def _first(
    entry: Entry, form: Form, split: str, places: list[_Place], *, complete: bool = True
) -> Copy | None:
    """Return the copy in the first place that has all files of the split."""
    for place in places:
        files = form.files[split]
        paths = [path for file in files if (path := _path_in(place.path, file)) is not None]
        if len(paths) < len(files):
            continue
        copy = Copy(files, tuple(paths), form, place.where, complete)
        if not (place.shared and _is_of_another_set(entry, copy)):
            return copy
    return None


def _path_in(folder: Path, file: PublishedFile) -> Path | None:
    """Return the path of a file, compressed or not; of several parts the largest."""
    for name in (file.name, file.name.removesuffix(".gz")):
        found = [path for path in folder.glob(name) if path.is_file()]
        if found:
            return max(found, key=lambda path: (path.stat().st_size, path.name))
    return None


def _is_of_another_set(entry: Entry, copy: Copy) -> bool:
    """Tell whether a copy's smallest file is known as another set's: MNIST's names are shared."""
    path = min(copy.paths, key=lambda path: path.stat().st_size)
    raw = path.read_bytes()
    try:
        content = copy.form.unpack(raw, path)
    except InputError:
        return False
    return any(
        file.checksum is not None and _is_known(raw, content, file)
        for other in REGISTRY.values()
        if other.name != entry.name
        for file in _files_of(other)
    )


def _files_of(entry: Entry) -> Iterator[PublishedFile]:
    if entry.form is not None:
        for files in entry.form.files.values():
            yield from files


def _package_copy(entry: Entry, split: str) -> Copy | None:
    """Find the files that an installed Python package carries, without importing it."""
    if entry.package is None:
        return None
    module, inner, form = entry.package
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return None
    place = _Place(Path(found.origin).parent / inner, f"the Python package {module}")
    return _first(entry, form, split, [place])
