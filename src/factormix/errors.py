"""The exception for input that a user can correct, and the warning of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

__all__ = ["InputError", "TrainingWarning", "first_line", "input_error", "require_package"]


class InputError(ValueError):
    """An input is wrong; the message names the fault and the remedy in one sentence."""


class TrainingWarning(UserWarning):
    """Something went wrong, and training continues; the message says what to do about it."""


def first_line(error: Exception) -> str:
    """Return the first line of a message without its full stop, or the class if there is none."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(". ")


@contextmanager
def input_error(message: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise an ``InputError`` instead of errors of these kinds that occur in a block.

    ``{reason}`` in the message becomes the reason that the error gives.
    """
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(message.replace("{reason}", reason)) from error


def require_package(module: str, extra: str, package: str | None = None) -> Any:
    """Import a module of an optional package, or name the extra of factormix that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        name = package or module.partition(".")[0]
        raise InputError(f'this needs {name}: run pip install "factormix[{extra}]".') from error
