"""Inspect a fitted mixture: factors, components, typical rows, comparison with another model.

The functions live in ``factormix.estimators.inspection``.
"""

from factormix.estimators import inspection
from factormix.estimators.inspection import *  # noqa: F403 (the names are listed there)

__all__ = inspection.__all__
