"""A run as named tensors and JSON-ready values, and back, bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from factormix.core.parameters import Parameters, factor_major
from factormix.data.units import Units
from factormix.errors import InputError
from factormix.training.following import Following
from factormix.training.loop import Best, Run
from factormix.training.solvers import Problem, Solver, from_settings, to_settings
from factormix.training.solvers.base import PlainState, pack, unpack

__all__ = ["FittedState", "pack_run", "unpack_run"]

MIXTURE = "parameters."
BEST = "best."
FOLLOWING = "following."
BOUND = "problem.max_precision"
# What is not a plain value has its own way into the file; everything else is saved under its
# name, so that no field can be forgotten.
PLAIN = [
    field.name
    for field in dataclasses.fields(Run)
    if field.name not in ("plan", "state", "units", "recent", "best", "following", "remembered")
]
SIZES = [
    field.name
    for field in dataclasses.fields(Problem)
    if field.name not in ("max_precision", "device", "dtype", "processes")
]


@dataclasses.dataclass
class FittedState(PlainState):
    """Stand in for the solver's state in a model saved without it, which cannot learn."""

    parameters: Parameters
    steps: int = 0


def pack_run(run: Run, *, training_state: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Turn a run into named tensors and JSON-ready values, with the solver's state or without."""
    training_state = training_state and not isinstance(run.state, FittedState)
    tensors, values = _packed(run, run.state)
    if not training_state:
        tensors = {MIXTURE + name: t for name, t in run.parameters._asdict().items()}
        values = {"steps": run.state.steps}
    tensors |= {"units.offset": run.units.offset, "units.scale": run.units.scale}
    if run.problem.max_precision is not None:
        tensors[BOUND] = run.problem.max_precision
    settings = {name: getattr(run, name) for name in PLAIN}
    settings["recent"] = float(run.recent)
    settings["solver"] = to_settings(run.plan.solver)
    settings["problem"] = {name: getattr(run.problem, name) for name in SIZES}
    settings["bounded"] = run.problem.max_precision is not None
    settings["state"] = values
    settings["training_state"] = training_state
    if training_state and run.best is not None:
        others, values = _packed(run, run.best.state)
        tensors |= {BEST + name: tensor for name, tensor in others.items()}
        rest = {f.name: getattr(run.best, f.name) for f in dataclasses.fields(Best)[1:]}
        settings["best"] = rest | {"state": values}
    if training_state and run.following is not None:
        others, values = pack(run.following)
        tensors |= {FOLLOWING + name: tensor for name, tensor in others.items()}
        settings["following"] = values
    return tensors, settings


def _packed(run: Run, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Pack a state without what holds for the components of one process only."""
    tensors, values = pack(state)
    if run.problem.processes.divided and hasattr(state, "screen"):
        nothing = type(state.screen).nothing(state.parameters.means)
        tensors |= {f"screen.{name}": tensor for name, tensor in nothing._asdict().items()}
    return tensors, values


def unpack_run(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], device: torch.device
) -> Run:
    """Turn what ``pack_run`` gave back into a run."""
    solver: Solver[Any] = from_settings(settings["solver"])
    units = Units(tensors["units.offset"].cpu(), tensors["units.scale"].cpu())
    state_type = solver.state_type if settings["training_state"] else FittedState
    moved = {name: t.to(device) for name, t in tensors.items()}
    state = _unpacked_state(state_type, moved, settings["state"])
    _check_consistent(state.parameters, units)
    problem = Problem(
        **{name: settings["problem"][name] for name in SIZES},
        max_precision=tensors[BOUND] if settings["bounded"] else None,
        device=device,
        dtype=state.parameters.means.dtype,
    )
    run = Run(
        plan=solver.plan(problem),
        state=state,
        units=units,
        recent=settings["recent"],
        **{name: settings[name] for name in PLAIN},
    )
    if "best" in settings:
        others = {n.removeprefix(BEST): t for n, t in moved.items() if n.startswith(BEST)}
        best = _unpacked_state(state_type, others, settings["best"]["state"])
        run.best = Best(**settings["best"] | {"state": best})
    if "following" in settings:
        rows, weights = (tensors[FOLLOWING + name].cpu() for name in ("rows", "weights"))
        run.following = Following(rows=rows, weights=weights, **settings["following"])
    return run


def _unpacked_state(
    state_type: type[Any], tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> Any:
    """Unpack a state with its factors laid out as they are in training."""
    state = unpack(state_type, tensors, values)
    parameters = state.parameters
    state.parameters = parameters._replace(
        precision_factors=factor_major(parameters.precision_factors)
    )
    return state


def _check_consistent(parameters: Parameters, units: Units) -> None:
    K, d, l = parameters.shape
    shapes = [tuple(t.shape) for t in (*parameters, units.offset, units.scale)]
    if shapes != [(K,), (K, d), (K, d), (K, d, l), (K, l), (d,), (d,)]:
        raise InputError("the tensors of the model do not fit together: save the model again.")
