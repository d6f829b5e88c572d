"""One fold of a table: all models, fitted to its training rows and judged by its held-out ones."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import FactorAnalysis
from sklearn.mixture import GaussianMixture
from sklearn.neighbors import KernelDensity

from factormix import MFA
from factormix.studies.harness import Outcome, Settings
from tabular import data

__all__ = ["FEATURES_OF_FULL", "LAST", "ScaledDensity", "factor_labels", "run"]

Array = NDArray[np.float64]
Fit = dict[str, Any]

LAST = "d-1"
"""The label of the most factors that a mixture can have."""

FEATURES_OF_LAST = 64
"""Most features of a table on which d - 1 factors are tried."""

FEATURES_OF_FULL = 128
"""Most features of a table on which scikit-learn's full covariances are tried."""

COMPONENTS_OF_WIDE = 2
"""Most components that are tried on a table of more features than that."""


def run(settings: Settings, data_folder: str | None = None) -> Outcome:
    """Fit all models to a fold; a fit that fails is a result like others."""
    warm_up()
    rows = data.load(settings["table"], settings["rows"])
    train, held_out = data.fold(rows, settings["scaling"], settings["fold"], settings["folds"])
    factors = factor_labels(rows.shape[1], settings["factors"])
    models = [
        *mixtures(len(train), train.shape[1], settings["components"], factors, settings["seed"]),
        *others(train.shape[1], factors, settings["seed"]),
    ]
    return Outcome(
        {
            "features": train.shape[1],
            "training_rows": len(train),
            "discrete_columns": data.discrete(train),
            "dependent_columns": data.dependent(train),
            "fits": [fitted(make, train, held_out, **names) for names, make in models],
        }
    )


def factor_labels(n_features: int, wanted: Sequence[str]) -> list[str]:
    """Keep the numbers of factors, as text, that a table of so many features allows."""
    numbers = [label for label in wanted if label != LAST and int(label) < n_features]
    tried = LAST in wanted and n_features <= FEATURES_OF_LAST
    return [*numbers, LAST] if tried and str(n_features - 1) not in numbers else numbers


def mixtures(
    n: int, d: int, components: Sequence[int], factors: Sequence[str], seed: int
) -> Iterator[tuple[Fit, Callable[[], Any]]]:
    """List our mixtures and scikit-learn's, of at most half as many components as rows."""
    for K in components:
        if n < 2 * K or (d > FEATURES_OF_FULL and K > COMPONENTS_OF_WIDE):
            continue
        for label, l in sizes(factors, d):
            yield (
                {"model": "MFA", "components": K, "factors": label},
                partial(MFA, K, l, random_state=seed),
            )
        for kind in ("full", "diag"):
            if kind == "diag" or d <= FEATURES_OF_FULL:
                yield (
                    {"model": kind, "components": K},
                    partial(GaussianMixture, K, covariance_type=kind, random_state=seed),
                )


def others(d: int, factors: Sequence[str], seed: int) -> Iterator[tuple[Fit, Callable[[], Any]]]:
    """List the densities without components."""
    for label, l in sizes(factors, d):
        yield (
            {"model": "FactorAnalysis", "factors": label},
            partial(FactorAnalysis, l, random_state=seed),
        )
    yield {"model": "KernelDensity"}, ScaledDensity


def sizes(factors: Sequence[str], d: int) -> Iterator[tuple[str, int]]:
    """Turn labels into numbers; a fold may have fewer columns than its table."""
    for label in factors:
        l = d - 1 if label == LAST else int(label)
        if l < d:
            yield label, l


class ScaledDensity:
    """A Gaussian kernel density on columns of deviation 1, bandwidth by Scott's rule."""

    def fit(self, x: Array) -> ScaledDensity:
        """Learn the scales and keep the rows (n, d)."""
        self.scale = x.std(axis=0)
        self.density = KernelDensity(bandwidth="scott").fit(x / self.scale)
        return self

    def score_samples(self, x: Array) -> Array:
        """Compute log p(x), (n,): that of the scaled rows, and the Jacobian of the scaling."""
        scaled: Array = self.density.score_samples(x / self.scale)
        shifted: Array = scaled - np.log(self.scale).sum()
        return shifted


def fitted(make: Callable[[], Any], train: Array, held_out: Array, **names: Any) -> Fit:
    """Fit and score a model, and say what went wrong if it has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            begun = time.perf_counter()
            model = make().fit(train)
            seconds = time.perf_counter() - begun
            score = float(np.mean(model.score_samples(held_out)))
        if not np.isfinite(score):
            raise ArithmeticError(f"the held-out log-likelihood is {score}")
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return {**names, "score": None, "seconds": None, "failure": text[:160]}
    return {**names, "score": score, "seconds": seconds, "failure": None}


@lru_cache
def warm_up() -> None:
    """Fit everything once, so that no table pays for what Python loads on first use."""
    rows = np.random.default_rng(0).normal(size=(60, 3))
    for _, make in (*mixtures(60, 3, [2], ["1"], 0), *others(3, ["1"], 0)):
        fitted(make, rows, rows)
