"""Shared by all benchmarks: the command line, the machine's description, memory and line plots."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from harness import Table, Trial
from pages import markdown_fold

from factormix.files import make_folder
from factormix.views.plotting import save_figure
from factormix.views.plotting.drawing import COLOURS, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUTPUT = ROOT / "build" / "benchmarks"

INSTRUCTION_SETS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
    "x86-64-v2": {"cx16", "popcnt", "sse4_1", "sse4_2", "ssse3"},
}
PACKAGES = ("factormix", "torch", "numpy", "scikit-learn", "scipy", "tgmm", "torchgmm")

SPIN = """
import os, sys, threading
# The end of the parent ends this process too.
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
print("busy", flush=True)
while True:
    pass
"""


def make_parser(doc: str | None, page: str | None = None) -> argparse.ArgumentParser:
    """Make a parser with --quick and --output and, for a page of the documentation, --write-docs.

    The script's own documentation is the text of its help.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script")
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT, help="folder of the results")
    if page is not None:
        parser.add_argument("--write-docs", action="store_true", help=f"write {page}")
    return parser


def parse_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the command line; the documentation takes no results of a quick run."""
    options = parser.parse_args(arguments)
    if options.quick and options.write_docs:
        parser.error("--quick is too small for the documentation: leave out one of the two")
    return options


def print_trial(trial: Trial, failure: str | None) -> None:
    """Print how a trial ended."""
    print(f"{trial.title}: {failure or 'done'}", flush=True)


def describe_machine(
    threads: int, jobs: int = 1, packages: Sequence[str] = PACKAGES
) -> dict[str, str]:
    """Describe the machine and the versions, without names or paths."""
    return {
        "cores": f"{_count_cores()} (threads of a run: {threads}; runs at a time: {jobs})",
        "memory": f"{total_memory() / 2**30:.0f} GiB",
        "processor": _describe_processor(),
        "torch kernels": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {_read_version(name)}" for name in packages),
    }


def fold_description(description: Mapping[str, str]) -> str:
    """Write a description as a table behind a fold."""
    table = Table("machine", "", ("", ""), list(description.items()))
    return markdown_fold("The machine, the versions and the command", table.markdown())


def total_memory() -> int:
    """Return the bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory() -> int:
    """Return the most bytes that this process has held in memory.

    On Linux ``ru_maxrss`` starts at the parent's peak, so the kernel's record of this process alone
    is read instead.
    """
    peak = _read_status("VmHWM:")
    if peak is not None:
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def current_memory() -> int:
    """Return the bytes that this process holds in memory, or its peak where that is unknown."""
    now = _read_status("VmRSS:")
    return peak_memory() if now is None else now


@contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    """Keep a core busy with a process that does nothing else."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def adbench_folder() -> Path:
    """Return the folder of ADBench's tables."""
    return Path(os.environ.get("FACTORMIX_DATA", "data")) / "adbench"


def list_adbench() -> list[str]:
    """List ADBench's tables by their numbers, those without a number last."""

    def number(name: str) -> tuple[int, str]:
        head = name.split("_")[0]
        return (int(head) if head.isdigit() else 10**6, name)

    return sorted((path.stem for path in adbench_folder().glob("*.npz")), key=number)


def draw_lines(
    title: str,
    labels: tuple[str, str],
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    path: Path,
    *,
    log: bool = True,
) -> None:
    """Draw a line of y against x for each name, and write the picture."""
    save_picture(_lines_figure(title, labels, lines, log), path)


@styled
def _lines_figure(
    title: str,
    labels: tuple[str, str],
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    log: bool,
) -> Figure:
    from matplotlib.ticker import NullFormatter

    figure = new_figure(5.6, 3.8)
    panel = figure.subplots()
    for colour, (name, (x, y)) in zip(COLOURS, lines.items(), strict=False):
        panel.plot(x, y, "o-", color=colour, label=name)
    if log:
        panel.set(xscale="log", yscale="log")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.yaxis.set_minor_formatter(NullFormatter())
        ticks = sorted({value for x, _ in lines.values() for value in x if value > 0})
        panel.set_xticks(ticks, [f"{value:g}" for value in ticks])
    else:
        panel.set_ylim(0, 1.3 * max(value for _, y in lines.values() for value in y))
    panel.set(title=title, xlabel=labels[0], ylabel=labels[1])
    panel.grid(True)
    panel.legend()
    return figure


def save_picture(figure: Figure, path: Path) -> None:
    """Write a PNG file, all of it or nothing."""
    make_folder(path.parent)
    save_figure(figure, path, dpi=130)


def _read_status(name: str) -> int | None:
    """Return a number of bytes from the kernel's record of this process, if there is one."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None


def _count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _describe_processor() -> str:
    """Return vendor, instruction-set level and matrix extensions."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    known = (name for name, needed in INSTRUCTION_SETS.items() if needed <= flags)
    level = next(known, platform.machine())
    extras = [name for name in ("avx512_bf16", "amx_tile") if name in flags]
    return ", ".join([fields.get("vendor_id", platform.machine()), level, *extras])


def _read_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
