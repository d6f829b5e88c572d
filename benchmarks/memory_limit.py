"""A limit on the memory of this process, including the pages of files that the kernel caches."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryLimit:
    """How the memory of this process is limited."""

    how: str
    peak_file: Path | None = None

    def peak(self) -> float:
        """Return the most bytes that were charged, NaN where they are not counted."""
        if self.peak_file is None or not self.peak_file.exists():
            return float("nan")
        return float(self.peak_file.read_text())


@contextmanager
def limit_memory(most: int) -> Iterator[MemoryLimit]:
    """Limit this process to ``most`` bytes by its own control group; 0 for no limit.

    Where no control group can be made, RLIMIT_DATA limits the process; then cached pages of files
    do not count.
    """
    if not most:
        yield MemoryLimit("none")
        return
    for how, own, limit, peak in _list_control_groups():
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
            yield MemoryLimit(how, group / peak)
        finally:
            (own / "cgroup.procs").write_text(str(os.getpid()))
            with suppress(OSError):
                group.rmdir()
        return
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    yield MemoryLimit("RLIMIT_DATA")


def _list_control_groups() -> Iterator[tuple[str, Path, str, str]]:
    """List the parents for a control group: kind, folder, and its files of limit and peak."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            if "memory" in kinds.split(","):
                files = "memory.limit_in_bytes", "memory.max_usage_in_bytes"
                yield "cgroup", CONTROL_GROUPS / "memory" / path.strip("/"), *files
            elif number == "0":
                yield "cgroup v2", CONTROL_GROUPS / path.strip("/"), "memory.max", "memory.peak"


def forget_files(path: Path) -> None:
    """Make the kernel drop the cached pages of a file, or of all files in a folder."""
    for file in path.iterdir() if path.is_dir() else [path]:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
