"""Where a run stands: everything needed to go on, the records of its history, and its units.

The first rows of a stream may say little about the rows to come: a column may begin to vary, or its
scale may change. So the last rows are kept, and whenever the stream has become twice as long, or
has been forgotten in part, units and bounds are chosen again from them. The model is then expressed
in the new units.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from factormix.core.density import TOLERANCE
from factormix.core.inspection import components_in_use
from factormix.core.parameters import Parameters
from factormix.core.screening import CandidateSearch, make_screen
from factormix.data.batches import Batch, Values
from factormix.data.columns import Columns, to_float64
from factormix.data.units import Scaling, Units
from factormix.errors import InputError
from factormix.training.evaluation import rounding_error
from factormix.training.solvers.base import Change, Plan, Problem

MAX_RECORDS = 2000
"""Records of a history, a few hundred kilobytes in a file; half of them go when it is full."""
MAX_STEPS_PER_RECORD = 100
"""Most steps between two records of a long run: their mean has a tenth of the deviation of one
step."""
KEPT_ROWS, KEPT_ELEMENTS = 2048, 1 << 22
"""Rows of a stream that are kept, and their elements, 32 MiB in float64: a deviation of 2,048
normal values has an error of 1 / sqrt(2 * 2048) = 1.6%."""
UNITS_FACTOR = 2.0
"""Change of scale, or shift in units of the scale, from which units are changed: working data then
stays within a factor of two of its usual range."""

Record = dict[str, float]


@dataclass
class Best:
    """The best model of a run by held-out rows, and how long ago it was found."""

    state: Any
    """The solver's state."""
    score: float
    """Mean log-likelihood of the held-out rows."""
    epoch: float
    last_look: float
    """Epoch of the last evaluation of the held-out rows."""
    waited: int = 0
    """Evaluations since the last gain."""


@dataclass
class Run:
    """Where a run stands: all that is needed to go on from here.

    Every field but the last two is saved with a model. Fields after ``units`` hold numbers, texts,
    lists and dicts.
    """

    plan: Plan[Any]
    """What never changes: the solver's options and the problem."""
    state: Any
    """The solver's state, complete after every step."""
    units: Units
    fingerprint: str = ""
    """Identifies the rows of a fit."""
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    steps: int = 0
    samples: int = 0
    position: int = 0
    """Rows of the stream that were taken, without skipped ones."""
    seconds: float = 0.0
    converged: bool = False
    stopped: bool = False
    """Whether the solver has ended the run."""
    record_every: int = 10
    max_records: int = MAX_RECORDS
    """Records that the history holds at most."""
    history: list[Record] = field(default_factory=list)
    recent: float | Tensor = 0.0
    """Sum of the mean log-likelihoods of the steps since the last record, in working units."""
    recent_steps: float = 0
    """Steps since the last record, each counted by the mean weight of its rows."""
    pass_sum: float | Tensor = 0.0
    """Sum of the log-likelihoods of the rows of this pass, before each was learned, by their
    weights and in working units; on a stream, of the last batch."""
    pass_weight: float = 0.0
    """Sum of the weights of these rows."""
    scalars: Record = field(default_factory=dict)
    """The solver's own quantities after the last step."""
    held_out_scores: list[float] = field(default_factory=list)
    """Log-likelihoods of rows that the model has not learned, for the threshold of alerts."""
    best: Best | None = None
    """The best model that ``EarlyStopping`` has found so far."""
    whole_ranges: Tensor | None = None
    """Lowest and highest value of columns of whole numbers, (2, d), NaN elsewhere; None if
    unknown."""
    following: Following | None = None
    """How units follow a stream; None where all rows could be seen beforehand."""
    cached_search: tuple[int, int | str | None, CandidateSearch | None] = field(
        default=(-1, None, None), repr=False, compare=False
    )
    """The last search made for scoring, after its steps and wanted candidates; not saved."""
    unscored: tuple[Values, int] | None = field(default=None, repr=False, compare=False)
    """Training rows (m, d) whose held-out scores are predicted when they are needed first, and the
    number of all training rows; not saved."""

    @property
    def problem(self) -> Problem:
        """The problem that is solved, and for how long."""
        return self.plan.problem

    @property
    def batch_size(self) -> int:
        """Rows per batch."""
        assert self.problem.batch_size is not None
        return self.problem.batch_size

    @property
    def passes(self) -> int:
        """Passes over the data, of which the last may be incomplete."""
        return self.epoch + (self.batch > 0)

    @property
    def planned_steps(self) -> int:
        """Steps of all epochs; 0 for a stream."""
        return (self.problem.epochs or 0) * (self.problem.batches_per_epoch or 0)

    @property
    def finished(self) -> bool:
        """Whether nothing is left of the planned epochs."""
        return self.stopped or (
            self.problem.epochs is not None and self.epoch >= self.problem.epochs
        )

    @property
    def parameters(self) -> Parameters:
        """The mixture so far, in working units."""
        parameters: Parameters = self.state.mixture
        return parameters

    def search_candidates(self, wanted: int | str | None) -> CandidateSearch | None:
        """Return the search for few of many components; None to evaluate all components.

        ``wanted`` is the number of candidates, "auto" or None. A screen of the training is reused.
        "auto" evaluates all: a screen that training can afford may cost rows unlike the training
        data many nats, 4 at K = 400 and 13 at K = 1,600 on test images of FashionMNIST.
        """
        if not self.problem.communicator.has_all_components:
            return None
        parameters = self.parameters
        # Candidates are evaluated in the precision of training.
        if wanted in (None, "auto") or not rounding_error(parameters) < TOLERANCE:
            return None
        screen, few = getattr(self.state, "screen", None), min(int(wanted), len(parameters.means))
        if screen is not None and screen.active:
            return CandidateSearch(screen, few)
        if self.cached_search[:2] != (self.steps, wanted):
            self.cached_search = self.steps, wanted, CandidateSearch(make_screen(parameters), few)
        return self.cached_search[2]


def last_pass(run: Run) -> float:
    """Compute the mean log-likelihood of the last pass, or part of one, in data units."""
    return float(run.pass_sum) / (run.pass_weight or 1) - run.units.log_volume


def steps_per_record(planned_steps: int) -> int:
    """Choose how often a run goes into the history, so that a short one has a curve too.

    A stream (0) starts like a short run; ``record`` makes room when it grows long.
    """
    return max(1, min(MAX_STEPS_PER_RECORD, planned_steps // 100)) if planned_steps else 10


def record(run: Run, *, keep: bool) -> Record:
    """Describe where the run stands, and keep the record in the history.

    The log-likelihood is the mean over the steps since the last kept record, by the weights of
    their rows, in data units. The history stays bounded however long the run.
    """
    communicator = run.problem.communicator
    weights = communicator.components.gather_weights(run.state.logits)
    entry: Record = {
        "epoch": run.epoch + run.batch / (run.problem.batches_per_epoch or math.inf),
        "step": run.steps,
        "samples": run.samples,
        "seconds": round(run.seconds, 3),
        "log_likelihood": float(run.recent) / (run.recent_steps or 1) - run.units.log_volume,
        "components_in_use": components_in_use(weights),
        **run.scalars,
    }
    if not communicator.is_single:
        entry |= {"communication": communicator.seconds, "bytes_sent": communicator.bytes}
    if keep:
        run.history.append(entry)
        run.recent, run.recent_steps = 0.0, 0
        if len(run.history) > run.max_records:
            run.history[:] = run.history[1::2]
            run.record_every *= 2
    return entry


@dataclass
class Following:
    """The last rows of a stream, and when they are used again."""

    rows: Tensor
    """(n, d), float64, in units of the data, on the CPU."""
    weights: Tensor
    """(n,), weights of these rows."""
    scaling: Scaling
    max_precision: float | None
    """The caller's own bound, in units of the data."""
    next_look: int = 0
    """Rows of the stream after which units are chosen again."""

    @classmethod
    def begin(cls, sample: Batch, scaling: Scaling, max_precision: float | None) -> Following:
        """Follow a stream whose units were set by a sample of its first rows."""
        none = torch.empty(0, sample.rows.shape[1], dtype=torch.float64)
        return cls(none, none.new_empty(0), scaling, max_precision, 2 * len(sample))

    def keep(self, batch: Batch, most: int) -> None:
        """Add a batch to the last rows, of which at most ``most`` are kept."""
        weights = torch.ones(len(batch)) if batch.weights is None else batch.weights
        self.rows = torch.cat([self.rows, to_float64(batch.rows[-most:])])[-most:]
        self.weights = torch.cat([self.weights, to_float64(weights[-most:])])[-most:]


def adapt_to_stream(run: Run, batch: Batch) -> None:
    """Take note of a batch, in units of the data, and adapt units and bounds when it is time."""
    following = run.following
    if following is None:
        return
    most = min(KEPT_ROWS, max(1, KEPT_ELEMENTS // batch.rows.shape[1]))
    # Rows long before the next look would be dropped by then.
    if run.samples > following.next_look - most:
        following.keep(batch, most)
    if run.samples < following.next_look:
        return
    interval = run.samples
    forgetting = getattr(run.plan.solver, "forgetting", None)
    if forgetting:
        interval = min(interval, int(2 * run.batch_size / forgetting))
    following.next_look = run.samples + interval
    _adapt_units(run, following)
    following.rows, following.weights = following.rows[:0].clone(), following.weights[:0].clone()


def _adapt_units(run: Run, following: Following) -> None:
    columns = Columns(Batch(following.rows, following.weights))
    # Columns without a value among the last rows keep their units.
    shown = columns.observed
    try:
        units = Units.estimate(columns, following.scaling)
        old = run.units
        units = Units(
            torch.where(shown, units.offset, old.offset), torch.where(shown, units.scale, old.scale)
        )
        if _differ(run.units, units):
            _change_units(run, units)
        default = run.plan.solver.default_max_precision
        bound = run.units.bound(following.max_precision, default, columns)
    except InputError:
        # Equal rows have no scale.
        return
    bound = bound.to(run.state.bound).expand_as(run.state.bound)
    bound = torch.where(shown.to(bound.device), bound, run.state.bound)
    run.state.bound = run.problem.noise_model.pool_bound(bound)


def _differ(old: Units, new: Units) -> bool:
    """Return whether units are so far apart that a model should change them."""
    ratio = new.scale / old.scale
    shift = (new.offset - old.offset).abs() / torch.maximum(old.scale, new.scale)
    return bool(
        (ratio > UNITS_FACTOR).any()
        or (ratio * UNITS_FACTOR < 1).any()
        or (shift > UNITS_FACTOR).any()
    )


def _change_units(run: Run, units: Units) -> None:
    old, run.units = run.units, units
    change = Change((units.offset - old.offset) / old.scale, units.scale / old.scale)
    run.state = run.plan.change_units(run.state, change)
    means = run.problem.means
    if means is not None:
        means = (means - change.offset) / change.scale
        run.plan = run.plan.solver.plan(dataclasses.replace(run.problem, means=means))
    change_of_volume = units.log_volume - old.log_volume
    run.recent = run.recent + run.recent_steps * change_of_volume
    run.pass_sum = run.pass_sum + run.pass_weight * change_of_volume
