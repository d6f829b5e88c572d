"""Training by means and covariances, with components that may come in several scales.

Where features are few and factors many, the sums ``sum R x x'`` of a batch cost less than sums over
the factors (``core/density.py``), and a step can move the covariances themselves
(``core/covariance.py``). Elsewhere the steps are the steps of ``natural.py``. In several scales,
components of one kind share their centre and directions (``core/scales.py``).

On 100,000 patches of photographs (60 kinds in 11 scales, 63 features, 62 factors, one pass), steps
of covariances reach 156.27 +- 0.07 held-out nats, natural steps 155.96 +- 0.09, in nine tenths of
the time. In one scale (K = 150, two passes over 50,000 patches) natural steps reach 153.42 and
steps of covariances 153.04, so this solver is chosen by name only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from factormix.core.averages import Averages, StepOptions, rotate_averages, to_logits
from factormix.core.covariance import covariance_step
from factormix.core.density import quadratic_forms_pay
from factormix.core.parameters import Parameters
from factormix.core.scales import expanded, scale_logits, scale_values
from factormix.core.statistics import ProductSums, Statistics
from factormix.data.batches import Batch
from factormix.defaults import NOISE
from factormix.errors import InputError
from factormix.training.distributed.parallel_step import Step
from factormix.training.solvers.base import Info, Problem, check_ranges
from factormix.training.solvers.natural import NaturalGradient, NaturalPlan, NaturalState
from factormix.training.solvers.schedule import Schedule
from factormix.training.solvers.seeding import Seeds
from factormix.training.threads import Threads


@dataclass
class CovarianceState(NaturalState):
    """All that changes while training."""

    scales: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    """(K, S), weights of all scales of each kind of component; (0,) until scales begin."""

    def __post_init__(self) -> None:
        self.scales = self.scales.to(self.bound)

    @property
    def mixture(self) -> Parameters:
        """The learned mixture, with all scales."""
        return expanded(self.parameters, self.scales) if len(self.scales) else self.parameters

    @property
    def logits(self) -> Tensor:
        """The logits of the mixture, (K,)."""
        return scale_logits(self.scales) if len(self.scales) else self.parameters.logits


@dataclass(frozen=True, repr=False)
class CovarianceGradient(NaturalGradient):
    """Train by natural steps of means and covariances, from random values.

    This suits rows of at most 100 features with more than half as many factors, and rows of one
    kind that differ in how far out they are. All components are evaluated for every row. The other
    options are the options of ``NaturalGradient``.

    Parameters
    ----------
    scales : int
        Number of scales of each kind of component. Scales of one kind share centre and directions.
        K must be a multiple of it; K / scales kinds are trained, at up to twice the cost of that
        many components. Patches of photographs, for example, differ in contrast, and sensor rows in
        loudness; 8 to 13 scales are useful. Rows must be complete. Scales begin once the bound has
        its final value and no component is in excess. On a stream this is after 30 ticks; until
        then there are K / scales components.
    fast_exponent, fast_cooling : float
        Exponent and cooling for steps of covariances, which learn from few rows.
    first_width : float
        Standard deviation of the logarithm of the scale when scales begin.
    least_share : float
        Least share of a component that its rarest scale keeps: a scale without any share would
        never return.
    """

    scales: int = 1
    # These are chosen for patches of photographs, whose results are on the page of
    # ``benchmarks/many.py``; they are not varied one by one.
    fast_exponent: float = 0.5
    fast_cooling: float = 0.05
    first_width: float = 0.5
    least_share: float = 1e-8

    name: ClassVar[str] = "covariance"
    noise_models: ClassVar[tuple[str, ...]] = (NOISE,)
    chooses_ranks: ClassVar[bool] = False
    state_type: ClassVar[type[NaturalState]] = CovarianceState

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(
            self,
            count=("scales",),
            share=("fast_exponent", "fast_cooling"),
            positive=("first_width",),
            between=("least_share",),
        )

    def plan(self, problem: Problem) -> CovariancePlan:
        """Apply the options to a problem."""
        K, scales = problem.n_components, self.scales
        if K % scales:
            raise InputError(
                f"n_components={K} is not a multiple of scales={scales}: choose one, such as"
                f" {scales * max(1, round(K / scales))}."
            )
        if not problem.communicator.has_all_components:
            raise InputError(
                "the solver 'covariance' cannot have its components divided among processes: use"
                " mesh=\"data\", or the solver 'natural'."
            )
        return CovariancePlan(self, problem, self.schedule(problem, K // scales))

    def schedule(self, problem: Problem, n_components: int | None = None) -> Schedule:
        """Choose the schedule of a problem, for the number of kinds of components."""
        schedule = super().schedule(problem, n_components)
        # Kinds of components have many rows each, and their scales predict new rows. On 100,000
        # patches of photographs (one pass, three seeds), hastened variances gain 0.20 to 0.27 nats
        # at 16 factors and 20 or 60 kinds, and elsewhere change less than 0.05, for 1.03 of the
        # CPU seconds.
        schedule = dataclasses.replace(schedule, predict_variances=False, hasten_variances=True)
        if not quadratic_forms_pay((schedule.n_components, problem.n_features, problem.n_factors)):
            return schedule
        rates = dataclasses.replace(
            schedule.rates,
            least_exponent=self.fast_exponent,
            most_exponent=self.fast_exponent,
            stream_exponent=self.fast_exponent,
            cooling=self.cooling or self.fast_cooling,
        )
        return dataclasses.replace(schedule, rates=rates)


@dataclass(frozen=True)
class CovariancePlan(NaturalPlan):
    """A run of steps of means and covariances on a problem."""

    solver: CovarianceGradient

    @property
    def screens(self) -> bool:
        """No screen: products of features evaluate all components at once."""
        return False

    @property
    def steps_covariances(self) -> bool:
        """Whether complete rows move covariances: products of features cost less than factors."""
        K = self.schedule.n_components
        return quadratic_forms_pay((K, self.problem.n_features, self.problem.n_factors))

    def contribution(self, state: NaturalState, batch: Batch) -> Statistics | Seeds:
        """Sum the expected statistics over the samples; before seeding, return the rows."""
        gaps = batch.missing is not None and bool(batch.missing.any())
        if self.solver.scales > 1 and gaps:
            raise refuse_gaps()
        return super().contribution(state, batch)

    def update(
        self, state: NaturalState, contribution: Statistics | Seeds
    ) -> tuple[NaturalState, Info]:
        """Take one step, or seed the mixture once there are enough rows."""
        state, info = super().update(state, contribution)
        times = self.solver.scales if len(_scales(state)) else 1
        scalars = {**info.scalars, "components": times * info.scalars["components"]}
        return state, info._replace(scalars=scalars)

    def _statistics_options(self, state: NaturalState) -> dict[str, Any]:
        scales = _scales(state)
        return {"scales": scales if len(scales) else None}

    def _converts(self, x: Tensor) -> bool:
        if not self.steps_covariances:
            return super()._converts(x)
        return x.device.type != "cpu" and self.problem.communicator.data.size > 1

    def _bound(self, state: NaturalState) -> Tensor:
        """Return the bound on E, (d,), at scale one, by which the narrowest scale obeys it."""
        bound, scales = super()._bound(state), _scales(state)
        return bound * scale_values(scales.shape[1], bound)[0] if len(scales) else bound

    def _choose_step(self, statistics: Statistics, options: StepOptions, threads: Threads) -> Step:
        if not (self.steps_covariances and isinstance(statistics.sums, ProductSums)):
            return super()._choose_step(statistics, options, threads)
        return partial(
            covariance_step, options=options, map_groups=threads.map, n_groups=threads.size
        )

    def _finish_step(self, state: NaturalState, statistics: Statistics, rate: float) -> None:
        if statistics.scales is None:
            return
        scales = move_scales_(_scales(state), statistics, rate, self.solver.least_share)
        state.parameters = _weigh(state.parameters, scales)

    def _finish_resize(self, state: NaturalState, changed: Tensor | None) -> None:
        """Begin with scales when it is time, or give them to components (n,) that changed."""
        assert isinstance(state, CovarianceState)
        if self.solver.scales == 1:
            return
        if len(state.scales) and changed is not None:
            state.scales = extend_scales(state.scales, state.averages, changed)
            state.parameters = _weigh(state.parameters, state.scales)
        elif not len(state.scales) and self._is_ready_for_scales(state):
            state.scales = begin_scales(state.averages, self.solver.scales, self.solver.first_width)
            bounds = self._bound(state), self.solver.min_eigenvalue
            state.averages, state.parameters = rotate_averages(state.averages, *bounds)

    def _is_ready_for_scales(self, state: NaturalState) -> bool:
        """Return whether the bound has its final value and no component is in excess.

        A component that hardly knows its place would take on all scales. Components still to come
        are halves of others, and should differ from them in more than their scales.
        """
        ready = self._ticks(state) >= self.schedule.bound_ticks
        return ready and self._size(state) <= self.schedule.n_components


def refuse_gaps() -> InputError:
    """Build the error for rows with gaps where components come in several scales."""
    return InputError(
        "rows with missing values (NaN) cannot train components in several scales: use scales=1,"
        " or fill the gaps with impute."
    )


def begin_scales(averages: Averages, n_scales: int, width: float) -> Tensor:
    """Return the first weights of all scales, (K, S), log-normal around scale one."""
    log_c = scale_values(n_scales, averages.weight).log()
    shares = torch.softmax(-0.5 * (log_c / width).square(), dim=0)
    return averages.weight.unsqueeze(1) * shares


def move_scales_(scales: Tensor, statistics: Statistics, rate: float, least_share: float) -> Tensor:
    """Move the weights of all scales (K, S) by a step of this rate, in place."""
    assert statistics.scales is not None
    scales.mul_(1 - rate).add_(statistics.scales, alpha=rate / float(statistics.n_samples))
    return scales.clamp_(min=least_share / len(scales))


def extend_scales(scales: Tensor, averages: Averages, changed: Tensor) -> Tensor:
    """Return the weights of all scales (K, S) after components (n,) were split or made."""
    average = scales.sum(dim=0) / scales.sum()
    whole = scales.new_zeros(len(averages.weight), len(average))
    whole[: len(scales)] = scales
    whole[changed] = averages.weight[changed].unsqueeze(1) * average
    return whole


def _scales(state: NaturalState) -> Tensor:
    assert isinstance(state, CovarianceState)
    return state.scales


def _weigh(parameters: Parameters, scales: Tensor) -> Parameters:
    """Return parameters in which a component has the weight of all its scales (K, S)."""
    return parameters._replace(logits=to_logits(scales.sum(dim=1)))
