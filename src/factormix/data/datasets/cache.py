"""Copies of a data set on this machine: where they are, whether they are good, and downloads."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from factormix.data.datasets.registry import Entry, Form, Images, PublishedFile
from factormix.errors import InputError, input_error, require_package

_VARIABLE = "FACTORMIX_DATA"


@dataclass(frozen=True)
class Copy:
    """The files of one split of a data set in one folder.

    `where` is the folder as messages show it: a folder that the user named stays as the user wrote
    it.
    """

    files: tuple[PublishedFile, ...]
    paths: tuple[Path, ...]
    form: Form
    where: str

    @property
    def complete(self) -> bool:
        """Whether the split is complete: parts of one have no published checksum."""
        return all(file.checksum is not None for file in self.files)


@dataclass(frozen=True)
class _Place:
    """A folder to look into; a `shared` one may hold other sets under the same names."""

    path: Path
    where: str
    shared: bool = False
    form: Form | None = None
    """The form of the files there, where it is not the published one."""


def find_copy(
    entry: Entry, split: str, folder: str | os.PathLike[str] | None, *, only_folder: bool = False
) -> Copy | None:
    """Find the first copy of an official split, in the order that the package describes.

    A part in the folder given as an argument is used at once. Otherwise a complete copy comes
    before a part, wherever it is.
    """
    given = list[_Place]()
    if folder is not None:
        message = "the data folder {} does not exist: create it or name another one"
        given = _list_user_places(entry, folder, str(folder), message)
    for places in [given] if only_folder else [given, _list_other_places(entry)]:
        for form in filter(None, (entry.form, entry.part)):
            for place in places:
                copy = _find_in(place, place.form or form, split)
                if copy and not (place.shared and _belongs_to_other_set(copy)):
                    return copy
    return None


def cache_folder() -> Path | None:
    """Return factormix's folder in the user's cache, None if platformdirs is not installed."""
    try:
        import platformdirs
    except ImportError:
        return None
    return Path(platformdirs.user_cache_dir("factormix", appauthor=False))


def read_contents(copy: Copy) -> list[bytes]:
    """Read the files of a copy, compare their checksums and return their contents."""
    contents = []
    for path, file in zip(copy.paths, copy.files, strict=True):
        with input_error(f"{path} cannot be read ({{reason}}): check the file", OSError):
            raw = path.read_bytes()
        contents.append(copy.form.unpack(raw, path))
        if not _has_checksum(raw, file, contents[-1]):
            algorithm, _, expected = str(file.checksum).partition(":")
            raise InputError(
                f"{path} is truncated or altered: its {algorithm} sum is "
                f"{_digest(raw, algorithm)}, published is {expected}; replace it, or delete it to "
                "have another copy used"
            )
    return contents


def read_copy(copy: Copy) -> Images:
    """Read the images of a copy."""
    return copy.form.decode(read_contents(copy), copy.paths[0])


def _has_checksum(raw: bytes, file: PublishedFile, content: bytes) -> bool:
    """Return whether a file's bytes or their content have the known checksum, if there is one."""
    if file.checksum is None:
        return True
    algorithm, _, expected = file.checksum.partition(":")
    return _digest(raw, algorithm) == expected or _digest(content, "md5") == file.content_md5


def _digest(raw: bytes, algorithm: str) -> str:
    return hashlib.new(algorithm, raw, usedforsecurity=False).hexdigest()


def _list_user_places(
    entry: Entry, folder: str | os.PathLike[str], where: str, message: str
) -> list[_Place]:
    """List the places in a folder that the user named, which must exist."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise InputError(message.format(folder))
    inner = [_Place(path / name, f"{where}/{name}") for name in entry.subfolders]
    return [*inner, _Place(path, where, shared=True)]


def _list_other_places(entry: Entry) -> list[_Place]:
    """List the places that do not come from an argument: variable, cache and packages."""
    places = list[_Place]()
    variable = os.environ.get(_VARIABLE)
    if variable:
        message = _VARIABLE + " names the folder {}, which does not exist: correct or unset it"
        places += _list_user_places(entry, variable, _VARIABLE, message)
    cache = cache_folder()
    if cache is not None:
        places.append(_Place(cache / entry.name, "the user's cache"))
    # Folders for shared data as the XDG base directory specification names them. Packages of the
    # distribution go to the last two even if a desktop session names other folders.
    bases = os.environ.get("XDG_DATA_DIRS", "").split(os.pathsep)
    absolute = [base for base in bases if os.path.isabs(base)]
    for base in dict.fromkeys([*absolute, "/usr/local/share", "/usr/share"]):
        path = Path(base, "datasets", entry.name)
        places.append(_Place(path, f"the distribution's package in {path}"))
    if entry.package is not None:
        module, inner, form = entry.package
        # The package is found without being imported.
        found = importlib.util.find_spec(module)
        if found is not None and found.origin is not None:
            path = Path(found.origin).parent / inner
            places.append(_Place(path, f"the Python package {module}", form=form))
    return places


def _find_in(place: _Place, form: Form, split: str) -> Copy | None:
    """Return the copy in a place that has all files of the split."""
    files = form.files[split]
    paths = [path for file in files if (path := _find_file(place.path, file)) is not None]
    return Copy(files, tuple(paths), form, place.where) if len(paths) == len(files) else None


def _find_file(folder: Path, file: PublishedFile) -> Path | None:
    """Return the path of a file, compressed or not; of several parts the largest."""
    for name in (file.name, file.name.removesuffix(".gz")):
        found = [path for path in folder.glob(name) if path.is_file()]
        if found:
            return max(found, key=lambda path: (path.stat().st_size, path.name))
    return None


def _belongs_to_other_set(copy: Copy) -> bool:
    """Return whether the smallest file has another checksum: MNIST's names are shared."""
    _, path, file = min(
        (path.stat().st_size, path, file) for path, file in zip(copy.paths, copy.files, strict=True)
    )
    raw = path.read_bytes()
    return not _has_checksum(raw, file, copy.form.unpack(raw, path))


def download_copy(entry: Entry, split: str, folder: str | os.PathLike[str] | None = None) -> Copy:
    """Download the files of an official split into FOLDER/NAME, or into the user's cache."""
    assert entry.form is not None
    files, target = entry.form.files[split], download_folder(entry, folder)
    addresses = [_download(entry, file, target) for file in files]
    where = f"downloaded from {addresses[0]}"
    return Copy(files, tuple(target / file.name for file in files), entry.form, where)


def download_folder(entry: Entry, folder: str | os.PathLike[str] | None) -> Path:
    """Return the folder into which a data set is downloaded."""
    base = cache_folder() if folder is None else Path(folder).expanduser()
    if base is None:
        raise missing_set_error(entry, 'downloading needs pip install "factormix[data]"')
    return base / entry.name


def missing_set_error(entry: Entry, reason: str) -> InputError:
    """Build the error about a missing set: its files, checksums, addresses and target folder."""
    assert entry.form is not None
    files = [file for files in entry.form.files.values() for file in files]
    names = ", ".join(f"{file.name} ({file.checksum})" for file in files)
    bases = [address.removesuffix(file.name) for file in files for address in file.addresses]
    cache = cache_folder()
    into = f"{cache / entry.name} or into " if cache is not None else ""
    return InputError(
        f"no complete {entry.name} was found on this machine and {reason}: put its files {names}, "
        f"published at {', '.join(dict.fromkeys(bases))}, into {into}FOLDER/{entry.name} with "
        "FACTORMIX_DATA=FOLDER"
    )


def _download(entry: Entry, file: PublishedFile, folder: Path) -> str:
    """Download a file, and return the address it came from; the addresses are tried in turn.

    Pooch puts the file under its name only when it is complete and its checksum right.
    """
    pooch = require_package("pooch", "data")
    requests = require_package("requests", "data")
    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=(10, 60))
    reasons = list[str]()
    for address in file.addresses:
        try:
            pooch.retrieve(address, file.checksum, file.name, folder, downloader=downloader)
            return address
        except requests.RequestException as error:
            status = None if error.response is None else error.response.status_code
            reason = "there is no connection to the server, or it broke"
            reasons.append(f"{address}: {f'the server answered {status}' if status else reason}")
        except ValueError:
            reasons.append(f"the file from {address} does not have the checksum {file.checksum}")
        except OSError as error:
            raise InputError(
                f"{folder} cannot be written to ({error.strerror or error}): name another folder"
            ) from error
    raise missing_set_error(entry, f"downloading failed ({'; '.join(reasons)})")
