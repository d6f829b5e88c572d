"""Trials: pieces of work that stand alone, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from factormix.estimators import MFA

__all__ = ["Outcome", "Settings", "Trial"]

Settings = Mapping[str, Any]
"""All that a trial's result depends on, ready for JSON."""


@dataclass(frozen=True)
class Outcome:
    """Hold what a trial found: values ready for JSON, arrays, and a model for pictures."""

    values: dict[str, Any]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    model: MFA | None = None


@dataclass(frozen=True)
class Trial:
    """Name one piece of work; ``run(settings, data_folder)`` does it.

    ``run`` is a function of a module, so that another process can find it.
    """

    experiment: str
    name: str
    settings: Settings
    run: Callable[[Settings, str | None], Outcome] = field(compare=False)

    @property
    def title(self) -> str:
        """The trial's name among those of all experiments."""
        return f"{self.experiment}/{self.name}"
