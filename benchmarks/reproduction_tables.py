"""Numbers of finished trials: means over seeds, and tables of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import reproduction_table1 as table1
from harness import Cell, Result, Table


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation and number of some runs."""

    mean: float
    deviation: float
    n: int

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """Write mean ± deviation (runs)."""
        mean = f"{scale * self.mean:.{digits}f}"
        if self.n == 1:
            return f"{mean} (1)"
        return f"{mean} ± {scale * self.deviation:.{digits}f} ({self.n})"

    @property
    def error(self) -> float:
        """Standard error of the mean, 0 for a single run."""
        return self.deviation / math.sqrt(self.n)


def summarise(values: Iterable[float]) -> Spread | None:
    """Summarise some runs, None if there are none."""
    array = np.array(list(values), dtype=np.float64)
    if not len(array):
        return None
    deviation = float(array.std(ddof=1)) if len(array) > 1 else 0.0
    return Spread(float(array.mean()), deviation, len(array))


def summarise_auc(
    results: Iterable[Result],
    dataset: str,
    model: str,
    held_out: int,
    variant: str = "E ≤ 20",
    score: str = "log-sum-exp",
    area: str = "thresholds",
) -> Spread | None:
    """Summarise the AUC over the seeds of one row."""
    wanted = (dataset, model, held_out, variant)
    return summarise(
        one.values["auc"][score][area]
        for one in results
        if (one["dataset"], one["model"], one["held_out"], one["variant"]) == wanted
    )


def list_datasets(results: Iterable[Result]) -> list[str]:
    """List the data sets of some results in their order."""
    return list(dict.fromkeys(one["dataset"] for one in results))


def _format_percent(value: Spread | None) -> str | None:
    """Write an AUC in per cent."""
    return None if value is None else value.text(100)


def make_main_table(results: Sequence[Result]) -> Table:
    """Compare with the paper: classes 9 and 0, every variant, score and way to integrate."""
    rows: list[list[Cell]] = []
    cases = itertools.product(
        list_datasets(results), table1.MAIN_CLASSES, table1.VARIANTS, table1.SCORES
    )
    for dataset, held_out, variant, (score, area) in cases:
        found = [
            summarise_auc(results, dataset, model, held_out, variant, score, area)
            for model in table1.MODELS
        ]
        if any(found):
            name = "100 thresholds" if area == "thresholds" else "exact"
            rows.append([dataset, held_out, variant, score, name, *map(_format_percent, found)])
    caption = "Outlier AUC in per cent, mean ± standard deviation (number of seeds)."
    columns = ("data", "class held out", "variant", "score", "area", "GMM", "MFA")
    return Table("table1", caption, columns, rows)


def make_class_table(results: Sequence[Result], variant: str, name: str) -> Table:
    """Show every class held out in turn, with the mean over the classes last."""
    columns = ["class held out"]
    per_column: list[list[Spread | None]] = []
    for dataset in list_datasets(results):
        for model in table1.MODELS:
            columns.append(f"{dataset} {model}")
            per_column.append(
                [summarise_auc(results, dataset, model, c, variant, area="rank") for c in range(10)]
            )
    rows: list[list[Cell]] = [
        [c, *(_format_percent(column[c]) for column in per_column)]
        for c in range(10)
        if any(column[c] for column in per_column)
    ]
    means: list[Cell] = [f"{100 * m:.1f}" if (m := _full_mean(c)) else None for c in per_column]
    rows.append(["mean of the ten", *means])
    caption = f"Exact AUC in per cent, {variant}, log-sum-exp score, every class held out in turn."
    return Table(name, caption, columns, rows)


def mean_over_classes(results: Sequence[Result], dataset: str, model: str) -> float | None:
    """Average the exact AUC over all ten held-out classes, None if one is missing."""
    return _full_mean([summarise_auc(results, dataset, model, c, area="rank") for c in range(10)])


def _full_mean(column: Sequence[Spread | None]) -> float | None:
    known = [each.mean for each in column if each is not None]
    return float(np.mean(known)) if len(known) == 10 else None


def make_svhn_table(results: Sequence[Result]) -> Table:
    """Show the outlier AUC on SVHN."""
    rows: list[list[Cell]] = []
    for held_out, model in itertools.product(table1.MAIN_CLASSES, table1.MODELS):
        areas = [
            summarise_auc(results, "svhn", model, held_out, area=area)
            for area in ("thresholds", "rank")
        ]
        rows.append([held_out, model, *map(_format_percent, areas)])
    columns = ("class held out", "model", "AUC, 100 thresholds", "AUC, exact")
    return Table("svhn", "Outlier AUC on SVHN in per cent, E ≤ 20.", columns, rows)


def make_convergence_table(results: Sequence[Result]) -> Table:
    """Show every random start of Figure 1's training."""
    rows: list[list[Cell]] = [
        [one["dataset"], one["seed"], one["components_in_use"],
         f"{one['test_log_likelihood']:.1f}", f"{one['sigma']:.2f}",
         f"{100 * one['late_rise']:.2f}", f"{one['seconds']:.0f}"]
        for one in sorted(results, key=lambda one: (one["dataset"], one["seed"]))
    ]  # fmt: skip
    columns = ("data", "seed", "components in use", "test log-likelihood", "last sigma",
               "rise in the last tenth, %", "seconds")  # fmt: skip
    return Table("convergence", "Random starts of Figure 1's training.", columns, rows)


def make_streaming_table(results: Sequence[Result]) -> Table:
    """Show the detection in each stream, and the cost of scoring after an update."""
    rows: list[list[Cell]] = []
    for one in results:
        after = [w for w in one["windows"] if w["auc"] is not None]
        costs = one["costs"]
        rows.append([
            one["dataset"], one["solver"], one["new_class"],
            f"{100 * after[0]['auc']:.1f}" if after else None,
            f"{100 * after[-1]['auc']:.1f}" if after else None,
            f"{costs['factored'] / costs['precision']:.2f}",
            f"{costs['dense'] / costs['precision']:.0f}",
            f"{(costs['update'] + costs['factored']) / (costs['update'] + costs['precision']):.2f}",
        ])  # fmt: skip
    columns = ("data", "solver", "new class", "AUC at first, %", "AUC at the end, %",
               "covariance form, factored", "covariance form, dense",
               "update and score, factored")  # fmt: skip
    caption = "Evaluate-then-train. Costs are multiples of the precision form's time."
    return Table("streaming", caption, columns, rows)


def make_trial_table(results: Sequence[Result], name: str) -> Table:
    """List every AUC of every trial, for further analysis."""
    rows: list[list[Cell]] = [
        [one.trial.experiment, one["dataset"], one["model"], one["variant"], one["held_out"],
         one["seed"], score, area, one.values["auc"][score][area],
         one["test_log_likelihood"], one["components_in_use"], round(one["seconds"], 1)]
        for one in results
        for score, area in table1.SCORES
    ]  # fmt: skip
    columns = ("experiment", "data", "model", "variant", "held_out", "seed", "score", "area",
               "auc", "test_log_likelihood", "components_in_use", "seconds")  # fmt: skip
    return Table(name, "All outlier runs.", columns, rows)
