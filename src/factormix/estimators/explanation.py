"""Reasons for the scores of rows: as arrays, as a table, and as sentences.

How a trained mixture explains rows: the reasons of ``core.attribution`` in units of the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.core import attribution, density
from factormix.core.arrays import Workspace
from factormix.core.attribution import observed_conditionals, observed_contributions
from factormix.core.density import Operands
from factormix.core.missing import ObservedOperands, observed_joint
from factormix.core.parameters import Parameters, diagonalise
from factormix.data.columns import to_float64
from factormix.data.features import Features
from factormix.data.sources.base import Rows
from factormix.data.units import Units
from factormix.errors import InputError
from factormix.estimators.validation import Array, check_rows, trained_features
from factormix.training.evaluation import evaluate, in_precise_dtype
from factormix.training.run import Run
from factormix.training.threads import team

__all__ = [
    "ExplainedMixture",
    "Explanation",
    "check_scoring",
    "explanation_of",
    "feature_labels",
    "precise_parameters",
]

Numbers = NDArray[np.float64]

STANDS_OUT = 3.0
"""Conditional deviations from which a column is worth a sentence."""

TELLING = 0.02
"""Share of the lowest contribution that a column must have for it."""


@dataclass(frozen=True)
class Explanation:
    """Hold, for each of n rows, its score and what each of d features has to do with it.

    Low contributions are the reasons why a row is unusual, lowest first: the contributions of a row
    sum to its score. Apart from them, each feature is told given all other features of its row.
    """

    score: Numbers
    """(n,), higher for what is usual."""
    contributions: Numbers
    """(n, d), each row sums to its score."""
    values: Numbers
    """(n, d), the rows themselves."""
    expected: Numbers
    """(n, d), what each value is expected to be, given all others of its row."""
    deviation: Numbers
    """(n, d), the standard deviation of that."""
    z_score: Numbers
    """(n, d), ``(values - expected) / deviation``; NaN for what is missing."""
    component: NDArray[np.intp]
    """(n,), the most probable component of the mixture that tells what is expected."""
    features: tuple[str, ...]
    """(d,), names of the columns; ``x0``, ``x1``, ... where they have none."""
    image_shape: tuple[int, ...] | None = None
    """Shape of the rows as images, None if they are none."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.score)

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
        """Return the features of each row, (n, d), those that made it unusual first."""
        return np.argsort(self.contributions, axis=1, kind="stable")

    def records(self, top: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield row, feature, value and reasons, the ``top`` features of each row first."""
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
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                "a data frame of reasons needs pandas: pip install pandas, or use records()."
            ) from error
        return pd.DataFrame(list(self.records(top)))

    def sentences(self, top: int = 3) -> list[str]:
        """Say for each row which columns are not as the others let expect, ``top`` at most."""
        if top < 1:
            raise InputError(f"top is the most columns that a sentence names, not {top}.")
        return [self._sentence(row, order, top) for row, order in enumerate(self.ranking())]

    def _sentence(self, row: int, order: NDArray[np.intp], top: int) -> str:
        # What is missing has nothing that could stand out.
        order = order[~np.isnan(self.values[row, order])]
        if not len(order):
            return "nothing of this row is observed"
        z = np.nan_to_num(self.z_score[row])
        least = TELLING * min(0.0, float(self.contributions[row, order[0]]))
        telling = [
            j
            for j in order
            if abs(z[j]) >= STANDS_OUT and (self.contributions[row, j] <= least or j == order[0])
        ][:top]
        if telling:
            parts = [self._part(row, j) for j in telling]
            return "; ".join(parts) + " is expected from the other columns"
        names = _listed([self.features[j] for j in order[:top]])
        return (
            f"no column stands out from what the others let expect (at most {np.abs(z).max():.1f}"
            f" deviations); {names} count{'s' if len(order[:top]) == 1 else ''} most"
        )

    def _part(self, row: int, j: int) -> str:
        deviation = float(self.deviation[row, j])
        value, expected = (
            _number(float(values[row, j]), deviation) for values in (self.values, self.expected)
        )
        return f"{self.features[j]} is {value} where {expected} ± {_number(deviation, deviation)}"


def feature_labels(features: Features) -> tuple[str, ...]:
    """Name the columns of a table: by their names, as pixels of an image, or by their numbers."""
    if features.names is not None:
        return features.names
    shape = features.image_shape
    if shape is not None and math.prod(shape) == features.count:
        places = (np.unravel_index(j, shape) for j in range(features.count))
        return tuple(f"pixel ({', '.join(str(int(i)) for i in place)})" for place in places)
    return tuple(f"x{j}" for j in range(features.count))


def _number(value: float, deviation: float) -> str:
    """Write a number to two digits of its deviation."""
    if not (math.isfinite(value) and 0 < deviation < math.inf):
        return f"{value:.6g}"
    decimals = max(0, 1 - math.floor(math.log10(deviation)))
    if decimals > 6 or abs(value) >= 1e9:
        return f"{value:.6g}"
    return f"{value:.{decimals}f}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


LEAST_EIGENVALUE = 1e-9
"""Least eigenvalue of M, which training keeps far above this."""


class ExplainedMixture:
    """The part of an estimator that tells why rows score as they do."""

    _run: Run

    def explain(self, X: Array | Rows, scoring: str = "log_likelihood") -> Explanation:
        """Tell which features make each row of X (n, d) as likely or unlikely as it is.

        ``scoring`` is ``"log_likelihood"``, ``"best_component"`` (that of the most probable one),
        ``"mahalanobis"`` (minus the squared distance to that component) or ``"reconstruction"``
        (minus the squared length of what its factors cannot express, in units of its noise). The
        contributions of a row sum to its score; expected values are those of the whole mixture,
        given all other features of the row.
        """
        check_is_fitted(self)
        check_scoring(scoring, attribution.SCORES)
        rows, run = check_rows(self, X), self._run

        def of_block(x: Tensor, ops: Operands, work: Workspace) -> Sequence[Tensor]:
            best = density.joint_log_prob(x, ops).argmax(dim=1)
            return [
                attribution.contributions(scoring, x, ops),
                best,
                *attribution.conditionals(x, ops),
            ]

        def of_partial(x: Tensor, missing: Tensor, known: ObservedOperands) -> Sequence[Tensor]:
            best = observed_joint(x, missing, known).argmax(dim=1)
            split = observed_contributions(scoring, x, missing, known)
            return [split, best, *observed_conditionals(x, missing, known)]

        parameters = precise_parameters(run.parameters)
        with team() as threads:
            blocks = evaluate(threads, parameters, run.units, rows, of_block, of_partial)
            parts = [part for _, part in blocks]
        split, *others = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
        if scoring in ("log_likelihood", "best_component"):
            # A density has the units of its observed features.
            known = ~np.isnan(others[3])
            split = split - np.where(known, run.units.scale.log().numpy(), 0.0)
        return explanation_of(self, rows, run.units, split.sum(axis=1), split, others)


def explanation_of(
    estimator: Any,
    rows: Rows,
    units: Units,
    score: Numbers,
    split: Numbers,
    others: Sequence[NDArray[Any]],
) -> Explanation:
    """Put reasons in working units, (n, d) each, together as an explanation in units of the data.

    ``others`` has the most probable component (n,), and what ``reasons.conditionals`` returns.
    """
    best, expected, deviation, z_score = others
    offset, scale = units.offset.numpy(), units.scale.numpy()
    features = trained_features(estimator)
    return Explanation(
        score=score,
        contributions=split,
        values=np.concatenate(list(_values(rows))),
        expected=offset + scale * expected,
        deviation=scale * deviation,
        z_score=z_score,
        component=best,
        features=feature_labels(features),
        image_shape=features.image_shape,
    )


def precise_parameters(parameters: Parameters) -> Parameters:
    """Return parameters in float64, with an M that is diagonal to as many digits."""
    logits, mu, E, Gamma, _ = in_precise_dtype(parameters)
    return Parameters(logits, mu, E, *diagonalise(E, Gamma, LEAST_EIGENVALUE))


def check_scoring(name: object, known: Sequence[str]) -> None:
    """Check that a score is one of those that are known by name."""
    if name not in known:
        raise InputError(f"scoring must be one of {', '.join(map(repr, known))}, not {name!r}.")


def _values(rows: Rows) -> Iterator[Numbers]:
    for block in rows.blocks(max(1, (1 << 20) // rows.n_features)):
        yield to_float64(block.rows).cpu().numpy()
