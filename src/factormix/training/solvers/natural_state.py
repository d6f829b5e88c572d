"""All that changes in a run of natural-gradient steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from factormix.core.parameters import Parameters, change_units
from factormix.core.screening import Screen
from factormix.core.statistics import Running
from factormix.training.solvers.base import Change
from factormix.training.solvers.population import Watch
from factormix.training.solvers.screens import Search

__all__ = ["NaturalState"]


@dataclass
class NaturalState:
    """All that changes while training."""

    parameters: Parameters
    running: Running
    bound: Tensor
    """(d,), the bound on E at its value."""
    first_bound: Tensor
    """(d,), the bound on E to begin with."""
    watch: Watch
    """What removing components would cost."""
    rows: Tensor
    """Rows that are kept for seeding, (n, d), NaN for what is missing; none afterwards."""
    row_weights: Tensor
    """(n,)."""
    epoch_sum: Tensor
    """Sum of the log-likelihoods of this pass, scalar."""
    epoch_samples: Tensor
    applied_bound: Tensor
    """(d,), the bound on E in the last step."""
    screen: Screen
    """What ranks the components, where there are very many."""
    missed: Tensor
    """(2,), what rows that were evaluated in full have told, decaying: the log-likelihood lost by
    what the screen left out, and their number."""
    search: Search = field(default_factory=Search)
    steps: int = 0
    seeded: bool = False
    samples: float = 0.0
    """Rows learned from since seeding."""
    last_look: float = 0.0
    """Ticks at the last look for unused components."""
    revived: int = 0
    best: float = -math.inf
    """Best mean log-likelihood per feature of a pass."""
    waited: int = 0
    """Passes since the last gain."""

    def change_units(self, units: Change) -> None:
        """Express everything in other working units; what a screen knew is forgotten."""
        offset, scale = (t.to(self.bound) for t in units)
        Theta, V, weight = self.running
        Theta = Theta / scale
        Theta[:, 0] -= offset / scale
        self.running = Running(Theta, V / scale.square(), weight)
        self.parameters = change_units(self.parameters, -offset / scale, 1 / scale)
        self.parameters = self.parameters._replace(means=Theta[:, 0])
        self.bound = self.bound * scale.square()
        self.first_bound = self.first_bound * scale.square()
        self.rows = (self.rows - offset) / scale
        self.applied_bound = torch.zeros_like(self.bound)
        self.screen = Screen.nothing(self.bound)
