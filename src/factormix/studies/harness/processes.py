"""Trials in processes: several at a time, ended together, and none lost with another.

A process works on one trial after another, or on a single one when it is to be fresh. A trial is
finished when its result is in the store, whatever became of its process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from tqdm import tqdm

from factormix.studies.harness.store import Store
from factormix.studies.harness.trials import Trial

__all__ = ["run_trials"]

GRACE = 10.0
"""Seconds that a process has to end in when it is asked to."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

Told = Callable[[Trial, str | None], object]


def run_trials(
    trials: Sequence[Trial],
    store: Store,
    data_folder: str | None = None,
    jobs: int | None = None,
    *,
    threads: int | None = 1,
    fresh: bool = False,
    tell: Told | None = None,
) -> dict[str, str]:
    """Run the trials without a result, ``jobs`` at a time, and return what failed and why.

    Each process uses ``threads`` threads, or as many as its packages choose if None. With ``fresh``
    each trial has a process to itself. ``tell(trial, failure)`` is called after every trial.
    An interrupt loses only the trials under way.
    """
    todo = deque(_missing(trials, store))
    jobs = min(jobs or os.cpu_count() or 1, len(todo))
    failures: dict[str, str] = {}
    crew = _Crew(store, data_folder, threads)
    try:
        with tqdm(total=len(todo), unit="trial", file=sys.stderr, disable=None) as bar:
            while todo or crew.busy:
                while todo and len(crew.busy) < jobs:
                    crew.begin(todo.popleft())
                for trial, failure in crew.finished(keep=not fresh):
                    if failure is not None:
                        failures[trial.title] = failure
                    bar.update()
                    if tell is not None:
                        tell(trial, failure)
    finally:
        crew.stop()
    return failures


def _missing(trials: Iterable[Trial], store: Store) -> list[Trial]:
    """List the trials to run, once each: experiments may share some."""
    by_path = {store.path(trial): trial for trial in trials}
    return [trial for trial in by_path.values() if store.read(trial) is None]


class _Worker:
    """Hold a process, the line to it and the trial that it works on."""

    def __init__(self, store: Store, data_folder: str | None, threads: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        arguments = (theirs, store.folder, data_folder, threads)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        with _environment(threads):
            self.process.start()
        theirs.close()
        self.trial: Trial | None = None


class _Crew:
    """Hand trials to processes, which are started when none is idle."""

    def __init__(self, store: Store, data_folder: str | None, threads: int | None) -> None:
        self._store, self._data_folder, self._threads = store, data_folder, threads
        self._idle: list[_Worker] = []
        self.busy: list[_Worker] = []

    def begin(self, trial: Trial) -> None:
        """Give a trial to a process."""
        worker = self._idle.pop() if self._idle else self._start()
        worker.trial = trial
        self.busy.append(worker)
        # If the process is gone already, reading from it will tell.
        with suppress(BrokenPipeError):
            worker.line.send(trial)

    def _start(self) -> _Worker:
        return _Worker(self._store, self._data_folder, self._threads)

    def finished(self, keep: bool) -> Iterator[tuple[Trial, str | None]]:
        """Wait for trials to end, and yield each with the reason if it failed."""
        ready = wait([worker.line for worker in self.busy])
        for worker in [each for each in self.busy if each.line in ready]:
            trial = worker.trial
            assert trial is not None
            self.busy.remove(worker)
            self._idle.append(worker)
            try:
                failure: str | None = worker.line.recv()
            except (EOFError, OSError):
                self._idle.remove(worker)
                failure = self._lost(worker, trial)
            else:
                if not keep:
                    self._idle.remove(worker)
                    _end([worker])
            yield trial, failure

    def _lost(self, worker: _Worker, trial: Trial) -> str | None:
        """Say that a process has ended in the middle of a trial, unless the result is there."""
        worker.process.join()
        if self._store.read(trial) is not None:
            return None
        return f"its process ended with code {worker.process.exitcode}"

    def stop(self) -> None:
        """End all processes at once; the files they were to write are whole or absent."""
        _end([*self.busy, *self._idle])


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.terminate()
    until = time.monotonic() + GRACE
    for worker in workers:
        worker.process.join(max(0.0, until - time.monotonic()))
        worker.process.kill()
        worker.line.close()


@contextmanager
def _environment(threads: int | None) -> Iterator[None]:
    """Set the variables that a process started meanwhile reads its number of threads from."""
    before = {name: os.environ.pop(name, None) for name in THREAD_VARIABLES}
    if threads is not None:
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _work(line: Connection, folder: Path, data_folder: str | None, threads: int | None) -> None:
    """Run the trials that come down the line, until there are no more or the parent says stop."""
    _prepare_process(threads)
    store = Store(folder)
    try:
        while True:
            line.send(_run(line.recv(), store, data_folder))
    except (EOFError, BrokenPipeError, _Stopped):
        # At once: some packages leave threads behind that would keep the process waiting.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _run(trial: Trial, store: Store, data_folder: str | None) -> str | None:
    """Run a trial, write its result, and return the reason if that failed."""
    try:
        store.write(trial, trial.run(trial.settings, data_folder))
    except MemoryError:
        return "there is not enough memory: use fewer --jobs"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _prepare_process(threads: int | None) -> None:
    """Leave interrupts to the parent, set the threads, and end when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What is being written when the parent stops this process is taken away on the way out.
    signal.signal(signal.SIGTERM, _leave)
    if threads is not None:
        torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


class _Stopped(SystemExit):
    """The process was asked to end."""


def _leave(signum: int, frame: object) -> None:
    # Once is enough: a second one would disturb the cleaning up after the first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stopped(1)


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)
