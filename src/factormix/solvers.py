"""Solvers with their options; they live in ``factormix.training.solvers``."""

from factormix.training import solvers
from factormix.training.solvers import *  # noqa: F403 (the names are listed there)

__all__ = solvers.__all__
