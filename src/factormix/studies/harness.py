"""Several numbers as one: means with deviations, and medians.

Tables of numbers, as CSV for programs and as Markdown for people.

Trials: pieces of work that stand alone, and what they find.

The results of trials on disk.

Trials in processes: several at a time, ended together, and none lost with another.

A process works on one trial after another, or on a single one when it is to be fresh. A trial is
finished when its result is in the store, whatever became of its process.

The harness of the studies: trials, their results on disk, and tables of numbers.

A *trial* is a piece of work that stands alone: a name, settings, and a function that does it.
``run_trials`` runs the trials that have no result yet in processes of their own, a ``Store`` keeps
the results as files, and a ``Table`` is written as CSV and as Markdown.
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
from tqdm import tqdm

from factormix.estimators import MFA
from factormix.files import make_folder, replacing, write_whole
from factormix.views import report

__all__ = [
    "Cell",
    "Outcome",
    "Result",
    "Settings",
    "Spread",
    "Store",
    "Table",
    "Trial",
    "folded",
    "median",
    "read_results",
    "run_trials",
    "spread",
]


@dataclass(frozen=True)
class Spread:
    """Hold mean, standard deviation and number of some runs."""

    mean: float
    deviation: float
    n: int

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """Write mean ± deviation (runs)."""
        mean = f"{scale * self.mean:.{digits}f}"
        if self.n == 1:
            return f"{mean} (1)"
        return f"{mean} ± {scale * self.deviation:.{digits}f} ({self.n})"

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 for a single run, which has none to show."""
        return self.deviation / math.sqrt(self.n)


def spread(values: Iterable[float]) -> Spread | None:
    """Summarise some runs (sample standard deviation), None if there are none."""
    array = np.array(list(values), dtype=np.float64)
    if not len(array):
        return None
    deviation = float(array.std(ddof=1)) if len(array) > 1 else 0.0
    return Spread(float(array.mean()), deviation, len(array))


def median(values: Iterable[float]) -> float:
    """Return the median; NaN if there are no values."""
    known = list(values)
    return statistics.median(known) if known else math.nan


folded = report.markdown_fold
"""Put Markdown behind a fold."""

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Hold a table under the name of its files."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def csv(self) -> str:
        """Write all cells in full; an empty one stands for nothing."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()

    def markdown(self) -> str:
        """Write the cells as a report does; the caption is left to the page around them."""
        return report.markdown_table(report.Table.of(self.columns, self.rows))

    def save(self, folder: Path) -> None:
        """Write ``name.csv`` and ``name.md`` into a folder."""
        make_folder(folder)
        write_whole(folder / f"{self.name}.csv", self.csv().encode())
        content = f"{self.caption}\n\n{self.markdown()}\n"
        write_whole(folder / f"{self.name}.md", content.encode())


Settings = Mapping[str, Any]
"""All that a trial's result depends on, ready for JSON."""


@dataclass(frozen=True)
class Outcome:
    """Hold what a trial found: values ready for JSON, arrays, and a model for pictures."""

    values: dict[str, Any]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    model: MFA | None = None


@dataclass(frozen=True)
class Trial:
    """Name one piece of work; ``run(settings, data_folder)`` does it.

    ``run`` is a function of a module, so that another process can find it.
    """

    experiment: str
    name: str
    settings: Settings
    run: Callable[[Settings, str | None], Outcome] = field(compare=False)

    @property
    def title(self) -> str:
        """The trial's name among those of all experiments."""
        return f"{self.experiment}/{self.name}"


_ARRAYS, _MODEL = ".arrays.safetensors", ".safetensors"


class Store:
    """Keep the result files of trials in a folder.

    The JSON file of a trial is written last and whole: where it is, the trial is finished.
    """

    def __init__(self, folder: Path) -> None:
        # A trial may change the working directory of its process.
        self.folder = folder.absolute()

    def path(self, trial: Trial, suffix: str = ".json") -> Path:
        """Return the path of one of a trial's files."""
        return self.folder / trial.experiment / f"{trial.name}{suffix}"

    def read(self, trial: Trial) -> dict[str, Any] | None:
        """Return a finished trial's values, None if it has to be run (again)."""
        try:
            content = json.loads(self.path(trial).read_text())
        except (OSError, ValueError):
            return None
        # A file of other settings is the result of another plan.
        if not isinstance(content, dict) or content.get("settings") != _plain(trial.settings):
            return None
        values = content.get("values")
        whole = isinstance(values, dict) and bool(values) and self._has(trial, content)
        return values if whole else None

    def _has(self, trial: Trial, content: Mapping[str, Any]) -> bool:
        """Tell whether the files that a trial left beside its values are there and readable."""
        from safetensors import SafetensorError, safe_open

        for suffix in content.get("files", []):
            try:
                with safe_open(self.path(trial, suffix), framework="np") as file:
                    file.keys()
            except (OSError, SafetensorError):
                return False
        return True

    def arrays(self, trial: Trial) -> dict[str, NDArray[Any]]:
        """Return the arrays that a trial left."""
        from safetensors.numpy import load_file

        return dict(load_file(self.path(trial, _ARRAYS)))

    def model_path(self, trial: Trial) -> Path | None:
        """Return the path of the model that a trial left, None if it left none."""
        path = self.path(trial, _MODEL)
        return path if path.exists() else None

    def write(self, trial: Trial, outcome: Outcome) -> None:
        """Write a trial's files, the one that says it is finished last."""
        path = self.path(trial)
        make_folder(path.parent)
        if outcome.arrays:
            from safetensors.numpy import save_file

            contiguous = {name: np.ascontiguousarray(a) for name, a in outcome.arrays.items()}
            with replacing(self.path(trial, _ARRAYS)) as temporary:
                save_file(contiguous, temporary)
        if outcome.model is not None:
            outcome.model.save(self.path(trial, _MODEL), training_state=False)
        files = [_ARRAYS] * bool(outcome.arrays) + [_MODEL] * (outcome.model is not None)
        content = {"settings": _plain(trial.settings), "values": outcome.values, "files": files}
        write_whole(path, json.dumps(content, indent=1).encode())

    def discard(self, trial: Trial) -> None:
        """Forget a result, so that the trial is run again."""
        self.path(trial).unlink(missing_ok=True)


@dataclass(frozen=True)
class Result:
    """Hold a finished trial and its values."""

    trial: Trial
    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return a setting or a value."""
        settings = self.trial.settings
        return settings[name] if name in settings else self.values[name]


def read_results(trials: Iterable[Trial], store: Store) -> list[Result]:
    """Read the values of all trials that are finished, once each."""
    found = {trial.title: (trial, store.read(trial)) for trial in trials}
    return [Result(trial, values) for trial, values in found.values() if values is not None]


def _plain(settings: Settings) -> Any:
    """Bring settings to what JSON makes of them, for comparison."""
    return json.loads(json.dumps(dict(settings)))


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
