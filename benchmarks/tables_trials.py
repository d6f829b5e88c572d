"""The trials of the benchmark on tables: data and folds, the fits of all models, and seconds."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from common import adbench_folder, busy_process, list_adbench
from harness import Outcome, Settings, Trial, median
from numpy.typing import NDArray
from quality_problems import FLOOR, Setting, load_problem
from sklearn import datasets
from sklearn.decomposition import FactorAnalysis
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import KFold
from sklearn.neighbors import KernelDensity
from sklearn.preprocessing import StandardScaler

from factormix import MFA, select
from factormix.data.batches import Batch
from factormix.data.columns import Columns

Array = NDArray[np.float64]
Fit = dict[str, Any]

LAST = "d-1"
"""The label of the largest number of factors."""

FEATURES_OF_LAST = 64
"""Most features of a table for a fit with d - 1 factors."""

FEATURES_OF_FULL = 128
"""Most features of a table for scikit-learn's full covariances."""

COMPONENTS_OF_WIDE = 2
"""Most components on a table with more features."""

CONDITIONS: dict[str, tuple[int | None, bool]] = {
    "alone, one thread": (1, False),
    "alone, default threads": (None, False),
    "beside a busy process, default threads": (None, True),
}
"""Threads of the process, None for torch's default, and whether another process is busy."""
IMAGES = Setting("fashion-mnist", 49)
MOST_ROWS, MOST_FEATURES, MOST_COMPONENTS = 1000, 50, 10
TIMED_FACTORS = 2
SCALINGS = ("standardised", "raw")
LEAST_VARIANCE = 1e-6
"""The ``reg_covar`` of ``GaussianMixture``."""
DEFAULT_FOLDS = 5
DEFAULT_MODELS = ("MFA()", "select", "Gaussian", "GaussianMixture", "bounded")
SKLEARN: dict[str, Callable[[], Any]] = {
    "iris": datasets.load_iris,
    "wine": datasets.load_wine,
    "breast_cancer": datasets.load_breast_cancer,
    "diabetes": datasets.load_diabetes,
    "digits": datasets.load_digits,
    "linnerud": datasets.load_linnerud,
}
"""The tables that come with scikit-learn."""


def run_fold(settings: Settings, data_folder: str | None = None) -> Outcome:
    """Fit all models to a fold; a failed fit is a result too."""
    warm_up()
    rows = load_table(settings["table"], settings["rows"])
    train, held_out = split_fold(rows, settings["scaling"], settings["fold"], settings["folds"])
    factors = choose_factor_labels(rows.shape[1], settings["factors"])
    models = [
        *list_mixtures(
            len(train), train.shape[1], settings["components"], factors, settings["seed"]
        ),
        *list_other_densities(train.shape[1], factors, settings["seed"]),
    ]
    return Outcome(
        {
            "features": train.shape[1],
            "training_rows": len(train),
            "discrete_columns": count_discrete(train),
            "dependent_columns": count_dependent(train),
            "fits": [fit_and_score(make, train, held_out, **names) for names, make in models],
        }
    )


def run_unbounded(settings: Settings, data_folder: str | None = None) -> Outcome:
    """Fit our mixtures to a fold with scikit-learn's least variance, for any step of values."""
    warm_up()
    rows = load_table(settings["table"], settings["rows"])
    train, held_out = split_fold(rows, settings["scaling"], settings["fold"], settings["folds"])
    factors = choose_factor_labels(rows.shape[1], settings["factors"])
    n, d = train.shape
    fits = [
        fit_and_score(partial(make, max_precision=1 / LEAST_VARIANCE), train, held_out, **names)
        for names, make in list_mixtures(n, d, settings["components"], factors, settings["seed"])
        if names["model"] == "MFA"
    ]
    return Outcome({"fits": fits})


def choose_factor_labels(n_features: int, wanted: Sequence[str]) -> list[str]:
    """Choose the numbers of factors, as text, that a table of ``n_features`` allows."""
    numbers = [label for label in wanted if label != LAST and int(label) < n_features]
    fits_last = LAST in wanted and n_features <= FEATURES_OF_LAST
    return [*numbers, LAST] if fits_last and str(n_features - 1) not in numbers else numbers


def list_mixtures(
    n: int, d: int, components: Sequence[int], factors: Sequence[str], seed: int
) -> Iterator[tuple[Fit, Callable[[], Any]]]:
    """List our mixtures and scikit-learn's, with at most half as many components as rows."""
    for K in components:
        if n < 2 * K or (d > FEATURES_OF_FULL and K > COMPONENTS_OF_WIDE):
            continue
        for label, l in resolve_factors(factors, d):
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


def list_other_densities(
    d: int, factors: Sequence[str], seed: int
) -> Iterator[tuple[Fit, Callable[[], Any]]]:
    """List the densities without components."""
    for label, l in resolve_factors(factors, d):
        yield (
            {"model": "FactorAnalysis", "factors": label},
            partial(FactorAnalysis, l, random_state=seed),
        )
    yield {"model": "KernelDensity"}, ScaledDensity


def resolve_factors(factors: Sequence[str], d: int) -> Iterator[tuple[str, int]]:
    """Turn labels into numbers of factors; a fold may have fewer columns than its table."""
    for label in factors:
        l = d - 1 if label == LAST else int(label)
        if l < d:
            yield label, l


class ScaledDensity:
    """A Gaussian kernel density on columns of standard deviation 1, with Scott's bandwidth."""

    def fit(self, x: Array) -> ScaledDensity:
        """Learn the scales and keep the rows (n, d)."""
        self.scale = x.std(axis=0)
        self.density = KernelDensity(bandwidth="scott").fit(x / self.scale)
        return self

    def score_samples(self, x: Array) -> Array:
        """Compute log p(x), (n,): the density of the scaled rows, and the Jacobian of the
        scaling."""
        scaled: Array = self.density.score_samples(x / self.scale)
        shifted: Array = scaled - np.log(self.scale).sum()
        return shifted


def fit_and_score(make: Callable[[], Any], train: Array, held_out: Array, **names: Any) -> Fit:
    """Fit and score a model; record the failure if there is one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = time.perf_counter()
            model = make().fit(train)
            seconds = time.perf_counter() - start
            score = float(np.mean(model.score_samples(held_out)))
        if not np.isfinite(score):
            raise ArithmeticError(f"the held-out log-likelihood is {score}")
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return {**names, "score": None, "seconds": None, "failure": text[:160]}
    return {**names, "score": score, "seconds": seconds, "failure": None}


@lru_cache
def warm_up() -> None:
    """Fit every model once, so that no table pays for imports."""
    rows = np.random.default_rng(0).normal(size=(60, 3))
    for _, make in (*list_mixtures(60, 3, [2], ["1"], 0), *list_other_densities(3, ["1"], 0)):
        fit_and_score(make, rows, rows)


def choose_small(tables: Sequence[str], most_rows: int) -> list[str]:
    """Choose the tables of at most 1,000 rows and 50 features."""
    shapes = {name: load_table(name, most_rows).shape for name in tables}
    return [name for name, (n, d) in shapes.items() if n <= MOST_ROWS and d <= MOST_FEATURES]


def plan_timings(
    tables: Sequence[str], components: Sequence[int], repeats: int, images: bool
) -> list[Trial]:
    """List the measurements: small fits, and a pass over the images if they are available."""
    found = []
    for condition, (threads, beside) in CONDITIONS.items():
        settings: dict[str, Any] = {"condition": condition, "threads": threads, "busy": beside}
        sizes = [K for K in components if K <= MOST_COMPONENTS]
        work = {"tables": list(tables), "components": sizes, "repeats": repeats}
        name = condition.replace(",", "").replace(" ", "-")
        found.append(Trial("seconds", f"small-{name}", settings | work, run_small))
        if images:
            found.append(Trial("seconds", f"pass-{name}", settings, run_pass))
    return found


def run_small(settings: Settings, data_folder: str | None = None) -> Outcome:
    """Time fits on small standardised tables, ours and scikit-learn's in turn."""
    warm_up()
    fits = []
    with busy_process() if settings["busy"] else nullcontext():
        for table in settings["tables"]:
            x, _ = split_fold(load_table(table, MOST_ROWS), "standardised", 0, 5)
            for K in settings["components"]:
                fits.append(
                    {"table": table, "components": K, **time_fits(x, K, settings["repeats"])}
                )
    return Outcome({"fits": fits, "torch_threads": torch.get_num_threads()})


def time_fits(x: Any, K: int, repeats: int) -> dict[str, float | None]:
    """Return the median seconds of a fit of each model; None if it fails."""
    makers: dict[str, Any] = {
        "MFA": lambda: MFA(K, min(TIMED_FACTORS, x.shape[1] - 1), random_state=0),
        "full": lambda: GaussianMixture(K, covariance_type="full", random_state=0),
        "diag": lambda: GaussianMixture(K, covariance_type="diag", random_state=0),
    }
    seconds: dict[str, list[float | None]] = {name: [] for name in makers}
    for _ in range(repeats):
        for name, make in makers.items():
            seconds[name].append(fit_and_score(make, x, x)["seconds"])
    return {
        name: None if None in each else median(value for value in each if value is not None)
        for name, each in seconds.items()
    }


def run_pass(settings: Settings, data_folder: str | None = None) -> Outcome:
    """Time one pass over the images, and score it."""
    warm_up()
    problem = load_problem(IMAGES)
    model = MFA(
        IMAGES.components, IMAGES.factors, max_precision=1 / FLOOR, max_epochs=1, random_state=0
    )
    with busy_process() if settings["busy"] else nullcontext():
        start = time.perf_counter()
        model.fit(problem.train)
        seconds = time.perf_counter() - start
    return Outcome(
        {
            "seconds": seconds,
            "log_likelihood": model.score(problem.held_out),
            "torch_threads": torch.get_num_threads(),
        }
    )


def list_tables() -> list[str]:
    """List the tables of scikit-learn and ADBench."""
    return [*SKLEARN, *list_adbench()]


def load_table(name: str, most_rows: int) -> Array:
    """Load a table (n, d): inliers only, a fixed subsample, no constant columns."""
    if name in SKLEARN:
        rows = SKLEARN[name]().data
    else:
        with np.load(adbench_folder() / f"{name}.npz", allow_pickle=False) as file:
            rows = file["X"][file["y"] == 0]
    if len(rows) > most_rows:
        chosen = np.random.default_rng(0).permutation(len(rows))[:most_rows]
        rows = rows[np.sort(chosen)]
    rows = np.asarray(rows, dtype=np.float64)
    return rows[:, find_varying(rows)]


def split_fold(rows: Array, scaling: str, number: int, folds: int) -> tuple[Array, Array]:
    """Return the training rows and the held-out rows of a fold.

    Columns that are constant in the training rows are dropped for all models.
    """
    splits = KFold(folds, shuffle=True, random_state=0).split(rows)
    learn, judge = list(splits)[number]
    varying = find_varying(rows[learn])
    train, held_out = rows[learn][:, varying], rows[judge][:, varying]
    if scaling == "raw":
        return train, held_out
    scaler = StandardScaler().fit(train)
    return scaler.transform(train), scaler.transform(held_out)


def find_varying(rows: Array) -> NDArray[np.bool_]:
    """Return which columns of rows (n, d) have more than one value, (d,)."""
    return np.asarray((rows != rows[:1]).any(axis=0))


def count_discrete(rows: Array) -> int:
    """Count the columns with at most 20 values, or with one value in a quarter of the rows."""
    counts = [np.unique(column, return_counts=True)[1] for column in rows.T]
    return sum(bool(len(each) <= 20 or each.max() >= len(rows) / 4) for each in counts)


def count_dependent(rows: Array) -> int:
    """Count the columns that are linear combinations of the others, to eight digits."""
    correlation = np.corrcoef(rows, rowvar=False)
    return int((np.linalg.eigvalsh(np.atleast_2d(correlation)) < 1e-8).sum())


def load_whole_table(name: str) -> Array:
    """Load a table (n, d) as it is, with all rows and columns."""
    if name in SKLEARN:
        return np.asarray(SKLEARN[name]().data, dtype=np.float64)
    with np.load(adbench_folder() / f"{name}.npz", allow_pickle=False) as file:
        return np.asarray(file["X"], dtype=np.float64)


class BoundedGaussianMixture:
    """scikit-learn's mixture with our noise floors added to its variances."""

    def __init__(self, rows: Array, n_components: int) -> None:
        self._root = Columns(Batch(rows)).noise_floor.sqrt().numpy()
        model = GaussianMixture(n_components, reg_covar=1.0, random_state=0)
        self._model = model.fit(rows / self._root)

    def score(self, rows: Array) -> float:
        """Return the mean log-likelihood of rows in their own units."""
        return float(self._model.score(rows / self._root) - np.log(self._root).sum())


def run_defaults(settings: Settings, data_folder: str | None = None) -> Outcome:
    """Fit the defaults and their peers to the folds of a table."""
    rows = load_whole_table(settings["table"])
    scores: dict[str, list[float | None]] = {model: [] for model in DEFAULT_MODELS}
    lowest: dict[str, list[tuple[float, int]]] = {"MFA()": [], "select": []}
    sizes = list[int]()
    for learn, judge in KFold(DEFAULT_FOLDS, shuffle=True, random_state=0).split(rows):
        train, held_out = rows[learn], rows[judge]
        ours = MFA(random_state=0).fit(train)
        sizes.append(ours.n_components_)
        scores["MFA()"].append(float(ours.score(held_out)))
        lowest["MFA()"].append(find_lowest(ours, held_out))
        makers: dict[str, Callable[[], Any]] = {}
        if settings["select"]:
            found = select(train, estimator=MFA(random_state=0)).best_estimator_
            makers["select"] = lambda found=found: found
            lowest["select"].append(find_lowest(found, held_out))
        if rows.shape[1] <= FEATURES_OF_FULL:
            makers["Gaussian"] = lambda train=train: GaussianMixture(1).fit(train)
            K = ours.n_components_
            makers["GaussianMixture"] = lambda train=train, K=K: GaussianMixture(
                K, random_state=0
            ).fit(train)
            if count_discrete(rows):
                makers["bounded"] = lambda train=train, K=K: BoundedGaussianMixture(train, K)
        for model in DEFAULT_MODELS[1:]:
            scores[model].append(score_or_none(makers.get(model), held_out))
    return Outcome(
        {
            "rows": len(rows),
            "features": rows.shape[1],
            "components": max(sizes),
            "discrete": count_discrete(rows),
            "scores": scores,
            "lowest": lowest,
        }
    )


def find_lowest(model: MFA, held_out: Array) -> tuple[float, int]:
    """Return the lowest score of the held-out rows, and their number."""
    return float(np.min(model.score_samples(held_out))), len(held_out)


def score_or_none(make: Callable[[], Any] | None, held_out: Array) -> float | None:
    """Return the held-out score of a model; None if there is none or its training fails."""
    if make is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = float(make().score(held_out))
    except ValueError:
        return None
    return found if math.isfinite(found) else None
