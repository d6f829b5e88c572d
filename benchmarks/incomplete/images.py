"""Training on images with gaps: complete, with 30% missing, and with the mean in their place."""

from __future__ import annotations

import time

import numpy as np

from factormix import MFA, datasets
from factormix.solvers import NaturalGradient
from factormix.studies.harness import Outcome, Settings, Trial

__all__ = ["KINDS", "trials"]

KINDS = ("complete", "30% missing", "filled with the mean")
MISSING = 0.3


def trials(rows: int, epochs: int, seed: int) -> list[Trial]:
    """List the ways of training."""
    shared = {"rows": rows, "epochs": epochs, "seed": seed, "components": 49, "factors": 4}
    return [
        Trial("images", f"fashion-{i}", {"kind": kind, **shared}, run)
        for i, kind in enumerate(KINDS)
    ]


def run(settings: Settings, data_folder: str | None) -> Outcome:
    """Train on classes 0 to 8 of FashionMNIST, and score complete held-out images."""
    classes = list(range(9))
    train = datasets.load("fashion-mnist", split="train", classes=classes).data
    test = datasets.load("fashion-mnist", split="test", classes=classes).data
    random = np.random.default_rng(settings["seed"])
    images = np.asarray(train, dtype=np.float32)
    images = images[random.permutation(len(images))[: settings["rows"]]]
    if settings["kind"] != KINDS[0]:
        images[random.random(images.shape) < MISSING] = np.nan
    if settings["kind"] == KINDS[2]:
        images = np.where(np.isnan(images), np.nanmean(images, axis=0), images)
    begun = time.perf_counter()
    model = MFA(
        settings["components"],
        settings["factors"],
        solver=NaturalGradient(tol=0),
        max_epochs=settings["epochs"],
        batch_size=1000,
        # The same least noise for all three, so that the same densities can be learned.
        max_precision=400.0,
        random_state=settings["seed"],
    ).fit(images)
    seconds = time.perf_counter() - begun
    return Outcome({"score": model.score(test), "seconds": seconds, "training_rows": len(images)})
