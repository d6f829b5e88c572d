"""Where a run stands: the records of its history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from factormix.core.usage import components_in_use
from factormix.training.placement import weights_of

if TYPE_CHECKING:
    from factormix.training.loop import Run

__all__ = ["Record", "record", "steps_per_record"]

MAX_RECORDS = 2000
MAX_STEPS_PER_RECORD = 100

Record = dict[str, float]


def steps_per_record(planned_steps: int) -> int:
    """Choose how often a run goes into the history, so that a short one has a curve too.

    A stream (0) starts like a short run; ``record`` makes room when it grows long.
    """
    return max(1, min(MAX_STEPS_PER_RECORD, planned_steps // 100)) if planned_steps else 10


def record(run: Run, *, keep: bool) -> Record:
    """Describe where the run stands, and keep it in the history.

    The log-likelihood is the mean over the steps since the last record that was kept, by the
    weights of their rows, in data units. The history stays bounded however long the run: half of
    it goes when it is full.
    """
    entry: Record = {
        "epoch": run.epoch + (run.batch / run.batches_per_epoch if run.batches_per_epoch else 0),
        "step": run.steps,
        "samples": run.samples,
        "seconds": round(run.seconds, 3),
        "log_likelihood": float(run.recent) / (run.recent_steps or 1) - run.units.log_volume,
        "components_in_use": components_in_use(weights_of(run.problem.processes, run.state.logits)),
        **run.scalars,
    }
    processes = run.problem.processes
    if not processes.alone:
        entry |= {"communication": processes.seconds, "bytes_sent": processes.bytes}
    if keep:
        run.history.append(entry)
        run.recent, run.recent_steps = 0.0, 0
        if len(run.history) > MAX_RECORDS:
            run.history[:] = run.history[1::2]
            run.record_every *= 2
    return entry
