"""Mixtures of factor analyzers at any scale, in precision form."""

from factormix import solvers
from factormix.errors import InputError
from factormix.estimators import MFA, load
from factormix.mixture import PrecisionMixture

__all__ = ["MFA", "InputError", "PrecisionMixture", "load", "solvers"]
__version__ = "0.1.0"
