"""The one exception for input that a user can put right, and the one warning of a run."""

from __future__ import annotations

__all__ = ["InputError", "TrainingWarning"]


class InputError(ValueError):
    """Say in one sentence what is wrong with an input and what to do about it."""


class TrainingWarning(UserWarning):
    """Say in one sentence what went wrong in a training that goes on, and what to do about it."""
