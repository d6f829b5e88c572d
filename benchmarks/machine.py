"""The machine and the versions that results were measured with, without names or paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from factormix.studies.harness import Table, folded

__all__ = ["describe", "fold_of", "memory_now", "peak_memory"]

LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
    "x86-64-v2": {"cx16", "popcnt", "sse4_1", "sse4_2", "ssse3"},
}
PACKAGES = ("factormix", "torch", "numpy", "scikit-learn", "scipy", "tgmm", "torchgmm")


def describe(threads: int, jobs: int = 1, packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return what a reader needs to judge the seconds."""
    return {
        "cores": f"{_cores()} (threads of a run: {threads}; runs at a time: {jobs})",
        "memory": f"{_memory() / 2**30:.0f} GiB",
        "processor": _processor(),
        "torch kernels": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {_version(name)}" for name in packages),
    }


def fold_of(described: Mapping[str, str]) -> str:
    """Write a description as a table behind a fold."""
    table = Table("machine", "", ("", ""), list(described.items()))
    return folded("The machine, the versions and the command", table.markdown())


def peak_memory() -> int:
    """Return the most bytes that this process has held in memory.

    On Linux ``ru_maxrss`` begins at what the parent process held when it started this one, so the
    kernel's record of this process alone is read instead.
    """
    most = _told("VmHWM:")
    if most is not None:
        return most
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def memory_now() -> int:
    """Return the bytes that this process holds in memory; where nobody tells, the most it held."""
    now = _told("VmRSS:")
    return peak_memory() if now is None else now


def _told(name: str) -> int | None:
    """Return what the kernel tells of this process, in bytes, if it does."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    """Return vendor, instruction-set level and matrix extensions."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    level = next((name for name, needed in LEVELS.items() if needed <= flags), platform.machine())
    extras = [name for name in ("avx512_bf16", "amx_tile") if name in flags]
    return ", ".join([fields.get("vendor_id", platform.machine()), level, *extras])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
