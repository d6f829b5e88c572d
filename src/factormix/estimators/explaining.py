"""How a trained mixture explains rows: the reasons of ``core.reasons`` in units of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.core import density, reasons, scores
from factormix.core.constraints import diagonalise
from factormix.core.density import Operands
from factormix.core.observed import ObservedOperands, observed_joint
from factormix.core.observed_reasons import observed_conditionals, observed_contributions
from factormix.core.parameters import Parameters
from factormix.core.workspace import Workspace
from factormix.data.columns import precise
from factormix.data.sources import Rows
from factormix.data.units import Units
from factormix.errors import InputError
from factormix.estimators.explanation import Explanation, feature_labels
from factormix.estimators.validation import Array, check_rows, trained_features
from factormix.training.evaluation import evaluate, in_precise_dtype
from factormix.training.loop import Run
from factormix.training.threads import team

__all__ = ["ExplainedMixture", "check_scoring", "explanation_of", "precise_parameters"]

Numbers = NDArray[np.float64]

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
        check_scoring(scoring, scores.SCORES)
        rows, run = check_rows(self, X), self._run

        def of_block(x: Tensor, ops: Operands, work: Workspace) -> Sequence[Tensor]:
            best = density.joint_log_prob(x, ops).argmax(dim=1)
            return [reasons.contributions(scoring, x, ops), best, *reasons.conditionals(x, ops)]

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
        yield precise(block.rows).cpu().numpy()
