"""Solvers: ways to train a mixture, each a dataclass of options as in ``solvers.base``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from factormix.errors import InputError
from factormix.training.solvers.base import Info, Problem, Solver, step
from factormix.training.solvers.covariance import CovarianceGradient
from factormix.training.solvers.em import EM
from factormix.training.solvers.natural import NaturalGradient
from factormix.training.solvers.sgd import ConstrainedSGD

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
    "step",
]

SOLVERS: dict[str, type[Any]] = {
    kind.name: kind for kind in (NaturalGradient, CovarianceGradient, ConstrainedSGD, EM)
}
"""Solvers by name."""


def resolve(solver: str | Solver[Any]) -> Solver[Any]:
    """Return the solver of a name, or the solver itself."""
    if isinstance(solver, str):
        if solver not in SOLVERS:
            known = ", ".join(map(repr, SOLVERS))
            raise InputError(f"solver must be one of {known} or a solver object, not {solver!r}.")
        made: Solver[Any] = SOLVERS[solver]()
        return made
    # A class has the same attributes as its objects.
    if isinstance(solver, type) or not isinstance(solver, Solver):
        raise InputError(
            f"solver must be a name or an object of factormix.solvers, not {type(solver).__name__}."
        )
    return solver


def to_settings(solver: Solver[Any]) -> dict[str, Any]:
    """Describe a solver in JSON-ready values."""
    options = dataclasses.fields(solver)  # type: ignore[arg-type]
    return {"name": solver.name, "options": {f.name: getattr(solver, f.name) for f in options}}


def from_settings(settings: Mapping[str, Any]) -> Solver[Any]:
    """Rebuild the solver that ``to_settings`` described."""
    name = settings["name"]
    if name not in SOLVERS:
        raise InputError(f"the model was trained by the solver {name!r}, which is not known here.")
    options = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in settings["options"].items()
    }
    made: Solver[Any] = SOLVERS[name](**options)
    return made
