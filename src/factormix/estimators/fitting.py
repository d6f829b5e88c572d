"""The steps of a fit: prepare rows and scale, start a run, train it, resume it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import numbers
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from joblib import effective_n_jobs
from torch import Tensor

from factormix.core.parameters import is_definite
from factormix.data.batches import Batch
from factormix.data.checks import (
    add_observed_rows,
    check_absolute_weights,
    ensure_finite_rows,
    normalize_weights,
    unobserved_column_error,
)
from factormix.data.columns import Columns, find_whole_ranges
from factormix.data.sources.base import Rows, Source, count_weighted_rows
from factormix.data.sources.streams import PeekedSource
from factormix.data.units import Units
from factormix.errors import InputError
from factormix.estimators.validation import (
    Array,
    Options,
    check_enough,
    check_enough_for_scale,
    check_options,
    check_rows,
    check_seed,
    count_components,
    fitted_features,
    weigh_rows,
)
from factormix.training.callbacks import Progress, ProgressBar, draw_bar
from factormix.training.distributed.communicator import SINGLE, Communicator
from factormix.training.distributed.mesh import join_mesh, local_device
from factormix.training.loop import REPORT_SECONDS, find_far, train
from factormix.training.run import Following, Record, Run, steps_per_record
from factormix.training.serialization import cut_run, view_bytes
from factormix.training.solvers import Problem
from factormix.training.solvers.covariance import refuse_gaps
from factormix.training.threads import use_threads

if TYPE_CHECKING:
    from tqdm.auto import tqdm

Item = TypeVar("Item")
T = TypeVar("T")

SCALE_ROWS = 4096
"""Rows that set the working units: a deviation of 4,096 normal values has an error of
1 / sqrt(2 * 4096) = 1.1%, and they are few enough to read before training."""


@dataclass(frozen=True)
class WorkingScale:
    """The units in which a mixture is trained, and the bound on E in these units.

    Mixtures whose densities are compared share one scale.
    """

    units: Units
    bound: Tensor
    """(d,)."""

    @classmethod
    def estimate(cls, options: Options, sample: Batch, max_precision: float | None = None) -> Self:
        """Choose units and bound by the options of a mixture, from a sample of rows (n, d).

        Without ``options.max_precision``, the bound of a feature is ``max_precision`` over its
        variance, or the default of the solver.
        """
        columns = Columns(sample)
        units = Units.estimate(columns, options.scaling)
        default = max_precision or options.solver.default_max_precision
        bound = units.bound(options.max_precision, default, columns)
        # Float64 has to hold the bound in units of the data, and its inverse.
        largest = -math.log(torch.finfo(torch.float64).tiny)
        wrong = (~(bound.log() - 2 * units.scale.log() < largest)).nonzero()
        if len(wrong):
            raise InputError(
                f"the values of X in column {int(wrong[0, 0])} (counting from 0) are so small that"
                " the inverse of their variance overflows: multiply X by a constant."
            )
        return cls(units, bound)

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """Return the scale of a run."""
        bound = run.problem.max_precision
        assert bound is not None
        return cls(run.units, bound)

    def broadcast(self, communicator: Communicator) -> WorkingScale:
        """Return the scale of the first process, in every process."""
        units = self.units
        offset, scale, bound = communicator.broadcast_tensors(
            [units.offset, units.scale, self.bound]
        )
        return WorkingScale(Units(offset, scale), bound)


def _check_reach(options: Options, scale: WorkingScale, sample: Batch) -> None:
    """Reject rows so far out that a step on them, or their score, would overflow."""
    wrong, reach = find_far(scale.units, sample, options.dtype)
    if len(wrong):
        row, column = wrong[0].tolist()
        wider = "use dtype='float64', " if options.dtype == torch.float32 else ""
        scaled = "use scaling='feature', " if options.scaling is None else ""
        raise InputError(
            f"X has the value {float(sample.rows[row, column]):.3g} in column {column} (counting"
            f" from 0), {float(reach[row, column]):.3g} times farther out than the scale of the"
            f" training, too far for {options.dtype}: {wider}{scaled}remove its row, or correct"
            " the value."
        )


def start_fit(
    options: Options,
    device: torch.device,
    rows: Rows,
    scale: WorkingScale | None,
    communicator: Communicator,
) -> tuple[Rows, Batch, Run]:
    """Check rows, and start a run with a scale, sizes and a seed that are equal in every process.

    Return the checked rows, a sample of them, and the run. Without ``scale``, the sample sets the
    working units.
    """
    rows, n_rows, seed = communicator.run_together(lambda: _check_training_rows(options, rows))
    seed = communicator.broadcast(seed)
    K = count_components(options, n_rows)
    batch_size, per_epoch, epochs = _choose_length(options, n_rows)
    sample, fingerprint = _identify_rows(communicator, rows, seed)
    if scale is None:
        scale = communicator.run_together(
            lambda: WorkingScale.estimate(options, cover_columns(rows, sample))
        )
    if not communicator.is_single:
        scale = scale.broadcast(communicator)
    communicator.run_together(lambda: _check_reach(options, scale, sample))
    length = {"batches_per_epoch": per_epoch, "epochs": int(epochs), "batch_size": batch_size}
    run = communicator.run_together(
        lambda: _start_run(options, device, scale, communicator, K, seed=seed, **length)
    )
    run.fingerprint = fingerprint
    run.whole_ranges = find_whole_ranges(sample.rows)
    return rows, sample, run


def _check_training_rows(options: Options, rows: Rows) -> tuple[Rows, int, int]:
    """Return checked rows, the number of them with a positive weight, and a seed."""
    rows = weigh_rows(rows, normalize_weights)
    n_rows = count_weighted_rows(rows)
    options.count_factors(rows.n_features)
    check_enough(rows, n_rows, count_components(options, n_rows))
    rows = ensure_finite_rows(rows)
    if options.scales > 1 and getattr(rows, "complete", True) is False:
        raise refuse_gaps()
    return rows, n_rows, check_seed(options.random_state)


def start_stream(
    options: Options, device: torch.device, source: Source, scale: WorkingScale | None
) -> tuple[Source, Run]:
    """Read the first rows of a source, and start a run with a scale and sizes from them.

    Return a source that serves all rows, and the run. A given ``scale`` stays as it is. Without
    one, the first rows set the working units, which then follow the stream.
    """
    options.count_factors(source.n_features)
    size = options.solver.default_batch_size(None)
    if isinstance(source, Rows):
        source = weigh_rows(source, check_absolute_weights)
        n_rows = count_weighted_rows(source)
        if scale is None:
            check_enough_for_scale(source, n_rows, options)
        source, size = ensure_finite_rows(source), min(size, max(100, n_rows))
    size = int(options.batch_size or size)
    peeked = PeekedSource(source, size, SCALE_ROWS)
    following = None
    if scale is None:
        check_enough_for_scale(peeked, len(peeked.first), options)
        check_first_columns(source, peeked.first)
        scale = WorkingScale.estimate(options, peeked.first)
        following = Following.begin(peeked.first, options.scaling, options.max_precision)
    seed = check_seed(options.random_state)
    K = count_components(options, None)
    run = _start_run(options, device, scale, SINGLE, K, seed=seed, batch_size=size)
    run.following = following
    run.whole_ranges = find_whole_ranges(peeked.first.rows)
    return peeked, run


def _start_run(
    options: Options,
    device: torch.device,
    scale: WorkingScale,
    communicator: Communicator,
    n_components: int,
    **length: int,
) -> Run:
    """Start a run with a random mixture; ``length`` has its seed, batch size and passes."""
    n_features = len(scale.bound)
    means = options.means_init
    if means is not None:
        if means.shape != (n_components, n_features):
            raise InputError(
                f"means_init must have the shape ({n_components}, {n_features}), a mean for each"
                f" component, not {tuple(means.shape)}."
            )
        means = (means - scale.units.offset) / scale.units.scale
    rows = length["batch_size"] * length.get("batches_per_epoch", math.inf)
    problem = Problem(
        n_components=n_components,
        n_features=n_features,
        n_factors=options.count_factors(n_features, rows / n_components),
        choose_ranks=options.choose_ranks,
        max_precision=scale.bound,
        device=local_device(device),
        dtype=options.dtype,
        n_init=options.n_init,
        candidates=options.candidates,
        noise=options.noise,
        means=means,
        communicator=communicator,
        **length,
    )
    if not communicator.has_all_components:
        _divide_components(communicator, options.solver.name, problem.n_components)
    plan = options.solver.plan(problem)
    run = Run(plan, plan.init(), scale.units)
    run.record_every = steps_per_record(run.planned_steps)
    return run


def train_run(estimator: Any, run: Run, rows: Rows) -> None:
    """Take the remaining steps of a run, with the callbacks of its estimator."""
    communicator = run.problem.communicator
    bar = [ProgressBar(run.steps)] if estimator.verbose and communicator.is_first else []
    callbacks: list[Callable[[Progress], object]] = [*bar, *estimator.callbacks]
    features, first_step = fitted_features(estimator), run.steps
    seconds = [getattr(callback, "report_seconds", REPORT_SECONDS) for callback in callbacks]

    def check_parameters() -> None:
        if communicator.any_true(lambda: not all(torch.isfinite(t).all() for t in run.parameters)):
            raise InputError(
                f"training ended with numbers that are not finite: {estimator.dtype} cannot hold"
                " values so far apart; use dtype='float64' or scaling='feature', or leave out the"
                " columns or rows that are farthest out."
            )
        if communicator.any_true(lambda: not is_definite(run.parameters)):
            wider = "use dtype='float64', or " if run.problem.dtype == torch.float32 else ""
            raise InputError(
                "training ended with a precision that rounding leaves without a density:"
                f" {estimator.dtype} cannot hold values so far apart; {wider}leave out the rows"
                " that are farthest out."
            )

    def report(entry: Record, last: bool) -> bool:
        if last:
            # Nothing is saved that cannot be used.
            check_parameters()
        progress = Progress(estimator, entry, run, features, last, first_step)
        return call_callbacks(callbacks, progress, communicator)

    try:
        train(run, rows, report, min(seconds, default=REPORT_SECONDS))
    finally:
        for shown in bar:
            shown.close()
        if not communicator.is_single and communicator.has_all_components:
            # Every process has the whole model now, and uses it alone.
            _set_processes_(run, SINGLE)
    check_parameters()


def call_callbacks(
    callbacks: Sequence[Callable[[Progress], object]],
    progress: Progress,
    communicator: Communicator,
) -> bool:
    """Call callbacks on the first rank, or on all; return whether any asks to end the run."""

    def call() -> bool:
        answers = list[Any]()
        for callback in callbacks:
            if getattr(callback, "every_process", False):
                answers.append(callback(progress))
            elif communicator.is_first:
                with communicator.first_rank_only():
                    answers.append(callback(progress))
        return True in answers

    return communicator.any_true(call)


def prepare_resume(
    estimator: Any, run: Run, X: Array | Rows, sample_weight: Array | None
) -> tuple[Rows, Batch]:
    """Check that rows are the rows of an interrupted fit, which present processes will continue.

    Return the checked rows and a sample of them.
    """
    communicator = run.problem.communicator
    if communicator.has_all_components:
        options = check_options(estimator)
        communicator = join_mesh(options.mesh, options.device_for(X))
    rows = communicator.run_together(
        lambda: ensure_finite_rows(check_rows(estimator, X, sample_weight))
    )
    communicator.check_same(
        (run.steps, run.fingerprint),
        "the processes of this run have loaded different models: give all of them the same file.",
    )
    sample, found = _identify_rows(communicator, rows, run.problem.seed)
    if run.problem.epochs is not None and run.fingerprint.split()[2:] != found.split()[2:]:
        raise InputError(
            "resume continues an interrupted fit, and sample_weight differs from the weights of"
            " that fit: give the same weights, or none if there were none."
        )
    if run.problem.epochs is None or run.fingerprint != found:
        raise InputError(
            "resume continues an interrupted fit on the same rows, and this model was not"
            f" trained by fit on these {rows.n_rows} rows: use fit or partial_fit."
        )
    _join_processes_(run, communicator)
    return rows, sample


def continue_fit(
    options: Options, run: Run, rows: Rows, communicator: Communicator = SINGLE
) -> tuple[Rows, Batch]:
    """Let a trained run continue with the passes of another fit, on these or other rows.

    Units, bounds and schedules go on as they are. Return the checked rows and a sample of them.
    """
    rows, n_rows, _ = communicator.run_together(lambda: _check_training_rows(options, rows))
    problem = run.problem
    l = options.count_factors(problem.n_features)
    if options.choose_ranks and problem.choose_ranks:
        l = problem.n_factors
    found = {"n_components": options.n_components, "n_factors": l, "solver": options.solver}
    trained = {"n_components": problem.n_components, "n_factors": problem.n_factors}
    for name, value in (trained | {"solver": run.plan.solver}).items():
        if found[name] not in (value, None):
            raise InputError(
                f"warm_start continues a model with {name}={value!r}, not {found[name]!r}: set"
                " warm_start=False to train from the start."
            )
    batch_size, per_epoch, epochs = _choose_length(options, n_rows)
    sample, fingerprint = _identify_rows(communicator, rows, problem.seed)
    # A pass that was interrupted counts; the steps on a stream are not passes.
    done = 0 if problem.epochs is None else run.passes
    problem = dataclasses.replace(
        problem, batches_per_epoch=per_epoch, epochs=done + epochs, batch_size=batch_size
    )
    run.plan = run.plan.solver.plan(problem)
    run.plan.begin_fit_(run.state)
    run.fingerprint, run.epoch, run.batch = fingerprint, done, 0
    run.converged = run.stopped = False
    run.best = run.following = None
    run.record_every = max(run.record_every, steps_per_record(per_epoch * epochs))
    _join_processes_(run, communicator)
    return rows, sample


def _choose_length(options: Options, n_rows: int) -> tuple[int, int, int]:
    """Return the rows of a batch, the batches of a pass, and the number of passes."""
    wanted = options.batch_size or options.solver.default_batch_size(n_rows)
    batch_size = min(int(wanted), n_rows)
    per_epoch = math.ceil(n_rows / batch_size)
    return batch_size, per_epoch, options.max_epochs or options.solver.default_epochs(per_epoch)


def _join_processes_(run: Run, communicator: Communicator) -> None:
    """Continue the run of one process in all present processes."""
    if not communicator.is_single and run.problem.communicator.is_single:
        if not communicator.has_all_components:
            _divide_components(communicator, run.plan.solver.name, len(run.parameters.means))
        _set_processes_(run, communicator)
        cut_run(run)


def run_fits(
    fit: Callable[[Item, Callable[[Progress], object]], T], items: Sequence[Item], n_jobs: Any
) -> list[T]:
    """Return ``fit(item, stop)`` for each item, computed by ``n_jobs`` threads at the same time.

    Each fit gets ``stop`` as a callback of its training: an error or an interrupt of one fit ends
    the others. A fit in a thread takes the same steps as one alone, so the results are the same.
    """
    n_threads = min(check_jobs(n_jobs), len(items))
    ended = threading.Event()

    def stop(progress: Progress) -> None:
        if ended.is_set():
            raise KeyboardInterrupt

    def fit_in_thread(item: Item) -> T:
        with use_threads():
            return fit(item, stop)

    if n_threads <= 1:
        return [fit(item, stop) for item in items]
    # Interrupts reach the main thread only, which waits here.
    with ThreadPoolExecutor(n_threads, "factormix-fit") as pool:
        fits = [pool.submit(fit_in_thread, item) for item in items]
        try:
            return [one.result() for one in fits]
        except BaseException:
            ended.set()
            pool.shutdown(cancel_futures=True)
            raise


def check_jobs(n_jobs: Any) -> int:
    """Return the number of fits at the same time: None is 1, and -1 one for each processor."""
    whole = isinstance(n_jobs, numbers.Integral) and n_jobs is not True
    if n_jobs is not None and not (whole and n_jobs):
        raise InputError(
            f"n_jobs must be None, a whole number of 1 or more, or -1 for all processors, not"
            f" {n_jobs!r}."
        )
    return int(effective_n_jobs(n_jobs))


class FitsBar:
    """Show the progress of several fits on standard error, weighted by their costs."""

    FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"

    def __init__(self, costs: Mapping[Any, float], *, shown: bool) -> None:
        self._costs, self._done = costs, dict.fromkeys(costs, 0.0)
        self._bar: tqdm[None] | None = None
        if shown:
            self._bar = draw_bar(total=sum(costs.values()), bar_format=self.FORMAT)

    def move(self, fit: Hashable, share: float, text: str) -> None:
        """Set the share of a fit that is done, and the text beside the bar."""
        if self._bar is None:
            return
        self._done[fit] = share
        done = sum(self._costs[fit] * part for fit, part in self._done.items())
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(max(0.0, done - self._bar.n))

    def follow(self, fit: Hashable, text: str) -> Callable[[Progress], None]:
        """Return a callback that shows the training of a fit."""

        # A clone of a mixture copies its callbacks, but shares functions.
        def show(progress: Progress) -> None:
            record = progress.record
            share = 1.0 if progress.last else record["step"] / max(progress.steps, 1)
            self.move(fit, share, f"{text}, ll={record['log_likelihood']:.5g}")

        return show

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def draw_sample(rows: Rows, seed: int) -> Batch:
    """Draw the rows that set the working units."""
    return next(rows.shuffled(min(SCALE_ROWS, count_weighted_rows(rows)), seed=seed, epoch=0))


def cover_columns(rows: Rows, sample: Batch) -> Batch:
    """Return a sample of rows in which every column has a value."""
    return sample if getattr(rows, "complete", False) else add_observed_rows(rows, sample)


def check_first_columns(source: Source, first: Batch) -> None:
    """Check that every column has a value in the first rows of a stream, which set its units."""
    empty = (~Columns(first).observed).nonzero()
    if len(empty):
        raise unobserved_column_error(source, int(empty[0]))


def fingerprint_rows(rows: Rows, sample: Batch) -> str:
    """Identify rows by their number, a hash of a sample of them, and a hash of their weights."""
    content = view_bytes(torch.as_tensor(sample.rows[:256]).cpu())
    parts = [str(rows.n_rows), hashlib.sha256(content).hexdigest()]
    weights = getattr(rows, "weights", None)
    if weights is not None:
        parts.append(hashlib.sha256(np.ascontiguousarray(weights).data).hexdigest())
    return " ".join(parts)


def count_training_rows(run: Run) -> int:
    """Return the number of rows that a mixture was trained on; on a stream, of all rows so far."""
    return int(run.fingerprint.split()[0]) if run.fingerprint else max(1, run.samples)


def is_trained_on(run: Run, rows: Rows) -> bool:
    """Return whether a run was trained by ``fit`` on exactly these rows."""
    if not run.fingerprint or count_training_rows(run) != rows.n_rows:
        return False
    return run.fingerprint == fingerprint_rows(rows, draw_sample(rows, run.problem.seed))


def _identify_rows(communicator: Communicator, rows: Rows, seed: int) -> tuple[Batch, str]:
    """Return a sample of rows that are the same in all processes, and their fingerprint."""
    sample = communicator.run_together(lambda: draw_sample(rows, seed))
    fingerprint = fingerprint_rows(rows, sample)
    communicator.check_same(
        fingerprint,
        "the processes of this run were given different rows: give each of them all rows, in the"
        " same order, and it takes its own share of every batch.",
    )
    return sample, fingerprint


def _divide_components(communicator: Communicator, solver: str, n_components: int) -> None:
    """Divide components among processes, if the solver can."""
    if solver not in ("natural", "em"):
        raise InputError(
            f"the solver {solver!r} cannot have its components divided among processes: use"
            " mesh='data', or the solver 'natural'."
        )
    communicator.components.assign(n_components)


def _set_processes_(run: Run, communicator: Communicator) -> None:
    """Continue a run in other processes."""
    run.plan = run.plan.solver.plan(dataclasses.replace(run.problem, communicator=communicator))
