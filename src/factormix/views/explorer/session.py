"""What the page is about: a model that may still be in training, its snapshots, and the data."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.activations.atlas import Atlas
from factormix.activations.store import Store
from factormix.data.sources.base import Rows, take_rows
from factormix.errors import InputError
from factormix.estimators import MFA, ConvMFA, load
from factormix.estimators.validation import check_rows
from factormix.training.checkpoints import checkpoints_in
from factormix.views.explorer.image_view import ImageView
from factormix.views.explorer.layout import arrange_on_grid, choose_grid
from factormix.views.explorer.model_view import ModelView
from factormix.views.explorer.scores import BackgroundWork, RowScores
from factormix.views.explorer.text import TextView

POLL_SECONDS = 0.5
"""Time between two looks at the model on disk, where training saves every 2 s at the most often."""
END_SECONDS = 5.0
"""Wait for background threads at the end: one within torch makes the process abort."""
MAX_SNAPSHOTS = 60
"""When there are more snapshots, every other one is dropped."""
SNAPSHOT_COMPONENTS = 150
"""Components of a snapshot, the heaviest ones: 2,600 bytes each, as for 51 x 51 pixels."""
SNAPSHOT_BYTES = 400_000
"""Bytes of the pictures of a snapshot: 24 MB for all of them."""
MAX_NAMED_ROWS = 1_000_000
"""Rows up to which their ids are held in memory: 60 MB, if an id is a string of ten letters."""
CURVES = (
    *("step", "epoch", "log_likelihood", "held_out"),
    *("components", "components_in_use", "bits_per_dim"),
)
"""Entries of a training history that are drawn over its steps."""
CURVE_POINTS = 600
"""Maximum number of points of a training curve, which is 720 pixels wide."""
WHOLE_IMAGES = (
    "{} is a model of whole images, without components and rows: leave --data out, and drop images"
    " on the page."
)

Snapshot = tuple[dict[str, Any], NDArray[np.uint8]]
"""Facts about a model at one moment, and pictures of its heaviest components on a grid."""


class NotReady(InputError):
    """What the page requests is not ready yet, but will be."""


class Session:
    """The newest model of a file or folder of checkpoints, its snapshots, and the data."""

    def __init__(
        self,
        path: Path,
        image_shape: Sequence[int] | None = None,
        *,
        profiles: bool = False,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Draw rows as images of ``image_shape`` or the model's own, or all as ``profiles``."""
        self.path, self._image_shape, self._profiles = path, image_shape, profiles
        self.rows: Rows | None = None
        self.store: Store | None = None
        """The rows, if they are activations with tokens."""
        self.version = 0
        """Number of models loaded so far."""
        self.problem: str | None = None
        """What is wrong with the newest file, if it cannot be loaded."""
        self.snapshots = Snapshots()
        self._newest: ModelView | ImageView | None = None
        self._scores: RowScores | None = None
        self._text: TextView | None = None
        self._names: list[str] | None = None
        self._names_lock = threading.Lock()
        self._stamp: tuple[int, ...] = ()
        self._poll_seconds = poll_seconds
        self._closed = threading.Event()

    def exists(self) -> bool:
        """Return whether there is a model to load."""
        return bool(self._read_stamp())

    def load(self) -> None:
        """Load the model, or raise an error that says what is wrong with it."""
        self._load(self._read_stamp())

    def set_rows(self, rows: Rows, store: Store | None = None) -> None:
        """Take rows as the data, and start to score them if the model is finished.

        A store is the same rows, with the tokens that they belong to.
        """
        self.rows, self.store, self._names = rows, store, None
        if self._newest is not None:
            self._scores, self._text = self._make_scores(self.view), self._make_text(self.view)

    @property
    def model(self) -> MFA | None:
        """The newest model, if there is one."""
        return None if self._newest is None else self.view.model

    def watch(self) -> None:
        """Load the model again, in the background, whenever its file changes."""
        threading.Thread(target=self._poll, daemon=True).start()

    def close(self) -> None:
        """Stop watching and scoring."""
        self._closed.set()
        for work in self._works():
            work.stop(END_SECONDS)

    def _works(self) -> list[BackgroundWork | ImageView]:
        images = self._newest if isinstance(self._newest, ImageView) else None
        return [work for work in (self._scores, self._text, images) if work is not None]

    @property
    def newest(self) -> ModelView | ImageView:
        """The newest model, of rows or of whole images."""
        if self._newest is None:
            raise NotReady(
                f"{self.path} is not there yet: it appears when training first saves it."
            )
        return self._newest

    @property
    def view(self) -> ModelView:
        """The newest model, which must be one of rows."""
        if not isinstance(self.newest, ModelView):
            raise InputError(WHOLE_IMAGES.format(self.path))
        return self.newest

    @property
    def images(self) -> ImageView:
        """The newest model, which must be one of whole images."""
        if not isinstance(self.newest, ImageView):
            raise InputError(f"{self.path} is a model of rows: it has no whole images.")
        return self.newest

    @property
    def scores(self) -> RowScores:
        """The scores of the data under the newest model; reading them starts the scoring."""
        if self._scores is None:
            raise InputError("no data was given: start again with --data to see its rows.")
        self._scores.start()
        return self._scores

    @property
    def complete_scores(self) -> RowScores:
        """The scores of the data, once all rows are scored."""
        scores = self.scores
        if scores.problem is not None:
            raise InputError(scores.problem)
        if not scores.complete:
            raise NotReady(f"{scores.done:,} of {scores.rows.n_rows:,} rows are scored so far.")
        return scores

    @property
    def text(self) -> TextView:
        """The texts of the data."""
        if self._text is None:
            raise InputError("the data has no texts: give a folder that collect has written.")
        return self._text

    @property
    def atlas(self) -> Atlas:
        """The atlas of the texts, once it is complete."""
        text = self.text
        if text.problem is not None:
            raise InputError(text.problem)
        found = text.regions
        if found is None:
            raise NotReady(f"{text.done:,} of {text.store.n_rows:,} tokens are read so far.")
        return found

    def read_rows(self, numbers: Sequence[int]) -> NDArray[Any]:
        """Return rows (m, d) of the data, with columns in the order of the model."""
        rows = np.asarray(take_rows(self.scores.rows, np.asarray(numbers, np.int64)).rows)
        return rows.astype(np.float64)

    def name_rows(self, numbers: Sequence[int]) -> list[str] | None:
        """Return what identifies rows of the data, such as an id or a file name, if anything does.

        All names are read when they are first asked for.
        """
        with self._names_lock:
            if self._names is None:
                self._names = [] if self.rows is None else _read_names(self.rows)
            return [self._names[number] for number in numbers] if self._names else None

    def state(self) -> dict[str, Any]:
        """Return the state that the page polls."""
        scores = self._scores
        return {
            "version": self.version,
            "path": self.path.name,
            "saved": max(0.0, time.time() - self._stamp[0] / 1e9) if self._stamp else None,
            "finished": None if self._newest is None else bool(self._newest.model.finished_),
            "problem": self.problem,
            "data": None if scores is None else scores.state(),
        }

    def _read_stamp(self) -> tuple[int, ...]:
        """Return numbers that change with the model file or the newest checkpoint.

        The result is empty if there is no model.
        """
        try:
            newest = checkpoints_in(self.path)[-1:] if self.path.is_dir() else [self.path]
            stats = [path.stat() for path in newest]
        except OSError:
            return ()
        return tuple(n for stat in stats for n in (stat.st_mtime_ns, stat.st_ino, stat.st_size))

    def _poll(self) -> None:
        while not self._closed.wait(self._poll_seconds):
            stamp = self._read_stamp()
            if stamp == self._stamp or not stamp:
                continue
            try:
                self._load(stamp)
            except InputError as error:
                # The page keeps the last model, and shows what is wrong with the new one.
                self.problem, self._stamp = str(error), stamp

    def _load(self, stamp: tuple[int, ...]) -> None:
        model: object = load(self.path)
        if not isinstance(model, (MFA, ConvMFA)):
            raise InputError(
                f"{self.path} holds an {type(model).__name__}, and the explorer shows single"
                " mixtures: give a model that factormix train wrote."
            )
        previous = self._works()
        if isinstance(model, ConvMFA):
            if self.rows is not None:
                raise InputError(WHOLE_IMAGES.format(self.path))
            self._newest, self._scores, self._text = ImageView(model), None, None
        else:
            view = ModelView(model, self._image_shape, profiles=self._profiles)
            self._scores, self._text = self._make_scores(view), self._make_text(view)
            self._newest = view
            self.snapshots.add(self.version + 1, view)
        self.snapshots.history = list(model.history_)
        self._stamp, self.problem = stamp, None
        self.version += 1
        for work in previous:
            work.stop()

    def _make_text(self, view: ModelView) -> TextView | None:
        # A store of another width is refused with the rows, by the scores.
        return None if self.store is None else TextView(view, self.store)

    def _make_scores(self, view: ModelView) -> RowScores | None:
        if self.rows is None:
            return None
        scores = RowScores(view, check_rows(view.model, self.rows))
        # A model in training is scored on request only: another one follows soon.
        if view.model.finished_:
            scores.start()
        return scores


def _read_names(rows: Any) -> list[str]:
    """Read the columns that identify rows; the result is empty if there are none, or too many."""
    records = rows.records
    if records is None or not records.ids or rows.n_rows > MAX_NAMED_ROWS:
        return []
    try:
        cells = records.open(records.ids)(rows.n_rows).astype(str).to_numpy().tolist()
    except (InputError, OSError, StopIteration):
        # The file has changed since its rows were read: they still have their numbers.
        return []
    return [", ".join(row) for row in cells]


class Snapshots:
    """A bounded number of snapshots, and the history of the newest model."""

    def __init__(self) -> None:
        self._snapshots: list[Snapshot] = []
        self.history: list[dict[str, float]] = []
        # Centroids of the newest snapshot, cell by cell: each keeps its place as it forms.
        self._cells: NDArray[np.float32] | None = None

    def add(self, version: int, view: ModelView) -> None:
        """Take a snapshot of a model that was just loaded."""
        heaviest = np.sort(np.argsort(-view.weights, kind="stable")[:SNAPSHOT_COMPONENTS])
        rows, cols = choose_grid(len(heaviest))
        order = heaviest[arrange_on_grid(view.means[heaviest], rows, cols, self._cells)]
        self._cells = view.means[order]
        facts = {
            "version": version,
            "step": view.model.n_steps_,
            "components": view.K,
            "in_use": int(view.in_use.sum()),
            "cols": cols,
            "shown": len(order),
        }
        newest = facts, view.display.draw_tiles(self._cells, SNAPSHOT_BYTES)
        older = self._snapshots
        self._snapshots = [*(older if len(older) < MAX_SNAPSHOTS else older[::2]), newest]

    def describe(self) -> list[dict[str, Any]]:
        """Return the facts of all snapshots, oldest first."""
        return [facts for facts, _ in self._snapshots]

    def get(self, version: int) -> Snapshot:
        """Return the snapshot of a version."""
        for snapshot in self._snapshots:
            if snapshot[0]["version"] == version:
                return snapshot
        raise InputError(f"there is no snapshot {version} any more: take a newer one.")

    def curves(self) -> dict[str, list[float | None]]:
        """Return the training history as curves with a bounded number of points."""
        history = self.history
        thinned = history[:: max(1, len(history) // CURVE_POINTS)]
        thinned += history[-1:] if thinned and thinned[-1] is not history[-1] else []
        return {name: [record.get(name) for record in thinned] for name in CURVES}
