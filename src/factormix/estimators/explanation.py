"""Explain the scores of rows: contributions of features as arrays, as a table, as sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.core import attribution, density
from factormix.core.missing import RowBlock
from factormix.core.parameters import Parameters, diagonalise_precisely
from factormix.data.checks import count_chunk_rows
from factormix.data.columns import to_float64
from factormix.data.features import Features
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows, take_rows
from factormix.data.units import Units
from factormix.errors import InputError
from factormix.training.evaluation import evaluate
from factormix.training.run import Run
from factormix.training.threads import use_threads

Numbers = NDArray[np.float64]

STANDS_OUT = 3.0
"""A sentence names a column that lies at least this many conditional deviations away: the
three-sigma rule, one normal value in 370. On nine tables with a value taken from another row, the
first column of the ranking was the changed one in 78% of the rows, and in 67% by contributions
alone; for values ten deviations off, in 99% and 91%."""
LEAST_NAMED = 0.02
"""A sentence names a column with at least this share of the lowest contribution: fifty such columns
would count as much as that one."""
LEAST_DISTANCE = 0.1
"""A sentence names a column with at least this share of the largest z-score: a wrong value makes
columns that depend on it look wrong too. A year of 20190 among houses has a z-score of 1,000, and
the area and price expected of such a house are off by 5 to 20 deviations."""
LEAST_EIGENVALUE = 1e-9
"""Least eigenvalue of M: training keeps eigenvalues far above this, and rounding in float64, 2e-16,
is far below."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """The scores of n rows, and the part of each of d features in them.

    The contributions of a row sum to its score, so the lowest ones are the reasons why a row is
    unusual. Beside them is the value expected of each feature given all others.
    """

    score: Numbers
    """(n,), higher for usual rows."""
    contributions: Numbers
    """(n, d), each row sums to its score."""
    values: Numbers
    """(n, d), the rows themselves."""
    expected: Numbers
    """(n, d), the expected value of each entry, given all others of its row."""
    deviation: Numbers
    """(n, d), the standard deviation around the expected value."""
    z_score: Numbers
    """(n, d), ``(values - expected) / deviation``; NaN for missing entries."""
    component: NDArray[np.intp]
    """(n,), the most probable component of the mixture that gives the expected values."""
    features: tuple[str, ...]
    """(d,), names of the columns, or ``x0``, ``x1``, ... without names."""
    image_shape: tuple[int, ...] | None = None
    """Shape of rows that are images, else None."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.score)

    def __repr__(self) -> str:
        """Return the sizes."""
        return f"Explanation(n_rows={len(self)}, n_features={len(self.features)})"

    def __getitem__(self, chosen: int | slice | Sequence[int] | NDArray[Any]) -> Self:
        """Return the explanation of some of the rows."""
        rows = np.atleast_1d(np.arange(len(self))[chosen])
        cut = {
            field.name: getattr(self, field.name)[rows]
            for field in fields(self)
            if field.name not in ("features", "image_shape")
        }
        return replace(self, **cut)

    def ranking(self) -> NDArray[np.intp]:
        """Return the features of each row, (n, d), the strongest reason first.

        Features at least three deviations away from their expected value come first, by their
        z-scores; then all others, from the lowest contribution to the highest.
        """
        distances = np.abs(np.nan_to_num(self.z_score))
        standing = np.where(distances >= STANDS_OUT, distances, 0.0)
        return np.lexsort((self.contributions, -standing), axis=1)

    def records(self, top: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield a dict for each row and feature, the ``top`` features of a row as ranked."""
        for row, order in enumerate(self.ranking()):
            for j in order[:top]:
                yield {
                    "row": row,
                    "feature": self.features[j],
                    "value": float(self.values[row, j]),
                    "expected": float(self.expected[row, j]),
                    "deviation": float(self.deviation[row, j]),
                    "z_score": float(self.z_score[row, j]),
                    "contribution": float(self.contributions[row, j]),
                }

    def to_frame(self, top: int | None = None) -> Any:
        """Return ``records`` as a pandas data frame."""
        import pandas as pd

        return pd.DataFrame(list(self.records(top)))

    def sentences(self, top: int = 3) -> list[str]:
        """Describe each row by at most ``top`` columns that differ from their expected values."""
        if top < 1:
            raise InputError(
                f"top must be at least 1, the columns that a sentence names, not {top}."
            )
        return [self._sentence(row, order, top) for row, order in enumerate(self.ranking())]

    def _sentence(self, row: int, order: NDArray[np.intp], top: int) -> str:
        # A missing value cannot stand out.
        order = order[~np.isnan(self.values[row, order])]
        if not len(order):
            return "nothing of this row is observed"
        if len(order) == 1:
            return f"{self._describe(row, order[0])} is expected"
        z = np.nan_to_num(self.z_score[row])
        least = LEAST_NAMED * min(0.0, float(self.contributions[row].min()))
        unusual = [
            j
            for j in order
            if abs(z[j]) >= max(STANDS_OUT, LEAST_DISTANCE * np.abs(z).max())
            and (self.contributions[row, j] <= least or j == order[0])
        ][:top]
        if unusual:
            parts = [self._describe(row, j) for j in unusual]
            return "; ".join(parts) + " is expected from the other columns"
        names = _join_names([self.features[j] for j in order[:top]])
        verb = "counts" if top == 1 else "count"
        return (
            "no column stands out from what the others predict (at most"
            f" {np.abs(z).max():.1f} deviations); {names} {verb} most"
        )

    def _describe(self, row: int, j: int) -> str:
        deviation = float(self.deviation[row, j])
        value, expected = (
            _format_number(float(values[row, j]), deviation)
            for values in (self.values, self.expected)
        )
        error = _format_number(deviation, deviation)
        return f"{self.features[j]} is {value} where {expected} ± {error}"


def label_features(features: Features) -> tuple[str, ...]:
    """Name the columns of a table: by their names, as pixels of an image, or by their numbers."""
    if features.names is not None:
        return features.names
    shape = features.image_shape
    if shape is not None and math.prod(shape) == features.count:
        places = (np.unravel_index(j, shape) for j in range(features.count))
        return tuple(f"pixel ({', '.join(str(int(i)) for i in place)})" for place in places)
    return tuple(f"x{j}" for j in range(features.count))


def _format_number(value: float, deviation: float) -> str:
    """Write a number to two digits of its deviation."""
    if not (math.isfinite(value) and 0 < deviation < math.inf):
        return f"{value:.6g}"
    decimals = max(0, 1 - math.floor(math.log10(deviation)))
    if decimals > 6 or abs(value) >= 1e9:
        return f"{value:.6g}"
    return f"{value:.{decimals}f}"


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def explain_rows(
    run: Run, rows: Rows, features: Features, scoring: str, n_trained: int
) -> Explanation:
    """Explain a score of rows (n, d) by a mixture that was trained on ``n_trained`` rows.

    A component of one row says nothing about other rows. A row that belongs to such a component,
    usually the row itself, is explained by the other components.
    """
    check_scoring(scoring, attribution.SCORES)
    parameters = diagonalise_precisely(run.parameters, LEAST_EIGENVALUE)
    counts = n_trained * parameters.log_weights.exp()
    split, best, *others = _explain_by(parameters, counts, run.units, rows, scoring)
    kept = (counts >= 1 + density.LEAST_REST).nonzero()[:, 0]
    alone = np.flatnonzero(~np.isin(best, kept.cpu().numpy()))
    if len(alone) and len(kept):
        rest, chosen = parameters.take(kept), take_rows(rows, alone)
        again = _explain_by(rest, counts[kept], run.units, ArrayRows(chosen.rows), scoring)
        again[1] = kept.cpu().numpy()[again[1]]
        for whole, part in zip((split, best, *others), again, strict=True):
            whole[alone] = part
    if scoring in ("log_likelihood", "best_component"):
        # A density has the units of its observed features.
        observed = ~np.isnan(others[2])
        split = split - np.where(observed, run.units.scale.log().numpy(), 0.0)
    return build_explanation(rows, features, run.units, split.sum(axis=1), split, [best, *others])


def _explain_by(
    parameters: Parameters, counts: Tensor, units: Units, rows: Rows, scoring: str
) -> list[NDArray[Any]]:
    """Compute contributions (n, d), best components (n,) and conditionals, in working units."""

    def of_block(block: RowBlock) -> Sequence[Tensor]:
        split = attribution.contributions(scoring, block)
        best = block.joint().argmax(dim=1)
        return [split, best, *attribution.conditionals(block, counts)]

    with use_threads() as threads:
        blocks = evaluate(threads, parameters, units, rows, of_block)
        parts = [part for _, part in blocks]
    return [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]


def build_explanation(
    rows: Rows,
    features: Features,
    units: Units,
    score: Numbers,
    split: Numbers,
    others: Sequence[NDArray[Any]],
) -> Explanation:
    """Build an explanation in units of the data from results in working units.

    ``split`` (n, d) has the contributions. ``others`` has the most probable component (n,), and
    expected values, deviations and z-scores (n, d) as ``attribution.conditionals`` returns them.
    """
    best, expected, deviation, z_score = others
    offset, scale = units.offset.numpy(), units.scale.numpy()
    blocks = rows.blocks(count_chunk_rows(rows))
    return Explanation(
        score=score,
        contributions=split,
        values=np.concatenate([to_float64(block.rows).cpu().numpy() for block in blocks]),
        expected=offset + scale * expected,
        deviation=scale * deviation,
        z_score=z_score,
        component=best,
        features=label_features(features),
        image_shape=features.image_shape,
    )


def check_scoring(name: object, known: Sequence[str]) -> None:
    """Check that a score has one of the known names."""
    if name not in known:
        raise InputError(f"scoring must be one of {', '.join(map(repr, known))}, not {name!r}.")
