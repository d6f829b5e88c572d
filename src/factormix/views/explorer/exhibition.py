"""The log-likelihood and the component of every row of the data, computed in the background.

Pictures of a model at the moments when training saved it.

What the page is about: a model that may still be in training, and rows to look at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from factormix.data.features import rows_at
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows
from factormix.errors import InputError
from factormix.estimators import MFA, load
from factormix.estimators.validation import check_rows
from factormix.training.checkpoints import checkpoints_in
from factormix.views.explorer.arrangement import arrange, grid_shape
from factormix.views.explorer.subject import Subject

if TYPE_CHECKING:
    from factormix.views.explorer.subject import Subject

__all__ = ["Exhibition", "NotYet", "Scores", "Snapshot", "Snapshots"]

BLOCK_ELEMENTS = 1 << 22
"""Values that are scored at once."""
BINS = 48
FAR_TAIL = 5.0
"""Where a histogram begins at the latest: so many times the middle half below the median."""


class Scores:
    """Score rows one block after the other, and tell what is known so far."""

    def __init__(self, subject: Subject, rows: Rows) -> None:
        self.subject, self.rows = subject, rows
        self.done = 0
        self.incomplete = 0
        """Rows so far with values missing."""
        self._distances = np.zeros(rows.n_rows, np.float32)
        self.problem: str | None = None
        self._values = np.zeros(rows.n_rows)
        self._components = np.zeros(rows.n_rows, np.int32)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin, unless it has begun already."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._score, daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End after the block under way."""
        self._ended.set()

    @property
    def complete(self) -> bool:
        """Whether every row has its score."""
        return self.done == self.rows.n_rows

    def state(self) -> dict[str, Any]:
        """Tell how far the scoring is."""
        return {"done": self.done, "rows": self.rows.n_rows, "problem": self.problem}

    def wait(self) -> None:
        """Wait until the scoring has ended."""
        self.start()
        assert self._thread is not None
        self._thread.join()

    def _score(self) -> None:
        try:
            for block in self.rows.blocks(max(1, BLOCK_ELEMENTS // self.rows.n_features)):
                if self._ended.is_set():
                    return
                rows = ArrayRows(block.rows).known_finite()
                scores, best = self.subject.model.score_and_predict(rows)
                part = slice(self.done, self.done + len(block))
                self._values[part], self._components[part] = scores, best
                self._distances[part] = self._apart(block.rows, best)
                if self.done + len(block) == self.rows.n_rows:
                    self._order = np.argsort(self._values, kind="stable")
                    self._ordered = self._values[self._order]
                self.done += len(block)
        except InputError as error:
            self.problem = str(error)
        except Exception as error:
            self.problem = f"the rows could not be scored ({type(error).__name__}: {error})."

    def percentile(self, score: float) -> float:
        """Compute the share of the rows that are less likely than a score."""
        return float(np.searchsorted(self._ordered, score)) / len(self._ordered)

    def threshold(self, share: float) -> float:
        """Find the score below which the given share of the rows lies."""
        return float(np.quantile(self._ordered, share))

    def of(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Return the scores and components of some rows."""
        return self._values[numbers], self._components[numbers]

    def extremes(self, n: int, *, least: bool) -> NDArray[np.int64]:
        """Return the numbers of the n least or most likely rows, the most extreme first."""
        return self._order[:n] if least else self._order[::-1][:n]

    def nearest(self, k: int, n: int) -> NDArray[np.int64]:
        """Return the rows of a component that are most like its centroid, at most n."""
        mine = np.flatnonzero(self._components == k)
        return mine[np.argsort(self._distances[mine], kind="stable")[:n]]

    def _apart(self, rows: Any, best: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """Compute the mean squared distance (B,) of rows (B, d) to the centroids they belong to.

        In the units that are shown, over the values that are there.
        """
        off = self.subject.display.row(rows) - self.subject.means[best]
        there = np.isfinite(off)
        self.incomplete += int((~there.all(axis=1)).sum())
        squares = np.where(there, off, 0.0) ** 2
        near: NDArray[np.float32] = squares.sum(axis=1) / np.maximum(1, there.sum(axis=1))
        return near

    def by_component(self, n_components: int, share: float) -> dict[str, NDArray[np.float64]]:
        """Count rows, average scores and count outliers for each component, (K,); NaN for none."""
        counts = np.bincount(self._components, minlength=n_components).astype(np.float64)
        below = self._values < self.threshold(share)
        with np.errstate(invalid="ignore", divide="ignore"):
            sums = np.bincount(self._components, self._values, n_components)
            outliers = np.bincount(self._components, below, n_components)
            return {"rows": counts, "likelihood": sums / counts, "outliers": outliers / counts}

    def histogram(self) -> dict[str, Any]:
        """Count rows by score; those far below the others are counted in one number."""
        ordered = self._ordered
        lower, median, upper = np.quantile(ordered, (0.25, 0.5, 0.75))
        low = median - FAR_TAIL * (upper - lower)
        inside = ordered[ordered >= low]
        counts, edges = np.histogram(inside, min(BINS, 4 + len(ordered) // 8))
        return {
            "counts": counts,
            "edges": edges,
            "below": len(ordered) - len(inside),
            "lowest": ordered[0],
            "mean": ordered.mean(),
        }


MOST = 60
"""Snapshots that are kept: when there are more, every other one goes."""
SHOWN = 150
"""Components of a snapshot, the heaviest ones."""
BYTES = 400_000
"""Bytes of the pictures of a snapshot."""
CURVE = 600
"""Points of a curve, at most."""


@dataclass(frozen=True)
class Snapshot:
    """The heaviest components of a model at one moment, laid out on a grid."""

    version: int
    facts: dict[str, Any]
    tiles: NDArray[np.uint8]
    weights: NDArray[np.float32]


class Snapshots:
    """Keep a bounded number of snapshots, and the history of the newest model."""

    def __init__(self) -> None:
        self._kept: list[Snapshot] = []
        self._history: list[dict[str, float]] = []
        # The centroids of the newest snapshot, cell by cell: each stays in its place as it forms.
        self._before: NDArray[np.float32] | None = None

    def add(self, version: int, subject: Subject) -> None:
        """Take a snapshot of a model that was just loaded."""
        self._history = list(subject.model.history_)
        heaviest = np.sort(np.argsort(-subject.weights, kind="stable")[:SHOWN])
        rows, cols = grid_shape(len(heaviest))
        order = heaviest[arrange(subject.means[heaviest], rows, cols, self._before)]
        self._before = subject.means[order]
        last = self._history[-1] if self._history else {}
        facts = {
            "version": version,
            "time": time.time(),
            "step": subject.model.n_steps_,
            "epoch": last.get("epoch"),
            "log_likelihood": last.get("log_likelihood"),
            "components": subject.K,
            "in_use": int(subject.in_use.sum()),
            "rows": rows,
            "cols": cols,
            "shown": len(order),
        }
        tiles = subject.display.tiles(subject.means[order], BYTES)
        weights = subject.weights[order].astype(np.float32)
        kept = [*self._kept, Snapshot(version, facts, tiles, weights)]
        # The newest stays whatever is dropped.
        self._kept = kept if len(kept) <= MOST else [*kept[:-1:2], kept[-1]]

    def listed(self) -> list[dict[str, Any]]:
        """Describe all snapshots, oldest first."""
        return [snapshot.facts for snapshot in self._kept]

    def get(self, version: int) -> Snapshot:
        """Return the snapshot of a version."""
        for snapshot in self._kept:
            if snapshot.version == version:
                return snapshot
        raise InputError(f"there is no snapshot {version} any more: take a newer one.")

    def curves(self) -> dict[str, list[float | None]]:
        """Return the history of the training as curves of a bounded number of points."""
        history = self._history
        thinned = history[:: max(1, len(history) // CURVE)]
        thinned += history[-1:] if thinned and thinned[-1] is not history[-1] else []
        names = ("step", "epoch", "log_likelihood", "held_out", "components", "components_in_use")
        return {name: [record.get(name) for record in thinned] for name in names}


LOOK_SECONDS = 0.5
"""Time between two looks at the model on disk."""


class NotYet(InputError):
    """Something is asked for that is not there yet, and soon will be."""


class Exhibition:
    """Hold the newest model of a file or folder of checkpoints, its snapshots, and the data."""

    def __init__(
        self, path: Path, image_shape: Sequence[int] | None = None, *, profiles: bool = False
    ) -> None:
        """Show rows as images of ``image_shape``, or as the model says; or all as ``profiles``."""
        self.path, self._image_shape, self._profiles = path, image_shape, profiles
        self.rows: Rows | None = None
        self.version = 0
        self.problem: str | None = None
        self.snapshots = Snapshots()
        self._subject: Subject | None = None
        self._scores: Scores | None = None
        self._stamp: tuple[int, ...] = ()
        self._closed = threading.Event()

    @property
    def there(self) -> bool:
        """Whether there is a model to open."""
        return bool(self._stamped())

    def open(self) -> None:
        """Load the model; raise what is wrong with it."""
        self._load(self._stamped())

    def show(self, rows: Rows) -> None:
        """Take rows as the data, and begin to score them if the model is a finished one."""
        self.rows = rows
        if self._subject is not None:
            self._scores = self._scores_under(self._subject)

    @property
    def image_size(self) -> tuple[int, int] | None:
        """The height and width of the rows as images; None if they are none, or not known yet."""
        shape = None if self._subject is None else self._subject.model.image_shape_
        return (shape[0], shape[1]) if shape else None

    def watch(self) -> None:
        """Load the model again, in the background, whenever its file changes."""
        threading.Thread(target=self._look, daemon=True).start()

    def close(self) -> None:
        """Stop watching and scoring."""
        self._closed.set()
        if self._scores is not None:
            self._scores.stop()

    @property
    def subject(self) -> Subject:
        """The newest model."""
        if self._subject is None:
            raise NotYet(f"{self.path} is not there yet: it appears when training first saves it.")
        return self._subject

    @property
    def scores(self) -> Scores:
        """The scores of the data under the newest model; asking for them starts the scoring."""
        if self._scores is None:
            raise InputError("no data was given: start again with --data to see its rows.")
        self._scores.start()
        return self._scores

    @property
    def complete_scores(self) -> Scores:
        """The scores of the data once all of it is scored."""
        scores = self.scores
        if scores.problem is not None:
            raise InputError(scores.problem)
        if not scores.complete:
            raise NotYet(f"{scores.done:,} of {scores.rows.n_rows:,} rows are scored so far.")
        return scores

    def values(self, numbers: Sequence[int]) -> NDArray[Any]:
        """Return rows (m, d) of the data, with its columns in the order of the model."""
        rows = np.asarray(rows_at(self.scores.rows, np.asarray(numbers, np.int64)).rows)
        return rows.astype(np.float64)

    def state(self) -> dict[str, Any]:
        """Tell what is there, for a page that looks again and again."""
        scores = self._scores
        return {
            "version": self.version,
            "path": self.path.name,
            "saved": max(0.0, time.time() - self._stamp[0] / 1e9) if self._stamp else None,
            "finished": None if self._subject is None else bool(self._subject.model.finished_),
            "problem": self.problem,
            "data": None if scores is None else scores.state(),
        }

    def _stamped(self) -> tuple[int, ...]:
        """Return what changes with the model; nothing if it is not there.

        A folder of checkpoints changes with its newest one.
        """
        try:
            newest = checkpoints_in(self.path)[-1:] if self.path.is_dir() else [self.path]
            found = [path.stat() for path in newest]
        except OSError:
            return ()
        return tuple(n for one in found for n in (one.st_mtime_ns, one.st_ino, one.st_size))

    def _look(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            stamp = self._stamped()
            if stamp == self._stamp or not stamp:
                continue
            try:
                self._load(stamp)
            except InputError as error:
                # The page goes on with the last model, and says what is wrong with the new one.
                self.problem, self._stamp = str(error), stamp

    def _load(self, stamp: tuple[int, ...]) -> None:
        model: object = load(self.path)
        if not isinstance(model, MFA):
            raise InputError(
                f"{self.path} holds an {type(model).__name__}, and the explorer shows single"
                " mixtures: give a model that factormix train wrote."
            )
        subject = Subject(model, self._image_shape, profiles=self._profiles)
        subject.prepare()
        scores = self._scores_under(subject)
        before, self._scores = self._scores, scores
        self._subject, self._stamp, self.problem = subject, stamp, None
        self.snapshots.add(self.version + 1, subject)
        self.version += 1
        if before is not None:
            before.stop()

    def _scores_under(self, subject: Subject) -> Scores | None:
        if self.rows is None:
            return None
        scores = Scores(subject, check_rows(subject.model, self.rows))
        # A model in training is scored when somebody asks, as there will soon be another.
        if subject.model.finished_:
            scores.start()
        return scores
