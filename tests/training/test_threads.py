"""Worker threads: one thread of torch each, the user's choice of a number, and forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from factormix import MFA
from factormix.training.threads import THREAD_VARIABLES, WORK_PER_THREAD, Threads, use_threads

X = np.random.default_rng(0).normal(size=(2400, 600)).astype("float32")
X[:800] += 3


@pytest.fixture
def default_threads(monkeypatch):
    """Give torch one thread per processor, as if nobody had chosen a number."""
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    n = os.cpu_count() or 1
    if n == 1:
        pytest.skip("this machine has one processor")
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    yield n
    torch.set_num_threads(before)


def fit_large(*callbacks):
    """Train on batches that are large enough to be cut."""
    return MFA(40, 4, batch_size=800, max_epochs=2, random_state=0, callbacks=callbacks).fit(X)


def workers() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("factormix")}


def test_torch_works_in_one_thread_and_workers_stay(default_threads):
    seen = []
    model = fit_large(lambda progress: seen.append(torch.get_num_threads()))
    score = model.score(X)
    assert set(seen) == {1}
    assert torch.get_num_threads() == default_threads
    before = workers()
    assert len(before) >= default_threads
    assert fit_large().score(X) == score
    assert workers() == before


@pytest.mark.parametrize("stop", ["an error", "an interrupt", "two interrupts"])
def test_torch_gets_its_threads_back_however_training_ends(default_threads, stop):
    def end(progress):
        if stop == "an error":
            raise ZeroDivisionError
        for _ in range(1 + (stop == "two interrupts")):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
        fit_large(end)
    assert torch.get_num_threads() == default_threads


@pytest.mark.parametrize("name", THREAD_VARIABLES)
def test_a_number_of_threads_from_the_environment_is_respected(default_threads, monkeypatch, name):
    monkeypatch.setenv(name, str(default_threads))
    with use_threads() as threads:
        assert threads.size == 1
        assert torch.get_num_threads() == default_threads


def test_a_number_of_threads_from_the_program_is_respected(default_threads):
    chosen = 2 * default_threads + 1
    with use_threads() as threads:
        assert threads.size == default_threads
    torch.set_num_threads(chosen)
    with use_threads() as threads:
        assert threads.size == 1
        assert torch.get_num_threads() == chosen
    torch.set_num_threads(default_threads)
    with use_threads() as threads:
        assert threads.size == default_threads


def test_the_result_does_not_depend_on_what_else_runs(default_threads):
    alone = fit_large()
    loop = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(loop) for _ in range(default_threads)]
    try:
        beside = fit_large()
        for name in ("means_", "precision_factors_", "weights_"):
            assert np.array_equal(getattr(alone, name), getattr(beside, name))
        assert np.array_equal(alone.score_samples(X), beside.score_samples(X))
    finally:
        for process in busy:
            process.kill()
            process.wait()


FORKS = """
import os, signal, torch
from factormix.training.threads import Threads
torch.set_num_threads(1)
A = torch.ones(600, 600)
def compute(n):
    with torch.no_grad():
        return Threads(n).map(lambda x: float((x @ A).sum()), [torch.ones(50, 600)] * n)
children = []
for _ in range(40):
    compute(8)
    if (child := os.fork()) == 0:
        signal.alarm(60)
        os._exit(0 if compute(2) == 2 * [50 * 600 * 600] else 3)
    children.append(child)
print({os.waitpid(child, 0)[1] for child in children})
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_children_forked_after_work_in_threads_do_not_hang():
    # Where workers end after their work, about one fork in ten hangs, even without other load.
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    assert done.stdout == "{0}\n"


FORKS_IN_USE = """
import atexit, multiprocessing, os, signal, sys, numpy as np, torch
from factormix import MFA
from factormix.training.threads import use_threads
signal.alarm(300)
if torch.get_num_threads() == 1: print("one processor"); sys.exit()
X = np.random.default_rng(0).normal(size=(2400, 600)).astype("float32")
def fit(*callbacks):
    return MFA(40, 4, batch_size=800, max_epochs=1, random_state=0, callbacks=callbacks).fit(X)
model = fit(); expected = model.score(X)
def same(_):
    return model.score(X) == expected
def check_in_child(check):
    if (child := os.fork()) == 0:
        os._exit(0 if check() else 3)
    assert os.waitpid(child, 0)[1] == 0
check_in_child(lambda: same(0))

# In a callback, where the calling thread has workers.
forked = []
def fork_once(progress):
    if not forked:
        forked.append(1)
        check_in_child(lambda: np.array_equal(fit().means_, model.means_))
assert np.array_equal(fit(fork_once).means_, model.means_)

with multiprocessing.get_context("fork").Pool(2) as pool:
    assert all(pool.map(same, range(4)))

# While items of a stream are in work: both processes compute the rest.
def items():
    for i in range(20):
        if i == 7:
            forked.append(os.fork())
        yield i
with use_threads() as threads:
    assert list(threads.stream(lambda i: i * i, items())) == [i * i for i in range(20)]
if forked[-1] == 0:
    sys.exit()
assert os.waitpid(forked[-1], 0)[1] == 0

# When the interpreter shuts down and has no workers.
@atexit.register
def last():
    check_in_child(lambda: same(0))
    print("all" if same(0) else "differs")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_model_can_be_used_wherever_a_process_forks():
    free = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", FORKS_IN_USE], env=free, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if done.stdout == "one processor\n":
        pytest.skip("this machine has one processor")
    assert done.stdout == "all\n", done.stderr


@pytest.fixture
def three():
    return Threads(3)


@pytest.mark.parametrize(
    ("n_rows", "work", "parts"),
    [
        (100, 0, 1),
        (100, WORK_PER_THREAD, 1),
        (100, 2 * WORK_PER_THREAD, 2),
        (100, 1e15, 3),
        (2, 1e15, 2),
        (1, 1e15, 1),
    ],
)
def test_only_large_work_is_cut(three, n_rows, work, parts):
    cut = three.cut_rows(n_rows, work)
    assert len(cut) == parts
    rows = torch.arange(n_rows)
    assert torch.equal(torch.cat([rows[part] for part in cut]), rows)
    sizes = [part.stop - part.start for part in cut]
    assert max(sizes) - min(sizes) <= 1


def test_parts_are_computed_at_the_same_time_and_without_gradients(three):
    barrier = threading.Barrier(3)

    def compute(part: int) -> tuple[int, bool, int]:
        barrier.wait()
        return part, torch.is_grad_enabled(), threading.get_ident()

    with torch.no_grad():
        results = three.map(compute, [0, 1, 2])
    assert [part for part, _, _ in results] == [0, 1, 2]
    assert not any(gradients for _, gradients, _ in results)
    assert len({thread for _, _, thread in results}) == 3


def test_a_stream_keeps_its_order_and_reads_little_ahead(three):
    read: list[int] = []

    def items():
        for i in range(40):
            read.append(i)
            yield i

    def slow_at_first(i: int) -> int:
        time.sleep(0.005 if i % 3 == 0 else 0)
        return i * i

    results = []
    for result in three.stream(slow_at_first, items()):
        results.append(result)
        assert len(read) - len(results) <= 3
    assert results == [i * i for i in range(40)]
    assert list(three.stream(slow_at_first, iter([]))) == []
    assert list(three.stream(lambda i: threading.get_ident(), [1])) == [threading.get_ident()]


def test_nothing_is_computed_after_an_error(three):
    begun, done = [], []

    def fail(i: int) -> float:
        begun.append(i)
        time.sleep(0.01)
        done.append(i)
        return 1 / (i - 1)

    for compute in (
        lambda: three.map(fail, [0, 1, 2]),
        lambda: list(three.stream(fail, range(40))),
    ):
        with pytest.raises(ZeroDivisionError):
            compute()
        assert sorted(begun) == sorted(done)
    assert len(done) < 12


def test_nested_blocks_share_workers_and_a_worker_has_none(default_threads):
    def inner_size(_: int) -> tuple[int, int]:
        with use_threads() as inner:
            return inner.size, torch.get_num_threads()

    with use_threads() as outer, use_threads() as inner:
        assert inner is outer
        assert set(outer.stream(inner_size, range(8))) == {(1, 1)}
