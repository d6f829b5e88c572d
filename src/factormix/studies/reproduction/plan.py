"""How much of the paper a run repeats, and what all trainings have in common.

How well a score tells inliers from outliers, by the paper's own measure.

The pictures of the experiments that do not show a single model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from factormix.data.datasets import available, load
from factormix.errors import InputError
from factormix.estimators import MFA
from factormix.studies.harness import Result, Settings
from factormix.training.solvers.sgd import ConstrainedSGD
from factormix.views.plotting.drawing import COLOURS, MARK, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "BATCH",
    "FULL",
    "QUICK",
    "Images",
    "Scale",
    "found_sets",
    "images",
    "paper_model",
    "plot_convergence",
    "plot_stream",
    "threshold_auc",
    "threshold_curve",
]

BATCH = 100
"""Rows per step throughout the paper."""


@dataclass(frozen=True)
class Scale:
    """Say how long and how often to train; None means as the paper does."""

    name: str = "full"
    seeds: int = 10
    other_seeds: int = 1
    """Seeds of Table I's held-out classes other than 9 and 0."""
    starts: int = 1
    """Least random starts of Figure 1's training, for the claim that all of them converge."""
    rows: int | None = None
    """Most training rows."""
    steps: int | None = None
    """Training steps; the paper's 15 + 50 epochs otherwise, and at least 10,000 steps."""
    variants: bool = True
    """Whether Table I's variants are run for all held-out classes, or for 9 and 0 only."""

    @property
    def length(self) -> str:
        """Say how long a training is."""
        return f"{self.steps:,} steps" if self.steps else "15 + 50 epochs"

    @property
    def change(self) -> str | None:
        """Say what is less than in the paper, None if nothing is."""
        steps = f"{self.steps:,} training steps instead of 15 + 50 epochs" if self.steps else ""
        rows = f"at most {self.rows:,} training images" if self.rows else ""
        return " and ".join(filter(None, (steps, rows))) or None


FULL = Scale(starts=10)
QUICK = Scale("quick", seeds=1, rows=10_000, steps=2_200, variants=False)


@dataclass(frozen=True, eq=False)
class Images:
    """Hold training and held-out images (n, d) with labels (n,)."""

    train: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test: NDArray[np.float32]
    test_labels: NDArray[np.int64]
    image_shape: tuple[int, ...]
    note: str


def found_sets(folder: str | None) -> dict[str, str]:
    """Tell for each image set of the paper where it was found, and "" if it was not.

    A damaged copy is an error: running on something else instead would go unnoticed.
    """
    found = {}
    for one in available(folder):
        if one.name in ("mnist", "fashion-mnist", "svhn"):
            if one.checksum_ok is False:
                raise InputError(one.note)
            found[one.name] = one.where or ""
    return found


@lru_cache(maxsize=3)
def images(name: str, folder: str | None = None) -> Images:
    """Load both splits; of a set that is here in part, every fifth image is held out."""
    train = load(name, split="train", folder=folder, download=False)
    test = load(name, split="test", folder=folder, download=False)
    if not train.note:
        return Images(
            train.data, train.labels, test.data, test.labels, train.image_shape, test.note
        )
    data = np.concatenate([train.data, test.data])
    labels = np.concatenate([train.labels, test.labels])
    held = np.arange(len(data)) % 5 == 4
    note = f"only a part was at hand ({train.note}; {test.note}), every fifth image held out"
    return Images(data[~held], labels[~held], data[held], labels[held], train.image_shape, note)


def training_rows(source: Images, classes: list[int], settings: Settings) -> NDArray[np.float32]:
    """Choose the training images (n, d) of some classes, at most ``settings["rows"]``."""
    chosen = np.flatnonzero(np.isin(source.train_labels, classes))
    limit = settings["rows"]
    if limit is not None and limit < len(chosen):
        # Not by the trial's seed: all trials see the same rows.
        chosen = np.sort(np.random.default_rng(0).permutation(chosen)[:limit])
    rows: NDArray[np.float32] = source.train[chosen]
    return rows


def paper_model(settings: Settings, n_rows: int) -> MFA:
    """Set up the paper's training: constrained SGD in two phases, 15 + 50 epochs of batches of 100.

    ``settings["steps"]`` shortens it, with the phases in the same proportion.
    """
    steps = settings["steps"]
    epochs = None if steps is None else math.ceil(steps / math.ceil(n_rows / BATCH))
    return MFA(
        settings["n_components"],
        settings["n_factors"],
        solver=ConstrainedSGD(min_eigenvalue=settings["min_eigenvalue"]),
        max_precision=settings["max_precision"],
        batch_size=BATCH,
        max_epochs=epochs,
        random_state=settings["seed"],
        scaling=None,
    )


Vector = NDArray[np.floating[Any]]


def threshold_curve(
    inliers: ArrayLike, outliers: ArrayLike, n_thresholds: int = 100
) -> tuple[Vector, Vector]:
    """Compute the shares of inliers kept and of outliers rejected, (n,) each.

    The thresholds are equidistant between the lowest and the highest score; a row is kept when its
    score is not below the threshold.
    """
    high, low = np.sort(_scores(inliers, "inliers")), np.sort(_scores(outliers, "outliers"))
    first, last = min(high[0], low[0]), max(high[-1], low[-1])
    thresholds = np.linspace(first, last, n_thresholds)
    kept = 1 - np.searchsorted(high, thresholds, side="left") / len(high)
    rejected = np.searchsorted(low, thresholds, side="left") / len(low)
    return kept, rejected


def threshold_auc(inliers: ArrayLike, outliers: ArrayLike, n_thresholds: int = 100) -> float:
    """Compute the paper's AUC: the trapezoid area under rejected against kept.

    The curve ends at the highest score and is not drawn on to where nothing is kept, so that the
    area of few scores, or of many ties, falls short of the exact one. So does one score far out,
    between which and the others most thresholds lie.
    """
    kept, rejected = threshold_curve(inliers, outliers, n_thresholds)
    return float(np.sum((kept[:-1] - kept[1:]) * (rejected[:-1] + rejected[1:]) / 2))


def _scores(values: ArrayLike, name: str) -> Vector:
    scores: Vector = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not len(scores) or not np.isfinite(scores).all():
        raise InputError(f"the scores of the {name} must be one or more finite numbers, shape (n,)")
    return scores


@styled
def plot_convergence(runs: Sequence[Result]) -> Figure:
    """Draw the likelihood and the components in use of every random start over the epochs."""
    fig = new_figure(7.0, 4.2)
    upper, lower = fig.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    tail: list[float] = []
    for run in runs:
        epochs, likelihoods, used = zip(*run["history"], strict=True)
        upper.plot(epochs, likelihoods, color=COLOURS[0], alpha=0.6, linewidth=1.0)
        lower.plot(epochs, used, color=COLOURS[1], alpha=0.6, linewidth=1.0)
        tail += likelihoods[len(likelihoods) // 20 :]
    if tail:
        margin = 0.05 * (max(tail) - min(tail)) or 1.0
        upper.set_ylim(min(tail) - margin, max(tail) + margin)
    upper.set(
        title=f"{runs[0]['dataset']}: {len(runs)} random start{'s' * (len(runs) > 1)}",
        ylabel="log-likelihood",
    )
    lower.set(xlabel="epoch", ylabel="components\nin use")
    for axes in (upper, lower):
        axes.grid(True)
    return fig


@styled
def plot_stream(run: Result) -> Figure:
    """Draw likelihood and detection over a stream in which a class appears half-way."""
    fig = new_figure(7.0, 4.4)
    upper, lower = fig.subplots(2, 1, sharex=True)
    windows = run["windows"]
    for axes, keys in (
        (upper, {"known": "known classes", "new": "new class"}),
        (lower, {"auc": "in the stream", "probe_auc": "held-out images"}),
    ):
        for colour, (key, name) in zip(COLOURS, keys.items(), strict=False):
            points = [(w["batch"], w[key]) for w in windows if w[key] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, label=name)
        axes.axvline(run["change"], color=MARK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.grid(True)
        axes.legend(loc="best")
    late = [w["known"] for w in windows[len(windows) // 10 :] if w["known"] is not None]
    late += [w["new"] for w in windows if w["new"] is not None]
    if late and max(late) > min(late):
        margin = 0.05 * (max(late) - min(late))
        upper.set_ylim(min(late) - margin, max(late) + margin)
    name = f"{run['dataset']}, {run['solver']}: class {run['new_class']} appears"
    upper.set(title=name, ylabel="log-likelihood\nbefore learning")
    lower.set(xlabel="batch", ylabel="AUC of the new class")
    return fig
