"""Downloads that go on where they were interrupted and are checked before they are used."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from factormix.data.datasets.lookup import Copy, cache_folder
from factormix.data.datasets.modules import optional_module
from factormix.data.datasets.registry import Entry, PublishedFile
from factormix.errors import InputError

__all__ = ["ResumingDownloader", "download_copy", "download_folder", "missing"]

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
        raise missing(entry, f"downloading failed ({error})") from error
    where = f"downloaded from {addresses[0]}"
    return Copy(files, tuple(target / file.name for file in files), entry.form, where)


def download_folder(entry: Entry, folder: str | os.PathLike[str] | None) -> Path:
    """Return the folder into which a data set is downloaded."""
    base = cache_folder() if folder is None else Path(folder).expanduser()
    if base is None:
        raise missing(entry, 'downloading needs pip install "factormix[data]"')
    return base / entry.name


def missing(entry: Entry, reason: str) -> InputError:
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
    pooch = optional_module("pooch", extra="data")
    filelock = optional_module("filelock", extra="data")
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
        requests = optional_module("requests", extra="data")
        urllib3 = optional_module("urllib3", extra="data")
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
