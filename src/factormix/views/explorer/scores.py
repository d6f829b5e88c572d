"""The log-likelihood and the component of every row of the data, computed in the background."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from factormix.data.sources import ArrayRows, Rows
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.views.explorer.subject import Subject

__all__ = ["Scores"]

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
