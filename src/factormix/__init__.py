"""Mixtures of factor analyzers at any scale, in precision form."""
# ruff: noqa: F403, F405 - the names of estimators are listed below and in their package

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from factormix.errors import InputError, TrainingWarning

if TYPE_CHECKING:
    from factormix import datasets, inspection, plotting, solvers
    from factormix.core.density import Posterior
    from factormix.core.mixture import PrecisionMixture
    from factormix.estimators import *

__all__ = [
    "CONTAMINATED",
    "MFA",
    "NOVELTY",
    "ConvMFA",
    "Explanation",
    "Imputation",
    "InputError",
    "Kind",
    "MFAClassifier",
    "MFAImputer",
    "MFAOutlierDetector",
    "Posterior",
    "PrecisionMixture",
    "Progress",
    "Recipe",
    "Scored",
    "Selection",
    "SizeResult",
    "TrainingWarning",
    "datasets",
    "denoise",
    "estimate_noise",
    "inspection",
    "load",
    "plotting",
    "select",
    "solvers",
    "stream",
]
__version__ = "0.1.0"
_CORE = {"PrecisionMixture": "core.mixture", "Posterior": "core.density"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``factormix --help`` needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'factormix' has no attribute {name!r}")
    if name in ("datasets", "inspection", "plotting", "solvers"):
        return importlib.import_module(f"factormix.{name}")
    home = _CORE.get(name, "estimators")
    value = getattr(importlib.import_module(f"factormix.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
