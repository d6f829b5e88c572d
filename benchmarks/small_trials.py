"""The trials of the benchmark on small work, by public names, so that other commits run them too.

    python benchmarks/small_trials.py FOLDER PART [--ours]     # on tables that small.py has written

A trial prints its results as JSON. Seconds are of the processor, in one warm thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Table = Mapping[str, Array]
Results = dict[str, dict[str, list[float]]]
"""By method and quantity, one value for each fit or table."""

OURS = "factormix"
FACTORS = 2
REPEATS = 3
SHORT_RUNS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Planned passes of fits by `natural` that are compared with a complete one by `em`."""


def main() -> None:
    folder, part, *options = sys.argv[1:]
    print(json.dumps(run_part(part, Path(folder), ours_only="--ours" in options)))


def run_part(part: str, folder: Path, *, ours_only: bool = False) -> Results:
    """Run the trials of a part on its tables in a folder; ``ours_only`` leaves out all others."""
    tables = [dict(np.load(path)) for path in sorted(folder.glob(f"{part}-*.npz"))]
    results: Results = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method, quantities in PARTS[part](tables, ours_only):
            known = results.setdefault(method, {name: [] for name in quantities})
            for name, value in quantities.items():
                known[name].append(value)
    return results


def time_cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return processor seconds and the result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def median_cpu(work: Callable[[], Any]) -> float:
    """Return the median of processor seconds, after a first call that may import."""
    work()
    return statistics.median(time_cpu(work)[0] for _ in range(REPEATS))


Found = Iterator[tuple[str, dict[str, float]]]


def run_fits(tables: Sequence[Table], ours_only: bool) -> Found:
    """Fit small mixtures; score held-out rows."""
    from sklearn.mixture import GaussianMixture

    from factormix import MFA

    def make(method: str, K: int, d: int) -> Any:
        if method == OURS:
            return MFA(K, min(FACTORS, d - 1), random_state=0)
        kind = method.removeprefix("GaussianMixture, ")
        return GaussianMixture(K, covariance_type=kind, random_state=0)

    methods = [OURS] if ours_only else [OURS, "GaussianMixture, full", "GaussianMixture, diag"]
    for method in methods:
        make(method, 2, 3).fit(np.random.default_rng(0).normal(size=(60, 3)))
    for table in tables:
        train, held_out = table["train"], table["held_out"]
        for K in table["components"].astype(int).tolist():
            for method in methods:
                model = make(method, K, train.shape[1])
                try:
                    seconds, fitted = time_cpu(partial(model.fit, train))
                    score = float(fitted.score(held_out))
                except ValueError:  # of GaussianMixture, whose covariance has collapsed
                    seconds, score = np.nan, np.nan
                yield method, {"seconds": seconds, "score": score}


def run_outliers(tables: Sequence[Table], ours_only: bool) -> Found:
    """Fit detectors on contaminated rows and judge the same rows; the last table is for seconds."""
    from sklearn.ensemble import IsolationForest
    from sklearn.metrics import roc_auc_score

    from factormix import MFAOutlierDetector

    makers: dict[str, Callable[[], Any]] = {OURS: lambda: MFAOutlierDetector(random_state=0)}
    if not ours_only:
        from factormix.estimators import CONTAMINATED

        for parts, passes in ((12, 10), (12, 3), (8, 5), (6, 5), (4, 5)):
            recipe = dataclasses.replace(CONTAMINATED, n_parts=parts, max_epochs=passes)
            makers[f"{OURS}, {parts} parts, {passes} passes"] = lambda recipe=recipe: (
                MFAOutlierDetector(recipe=recipe, random_state=0)
            )
        makers["IsolationForest"] = lambda: IsolationForest(random_state=0)
        makers |= _list_pyod()
    for method, make in makers.items():
        areas = []
        for table in tables[:-1]:
            fitted = make().fit(table["rows"])
            # PyOD's scores rise with how unusual a row is.
            scores = getattr(fitted, "decision_scores_", None)
            scores = -fitted.score_samples(table["rows"]) if scores is None else scores
            areas.append(float(roc_auc_score(table["labels"], scores)))
        rows = tables[-1]["rows"]
        seconds = median_cpu(lambda make=make, rows=rows: make().fit(rows))
        for area in areas:
            yield method, {"area": area, "seconds": seconds}


def _list_pyod() -> dict[str, Callable[[], Any]]:
    """List detectors of PyOD, if it is installed."""
    try:
        from pyod.models.ecod import ECOD
        from pyod.models.knn import KNN
    except ImportError:
        return {}
    return {"PyOD, ECOD": ECOD, "PyOD, KNN": KNN}


def run_imputation(tables: Sequence[Table], ours_only: bool) -> Found:
    """Train imputers on rows with gaps and fill new rows; the last table is for seconds."""
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer, KNNImputer

    from factormix import MFAImputer

    makers: dict[str, Callable[[], Any]] = {OURS: lambda: MFAImputer(random_state=0)}
    if not ours_only:
        for sizes in ((1, 3, 8), (1, 3), (3,), (1,)):
            makers[f"{OURS}, K = {', '.join(map(str, sizes))}"] = lambda sizes=sizes: MFAImputer(
                sizes, random_state=0
            )
        makers["IterativeImputer"] = lambda: IterativeImputer(random_state=0)
        makers["KNNImputer"] = KNNImputer
    for method, make in makers.items():
        errors = []
        for table in tables[:-1]:
            filled = make().fit(table["train"]).transform(table["given"])
            lost = np.isnan(table["given"])
            errors.append(float(np.sqrt(np.mean((filled - table["new"])[lost] ** 2))))
        rows = tables[-1]["train"]
        seconds = median_cpu(lambda make=make, rows=rows: make().fit_transform(rows))
        for error in errors:
            yield method, {"error": error, "seconds": seconds}


def run_gaps(tables: Sequence[Table], ours_only: bool) -> Found:
    """Fit mixtures to rows with gaps by two solvers; score complete rows.

    ``level`` has the seconds of the shortest fit by `natural` that scores at least as high as `em`.
    """
    from factormix import MFA

    def fit(table: Table, solver: str, max_epochs: int | None = None) -> tuple[float, float]:
        model = MFA(4, FACTORS, solver=solver, max_epochs=max_epochs, random_state=0)
        seconds, fitted = time_cpu(partial(model.fit, table["train"]))
        return seconds, float(fitted.score(table["held_out"]))

    for solver in ("em", "natural"):
        MFA(2, 1, solver=solver).fit(tables[0]["train"])
    for table in tables:
        n, d = table["train"].shape
        seconds, em_score = fit(table, "em")
        yield "em", {"score": em_score, "seconds": seconds, "rows": n, "features": d}
        seconds, score = fit(table, "natural")
        short_runs = (fit(table, "natural", passes) for passes in SHORT_RUNS)
        runs = itertools.chain(short_runs, [(seconds, score)])
        level = next((one for one, found in runs if found >= em_score), math.inf)
        yield "natural", {"score": score, "seconds": seconds, "level": level}


PARTS: dict[str, Callable[[Sequence[Table], bool], Found]] = {
    "fits": run_fits,
    "outliers": run_outliers,
    "imputation": run_imputation,
    "gaps": run_gaps,
}


if __name__ == "__main__":
    main()
