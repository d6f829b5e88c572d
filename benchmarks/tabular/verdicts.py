"""What became of a comparison: ours beside the better of scikit-learn's mixtures, with reasons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from factormix.studies.harness import Result, median
from tabular.fits import LAST

__all__ = ["TOLERANCE", "Comparison", "Score", "Table", "tables"]

TOLERANCE = 0.05
"""Nats per feature that the best of ours may lie below the better of scikit-learn's mixtures."""

Fit = Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """A model of one size on all folds."""

    label: str
    folds: tuple[float, ...]
    """Mean held-out log-likelihood of each fold."""
    seconds: float
    """Median of a fit."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.folds))


@dataclass(frozen=True)
class Table:
    """All folds of a table in one scaling."""

    name: str
    scaling: str
    folds: tuple[Mapping[str, Any], ...]

    @property
    def features(self) -> float:
        """Mean number of columns that vary in the training rows of a fold."""
        return float(np.mean([fold["features"] for fold in self.folds]))

    @property
    def training_rows(self) -> int:
        return int(min(fold["training_rows"] for fold in self.folds))

    @property
    def components(self) -> list[int]:
        """The numbers of components that were tried."""
        found = {f["components"] for f in self.fits() if f.get("components")}
        return sorted(found)

    def fits(self, **wanted: Any) -> list[Fit]:
        """List the fits of all folds that are as wanted."""
        return [
            fit
            for fold in self.folds
            for fit in fold["fits"]
            if all(fit.get(key) == value for key, value in wanted.items())
        ]

    def scores(self, model: str, components: int | None = None) -> dict[str, Score | None]:
        """Score every size of a model, by its label; None where a fold has no model."""
        fits = self.fits(model=model, components=components)
        labels = dict.fromkeys(fit.get("factors", model) for fit in fits)
        found: dict[str, Score | None] = {}
        for label in labels:
            chosen = [fit for fit in fits if fit.get("factors", model) == label]
            whole = len(chosen) == len(self.folds) and not any(f["failure"] for f in chosen)
            found[label] = (
                Score(
                    label,
                    tuple(fit["score"] for fit in chosen),
                    median(fit["seconds"] for fit in chosen),
                )
                if whole
                else None
            )
        return found

    def best(self, models: Iterable[str], components: int | None = None) -> Score | None:
        """Choose the size with the highest mean; None if no size has a model on all folds."""
        found = [s for m in models for s in self.scores(m, components).values() if s is not None]
        return max(found, key=lambda score: score.mean, default=None)

    def best_of_all(self, models: Sequence[str]) -> Score | None:
        """Choose among all numbers of components too."""
        found = [self.best(models, K) for K in self.components]
        known = [score for score in found if score is not None]
        return max(known, key=lambda score: score.mean, default=None)

    def comparisons(self) -> list[Comparison]:
        """Compare at every number of components."""
        return [Comparison(self, K) for K in self.components]


@dataclass(frozen=True)
class Comparison:
    """Ours and theirs at one number of components."""

    table: Table
    components: int

    @cached_property
    def ours(self) -> Score | None:
        return self.table.best(["MFA"], self.components)

    @cached_property
    def theirs(self) -> Score | None:
        return self.table.best(["full", "diag"], self.components)

    @cached_property
    def per_fold(self) -> list[float]:
        """By how much ours is ahead in each fold, in nats per feature."""
        if self.ours is None or self.theirs is None:
            return []
        pairs = zip(self.ours.folds, self.theirs.folds, self.table.folds, strict=True)
        return [(a - b) / fold["features"] for a, b, fold in pairs]

    @property
    def difference(self) -> float:
        """The mean of that: minus infinity if only they have a model, infinity if only we do."""
        if self.ours is None:
            return -math.inf
        return float(np.mean(self.per_fold)) if self.per_fold else math.inf

    @property
    def holds(self) -> bool:
        return self.difference >= -TOLERANCE

    @property
    def reason(self) -> str:
        """Say what can be seen of why it does not hold."""
        if self.holds:
            return ""
        if self.ours is None or self.theirs is None:
            return "ours has no model: " + self._failure()
        parts = [
            self._one_fold(),
            self._richer(),
            self._dependent(),
            self._few_rows(),
            self._discrete(),
        ]
        return "; ".join(filter(None, parts)) or "none of the usual reasons is seen"

    def _failure(self) -> str:
        failed = [
            f for f in self.table.fits(model="MFA", components=self.components) if f["failure"]
        ]
        return failed[0]["failure"] if failed else "no number of factors was run on all folds"

    def _one_fold(self) -> str:
        worst = int(np.argmin(self.per_fold))
        rest = [value for number, value in enumerate(self.per_fold) if number != worst]
        if not rest or float(np.mean(rest)) < -TOLERANCE or self.ours is None:
            return ""
        return f"one fold alone: fold {worst + 1} at {self.ours.folds[worst]:.1f}"

    def _richer(self) -> str:
        if self.theirs is None or self.theirs.label != "full":
            return ""
        labels = self.table.scores("MFA", self.components)
        if LAST not in labels and self.table.features - 1 > max(int(l) for l in labels):
            most = max(int(l) for l in labels)
            return f"theirs has full covariances, ours was tried with {most} factors at most"
        return "theirs has full covariances"

    def _dependent(self) -> str:
        count = max(fold["dependent_columns"] for fold in self.table.folds)
        if not count or self.theirs is None or self.theirs.label != "full":
            return ""
        # Their least variance is 1e-6, in whatever units; ours is the rounding of the values.
        return (
            f"{count} of {self.table.features:.0f} columns follow exactly from others, and theirs"
            " are surer of it than the rounding of the values allows"
        )

    def _few_rows(self) -> str:
        share = self.table.training_rows / self.components
        if share >= 2 * self.table.features:
            return ""
        return f"{share:.0f} training rows for a component of {self.table.features:.0f} features"

    def _discrete(self) -> str:
        count = max(fold["discrete_columns"] for fold in self.table.folds)
        return f"{count} of {self.table.features:.0f} columns are near-discrete" if count else ""


def tables(results: Sequence[Result]) -> list[Table]:
    """Gather the tables of which all folds are finished, in their order."""
    found: dict[tuple[str, str], list[Result]] = {}
    for one in results:
        found.setdefault((one["table"], one["scaling"]), []).append(one)
    return [
        Table(name, scaling, tuple(r.values for r in sorted(folds, key=lambda r: r["fold"])))
        for (name, scaling), folds in found.items()
        if len(folds) == folds[0]["folds"]
    ]
