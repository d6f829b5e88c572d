"""A run of natural-gradient steps: stochastic steps in the geometry of the complete-data model.

A run has three parts. The first rows of the stream are kept until there are enough to seed the
mixture: centroids are spread over them on the torus grid, and variances follow. Then every batch
moves running averages of the expected statistics by a decreasing rate, which is an online form of
EM; the variance bound starts loose. Meanwhile the number of components changes: passes over data
begin with more than are wanted and lose those that the others can replace; a mixture of very many
begins with few and grows. Components that are of no use, and those that are still to come, are made
by splitting the heaviest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from factormix.core.completion import batch_statistics
from factormix.core.density import log_prob, operands
from factormix.core.direct import direct_step
from factormix.core.observed import observed_components, observed_operands
from factormix.core.parameters import Parameters
from factormix.core.running import precision_form
from factormix.core.screened import Few
from factormix.core.statistics import Statistics
from factormix.core.steps import natural_step
from factormix.core.workspace import Workspace
from factormix.data.batches import Batch, incomplete
from factormix.training import placement
from factormix.training.parts import Step, stepped
from factormix.training.solvers.base import Change, Info, Problem
from factormix.training.solvers.choices import Choices
from factormix.training.solvers.natural_state import NaturalState
from factormix.training.solvers.population import Population, Watch, grown, pruned, revived
from factormix.training.solvers.schedule import Schedule
from factormix.training.solvers.screens import kept_up, learned, n_probes
from factormix.training.solvers.seeding import Seeds
from factormix.training.solvers.spreading import (
    begun,
    bound_of_one,
    check_complete,
    followed,
    joined_by,
    with_weights,
)
from factormix.training.solvers.starts import best_start
from factormix.training.threads import team

if TYPE_CHECKING:
    from factormix.training.solvers.natural import NaturalGradient

__all__ = ["NaturalPlan"]

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
            found = batch_statistics(
                state.parameters,
                x,
                weights,
                batch.missing,
                candidates=candidates,
                scales=state.scales if len(state.scales) else None,
                few=self._few(state),
                n_probes=n_probes(state.steps),
                work=self.work,
                exchange=placement.exchange_of(processes),
                finish=self._finishes(x),
            )
            gaps = None if batch.missing is None else batch.missing.any(dim=1)
            return found._replace(with_gaps=x.new_zeros(()) if gaps is None else gaps.sum().to(x))
        weights = x.new_ones(len(x)) if weights is None else weights
        # All components are the same as yet.
        one = Parameters(*(t[:1] for t in state.parameters))
        if batch.missing is None:
            likelihoods = log_prob(x, operands(one))
        else:
            ops = observed_operands(one)
            likelihoods = observed_components(x, batch.missing, ops).squeeze(1)
        return Seeds(weights.sum(), weights @ likelihoods, batch.with_gaps(), weights)

    def _finishes(self, x: Tensor) -> bool:
        """Tell whether sums over rows x are finished before they are added to others."""
        several = self.problem.processes.data.size > 1
        if x.device.type != "cpu":
            return several or not self.choices.direct
        # Each process finishes the sums of the components that it steps; direct steps need none.
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
        assert statistics.with_gaps is not None
        n, gaps = torch.stack([statistics.n_samples, statistics.with_gaps]).tolist()
        state.gaps = state.gaps or gaps > 0
        if n == 0:  # every sample weight is zero
            return
        if state.watch.active:
            state.watch = state.watch.seen(statistics)
        if statistics.missed is not None and n_probes(state.steps - 1):
            auto, d = self.problem.candidates == "auto", self.problem.n_features
            state.missed = learned(state.search, state.missed, statistics.missed, d, auto)
        bound, processes = bound_of_one(self._bound(state), state.scales), self.problem.processes
        together = in_parts and processes.data.size > 1
        touched = statistics.touched
        if touched is not None and not torch.equal(bound, state.applied_bound):
            # A new bound changes components that no row touched too.
            touched = None
            if together:
                statistics = statistics.whole(len(state.running.weight))
        share, rate = n / self.choices.tick_rows, self.schedule.rate(self._ticks(state))
        rate, size = 1 - (1 - rate) ** share, self._size(state)
        n_rows = self._remembered(state, rate, n)
        options = {
            "rate": rate,
            "max_precision": bound,
            "min_eigenvalue": self._floor,
            "everywhere": touched is None,
        }
        with team() as threads:
            step: Step = partial(
                natural_step,
                **options,
                hasten=self.choices.hastens,
                n_components=size,
                n_rows=n_rows,
                last_bound=state.applied_bound,
            )
            if self.choices.direct and statistics.by_products:
                step = partial(direct_step, **options, each=threads.each, n_groups=threads.size)
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
        whole, size = incomplete(rows, row_weights), self.choices.tick_rows
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
                self._few(state),
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
        return placement.n_components(self.problem.processes, len(state.running.weight))

    def _few(self, state: NaturalState) -> Few | None:
        """Return what lets few components through, if there is a screen."""
        if not state.screen.active:
            return None
        # Each process looks at its part of the candidates.
        parts = self.problem.processes.components.size
        return Few(state.screen, math.ceil(state.search.candidates / parts))

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
