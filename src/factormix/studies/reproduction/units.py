"""Units of work: each is run once, in a process of its own kind, and leaves one result file."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from factormix.errors import InputError
from factormix.estimators import MFA
from factormix.files import replacing

__all__ = ["Outcome", "Store", "Unit", "run_units"]

Settings = Mapping[str, Any]

GRACE = 10.0
"""Seconds that a process has to end in when it is asked to."""


@dataclass(frozen=True)
class Outcome:
    """Hold what a unit found: JSON-ready values, arrays and a model for pictures."""

    values: dict[str, Any]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    model: MFA | None = None


@dataclass(frozen=True)
class Unit:
    """Name one piece of work; ``run(settings, data_folder)`` does it.

    ``run`` is a function of a module, so that another process can find it.
    """

    experiment: str
    name: str
    settings: Settings
    run: Callable[[Settings, str | None], Outcome] = field(compare=False)


class Store:
    """Keep the result files of units in a folder.

    The JSON file of a unit is written last and whole: where it is, the unit is finished.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, unit: Unit, suffix: str = ".json") -> Path:
        """Return the path of one of a unit's files."""
        return self.folder / unit.experiment / f"{unit.name}{suffix}"

    def read(self, unit: Unit) -> dict[str, Any] | None:
        """Return a finished unit's values, None if it has to be run (again)."""
        try:
            content = json.loads(self.path(unit).read_text())
        except (OSError, ValueError):
            return None
        # A file of other settings is the result of another plan.
        if not isinstance(content, dict) or content.get("settings") != _plain(unit.settings):
            return None
        values = content.get("values")
        whole = isinstance(values, dict) and bool(values) and self._has(unit, content)
        return values if whole else None

    def _has(self, unit: Unit, content: Mapping[str, Any]) -> bool:
        """Tell whether the files that a unit left beside its values are there and readable."""
        from safetensors import SafetensorError, safe_open

        for suffix in content.get("files", []):
            try:
                with safe_open(self.path(unit, suffix), framework="np") as file:
                    file.keys()
            except (OSError, SafetensorError):
                return False
        return True

    def arrays(self, unit: Unit) -> dict[str, NDArray[Any]]:
        """Return the arrays that a unit left."""
        from safetensors.numpy import load_file

        return dict(load_file(self.path(unit, ".arrays.safetensors")))

    def write(self, unit: Unit, outcome: Outcome) -> None:
        """Write a unit's files, the one that says it is finished last."""
        path = self.path(unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        if outcome.arrays:
            from safetensors.numpy import save_file

            contiguous = {name: np.ascontiguousarray(a) for name, a in outcome.arrays.items()}
            with replacing(self.path(unit, ".arrays.safetensors")) as temporary:
                save_file(contiguous, temporary)
        if outcome.model is not None:
            outcome.model.save(self.path(unit, ".safetensors"), training_state=False)
        files = [".arrays.safetensors"] * bool(outcome.arrays)
        files += [".safetensors"] * (outcome.model is not None)
        content = {"settings": _plain(unit.settings), "values": outcome.values, "files": files}
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1))


def run_units(
    units: Sequence[Unit],
    store: Store,
    data_folder: str | None = None,
    jobs: int | None = None,
) -> dict[str, str]:
    """Run the units without a result file, ``jobs`` at a time, and return what failed and why.

    Each process uses one thread. An interrupt loses only the units under way.
    """
    todo = _missing(units, store)
    if not todo:
        return {}
    jobs = min(jobs or os.cpu_count() or 1, len(todo))
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_prepare_process
    )
    failures: dict[str, str] = {}
    try:
        futures = {pool.submit(_work, unit, store.folder, data_folder): unit for unit in todo}
        for future in _shown(futures):
            error = future.exception()
            if error is not None:
                unit = futures[future]
                failures[f"{unit.experiment}/{unit.name}"] = f"{type(error).__name__}: {error}"
    except BaseException:
        _stop(pool)
        raise
    pool.shutdown()
    return failures


def _missing(units: Iterable[Unit], store: Store) -> list[Unit]:
    """List the units to run, once each: experiments may share some."""
    by_path = {store.path(unit): unit for unit in units}
    return [unit for unit in by_path.values() if store.read(unit) is None]


def _shown(futures: Mapping[Future[None], Unit]) -> Iterable[Future[None]]:
    """Yield futures as they are done, behind a progress bar on a terminal."""
    done: Iterable[Future[None]] = tqdm(
        as_completed(futures), total=len(futures), unit="unit", file=sys.stderr, disable=None
    )
    return done


def _stop(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool at once; the files they were to write are whole or absent."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    until = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        process.kill()


def _prepare_process() -> None:
    """Leave interrupts to the parent, use one thread, and end when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What is being written when the parent stops this process is taken away on the way out.
    signal.signal(signal.SIGTERM, _leave)
    torch.set_num_threads(1)
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


def _work(unit: Unit, folder: Path, data_folder: str | None) -> None:
    try:
        outcome = unit.run(unit.settings, data_folder)
        Store(folder).write(unit, outcome)
    except MemoryError as error:
        raise InputError("there is not enough memory: use fewer --jobs") from error
    except _Stopped:
        # The pool would take it for a failure of the unit, and give the process another one.
        os._exit(1)


def _plain(settings: Settings) -> Any:
    """Bring settings to what JSON makes of them, for comparison."""
    return json.loads(json.dumps(dict(settings)))
