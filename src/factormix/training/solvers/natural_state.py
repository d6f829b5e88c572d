"""All that changes in a run of natural-gradient steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from factormix.core.parameters import Like, Parameters
from factormix.core.running import Running, precision_form
from factormix.core.scales import expanded, scale_logits
from factormix.core.screening import Screen
from factormix.training.solvers.base import PRECISION, Change, Problem
from factormix.training.solvers.population import Watch
from factormix.training.solvers.screens import Search
from factormix.training.solvers.seeding import spread_running
from factormix.training.solvers.spreading import kinds

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
    scales: Tensor
    """(K, S), weights of all scales of components that come in several; (0,) until they do."""
    search: Search = field(default_factory=Search)
    steps: int = 0
    seeded: bool = False
    samples: float = 0.0
    """Rows learned from since seeding."""
    concentration: float = 0.0
    """Sum of the squares of the weights that rows have in the running averages: one over it is the
    rows that these averages know of."""
    gaps: bool = False
    """Whether some row had missing entries."""
    last_look: float = 0.0
    """Ticks at the last look for unused components."""
    revived: int = 0
    best: float = -math.inf
    """Best mean log-likelihood per feature of a pass."""
    waited: int = 0
    """Passes since the last gain."""

    @property
    def mixture(self) -> Parameters:
        """What was learned, with all scales."""
        return expanded(self.parameters, self.scales) if len(self.scales) else self.parameters

    @property
    def logits(self) -> Tensor:
        """Those of the mixture, (K,)."""
        return scale_logits(self.scales) if len(self.scales) else self.parameters.logits

    @classmethod
    def begin(cls, problem: Problem, floor: float, n_scales: int = 1) -> NaturalState:
        """Begin with K times the same broad Gaussian, or with the part of this process.

        ``floor`` is that of the eigenvalues of M.
        """
        d, l, processes = problem.n_features, problem.n_factors, problem.processes
        K = (
            processes.counts[processes.components.place]
            if processes.divided
            else kinds(problem.n_components, n_scales)
        )
        like: Like = {"device": problem.device, "dtype": problem.dtype}
        bound = problem.bound(PRECISION)
        generator = torch.Generator().manual_seed(problem.seed)
        mean = 0.1 * torch.randn(d, generator=generator, dtype=torch.float64).to(**like)
        means = mean.repeat(K, 1)
        weights = torch.full((K,), 1 / K, **like)
        running = spread_running(means, torch.ones_like(means), weights, l, 0.0, generator)
        running, parameters = precision_form(running, bound.clamp(max=1), floor)
        return cls(
            parameters=parameters,
            running=running,
            bound=bound,
            first_bound=bound.clone(),
            watch=Watch.nothing(weights),
            rows=torch.empty(0, d, **like),
            row_weights=torch.empty(0, **like),
            epoch_sum=torch.zeros((), **like),
            epoch_samples=torch.zeros((), **like),
            applied_bound=torch.zeros_like(bound),
            screen=Screen.nothing(weights),
            missed=torch.zeros(2, **like),
            scales=torch.empty(0, **like),
        )

    @torch.inference_mode()
    def change_units(self, units: Change) -> None:
        """Express everything in other working units; what a screen knew is forgotten.

        Averages and parameters change in place: there is no room for two of a large mixture.
        """
        offset, scale = (t.to(self.bound) for t in units)
        self.running.Theta.div_(scale)[:, 0].sub_(offset / scale)
        self.running.V.div_(scale.square())
        factor = 1 / scale
        self.parameters.precision_diag.div_(factor.square())
        self.parameters.precision_factors.div_(factor.unsqueeze(-1))
        means = self.running.Theta[:, 0]
        self.parameters = self.parameters._replace(means=means)
        self.bound = self.bound * scale.square()
        self.first_bound = self.first_bound * scale.square()
        self.rows = (self.rows - offset) / scale
        self.applied_bound = torch.zeros_like(self.bound)
        self.screen = Screen.nothing(self.bound)
