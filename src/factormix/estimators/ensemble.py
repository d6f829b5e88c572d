"""The mixtures of an outlier detector: their recipe, their training, and their scores.

Mixtures see rows in working units, where each column has deviation one. Scores of different
mixtures differ in level and spread, so each is standardised by its median and interquartile range
over rows that the mixture was not trained on. It is then compressed, so that one mixture that finds
a row absurd does not outvote all others. Missing entries count as ordinary ones: a row without any
observed entry scores 0. If the share s of a row is observed, its score has s times the level of a
complete row, and about sqrt(s) times the spread, like a sum of s times as many terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.core import attribution
from factormix.core.missing import PreparedMixture, RowBlock, evaluate_rows
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters, diagonalise_precisely, like_tensor
from factormix.data.sources.convert import as_rows
from factormix.errors import InputError
from factormix.estimators.explanation import LEAST_EIGENVALUE
from factormix.estimators.mfa import MFA
from factormix.training.solvers.base import check_ranges

T = TypeVar("T")
RowNumbers = NDArray[np.intp]


@dataclass(frozen=True)
class Kind:
    """One kind of mixture, in units where each column has deviation one."""

    noise_floor: float
    """Least noise variance; a larger one makes the mixture smoother."""
    rows_per_component: int
    """Training rows for each component; 1 puts a component on every row, without training."""
    max_components: int
    """Maximum number of components."""
    n_factors: int = 0
    """l, as far as there are enough features."""

    def seed(self, seed: int, part: int) -> int:
        """Return a seed that depends on this kind only, not on others in the recipe."""
        sizes = (self.rows_per_component, self.max_components, self.n_factors)
        numbers = [seed, part, round(1e6 * self.noise_floor), *sizes]
        return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


@dataclass(frozen=True)
class Recipe:
    """The mixtures of a detector, and the parts of the rows that they are trained on.

    Each of ``n_parts`` parts trains one mixture of every kind. Without ``rows_per_part``, a part
    has all rows but one of ``n_parts`` folds; with it, a random choice of this many rows, at most
    half of all rows. So every row is left out by some part, and gets a score from mixtures that
    have not seen it.
    """

    kinds: tuple[Kind, ...]
    n_parts: int
    rows_per_part: int | None = None
    kept_weight: float = 1.0
    """Keep the heaviest components of a mixture, up to this share of the weight."""
    robust: bool = False
    """Whether to standardise columns by their quantiles instead of mean and deviation."""
    max_rows: int = 10_000
    """Maximum number of rows; if there are more, a random choice is used."""
    max_epochs: int = 10
    """Maximum number of passes over the rows of a part."""

    def check(self) -> None:
        """Check the numbers."""
        if not self.kinds:
            raise InputError("recipe needs kinds of mixtures: there are none.")
        try:
            for kind in self.kinds:
                counts = ["rows_per_component", "max_components"]
                check_ranges(
                    kind, positive=["noise_floor"], count=counts, not_negative=["n_factors"]
                )
            check_ranges(self, count=["max_epochs", "rows_per_part"], share=["kept_weight"])
        except InputError as error:
            raise InputError(f"recipe: {error}") from error
        if self.n_parts < 2 or self.max_rows < 2:
            raise InputError("recipe must have n_parts and max_rows of at least 2.")

    def split(
        self, n_rows: int, random: np.random.Generator
    ) -> Iterator[tuple[RowNumbers, RowNumbers]]:
        """Yield the numbers of the rows that each part is trained on, and of the others."""
        order = random.permutation(n_rows)
        if self.rows_per_part is None:
            for fold in np.array_split(order, min(self.n_parts, n_rows)):
                yield np.setdiff1d(order, fold), np.sort(fold)
            return
        size, first = max(1, min(self.rows_per_part, n_rows // 2)), 0
        for _ in range(self.n_parts):
            # Draws run through one permutation, so that two halves share no row.
            if first + size > n_rows:
                order, first = random.permutation(n_rows), 0
            drawn = np.sort(order[first : first + size])
            first += size
            yield drawn, np.setdiff1d(order, drawn)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build a recipe from ``dataclasses.asdict`` of one."""
        kinds = tuple(Kind(**kind) for kind in values["kinds"])
        return cls(**{**values, "kinds": kinds})


NOVELTY = Recipe(kinds=(Kind(0.01, 10, 8, 8), Kind(0.03, 1, 2000)), n_parts=3)
"""For clean rows. Of nine sets of kinds that ``benchmarks/outliers.py`` compares on 25 tables of
ADBench, these have the highest mean area under the ROC curve, 0.8817; the others have 0.8726 to
0.8812."""
CONTAMINATED = Recipe(
    kinds=(Kind(0.2, 10, 100, 4), Kind(0.2, 20, 100, 0)),
    n_parts=12,
    rows_per_part=256,
    kept_weight=0.85,
    robust=True,
    max_epochs=5,
)
"""For rows with outliers among them. Of six sets of kinds, these have the highest mean area in the
same benchmark, 0.8136; the others have 0.8075 to 0.8115. On ten tables of ADBench with fewer than
2,000 rows, 5 passes have a mean area under the ROC curve of 0.8213 and take 0.22 s of CPU for 1,000
x 20, 10 passes have 0.8200 and take 0.32 s; 8 parts instead of 12 lose 0.0030 with a standard error
of 0.0009 (``benchmarks/small.py`` measures both)."""

REFERENCE = Kind(0.01, 100, 8, 8)
"""The mixture of expected values, trained on rows within the fence. It keeps correlations that
smooth mixtures lose. On five synthetic tables and five of ADBench, with up to 5% of gross errors
among 500 rows, its expected values were nearer to the truth than any member's, by a factor of 1.1
to 4. Fewer rows for each component extrapolate badly, and one component misses clusters."""
FENCE = 1.5
"""Interquartile ranges below the lower quartile from which a score is an outlier's (J. W. Tukey,
Exploratory Data Analysis, 1977)."""


FARTHEST_TRAINED = 1e4
"""Training values are clipped to this many deviations: float32 has to hold their squares."""
EQUAL_TRUST_ROWS = 20
"""A component with this many rows takes half of its level from them, half from all rows."""


class Level(NamedTuple):
    """Median and interquartile range of a score: over all rows, or by component."""

    median: Tensor
    """Scalar, or (K,)."""
    spread: Tensor
    """Scalar, or (K,), positive."""


@dataclass(frozen=True)
class WorkingRows:
    """Rows (B, d) in working units; missing entries have the value 0."""

    z: Tensor
    missing: Tensor | None = None
    """(B, d), None if nothing is missing."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.z)

    def take(self, chosen: Tensor) -> WorkingRows:
        """Return some of the rows."""
        missing = None if self.missing is None else self.missing[chosen]
        return WorkingRows(
            self.z[chosen], missing if missing is not None and missing.any() else None
        )

    def observed_share(self) -> Tensor:
        """Compute the observed share of the entries of each row, (B,)."""
        if self.missing is None:
            return self.z.new_ones(len(self.z))
        return 1 - self.missing.to(self.z).mean(dim=1)

    def positive_share(self) -> Tensor:
        """Compute the same with at least one entry, to divide by, (B,)."""
        return self.observed_share().clamp(min=1 / self.z.shape[1])


@dataclass(frozen=True)
class Member:
    """A mixture in working units, and the level of its score on rows that it has not seen."""

    mixture: PrecisionMixture
    level: Level

    def score(self, name: str, rows: WorkingRows) -> Tensor:
        """Compute the compressed score of rows (B, d) by name, (B,)."""
        values = score_mixture(self.mixture, name, rows)
        median, spread = self._level_at(rows)
        return attribution.compressed((values - rows.observed_share() * median) / spread)

    def contributions(self, name: str, rows: WorkingRows) -> Tensor:
        """Split the compressed score over features, (B, d).

        The secant from the median, where the score is zero, carries the split of the mixture's own
        score over to the compressed one.
        """
        base = _base_score(name)
        split = evaluate_mixture(self.mixture, rows, partial(attribution.contributions, base))
        median, spread = self._level_at(rows)
        relative = split - (median / rows.z.shape[1]).unsqueeze(1)
        if rows.missing is not None:
            relative = relative.masked_fill(rows.missing, 0)
        slope = attribution.compression_slope(relative.sum(dim=1) / spread) / spread
        return slope.unsqueeze(1) * relative

    def _level_at(self, rows: WorkingRows) -> Level:
        """Return median and spread for each row, (B,) each."""
        median, spread = self.level
        if median.ndim == 0:
            median, spread = (value.expand(len(rows)) for value in self.level)
        else:
            best = assign_components(self.mixture, rows)
            median, spread = median[best], spread[best]
        return Level(median, spread * rows.positive_share().sqrt())


@dataclass(frozen=True)
class Reference:
    """The mixture in working units that gives expected values, and its number of training rows."""

    mixture: PrecisionMixture
    n_rows: int

    def conditionals(self, rows: WorkingRows) -> attribution.Conditionals:
        """Compute the expected value of each feature given the others, in working units."""
        counts = self.n_rows * self.mixture.precision_form.log_weights.exp()
        found: Sequence[Tensor] = evaluate_mixture(
            self.mixture, rows, lambda block: attribution.conditionals(block, counts)
        )
        return attribution.Conditionals(*found)


def score_mixture(mixture: PrecisionMixture, name: str, rows: WorkingRows) -> Tensor:
    """Compute the mixture's own score of rows (B, d) behind a detector's score, (B,)."""
    return evaluate_mixture(mixture, rows, partial(attribution.score, _base_score(name)))


def assign_components(mixture: PrecisionMixture, rows: WorkingRows) -> Tensor:
    """Return the most probable component of each row, (B,)."""
    return evaluate_mixture(mixture, rows, lambda block: block.joint().argmax(dim=1))


def evaluate_mixture(
    mixture: PrecisionMixture, rows: WorkingRows, function: Callable[[RowBlock], T]
) -> T:
    """Compute a function of rows, which returns one or several tensors (B, ...)."""
    prepared = PreparedMixture(mixture.precision_form)
    return evaluate_rows(prepared, rows.z, rows.missing, function)


def find_fence(scores: NDArray[np.float64]) -> float:
    """Return the score below which ordinary rows are rare: Tukey's fence."""
    low, high = np.quantile(scores, [0.25, 0.75])
    return float(low - FENCE * (high - low))


def train_mixture(
    kind: Kind,
    rows: WorkingRows,
    seed: int,
    dtype: str | torch.dtype,
    max_epochs: int,
    kept_weight: float = 1.0,
) -> PrecisionMixture:
    """Train a mixture of one kind on rows (n, d)."""
    K = max(1, min(kind.max_components, len(rows) // kind.rows_per_component))
    l = max(0, min(kind.n_factors, rows.z.shape[1] - 1))
    z = rows.z.clamp(-FARTHEST_TRAINED, FARTHEST_TRAINED)
    if kind.rows_per_component == 1:
        return _place_kernels(WorkingRows(z, rows.missing), K, kind.noise_floor, seed)
    if rows.missing is not None:
        # A column without any value in this part counts as ordinary.
        unknown = rows.missing & ~rows.missing.all(dim=0)
        z = z.masked_fill(unknown, torch.nan)
    model = MFA(
        K,
        l,
        scaling=None,
        max_precision=1 / kind.noise_floor,
        max_epochs=max_epochs,
        random_state=seed,
        dtype=dtype,
    )
    model._fit_rows(z, as_rows(z))
    form = diagonalise_precisely(model.mixture_.precision_form, LEAST_EIGENVALUE)
    return keep_heaviest(PrecisionMixture.from_parameters(form), kept_weight)


def _place_kernels(rows: WorkingRows, K: int, noise_floor: float, seed: int) -> PrecisionMixture:
    """Put a component of variance ``noise_floor`` on each of K rows: a kernel density.

    For a missing entry, the component is as wide as the column.
    """
    chosen = np.random.default_rng(seed).permutation(len(rows))[:K]
    centres = rows.take(torch.from_numpy(np.sort(chosen)).to(rows.z.device))
    variances = torch.full_like(centres.z, noise_floor)
    if centres.missing is not None:
        variances = torch.where(centres.missing, 1 + noise_floor, variances)
    return PrecisionMixture(
        torch.ones(K, **like_tensor(centres.z)), centres.z, variances.reciprocal(), None
    )


def keep_heaviest(mixture: PrecisionMixture, kept_weight: float) -> PrecisionMixture:
    """Drop the lightest components; the others have at least ``kept_weight`` together.

    Outliers among the training rows are few, so their components are light.
    """
    if kept_weight >= 1:
        return mixture
    parameters = mixture.precision_form
    order = parameters.logits.argsort(descending=True)
    before = parameters.log_weights.exp()[order].cumsum(dim=0) - parameters.log_weights.exp()[order]
    chosen = order[before < kept_weight].sort().values
    return PrecisionMixture.from_parameters(Parameters(*(part[chosen] for part in parameters)))


def measure_level(values: Tensor, share: Tensor) -> Level:
    """Compute median and interquartile range, scalars, of scores (n,), scaled to complete rows.

    ``share`` (n,), positive, is the observed share of the entries of each row.
    """
    median = torch.quantile(values / share, 0.5)
    quartiles = values.new_tensor([0.25, 0.75])
    low, high = torch.quantile((values - share * median) / share.sqrt(), quartiles)
    # Equal scores have no spread, so any spread will do.
    spread = high - low
    tiny = 1e-9 * (1 + median.abs())
    return Level(median, torch.where(spread > tiny, spread, torch.ones_like(spread)))


def measure_levels(mixture: PrecisionMixture, values: Tensor, rows: WorkingRows) -> Level:
    """Compute median and spread of each component, (K,), from the rows that it explains best.

    Components with few rows stay close to the level of all rows.
    """
    share = rows.positive_share()
    overall, K = measure_level(values, share), mixture.n_components
    best = assign_components(mixture, rows)
    median, spread = overall.median.repeat(K), overall.spread.repeat(K)
    for k in torch.unique(best).tolist():
        here = best == k
        own, n = measure_level(values[here], share[here]), int(here.sum())
        trust = n / (n + EQUAL_TRUST_ROWS)
        median[k] += trust * (own.median - overall.median)
        spread[k] = spread[k] ** (1 - trust) * own.spread**trust
    return Level(median, spread)


def _base_score(name: str) -> str:
    """Return the name of the mixture's score behind a detector's score."""
    return name if name in attribution.SCORES else "log_likelihood"
