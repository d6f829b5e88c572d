"""What an outlier detector is made of: kinds of mixtures, and the rows that each is trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from factormix.errors import InputError

__all__ = ["CONTAMINATED", "NOVELTY", "Kind", "Recipe"]

Chosen = NDArray[np.intp]
"""Numbers of rows."""


@dataclass(frozen=True)
class Kind:
    """Describe one kind of mixture, in units where each column has deviation one."""

    floor: float
    """The smallest noise variance: large is smooth."""
    rows_per_component: int
    """Training rows for each component; 1 puts a component on every row, without training."""
    most_components: int
    """K is not larger than this."""
    n_factors: int = 0
    """l, where there are features enough."""

    def components_for(self, n_rows: int) -> int:
        """Return K for a number of training rows."""
        return max(1, min(self.most_components, n_rows // self.rows_per_component))

    def factors_for(self, n_features: int) -> int:
        """Return l for a number of features."""
        return max(0, min(self.n_factors, n_features - 1))

    def seed(self, seed: int, part: int) -> int:
        """Return a seed for this kind alone: its mixtures are the same among whatever others."""
        sizes = (self.rows_per_component, self.most_components, self.n_factors)
        numbers = [seed, part, round(1e6 * self.floor), *sizes]
        return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)

    def problem(self) -> str | None:
        """Say what is wrong with the numbers, None if they are in order."""
        if not (math.isfinite(self.floor) and self.floor > 0):
            return f"floor must be a positive number, not {self.floor!r}"
        if min(self.rows_per_component, self.most_components) < 1 or self.n_factors < 0:
            return "rows_per_component and most_components must be at least 1, n_factors at least 0"
        return None


@dataclass(frozen=True)
class Recipe:
    """Describe the mixtures of a detector and the parts of the rows that they are trained on.

    ``n_parts`` parts each train one mixture of every kind. Without ``rows_per_part`` a part is all
    rows but one of ``n_parts`` folds; with it, a draw of that many rows, at most half of them. So
    every row is left out by some part, and has a score of mixtures that have not seen it.
    """

    kinds: tuple[Kind, ...]
    n_parts: int
    rows_per_part: int | None = None
    kept_weight: float = 1.0
    """Share of the weight up to which the heaviest components of a mixture are kept."""
    robust: bool = False
    """Whether columns are standardised by their quantiles instead of mean and deviation."""
    most_rows: int = 10_000
    """Rows that are used, a random choice where there are more."""

    def check(self) -> None:
        """Check the numbers, before any data is looked at."""
        wrong = next((problem for kind in self.kinds if (problem := kind.problem())), None)
        if not self.kinds or wrong:
            raise InputError(f"recipe needs kinds of mixtures: {wrong or 'there are none'}.")
        if self.n_parts < 2 or self.most_rows < 2:
            raise InputError("recipe must have n_parts and most_rows of at least 2.")
        if self.rows_per_part is not None and self.rows_per_part < 1:
            raise InputError("recipe must have rows_per_part of at least 1, or None.")
        if not 0 < self.kept_weight <= 1:
            raise InputError(
                f"recipe must have a kept_weight above 0 and up to 1, not {self.kept_weight!r}."
            )

    def parts(self, n_rows: int, random: np.random.Generator) -> Iterator[tuple[Chosen, Chosen]]:
        """Yield the rows that each part is trained on, and those that it leaves out."""
        if self.rows_per_part is None:
            yield from _folds(n_rows, min(self.n_parts, n_rows), random)
        else:
            yield from _draws(n_rows, self.n_parts, self.rows_per_part, random)

    def packed(self) -> dict[str, Any]:
        """Return all numbers, ready for JSON."""
        return asdict(self)

    @classmethod
    def unpacked(cls, values: dict[str, Any]) -> Self:
        """Make a recipe of what ``packed`` returned."""
        kinds = tuple(Kind(**kind) for kind in values["kinds"])
        return cls(**{**values, "kinds": kinds})


def _folds(n: int, n_parts: int, random: np.random.Generator) -> Iterator[tuple[Chosen, Chosen]]:
    order = random.permutation(n)
    for fold in np.array_split(order, n_parts):
        yield np.setdiff1d(order, fold), np.sort(fold)


def _draws(
    n: int, n_parts: int, size: int, random: np.random.Generator
) -> Iterator[tuple[Chosen, Chosen]]:
    size = max(1, min(size, n // 2))
    order, first = random.permutation(n), 0
    for _ in range(n_parts):
        # Draws follow each other through an order of the rows, so that two halves share no row.
        if first + size > n:
            order, first = random.permutation(n), 0
        drawn = np.sort(order[first : first + size])
        first += size
        yield drawn, np.setdiff1d(order, drawn)


NOVELTY = Recipe(kinds=(Kind(0.01, 10, 8, 8), Kind(0.03, 1, 2000)), n_parts=3)
CONTAMINATED = Recipe(
    kinds=(Kind(0.2, 10, 100, 4), Kind(0.2, 20, 100, 0)),
    n_parts=12,
    rows_per_part=256,
    kept_weight=0.85,
    robust=True,
)
