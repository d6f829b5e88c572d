"""Optional packages, imported when they are needed.

Downloads that go on where they were interrupted and are checked before they are used.

Where copies of a data set lie on this machine, and whether they are good.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from factormix.data.datasets.registry import (
    REGISTRY,
    Entry,
    Form,
    Images,
    PublishedFile,
    import_optional,
)
from factormix.errors import InputError

__all__ = [
    "Copy",
    "ResumingDownloader",
    "cache_folder",
    "download_copy",
    "download_folder",
    "find_copy",
    "missing_set_error",
    "read_contents",
    "read_copy",
]


_CHUNK = 1 << 13


class _DownloadError(Exception):
    """Say why a file could not be downloaded."""


class _Interrupted(Exception):
    """Say that a transfer ended early and may be taken up again."""


def download_copy(entry: Entry, split: str, folder: str | os.PathLike[str] | None = None) -> Copy:
    """Download the files of an official split into FOLDER/NAME, or into the user's cache."""
    assert entry.form is not None
    files = entry.form.files[split]
    target = download_folder(entry, folder)
    try:
        addresses = [_download(file, target) for file in files]
    except _DownloadError as error:
        raise missing_set_error(entry, f"downloading failed ({error})") from error
    where = f"downloaded from {addresses[0]}"
    return Copy(files, tuple(target / file.name for file in files), entry.form, where)


def download_folder(entry: Entry, folder: str | os.PathLike[str] | None) -> Path:
    """Return the folder into which a data set is downloaded."""
    base = cache_folder() if folder is None else Path(folder).expanduser()
    if base is None:
        raise missing_set_error(entry, 'downloading needs pip install "factormix[data]"')
    return base / entry.name


def missing_set_error(entry: Entry, reason: str) -> InputError:
    """Name the files of a missing set, their checksums, their addresses and where to put them."""
    assert entry.form is not None
    files = [file for files in entry.form.files.values() for file in files]
    names = ", ".join(f"{file.name} ({file.checksum or 'no checksum published'})" for file in files)
    bases = [address.removesuffix(file.name) for file in files for address in file.addresses]
    cache = cache_folder()
    into = f"{cache / entry.name} or into " if cache is not None else ""
    return InputError(
        f"no complete {entry.name} was found on this machine and {reason}: put its files {names}, "
        f"published at {', '.join(dict.fromkeys(bases))}, into {into}FOLDER/{entry.name} with "
        "FACTORMIX_DATA=FOLDER"
    )


def _download(file: PublishedFile, folder: Path) -> str:
    """Download a file into a folder and return the address it came from.

    The addresses are tried in turn. The file appears under its name only when it is complete and
    its checksum right; until then NAME.part keeps what has arrived, also after an interruption.
    """
    pooch = import_optional("pooch", extra="data")
    filelock = import_optional("filelock", extra="data")
    reasons = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Two processes that append to the same part would spoil it.
        with filelock.FileLock(folder / f"{file.name}.lock"):
            for address in file.addresses:
                try:
                    _retrieve(pooch, address, file, folder)
                    return address
                except _DownloadError as error:
                    reasons.append(str(error))
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written to ({error.strerror or error}): name another folder"
        ) from error
    raise _DownloadError("; ".join(reasons))


def _retrieve(pooch: Any, address: str, file: PublishedFile, folder: Path) -> None:
    """Download from one address; begin anew once if what was resumed proves wrong."""
    downloader = ResumingDownloader(folder / f"{file.name}.part")
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        for last in (False, True):
            try:
                pooch.retrieve(
                    address, file.checksum, fname=file.name, path=folder, downloader=downloader
                )
                return
            except ValueError as error:
                if last or not downloader.resumed:
                    raise _DownloadError(
                        f"what {address} sent does not have the checksum {file.checksum}"
                    ) from error
    finally:
        logger.setLevel(level)


class ResumingDownloader:
    """Download over HTTP for pooch, beginning where an earlier transfer stopped.

    What arrives is kept in `part`. A broken transfer is taken up again as long as it gets further;
    after `attempts` tries in a row without a new byte the download fails.
    """

    def __init__(self, part: Path, *, attempts: int = 2, pause: float = 0.5) -> None:
        self.part = part
        self.attempts = attempts
        self.pause = pause
        self.resumed = False

    def __call__(self, url: str, output_file: str, pooch: Any, check_only: bool = False) -> None:
        """Download `url` and move it to `output_file` when it is complete."""
        self.resumed = False
        barren = 0
        while True:
            before = self._length()
            try:
                self._transfer(url)
                break
            except _Interrupted as error:
                barren = 0 if self._length() > before else barren + 1
                if barren >= self.attempts:
                    raise _DownloadError(f"{url}: {error}") from error
                time.sleep(self.pause)
        os.replace(self.part, output_file)

    def _length(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _transfer(self, url: str) -> None:
        """Ask once for the missing bytes and append them to the part."""
        requests = import_optional("requests", extra="data")
        urllib3 = import_optional("urllib3", extra="data")
        have = self._length()
        # "identity": a server must not compress, or the lengths and the checksum would not fit.
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        try:
            with requests.get(url, headers=headers, stream=True, timeout=(10, 60)) as response:
                if self._is_complete(response, have):
                    self.resumed = True
                    return
                self._check_status(response, url)
                self._save(response, have)
        except requests.Timeout as error:
            raise _Interrupted("the server did not answer in time") from error
        except requests.ConnectionError as error:
            raise _Interrupted("there is no connection to the server") from error
        except urllib3.exceptions.HTTPError as error:
            raise _Interrupted("the transfer broke off") from error
        except requests.RequestException as error:
            raise _DownloadError(f"{url}: {error}") from error

    def _is_complete(self, response: Any, have: int) -> bool:
        """Tell whether the server says that nothing is missing; drop a part that is too long."""
        if response.status_code != 416:
            return False
        if response.headers.get("Content-Range") == f"bytes */{have}":
            return True
        self.part.unlink(missing_ok=True)
        raise _Interrupted("the part on disk does not fit the file on the server")

    @staticmethod
    def _check_status(response: Any, url: str) -> None:
        status = response.status_code
        if status == 429 or status >= 500:
            raise _Interrupted(f"the server answered {status}")
        if status not in (200, 206):
            raise _DownloadError(f"{url}: the server answered {status}")

    def _save(self, response: Any, have: int) -> None:
        """Append the body to the part, or begin anew if the server sends all of the file."""
        start = 0
        if response.status_code == 206:
            match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
            start = int(match.group(1)) if match else -1
            if start != have:
                self.part.unlink(missing_ok=True)
                raise _Interrupted("the server sent another range than asked for")
        self.resumed = self.resumed or start > 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        progress = tqdm(
            desc=self.part.stem, initial=start, total=total, unit="B", unit_scale=True, disable=None
        )
        with progress, self.part.open("ab" if start else "wb") as output:
            for chunk in response.raw.stream(_CHUNK, decode_content=False):
                output.write(chunk)
                # A killed process then loses nothing that has arrived.
                output.flush()
                progress.update(len(chunk))
        if total is not None and self._length() != total:
            raise _Interrupted(f"the transfer ended after {self._length()} of {total} bytes")


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


def read_contents(copy: Copy) -> list[bytes]:
    """Read the files of a copy, check each against its checksum and return what is inside."""
    return [
        _checked_content(path, file, copy.form)
        for path, file in zip(copy.paths, copy.files, strict=True)
    ]


def read_copy(entry: Entry, copy: Copy) -> Images:
    """Read a copy and check that its images and labels are like those of the data set."""
    images = copy.form.decode(read_contents(copy), copy.paths)
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
