"""The training loop: from a source to a solver, with reports, interruption and resumption."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from factormix.core.parameters import Parameters
from factormix.data.batches import Batch, recut, used
from factormix.data.columns import precise
from factormix.data.sources import Rows, Share, Source, checked_blocks
from factormix.data.units import Units
from factormix.errors import InputError
from factormix.training.failures import in_one_sentence
from factormix.training.following import Following, follow
from factormix.training.interrupts import Interrupt, deferred_interrupt
from factormix.training.processes import Notice, Processes
from factormix.training.records import Record, record, steps_per_record
from factormix.training.searching import Remembered
from factormix.training.solvers.base import Info, Plan, Problem, add
from factormix.training.threads import team

__all__ = [
    "TICK_SECONDS",
    "Best",
    "Record",
    "Report",
    "Run",
    "contributed",
    "learn",
    "record",
    "reduced",
    "steps_per_record",
    "stream",
    "train",
]

TICK_SECONDS = 0.5

Report = Callable[[Record, bool], object]
"""Called with a record and whether it is the last one; ends the run by returning True."""


@dataclass
class Best:
    """The best model of a run by held-out rows, and for how long nothing was better."""

    state: Any
    """The solver's state."""
    score: float
    """Mean log-likelihood of the held-out rows."""
    epoch: float
    last_look: float
    """Epoch in which the held-out rows were last looked at."""
    waited: int = 0
    """Looks since the last gain."""


@dataclass
class Run:
    """Where a run stands: all that is needed to go on from here.

    Every field but the last is saved with a model; those after ``units`` hold numbers, texts, lists
    and dicts.
    """

    plan: Plan[Any]
    """What never changes: the solver's options and the problem."""
    state: Any
    """The solver's state, whole after every step."""
    units: Units
    fingerprint: str = ""
    """What tells the rows of a fit from others."""
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    steps: int = 0
    samples: int = 0
    position: int = 0
    """Rows of the stream that were taken, not counting any that were skipped."""
    seconds: float = 0.0
    converged: bool = False
    stopped: bool = False
    """Whether the solver has ended the run."""
    record_every: int = 10
    history: list[Record] = field(default_factory=list)
    recent: float | Tensor = 0.0
    """Sum of the mean log-likelihoods of the steps since the last record, in working units."""
    recent_steps: float = 0
    """Steps since the last record, each counted by the mean weight of its rows."""
    scalars: Record = field(default_factory=dict)
    """The solver's own quantities after the last step."""
    best: Best | None = None
    """What ``EarlyStopping`` has found so far."""
    following: Following | None = None
    """How units follow a stream; None where all rows could be seen beforehand."""
    remembered: Remembered = field(default_factory=Remembered, repr=False, compare=False)
    """What scoring has made of the mixture, to be used again; not saved."""

    @property
    def problem(self) -> Problem:
        """What is to be solved, and for how long."""
        return self.plan.problem

    @property
    def batch_size(self) -> int:
        """Rows per batch."""
        assert self.problem.batch_size is not None
        return self.problem.batch_size

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches of a pass; None for a stream."""
        return self.problem.batches_per_epoch

    @property
    def epochs(self) -> int | None:
        """Passes that are planned; None for a stream."""
        return self.problem.epochs

    @property
    def seed(self) -> int:
        """Seed of the initial values and of the order of the rows."""
        return self.problem.seed

    @property
    def planned_steps(self) -> int:
        """Steps of all epochs; 0 for a stream."""
        return (self.epochs or 0) * (self.batches_per_epoch or 0)

    @property
    def finished(self) -> bool:
        """Whether nothing is left of the planned epochs."""
        return self.stopped or (self.epochs is not None and self.epoch >= self.epochs)

    @property
    def parameters(self) -> Parameters:
        """The mixture so far, in working units."""
        parameters: Parameters = self.state.mixture
        return parameters


def train(
    run: Run,
    rows: Rows,
    report: Report = lambda record, last: None,
) -> None:
    """Take the steps of all epochs that are left.

    ``report`` is called about twice a second, whenever a record goes into the history, and at the
    end. An interrupt (Ctrl-C) waits for the end of the step under way, so that ``run`` is whole,
    and is then raised as KeyboardInterrupt; a second one does not wait. SIGTERM, where nobody else
    handles it, does the same and then ends the process.
    """
    if run.finished:
        return
    stopped, clock = False, _Clock()
    with deferred_interrupt() as interrupted, team():
        for info, notice in _steps(run, rows, interrupted, clock):
            now = time.monotonic()
            due = run.steps % run.record_every == 0
            if due or notice.tick:
                stopped = report(record(run, keep=due), False) is True
                clock.reported = now
            # One process among several may not end before the others know.
            ended = interrupted.is_set() if run.problem.processes.alone else notice.number
            if stopped or info.stop or ended:
                break
        # An interrupt adds nothing: resuming gives the history of an uninterrupted run.
        keep = stopped or run.finished
        report(record(run, keep=keep) if run.recent_steps else run.history[-1], True)
    interrupted.answer()


def stream(run: Run, source: Source) -> None:
    """Take one step per batch of rows in their order, as on a stream that has no end.

    An interrupt waits for the end of the step under way, as in ``train``.
    """
    begun = time.monotonic() - run.seconds
    with deferred_interrupt() as interrupted, team():
        size = run.batch_size
        for batch in recut(used(checked_blocks(source, size)), size):
            _check_reach(run, batch)
            learn(run, batch)
            follow(run, batch)
            run.seconds = time.monotonic() - begun
            if run.steps % run.record_every == 0:
                record(run, keep=True)
            if interrupted.is_set():
                break
    interrupted.answer()


def _check_reach(run: Run, batch: Batch) -> None:
    """Turn down rows of a stream so far out that a step on them would leave no numbers at all."""
    dtype = run.problem.dtype
    reach = (precise(batch.rows) - run.units.offset).div_(run.units.scale).abs_()
    reach = reach.nan_to_num_(0.0).amax(dim=1)
    wrong = (reach > torch.finfo(dtype).max ** 0.4).nonzero()
    if len(wrong):
        wider = " use dtype='float64'," if dtype == torch.float32 else ""
        raise InputError(
            f"row {run.samples + int(wrong[0])} of the stream (counting from 0) is"
            f" {float(reach.max()):.3g} times farther out than usual rows, too far for {dtype}:"
            f"{wider} remove the row or mend its value; the model has learned what came before."
        )


class _Clock:
    """When the last report was."""

    def __init__(self) -> None:
        self.reported = time.monotonic()


def _steps(
    run: Run, rows: Rows, interrupted: Interrupt, clock: _Clock
) -> Iterator[tuple[Info, Notice]]:
    """Take the steps that are left one by one, leaving ``run`` ready to go on after each.

    Each comes with what all processes know of it: one is told of an interrupt by any, and of the
    time since the last report by the first.
    """
    begun, processes = time.monotonic() - run.seconds, run.problem.processes

    def flags() -> tuple[int, bool]:
        return interrupted.number, time.monotonic() - clock.reported > TICK_SECONDS

    while not run.finished:
        for batch, mine in _announced(processes, _pass(run, rows), flags):
            info, notice = _step(run, batch, mine)
            run.batch += 1
            run.seconds = time.monotonic() - begun
            if processes.alone:
                # Nobody else has to be told first.
                notice = notice._replace(tick=flags()[1])
            elif notice.number:
                interrupted.request(notice.number)
            yield info, notice
        run.epoch, run.batch = run.epoch + 1, 0


def _announced(
    processes: Processes,
    batches: Iterator[tuple[Batch, Notice]],
    flags: Callable[[], tuple[int, bool]],
) -> Iterator[tuple[Batch, Notice]]:
    """Serve batches of which all processes are being told; what fails in one fails in all."""
    if processes.alone:
        yield from batches
        return
    while True:
        served, failure = None, None
        try:
            served = next(batches, None)
        except (InputError, OSError) as error:
            failure = error
        if served is None and failure is None:
            return
        batch, notice = served or (None, Notice(0, 1.0, 0.0))
        number, tick = flags()
        processes.announce(notice._replace(number=number, tick=tick), failure)
        if batch is None:
            processes.noticed(notice)
            return
        yield batch, notice


def _pass(run: Run, rows: Rows) -> Iterator[tuple[Batch, Notice]]:
    """Serve what is left of a pass in working units, with what is known of each batch.

    A batch that is all of the data is made once, for all passes: its order means nothing. Of
    several processes, each reads its share, or all rows while they are kept for seeding.
    """
    like, whole, data = (
        run.state.parameters.means,
        run.batches_per_epoch == 1,
        run.problem.processes.data,
    )
    epoch, complete = 0 if whole else run.epoch, getattr(rows, "complete", False)
    while True:
        shares = data.size > 1 and getattr(run.state, "seeded", True)
        served = Share(rows, data.place, data.size) if shares else rows
        for batch in served.shuffled(run.batch_size, seed=run.seed, epoch=epoch, start=run.batch):
            working = run.units.to_working(batch, like.device, like.dtype, complete=complete)
            notice = _notice(run, working, batch.mean_weight)
            if data.size > 1 and not shares:
                # All rows are here, and counted once among the shares.
                notice = notice._replace(n_rows=len(batch) if data.place == 0 else 0)
            yield working, notice
            while whole and run.epoch + 1 < (run.epochs or 0) and (shares or data.size == 1):
                run.epoch, run.batch = run.epoch + 1, 0
                yield working, notice
            if data.size > 1 and shares != getattr(run.state, "seeded", True):
                break
        else:
            return


def learn(run: Run, batch: Batch, *, complete: bool = False) -> Info:
    """Take one step on a batch in data units; NaN is not looked for if it is ``complete``."""
    like = run.state.parameters.means
    working = run.units.to_working(batch, like.device, like.dtype, complete=complete)
    return _step(run, working, _notice(run, working, batch.mean_weight))[0]


@torch.inference_mode()
def _step(run: Run, batch: Batch, notice: Notice) -> tuple[Info, Notice]:
    """Take one step on a batch of tensors in working units, or on a share of one.

    Return also what all processes know of it.
    """
    with in_one_sentence(run.steps + 1, run.problem.dtype):
        contribution = contributed(run, batch)
        notice = run.problem.processes.noticed(notice)
        contribution = reduced(run, contribution)
        run.state, info = run.plan.update(run.state, contribution)
    run.steps += 1
    run.samples += notice.n_rows
    run.converged = info.converged
    run.stopped = info.stop
    # Left on the device: reading it would make every step wait.
    likelihood = info.log_likelihood + notice.volume
    run.recent = likelihood * notice.mean_weight + run.recent
    run.recent_steps += notice.mean_weight
    run.scalars = dict(info.scalars)
    return info, notice


def _notice(run: Run, batch: Batch, mean_weight: float) -> Notice:
    """Tell what a batch in working units counts for."""
    # A share of fewer rows than there are processes may be a row without weight.
    n_rows = len(batch) if mean_weight > 0 else 0
    return Notice(n_rows, mean_weight, _missing_volume(run, batch))


def _missing_volume(run: Run, batch: Batch) -> float | Tensor:
    """Compute the mean volume of units that the rows of a batch do not have, for ``record``."""
    if batch.missing is None:
        return 0.0
    volumes, (_, weights) = run.units.missing_volume(batch.missing), batch.tensors()
    if weights is None:
        return volumes.mean()
    share = weights.to(volumes) / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
    return share @ volumes


def contributed(run: Run, batch: Batch) -> Any:
    """Compute what a batch of tensors tells the solver; a large one in parts, at the same time."""
    K, d, l = run.state.parameters.shape
    # The products of the batch with E, E mu and Gamma, and those of the statistics again.
    work = 2 * len(batch) * d * K * (l + 2) if run.problem.device.type == "cpu" else 0
    with team() as threads:
        if run.problem.processes.divided:
            # Rows wait for what other processes say of them, all at once.
            with threads.as_one():
                return run.plan.contribution(run.state, batch)
        parts = [batch.take(rows) for rows in threads.cut(len(batch), work)]
        told = threads.each(partial(run.plan.contribution, run.state), parts)
        return reduce(add, told)


def reduced(run: Run, contribution: Any) -> Any:
    """Return what all processes contribute to a step, each by its share of the batch.

    Contributions are sums over samples, so that they are added before anything is updated, but for
    sums of components where the plan steps them in parts.
    """

    def finished(parts: Any) -> Any:
        return parts.finished(run.state.parameters)

    processes, here = run.problem.processes, len(run.state.parameters.means)
    return processes.summed(contribution, here, finished, in_parts=run.plan.in_parts)
