"""The one exception for input that a user can put right."""

from __future__ import annotations

__all__ = ["InputError"]


class InputError(ValueError):
    """Say in one sentence what is wrong with an input and what to do about it."""
