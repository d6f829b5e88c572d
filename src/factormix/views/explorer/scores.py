"""Score every row of the data under a model, in a background thread."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.data.checks import count_chunk_rows
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows
from factormix.errors import InputError
from factormix.views.explorer.model_view import ModelView

MAX_BINS = 48
"""Most bars of the histogram of scores, which is 720 pixels wide: 15 each."""
TAIL = 5.0
"""Interquartile ranges below the median at which the histogram starts: 6.7 standard deviations of
a Gaussian, so that only outliers lie beyond."""


class BackgroundWork:
    """Work on rows that a thread does once: its progress, and what went wrong."""

    def __init__(self) -> None:
        self.done = 0
        """Number of rows done so far."""
        self.problem: str | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start, unless it has started already."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def stop(self, seconds: float = 0.0) -> None:
        """Stop after the current block, and wait for that at most some seconds."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def wait(self) -> None:
        """Wait for the end."""
        self.start()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError


class RowScores(BackgroundWork):
    """The log-likelihood and the component of every row, and how far the scoring is."""

    def __init__(self, view: ModelView, rows: Rows) -> None:
        super().__init__()
        self.view, self.rows = view, rows
        self.incomplete = 0
        """Rows with missing values among those scored so far."""
        self.left_out = False
        """Whether these are the training rows, each scored as if it had been left out."""
        self._scores = np.zeros(rows.n_rows)
        self._components = np.zeros(rows.n_rows, np.int32)
        self._distances = np.zeros(rows.n_rows, np.float32)

    @property
    def complete(self) -> bool:
        """Whether every row has its score."""
        return self.done == self.rows.n_rows

    def state(self) -> dict[str, Any]:
        """Return how far the scoring is."""
        return {"done": self.done, "rows": self.rows.n_rows, "problem": self.problem}

    # The following methods need all rows to be scored.

    def percentile(self, score: float) -> float:
        """Return the share of rows less likely than ``score``."""
        return float(np.searchsorted(self._ascending, score)) / len(self._ascending)

    def threshold(self, share: float) -> float:
        """Return the score below which a given share of the rows lies."""
        return float(np.quantile(self._ascending, share))

    def at(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the scores of some rows."""
        return self._scores[numbers]

    def extremes(self, n: int, *, least: bool) -> NDArray[np.int64]:
        """Return the numbers of the n least or most likely rows, the most extreme first."""
        return self._order[:n] if least else self._order[::-1][:n]

    def nearest(self, k: int, n: int) -> NDArray[np.int64]:
        """Return at most n rows of component ``k``, nearest to its centroid first."""
        members = np.flatnonzero(self._components == k)
        return members[np.argsort(self._distances[members], kind="stable")[:n]]

    def by_component(self, n_components: int, share: float) -> dict[str, NDArray[np.float64]]:
        """Return rows, mean score and outlier share of each component, (K,); NaN without rows."""
        counts = np.bincount(self._components, minlength=n_components).astype(np.float64)
        outlying = self._scores < self.threshold(share)
        with np.errstate(invalid="ignore", divide="ignore"):
            sums = np.bincount(self._components, self._scores, n_components)
            outliers = np.bincount(self._components, outlying, n_components)
            return {"rows": counts, "likelihood": sums / counts, "outliers": outliers / counts}

    def histogram(self) -> dict[str, Any]:
        """Count rows by score; rows far below the others are counted in one number."""
        scores = self._ascending
        lower, median, upper = np.quantile(scores, (0.25, 0.5, 0.75))
        inside = scores[scores >= median - TAIL * (upper - lower)]
        counts, edges = np.histogram(inside, min(MAX_BINS, 4 + len(scores) // 8))
        return {
            "counts": counts,
            "edges": edges,
            "below": len(scores) - len(inside),
            "lowest": scores[0],
            "mean": scores.mean(),
        }

    def _run(self) -> None:
        try:
            model = self.view.model
            self.left_out = model.is_trained_on(self.rows)
            for block in self.rows.blocks(count_chunk_rows(self.rows)):
                if self._stopped.is_set():
                    return
                rows = ArrayRows(block.rows).mark_finite()
                scores, best = model.score_and_predict(rows)
                if self.left_out:
                    scores = model.leave_one_out_scores(rows)
                part = slice(self.done, self.done + len(block))
                self._scores[part], self._components[part] = scores, best
                self._distances[part] = self._measure_distances(block.rows, best)
                if self.done + len(block) == self.rows.n_rows:
                    self._order = np.argsort(self._scores, kind="stable")
                    self._ascending = self._scores[self._order]
                self.done += len(block)
        except InputError as error:
            self.problem = str(error)
        except Exception as error:
            self.problem = f"the rows could not be scored ({type(error).__name__}: {error})."

    def _measure_distances(self, rows: Any, best: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """Return the mean squared distances (B,) of rows (B, d) to their centroids.

        Distances are in the units shown and over the observed values.
        """
        deviations = self.view.display.convert_rows(rows) - self.view.means[best]
        observed = np.isfinite(deviations)
        self.incomplete += int((~observed.all(axis=1)).sum())
        squares = np.where(observed, deviations, 0.0) ** 2
        means: NDArray[np.float32] = squares.sum(axis=1) / np.maximum(1, observed.sum(axis=1))
        return means
