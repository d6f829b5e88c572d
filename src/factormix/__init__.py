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

_HOMES = {
    "MFA": "estimators",
    "MFAClassifier": "estimators",
    "MFAImputer": "estimators",
    "MFAOutlierDetector": "estimators",
    "PrecisionMixture": "core.mixture",
    "load": "estimators",
    "select": "estimators",
    "stream": "estimators",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``factormix --help`` needs no torch."""
    if name in ("datasets", "inspection", "plotting", "solvers"):
        return importlib.import_module(f"factormix.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"factormix.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'factormix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
