"""What the commands share: what they print, where they write, how they are stopped.

Arguments and options that several commands share.

The processes that torchrun has started for a command, of which one speaks for all.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar

import typer

from factormix.defaults import SOLVER_NAMES
from factormix.errors import InputError, TrainingWarning

if TYPE_CHECKING:
    from factormix.data.readers.base import TableRows
    from factormix.estimators import MFA

__all__ = [
    "BAD_INPUT",
    "DTYPE_OPTION",
    "INTERRUPTED",
    "SCALING_OPTION",
    "SOLVER_OPTION",
    "TERMINATED",
    "BatchSize",
    "Columns",
    "Crew",
    "Data",
    "Device",
    "Header",
    "Key",
    "MaxEpochs",
    "MaxPrecision",
    "Model",
    "Quiet",
    "RandomState",
    "check_device",
    "check_target",
    "complain",
    "interrupt",
    "is_first",
    "load_mixture",
    "mixture_of",
    "note",
    "opened",
    "parse_columns",
    "parse_seconds",
    "parse_shape",
    "plain_warnings",
    "read",
    "say",
    "says_it_first",
    "shape_text",
    "stopped_code",
    "table",
    "terminate",
    "undisturbed",
]

BAD_INPUT = 2
INTERRUPTED = 130
TERMINATED = 143

_notices: list[int] = []
"""Signals other than Ctrl-C that have asked this process to end."""


def say(text: str) -> None:
    """Print a line on standard output; of several processes, the first does."""
    if is_first():
        typer.echo(text)


def complain(message: str) -> int:
    """Print one line on standard error and return the exit code of bad input.

    Of several processes that say the same, one does.
    """
    if says_it_first(message):
        print("factormix:", " ".join(message.split()), file=sys.stderr, flush=True)
    return BAD_INPUT


def note(message: str) -> None:
    """Print one line on standard error about what is not wrong but should be known."""
    if is_first():
        print("factormix: note:", " ".join(message.split()), file=sys.stderr, flush=True)


def table(values: Mapping[str, object]) -> str:
    """Lay out names and values in two columns."""
    width = max(map(len, values))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in values.items())


def check_target(path: Path, suffixes: tuple[str, ...], *inputs: Path) -> None:
    """Check, before any work, that a file can be written and is none of the inputs."""
    if suffixes and path.suffix.lower() not in suffixes:
        raise InputError(f"{path} has an unknown ending: name it {' or '.join(suffixes)}.")
    if path.is_dir():
        raise InputError(f"{path} is a folder: give the path of a file.")
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} does not exist: create it or name another.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write to the folder {path.parent}: name another.")
    for other in inputs:
        if path.exists() and other.exists() and path.samefile(other):
            raise InputError(f"{path} is to be read and written at once: name another output.")


def check_device(device: str | None) -> None:
    """Check that torch knows a device and that this machine has it."""
    import torch

    try:
        # The copy fails on devices that hold no values, such as meta.
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0].rstrip(". ")
        raise InputError(
            f"the device {device!r} cannot be used ({reason}): name another, such as cpu."
        ) from error


def read(
    path: Path,
    *,
    key: str | None = None,
    image_size: tuple[int, int] | None = None,
    header: bool | None = None,
    columns: list[str] | None = None,
) -> TableRows:
    """Read the rows of a file or folder, and print what its reader is in doubt about."""
    from factormix.data.readers import read_rows

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = read_rows(
            _address(path), key=key, image_size=image_size, header=header, columns=columns
        )
    for warning in caught:
        note(str(warning.message))
    return rows


def load_mixture(path: Path, device: str | None = None) -> MFA:
    """Load a model that is one mixture, as ``train`` writes it."""
    from factormix.estimators import load

    return mixture_of(load(path, device=device), path)


def mixture_of(model: object, path: Path) -> MFA:
    """Return a model that was loaded from a file if it is one mixture."""
    from factormix.estimators import MFA

    if not isinstance(model, MFA):
        raise InputError(
            f"{path} holds an {type(model).__name__}, and this command needs a mixture as factormix"
            " train writes it."
        )
    return model


@contextmanager
def opened(output: Path) -> Iterator[TextIO]:
    """Open the screen, for -, or a file that appears only when it is complete."""
    from factormix.files import replacing

    if str(output) == "-":
        yield sys.stdout
        return
    with replacing(output) as temporary, open(temporary, "w", encoding="utf-8") as file:
        yield file


def _address(path: Path) -> Path | str:
    """Return the address that a path was made of, such as s3://bucket/folder, or the path."""
    found = re.fullmatch(r"([a-z][a-z0-9+.-]+):/(.*)", str(path))
    if found is None or path.exists():
        return path
    return f"{found[1]}://{'/' if found[1] == 'file' else ''}{found[2]}"


def parse_columns(text: str | None) -> list[str] | None:
    """Read names or numbers of columns, as in a,b,c; quotes keep a comma in a name."""
    if text is None:
        return None
    return [cell.strip() for cell in next(csv.reader([text], skipinitialspace=True), [])]


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """Read an image shape such as 28x28 or 32x32x3."""
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x3)?", text):
        raise InputError(f"{text!r} is no image shape: give HEIGHTxWIDTH, as in 28x28 or 32x32x3.")
    return tuple(map(int, text.split("x")))


def parse_seconds(text: str, option: str) -> float:
    """Read a time such as 60s, 5m, 1.5h or 90, in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", text.strip())
    if not found:
        raise InputError(f"{option} {text!r} is no time: give seconds, as in 60s, or 5m, or 1h.")
    return float(found[1]) * {"h": 3600, "m": 60}.get(found[2], 1)


def shape_text(shape: tuple[int, ...] | list[int]) -> str:
    """Write an image shape."""
    return " x ".join(map(str, shape))


def interrupt(signum: int, frame: object) -> None:
    """Stop at once; the argument tells this from a stop that training itself brought to an end."""
    raise KeyboardInterrupt("at once")


def terminate(signum: int, frame: object) -> None:
    """Answer whoever ends the process politely as Ctrl-C is answered, but for the exit code."""
    _notices.append(signum)
    signal.raise_signal(signal.SIGINT)


def stopped_code() -> int:
    """Return the exit code of a command that was stopped: by whom, it tells."""
    return TERMINATED if _notices else INTERRUPTED


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print our own warnings as one line each, without the place in the code."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, TrainingWarning):
                note(str(message))
            else:
                usual(message, category, *where, **more)

        warnings.showwarning = show
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let nothing but a kill stop the block: it saves what would otherwise be lost."""
    before = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A file of train.")]

Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="A .npy, .npz, .csv, .parquet, .arrow or .safetensors file, or a folder of images, of"
        " Parquet or Arrow files, or of .npy or .safetensors shards.",
    ),
]

Key = Annotated[str | None, typer.Option(help="Name of the array in .npz or .safetensors files.")]

Header = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="Whether the first line of a .csv file has the names of its columns.",
        show_default="guessed",
    ),
]

Columns = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,...",
        help="Columns to read, by name or by number from 0.",
        show_default="all",
    ),
]

Device = Annotated[
    str | None, typer.Option(help="Where to compute: cpu, cuda, mps.", show_default="cpu")
]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]

MaxPrecision = Annotated[
    float | None,
    typer.Option(
        help="Upper bound on the precisions, 1 / variance, in units of the data.",
        show_default="from the data",
    ),
]

BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Rows per step.", show_default="the solver's")
]

MaxEpochs = Annotated[
    int | None,
    typer.Option(min=1, help="Most passes over the data.", show_default="the solver's"),
]

RandomState = Annotated[
    int | None,
    typer.Option(min=0, help="Seed, for the same result every time.", show_default="a new one"),
]

# Of these, one command needs to know whether they were given, and another has defaults.
SOLVER_OPTION = typer.Option(help=f"How to train: {' or '.join(SOLVER_NAMES)}.")
SCALING_OPTION = typer.Option(help="How training standardises the data: global, feature or none.")
DTYPE_OPTION = typer.Option(help="float32 or float64.")


T = TypeVar("T")


class Crew:
    """The processes of one command; most commands have one."""

    def __init__(self, mesh: str | None, device: str | None) -> None:
        from factormix.defaults import MESH
        from factormix.estimators.validation import check_device
        from factormix.training.distributed.mesh import (
            local_device,
            parse_mesh,
            processes_for,
            world,
        )

        self.mesh: Any = MESH if mesh is None else parse_mesh(mesh)
        self._arguments = [] if mesh is None else [f"--mesh={mesh}"]
        where = check_device(device) if world()[0] > 1 else None
        self._processes = processes_for(self.mesh, local_device(where or check_device("cpu")))

    @property
    def first(self) -> bool:
        """Whether this process reports and writes."""
        return self._processes.first

    @property
    def divided(self) -> bool:
        """Whether each process has some of the components only."""
        return self._processes.divided

    def together(self, work: Callable[[], T]) -> T:
        """Do what may fail in some of the processes; then all of them say the same."""
        return self._processes.together(work)

    def again(self, command: list[str]) -> str:
        """Write a command with which these processes go on."""
        if self._processes.alone:
            return shlex.join([*command, *self._arguments])
        count = os.environ.get("LOCAL_WORLD_SIZE", str(self._processes.everybody.size))
        start = ["torchrun", f"--nproc-per-node={count}", "-m"]
        return shlex.join([*start, *command, *self._arguments])


def is_first() -> bool:
    """Tell whether this is the process that speaks for all."""
    return os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


def says_it_first(message: str) -> bool:
    """Tell whether none of the other processes has complained of the same."""
    address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    if os.environ.get("WORLD_SIZE", "1") == "1" or not address or not port:
        return True
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    mark = hashlib.sha256(message.encode()).hexdigest()
    try:
        store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=5))
        return bool(store.add(f"factormix/{attempt}/{mark}", 1) == 1)
    except (RuntimeError, ValueError):
        # Whoever keeps the store has gone: better said twice than not at all.
        return True
