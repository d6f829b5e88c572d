"""All that changes in a run of natural-gradient steps.

A run of natural-gradient steps: stochastic steps in the geometry of the complete-data model.

A run has three parts. The first rows of the stream are kept until there are enough to seed the
mixture: centroids are spread over them on the torus grid, and variances follow. Then every batch
moves running averages of the expected statistics by a decreasing rate, which is an online form of
EM; the variance bound starts loose. Meanwhile the number of components changes: passes over data
begin with more than are wanted and lose those that the others can replace; a mixture of very many
begins with few and grows. Components that are of no use, and those that are still to come, are made
by splitting the heaviest.

Natural-gradient training: stochastic steps in the geometry of the complete-data model.

These are the options; ``natural_plan.py`` has what a run does with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from factormix.core.arrays import Workspace
from factormix.core.averages import Running, StepOptions, natural_step, precision_form
from factormix.core.covariance import covariance_step
from factormix.core.density import log_prob, operands
from factormix.core.expectation import expected_statistics
from factormix.core.missing import observed_components, observed_operands
from factormix.core.parameters import Like, Parameters
from factormix.core.scales import expanded, scale_logits
from factormix.core.screening import CandidateSearch, Screen
from factormix.core.statistics import ProductSums, Statistics
from factormix.data.batches import Batch, mask_missing
from factormix.training.distributed import components
from factormix.training.distributed.data import Step, stepped
from factormix.training.screens import Search, kept_up, learned, n_probes
from factormix.training.solvers.base import (
    AT_LEAST_ONE,
    BETWEEN,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    PRECISION,
    SHARE,
    Change,
    Info,
    Problem,
    Range,
    check_options,
)
from factormix.training.solvers.components import Population, Watch, grown, pruned, revived
from factormix.training.solvers.scales import (
    begun,
    bound_of_one,
    check_complete,
    check_scales,
    followed,
    joined_by,
    kinds,
    with_weights,
)
from factormix.training.solvers.schedule import Choices, Schedule
from factormix.training.solvers.seeding import Seeds, best_start, spread_running
from factormix.training.threads import use_threads

if TYPE_CHECKING:
    pass

__all__ = ["NaturalGradient", "NaturalPlan", "NaturalState"]


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
            screen=Screen.empty(weights),
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
        self.screen = Screen.empty(self.bound)


LOOK_TICKS = 3.0
"""Ticks between two looks for unused components."""


@dataclass(frozen=True)
class NaturalPlan:
    """A run of natural-gradient steps on a problem."""

    solver: NaturalGradient
    problem: Problem
    in_parts: ClassVar[bool] = True
    work: Workspace = field(default_factory=Workspace, repr=False, compare=False)

    @cached_property
    def choices(self) -> Choices:
        """What the run takes where it was left open."""
        return Choices(self.solver, self.problem)

    @cached_property
    def schedule(self) -> Schedule:
        """When what happens."""
        return self.choices.schedule

    def init(self) -> NaturalState:
        """Begin with K times the same broad Gaussian; the first rows seed the mixture."""
        return NaturalState.begin(self.problem, self._floor, self.solver.scales)

    @property
    def _floor(self) -> float:
        return self.solver.min_eigenvalue

    def settled(self, state: NaturalState) -> bool:
        """Tell whether there are K components and the variance bound has its value."""
        return state.seeded and self.schedule.settled(self._ticks(state))

    def contribution(self, state: NaturalState, batch: Batch) -> Statistics | Seeds:
        """Sum the expected statistics over the samples; before seeding, hand over the rows."""
        check_complete(self.solver.scales, batch)
        (x, weights), processes = batch.tensors(), self.problem.processes
        if state.seeded:
            candidates = state.watch.candidates if state.watch.active else None
            found = expected_statistics(
                state.parameters,
                x,
                weights,
                batch.missing,
                candidates=candidates,
                scales=state.scales if len(state.scales) else None,
                search=self._search(state),
                n_probes=n_probes(state.steps),
                work=self.work,
                exchange=components.exchange_of(processes),
                convert=self._converts(x),
            )
            gaps = None if batch.missing is None else batch.missing.any(dim=1)
            return found._replace(
                n_incomplete=x.new_zeros(()) if gaps is None else gaps.sum().to(x)
            )
        weights = x.new_ones(len(x)) if weights is None else weights
        # All components are the same as yet.
        one = Parameters(*(t[:1] for t in state.parameters))
        if batch.missing is None:
            likelihoods = log_prob(x, operands(one))
        else:
            ops = observed_operands(one)
            likelihoods = observed_components(x, batch.missing, ops).squeeze(1)
        return Seeds(weights.sum(), weights @ likelihoods, batch.rows_with_nan(), weights)

    def _converts(self, x: Tensor) -> bool:
        """Return whether sums over rows x are converted before they are added to others."""
        several = self.problem.processes.data.size > 1
        if x.device.type != "cpu":
            return several or not self.choices.direct
        # Each process converts the sums of the components that it steps; direct steps need none.
        return not several and not self.choices.direct

    def update(
        self, state: NaturalState, contribution: Statistics | Seeds
    ) -> tuple[NaturalState, Info]:
        """Take one natural step, or seed the mixture once there are rows enough."""
        c, state.steps = contribution, state.steps + 1
        log_likelihood = c.log_likelihood / c.n_samples
        state.epoch_sum += c.log_likelihood
        state.epoch_samples += c.n_samples
        if isinstance(c, Seeds):
            state.rows = torch.cat([state.rows, c.rows])
            state.row_weights = torch.cat([state.row_weights, c.weights])
            last = state.steps == self.problem.batches_per_epoch
            if last or len(state.rows) >= self.choices.seed_rows:
                self._seed(state)
        else:
            self._advance(state, c)
        stop = self._close_epoch(state)
        scalars = {
            "rate": self.schedule.rate(self._ticks(state)),
            "components": float(
                self._size(state) * (self.solver.scales if len(state.scales) else 1)
            ),
            "revived": float(state.revived),
        }
        if self.choices.screens:
            few = state.search.candidates or self._size(state)
            scalars |= {"candidates": float(few), "screening_loss": state.search.loss}
        return state, Info(log_likelihood, scalars, stop, stop)

    def change_units(self, state: NaturalState, units: Change) -> NaturalState:
        """Express a state in other working units."""
        state.change_units(units)
        self._keep_up(state, None)
        return state

    def _ticks(self, state: NaturalState) -> float:
        return state.samples / self.choices.tick_rows

    def _bound(self, state: NaturalState) -> Tensor:
        """Return the bound on E, (d,), on its way from the first one to the last."""
        loose = self.schedule.looseness(self._ticks(state))
        if loose == 0:
            return state.bound
        # A stream may have loosened the last one below what the first was.
        first = torch.minimum(state.first_bound, state.bound)
        return state.bound * (first / state.bound) ** loose

    def _advance(
        self, state: NaturalState, statistics: Statistics, *, in_parts: bool = True
    ) -> None:
        """Move the running averages, then look after the number of components.

        With ``in_parts``, sums of components are those over the rows of this process.
        """
        assert statistics.n_incomplete is not None
        n, gaps = torch.stack([statistics.n_samples, statistics.n_incomplete]).tolist()
        state.gaps = state.gaps or gaps > 0
        if n == 0:  # every sample weight is zero
            return
        if state.watch.active:
            state.watch = state.watch.seen(statistics)
        if statistics.screening is not None and n_probes(state.steps - 1):
            auto, d = self.problem.candidates == "auto", self.problem.n_features
            state.missed = learned(state.search, state.missed, statistics.screening, d, auto)
        bound, processes = bound_of_one(self._bound(state), state.scales), self.problem.processes
        together = in_parts and processes.data.size > 1
        touched = statistics.sums.touched
        if touched is not None and not torch.equal(bound, state.applied_bound):
            # A new bound changes components that no row touched too.
            touched = None
            if together:
                whole = statistics.sums.spread_to_all(len(state.running.weight))
                statistics = statistics._replace(sums=whole)
        share, rate = n / self.choices.tick_rows, self.schedule.rate(self._ticks(state))
        rate, size = 1 - (1 - rate) ** share, self._size(state)
        n_rows = self._remembered(state, rate, n)
        options = StepOptions(
            rate,
            bound,
            self._floor,
            everywhere=touched is None,
            hasten=self.choices.hastens,
            n_components=size,
            n_rows=n_rows,
            last_bound=state.applied_bound,
        )
        with use_threads() as threads:
            step: Step = partial(natural_step, options=options)
            if self.choices.direct and isinstance(statistics.sums, ProductSums):
                step = partial(
                    covariance_step,
                    options=options,
                    map_groups=threads.map,
                    n_groups=threads.size,
                )
            if together:
                before = state.running, state.parameters
                state.running, state.parameters = stepped(
                    processes, step, *before, statistics, bound, self.work, n_rows
                )
            else:
                state.running, state.parameters = step(state.running, state.parameters, statistics)
        if statistics.scales is not None:
            state.scales = followed(state.scales, statistics, rate)
            state.parameters = with_weights(state.parameters, state.scales)
        state.applied_bound = bound.clone()
        state.samples += n
        self._keep_up(state, touched)
        self._look_after_components(state)

    def _remembered(self, state: NaturalState, rate: float, n: float) -> float | None:
        """Count n rows that come with a rate, and return how many the averages then know of.

        None where variances are not to be those of new rows: what stands in for missing entries has
        the variances of the model, which would become wider and wider.
        """
        state.concentration = (1 - rate) ** 2 * state.concentration + rate**2 / n
        if state.gaps or not state.concentration or not self.choices.widens:
            return None
        return min(1 / state.concentration, self.schedule.pass_rows)

    def _close_epoch(self, state: NaturalState) -> bool:
        """At the end of a pass, compare its likelihood with the best and return whether to stop."""
        per_epoch = self.problem.batches_per_epoch
        if not per_epoch or state.steps % per_epoch:
            return False
        mean = (state.epoch_sum / state.epoch_samples).item()
        per_feature = mean / self.problem.n_features
        state.epoch_sum.zero_()
        state.epoch_samples.zero_()
        settled, tol = self.settled(state), self.choices.tol
        if not settled or per_feature > state.best + tol:
            state.best, state.waited = max(state.best, per_feature) if settled else state.best, 0
            return False
        state.waited += 1
        return tol > 0 and state.waited >= self.solver.patience

    def _seed(self, state: NaturalState) -> None:
        """Make the first mixture of the rows that were kept, then learn from them."""
        rows, row_weights = state.rows, state.row_weights
        state.rows, state.row_weights = rows[:0].clone(), row_weights[:0].clone()
        state.seeded = True
        state.concentration = 1 / max(1.0, float(row_weights.sum()))
        whole, size = mask_missing(rows, row_weights), self.choices.tick_rows
        parts = [whole.take(slice(i, i + size)) for i in range(0, len(whole), size)]
        best = best_start(
            whole,
            parts,
            state.bound,
            self.schedule,
            self.problem,
            self._floor,
            self.work,
        )
        state.running, state.parameters, state.first_bound = best.divided(self.problem.processes)
        if self.schedule.first_components > self.choices.kinds:
            unknown = torch.zeros_like(state.running.weight)
            state.watch = Watch.begin(unknown.bool(), unknown)
        for batch in parts:
            contribution = self.contribution(state, batch)
            assert isinstance(contribution, Statistics)
            # These are all rows, and every process has them.
            self._advance(state, contribution, in_parts=False)

    def _look_after_components(self, state: NaturalState) -> None:
        """Take away components in excess, add those still to come, or replace useless ones."""
        population = Population(state.running, state.parameters, state.watch)
        ticks, k, K = self._ticks(state), self._size(state), self.choices.kinds
        processes, here = self.problem.processes, len(state.running.weight)
        if k > K:
            population = pruned(population, self.schedule, ticks, processes)
        elif k < K:
            population = grown(
                population,
                self.schedule,
                ticks,
                processes,
                widening=self.solver.widening,
                narrowing=self.choices.narrowing,
                bounds=(bound_of_one(self._bound(state), state.scales), self._floor),
            )
        elif ticks >= state.last_look + LOOK_TICKS:
            state.last_look = ticks
            population, n = revived(
                population,
                self.schedule,
                ticks,
                state.samples,
                self.solver.unused_weight,
                self._search(state),
                processes,
                self.work,
            )
            state.revived += n
        state.running, state.parameters, state.watch, changed = population
        if self.solver.scales > 1:
            self._look_after_scales(state, changed)
        if changed is not None or len(state.running.weight) != here:
            self._keep_up(state, changed)

    def _look_after_scales(self, state: NaturalState, changed: Tensor | None) -> None:
        """Begin with scales when it is time, or give them to components (n,) that changed."""
        if len(state.scales) and changed is not None:
            state.scales = joined_by(state.scales, state.running, changed)
            state.parameters = with_weights(state.parameters, state.scales)
        elif not len(state.scales) and self._ready_for_scales(state):
            state.scales = begun(state.running, self.solver.scales)
            bound = bound_of_one(self._bound(state), state.scales)
            state.running, state.parameters = precision_form(state.running, bound, self._floor)

    def _ready_for_scales(self, state: NaturalState) -> bool:
        """Tell whether the bound has its value, and no component is in excess.

        Components that hardly know their place would each take on all scales. Those still to come
        are halves of others, and should differ from them in what scales cannot.
        """
        ticks = self._ticks(state)
        return ticks >= self.schedule.bound_ticks and self._size(state) <= self.choices.kinds

    def _size(self, state: NaturalState) -> int:
        """Return how many components there are, in all processes."""
        return components.n_components(self.problem.processes, len(state.running.weight))

    def _search(self, state: NaturalState) -> CandidateSearch | None:
        """Return what lets few components through, if there is a screen."""
        if not state.screen.active:
            return None
        # Each process looks at its part of the candidates.
        parts = self.problem.processes.components.size
        return CandidateSearch(state.screen, math.ceil(state.search.candidates / parts))

    def _keep_up(self, state: NaturalState, changed: Tensor | None) -> None:
        """Let the screen follow the components, all or those that changed, (n,)."""
        if self.choices.screens:
            state.screen = kept_up(
                state.search,
                state.screen,
                state.parameters,
                self.problem.candidates,
                state.samples,
                changed,
                self._size(state),
            )


OPTIONS: dict[Range, tuple[str, ...]] = {
    SHARE: ("exponent", "cooling", "forgetting"),
    POSITIVE: ("offset",),
    NOT_NEGATIVE: ("tol",),
    AT_LEAST_ONE: ("widening",),
    BETWEEN: ("unused_weight", "min_eigenvalue"),
    COUNT: ("patience", "seed_rows", "first_components", "scales"),
}


@dataclass(frozen=True)
class NaturalGradient:
    """Train by natural-gradient steps on running statistics, from random values.

    Every schedule is counted in ticks of a batch's rows, so that odd batches do not change it.
    Above 100 components, which have few rows each, noise variances are those that new rows are to
    be expected to have (``core.averages.prediction_widths``), but for steps of means and
    covariances, for components in scales, and where rows have missing entries.

    Parameters
    ----------
    exponent, offset : float or None
        The rate of tick t is ``(t + offset) ** -exponent``; None takes 0.55 up to 100 components
        (0.6 on a stream), and 0.7 above. Where factors are more than half of at most 100 features,
        and components more than 100 or in scales, it is 0.5: steps learn from few rows there. On a
        stream, where so many components had to grow, the rate then falls as 1.5 / t from where it
        is, so that all rows count, and what a component was part of before fades.
    forgetting : float or None
        Least rate, for streams that drift: about ``batch_size / forgetting`` rows are remembered.
    cooling : float or None
        Factor by which the rate falls in addition over the last two fifths of all planned passes;
        None takes 0.25 up to 100 components, and 0.5 above; 0.05 where the exponent is 0.5.
    tol, patience : float or None, int
        Stop when the mean log-likelihood per feature of a pass has risen by less than ``tol`` in
        ``patience`` passes. ``tol=0`` goes on to the last epoch; None takes 2e-5, or 1e-4 where a
        pass is one batch.
    seed_rows : int or None
        Rows kept for seeding, at most one pass; None takes 40 per first component, at least 500 and
        at most 10,000.
    first_components : int or None
        Components to begin with: more than K are pruned to K, fewer grow to K. None takes twice K,
        or 5/3 of K from 48 on, where there are rows enough, or K on a stream, but at most 500.
    widening : float
        How the two halves of a component that is split for growth differ. 1: they stand to both
        sides of where it was. Above 1: one is wider by this factor, the other narrower, which suits
        data whose rows differ in how far out they are, such as photographs (1.2).
    scales : int
        Scales that each kind of component comes in, sharing centre and directions: K is a multiple
        of it, and K / scales kinds are trained, at about the cost of so many components. For rows
        of one kind that differ in how far out they are, as patches in contrast or sensor rows in
        loudness; 8 to 13 are useful. Rows must be complete, and all components are looked at. They
        take on their scales once the bound has settled and none is in excess: on a stream after 30
        ticks, until which there are K / scales components.
    unused_weight : float
        A component below this times the average weight is replaced, unless it explains rows that no
        other could.
    min_eigenvalue : float
        Floor of the eigenvalues of M.
    """

    exponent: float | None = None
    offset: float = 5.0
    forgetting: float | None = None
    cooling: float | None = None
    tol: float | None = None
    patience: int = 3
    seed_rows: int | None = None
    first_components: int | None = None
    widening: float = 1.0
    scales: int = 1
    unused_weight: float = 0.1
    min_eigenvalue: float = 1e-6

    name: ClassVar[str] = "natural"
    needs_passes: ClassVar[bool] = False
    state_type: ClassVar[type[NaturalState]] = NaturalState
    default_max_precision: ClassVar[float | None] = None
    min_ticks: ClassVar[int] = 400

    def __post_init__(self) -> None:
        check_options(self, OPTIONS)

    def default_batch_size(self, n_rows: int | None) -> int:
        """Return 1,000 rows, or a few hundred when that would be less than 75 batches.

        Up to 1,000 rows are one batch: nothing is to be gained from a part of them.
        """
        if n_rows is None:
            return 1000
        return n_rows if n_rows <= 1000 else min(1000, max(100, n_rows // 75))

    def default_epochs(self, batches_per_epoch: int) -> int:
        """Return the most passes; a run usually ends before by its own criterion."""
        return max(20, math.ceil(self.min_ticks / batches_per_epoch))

    def plan(self, problem: Problem) -> NaturalPlan:
        """Apply the options to a problem."""
        check_scales(self.scales, problem)
        return NaturalPlan(self, problem)
