"""The exception for input that a user can correct, and the warning of a training run."""

from __future__ import annotations

__all__ = ["InputError", "TrainingWarning"]


class InputError(ValueError):
    """An input is wrong; the message names the fault and the remedy in one sentence."""


class TrainingWarning(UserWarning):
    """Something went wrong, and training continues; the message says what to do about it."""
