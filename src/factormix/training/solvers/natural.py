"""Natural-gradient training: stochastic steps in the geometry of the complete-data model.

A run has three parts. The first rows are kept until there are enough to seed the mixture: centroids
are spread over them on the torus grid, and variances follow. Then every batch moves running
averages of the expected statistics by a decreasing rate, which is an online form of EM; the bound
on variances starts loose. Meanwhile the number of components changes. Passes over data begin with
more than K components and lose the ones that others can replace. A mixture of very many components
begins with fewer and grows by splitting the heaviest. A component of no use is replaced in the same
way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from factormix.core.arrays import Workspace
from factormix.core.averages import (
    Averages,
    StepOptions,
    natural_step,
    prediction_widths,
    rotate_averages,
    tied_width,
)
from factormix.core.density import log_prob, operands
from factormix.core.expectation import expected_statistics
from factormix.core.missing import observed_components, observed_operands
from factormix.core.noise import Noise
from factormix.core.parameters import Parameters
from factormix.core.screening import CandidateSearch, Screen
from factormix.core.statistics import Statistics
from factormix.data.batches import Batch, mask_missing
from factormix.defaults import NOISE_MODELS
from factormix.errors import InputError
from factormix.training.distributed.parallel_step import Step, step_by_owner
from factormix.training.screens import Search
from factormix.training.solvers.base import (
    PRECISION,
    Change,
    Info,
    Problem,
    SolverOptions,
    State,
    check_ranges,
)
from factormix.training.solvers.components import (
    Context,
    Population,
    Watch,
    grow,
    keep_supported,
    prune,
    replace_unused,
)
from factormix.training.solvers.schedule import (
    Growth,
    Rates,
    Replacement,
    Schedule,
    Seeding,
    choose_first,
    hastening_pays,
)
from factormix.training.solvers.seeding import Seeds, best_start, spread_averages
from factormix.training.threads import Threads, use_threads


@dataclass
class NaturalState(State):
    """All that changes while training."""

    parameters: Parameters
    averages: Averages
    bound: Tensor
    """(d,), the final bound on E."""
    first_bound: Tensor
    """(d,), the bound on E to begin with."""
    watch: Watch
    """The cost of removing components."""
    rows: Tensor
    """Rows kept for seeding, (n, d), NaN where an entry is missing; none afterwards."""
    row_weights: Tensor
    """(n,)."""
    epoch_sum: Tensor
    """Sum of the log-likelihoods of this pass, scalar."""
    epoch_samples: Tensor
    applied_bound: Tensor
    """(d,), the bound on E in the last step."""
    screen: Screen
    """Ranks the components where there are very many."""
    missed: Tensor
    """(G+2,), decaying sums of ``Statistics.screening``; none before there are any."""
    search: Search = field(default_factory=Search)
    steps: int = 0
    seeded: bool = False
    samples: float = 0.0
    """Rows learned from since seeding."""
    concentration: float = 0.0
    """Sum of the squares of the weights of rows in the running averages. Its inverse is the number
    of rows that these averages remember."""
    observed_share: float = 1.0
    """Share of the entries that were observed, a running average."""
    widened_rows: float = 0.0
    """Number of rows by which ``mixture`` widens the noise; 0 where ``parameters`` have widened
    noise already, or where nothing is widened."""
    tied_width: float = 0.0
    """The width of all components in ``mixture``, if they share one noise."""
    last_look: float = 0.0
    """Ticks at the last look for unused components."""
    next_ranking: float = 0.0
    """Ticks at the next look at the ranks of components; infinite after the last look."""
    revived: int = 0
    best: float = -math.inf
    """Best mean log-likelihood per feature of a pass."""
    waited: int = 0
    """Passes since the last gain."""

    @property
    def mixture(self) -> Parameters:
        """The mixture, with noise that predicts new rows even if training rows had gaps.

        The parameters themselves fill in missing entries, and the noise of these entries would
        become wider with every step.
        """
        if not self.widened_rows:
            return self.parameters
        M, weight = self.parameters.latent_variances, self.averages.weight
        if self.tied_width:
            widths = torch.full_like(weight, self.tied_width)
        else:
            widths = prediction_widths(weight, M, self.widened_rows)
        # Wider noise weakens the factors, so the least M so far stays a lower bound.
        floor = float(M.min()) if M.numel() else 1.0
        return rotate_averages(self.averages, self.applied_bound, floor, widths=widths)[1]

    @classmethod
    def begin(cls, problem: Problem, floor: float, n_components: int) -> Self:
        """Begin with copies of one broad Gaussian, in the number of components of this process.

        ``floor`` is the floor of the eigenvalues of M.
        """
        d, l, communicator = problem.n_features, problem.n_factors, problem.communicator
        K = communicator.components.local_count(n_components)
        like, bound = problem.like, problem.bound(PRECISION)
        generator = torch.Generator().manual_seed(problem.seed)
        mean = 0.1 * torch.randn(d, generator=generator, dtype=torch.float64).to(**like)
        means = mean.repeat(K, 1)
        weights = torch.full((K,), 1 / K, **like)
        averages = spread_averages(means, torch.ones_like(means), weights, l, 0.0, generator)
        averages, parameters = rotate_averages(averages, bound.clamp(max=1), floor)
        return cls(
            parameters=parameters,
            averages=averages,
            bound=bound,
            first_bound=bound.clone(),
            watch=Watch.nothing(weights),
            rows=torch.empty(0, d, **like),
            row_weights=torch.empty(0, **like),
            epoch_sum=torch.zeros((), **like),
            epoch_samples=torch.zeros((), **like),
            applied_bound=torch.zeros_like(bound),
            screen=Screen.empty(weights),
            missed=torch.empty(0, **like),
        )

    @torch.inference_mode()
    def change_units(self, units: Change) -> None:
        """Express everything in other working units, and drop the screen.

        Averages and parameters change in place: a large mixture does not fit into memory twice.
        """
        offset, scale = (t.to(self.bound) for t in units)
        self.averages.Theta.div_(scale)[:, 0].sub_(offset / scale)
        self.averages.V.div_(scale.square())
        factor = 1 / scale
        self.parameters.precision_diag.div_(factor.square())
        self.parameters.precision_factors.div_(factor.unsqueeze(-1))
        means = self.averages.Theta[:, 0]
        self.parameters = self.parameters._replace(means=means)
        self.bound = self.bound * scale.square()
        self.first_bound = self.first_bound * scale.square()
        self.rows = (self.rows - offset) / scale
        self.applied_bound = self.applied_bound * scale.square()
        self.screen = Screen.empty(self.bound)


@dataclass(frozen=True)
class NaturalPlan:
    """A run of natural-gradient steps on a problem."""

    solver: NaturalGradient
    problem: Problem
    schedule: Schedule
    steps_by_owner: ClassVar[bool] = True
    work: Workspace = field(default_factory=Workspace, repr=False, compare=False)

    def init(self) -> NaturalState:
        """Begin with copies of one broad Gaussian; the first rows seed the mixture."""
        return self.solver.state_type.begin(
            self.problem, self.solver.min_eigenvalue, self.schedule.n_components
        )

    def settled(self, state: NaturalState) -> bool:
        """Return whether there are K components and the variance bound has its final value."""
        return state.seeded and self.schedule.is_settled(self._ticks(state))

    @property
    def screens(self) -> bool:
        """Whether there may be a screen at some point in the run."""
        problem = self.problem
        return self.schedule.screening.choose_first(problem.candidates, problem.shape) > 0

    def contribution(self, state: NaturalState, batch: Batch) -> Statistics | Seeds:
        """Sum the expected statistics over the samples; before seeding, return the rows."""
        (x, weights), communicator = batch.tensors(), self.problem.communicator
        if state.seeded:
            candidates = state.watch.candidates if state.watch.active else None
            found = expected_statistics(
                state.parameters,
                x,
                weights,
                batch.missing,
                candidates=candidates,
                search=self._search(state),
                n_probes=self.schedule.screening.count_probes(state.steps),
                work=self.work,
                exchange=communicator.components.exchange,
                convert=self._converts(x),
                **self._statistics_options(state),
            )
            missing = x.new_zeros(()) if batch.missing is None else batch.missing.sum().to(x)
            return found._replace(n_missing=missing / self.problem.n_features)
        weights = x.new_ones(len(x)) if weights is None else weights
        # Before seeding, all components are equal.
        one = state.parameters.take(slice(1))
        if batch.missing is None:
            likelihoods = log_prob(x, operands(one))
        else:
            ops = observed_operands(one)
            likelihoods = observed_components(x, batch.missing, ops).squeeze(1)
        return Seeds(weights.sum(), weights @ likelihoods, batch.rows_with_nan(), weights)

    def _statistics_options(self, state: NaturalState) -> dict[str, Any]:
        """Return further options of the statistics of a batch."""
        return {}

    def _converts(self, x: Tensor) -> bool:
        """Return whether sums over rows x are converted before they are added to others.

        Otherwise each process converts the sums of the components that it updates.
        """
        return x.device.type != "cpu" or self.problem.communicator.data.size == 1

    def update(
        self, state: NaturalState, contribution: Statistics | Seeds
    ) -> tuple[NaturalState, Info]:
        """Take one natural step, or seed the mixture once there are enough rows."""
        c, state.steps = contribution, state.steps + 1
        log_likelihood = c.log_likelihood / c.n_samples
        state.epoch_sum += c.log_likelihood
        state.epoch_samples += c.n_samples
        if isinstance(c, Seeds):
            state.rows = torch.cat([state.rows, c.rows])
            state.row_weights = torch.cat([state.row_weights, c.weights])
            last = state.steps == self.problem.batches_per_epoch
            if last or len(state.rows) >= self.schedule.seed_rows:
                self._seed(state)
        else:
            self._advance(state, c)
        stop = self._close_epoch(state)
        if self.problem.choose_ranks and self.settled(state):
            self._look_at_ranks(state, stop=stop)
        scalars = {
            "rate": self.schedule.rate(self._ticks(state)),
            "components": float(self._size(state)),
            "revived": float(state.revived),
        }
        if self.screens:
            few = state.search.candidates or self._size(state)
            scalars |= {"candidates": float(few), "screening_loss": state.search.loss}
        return state, Info(log_likelihood, scalars, stop, stop)

    def change_units(self, state: NaturalState, units: Change) -> NaturalState:
        """Express a state in other working units."""
        state.change_units(units)
        if self.problem.noise_model.isotropic:
            self._share_noise(state)
        self._update_screen(state, None)
        return state

    @torch.inference_mode()
    def _share_noise(self, state: NaturalState) -> None:
        """Make noise isotropic again in new units; loadings stay."""
        noise, averages = self.problem.noise_model, state.averages
        for name in ("bound", "first_bound", "applied_bound"):
            setattr(state, name, noise.pool_bound(getattr(state, name)))
        averages.V.copy_(noise.pool(averages.V, averages.weight))
        state.averages, state.parameters = rotate_averages(
            averages, self._bound(state), self.solver.min_eigenvalue
        )

    def begin_fit_(self, state: NaturalState) -> None:
        """Forget the sums of the last pass, and the best likelihood of a pass."""
        state.epoch_sum.zero_()
        state.epoch_samples.zero_()
        state.steps, state.best, state.waited, state.next_ranking = 0, -math.inf, 0, 0.0

    def _ticks(self, state: NaturalState) -> float:
        return state.samples / self.schedule.tick_rows

    def _bound(self, state: NaturalState) -> Tensor:
        """Return the bound on E, (d,), on its way from the first one to the last."""
        loose = self.schedule.looseness(self._ticks(state))
        if loose == 0:
            return state.bound
        # On a stream, the last bound may fall below the first one.
        first = torch.minimum(state.first_bound, state.bound)
        return state.bound * (first / state.bound) ** loose

    def _advance(
        self, state: NaturalState, statistics: Statistics, *, by_owner: bool = True
    ) -> None:
        """Move the running averages, then adjust the number of components.

        With ``by_owner``, sums of components are over the rows of this rank only.
        """
        assert statistics.n_missing is not None
        n, missing = torch.stack([statistics.n_samples, statistics.n_missing]).tolist()
        if n == 0:  # every sample weight is zero
            return
        if state.watch.active:
            state.watch = state.watch.add(statistics)
        wanted = self.problem.candidates
        if statistics.screening is not None and wanted is not None:
            state.missed = state.search.add_probes(
                state.missed,
                statistics.screening,
                wanted,
                (self._size(state), *state.parameters.shape[1:]),
                self.schedule.screening,
            )
        bound, communicator = self._bound(state), self.problem.communicator
        together = by_owner and communicator.data.size > 1
        touched, tied = statistics.sums.touched, self.problem.noise_model.tied
        if touched is not None and (tied or not torch.equal(bound, state.applied_bound)):
            # A new bound, or a noise that all share, changes components that no row touched too.
            touched = None
            if together:
                whole = statistics.sums.spread_to_all(len(state.averages.weight))
                statistics = statistics._replace(sums=whole)
        rate = self.schedule.rate(self._ticks(state))
        rate = 1 - (1 - rate) ** (n / self.schedule.tick_rows)
        state.observed_share += rate * ((n - missing) / n - state.observed_share)
        n_rows = self._count_remembered(state, rate, n)
        noise = self._choose_noise(state, n_rows, together=together)
        options = StepOptions(
            rate,
            bound,
            self.solver.min_eigenvalue,
            everywhere=touched is None,
            hasten=self.schedule.hasten_variances,
            n_components=self._size(state),
            n_rows=n_rows,
            last_bound=state.applied_bound,
            noise=noise,
        )
        before = state.averages, state.parameters
        with use_threads() as threads:
            step = self._choose_step(statistics, options, threads)
            if together:
                state.averages, state.parameters = step_by_owner(
                    communicator, step, *before, statistics, bound, n_rows, noise
                )
            else:
                state.averages, state.parameters = step(*before, statistics)
        self._finish_step(state, statistics, rate)
        state.applied_bound = bound.clone()
        state.samples += n
        self._update_screen(state, touched)
        self._resize(state)

    def _choose_step(self, statistics: Statistics, options: StepOptions, threads: Threads) -> Step:
        """Return the step by these statistics."""
        return partial(natural_step, options=options)

    def _choose_noise(self, state: NaturalState, n_rows: float | None, *, together: bool) -> Noise:
        """Return the noise model of a step, which ranks along the data may take ``together``."""
        noise, communicator = self.problem.noise_model, self.problem.communicator
        rows = state.widened_rows if n_rows is None else n_rows
        if noise.tied and rows:
            known = state.averages.weight, state.parameters.latent_variances
            width = communicator.agree(tied_width(*known, rows, noise))
            if n_rows is None:
                state.tied_width = float(width)
            else:
                noise = noise._replace(width=width)
        return noise._replace(sum_parts=communicator.sum_stepped) if together else noise

    def _finish_step(self, state: NaturalState, statistics: Statistics, rate: float) -> None:
        """Update what a solver keeps in addition to the running averages."""

    def _count_remembered(self, state: NaturalState, rate: float, n: float) -> float | None:
        """Count n rows that come with a rate, and return how many rows the averages remember.

        None where the step does not widen variances to predict new rows. After rows with gaps,
        ``NaturalState.mixture`` widens them instead, as if there were only the rows that observe
        any two features: loadings come from pairs of features.
        """
        state.concentration = (1 - rate) ** 2 * state.concentration + rate**2 / n
        if not state.concentration or not self.schedule.predict_variances:
            return None
        n_rows = min(1 / state.concentration, self.schedule.pass_rows)
        if state.observed_share == 1 and not state.widened_rows:
            return n_rows
        state.widened_rows = n_rows * state.observed_share**2
        return None

    def _close_epoch(self, state: NaturalState) -> bool:
        """At the end of a pass, compare its likelihood with the best and return whether to stop."""
        per_epoch = self.problem.batches_per_epoch
        if not per_epoch or state.steps % per_epoch:
            return False
        mean = (state.epoch_sum / state.epoch_samples).item()
        per_feature = mean / self.problem.n_features
        state.epoch_sum.zero_()
        state.epoch_samples.zero_()
        settled, tol = self.settled(state), self.schedule.tol
        if not settled or per_feature > state.best + tol:
            state.best, state.waited = max(state.best, per_feature) if settled else state.best, 0
            return False
        state.waited += 1
        return tol > 0 and state.waited >= self.schedule.patience

    def _seed(self, state: NaturalState) -> None:
        """Make the first mixture from the rows kept for it, then learn from them."""
        rows, row_weights = state.rows, state.row_weights
        state.rows, state.row_weights = rows[:0].clone(), row_weights[:0].clone()
        state.seeded = True
        state.concentration = 1 / max(1.0, float(row_weights.sum()))
        whole, size = mask_missing(rows, row_weights), self.schedule.tick_rows
        parts = [whole.take(slice(i, i + size)) for i in range(0, len(whole), size)]
        floor = self.solver.min_eigenvalue
        start = best_start(
            whole, parts, state.bound, self.schedule, self.problem, floor, self.work
        ).distribute(self.problem.communicator)
        state.averages, state.parameters, state.first_bound = start
        if self.schedule.first_components > self.schedule.n_components:
            unknown = torch.zeros_like(state.averages.weight)
            state.watch = Watch.begin(unknown.bool(), unknown)
        for batch in parts:
            contribution = self.contribution(state, batch)
            assert isinstance(contribution, Statistics)
            # These are all rows, and every process has them.
            self._advance(state, contribution, by_owner=False)

    def _resize(self, state: NaturalState) -> None:
        """Remove components in excess, add components still to come, or replace unused ones."""
        population = Population(state.averages, state.parameters, state.watch)
        ticks, k, K = self._ticks(state), self._size(state), self.schedule.n_components
        communicator, search = self.problem.communicator, self._search(state)
        context = Context(
            self.schedule,
            ticks,
            state.samples,
            communicator,
            search,
            self.work,
            self.problem.noise_model,
        )
        here = len(state.averages.weight)
        if k > K:
            population = prune(population, context)
        elif k < K:
            population = grow(population, context, (self._bound(state), self.solver.min_eigenvalue))
        elif ticks >= state.last_look + self.schedule.replacement.look_ticks:
            state.last_look = ticks
            population, n = replace_unused(population, context)
            state.revived += n
        state.averages, state.parameters, state.watch, changed = population
        self._finish_resize(state, changed)
        if changed is not None or len(state.averages.weight) != here:
            self._update_screen(state, changed)

    def _finish_resize(self, state: NaturalState, changed: Tensor | None) -> None:
        """Update what else a solver keeps for the components (n,) that changed."""

    def _look_at_ranks(self, state: NaturalState, *, stop: bool) -> None:
        """Switch off factors without support: whenever the rows have doubled, and near the end.

        The last look comes before the time in which no component is replaced.
        """
        ticks = self._ticks(state)
        last = stop or not self.schedule.may_replace(ticks)
        if not (stop or ticks >= state.next_ranking or (last and state.next_ranking < math.inf)):
            return
        state.next_ranking = math.inf if last else 2 * ticks
        # As in ``_count_remembered``, rows with gaps count as the rows that observe two features.
        n_rows = min(1 / state.concentration, self.schedule.pass_rows) * state.observed_share**2
        widen = state.observed_share == 1 and self.schedule.predict_variances
        state.averages, state.parameters = keep_supported(
            state.averages,
            state.parameters,
            n_rows,
            (self._bound(state), self.solver.min_eigenvalue),
            self._choose_noise(state, n_rows if widen else None, together=False),
            self.problem.communicator,
            last=last,
            widen=widen,
        )
        if state.screen.active:
            few = state.screen.Gamma_mu[:, : state.parameters.shape[2]].contiguous()
            state.screen = state.screen._replace(Gamma_mu=few)
        self._update_screen(state, None)

    def _size(self, state: NaturalState) -> int:
        """Return the number of components in all processes."""
        return self.problem.communicator.components.count(len(state.averages.weight))

    def _search(self, state: NaturalState) -> CandidateSearch | None:
        """Return the screen with its candidates, if there is one."""
        if not state.screen.active:
            return None
        # Each process looks at its part of the candidates.
        parts = self.problem.communicator.components.group.size
        counts = self.schedule.screening.list_counts(self.problem.candidates, self._size(state))
        few, *others = (math.ceil(n / parts) for n in (state.search.candidates, *counts))
        return CandidateSearch(state.screen, few, tuple(others))

    def _update_screen(self, state: NaturalState, changed: Tensor | None) -> None:
        """Let the screen follow all components, or the ones that changed, (n,)."""
        wanted = self.problem.candidates
        if wanted is not None and self.screens:
            state.screen = state.search.update_screen(
                wanted,
                state.screen,
                state.parameters,
                changed,
                state.samples,
                (self._size(state), *state.parameters.shape[1:]),
                self.schedule.screening,
            )


@dataclass(frozen=True, repr=False)
class NaturalGradient(SolverOptions):
    """Train by natural-gradient steps on running statistics, from random values.

    Schedules count ticks, each of the rows of a full batch, so a short batch does not change them.
    Every number is a field of ``training.solvers.schedule.Schedule``.

    Parameters
    ----------
    exponent, offset : float or None
        The rate of tick t is ``(t + offset) ** -exponent``. None takes 0.55 where each component
        meets many rows in the planned passes, and up to 0.7 where it meets few: midway at 150
        rows. On a stream it is 0.6 to 0.7, by the rows of 30 ticks.
    forgetting : float or None
        Least rate, for streams that drift: about ``batch_size / forgetting`` rows are remembered.
    cooling : float or None
        Factor by which the rate falls further over the last two fifths of all planned passes;
        None takes 0.25.
    tol, patience : float or None, int
        Stop when the mean log-likelihood per feature of a pass has risen by less than ``tol`` in
        ``patience`` passes. ``tol=0`` goes on to the last epoch; None takes 1e-4 divided by the
        number of batches in a pass, at least 2e-5.
    seed_rows : int or None
        Rows kept for seeding, at most one pass; None takes 40 for each of the first components, at
        least 500 and at most 10,000.
    first_components : int or None
        Components to begin with: more than K are pruned to K, fewer grow to K. None takes twice K
        up to K = 32, and K + 32 above. It takes more, up to 5/3 of K, if the passes have 36 (l + 1)
        rows for each of these components. On a stream it takes K. At most 500.
    widening : float
        How the two halves of a component that is split for growth differ. 1: they stand on
        both sides of where it was. Above 1: one is wider by this factor, the other narrower, which
        suits data whose rows differ in how far out they are, such as photographs (1.2).
    unused_weight : float
        A component of less than this times the average weight is replaced, unless it explains rows
        that no other could.
    min_eigenvalue : float
        Floor of the eigenvalues of M.
    predict_variances : bool
        Widen noise variances to predict new rows, whose variances exceed the variances of the
        training rows by Akaike's ``(n + p) / (n - p)`` for n rows of a component and p fitted
        numbers of a feature. Rows with missing entries count as fewer rows. False gives maximum
        likelihood.
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
    unused_weight: float = 0.1
    min_eigenvalue: float = 1e-6
    predict_variances: bool = True

    name: ClassVar[str] = "natural"
    needs_passes: ClassVar[bool] = False
    noise_models: ClassVar[tuple[str, ...]] = NOISE_MODELS
    chooses_ranks: ClassVar[bool] = True
    state_type: ClassVar[type[NaturalState]] = NaturalState
    default_max_precision: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            share=("exponent", "cooling", "forgetting"),
            positive=("offset",),
            not_negative=("tol",),
            at_least_one=("widening",),
            between=("unused_weight", "min_eigenvalue"),
            count=("patience", "seed_rows", "first_components"),
            flag=("predict_variances",),
        )

    def default_batch_size(self, n_rows: int | None) -> int:
        """Return 1,000 rows, or a few hundred when that would be fewer than 75 batches.

        Up to 1,000 rows are one batch. Each 25 rows more add a batch, until batches have 100 rows.
        """
        return Schedule.batches.choose_rows(n_rows)

    def default_epochs(self, batches_per_epoch: int) -> int:
        """Return the largest number of passes; most runs converge earlier."""
        return Schedule.batches.choose_epochs(batches_per_epoch)

    def plan(self, problem: Problem) -> NaturalPlan:
        """Apply the options to a problem."""
        if problem.noise_model.tied and self.widening > 1:
            raise InputError(
                f"widening={self.widening} makes the noise of components differ, which"
                ' noise="tied" excludes: leave out one of them.'
            )
        return NaturalPlan(self, problem, self.schedule(problem))

    def schedule(self, problem: Problem, n_components: int | None = None) -> Schedule:
        """Choose the schedule of a problem, perhaps for another number of components."""
        K, per_epoch = n_components or problem.n_components, problem.batches_per_epoch or 0
        tick_rows = problem.batch_size or self.default_batch_size(None)
        first = self.first_components or choose_first(
            K, problem.n_factors, tick_rows * per_epoch, n_passes=problem.epochs or 1
        )
        if problem.means is not None:
            # Each component has its place from the start.
            first = K
        growth = Growth(widening=self.widening)
        if not per_epoch:
            growth = replace(growth, narrowing=growth.stream_narrowing)
        rates = Rates(
            exponent=self.exponent,
            offset=self.offset,
            cooling=self.cooling or Rates.cooling,
            forgetting=self.forgetting or 0.0,
        )
        usual_tol = max(Schedule.tol, Schedule.one_batch_tol / max(1, per_epoch))
        return Schedule(
            n_components=K,
            first_components=first,
            tick_rows=tick_rows,
            batches_per_epoch=per_epoch,
            planned=float(per_epoch * problem.epochs) if problem.epochs else math.inf,
            rates=rates,
            growth=growth,
            replacement=Replacement(unused_weight=self.unused_weight),
            seeding=Seeding(rows=self.seed_rows),
            hasten_variances=hastening_pays(problem.n_features, problem.n_factors),
            predict_variances=self.predict_variances,
            tol=usual_tol if self.tol is None else self.tol,
            patience=self.patience,
        )
