"""Signals that end a run between two steps: Ctrl-C, and the notice that a process has to go."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Interrupt", "deferred_interrupt"]


class Interrupt:
    """Tell whether somebody has asked for the end of a run, and answer when it has ended."""

    def __init__(self) -> None:
        self._number: int | None = None

    def is_set(self) -> bool:
        """Tell whether the end was asked for."""
        return self._number is not None

    @property
    def number(self) -> int:
        """The number of the signal that asked for it, or 0."""
        return self._number or 0

    def request(self, number: int) -> None:
        """Ask for the end by the number of a signal."""
        self._number = number

    def answer(self) -> None:
        """Do what the signal asked for, if one came: KeyboardInterrupt, or the process ends."""
        if self._number == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if self._number is not None:
            raise KeyboardInterrupt


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C into a flag; a second one interrupts at once.

    SIGTERM, by which clusters announce that a process has to go, is taken the same way unless the
    program handles it itself.
    """
    requested = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if before[signal.SIGINT] in (None, signal.SIG_IGN):
        del before[signal.SIGINT]
    if before[signal.SIGTERM] is not signal.SIG_DFL:
        del before[signal.SIGTERM]

    def request(number: int, frame: object) -> None:
        requested.request(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, request)
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
