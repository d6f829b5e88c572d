"""A limit on the memory of this process, what the kernel keeps of files for it included."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Limited", "forget_files", "limited"]

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limited:
    """How a limit is held."""

    how: str
    peak_file: Path | None = None

    def peak(self) -> float:
        """Return the most bytes that were charged, NaN where nobody counts them."""
        if self.peak_file is None or not self.peak_file.exists():
            return float("nan")
        return float(self.peak_file.read_text())


@contextmanager
def limited(most: int) -> Iterator[Limited]:
    """Hold this process below ``most`` bytes by a control group of its own, 0 for no limit.

    Where control groups cannot be made, what the process may write to is limited (RLIMIT_DATA);
    then pages of files that the kernel keeps do not count.
    """
    if not most:
        yield Limited("none")
        return
    for how, own, limit, peak in _groups():
        group = own / f"factormix-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(most))
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            group.rmdir()
            continue
        try:
            yield Limited(how, group / peak)
        finally:
            (own / "cgroup.procs").write_text(str(os.getpid()))
            with suppress(OSError):
                group.rmdir()
        return
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    yield Limited("RLIMIT_DATA")


def _groups() -> Iterator[tuple[str, Path, str, str]]:
    """Name the groups below which one could be made, and the files that tell of memory."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            if "memory" in kinds.split(","):
                files = "memory.limit_in_bytes", "memory.max_usage_in_bytes"
                yield "cgroup", ROOT / "memory" / path.strip("/"), *files
            elif number == "0":
                yield "cgroup v2", ROOT / path.strip("/"), "memory.max", "memory.peak"


def forget_files(path: Path) -> None:
    """Let the kernel drop what it keeps of a file, or of those in a folder."""
    for file in path.iterdir() if path.is_dir() else [path]:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
