"""The harness of the benchmarks: trials in processes, their results on disk, and tables of numbers.

A *trial* is a piece of work that stands alone: a name, settings, and a function that runs it.
``run_trials`` runs the trials without a result in worker processes, a ``Store`` keeps the results
as files, and a ``Table`` is written as CSV and as Markdown.
"""

from __future__ import annotations

import csv
import io
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pages import Cell, markdown_table
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from factormix.estimators import MFA
from factormix.files import make_folder, replacing, write_whole

Settings = Mapping[str, Any]
"""Everything a trial's result depends on, ready for JSON."""

GRACE = 10.0
"""Seconds that a process has to remove its temporary files before it is killed; a write of the
largest results takes about one."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_ARRAYS, _MODEL = ".arrays.safetensors", ".safetensors"


@dataclass(frozen=True)
class Outcome:
    """The result of a trial: values ready for JSON, arrays, and a model for pictures."""

    values: dict[str, Any]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    model: MFA | None = None


@dataclass(frozen=True)
class Trial:
    """One piece of work; ``run(settings, data_folder)`` does it.

    ``run`` is a function of a module, so that another process can import it.
    """

    experiment: str
    name: str
    settings: Settings
    run: Callable[[Settings, str | None], Outcome] = field(compare=False)

    @property
    def title(self) -> str:
        """The name of the trial among all experiments."""
        return f"{self.experiment}/{self.name}"


@dataclass(frozen=True)
class Result:
    """A finished trial and its values."""

    trial: Trial
    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return a setting or a value."""
        settings = self.trial.settings
        return settings[name] if name in settings else self.values[name]


class Store:
    """The result files of trials in a folder.

    The JSON file of a trial is written last: a trial that has one is finished.
    """

    def __init__(self, folder: Path) -> None:
        # A trial may change the working directory of its process.
        self.folder = folder.absolute()

    def path(self, trial: Trial, suffix: str = ".json") -> Path:
        """Return the path of one of a trial's files."""
        return self.folder / trial.experiment / f"{trial.name}{suffix}"

    def read(self, trial: Trial) -> dict[str, Any] | None:
        """Return a finished trial's values, None if it must be run."""
        try:
            content = json.loads(self.path(trial).read_text())
        except (OSError, ValueError):
            return None
        # A file with other settings is the result of another plan.
        if not isinstance(content, dict) or content.get("settings") != _to_json(trial.settings):
            return None
        values = content.get("values")
        if not isinstance(values, dict) or not values:
            return None
        files = content.get("files", [])
        return values if all(_is_readable(self.path(trial, name)) for name in files) else None

    def arrays(self, trial: Trial) -> dict[str, NDArray[Any]]:
        """Return the arrays of a finished trial."""
        return dict(load_file(self.path(trial, _ARRAYS)))

    def model_path(self, trial: Trial) -> Path | None:
        """Return the path of a trial's model, None if it has none."""
        path = self.path(trial, _MODEL)
        return path if path.exists() else None

    def write(self, trial: Trial, outcome: Outcome) -> None:
        """Write a trial's files, the JSON file last."""
        path = self.path(trial)
        make_folder(path.parent)
        if outcome.arrays:
            contiguous = {name: np.ascontiguousarray(a) for name, a in outcome.arrays.items()}
            with replacing(self.path(trial, _ARRAYS)) as temporary:
                save_file(contiguous, temporary)
        if outcome.model is not None:
            outcome.model.save(self.path(trial, _MODEL), training_state=False)
        files = [_ARRAYS] * bool(outcome.arrays) + [_MODEL] * (outcome.model is not None)
        content = {"settings": _to_json(trial.settings), "values": outcome.values, "files": files}
        write_whole(path, json.dumps(content, indent=1).encode())

    def discard(self, trial: Trial) -> None:
        """Remove a result, so that the trial is run again."""
        self.path(trial).unlink(missing_ok=True)


def _is_readable(path: Path) -> bool:
    try:
        with safe_open(path, framework="np"):
            return True
    except (OSError, SafetensorError):
        return False


def _to_json(settings: Settings) -> Any:
    """Return settings as they come back from JSON, for comparison."""
    return json.loads(json.dumps(dict(settings)))


def read_results(trials: Iterable[Trial], store: Store) -> list[Result]:
    """Read the values of all finished trials, once each."""
    found = {trial.title: (trial, store.read(trial)) for trial in trials}
    return [Result(trial, values) for trial, values in found.values() if values is not None]


def run_trials(
    trials: Sequence[Trial],
    store: Store,
    data_folder: str | None = None,
    jobs: int | None = None,
    *,
    threads: int | None = 1,
    fresh: bool = False,
    on_finish: Callable[[Trial, str | None], object] | None = None,
) -> dict[str, str]:
    """Run the trials without a result, ``jobs`` at a time, and return the reasons of failures.

    Each process uses ``threads`` threads, or as many as its packages choose if None. With ``fresh``
    each trial has a process to itself. ``on_finish(trial, failure)`` is called after every trial.
    An interrupt loses only the running trials.
    """
    # Experiments may share trials.
    unique = {store.path(trial): trial for trial in trials}.values()
    todo = deque(trial for trial in unique if store.read(trial) is None)
    jobs = min(jobs or os.cpu_count() or 1, len(todo))
    failures: dict[str, str] = {}
    idle: list[_Worker] = []
    busy: dict[Connection, _Worker] = {}
    try:
        with tqdm(total=len(todo), unit="trial", file=sys.stderr, disable=None) as bar:
            while todo or busy:
                while todo and len(busy) < jobs:
                    worker = idle.pop() if idle else _Worker(store, data_folder, threads)
                    busy[worker.connection] = worker
                    worker.send(todo.popleft())
                ready = wait(list(busy))
                for worker in [busy[one] for one in busy if one in ready]:
                    failure = worker.receive()
                    del busy[worker.connection]
                    if fresh:
                        _end_workers([worker])
                    elif worker.process.is_alive():
                        idle.append(worker)
                    if failure is not None:
                        failures[worker.trial.title] = failure
                    bar.update()
                    if on_finish is not None:
                        on_finish(worker.trial, failure)
    finally:
        _end_workers([*busy.values(), *idle])
    return failures


class _Worker:
    """A process, the connection to it and the trial that it runs."""

    trial: Trial

    def __init__(self, store: Store, data_folder: str | None, threads: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (theirs, store.folder, data_folder, threads)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        with _set_thread_variables(threads):
            self.process.start()
        theirs.close()
        self._store = store

    def send(self, trial: Trial) -> None:
        self.trial = trial
        # If the process has died, receiving from it will fail.
        with suppress(BrokenPipeError):
            self.connection.send(trial)

    def receive(self) -> str | None:
        """Return the reason if the trial failed."""
        try:
            failure: str | None = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            # A process may die after it has written the result.
            if self._store.read(self.trial) is not None:
                return None
            return f"its process ended with code {self.process.exitcode}"
        return failure


def _end_workers(workers: Sequence[_Worker]) -> None:
    """End processes; the files that they were writing are complete or absent."""
    for worker in workers:
        worker.process.terminate()
    until = time.monotonic() + GRACE
    for worker in workers:
        worker.process.join(max(0.0, until - time.monotonic()))
        worker.process.kill()
        worker.connection.close()


@contextmanager
def _set_thread_variables(threads: int | None) -> Iterator[None]:
    """Set the number of threads of processes that are started in the block."""
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


def _work(
    connection: Connection, folder: Path, data_folder: str | None, threads: int | None
) -> None:
    """Run the trials that are received, until the parent closes the connection or ends."""
    # Ctrl-C is left to the parent. SIGTERM unwinds the stack, which removes temporary files.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_once)
    if threads is not None:
        torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with_parent, args=(parent.sentinel,), daemon=True).start()
    store = Store(folder)
    try:
        while True:
            connection.send(_run(connection.recv(), store, data_folder))
    except (EOFError, BrokenPipeError, SystemExit):
        # At once: threads that some packages leave behind would keep the process waiting.
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


def _exit_once(signum: int, frame: object) -> None:
    # A second signal would disturb the removal of temporary files.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def _end_with_parent(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


@dataclass(frozen=True)
class Table:
    """A table under the name of its files."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def csv(self) -> str:
        """Write all cells in full, None as an empty cell."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()

    def markdown(self) -> str:
        """Write the cells without the caption."""
        return markdown_table(self.columns, self.rows)

    def save(self, folder: Path) -> None:
        """Write ``name.csv`` and ``name.md`` into a folder."""
        make_folder(folder)
        write_whole(folder / f"{self.name}.csv", self.csv().encode())
        content = f"{self.caption}\n\n{self.markdown()}\n"
        write_whole(folder / f"{self.name}.md", content.encode())


def median(values: Iterable[float]) -> float:
    """Return the median, NaN if there are no values."""
    known = list(values)
    return statistics.median(known) if known else math.nan
