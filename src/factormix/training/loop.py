"""The training loop: from a source to a solver, with reports, interruption and resumption."""

from __future__ import annotations

import math
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
from factormix.data.units import Units, as_tensor
from factormix.errors import InputError, first_line
from factormix.training.distributed.communicator import Notice
from factormix.training.evaluation import FARTHEST
from factormix.training.run import Record, Run, adapt_to_stream, record
from factormix.training.solvers.base import Info, add
from factormix.training.threads import use_threads

REPORT_SECONDS = 0.5
"""Default time between two reports: often enough for a progress bar."""

Report = Callable[[Record, bool], object]
"""Called with a record and whether it is the last one; ends the run by returning True."""


def train(
    run: Run,
    rows: Rows,
    report: Report = lambda record, last: None,
    report_seconds: float = REPORT_SECONDS,
) -> None:
    """Take the steps of all epochs that are left.

    ``report`` is called every ``report_seconds``, whenever a record goes into the history, and at
    the end. An interrupt (Ctrl-C) waits for the end of the step under way, so that ``run`` is
    complete, and is then raised as KeyboardInterrupt; a second one does not wait. SIGTERM does the
    same and then ends the process, unless the program handles it.
    """
    if run.finished:
        return
    stopped, reported = False, time.monotonic()

    def is_report_due() -> bool:
        return time.monotonic() - reported >= report_seconds

    with defer_interrupts() as interrupt, use_threads():
        for info, notice in _take_steps(run, rows, interrupt, is_report_due):
            now = time.monotonic()
            due = run.steps % run.record_every == 0
            if due or notice.report:
                stopped = report(record(run, keep=due), False) is True
                reported = now
            # One rank among several may not end before the others know.
            single = run.problem.communicator.is_single
            if stopped or info.stop or (interrupt.number if single else notice.signal):
                break
        # An interrupt adds nothing, so resuming gives the history of an uninterrupted run.
        keep = stopped or run.finished
        report(record(run, keep=keep) if run.recent_steps else run.history[-1], True)
    interrupt.answer()


def train_on_stream(run: Run, source: Source) -> None:
    """Take one step per batch of rows in their order, as on a stream without end.

    An interrupt waits for the end of the step under way, as in ``train``.
    """
    started = time.monotonic() - run.seconds
    with defer_interrupts() as interrupt, use_threads():
        size = run.batch_size
        for batch in rebatch(drop_zero_weights(ensure_finite_blocks(source, size)), size):
            _check_reach(run, batch)
            learn(run, batch)
            adapt_to_stream(run, batch)
            run.seconds = time.monotonic() - started
            if run.steps % run.record_every == 0:
                record(run, keep=True)
            if interrupt.number:
                break
    interrupt.answer()


def learn(run: Run, batch: Batch, *, complete: bool = False) -> Info:
    """Take one step on a batch in data units; ``complete`` skips the search for NaN."""
    like = run.state.parameters.means
    working = run.units.to_working(batch, like.device, like.dtype, complete=complete)
    return _take_step(run, working, _describe(run, working, batch.mean_weight))[0]


def _check_reach(run: Run, batch: Batch) -> None:
    """Reject rows of a stream so far out that a step on them would overflow."""
    dtype = run.problem.dtype
    wrong, reach = find_far(run.units, batch, dtype)
    if len(wrong):
        wider = " use dtype='float64'," if dtype == torch.float32 else ""
        raise InputError(
            f"row {run.samples + int(wrong[0, 0])} of the stream (counting from 0) is"
            f" {float(reach.max()):.3g} times farther out than usual rows, too far for {dtype}:"
            f"{wider} remove the row or correct its value; the model has learned the rows before."
        )


def find_far(units: Units, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Find the entries of rows (n, d) that lie too far out for a step in a dtype.

    Return their rows and columns, (m, 2), and, where there are any, the distances of all entries
    from zero in working units, (n, d); 0 for missing entries.
    """
    values = as_tensor(batch.rows)
    # The square of max^0.4 leaves max^0.2 for precisions and sums, 5e7 in float32; and float64 must
    # hold the scores.
    most = min(math.pow(torch.finfo(dtype).max, 0.4), FARTHEST[torch.float64])
    # The least and the largest value of each column say enough about nearly every batch.
    for found in (torch.stack([values.amin(dim=0), values.amax(dim=0)]), values):
        reach = (to_float64(found) - units.offset).div_(units.scale).abs_()
        if not (reach > most).any() and not reach.isnan().any():
            break
    reach = reach.nan_to_num_(0.0, posinf=math.inf)
    return (reach > most).nonzero(), reach


def _take_steps(
    run: Run, rows: Rows, interrupt: Interrupt, is_report_due: Callable[[], bool]
) -> Iterator[tuple[Info, Notice]]:
    """Take the steps that are left one by one, leaving ``run`` ready to go on after each.

    Each comes with a notice that all ranks share: an interrupt of any rank, and the first rank's
    clock.
    """
    started, communicator = time.monotonic() - run.seconds, run.problem.communicator
    while not run.finished:
        batches = _serve_epoch(run, rows)
        if not communicator.is_single:
            batches = _announce_batches(run, batches, interrupt, is_report_due)
        for batch, own in batches:
            info, notice = _take_step(run, batch, own)
            run.batch += 1
            run.seconds = time.monotonic() - started
            if communicator.is_single:
                notice = notice._replace(report=is_report_due())
            elif notice.signal:
                interrupt.number = notice.signal
            yield info, notice
        run.epoch, run.batch = run.epoch + 1, 0


def _announce_batches(
    run: Run,
    batches: Iterator[tuple[Batch, Notice]],
    interrupt: Interrupt,
    is_report_due: Callable[[], bool],
) -> Iterator[tuple[Batch, Notice]]:
    """Announce each batch to all ranks and serve it; a failure on one rank fails on all."""
    communicator = run.problem.communicator
    while True:
        served, failure = None, None
        try:
            served = next(batches, None)
        except (InputError, OSError) as error:
            failure = error
        if served is None and failure is None:
            return
        batch, notice = served or (None, Notice(0, 1.0, 0.0))
        notice = notice._replace(signal=interrupt.number, report=is_report_due())
        communicator.announce(notice, failure)
        if batch is None:
            communicator.receive_notice(notice)
            return
        yield batch, notice


def _serve_epoch(run: Run, rows: Rows) -> Iterator[tuple[Batch, Notice]]:
    """Serve the rest of an epoch in working units, with a notice of each batch.

    A batch of all the data is made once for all epochs: its order does not matter. With several
    ranks, each reads its shard, or all rows while they are kept for seeding.
    """
    problem, like = run.problem, run.state.parameters.means
    data, whole = problem.communicator.data, problem.batches_per_epoch == 1
    epoch, complete = 0 if whole else run.epoch, getattr(rows, "complete", False)
    while True:
        sharded = data.size > 1 and getattr(run.state, "seeded", True)
        served = BatchShard(rows, data.rank, data.size) if sharded else rows
        for batch in served.shuffled(
            run.batch_size, seed=problem.seed, epoch=epoch, start=run.batch
        ):
            working = run.units.to_working(batch, like.device, like.dtype, complete=complete)
            notice = _describe(run, working, batch.mean_weight)
            if data.size > 1 and not sharded:
                # Every rank has all rows: they are counted on the first one.
                notice = notice._replace(n_rows=len(batch) if data.rank == 0 else 0)
            yield working, notice
            while whole and run.epoch + 1 < (problem.epochs or 0) and (sharded or data.size == 1):
                run.epoch, run.batch = run.epoch + 1, 0
                yield working, notice
            if data.size > 1 and sharded != getattr(run.state, "seeded", True):
                break
        else:
            return


@torch.inference_mode()
def _take_step(run: Run, batch: Batch, notice: Notice) -> tuple[Info, Notice]:
    """Take one step on a batch of tensors in working units, or on a shard of one.

    Also return the notice of the whole batch.
    """
    communicator = run.problem.communicator
    try:
        contribution = _compute_contribution(run, batch)
        notice = communicator.receive_notice(notice)
        contribution = communicator.reduce(
            contribution, run.state.parameters, by_owner=run.plan.steps_by_owner
        )
        run.state, info = run.plan.update(run.state, contribution)
    except RuntimeError as error:
        # From torch, such as a failed factorisation.
        wider = "" if run.problem.dtype == torch.float64 else "dtype='float64', "
        raise InputError(
            f"step {run.steps + 1} of the training failed ({first_line(error)}): try {wider}"
            "scaling='feature', fewer components, or a lower max_precision."
        ) from error
    run.steps += 1
    run.samples += notice.n_rows
    run.converged = info.converged
    run.stopped = info.stop
    # Left on the device: reading it would make every step wait.
    likelihood = info.log_likelihood + notice.volume
    run.recent = likelihood * notice.mean_weight + run.recent
    run.recent_steps += notice.mean_weight
    if run.batch == 0:
        run.pass_sum, run.pass_weight = 0.0, 0.0
    weight = notice.mean_weight * notice.n_rows
    run.pass_sum = likelihood * weight + run.pass_sum
    run.pass_weight += weight
    run.scalars = dict(info.scalars)
    return info, notice


def _compute_contribution(run: Run, batch: Batch) -> Any:
    """Compute the contribution of a batch of tensors; a large one in parts at the same time."""
    K, d, l = run.state.parameters.shape
    # The products of the batch with E, E mu and Gamma, and the same again for the statistics.
    work = 2 * len(batch) * d * K * (l + 2) if run.problem.device.type == "cpu" else 0
    with use_threads() as threads:
        if not run.problem.communicator.has_all_components:
            # All rows wait at once for the summaries of other ranks.
            with threads.lend_to_torch():
                return run.plan.contribution(run.state, batch)
        parts = threads.cut_rows(len(batch), work)
        if len(parts) == 1:
            return run.plan.contribution(run.state, batch)
        contribute = partial(run.plan.contribution, run.state)
        return reduce(add, threads.map(contribute, [batch.take(rows) for rows in parts]))


def _describe(run: Run, batch: Batch, mean_weight: float) -> Notice:
    """Return the notice of a batch in working units."""
    volume: float | Tensor = 0.0
    if batch.missing is not None:
        volumes, (_, weights) = run.units.missing_volume(batch.missing), batch.tensors()
        if weights is None:
            volume = volumes.mean()
        else:
            least = torch.finfo(weights.dtype).tiny
            volume = (weights.to(volumes) / weights.sum().clamp(min=least)) @ volumes
    # With fewer rows than there are ranks, a shard may be a row without weight.
    return Notice(len(batch) if mean_weight > 0 else 0, mean_weight, volume)


class Interrupt:
    """A request for the end of a run."""

    number = 0
    """The number of the signal that asked for it, or 0."""

    def answer(self) -> None:
        """Raise KeyboardInterrupt or end the process, if a signal came."""
        if self.number == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if self.number:
            raise KeyboardInterrupt


@contextmanager
def defer_interrupts() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C into a request; a second one interrupts at once.

    SIGTERM, by which clusters announce that a process has to end, is handled the same way unless
    the program handles it itself.
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
        requested.number = number
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, request)
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
