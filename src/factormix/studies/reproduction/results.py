"""The numbers of finished units, gathered into tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from factormix.files import write_whole
from factormix.studies.reproduction import table1
from factormix.studies.reproduction.units import Store, Unit

__all__ = ["Result", "Spread", "Table", "aucs", "read_results", "save_table", "spread"]

Cell = str | int | float | None


@dataclass(frozen=True)
class Result:
    """Hold a finished unit and its values."""

    unit: Unit
    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return a setting or a value."""
        settings = self.unit.settings
        return settings[name] if name in settings else self.values[name]


@dataclass(frozen=True)
class Spread:
    """Hold mean, standard deviation and number of some runs."""

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
        """Standard error of the mean; 0 for a single run, which has none to show."""
        return self.deviation / float(np.sqrt(self.n))


@dataclass(frozen=True)
class Table:
    """Hold a table under the name of its files."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def read_results(units: Iterable[Unit], store: Store) -> list[Result]:
    """Read the values of all units that are finished, once each."""
    found = {unit.experiment + unit.name: (unit, store.read(unit)) for unit in units}
    return [Result(unit, values) for unit, values in found.values() if values is not None]


def spread(values: Iterable[float]) -> Spread | None:
    """Summarise some runs (sample standard deviation), None if there are none."""
    array = np.array(list(values), dtype=np.float64)
    if not len(array):
        return None
    deviation = float(array.std(ddof=1)) if len(array) > 1 else 0.0
    return Spread(float(array.mean()), deviation, len(array))


def aucs(
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
    return spread(
        one.values["auc"][score][area]
        for one in results
        if (one["dataset"], one["model"], one["held_out"], one["variant"]) == wanted
    )


def datasets_of(results: Iterable[Result]) -> list[str]:
    """List the data sets of some results in their order."""
    return list(dict.fromkeys(one["dataset"] for one in results))


def percent(value: Spread | None) -> str | None:
    """Write an AUC in per cent."""
    return None if value is None else value.text(100)


def main_table(results: Sequence[Result]) -> Table:
    """Compare with the paper: classes 9 and 0, every variant, score and way to integrate."""
    rows: list[list[Cell]] = []
    for dataset in datasets_of(results):
        for held_out in table1.MAIN_CLASSES:
            for variant in table1.VARIANTS:
                for score, area in table1.score_names():
                    found = [
                        aucs(results, dataset, model, held_out, variant, score, area)
                        for model in table1.MODELS
                    ]
                    if any(found):
                        name = "100 thresholds" if area == "thresholds" else "exact"
                        cells = [percent(each) for each in found]
                        rows.append([dataset, held_out, variant, score, name, *cells])
    caption = "Outlier AUC in per cent, mean ± standard deviation (number of seeds)."
    columns = ("data", "class held out", "variant", "score", "area", "GMM", "MFA")
    return Table("table1", caption, columns, rows)


def class_table(results: Sequence[Result], variant: str, name: str) -> Table:
    """Show every class held out in turn, with the mean over the classes last."""
    columns = ["class held out"]
    per_column: list[list[Spread | None]] = []
    for dataset in datasets_of(results):
        for model in table1.MODELS:
            columns.append(f"{dataset} {model}")
            per_column.append(
                [aucs(results, dataset, model, c, variant, area="rank") for c in range(10)]
            )
    rows: list[list[Cell]] = [
        [c, *(percent(column[c]) for column in per_column)]
        for c in range(10)
        if any(column[c] for column in per_column)
    ]
    means: list[Cell] = [f"{100 * m:.1f}" if (m := _full_mean(c)) else None for c in per_column]
    rows.append(["mean of the ten", *means])
    caption = f"Exact AUC in per cent, {variant}, log-sum-exp score, every class held out in turn."
    return Table(name, caption, columns, rows)


def class_mean(results: Sequence[Result], dataset: str, model: str) -> float | None:
    """Average the exact AUC over all ten held-out classes, None if one is missing."""
    return _full_mean([aucs(results, dataset, model, c, area="rank") for c in range(10)])


def _full_mean(column: Sequence[Spread | None]) -> float | None:
    known = [each.mean for each in column if each is not None]
    return float(np.mean(known)) if len(known) == 10 else None


def svhn_table(results: Sequence[Result]) -> Table:
    """Show the outlier AUC on SVHN."""
    rows: list[list[Cell]] = [
        [held_out, model, percent(aucs(results, "svhn", model, held_out, area="thresholds")),
         percent(aucs(results, "svhn", model, held_out, area="rank"))]
        for held_out in table1.MAIN_CLASSES
        for model in table1.MODELS
    ]  # fmt: skip
    columns = ("class held out", "model", "AUC, 100 thresholds", "AUC, exact")
    return Table("svhn", "Outlier AUC on SVHN in per cent, E ≤ 20.", columns, rows)


def convergence_table(results: Sequence[Result]) -> Table:
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


def streaming_table(results: Sequence[Result]) -> Table:
    """Show what each stream detected, and the cost of scoring after an update."""
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
    caption = "Evaluate-then-train. Costs are times divided by that of the precision form."
    return Table("streaming", caption, columns, rows)


def unit_table(results: Sequence[Result]) -> Table:
    """List every AUC of every unit, for other people's analyses."""
    rows: list[list[Cell]] = [
        [one.unit.experiment, one["dataset"], one["model"], one["variant"], one["held_out"],
         one["seed"], score, area, one.values["auc"][score][area],
         one["test_log_likelihood"], one["components_in_use"], round(one["seconds"], 1)]
        for one in results
        for score, area in table1.score_names()
    ]  # fmt: skip
    columns = ("experiment", "data", "model", "variant", "held_out", "seed", "score", "area",
               "auc", "test_log_likelihood", "components_in_use", "seconds")  # fmt: skip
    return Table("outlier-units", "All outlier runs.", columns, rows)


def save_table(table: Table, folder: Path) -> None:
    """Write a table as CSV and as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([table.columns, *table.rows])
    write_whole(folder / f"{table.name}.csv", text.getvalue().encode())
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    marked = [f"| {' | '.join(map(_marked, row))} |" for row in lines]
    content = f"{table.caption}\n\n" + "\n".join(marked) + "\n"
    write_whole(folder / f"{table.name}.md", content.encode())


def _marked(cell: Cell) -> str:
    return "–" if cell is None else str(cell).replace("|", "\\|")
