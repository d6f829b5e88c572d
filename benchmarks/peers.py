"""Public packages as methods of the benchmark.

Each starts from the same scikit-learn k-means, whose time and passes count, and is watched from
inside its own loop: a checkpoint after an iteration costs it nothing. How each comes to the common
variance floor is said beside it; ``FLOORS`` has it in words.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from curves import Recorder
from models import FullMixture, LowRankMixture, Model
from numpy.typing import NDArray
from problems import Problem
from settings import FLOOR, Setting
from sklearn.cluster import KMeans
from sklearn.mixture import GaussianMixture

__all__ = ["FLOORS", "Train", "kmeans", "train_sklearn", "train_tgmm", "train_torchgmm"]

FLOORS = {
    "natural": "noise variances are bounded below by 1/400 (`max_precision=400`)",
    "sgd": "noise variances are bounded below by 1/400 (`max_precision=400`)",
    "em": "noise variances are bounded below by 1/400 (`max_precision=400`)",
    "adam": "noise variances are 1/400 plus a softplus",
    "sklearn": "`reg_covar=1/400`, which is added to every variance",
    "tgmm": (
        "diagonal: `covariance_bounds=(1/400, inf)`, which bounds variances as we do;"
        " full: `reg_covar=1/400`, which is added to every variance"
    ),
    "torchgmm": "`covariance_regularization=1/400`, which is added to every variance",
}
"""How each method comes to the common variance floor."""

Train = Callable[[Problem, Setting, int, Recorder], None]
"""Train a mixture on a problem, at the size of a setting, from a seed, with checkpoints."""

CHUNK_ELEMENTS = 1 << 26
"""Most elements of tgmm's rows x K x d array."""


class Start(NamedTuple):
    """A k-means clustering."""

    means: NDArray[np.float32]
    labels: NDArray[np.integer]
    passes: int
    """Lloyd iterations, and one for the seeding."""


def kmeans(x: NDArray[np.float32], n_clusters: int, seed: int) -> Start:
    """Cluster as scikit-learn's GaussianMixture does before its first iteration."""
    model = KMeans(n_clusters, n_init=1, random_state=seed).fit(x)
    return Start(model.cluster_centers_, model.labels_, model.n_iter_ + 1)


def train_sklearn(kind: str) -> Train:
    """Train scikit-learn's GaussianMixture with covariances of a kind, "diag" or "full"."""

    def train(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
        class Watched(GaussianMixture):  # type: ignore[misc]
            passes = 0

            def _initialize_parameters(self, X: Any, random_state: Any, xp: Any = None) -> None:
                start = kmeans(X, self.n_components, seed)
                shares = np.zeros((len(X), self.n_components), dtype=X.dtype)
                shares[np.arange(len(X)), start.labels] = 1
                self._initialize(X, shares)
                self.passes = start.passes + 1
                recorder.checkpoint(self.passes, self.described)

            def _m_step(self, *args: Any, **kwargs: Any) -> None:
                super()._m_step(*args, **kwargs)
                self.passes += 1
                recorder.checkpoint(self.passes, self.described)

            def described(self) -> Model:
                return described(kind, self.weights_, self.means_, self.covariances_)

        model = Watched(setting.components, covariance_type=kind, reg_covar=FLOOR)
        recorder.clock.start()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(problem.train)
        recorder.checkpoint(model.passes, model.described, last=True)

    return train


def train_tgmm(kind: str) -> Train:
    """Train tgmm's GaussianMixture with covariances of a kind, "diag" or "full"."""

    def train(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import tgmm

        class Watched(tgmm.GaussianMixture):  # type: ignore[misc]
            passes = 0

            def _m_step_from_stats(self, stats: Any) -> None:
                super()._m_step_from_stats(stats)
                self.passes += 1
                recorder.checkpoint(self.passes, self.described)

            def described(self) -> Model:
                return described(kind, self.weights_, self.means_, self.covariances_)

        x = torch.from_numpy(problem.train)
        K, d = setting.components, x.shape[1]
        floor: dict[str, Any] = {"reg_covar": FLOOR}
        if kind == "diag":
            floor = {"covariance_bounds": (FLOOR, float("inf"))}
        recorder.clock.start()
        start = kmeans(problem.train, K, seed)
        # Its rows are cut into chunks, which changes nothing but memory.
        chunk = max(1, CHUNK_ELEMENTS // (K * d))
        model = Watched(
            K,
            d,
            kind,
            init_means=torch.from_numpy(start.means),
            batch_size=chunk,
            random_state=seed,
            device="cpu",
            **floor,
        )
        model.passes = start.passes + 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(x)
        recorder.checkpoint(model.passes, model.described, last=True)

    return train


def train_torchgmm(kind: str) -> Train:
    """Train torchgmm's GaussianMixture with covariances of a kind, "diag" or "full".

    Its own k-means is left out in its favour: it reads the data 300 times to find the variance of
    the features.
    """

    def train(problem: Problem, setting: Setting, seed: int, recorder: Recorder) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pytorch_lightning as lightning
            import torchgmm.bayes
        for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        passes = 0.0

        class Watch(lightning.Callback):  # type: ignore[misc]
            def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
                # Its mini-batches are the whole data, and an iteration takes two epochs.
                nonlocal passes
                fits = type(module).__name__ == "GaussianMixtureLightningModule"
                if fits and trainer.current_epoch % 2 == 0:
                    recorder.checkpoint(passes, lambda: torchgmm_described(kind, module.model))
                passes += 1

        torch.manual_seed(seed)
        recorder.clock.start()
        start = kmeans(problem.train, setting.components, seed)
        passes += start.passes
        model = torchgmm.bayes.GaussianMixture(
            setting.components,
            covariance_type=kind,
            init_means=torch.from_numpy(start.means),
            covariance_regularization=FLOOR,
            trainer_params={
                "accelerator": "cpu",
                "callbacks": Watch(),
                "enable_progress_bar": False,
            },
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(torch.from_numpy(problem.train))
        recorder.checkpoint(passes, lambda: torchgmm_described(kind, model.model_), last=True)

    return train


def described(kind: str, weights: Any, means: Any, covariances: Any) -> Model:
    """Wrap the parameters of a mixture."""
    make = LowRankMixture.from_diagonal if kind == "diag" else FullMixture
    return make(weights, means, covariances)


def torchgmm_described(kind: str, model: Any) -> Model:
    """Wrap the model of torchgmm, which keeps roots of precisions."""
    covariances = (
        model.precisions_cholesky.double().square().reciprocal()
        if kind == "diag"
        else model.covariances
    )
    return described(kind, model.component_probs, model.means, covariances)
