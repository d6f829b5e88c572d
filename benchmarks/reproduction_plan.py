"""How much of the paper a run repeats, and the data and model that all trainings share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from harness import Settings
from numpy.typing import NDArray

from factormix.data.datasets import available, load
from factormix.errors import InputError
from factormix.estimators import MFA
from factormix.training.solvers.sgd import ConstrainedSGD

BATCH = 100
"""Rows per step throughout the paper."""


@dataclass(frozen=True)
class Scale:
    """How long and how often to train; None means as the paper does."""

    name: str = "full"
    seeds: int = 10
    other_seeds: int = 1
    """Seeds of Table I's held-out classes other than 9 and 0."""
    starts: int = 1
    """Minimum random starts of Figure 1's training, for the claim that all of them converge."""
    rows: int | None = None
    """Maximum number of training rows."""
    steps: int | None = None
    """Training steps; the paper's 15 + 50 epochs otherwise, and at least 10,000 steps."""
    variants: bool = True
    """Whether Table I's variants are run for all held-out classes, or for 9 and 0 only."""

    @property
    def length(self) -> str:
        """The length of a training in words."""
        return f"{self.steps:,} steps" if self.steps else "15 + 50 epochs"

    @property
    def change(self) -> str | None:
        """How a run is shorter than the paper's in words, None if it is not."""
        steps = f"{self.steps:,} training steps instead of 15 + 50 epochs" if self.steps else ""
        rows = f"at most {self.rows:,} training images" if self.rows else ""
        return " and ".join(filter(None, (steps, rows))) or None


FULL = Scale(starts=10)
QUICK = Scale("quick", seeds=1, rows=10_000, steps=2_200, variants=False)


@dataclass(frozen=True, eq=False)
class Images:
    """Training and held-out images (n, d) with labels (n,)."""

    train: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test: NDArray[np.float32]
    test_labels: NDArray[np.int64]
    image_shape: tuple[int, ...]
    note: str


def find_sets(folder: str | None) -> dict[str, str]:
    """Return where each image set of the paper was found, "" for a missing one.

    A damaged copy is an error: running on another set instead would go unnoticed.
    """
    found = {}
    for one in available(folder):
        if one.name in ("mnist", "fashion-mnist", "svhn"):
            if one.checksum_ok is False:
                raise InputError(one.note)
            found[one.name] = one.where or ""
    return found


@lru_cache(maxsize=3)
def load_images(name: str, folder: str | None = None) -> Images:
    """Load both splits; every fifth image of an incomplete set is held out."""
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


def choose_training_rows(
    source: Images, classes: list[int], settings: Settings
) -> NDArray[np.float32]:
    """Choose the training images (n, d) of some classes, at most ``settings["rows"]``."""
    chosen = np.flatnonzero(np.isin(source.train_labels, classes))
    limit = settings["rows"]
    if limit is not None and limit < len(chosen):
        # Not by the trial's seed: all trials see the same rows.
        chosen = np.sort(np.random.default_rng(0).permutation(chosen)[:limit])
    rows: NDArray[np.float32] = source.train[chosen]
    return rows


def make_paper_model(settings: Settings, n_rows: int) -> MFA:
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
