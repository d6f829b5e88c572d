"""Mixtures of factor analyzers at any scale, in precision form."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix import datasets, inspection, plotting, solvers
    from factormix.core.mixture import PrecisionMixture
    from factormix.estimators import (
        MFA,
        MFAClassifier,
        MFAImputer,
        MFAOutlierDetector,
        load,
        select,
        stream,
    )

__all__ = [
    "MFA",
    "InputError",
    "MFAClassifier",
    "MFAImputer",
    "MFAOutlierDetector",
    "PrecisionMixture",
    "datasets",
    "inspection",
    "load",
    "plotting",
    "select",
    "solvers",
    "stream",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``factormix --help`` needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'factormix' has no attribute {name!r}")
    if name in ("datasets", "inspection", "plotting", "solvers"):
        return importlib.import_module(f"factormix.{name}")
    home = "core.mixture" if name == "PrecisionMixture" else "estimators"
    value = getattr(importlib.import_module(f"factormix.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
