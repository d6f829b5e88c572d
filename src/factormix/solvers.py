"""Solvers with their options; they live in ``factormix.training.solvers``."""

from factormix.training.solvers import (
    EM,
    SOLVERS,
    ConstrainedSGD,
    CovarianceGradient,
    Info,
    NaturalGradient,
    Problem,
    Solver,
    resolve,
)

__all__ = [
    "EM",
    "SOLVERS",
    "ConstrainedSGD",
    "CovarianceGradient",
    "Info",
    "NaturalGradient",
    "Problem",
    "Solver",
    "resolve",
]
