"""How commands print, how they are stopped, and their exit codes.

A command that torchrun starts runs in several processes. The process of rank 0 prints for all.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import typer

from factormix.errors import TrainingWarning

BAD_INPUT, INTERRUPTED, TERMINATED = 2, 130, 143
"""Exit codes: 2 as in argparse and click, 128 plus the number of the signal as in shells."""

_terminations: list[int] = []
"""Signals other than Ctrl-C that have asked this process to end."""


def print_line(text: str) -> None:
    """Print text on standard output."""
    if _is_first_rank():
        typer.echo(text)


def show_help(context: typer.Context) -> None:
    """Print the help of a group of commands that is called without one of them."""
    if context.invoked_subcommand is None:
        print_line(context.get_help())


def print_error(message: str) -> int:
    """Print one line on standard error and return the exit code of bad input.

    If several processes have the same message, one prints it.
    """
    if _claim_message(message):
        print("factormix:", " ".join(message.split()), file=sys.stderr, flush=True)
    return BAD_INPUT


def print_note(message: str) -> None:
    """Print a note, which is not an error, in one line on standard error."""
    if _is_first_rank():
        print("factormix: note:", " ".join(message.split()), file=sys.stderr, flush=True)


@contextmanager
def print_warnings_as_notes() -> Iterator[None]:
    """Print our own warnings in one line each, without their place in the code."""
    with warnings.catch_warnings():
        show_others = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, TrainingWarning):
                print_note(str(message))
            else:
                show_others(message, category, *where, **more)

        warnings.showwarning = show
        yield


def format_table(values: Mapping[str, object]) -> str:
    """Lay out names and values in two columns."""
    width = max(map(len, values))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in values.items())


def format_shape(shape: tuple[int, ...] | list[int]) -> str:
    """Write the shape of an image, as in 28 x 28."""
    return " x ".join(map(str, shape))


@contextmanager
def open_output(path: Path) -> Iterator[TextIO]:
    """Open standard output for ``-``, or a file that appears only when it is complete."""
    from factormix.files import replacing

    if str(path) == "-":
        yield sys.stdout
        return
    with (
        replacing(path) as temporary,
        open(temporary, "w", encoding="utf-8", newline="") as file,
    ):
        yield file


def handle_interrupt(signum: int, frame: object) -> None:
    """Stop at once; the argument distinguishes this from an orderly end of training."""
    raise KeyboardInterrupt("at once")


def handle_termination(signum: int, frame: object) -> None:
    """Treat SIGTERM as Ctrl-C with another exit code."""
    _terminations.append(signum)
    signal.raise_signal(signal.SIGINT)


def stop_code() -> int:
    """Return the exit code of a command that a signal has stopped."""
    return TERMINATED if _terminations else INTERRUPTED


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM in a block that saves results."""
    before = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


def _claim_message(message: str) -> bool:
    """Return whether no other process of the run has printed this message."""
    address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    if os.environ.get("WORLD_SIZE", "1") == "1" or not address or not port:
        return True
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    digest = hashlib.sha256(message.encode()).hexdigest()
    try:
        store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=5))
        return bool(store.add(f"factormix/{attempt}/{digest}", 1) == 1)
    except (RuntimeError, ValueError):
        # Without the store, printing twice is better than not at all.
        return True
