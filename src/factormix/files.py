"""Write files atomically: at every moment a path holds the old file or the new one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from factormix.errors import InputError, input_error

__all__ = ["make_folder", "replacing", "write_whole"]


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder; it replaces ``path`` if the block succeeds."""
    # A link stays a link; its target is replaced.
    target = Path(os.path.realpath(path))
    folder = target.parent
    if not folder.is_dir():
        raise InputError(f"the folder {folder} does not exist: create it or choose another path.")
    if target.is_dir():
        raise InputError(f"{target} is a folder: give the path of a file.")
    if target.exists() and not target.is_file():
        raise InputError(f"{target} is a device, not a file: give the path of a file.")
    temporary = folder / f".{target.stem}.{secrets.token_hex(4)}{target.suffix}"
    with input_error(f"cannot write to {folder} ({{reason}}): choose another path.", OSError):
        temporary.touch(0o666, exist_ok=False)
    try:
        mode = temporary.stat().st_mode
        yield temporary
        # Without this, a power cut could leave the new name on an empty file.
        with temporary.open("r+b") as file:
            os.fsync(file)
        # The writer may have replaced the temporary file by one with other permissions.
        temporary.chmod(mode)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder and its parents, unless they exist."""
    message = f"cannot make the folder {Path(path)} ({{reason}}): choose another path."
    with input_error(message, OSError):
        Path(path).mkdir(parents=True, exist_ok=True)


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file atomically; if that fails, the old file stays."""
    with input_error(f"cannot write {Path(path)}: {{reason}}", OSError), replacing(path) as file:
        file.write_bytes(data)
