"""What mixtures that are to be compared have in common: units and bounds of their training.

A run of a mixture from the estimator's side: how it begins, with whom, and who watches it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from factormix.data.batches import Batch
from factormix.data.checks import (
    add_observed_rows,
    ensure_finite_rows,
    hash_weights,
    normalize_weights,
    unobserved_column_error,
)
from factormix.data.columns import Columns
from factormix.data.features import Features
from factormix.data.sources.base import Rows, Source, count_weighted_rows
from factormix.data.units import Units
from factormix.errors import InputError
from factormix.estimators.validation import (
    Array,
    check_device,
    check_dtype,
    check_enough,
    check_options,
    check_rows,
    check_seed,
    factors_for,
    trained_features,
    weighed,
)
from factormix.training.callbacks import Progress, ProgressBar
from factormix.training.distributed.components import settle
from factormix.training.distributed.mesh import local_device, processes_for
from factormix.training.distributed.processes import ALONE, Processes
from factormix.training.loop import train
from factormix.training.run import Record, Run, steps_per_record
from factormix.training.serialization import cut_run
from factormix.training.solvers import Problem, resolve
from factormix.training.solvers.scales import no_gaps

if TYPE_CHECKING:
    from factormix.estimators.mfa import MFA
if TYPE_CHECKING:
    from factormix.estimators.mfa import MFA

__all__ = [
    "SCALE_ROWS",
    "Prepared",
    "Shared",
    "begun",
    "check_first_columns",
    "check_same_rows",
    "draw_sample",
    "fingerprint",
    "prepared",
    "processes_of",
    "resumed",
    "trained",
    "with_every_column",
]

SCALE_ROWS = 4096
"""Rows that set the working units: enough for a scale, few enough to read before training."""


@dataclass(frozen=True)
class Shared:
    """Working units, and the bound on E in them."""

    units: Units
    bound: Tensor
    """(d,)."""

    @classmethod
    def estimate(cls, model: MFA, sample: Batch, max_precision: float | None = None) -> Self:
        """Choose units and bound by the options of a model, from a sample of rows (n, d).

        Where the model has no bound, ``max_precision`` times the spread of a feature is the most,
        or what the solver says.
        """
        units = Units.estimate(sample, model.scaling)
        default = max_precision or resolve(model.solver).default_max_precision
        return cls(units, units.bound(model.max_precision, default, sample))

    @classmethod
    def of(cls, run: Run) -> Self:
        """Return what a run has."""
        bound = run.problem.max_precision
        assert bound is not None
        return cls(run.units, bound)


def draw_sample(rows: Rows, seed: int) -> Batch:
    """Draw the rows that set the working units."""
    return next(rows.shuffled(min(SCALE_ROWS, count_weighted_rows(rows)), seed=seed, epoch=0))


def check_first_columns(source: Source, first: Batch) -> None:
    """Check that every column has a value in the first rows of a stream, which set its units."""
    lacking = (~Columns(first).observed).nonzero()
    if len(lacking):
        raise unobserved_column_error(source, int(lacking[0]))


def with_every_column(rows: Rows, sample: Batch) -> Batch:
    """Return a sample of rows in which every column has a value, or say which has none."""
    return sample if getattr(rows, "complete", False) else add_observed_rows(rows, sample)


def fingerprint(rows: Rows, sample: Batch) -> str:
    """Identify rows by their number, a hash of a sample of them, and a hash of their weights."""
    content = torch.as_tensor(sample.rows[:256]).detach().cpu().contiguous().numpy().tobytes()
    parts, weights = (
        [str(rows.n_rows), hashlib.sha256(content).hexdigest()],
        getattr(rows, "weights", None),
    )
    return " ".join(parts if weights is None else [*parts, hash_weights(weights)])


class Prepared(NamedTuple):
    """What a fit knows before its first step."""

    rows: Rows | None
    """None for a stream."""
    shared: Shared
    seed: int
    batch_size: int
    batches_per_epoch: int | None = None
    epochs: int | None = None
    fingerprint: str = ""
    """What tells the rows from others."""


def processes_of(model: MFA, X: Array | Source) -> Processes:
    """Find the processes that a model is to be trained by, of which this is one."""
    check_options(model)
    return processes_for(model.mesh, _device(model, X))


def prepared(model: MFA, rows: Rows, shared: Shared | None, processes: Processes) -> Prepared:
    """Check rows and options, and choose all that a run needs; the same in every process."""
    rows, n_rows, seed = processes.together(lambda: _checked(model, rows))
    solver, seed = resolve(model.solver), processes.same(seed)
    batch_size = min(int(model.batch_size or solver.default_batch_size(n_rows)), n_rows)
    per_epoch = math.ceil(n_rows / batch_size)
    epochs = int(model.max_epochs or solver.default_epochs(per_epoch))
    sample = processes.together(lambda: draw_sample(rows, seed))
    mark = fingerprint(rows, sample)
    check_same_rows(processes, mark)
    if shared is None:
        shared = processes.together(lambda: Shared.estimate(model, with_every_column(rows, sample)))
    if not processes.alone:
        units = shared.units
        offset, scale, bound = processes.same_tensors([units.offset, units.scale, shared.bound])
        shared = Shared(Units(offset, scale), bound)
    return Prepared(rows, shared, seed, batch_size, per_epoch, epochs, mark)


def _checked(model: MFA, rows: Rows) -> tuple[Rows, int, int]:
    """Return checked rows, how many of them have a weight, and a seed."""
    check_options(model)
    rows = weighed(rows, normalize_weights)
    n_rows = count_weighted_rows(rows)
    factors_for(model.n_factors, rows.n_features)
    check_enough(rows, n_rows, model.n_components)
    rows = ensure_finite_rows(rows)
    if getattr(resolve(model.solver), "scales", 1) > 1 and getattr(rows, "complete", True) is False:
        raise no_gaps()
    return rows, n_rows, check_seed(model.random_state)


def resumed(model: MFA, X: Array | Rows, sample_weight: Array | None) -> Rows:
    """Let a run go on, by the processes of its estimator; return its rows."""
    run = model._run
    processes = run.problem.processes if run.problem.processes.divided else processes_of(model, X)
    rows = processes.together(lambda: ensure_finite_rows(check_rows(model, X, sample_weight)))
    processes.check_same(
        (run.steps, run.fingerprint),
        "the processes of this run have loaded different models: give all of them the same file.",
    )
    found = fingerprint(rows, processes.together(lambda: draw_sample(rows, run.seed)))
    check_same_rows(processes, found)
    if run.epochs is not None and run.fingerprint.split()[2:] != found.split()[2:]:
        raise InputError(
            "resume goes on with an interrupted fit, and sample_weight is not what that fit was"
            " given: give the same weights, or none if there were none."
        )
    if run.epochs is None or run.fingerprint != found:
        raise InputError(
            "resume goes on with an interrupted fit on the same rows, and this model was not"
            f" trained by fit on these {rows.n_rows} rows: use fit or partial_fit."
        )
    if not processes.alone and run.problem.processes.alone:
        if processes.divided:
            divide(processes, run.plan.solver.name, len(run.parameters.means))
        _join(run, processes)
        cut_run(run)
    return rows


def check_same_rows(processes: Processes, fingerprint: str) -> None:
    """Check that all processes have been given the same rows."""
    processes.check_same(
        fingerprint,
        "the processes of this run were given different rows: give each of them all rows, in the"
        " same order, and it takes its own share of every batch.",
    )


def begun(
    model: MFA,
    X: Array | Source,
    features: Features,
    start: Prepared,
    processes: Processes = ALONE,
) -> Run:
    """Begin a run with a random model."""
    problem = Problem(
        n_components=int(model.n_components),
        n_features=features.count,
        n_factors=factors_for(model.n_factors, features.count),
        max_precision=start.shared.bound,
        seed=start.seed,
        device=local_device(_device(model, X)),
        dtype=check_dtype(model.dtype),
        batches_per_epoch=start.batches_per_epoch,
        epochs=start.epochs,
        batch_size=start.batch_size,
        n_init=int(model.n_init),
        candidates=_plain_candidates(model.candidates),
        processes=processes,
    )
    if processes.divided:
        divide(processes, resolve(model.solver).name, problem.n_components)
    plan = resolve(model.solver).plan(problem)
    run = Run(plan, plan.init(), start.shared.units, fingerprint=start.fingerprint)
    run.record_every = steps_per_record(run.planned_steps)
    return run


def divide(processes: Processes, solver: str, n_components: int) -> None:
    """Divide components among processes, where the solver can."""
    if solver not in ("natural", "em"):
        raise InputError(
            f"the solver {solver!r} cannot have its components divided among processes: use"
            " mesh='data', or the solver 'natural'."
        )
    settle(processes, n_components)


def trained(model: MFA, run: Run, rows: Rows) -> None:
    """Take all steps that are left of a run, watched by the callbacks of its estimator."""
    processes = run.problem.processes
    bar = [ProgressBar(run.steps)] if model.verbose and processes.first else []
    watchers: list[Callable[[Progress], object]] = [*bar, *model.callbacks]
    features, begun_at = trained_features(model), run.steps

    def report(entry: Record, last: bool) -> bool:
        progress = Progress(model, entry, run, features, last, begun_at)
        return processes.any_of(lambda: _watched(watchers, progress, processes))

    try:
        train(run, rows, report)
    finally:
        for shown in bar:
            shown.close()
        if not processes.alone and not processes.divided:
            # Every process has the whole model, and whatever follows is its own affair.
            _join(run, ALONE)
    if processes.any(not all(torch.isfinite(t).all() for t in run.parameters)):
        raise InputError(
            f"training ended with numbers that are not finite: {model.dtype} cannot hold rows so"
            " far apart; use dtype='float64', or remove the rows that are farthest out."
        )


def _watched(
    watchers: Sequence[Callable[[Progress], object]], progress: Progress, processes: Processes
) -> bool:
    """Call the callbacks, most of them in the first process alone; return whether any says stop."""
    answers = list[Any]()
    for watcher in watchers:
        if getattr(watcher, "every_process", False):
            answers.append(watcher(progress))
        elif processes.first:
            with processes.only_first():
                answers.append(watcher(progress))
    return True in answers


def _join(run: Run, processes: Processes) -> None:
    """Let processes go on with a run together, or let this one go on alone."""
    run.plan = run.plan.solver.plan(dataclasses.replace(run.problem, processes=processes))


def _device(model: MFA, X: Any) -> torch.device:
    """Return where a model is to be trained: on its device, or on that of a tensor."""
    return check_device(
        X.device if model.device is None and isinstance(X, Tensor) else model.device
    )


def _plain_candidates(candidates: int | str | None) -> int | str | None:
    """Return the option in the types that a file can hold."""
    return candidates if candidates is None or candidates == "auto" else int(candidates)
