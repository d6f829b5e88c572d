"""The trials of the outlier benchmark: our fits and PyOD's, candidate settings, and data splits."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from common import adbench_folder
from harness import Outcome, Settings
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from factormix import MFA, MFAOutlierDetector, datasets
from factormix.estimators import Explanation
from factormix.estimators.ensemble import CONTAMINATED, NOVELTY, Kind, Recipe

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
"""Images with a patch in the picture of the documentation."""
PICTURE = (*("score", "contributions", "values", "expected", "deviation", "z_score", "component"),)
WIDEST = {"MCD": 100}
"""Most columns that a peer is run on: with more, a fit takes many minutes."""

SHARP, MIDDLE = Kind(0.01, 10, 8, 8), Kind(0.03, 10, 32, 8)
SMOOTH, FINE = Kind(0.1, 20, 100, 4), Kind(0.03, 20, 100, 4)
NEAR = Kind(0.03, 1, 2000)
LOOSE, PLAIN = Kind(0.2, 10, 100, 4), Kind(0.2, 20, 100, 0)
LOOSER, TIGHTER = Kind(1 / 3, 20, 100, 4), Kind(0.1, 20, 100, 4)
CANDIDATES: Mapping[str, Mapping[str, tuple[Kind, ...]]] = {
    "novelty": {
        "sharp": (SHARP,),
        "near": (NEAR,),
        "smooth + fine": (SMOOTH, FINE),
        "sharp + near": (SHARP, NEAR),
        "sharp + middle + near": (SHARP, MIDDLE, NEAR),
        "sharp + smooth + near": (SHARP, SMOOTH, NEAR),
        "middle + smooth + near": (MIDDLE, SMOOTH, NEAR),
        "sharp + middle + smooth + near": (SHARP, MIDDLE, SMOOTH, NEAR),
        "all": (SHARP, MIDDLE, SMOOTH, FINE, NEAR),
    },
    "contaminated": {
        "loose": (LOOSE,),
        "plain": (PLAIN,),
        "loose + plain": (LOOSE, PLAIN),
        "looser + tighter": (LOOSER, TIGHTER),
        "loose + looser": (LOOSE, LOOSER),
        "all": (LOOSE, PLAIN, LOOSER, TIGHTER),
    },
}
Array = NDArray[np.float64]
Labels = NDArray[np.int64]
LEAST_OUTLIERS = 30
"""Smallest number of outliers in a subsample, if the table has as many."""


def run_ours(settings: Settings, data_folder: str | None) -> Outcome:
    """Fit a detector with every kind of mixture, and score each candidate by its own mixtures."""
    mode, novelty = settings["mode"], settings["mode"] == "novelty"
    train, judged, y = _problem(settings)
    detector = MFAOutlierDetector(
        novelty=novelty, recipe=combine_kinds(mode), random_state=settings["seed"]
    )
    start = time.perf_counter()
    detector.fit(train)
    seconds = time.perf_counter() - start
    found = score_candidates(mode, detector, judged)
    return Outcome({"auc": {name: _auc(y, -s) for name, s in found.items()}, "seconds": seconds})


def run_peer(settings: Settings, data_folder: str | None) -> Outcome:
    """Fit one of PyOD's detectors with its defaults; the reason is recorded if it fails."""
    train, judged, y = _problem(settings)
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make_peer(settings["method"], settings["seed"]).fit(train)
            novelty = settings["mode"] == "novelty"
            scores = model.decision_function(judged) if novelty else model.decision_scores_
        found: dict[str, Any] = {"auc": _auc(y, scores)}
    except Exception as error:
        found = {"auc": None, "failure": f"{type(error).__name__}: {error}"[:200]}
    return Outcome({**found, "seconds": time.perf_counter() - start})


def run_images(settings: Settings, data_folder: str | None) -> Outcome:
    """Hold out a class of images: train on the others, score test images of all classes."""
    sizes = (settings["train_rows"], settings["judged_rows"], settings["seed"])
    train, judged, y = hold_out_class(settings["dataset"], settings["class"], *sizes)
    method, seed = settings["method"], settings["seed"]
    start = time.perf_counter()
    if method == OURS:
        model = MFAOutlierDetector(novelty=True, random_state=seed).fit(train)
        scores = -model.score_samples(judged)
    elif method == "MFA":
        mixture = MFA(25, 4, max_precision=20, scaling=None, random_state=seed).fit(train)
        scores = -mixture.score_samples(judged)
    else:
        scores = make_peer(method, seed).fit(train).decision_function(judged)
    return Outcome({"auc": _auc(y, scores), "seconds": time.perf_counter() - start})


def run_patches(settings: Settings, data_folder: str | None) -> Outcome:
    """Paste a patch of noise into images, and count how often the lowest contribution lies in
    it."""
    random = np.random.default_rng(settings["seed"])
    images = np.asarray(datasets.load("mnist").data, dtype=np.float64)
    train = images[random.permutation(len(images))[: settings["train_rows"]]]
    test = np.asarray(datasets.load("mnist", split="test").data, dtype=np.float64)
    clean = test[random.permutation(len(test))[: settings["judged_rows"]]]
    patched, inside = paste_patches(clean, random)
    seed = settings["seed"]
    # Enough factors for strokes of all shapes, and too much noise for a single pixel to stand out.
    models: dict[str, Any] = {
        "MFA": MFA(49, 32, max_precision=10, scaling=None, max_epochs=5, random_state=seed).fit(
            train
        ),
        OURS: MFAOutlierDetector(novelty=True, random_state=seed).fit(train),
    }
    values: dict[str, Any] = {}
    rows = np.arange(len(patched))
    for name, model in models.items():
        first = model.explain(patched).contributions.argmin(axis=1)
        values[f"{name}, log-likelihood"] = float(inside[rows, first].mean())
    explanation = models["MFA"].explain(patched, "reconstruction")
    values["MFA, reconstruction"] = float(
        inside[rows, explanation.contributions.argmin(axis=1)].mean()
    )
    shown = models["MFA"].explain(patched[:SHOWN])
    arrays = {name: getattr(shown, name) for name in PICTURE}
    return Outcome(values, arrays=arrays)


def rebuild_explanation(arrays: Mapping[str, NDArray[Any]]) -> Explanation:
    """Rebuild an explanation from the arrays of ``run_patches``."""
    features = tuple(f"x{j}" for j in range(784))
    return Explanation(**arrays, features=features, image_shape=(28, 28))


def paste_patches(
    images: NDArray[np.float64], random: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Paste 4 x 4 pixels of noise into each image (n, 784); return images and masks of the
    patches."""
    pasted = images.reshape(-1, 28, 28).copy()
    inside = np.zeros(pasted.shape, dtype=bool)
    for image, where in zip(pasted, inside, strict=True):
        row, column = random.integers(0, 28 - PATCH, size=2, endpoint=True)
        part = (slice(row, row + PATCH), slice(column, column + PATCH))
        image[part] = random.integers(0, 2, size=(PATCH, PATCH))
        where[part] = True
    return pasted.reshape(len(images), -1), inside.reshape(len(images), -1)


def make_peer(name: str, seed: int) -> Any:
    """Make one of PyOD's detectors, with its defaults."""
    module, seeded = PEERS[name]
    made = getattr(importlib.import_module(f"pyod.models.{module}"), name)
    return made(random_state=seed) if seeded else made()


def _problem(
    settings: Settings,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    key = (settings["table"], settings["rows"], settings["seed"])
    if settings["mode"] == "novelty":
        return split_novelty(*key)
    rows, y = shuffle_contaminated(*key)
    return rows, rows, y


def _auc(y: NDArray[np.int64], scores: NDArray[Any]) -> float:
    # A score that overflows counts as the most unusual one.
    return float(roc_auc_score(y, np.nan_to_num(np.asarray(scores, dtype=np.float64))))


def default_recipe(mode: str) -> Recipe:
    """Return the default recipe of a mode."""
    return NOVELTY if mode == "novelty" else CONTAMINATED


def combine_kinds(mode: str) -> Recipe:
    """Return a recipe with every kind of a mode, which has the mixtures of all candidates."""
    kinds = dict.fromkeys(kind for kinds in CANDIDATES[mode].values() for kind in kinds)
    return replace(default_recipe(mode), kinds=tuple(kinds))


def name_default(mode: str) -> str | None:
    """Return the name of the candidate that is the default, None if no candidate is."""
    chosen = set(default_recipe(mode).kinds)
    return next((name for name, kinds in CANDIDATES[mode].items() if set(kinds) == chosen), None)


def score_candidates(
    mode: str, detector: MFAOutlierDetector, rows: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    """Compute the scores (n,) of all candidates from the scores of their common mixtures."""
    kinds = combine_kinds(mode).kinds
    by_member = detector.member_scores(rows)
    number = np.arange(by_member.shape[1]) % len(kinds)
    return {
        name: by_member[:, np.isin(number, [kinds.index(kind) for kind in chosen])].mean(axis=1)
        for name, chosen in CANDIDATES[mode].items()
    }


def count_columns(name: str) -> int:
    """Return the number of columns of a table."""
    with np.load(adbench_folder() / f"{name}.npz", allow_pickle=False) as file:
        return int(file["X"].shape[1])


def load_rows(name: str, most_rows: int, seed: int) -> tuple[Array, Labels]:
    """Load a table (n, d) and its labels, 1 for outliers; a large one is subsampled by seed."""
    with np.load(adbench_folder() / f"{name}.npz", allow_pickle=False) as file:
        X, y = file["X"], file["y"].astype(np.int64)
    if len(X) > most_rows:
        random = np.random.default_rng(seed)
        outliers = random.permutation(np.flatnonzero(y == 1))
        inliers = random.permutation(np.flatnonzero(y == 0))
        kept = max(round(most_rows * len(outliers) / len(X)), min(LEAST_OUTLIERS, len(outliers)))
        chosen = np.sort(np.concatenate([outliers[:kept], inliers[: most_rows - kept]]))
        X, y = X[chosen], y[chosen]
    return X.astype(np.float64), y


def split_novelty(name: str, most_rows: int, seed: int) -> tuple[Array, Array, Labels]:
    """Return half of the inliers to train on, and all other rows to score, with their labels."""
    X, y = load_rows(name, most_rows, seed)
    inliers = np.random.default_rng([seed, 1]).permutation(np.flatnonzero(y == 0))
    half = len(inliers) // 2
    rest = np.concatenate([inliers[half:], np.flatnonzero(y == 1)])
    train, judged = standardise(X[inliers[:half]], X[rest])
    return train, judged, y[rest]


def shuffle_contaminated(name: str, most_rows: int, seed: int) -> tuple[Array, Labels]:
    """Return all rows, in another order for each seed, and their labels."""
    X, y = load_rows(name, most_rows, seed)
    order = np.random.default_rng([seed, 2]).permutation(len(X))
    rows, _ = standardise(X[order], X[:1])
    return rows, y[order]


def hold_out_class(
    name: str, digit: int, train_rows: int, judged_rows: int, seed: int
) -> tuple[Array, Array, Labels]:
    """Return training images of all other classes, and test images labelled 1 for this class."""
    others = [label for label in range(10) if label != digit]
    train = datasets.load(name, classes=others).data
    test = datasets.load(name, split="test")
    random = np.random.default_rng([seed, digit])
    chosen = random.permutation(len(train))[:train_rows]
    judged = random.permutation(len(test.data))[:judged_rows]
    labels = (test.labels[judged] == digit).astype(np.int64)
    return (
        np.asarray(train[chosen], dtype=np.float64),
        np.asarray(test.data[judged], dtype=np.float64),
        labels,
    )


def standardise(train: Array, other: Array) -> tuple[Array, Array]:
    """Standardise by the training rows, without the columns that are constant in them."""
    varying = (train != train[:1]).any(axis=0)
    mean, deviation = train[:, varying].mean(axis=0), train[:, varying].std(axis=0)
    deviation[deviation == 0] = 1.0
    return (train[:, varying] - mean) / deviation, (other[:, varying] - mean) / deviation
