"""The mixtures of an outlier detector: how each is trained, and what it says about a row.

Members see rows in working units, where each column has deviation one. Scores of different mixtures
differ in level and spread, so that each is told relative to the rows which the member was not
trained on, and compressed: one member that finds a row absurd does not outvote all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from factormix.core import density, reasons, scores
from factormix.core.density import Operands
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters, like_tensor
from factormix.estimators.explaining import precise_parameters
from factormix.estimators.mfa import MFA
from factormix.estimators.recipes import Kind

__all__ = ["Level", "Member", "calibrated", "heaviest", "level_of", "train_mixture"]

MAX_EPOCHS = 10
"""Passes over the rows of a part: smooth components are in place by then."""
LEARNED = 1e4
"""Deviations beyond which a training row is as far out as any: float32 has to hold its square."""
FEW = 20
"""Rows at which a component's own level counts as much as that of all components."""


class Level(NamedTuple):
    """Median and spread of a score over rows: of all of them, or by component."""

    median: Tensor
    """Scalar, or (K,)."""
    spread: Tensor
    """Scalar, or (K,), positive."""


@dataclass(frozen=True)
class Member:
    """A mixture in working units, and the level of its score on rows it has not seen."""

    mixture: PrecisionMixture
    level: Level

    def scores(self, name: str, z: Tensor) -> Tensor:
        """Compute the compressed score of rows (B, d) by name, (B,)."""
        ops = _operands(self.mixture)
        values = scores.score(_base(name), z, ops)
        return scores.compressed(self._relative(values, z, ops))

    def contributions(self, name: str, z: Tensor) -> Tensor:
        """Split the compressed score over features, (B, d).

        The secant from the median, where the score is zero, carries the split of the mixture's own
        score over to the compressed one.
        """
        ops = _operands(self.mixture)
        split = reasons.contributions(_base(name), z, ops)
        u = self._relative(split.sum(dim=1), z, ops)
        median, spread = self._level_at(z, ops)
        slope = scores.compression_slope(u) / spread
        return slope.unsqueeze(1) * (split - (median / z.shape[1]).unsqueeze(1))

    def _relative(self, values: Tensor, z: Tensor, ops: Operands) -> Tensor:
        median, spread = self._level_at(z, ops)
        return (values - median) / spread

    def _level_at(self, z: Tensor, ops: Operands) -> Level:
        """Return the level that counts for each row, (B,) each."""
        if self.level.median.ndim == 0:
            return Level(*(value.expand(len(z)) for value in self.level))
        best = density.joint_log_prob(z, ops).argmax(dim=1)
        return Level(self.level.median[best], self.level.spread[best])


def train_mixture(
    kind: Kind, z: Tensor, seed: int, dtype: str | torch.dtype, kept_weight: float
) -> PrecisionMixture:
    """Train a mixture of one kind on rows (n, d) in working units."""
    K, l = kind.components_for(len(z)), kind.factors_for(z.shape[1])
    z = z.clamp(-LEARNED, LEARNED)
    if kind.rows_per_component == 1:
        return _kernels(z, K, kind.floor, seed)
    model = MFA(
        K,
        l,
        scaling=None,
        max_precision=1 / kind.floor,
        max_epochs=MAX_EPOCHS,
        random_state=seed,
        dtype=dtype,
    ).fit(z)
    return heaviest(
        PrecisionMixture.from_parameters(precise_parameters(model.mixture_.precision_form)),
        kept_weight,
    )


def _kernels(z: Tensor, K: int, floor: float, seed: int) -> PrecisionMixture:
    """Put a component of variance ``floor`` on each of K rows: a kernel density."""
    chosen = np.random.default_rng(seed).permutation(len(z))[:K]
    means = z[torch.from_numpy(np.sort(chosen)).to(z.device)]
    return PrecisionMixture(
        torch.ones(K, **like_tensor(z)), means, torch.full_like(means, 1 / floor), None
    )


def heaviest(mixture: PrecisionMixture, kept_weight: float) -> PrecisionMixture:
    """Leave out the lightest components: the others have at least ``kept_weight`` together.

    Outliers among the training rows are few, and the components that they get are light.
    """
    if kept_weight >= 1:
        return mixture
    parameters = mixture.precision_form
    order = parameters.logits.argsort(descending=True)
    before = parameters.log_weights.exp()[order].cumsum(dim=0) - parameters.log_weights.exp()[order]
    chosen = order[before < kept_weight].sort().values
    return PrecisionMixture.from_parameters(Parameters(*(part[chosen] for part in parameters)))


def level_of(values: Tensor) -> Level:
    """Compute median and interquartile range of scores (n,), scalars."""
    low, median, high = torch.quantile(values, values.new_tensor([0.25, 0.5, 0.75]))
    # Scores of rows that are all the same have no spread, and any will do.
    spread = high - low
    tiny = 1e-9 * (1 + median.abs())
    return Level(median, torch.where(spread > tiny, spread, torch.ones_like(spread)))


def calibrated(mixture: PrecisionMixture, values: Tensor, z: Tensor) -> Level:
    """Compute the level of each component from the rows (n, d) it explains best, (K,) each.

    Components with few rows keep close to the level of all rows.
    """
    overall, K = level_of(values), mixture.n_components
    best = density.joint_log_prob(z, _operands(mixture)).argmax(dim=1)
    median, spread = overall.median.repeat(K), overall.spread.repeat(K)
    for k in torch.unique(best).tolist():
        mine = values[best == k]
        own, trust = level_of(mine), len(mine) / (len(mine) + FEW)
        median[k] += trust * (own.median - overall.median)
        spread[k] = spread[k] ** (1 - trust) * own.spread**trust
    return Level(median, spread)


def _base(name: str) -> str:
    """Return the score of a mixture that a detector's score is made of."""
    return name if name in scores.SCORES else "log_likelihood"


def _operands(mixture: PrecisionMixture) -> Operands:
    return density.operands(mixture.precision_form)
