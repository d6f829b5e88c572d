"""What the page is about: a model that may still be in training, and rows to look at."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.data.sources import Rows, rows_at
from factormix.errors import InputError
from factormix.estimators import MFA, load
from factormix.estimators.validation import check_rows
from factormix.training.snapshots import checkpoints_in
from factormix.views.explorer.scores import Scores
from factormix.views.explorer.snapshots import Snapshots
from factormix.views.explorer.subject import Subject

__all__ = ["Exhibition", "NotYet"]

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
