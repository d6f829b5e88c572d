"""Threads: one of torch's, several of our own for large work, and the user's choice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from factormix.training.threads import CHOICES, LEAST_WORK, Team, team

FREE = {name: value for name, value in os.environ.items() if name not in CHOICES}

LARGE = """
import os, signal, sys, threading, numpy as np, torch
from factormix import MFA
X = np.random.default_rng(0).normal(size=(2400, 600)).astype("float32")
X[:800] += 3
seen, begun = [], torch.get_num_threads()
def watch(progress):
    seen.append((torch.get_num_threads(), threading.active_count()))
def fit(*callbacks):
    watchers = [watch, *callbacks]
    return MFA(40, 4, batch_size=800, max_epochs=4, random_state=0, callbacks=watchers).fit(X)
"""
SEVERAL = "if begun == 1: print('one'); sys.exit()\n"


def child(code: str, **environment: str) -> str:
    """Run code in a process whose number of threads nobody has chosen, and return its last line."""
    done = subprocess.run(
        [sys.executable, "-c", LARGE + code],
        env=FREE | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    if last == "one":
        pytest.skip("this machine has one processor")
    return last


def test_torch_works_in_one_thread_and_gets_its_own_back():
    code = """
fit().score(X)
print({n for n, _ in seen}, torch.get_num_threads() == begun, max(c for _, c in seen) > 1)
"""
    assert child(SEVERAL + code) == "{1} True True", "with threads of our own"


@pytest.mark.parametrize(
    "stop",
    [
        "raise ZeroDivisionError",
        "signal.raise_signal(signal.SIGINT)",
        "signal.raise_signal(signal.SIGINT); signal.raise_signal(signal.SIGINT)",
    ],
)
def test_the_setting_comes_back_however_training_ends(stop):
    code = f"""
def end(progress):
    {stop}
try: fit(end)
except (ZeroDivisionError, KeyboardInterrupt) as error: print(type(error).__name__)
print(torch.get_num_threads() == begun, threading.active_count())
"""
    assert child(SEVERAL + code) == "True 1"


@pytest.mark.parametrize("name", CHOICES)
def test_a_number_of_threads_from_outside_is_kept(name):
    code = "fit().score(X); print({n for n, _ in seen} == {begun}, {c for _, c in seen})"
    assert child(code, **{name: "2"}) == "True {1}"


def test_a_number_of_threads_from_the_program_is_kept():
    other = 2 * (os.cpu_count() or 1) + 1
    code = f"torch.set_num_threads({other}); fit().score(X); print(*set(seen))"
    assert child(code) == f"({other}, 1)"


def test_the_result_does_not_depend_on_what_else_runs():
    code = """
import subprocess
alone = fit()
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(begun)]
try:
    beside = fit()
    print(*(np.array_equal(getattr(alone, name), getattr(beside, name))
            for name in ("means_", "precision_factors_", "weights_")),
          np.array_equal(alone.score_samples(X), beside.score_samples(X)))
finally:
    for one in busy: one.kill()
"""
    assert child(SEVERAL + code) == "True True True True"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_after_a_fit_can_use_the_model():
    code = """
model = fit(); expected = model.score(X)
if os.fork() == 0:
    signal.alarm(60)
    os._exit(0 if model.score(X) == expected else 3)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert child(SEVERAL + code) == "0"


@pytest.fixture
def three():
    made = Team(3)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("n_rows", "work", "parts"),
    [
        (100, 0, 1),
        (100, LEAST_WORK, 1),
        (100, 2 * LEAST_WORK, 2),
        (100, 1e15, 3),
        (2, 1e15, 2),
        (1, 1e15, 1),
    ],
)
def test_only_large_work_is_cut(three, n_rows, work, parts):
    cut = three.cut(n_rows, work)
    assert len(cut) == parts
    rows = torch.arange(n_rows)
    assert torch.equal(torch.cat([rows[part] for part in cut]), rows)
    sizes = [part.stop - part.start for part in cut]
    assert max(sizes) - min(sizes) <= 1


def test_parts_are_computed_at_the_same_time_and_without_gradients(three):
    together = threading.Barrier(3, timeout=30)

    def compute(part: int) -> tuple[int, bool, int]:
        together.wait()
        return part, torch.is_grad_enabled(), threading.get_ident()

    with torch.no_grad():
        results = three.each(compute, [0, 1, 2])
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
        time.sleep(0.02 if i % 3 == 0 else 0)
        return i * i

    results = []
    for result in three.stream(slow_at_first, items()):
        results.append(result)
        assert len(read) - len(results) <= 3
    assert results == [i * i for i in range(40)]
    assert list(three.stream(slow_at_first, iter([]))) == []
    assert list(three.stream(lambda i: threading.get_ident(), [1])) == [threading.get_ident()]


def test_what_goes_wrong_in_a_part_is_raised(three):
    def fail(i: int) -> float:
        return 1 / (i - 1)

    for results in (lambda: three.each(fail, [0, 1, 2]), lambda: list(three.stream(fail, [0, 1]))):
        with pytest.raises(ZeroDivisionError):
            results()


def test_blocks_within_blocks_share_a_team():
    with team() as outer, team() as inner:
        assert inner is outer
