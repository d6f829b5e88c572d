"""The mixtures of an outlier detector: how each is trained, and what it says about a row.

Members see rows in working units, where each column has deviation one. Scores of different mixtures
differ in level and spread, so that each is told relative to the rows which the member was not
trained on, and compressed: one member that finds a row absurd does not outvote all others. Missing
entries count as ordinary ones: a row of which nothing is known scores 0. The score of a row of
which the share s is known has s times the level of a complete one, and about sqrt(s) times the
spread, as a sum of s times as many terms has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from factormix.core import density, reasons, scores
from factormix.core.density import Operands
from factormix.core.mixture import PrecisionMixture
from factormix.core.observed import ObservedOperands, observed_joint, observed_operands
from factormix.core.observed_reasons import (
    observed_conditionals,
    observed_contributions,
    observed_score,
)
from factormix.core.parameters import Parameters, like_tensor
from factormix.estimators.explaining import precise_parameters
from factormix.estimators.mfa import MFA
from factormix.estimators.recipes import Kind

__all__ = [
    "Level",
    "Member",
    "Working",
    "best_components",
    "calibrated",
    "heaviest",
    "level_of",
    "raw_scores",
    "train_mixture",
]

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
class Working:
    """Rows (B, d) in working units; what is missing of them has the value 0."""

    z: Tensor
    missing: Tensor | None = None
    """(B, d), None where nothing is."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.z)

    def take(self, chosen: Tensor) -> Working:
        """Return some of the rows."""
        missing = None if self.missing is None else self.missing[chosen]
        return Working(self.z[chosen], missing if missing is not None and missing.any() else None)

    def known_share(self) -> Tensor:
        """Compute which share of its entries each row has, (B,)."""
        if self.missing is None:
            return self.z.new_ones(len(self.z))
        return 1 - self.missing.to(self.z).mean(dim=1)

    def counted_share(self) -> Tensor:
        """Compute the same, (B,), with one entry at least, to divide by."""
        return self.known_share().clamp(min=1 / self.z.shape[1])


@dataclass(frozen=True)
class Member:
    """A mixture in working units, and the level of its score on rows it has not seen."""

    mixture: PrecisionMixture
    level: Level

    def scores(self, name: str, rows: Working) -> Tensor:
        """Compute the compressed score of rows (B, d) by name, (B,)."""
        values = raw_scores(self.mixture, name, rows)
        median, spread = self._level_at(rows)
        return scores.compressed((values - rows.known_share() * median) / spread)

    def contributions(self, name: str, rows: Working) -> Tensor:
        """Split the compressed score over features, (B, d).

        The secant from the median, where the score is zero, carries the split of the mixture's own
        score over to the compressed one.
        """
        base = base_score(name)
        split = by_rows(
            self.mixture,
            rows,
            lambda z, ops: reasons.contributions(base, z, ops),
            lambda z, missing, known: observed_contributions(base, z, missing, known),
        )
        median, spread = self._level_at(rows)
        relative = split - (median / rows.z.shape[1]).unsqueeze(1)
        if rows.missing is not None:
            relative = relative.masked_fill(rows.missing, 0)
        slope = scores.compression_slope(relative.sum(dim=1) / spread) / spread
        return slope.unsqueeze(1) * relative

    def conditionals(self, rows: Working) -> reasons.Conditionals:
        """Compute what each feature is expected to be given the others, in working units."""
        found = by_rows(
            self.mixture,
            rows,
            lambda z, ops: torch.stack(reasons.conditionals(z, ops)).transpose(0, 1),
            lambda *some: torch.stack(observed_conditionals(*some)).transpose(0, 1),
        )
        return reasons.Conditionals(*found.unbind(dim=1))

    def _level_at(self, rows: Working) -> Level:
        """Return the level that counts for each row, (B,) each."""
        median, spread = self.level
        if median.ndim == 0:
            median, spread = (value.expand(len(rows)) for value in self.level)
        else:
            best = best_components(self.mixture, rows)
            median, spread = median[best], spread[best]
        return Level(median, spread * rows.counted_share().sqrt())


def raw_scores(mixture: PrecisionMixture, name: str, rows: Working) -> Tensor:
    """Compute the score of rows (B, d) that a detector's score of this name is made of, (B,)."""
    base = base_score(name)
    return by_rows(
        mixture,
        rows,
        lambda z, ops: scores.score(base, z, ops),
        lambda z, missing, known: observed_score(base, z, missing, known),
    )


def best_components(mixture: PrecisionMixture, rows: Working) -> Tensor:
    """Return the most probable component of each row, (B,)."""
    joint = by_rows(mixture, rows, density.joint_log_prob, observed_joint)
    return joint.argmax(dim=1)


def by_rows(
    mixture: PrecisionMixture,
    rows: Working,
    whole: Callable[[Tensor, Operands], Tensor],
    partial: Callable[[Tensor, Tensor, ObservedOperands], Tensor],
) -> Tensor:
    """Compute ``whole`` of the complete rows and ``partial`` of the others, (B, ...)."""
    parameters = mixture.precision_form
    if rows.missing is None:
        return whole(rows.z, density.operands(parameters))
    gaps = rows.missing.any(dim=1)
    some, others = gaps.nonzero().squeeze(1), (~gaps).nonzero().squeeze(1)
    found = partial(rows.z[some], rows.missing[some], observed_operands(parameters))
    out = found.new_empty(len(rows), *found.shape[1:])
    out[some] = found
    if len(others):
        out[others] = whole(rows.z[others], density.operands(parameters))
    return out


def train_mixture(
    kind: Kind, rows: Working, seed: int, dtype: str | torch.dtype, kept_weight: float
) -> PrecisionMixture:
    """Train a mixture of one kind on rows (n, d)."""
    K, l = kind.components_for(len(rows)), kind.factors_for(rows.z.shape[1])
    z = rows.z.clamp(-LEARNED, LEARNED)
    if kind.rows_per_component == 1:
        return _kernels(Working(z, rows.missing), K, kind.floor, seed)
    if rows.missing is not None:
        # A column of which this part has no value is taken to be ordinary in it.
        unknown = rows.missing & ~rows.missing.all(dim=0)
        z = z.masked_fill(unknown, torch.nan)
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


def _kernels(rows: Working, K: int, floor: float, seed: int) -> PrecisionMixture:
    """Put a component of variance ``floor`` on each of K rows: a kernel density.

    Where a row has no value, its component is as wide as the column.
    """
    chosen = np.random.default_rng(seed).permutation(len(rows))[:K]
    centres = rows.take(torch.from_numpy(np.sort(chosen)).to(rows.z.device))
    variances = torch.full_like(centres.z, floor)
    if centres.missing is not None:
        variances = torch.where(centres.missing, 1 + floor, variances)
    return PrecisionMixture(
        torch.ones(K, **like_tensor(centres.z)), centres.z, variances.reciprocal(), None
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


def level_of(values: Tensor, share: Tensor) -> Level:
    """Compute median and interquartile range, scalars, that scores (n,) of complete rows have.

    ``share`` (n,) is that of the entries of each row that are known, positive.
    """
    median = torch.quantile(values / share, 0.5)
    quartiles = values.new_tensor([0.25, 0.75])
    low, high = torch.quantile((values - share * median) / share.sqrt(), quartiles)
    # Scores of rows that are all the same have no spread, and any will do.
    spread = high - low
    tiny = 1e-9 * (1 + median.abs())
    return Level(median, torch.where(spread > tiny, spread, torch.ones_like(spread)))


def calibrated(mixture: PrecisionMixture, values: Tensor, rows: Working) -> Level:
    """Compute the level of each component from the rows (n, d) it explains best, (K,) each.

    Components with few rows keep close to the level of all rows.
    """
    share = rows.counted_share()
    overall, K = level_of(values, share), mixture.n_components
    best = best_components(mixture, rows)
    median, spread = overall.median.repeat(K), overall.spread.repeat(K)
    for k in torch.unique(best).tolist():
        mine = best == k
        own, n = level_of(values[mine], share[mine]), int(mine.sum())
        trust = n / (n + FEW)
        median[k] += trust * (own.median - overall.median)
        spread[k] = spread[k] ** (1 - trust) * own.spread**trust
    return Level(median, spread)


def base_score(name: str) -> str:
    """Return the score of a mixture that a detector's score is made of."""
    return name if name in scores.SCORES else "log_likelihood"
