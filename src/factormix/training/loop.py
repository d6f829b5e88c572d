"""The training loop: from a source to a solver, with reports, interruption and resumption."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from factormix.data.batches import Batch, drop_zero_weights, rebatch
from factormix.data.checks import ensure_finite_blocks
from factormix.data.columns import to_float64
from factormix.data.sources.base import BatchShard, Rows, Source
from factormix.errors import InputError
from factormix.training.distributed.processes import Notice, Processes
from factormix.training.run import Record, Run, follow, record
from factormix.training.solvers.base import Info, add
from factormix.training.threads import use_threads

TICK_SECONDS = 0.5

Report = Callable[[Record, bool], object]
"""Called with a record and whether it is the last one; ends the run by returning True."""


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
    with deferred_interrupt() as interrupted, use_threads():
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
    with deferred_interrupt() as interrupted, use_threads():
        size = run.batch_size
        for batch in rebatch(drop_zero_weights(ensure_finite_blocks(source, size)), size):
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
    reach = (to_float64(batch.rows) - run.units.offset).div_(run.units.scale).abs_()
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
        served = BatchShard(rows, data.place, data.size) if shares else rows
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
    with use_threads() as threads:
        if run.problem.processes.divided:
            # Rows wait for what other processes say of them, all at once.
            with threads.lend_to_torch():
                return run.plan.contribution(run.state, batch)
        parts = [batch.take(rows) for rows in threads.cut_rows(len(batch), work)]
        told = threads.map(partial(run.plan.contribution, run.state), parts)
        return reduce(add, told)


def reduced(run: Run, contribution: Any) -> Any:
    """Return what all processes contribute to a step, each by its share of the batch.

    Contributions are sums over samples, so that they are added before anything is updated, but for
    sums of components where the plan steps them in parts.
    """

    processes, parameters = run.problem.processes, run.state.parameters
    return processes.summed(contribution, parameters, in_parts=run.plan.in_parts)


@contextmanager
def in_one_sentence(step: int, dtype: torch.dtype) -> Iterator[None]:
    """Turn what torch raises in a step, such as a factorisation that failed, into an InputError."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).splitlines()
        reason = text[0].rstrip(". ") if text else type(error).__name__
        wider = "" if dtype == torch.float64 else "dtype='float64', "
        raise InputError(
            f"step {step} of the training failed ({reason}): try {wider}scaling='feature', fewer"
            " components, or a lower max_precision."
        ) from error


class Interrupt:
    """Tell whether somebody has asked for the end of a run, and answer when it has ended."""

    def __init__(self) -> None:
        self._number: int | None = None

    def is_set(self) -> bool:
        """Tell whether the end was asked for."""
        return self._number is not None

    @property
    def number(self) -> int:
        """The number of the signal that asked for it, or 0."""
        return self._number or 0

    def request(self, number: int) -> None:
        """Ask for the end by the number of a signal."""
        self._number = number

    def answer(self) -> None:
        """Do what the signal asked for, if one came: KeyboardInterrupt, or the process ends."""
        if self._number == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if self._number is not None:
            raise KeyboardInterrupt


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C into a flag; a second one interrupts at once.

    SIGTERM, by which clusters announce that a process has to go, is taken the same way unless the
    program handles it itself.
    """
    requested = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if before[signal.SIGINT] in (None, signal.SIG_IGN):
        del before[signal.SIGINT]
    if before[signal.SIGTERM] is not signal.SIG_DFL:
        del before[signal.SIGTERM]

    def request(number: int, frame: object) -> None:
        requested.request(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, request)
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
