"""Change the numbers of the natural solver's schedule, one at a time, and compare held-out scores.

Every number is halved and doubled, but shares and exponents stay below one. An entry of the table
is the gain in held-out nats per row over the usual schedule, with the same seeds and the same rows,
as a mean and its standard error. A gain beyond two standard errors on all data would be a reason to
change the number. All of it takes about five minutes of one core.

    python benchmarks/schedule.py [--seeds 4] [--problem digits] [--number seeding.sweeps]
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from sklearn import datasets

from factormix import MFA
from factormix.solvers import NaturalGradient, Problem
from factormix.training.solvers.schedule import (
    Growth,
    Pruning,
    Rates,
    Replacement,
    Schedule,
    Seeding,
    choose_first,
)

GROUPS = {
    "rates": Rates,
    "growth": Growth,
    "pruning": Pruning,
    "replacement": Replacement,
    "seeding": Seeding,
}
OPTIONS = {"forgetting", "widening"}
"""Fields that only an option of the solver sets."""
STREAM = {"stream_exponent", "stream_ticks", "stream_narrowing"}
"""Numbers that only a stream uses."""
PROBLEMS = ("digits", "breast_cancer", "growth", "stream")


@dataclass(frozen=True)
class Varied(NaturalGradient):
    """The solver with one number of its schedule changed."""

    group: str = ""
    number: str = ""
    factor: float = 1.0

    def schedule(self, problem: Problem, n_components: int | None = None) -> Schedule:
        usual = super().schedule(problem, n_components)
        if not self.group:
            return usual
        record = getattr(usual, self.group)
        value = getattr(record, self.number)
        if isinstance(value, int):
            changed: float = max(1, int(value * self.factor))
        else:
            # Shares and exponents stay below one.
            changed = min(value * self.factor, 0.95 if value < 1 else math.inf)
        record = replace(record, **{self.number: changed})
        if self.number == "stream_narrowing":
            record = replace(record, narrowing=changed)
        first = usual.first_components
        if self.group == "pruning":
            rows = usual.tick_rows * usual.batches_per_epoch
            first = choose_first(
                usual.n_components,
                problem.n_factors,
                rows,
                record,
                n_passes=problem.epochs or 1,
            )
        return replace(usual, first_components=first, **{self.group: record})


class Task(NamedTuple):
    """Rows, the size of the mixture, and whether the rows come as a stream."""

    train: np.ndarray
    test: np.ndarray
    options: dict[str, int]
    stream: bool


def make_problem(name: str) -> Task:
    """Load one of the data sets, every fifth row of which is held out."""
    if name in ("growth", "stream"):
        rng = np.random.default_rng(0)
        centres, ways = 3 * rng.normal(size=(300, 16)), rng.normal(size=(300, 16))
        which = rng.integers(300, size=15_000)
        X = centres[which] + ways[which] * rng.normal(size=(len(which), 1))
        X += 0.3 * rng.normal(size=X.shape)
        options = {"n_components": 600, "n_factors": 1}
        if name == "growth":
            options["max_epochs"] = 2
    else:
        X = np.asarray(getattr(datasets, f"load_{name}")().data, dtype=np.float64)
        X = X[np.random.default_rng(0).permutation(len(X))]
        options = {"n_components": 25 if name == "digits" else 5, "n_factors": 4}
    held_out = np.arange(len(X)) % 5 == 0
    return Task(X[~held_out], X[held_out], options, name == "stream")


def numbers(problem: str) -> Iterator[tuple[str, str, float]]:
    """Yield the group, the name and the value of every number that this problem uses."""
    unused = {"growth": "pruning", "stream": "pruning"}.get(problem, "growth")
    for group, record in GROUPS.items():
        for field in fields(record):
            value = field.default
            if not isinstance(value, (int, float)) or not value or field.name in OPTIONS:
                continue
            if group != unused and (field.name in STREAM) == (problem == "stream"):
                yield group, field.name, float(value)


def score(task: Task, seed: int, solver: Varied) -> float:
    """Train and return the mean log-likelihood of the held-out rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MFA(solver=solver, random_state=seed, **task.options)
        if not task.stream:
            model.fit(task.train)
        for part in np.array_split(task.train, 12) if task.stream else ():
            model.partial_fit(part)
    return float(model.score(task.test))


def measure(problem: str, seeds: int, wanted: Sequence[str] | None = None) -> Iterator[str]:
    """Yield the lines of the table of one problem, for all numbers or the wanted ones."""
    task = make_problem(problem)
    usual = [score(task, seed, Varied()) for seed in range(seeds)]
    size = ", ".join(f"{name}={value}" for name, value in task.options.items())
    rows, features = task.train.shape
    yield f"\n## {problem}\n"
    yield (
        f"{rows:,} rows of {features} features, {size}; {seeds} seeds, whose usual scores are"
        f" {statistics.mean(usual):.2f} with a deviation of {statistics.stdev(usual):.2f}.\n"
    )
    yield "| number | value | halved | doubled |\n| --- | --- | --- | --- |"
    for group, name, value in numbers(problem):
        if wanted and f"{group}.{name}" not in wanted:
            continue
        cells = []
        for factor in (0.5, 2.0):
            solver = Varied(group=group, number=name, factor=factor)
            gains = [score(task, seed, solver) - usual[seed] for seed in range(seeds)]
            error = statistics.stdev(gains) / seeds**0.5
            cells.append(f"{statistics.mean(gains):+.2f} ± {error:.2f}")
        yield f"| `{group}.{name}` | {value:g} | {cells[0]} | {cells[1]} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--problem", action="append", choices=PROBLEMS)
    parser.add_argument("--number", action="append", help="group.field; several are possible")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for problem in options.problem or PROBLEMS:
        for line in measure(problem, options.seeds, options.number):
            print(line, flush=True)


if __name__ == "__main__":
    main()
