"""Pictures of a fitted mixture; they live in ``factormix.views.plotting``."""

from factormix.views import plotting
from factormix.views.plotting import *  # noqa: F403 (the names are listed there)

__all__ = plotting.__all__
