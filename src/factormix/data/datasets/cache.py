"""Copies of a data set on this machine: where they are, whether they are good, and downloads.

A download continues where it was interrupted, and its checksum is compared before it is used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import time
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

_VARIABLE = "FACTORMIX_DATA"
_CHUNK_BYTES = 1 << 13


@dataclass(frozen=True)
class Copy:
    """The files of one split of a data set in one folder.

    `where` is the folder for messages: a folder that the user named is given as the user named it.
    """

    files: tuple[PublishedFile, ...]
    paths: tuple[Path, ...]
    form: Form
    where: str
    complete: bool = True


@dataclass(frozen=True)
class _Place:
    """A folder to look into; a `shared` one may hold other sets under the same names."""

    path: Path
    where: str
    shared: bool = False


def find_copy(
    entry: Entry, split: str, folder: str | os.PathLike[str] | None, *, only_folder: bool = False
) -> Copy | None:
    """Find the first copy of an official split, in the order that the package describes.

    A part in the folder given as an argument is used at once. Otherwise a complete copy comes
    before a part, wherever it is.
    """
    if entry.form is None:
        return None
    given = list[_Place]()
    if folder is not None:
        message = "the data folder {} does not exist: create it or name another one"
        given = _list_user_places(entry, folder, str(folder), message)
    groups = [given] if only_folder else [given, _list_other_places(entry)]
    for places in groups:
        copy = _find_in(entry, entry.form, split, places)
        if copy is None and places is not given:
            copy = _find_in_package(entry, split)
        if copy is None and entry.part is not None:
            copy = _find_in(entry, entry.part, split, places, complete=False)
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
    """Read the files of a copy, compare their checksums and return their contents."""
    return [
        _read_content(path, file, copy.form)
        for path, file in zip(copy.paths, copy.files, strict=True)
    ]


def read_copy(entry: Entry, copy: Copy) -> Images:
    """Read a copy and check the shape of its images and the range of its labels."""
    images = copy.form.decode(read_contents(copy), copy.paths)
    shape, labels = images.pixels.shape[1:], images.labels
    if shape != entry.image_shape:
        raise InputError(
            f"{copy.paths[0]} has images of shape {shape}, but {entry.name} has images of "
            f"{entry.image_shape}: replace it"
        )
    if not len(labels) or labels.min() < 0 or labels.max() >= entry.n_classes:
        raise InputError(
            f"{copy.paths[-1]} has labels outside 0 to {entry.n_classes - 1} or none: replace it"
        )
    return images


def _read_content(path: Path, file: PublishedFile, form: Form) -> bytes:
    """Read one file and return its content, if one of its checksums is right."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check the file") from error
    content = form.unpack(raw, path)
    if file.checksum is not None and not _has_checksum(raw, content, file):
        algorithm, _, expected = file.checksum.partition(":")
        raise InputError(
            f"{path} is truncated or altered: its {algorithm} sum is {_digest(raw, algorithm)}, "
            f"published is {expected}; replace it, or delete it to have another copy used"
        )
    return content


def _has_checksum(raw: bytes, content: bytes, file: PublishedFile) -> bool:
    """Return whether a file's bytes or their content have the known checksum."""
    algorithm, _, expected = (file.checksum or "md5:").partition(":")
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
    """List the folders that do not come from an argument: variable, cache, distribution."""
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
    return places


def _find_in(
    entry: Entry, form: Form, split: str, places: list[_Place], *, complete: bool = True
) -> Copy | None:
    """Return the copy in the first place that has all files of the split."""
    files = form.files[split]
    for place in places:
        paths = [path for file in files if (path := _find_file(place.path, file)) is not None]
        if len(paths) < len(files):
            continue
        copy = Copy(files, tuple(paths), form, place.where, complete)
        if not (place.shared and _belongs_to_other_set(entry, copy)):
            return copy
    return None


def _find_file(folder: Path, file: PublishedFile) -> Path | None:
    """Return the path of a file, compressed or not; of several parts the largest."""
    for name in (file.name, file.name.removesuffix(".gz")):
        found = [path for path in folder.glob(name) if path.is_file()]
        if found:
            return max(found, key=lambda path: (path.stat().st_size, path.name))
    return None


def _belongs_to_other_set(entry: Entry, copy: Copy) -> bool:
    """Return whether the smallest file is known from another set: MNIST's names are shared."""
    path = min(copy.paths, key=lambda path: path.stat().st_size)
    raw = path.read_bytes()
    try:
        content = copy.form.unpack(raw, path)
    except InputError:
        return False
    return any(
        file.checksum is not None and _has_checksum(raw, content, file)
        for other in REGISTRY.values()
        if other.name != entry.name and other.form is not None
        for files in other.form.files.values()
        for file in files
    )


def _find_in_package(entry: Entry, split: str) -> Copy | None:
    """Find the files that an installed Python package carries, without importing it."""
    if entry.package is None:
        return None
    module, inner, form = entry.package
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return None
    place = _Place(Path(found.origin).parent / inner, f"the Python package {module}")
    return _find_in(entry, form, split, [place])


class _DownloadError(Exception):
    """A file could not be downloaded."""


class _InterruptedTransferError(Exception):
    """A transfer ended early and may be resumed."""


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
    """Build the error about a missing set: its files, checksums, addresses and target folder."""
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
    its checksum right. Until then NAME.part keeps the bytes that have arrived, also after an
    interruption.
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
    """Download from one address; begin anew once if a resumed file has the wrong checksum."""
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
                        f"the file from {address} does not have the checksum {file.checksum}"
                    ) from error
    finally:
        logger.setLevel(level)


class ResumingDownloader:
    """Download over HTTP for pooch, continuing a transfer that was interrupted.

    Bytes that have arrived are kept in `part`. A broken transfer is resumed as long as it gets
    further; after `attempts` tries in a row without a new byte the download fails.
    """

    def __init__(self, part: Path, *, attempts: int = 2, pause: float = 0.5) -> None:
        self.part = part
        self.attempts = attempts
        self.pause = pause
        self.resumed = False

    def __call__(self, url: str, output_file: str, pooch: Any, check_only: bool = False) -> None:
        """Download `url` and move it to `output_file` when it is complete."""
        self.resumed = False
        failures = 0
        while True:
            before = self._length()
            try:
                self._transfer(url)
                break
            except _InterruptedTransferError as error:
                failures = 0 if self._length() > before else failures + 1
                if failures >= self.attempts:
                    raise _DownloadError(f"{url}: {error}") from error
                # After new bytes have arrived, the server is there: no need to wait.
                time.sleep(self.pause if failures else 0)
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
                status = response.status_code
                if status == 416:
                    self._check_complete(response, have)
                elif status == 429 or status >= 500:
                    raise _InterruptedTransferError(f"the server answered {status}")
                elif status not in (200, 206):
                    raise _DownloadError(f"{url}: the server answered {status}")
                else:
                    self._save(response, have)
        except requests.Timeout as error:
            raise _InterruptedTransferError("the server did not answer in time") from error
        except requests.ConnectionError as error:
            raise _InterruptedTransferError("there is no connection to the server") from error
        except urllib3.exceptions.HTTPError as error:
            raise _InterruptedTransferError("the transfer broke off") from error
        except requests.RequestException as error:
            raise _DownloadError(f"{url}: {error}") from error

    def _check_complete(self, response: Any, have: int) -> None:
        """Check that the part is complete, as the server says; drop one that is too long."""
        if response.headers.get("Content-Range") != f"bytes */{have}":
            self.part.unlink(missing_ok=True)
            raise _InterruptedTransferError("the part on disk does not fit the file on the server")
        self.resumed = True

    def _save(self, response: Any, have: int) -> None:
        """Append the body to the part, or begin anew if the server sends all of the file."""
        start = 0
        if response.status_code == 206:
            match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
            start = int(match.group(1)) if match else -1
            if start != have:
                self.part.unlink(missing_ok=True)
                raise _InterruptedTransferError("the server sent another range than asked for")
        self.resumed = self.resumed or start > 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        progress = tqdm(
            desc=self.part.stem, initial=start, total=total, unit="B", unit_scale=True, disable=None
        )
        with progress, self.part.open("ab" if start else "wb") as output:
            for chunk in response.raw.stream(_CHUNK_BYTES, decode_content=False):
                output.write(chunk)
                # A killed process then loses nothing that has arrived.
                output.flush()
                progress.update(len(chunk))
        if total is not None and self._length() != total:
            raise _InterruptedTransferError(
                f"the transfer ended after {self._length()} of {total} bytes"
            )
