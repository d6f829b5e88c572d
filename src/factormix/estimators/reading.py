"""What a trained mixture tells: its factors, its components, and what rows they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.core import density, overlap, rotation, shares
from factormix.core.density import Operands
from factormix.core.parameters import change_units, precise_dtype
from factormix.core.workspace import Workspace
from factormix.data.sources import Rows
from factormix.estimators.mfa import MFA
from factormix.estimators.validation import Array, check_count, check_mixture, check_rows
from factormix.training.evaluation import evaluate, joint_log_prob_of
from factormix.training.threads import team

__all__ = [
    "NearestRows",
    "VarianceExplained",
    "Varimax",
    "communalities",
    "confusion",
    "distances",
    "nearest_rows",
    "overlaps",
    "variance_explained",
    "varimax",
]

Values = NDArray[np.float64]

OTHERS = 1e9
"""What rows of other components are set back by: more nats than rows differ by."""


@dataclass(frozen=True)
class Varimax:
    """A mixture with rotated factors, as pictures take it; its density is the same.

    Attributes
    ----------
    loadings_ : array (K, d, l)
        Loadings that are large for some features and near zero for the others.
    rotation_ : array (K, l, l)
        What the loadings of each component were multiplied by.
    weights_, means_, precision_diag_, precision_factors_, noise_variances_
        As in the model.
    """

    loadings_: Values
    rotation_: Values
    weights_: Values
    means_: Values
    precision_diag_: Values
    precision_factors_: Values
    noise_variances_: Values
    model: MFA

    def transform(self, X: Array | Rows) -> Values:
        """Compute the latent code of each row (n, d) in the rotated factors of its component."""
        codes, best = (np.asarray(a) for a in (self.model.transform(X), self.model.predict(X)))
        turned: Values = np.einsum("nl,nlm->nm", codes, self.rotation_[best])
        return turned


def varimax(model: MFA) -> Varimax:
    """Rotate the factors of each component so that each is about few features (varimax)."""
    check_mixture(model)
    turned = rotation.varimax(torch.as_tensor(model.loadings_).double())
    names = ("weights_", "means_", "precision_diag_", "precision_factors_", "noise_variances_")
    fitted = {name: _array(getattr(model, name)) for name in names}
    return Varimax(_array(turned.loadings), _array(turned.rotation), **fitted, model=model)


class VarianceExplained(NamedTuple):
    """Shares of variance, summed over the features in units of the data."""

    between: float
    """The share of the mixture's variance that lies between the means of its components;"""
    factors: float
    """the share that factors explain;"""
    noise: float
    """and the share that is noise."""
    per_factor: Values
    """(K, l): shares of each component's own variance that its factors explain."""


def variance_explained(model: MFA, *, standardised: bool = False) -> VarianceExplained:
    """Compute where the variance lies: between components, in each factor, in the noise.

    Features with a large variance count most; ``standardised=True`` lets all count alike.
    """
    check_mixture(model)
    parameters = model._fitted()
    if standardised:
        deviation = shares.feature_variances(parameters).sqrt()
        parameters = change_units(parameters, torch.zeros_like(deviation), 1 / deviation)
    found = shares.variance_shares(parameters)
    return VarianceExplained(
        float(found.between),
        float(found.within_factors),
        float(found.within_noise),
        _array(found.factors),
    )


def communalities(model: MFA) -> Values:
    """Compute the share of each feature's variance that a component's factors explain, (K, d)."""
    check_mixture(model)
    return _array(shares.communalities(model._fitted()))


def overlaps(model: MFA, other: MFA | None = None) -> Values:
    """Compute how much components overlap, (K, K), or with those of another model, (K, J).

    It is the Bhattacharyya coefficient, the integral of ``sqrt(p_k p_j)``: one for the same
    Gaussian, zero where nothing is shared. In many dimensions it is all but zero for nearly all
    pairs; ``distances`` tells more there.
    """
    return np.exp(-distances(model, other))


def distances(model: MFA, other: MFA | None = None) -> Values:
    """Compute Bhattacharyya distances between components, (K, K), or to another model's, (K, J).

    ``exp(-distance)`` is what ``overlaps`` gives; the distance still tells near from far where that
    is zero to all digits.
    """
    check_mixture(model)
    if other is not None:
        check_mixture(other)
    one = model._fitted()
    two = one if other is None else other._fitted()
    return _array(overlap.bhattacharyya(one, two))


def confusion(model: MFA, X: Array | Rows) -> Values:
    """Compute what share of its rows each component holds with which others, (K, K).

    Row k is the mean of ``p(j | x)`` over the rows of X (n, d) whose most probable component is k;
    it sums to one, or is NaN where k has no rows.
    """
    check_mixture(model)
    rows, run = check_rows(model, X), model._run
    joint_log_prob = joint_log_prob_of(run.parameters)

    def of_block(x: Tensor, ops: Operands, work: Workspace) -> tuple[Tensor, Tensor]:
        R = torch.softmax(joint_log_prob(x, ops, work), dim=1)
        mine = torch.nn.functional.one_hot(R.argmax(dim=1), R.shape[1]).to(R)
        return mine.mT @ R, mine.sum(dim=0)

    K = run.parameters.shape[0]
    held, count = np.zeros((K, K)), np.zeros(K)
    with team() as threads:
        for _, (shared, mine) in evaluate(threads, run.parameters, run.units, rows, of_block):
            held += _array(shared)
            count += _array(mine)
    with np.errstate(invalid="ignore"):
        return np.asarray(held / count[:, None])


class NearestRows(NamedTuple):
    """The rows that a component explains best."""

    rows: NDArray[np.intp]
    """(K, n), numbers of rows, the best first."""
    log_likelihoods: Values
    """(K, n), ``log p_k(x)`` of each."""


def nearest_rows(model: MFA, X: Array | Rows, n_rows: int = 5) -> NearestRows:
    """Find the rows of X (n, d) that are nearest to each component, in the component's own metric.

    Of the rows whose most probable component it is, these are the ones of the least Mahalanobis
    distance; rows of other components follow where there are too few.
    """
    check_mixture(model)
    rows, run = check_rows(model, X), model._run
    n = min(check_count(n_rows, "n_rows", 1), rows.n_rows)

    def of_block(x: Tensor, ops: Operands, work: Workspace) -> tuple[Tensor, Tensor, int]:
        found = density.component_log_prob(x, ops, work).to(precise_dtype(x.device))
        own = (found + ops.log_weights).argmax(dim=1, keepdim=True)
        # Rows of other components come after all of its own.
        ranked = (found - OTHERS).scatter(1, own, found.gather(1, own))
        best = ranked.topk(min(n, len(x)), dim=0)
        return best.values, best.indices, len(x)

    K, first = run.parameters.shape[0], 0
    levels, numbers = np.empty((0, K)), np.empty((0, K), dtype=np.intp)
    with team() as threads:
        for _, (values, places, size) in evaluate(
            threads, run.parameters, run.units, rows, of_block
        ):
            levels = np.concatenate([levels, _array(values)])
            numbers = np.concatenate([numbers, places.cpu().numpy() + first])
            order = np.argsort(-levels, axis=0, kind="stable")[:n]
            levels = np.take_along_axis(levels, order, axis=0)
            numbers = np.take_along_axis(numbers, order, axis=0)
            first += size
    levels = np.where(levels < -OTHERS / 2, levels + OTHERS, levels)
    return NearestRows(numbers.T, levels.T - run.units.log_volume)


def _array(values: Any) -> Values:
    """Return values as a float64 array."""
    values = values.detach().cpu() if isinstance(values, Tensor) else values
    return np.asarray(values, dtype=np.float64)
