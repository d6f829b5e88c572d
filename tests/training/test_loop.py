"""The training loop: interrupts, resumed runs, streams, bounded history and memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from factormix import MFA, InputError, load
from factormix.data.batches import Batch
from factormix.data.columns import Columns
from factormix.data.sources.arrays import ArrayRows
from factormix.data.units import Units
from factormix.solvers import (
    EM,
    SOLVERS,
    ConstrainedSGD,
    CovarianceGradient,
    NaturalGradient,
    Problem,
)
from factormix.training import loop as training
from factormix.training.loop import train, train_on_stream
from factormix.training.run import Run, record, steps_per_record
from factormix.training.solvers import step
from factormix.training.solvers.sgd import SGDPlan

rng = np.random.default_rng(0)
X = np.concatenate([rng.normal(size=(150, 4)), 4 + rng.normal(size=(150, 4))])


class Interrupting:
    """Rows of X that interrupt this process before a given batch."""

    n_rows, n_features, dtype = len(X), X.shape[1], X.dtype

    def __init__(self, at: int, signals: int = 1) -> None:
        self.rows, self.left, self.signals = ArrayRows(X), at, signals

    def blocks(self, size: int) -> Iterator[Any]:
        yield from self.counted(self.rows.blocks(size)) if size < 100 else self.rows.blocks(size)

    def shuffled(self, batch_size: int, *, seed: int, epoch: int, start: int = 0) -> Iterator[Any]:
        batches = self.rows.shuffled(batch_size, seed=seed, epoch=epoch, start=start)
        yield from batches if batch_size == len(X) else self.counted(batches)

    def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.left -= 1
            if self.left == 0:
                for _ in range(self.signals):
                    os.kill(os.getpid(), signal.SIGINT)
            yield batch


def model(**options: Any) -> MFA:
    return MFA(
        **{
            "n_components": 3,
            "n_factors": 1,
            "batch_size": 40,
            "max_epochs": 30,
            "random_state": 5,
            "solver": "sgd",
        }
        | options
    )


@lru_cache
def whole_run(dtype: str = "float32", solver: str = "sgd") -> MFA:
    return model(dtype=dtype, solver=solver).fit(X)


def same(a: MFA, b: MFA) -> None:
    for name in ("weights_", "means_", "precision_diag_", "precision_factors_"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert (a.n_steps_, a.n_iter_, a.n_samples_seen_) == (b.n_steps_, b.n_iter_, b.n_samples_seen_)
    assert timeless(a) == timeless(b)


def timeless(m: MFA) -> list[dict[str, float]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in m.history_]


# Steps 8 and 240 are the last of an epoch, 80 is the 10th such: eight batches make an epoch.
@pytest.mark.parametrize("at", [1, 8, 77, 80, 239, 240])
@pytest.mark.parametrize(
    ("dtype", "solver"), [("float64", "sgd"), *(("float32", name) for name in SOLVERS)]
)
def test_an_interrupted_fit_is_complete_and_resumes_exactly(at, dtype, solver, tmp_path):
    # Without their own criterion, so that every run is as long as planned.
    kinds = (NaturalGradient, CovarianceGradient, EM)
    endless = {kind.name: kind(tol=0) for kind in kinds}.get(solver, solver)
    whole = whole_run(dtype, endless)
    handler = signal.getsignal(signal.SIGINT)
    cut = model(dtype=dtype, solver=endless)
    with pytest.raises(KeyboardInterrupt):
        cut.fit(Interrupting(at))
    assert signal.getsignal(signal.SIGINT) is handler
    assert cut.n_steps_ == at
    assert np.isfinite(cut.score_samples(X)).all()
    assert cut.weights_.sum() == pytest.approx(1)
    cut.save(tmp_path / "cut.safetensors")
    again = load(tmp_path / "cut.safetensors")
    np.testing.assert_array_equal(cut.score_samples(X), again.score_samples(X))
    same(cut.resume(X), whole)
    same(again.resume(X), whole)
    # A run that is complete has nothing left to do.
    same(cut.resume(X), whole)


def test_a_run_interrupted_twice_resumes_exactly():
    cut = model()
    with pytest.raises(KeyboardInterrupt):
        cut.fit(Interrupting(30))
    with pytest.raises(KeyboardInterrupt):
        cut.resume(Interrupting(30))
    assert cut.n_steps_ == 60
    same(cut.resume(X), whole_run())


def test_a_second_interrupt_does_not_wait():
    cut = model()
    with pytest.raises(KeyboardInterrupt):
        cut.fit(Interrupting(10, signals=2))
    assert cut.n_steps_ == 9


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        same(model().fit(Interrupting(10)), whole_run())
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stream_is_interrupted_between_two_steps():
    cut = model().partial_fit(X)
    assert cut.n_steps_ == 8
    with pytest.raises(KeyboardInterrupt):
        cut.partial_fit(Interrupting(3))
    assert cut.n_steps_ == 11
    assert np.isfinite(cut.score(X))


def test_training_works_outside_the_main_thread():
    fitted = model()
    thread = threading.Thread(target=lambda: fitted.fit(X))
    thread.start()
    thread.join()
    same(fitted, whole_run())


def test_an_exception_in_the_source_leaves_a_complete_model():
    class Failing(Interrupting):
        def counted(self, batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                self.left -= 1
                if self.left == 0:
                    raise OSError("the disk is gone")
                yield batch

    cut = model()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError, match="the disk is gone"):
        cut.fit(Failing(50))
    assert signal.getsignal(signal.SIGINT) is handler
    assert cut.n_steps_ == 49
    same(cut.resume(X), whole_run())


def test_resume_needs_the_rows_of_an_interrupted_fit():
    cut = model()
    with pytest.raises(KeyboardInterrupt):
        cut.fit(Interrupting(10))
    with pytest.raises(
        InputError, match=r"not trained by fit on these 100 rows: use fit or partial_fit"
    ):
        cut.resume(X[:100])
    with pytest.raises(InputError, match="resume continues an interrupted fit"):
        model().partial_fit(X).resume(X)


def test_partial_fit_between_does_not_disturb_the_order_of_a_fit():
    cut = model()
    with pytest.raises(KeyboardInterrupt):
        cut.fit(Interrupting(10))
    cut.partial_fit(X).resume(X)
    assert cut.n_iter_ == 30
    assert cut.n_steps_ == 240 + 8


@pytest.mark.parametrize("seed", [0, 1])
def test_same_seed_same_result(seed):
    same(model(random_state=seed).fit(X), model(random_state=seed).fit(X))
    same(model(random_state=seed).partial_fit(X), model(random_state=seed).partial_fit(X))


def test_other_seeds_differ():
    fits = [model(random_state=seed).fit(X).means_ for seed in (0, 1, None, None)]
    assert len({m.tobytes() for m in fits}) == 4


def test_a_random_state_object_is_drawn_from():
    first, second = (
        model(random_state=np.random.RandomState(seed)).fit(X).means_ for seed in (0, 0)
    )
    np.testing.assert_array_equal(first, second)
    state = np.random.RandomState(0)
    assert not np.array_equal(
        model(random_state=state).fit(X).means_, model(random_state=state).fit(X).means_
    )


def test_layout_and_container_of_the_rows_change_nothing():
    whole = whole_run("float64")
    for rows in (np.asfortranarray(X), X.tolist(), ArrayRows(X), torch.from_numpy(X)):
        same(model(dtype="float64").fit(rows), whole)


def test_history_covers_the_whole_run():
    fitted = model(max_epochs=60).fit(X)
    history = fitted.history_
    assert [r["step"] for r in history] == list(range(4, 481, 4))
    assert {"epoch", "step", "seconds", "log_likelihood", "components_in_use", "sigma"} <= set(
        history[0]
    )
    assert history[-1]["epoch"] == 60
    assert history[-1]["samples"] == 60 * len(X)
    assert history[-1]["log_likelihood"] > history[0]["log_likelihood"]
    assert history[-1]["log_likelihood"] == pytest.approx(fitted.score(X), abs=0.5)
    seconds = [r["seconds"] for r in history]
    assert seconds == sorted(seconds)
    # A length that is no multiple has its last steps too.
    assert model(max_epochs=63).fit(X).history_[-1]["step"] == 63 * 8


def test_history_records_the_mean_of_its_steps():
    run = start_run()
    state, levels = run.state, []
    for x in ArrayRows(X).blocks(40):
        working = run.units.to_working(x, torch.device("cpu"), torch.float32)
        state, info = step(run.plan, state, working)
        levels.append(float(info.log_likelihood))
    run = start_run()
    run.record_every = len(levels)
    train_on_stream(run, ArrayRows(X))
    (entry,) = run.history
    assert entry["log_likelihood"] == pytest.approx(
        np.mean(levels) - run.units.log_volume, rel=1e-5
    )


@pytest.mark.parametrize(("planned", "every"), [(0, 10), (1, 1), (50, 1), (1000, 10), (10**6, 100)])
def test_short_runs_have_a_curve(planned, every):
    assert steps_per_record(planned) == every


def test_history_stays_bounded():
    run = start_run()
    run.max_records = 10
    for _ in range(400):
        train_on_stream(run, ArrayRows(X[:40]))
        assert len(run.history) <= 10
    steps = [r["step"] for r in run.history]
    assert steps == sorted(steps)
    assert steps[-1] > 350
    assert np.diff(steps).max() <= 2 * np.diff(steps).min() * 2


def test_a_step_reads_nothing_back_from_the_device():
    """Between two records no value leaves the device: float() would make a GPU wait."""
    run = start_run()
    training.learn(run, Batch(X[:40]))
    reads: list[str] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            name = getattr(func, "__name__", "")
            if name in ("item", "__float__", "__bool__", "__int__", "tolist", "cpu", "numpy"):
                reads.append(name)
            return func(*args, **(kwargs or {}))

    with Watch():
        training.learn(run, Batch(torch.from_numpy(X[:40])), complete=True)
    assert reads == []
    with Watch():
        record(run, keep=True)
    assert reads


@pytest.mark.parametrize("where", ["contribution", "update"])
@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        ("float32", "try dtype='float64', scaling='feature', fewer"),
        ("float64", "try scaling='feature', fewer"),
    ],
)
def test_an_error_in_a_step_is_one_sentence(where, dtype, advice):
    class Unlucky(ConstrainedSGD):
        def plan(self, problem: Problem) -> Any:
            return UnluckyPlan(self, problem)

    class UnluckyPlan(SGDPlan):
        pass

    def fail(self: Any, state: Any, given: Any) -> Any:
        if state.steps == 16:
            torch.linalg.cholesky(-torch.eye(3))
        return getattr(SGDPlan, where)(self, state, given)

    setattr(UnluckyPlan, where, fail)
    with pytest.raises(InputError) as error:
        model(solver=Unlucky(), dtype=dtype).fit(X)
    text = str(error.value)
    assert text.startswith("step 17 of the training failed (linalg.cholesky: ")
    assert advice in text
    assert text.endswith(".")
    assert "\n" not in text
    assert isinstance(error.value.__cause__, torch.linalg.LinAlgError)


def test_a_solver_can_stop_the_run():
    class Satisfied(ConstrainedSGD):
        def plan(self, problem: Problem) -> Any:
            return SatisfiedPlan(self, problem)

    class SatisfiedPlan(SGDPlan):
        def update(self, state: Any, contribution: Any) -> Any:
            state, info = super().update(state, contribution)
            return state, info._replace(stop=state.steps >= 17, converged=state.steps >= 17)

    fitted = model(solver=Satisfied()).fit(X)
    assert fitted.n_steps_ == 17
    assert fitted.converged_
    assert fitted.resume(X).n_steps_ == 17
    assert fitted.history_[-1]["step"] == 17


def start_run(**length: int) -> Run:
    solver = ConstrainedSGD()
    units = Units.estimate(Columns(Batch(X)), "global")
    bound = units.bound(None, 100.0, Columns(Batch(X)))
    plan = solver.plan(Problem(3, 4, 1, bound, batch_size=40, **length))
    return Run(plan, plan.init(), units)


def test_a_stream_scores_before_it_learns():
    """Prequential use: each block is scored by a model that has not seen it."""
    fitted = model(n_components=2, batch_size=20)
    fitted.partial_fit(X[:40])
    generator = np.random.default_rng(3)
    scores = []
    for _ in range(300):
        block = X[generator.integers(0, len(X), 20)]
        scores.append(fitted.score(block))
        fitted.partial_fit(block)
    assert np.mean(scores[-50:]) > np.mean(scores[:50]) + 1
    assert fitted.n_steps_ == fitted.n_iter_ == 302
    assert fitted.n_samples_seen_ == 40 + 300 * 20
    assert len(fitted.history_) == 30
    assert fitted.history_[-1]["seconds"] > 0


def test_single_rows_can_follow_the_first_block():
    fitted = model().partial_fit(X[:50])
    for row in X[50:80]:
        fitted.partial_fit(row[None])
    assert np.isfinite(fitted.score(X))


@pytest.mark.parametrize("n", [1, 2, 9])
def test_a_first_block_that_is_too_small_is_refused(n):
    fitted = model()
    with pytest.raises(InputError, match=rf"n_samples={n}, too few for the first call") as error:
        fitted.partial_fit(X[:n])
    assert "\n" not in str(error.value)
    assert not hasattr(fitted, "n_features_in_")
    assert np.isfinite(fitted.partial_fit(X[:10]).score(X))
    # Without estimates from the rows, their number does not matter.
    unscaled = model(scaling=None, max_precision=20).partial_fit(X[:n])
    assert np.isfinite(unscaled.score(X))


def test_fit_starts_again_and_partial_fit_continues():
    fitted = model().partial_fit(X).fit(X)
    same(fitted, whole_run())
    assert fitted.partial_fit(X).n_steps_ == 248


STREAM = """
import resource, sys
import numpy as np, torch
from factormix import MFA
from factormix.data.batches import Batch

torch.set_num_threads(1)

class Stream:
    n_features, dtype = 256, np.dtype(np.float32)

    def __init__(self, n_rows):
        self.n_rows = n_rows

    def blocks(self, size):
        draw = np.random.default_rng(0)
        for first in range(0, self.n_rows, size):
            rows = draw.random((min(size, self.n_rows - first), 256), dtype=np.float32)
            yield Batch(rows)

    def shuffled(self, batch_size, *, seed, epoch, start=0):
        return self.blocks(batch_size)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

model = MFA(2, 1, batch_size=500, max_epochs=1, random_state=0)
model.fit(Stream(5_000)).score_samples(Stream(20_000))
model.partial_fit(Stream(5_000))
before = peak()
model.fit(Stream(60_000)).score_samples(Stream(60_000))
model._run.max_records = 50
model.partial_fit(Stream(60_000))
print(peak() - before, model.n_samples_seen_, len(model.history_))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no resource module")
def test_memory_does_not_grow_with_the_number_of_rows():
    """60,000 rows of 256 values are 61 MB; a run over them needs no more than a short one."""
    done = subprocess.run(
        [sys.executable, "-c", STREAM], capture_output=True, text=True, check=True
    )
    grown, seen, records = done.stdout.split()
    assert int(seen) == 120_000
    assert int(records) <= 50
    assert float(grown) < 40


GROWING = """
import numpy as np
import torch
from factormix import MFA
from factormix.solvers import NaturalGradient

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

K, d, l, B = 8000, 400, 4, 300
torch.set_num_threads(1)
draw = np.random.default_rng(0)
directions = 3 * draw.normal(size=(6, d))

def stream(n):
    for _ in range(n):
        rows = draw.normal(size=(B, 6)) @ directions + 0.1 * draw.normal(size=(B, d))
        yield rows.astype("f4")

def model(K):
    solver = NaturalGradient(first_components=200, seed_rows=500)
    return MFA(K, l, solver=solver, batch_size=B, random_state=0)

model(200).partial_fit(stream(5))
before = status("VmRSS")
large = model(K).partial_fit(stream(45))
assert large.history_[-1]["components"] == K
print((status("VmHWM") - before) / (4 * K * d * (l + 2)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_mixture_grows_within_three_and_a_half_times_its_memory():
    """Averages and parameters take twice the memory of the parameters, and growing little more."""
    done = subprocess.run(
        [sys.executable, "-c", GROWING],
        capture_output=True,
        text=True,
        check=True,
        # Arrays go back to the system at once, so that those of different times do not add up.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)},
    )
    assert float(done.stdout) < 3.5


def test_train_needs_no_report():
    run = start_run(batches_per_epoch=8, epochs=2)
    train(run, ArrayRows(X))
    assert run.finished
    assert run.steps == 16
