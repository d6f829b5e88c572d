"""Write files atomically: at every moment a path holds the old file or the new one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from factormix.errors import InputError

__all__ = ["make_folder", "replacing", "write_whole"]


class replacing:
    """Yield a temporary path in the same folder; it replaces ``path`` if the block succeeds."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # A link stays a link; its target is replaced.
        self.path = Path(os.path.realpath(path))

    def __enter__(self) -> Path:
        folder = self.path.parent
        if not folder.is_dir():
            raise InputError(
                f"the folder {folder} does not exist: create it or choose another path."
            )
        if self.path.is_dir():
            raise InputError(f"{self.path} is a folder: give the path of a file.")
        if self.path.exists() and not self.path.is_file():
            raise InputError(f"{self.path} is a device, not a file: give the path of a file.")
        name = f".{self.path.stem}.{secrets.token_hex(4)}{self.path.suffix}"
        self.temporary = folder / name
        try:
            os.close(os.open(self.temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except OSError as error:
            raise InputError(
                f"cannot write to {folder} ({error.strerror}): choose another path."
            ) from error
        self._mode = self.temporary.stat().st_mode
        return self.temporary

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self.temporary.unlink(missing_ok=True)

    def _finish(self) -> None:
        # Without this, a power cut could leave the new name on an empty file.
        descriptor = os.open(self.temporary, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # The writer may have replaced the temporary file by one with other permissions.
        self.temporary.chmod(self._mode)
        os.replace(self.temporary, self.path)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder and its parents, unless they exist."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {Path(path)} ({error.strerror}): choose another path."
        ) from error


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file atomically; if that fails, the old file stays."""
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write {Path(path)}: {error.strerror or error}") from error
