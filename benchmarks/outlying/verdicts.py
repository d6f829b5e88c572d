"""What became of the comparison: areas by table, the choice of the default, ranks and intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from factormix.studies.harness import Result

__all__ = ["CHANCE", "Comparison", "compare", "left_out", "ranks"]

CHANCE = 0.5
"""The area of a detector that fails."""
DRAWS = 10_000

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """All methods on all tables of one mode, areas as means over the seeds that are finished."""

    mode: str
    tables: tuple[str, ...]
    candidates: dict[str, Array]
    """By name, (tables,): settings of ours."""
    peers: dict[str, Array]
    """By name, (tables,); NaN where a method was not tried."""
    failures: tuple[str, ...]

    @property
    def chosen(self) -> Array:
        """Our areas (tables,) where no table has a say in the setting that it is judged by."""
        return left_out(self.candidates)[0]

    @property
    def choices(self) -> list[str]:
        """The setting that each table is judged by."""
        return left_out(self.candidates)[1]

    @property
    def best(self) -> str:
        """The setting with the highest mean over all tables."""
        return max(self.candidates, key=lambda name: float(self.candidates[name].mean()))

    def ranks(self, ours: Array) -> dict[str, float]:
        """Return the mean rank of each method, ours under the name "": 1 is the best."""
        return ranks({"": ours, **self.peers})


def compare(results: Iterable[Result], mode: str) -> Comparison | None:
    """Gather the tables of a mode on which ours and all peers have a result; None if none."""
    mine: dict[str, list[dict[str, float]]] = {}
    theirs: dict[str, dict[str, list[float]]] = {}
    failures: list[str] = []
    for one in results:
        settings = one.trial.settings
        if settings.get("mode") != mode:
            continue
        table = settings["table"]
        if one.trial.experiment == "ours":
            mine.setdefault(table, []).append(one.values["auc"])
            continue
        area, method = one.values["auc"], settings["method"]
        if area is None:
            failures.append(f"{method} on {table}: {one.values['failure']}")
        areas = theirs.setdefault(table, {}).setdefault(method, [])
        areas.append(CHANCE if area is None else area)
    methods = sorted({method for by_method in theirs.values() for method in by_method})
    most = max((len(found) for found in theirs.values()), default=0)
    tables = tuple(t for t in mine if len(theirs.get(t, ())) >= most - 1)
    if not tables:
        return None
    names = list(mine[tables[0]][0])
    return Comparison(
        mode,
        tables,
        {n: np.array([np.mean([run[n] for run in mine[t]]) for t in tables]) for n in names},
        {m: np.array([np.mean(theirs[t].get(m, [np.nan])) for t in tables]) for m in methods},
        tuple(dict.fromkeys(failures)),
    )


def left_out(candidates: dict[str, Array]) -> tuple[Array, list[str]]:
    """Judge each table by the candidate with the highest mean over all other tables."""
    names = list(candidates)
    areas = np.stack([candidates[name] for name in names])
    others = areas.sum(axis=1, keepdims=True) - areas
    winner = others.argmax(axis=0)
    return areas[winner, np.arange(areas.shape[1])], [names[i] for i in winner]


def ranks(areas: dict[str, Array]) -> dict[str, float]:
    """Compute the mean rank over tables, 1 for the highest area; equal areas share theirs."""
    rounded = np.round(np.stack(list(areas.values())), 6)
    mean = np.nanmean(rankdata(-rounded, axis=0, nan_policy="omit"), axis=1)
    return dict(zip(areas, mean.tolist(), strict=True))


def interval(differences: Array, seed: int = 0) -> tuple[float, float]:
    """Compute a 95% bootstrap interval of the mean of paired differences (tables,)."""
    random, differences = np.random.default_rng(seed), differences[~np.isnan(differences)]
    drawn = random.integers(len(differences), size=(DRAWS, len(differences)))
    low, high = np.quantile(differences[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def wins(ours: Array, theirs: Array) -> str:
    """Count the tables on which ours is ahead, behind, or level to three digits."""
    difference = np.round(ours - theirs, 3)
    return f"{int((difference > 0).sum())} / {int((difference < 0).sum())}"


def mean_areas(results: Sequence[Result], dataset: str) -> dict[str, list[float]]:
    """Return the areas of each method on the classes of an image set, in order of the classes."""
    found: dict[str, dict[int, float]] = {}
    for one in results:
        settings = one.trial.settings
        if one.trial.experiment == "images" and settings["dataset"] == dataset:
            found.setdefault(settings["method"], {})[settings["class"]] = one.values["auc"]
    return {m: [areas[k] for k in sorted(areas)] for m, areas in found.items() if len(areas) == 10}
