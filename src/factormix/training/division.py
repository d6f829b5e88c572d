"""A run that one process has whole, cut for processes that each take some of its components."""

from __future__ import annotations

from typing import Any

import torch

from factormix.core.parameters import Parameters
from factormix.training.loop import Run
from factormix.training.placement import cut, mine
from factormix.training.processes import Processes
from factormix.training.solvers.base import pack, unpack

__all__ = ["cut_run"]


def cut_run(run: Run) -> None:
    """Leave this process its own components of a run, where its problem says they are divided."""
    processes = run.problem.processes
    if not processes.divided:
        return
    run.state = _cut_state(run.state, processes)
    if run.best is not None:
        run.best.state = _cut_state(run.best.state, processes)


def _cut_state(state: Any, processes: Processes) -> Any:
    """Return a state with the components of this process; a screen is made anew."""
    state = unpack(type(state), *pack(state))
    parameters: Parameters = state.parameters
    state.parameters, state.running = cut(processes, parameters), cut(processes, state.running)
    if hasattr(state, "watch") and state.watch.active:
        watched = (mine(processes, t).clone() for t in state.watch[:3])
        state.watch = type(state.watch)(*watched, state.watch.rows)
    if hasattr(state, "totals"):
        sums = {name: mine(processes, getattr(state.totals, name)).clone() for name in "ABS"}
        state.totals = state.totals._replace(**sums)
    if hasattr(state, "screen"):
        state.screen = type(state.screen).nothing(torch.zeros_like(parameters.means[0]))
    return state
