"""What an outlier detector is made of: kinds of mixtures, and the rows that each is trained on.

The mixtures of an outlier detector: how each is trained, and what it says about a row.

Members see rows in working units, where each column has deviation one. Scores of different mixtures
differ in level and spread, so that each is told relative to the rows which the member was not
trained on, and compressed: one member that finds a row absurd does not outvote all others. Missing
entries count as ordinary ones: a row of which nothing is known scores 0. The score of a row of
which the share s is known has s times the level of a complete one, and about sqrt(s) times the
spread, as a sum of s times as many terms has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.core import attribution, density
from factormix.core.attribution import observed_conditionals, observed_contributions, observed_score
from factormix.core.density import Operands
from factormix.core.missing import ObservedOperands, observed_joint, observed_operands
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters, like_tensor
from factormix.errors import InputError
from factormix.estimators.explanation import precise_parameters
from factormix.estimators.mfa import MFA

__all__ = [
    "CONTAMINATED",
    "NOVELTY",
    "Kind",
    "Level",
    "Member",
    "Recipe",
    "Working",
    "best_components",
    "calibrated",
    "heaviest",
    "level_of",
    "raw_scores",
    "train_mixture",
]

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
        return attribution.compressed((values - rows.known_share() * median) / spread)

    def contributions(self, name: str, rows: Working) -> Tensor:
        """Split the compressed score over features, (B, d).

        The secant from the median, where the score is zero, carries the split of the mixture's own
        score over to the compressed one.
        """
        base = base_score(name)
        split = by_rows(
            self.mixture,
            rows,
            lambda z, ops: attribution.contributions(base, z, ops),
            lambda z, missing, known: observed_contributions(base, z, missing, known),
        )
        median, spread = self._level_at(rows)
        relative = split - (median / rows.z.shape[1]).unsqueeze(1)
        if rows.missing is not None:
            relative = relative.masked_fill(rows.missing, 0)
        slope = attribution.compression_slope(relative.sum(dim=1) / spread) / spread
        return slope.unsqueeze(1) * relative

    def conditionals(self, rows: Working) -> attribution.Conditionals:
        """Compute what each feature is expected to be given the others, in working units."""
        found = by_rows(
            self.mixture,
            rows,
            lambda z, ops: torch.stack(attribution.conditionals(z, ops)).transpose(0, 1),
            lambda *some: torch.stack(observed_conditionals(*some)).transpose(0, 1),
        )
        return attribution.Conditionals(*found.unbind(dim=1))

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
        lambda z, ops: attribution.score(base, z, ops),
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
    return name if name in attribution.SCORES else "log_likelihood"
