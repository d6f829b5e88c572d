"""What one trial does: a table, a split and a seed, by our candidates or by one of the peers."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from factormix import MFA, MFAOutlierDetector
from factormix.estimators import Explanation
from factormix.studies.harness import Outcome, Settings
from outlying import data
from outlying.candidates import candidate_scores, everything

__all__ = [
    "OURS",
    "PEERS",
    "WIDEST",
    "picture_of",
    "run_images",
    "run_ours",
    "run_patches",
    "run_peer",
]

OURS = "factormix"
PEERS = {
    "IForest": ("iforest", True),
    "KNN": ("knn", False),
    "LOF": ("lof", False),
    "ECOD": ("ecod", False),
    "COPOD": ("copod", False),
    "HBOS": ("hbos", False),
    "CBLOF": ("cblof", True),
    "PCA": ("pca", True),
    "MCD": ("mcd", True),
    "GMM": ("gmm", True),
}
"""Name of the class, its module in PyOD, and whether it takes a seed."""
PATCH = 4
SHOWN = 8
"""Images with a patch that the page shows."""
PICTURE = (*("score", "contributions", "values", "expected", "deviation", "z_score", "component"),)
WIDEST = {"MCD": 100}
"""Columns up to which a peer is tried: beyond, a fit takes many minutes."""


def run_ours(settings: Settings, data_folder: str | None) -> Outcome:
    """Fit a detector with every kind of mixture, and judge each candidate by its own ones."""
    mode, novelty = settings["mode"], settings["mode"] == "novelty"
    train, judged, y = _problem(settings)
    detector = MFAOutlierDetector(
        novelty=novelty, recipe=everything(mode), random_state=settings["seed"]
    )
    begun = time.perf_counter()
    detector.fit(train)
    seconds = time.perf_counter() - begun
    found = candidate_scores(mode, detector, judged)
    return Outcome({"auc": {name: _auc(y, -s) for name, s in found.items()}, "seconds": seconds})


def run_peer(settings: Settings, data_folder: str | None) -> Outcome:
    """Fit one of PyOD's detectors with its defaults; if it fails, say why."""
    train, judged, y = _problem(settings)
    begun = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peer(settings["method"], settings["seed"]).fit(train)
            novelty = settings["mode"] == "novelty"
            scores = model.decision_function(judged) if novelty else model.decision_scores_
        found: dict[str, Any] = {"auc": _auc(y, scores)}
    except Exception as error:
        found = {"auc": None, "failure": f"{type(error).__name__}: {error}"[:200]}
    return Outcome({**found, "seconds": time.perf_counter() - begun})


def run_images(settings: Settings, data_folder: str | None) -> Outcome:
    """Hold out a class of images: train on the others, judge test images of all."""
    sizes = (settings["train_rows"], settings["judged_rows"], settings["seed"])
    train, judged, y = data.held_out_class(settings["dataset"], settings["class"], *sizes)
    method, seed = settings["method"], settings["seed"]
    begun = time.perf_counter()
    if method == OURS:
        model = MFAOutlierDetector(novelty=True, random_state=seed).fit(train)
        scores = -model.score_samples(judged)
    elif method == "MFA":
        mixture = MFA(25, 4, max_precision=20, scaling=None, random_state=seed).fit(train)
        scores = -mixture.score_samples(judged)
    else:
        scores = peer(method, seed).fit(train).decision_function(judged)
    return Outcome({"auc": _auc(y, scores), "seconds": time.perf_counter() - begun})


def run_patches(settings: Settings, data_folder: str | None) -> Outcome:
    """Paste a patch of noise into images, and see where the lowest contributions lie."""
    from factormix import datasets

    random = np.random.default_rng(settings["seed"])
    images = np.asarray(datasets.load("mnist").data, dtype=np.float64)
    train = images[random.permutation(len(images))[: settings["train_rows"]]]
    test = np.asarray(datasets.load("mnist", split="test").data, dtype=np.float64)
    clean = test[random.permutation(len(test))[: settings["judged_rows"]]]
    patched, inside = with_patches(clean, random)
    seed = settings["seed"]
    # Enough factors for strokes of all shapes, and noise that no single pixel stands out for.
    models: dict[str, Any] = {
        "MFA": MFA(49, 32, max_precision=10, scaling=None, max_epochs=5, random_state=seed).fit(
            train
        ),
        OURS: MFAOutlierDetector(novelty=True, random_state=seed).fit(train),
    }
    values: dict[str, Any] = {}
    rows = np.arange(len(patched))
    for name, model in models.items():
        first = model.explain(patched).ranking()[:, 0]
        values[f"{name}, log-likelihood"] = float(inside[rows, first].mean())
    told = models["MFA"].explain(patched, "reconstruction")
    values["MFA, reconstruction"] = float(inside[rows, told.ranking()[:, 0]].mean())
    shown = models["MFA"].explain(patched[:SHOWN])
    arrays = {name: getattr(shown, name) for name in PICTURE}
    return Outcome(values, arrays=arrays)


def picture_of(arrays: Mapping[str, NDArray[Any]]) -> Explanation:
    """Make an explanation again of the arrays that ``run_patches`` left."""
    features = tuple(f"x{j}" for j in range(784))
    return Explanation(**arrays, features=features, image_shape=(28, 28))


def with_patches(
    images: NDArray[np.float64], random: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Paste 4 x 4 pixels of noise in [0, 1] somewhere into each image (n, 784), and say where."""
    pasted = images.reshape(-1, 28, 28).copy()
    inside = np.zeros(pasted.shape, dtype=bool)
    for image, where in zip(pasted, inside, strict=True):
        row, column = random.integers(0, 28 - PATCH, size=2, endpoint=True)
        part = (slice(row, row + PATCH), slice(column, column + PATCH))
        image[part] = random.integers(0, 2, size=(PATCH, PATCH))
        where[part] = True
    return pasted.reshape(len(images), -1), inside.reshape(len(images), -1)


def peer(name: str, seed: int) -> Any:
    """Make one of PyOD's detectors, with its defaults."""
    module, seeded = PEERS[name]
    made = getattr(importlib.import_module(f"pyod.models.{module}"), name)
    return made(random_state=seed) if seeded else made()


def _problem(
    settings: Settings,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    key = (settings["table"], settings["rows"], settings["seed"])
    if settings["mode"] == "novelty":
        return data.novelty(*key)
    rows, y = data.contaminated(*key)
    return rows, rows, y


def _auc(y: NDArray[np.int64], scores: NDArray[Any]) -> float:
    # A score that overflows is as unusual as can be.
    return float(roc_auc_score(y, np.nan_to_num(np.asarray(scores, dtype=np.float64))))
