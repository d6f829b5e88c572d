"""Statistics of the columns of a sample: location, spread, and resolution of values."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from factormix.data.batches import Batch, Values
from factormix.errors import InputError

SORTED_ROWS = 1024
"""Number of rows whose values are sorted. A quartile of them has a standard error of
``sqrt(0.25 * 0.75 / 1024)``, 1.4% of the rows."""
SUSPECT_RATIO = 60.0
"""Squared range over variance from which a column is searched for wild values. 4,096 rows of a
Gaussian have a range of about 7.2 deviations, 52 when squared."""
WILD_RANGES = 20.0
"""Interquartile ranges beyond which a value is wild, if it makes up most of the variance: 27
standard deviations of a Gaussian."""
RARE_SHARE = 0.95
"""Share of rows with the same value that makes the other values of a column rare: the middle nine
tenths, which ``Units.estimate_robust`` measures, then have no width."""
MOST_RARE_COLUMNS = 2
"""Columns of rare values for which a mixture can afford components of their own: c such columns
make up to 2**c kinds of rows."""
RARE_ROWS = 5
"""Most rows of a sample whose rare values are too few for a component of their own, which needs
``LEAST_ROWS_PER_NUMBER`` rows (``estimators/validation.py``) for each number that it fits."""
ALIKE_RATIO = 30.0
"""Ratio of large to small deviations up to which the columns of a sparse table share a unit. It is
below 1 / sqrt(SPARSE_NOISE) = 100, so that the noise of the large ones does not hide the small."""
LEAST_NOISE = 1e-6
"""Least ratio of the noise variance to the variance of a column, as in scikit-learn's mixtures."""
SPARSE_NOISE = 1e-4
"""Least ratio of the noise variance to the spread of a column of sparse data."""
CONSTANT_DEVIATION = 0.1
"""Deviation of a constant column, as a share of its value, or as it is for a column of zeros.

With ``SPARSE_NOISE``, a change by a thousandth of the value is one standard deviation.
"""
GRID_ERROR = 0.02
"""Distance from a multiple of the step, in steps, that counts as rounding. Of m differences without
a grid, all lie this near to a multiple with probability 0.04**m."""
GRID_STEPS = 10_000
"""Steps between neighbouring values beyond which rounding hides whether they are on a grid: float32
rounds a value of 10,000 steps by up to 0.0005 steps, and one of 1,000,000 by 0.03."""


class Columns:
    """Describe the columns of a sample of rows (n, d), each property (d,) in float64.

    Rows may have positive weights (n,), and NaN for missing entries: each column is described by
    its observed values. A column without any counts as constant, at zero.
    """

    def __init__(self, sample: Batch) -> None:
        x = to_float64(sample.rows)
        self._weights = None if sample.weights is None else to_float64(sample.weights)
        gaps = x.isnan()
        self._seen = ~gaps if gaps.any() else None
        self._x = x if self._seen is None else _fill_gaps_(x, self._seen)
        single = sample.rows.dtype in (np.float32, torch.float32)
        self._rounding = torch.finfo(torch.float32).eps if single else 1e-13

    @property
    def n_features(self) -> int:
        """Number of columns, d."""
        return self._x.shape[1]

    @property
    def observed(self) -> Tensor:
        """Whether each column has any value."""
        if self._seen is None:
            return torch.ones(self._x.shape[1], dtype=torch.bool)
        return self._seen.any(dim=0)

    @property
    def mean(self) -> Tensor:
        """Mean of each column."""
        return self._moments[0]

    @property
    def variance(self) -> Tensor:
        """Variance of each column; 0 where it is constant."""
        return self._moments[1]

    @cached_property
    def mean_variance(self) -> Tensor:
        """Mean of the variances, scalar, positive."""
        mean = self.variance[self.observed].mean()
        if not mean > 0:
            raise InputError(
                "every column of X is constant in the rows that set its scale"
                f" (n_samples={len(self._x)}): give rows that differ, or both scaling=None and"
                " max_precision."
            )
        if not mean.isfinite():
            raise InputError(
                "the values of X are so large that their variance overflows: divide X by a"
                " constant."
            )
        return mean

    @cached_property
    def spread(self) -> Tensor:
        """How far the values of each column reach, as a variance, positive.

        For a column that is mostly constant, such as a pixel at the border of an image, the spread
        follows the range rather than the variance, up to ten standard deviations. A constant column
        has the mean variance in a sparse table of columns that are alike, such as pixels. In any
        other table its own value decides.
        """
        if not self._is_sparse:
            return self._own_spread
        known = self._own_spread[self.variance > 0]
        return torch.where(
            (self.variance == 0) & _are_alike(known), self.mean_variance, self._own_spread
        )

    @cached_property
    def _own_spread(self) -> Tensor:
        low, high = self._range
        reach = (0.2 * (high - low)).square()
        spread = torch.minimum(torch.maximum(self.variance, reach), 100 * self.variance)
        # A few wild values must not set the scale of all others.
        middle = self._middle
        spread = torch.where(middle > 0, torch.minimum(spread, (10 * middle).square()), spread)
        zero = self.mean_variance.clamp(max=CONSTANT_DEVIATION**2)
        constant = torch.where(self.mean == 0, zero, (CONSTANT_DEVIATION * self.mean).square())
        return torch.where(self.variance > 0, spread, constant)

    @cached_property
    def noise_floor(self) -> Tensor:
        """The least noise variance that a density should have in each column, positive.

        The values of integers, booleans and rounded numbers are multiples of a step. The noise
        variance is then at least ``step^2 / (2 pi)``, so that no density is above ``1 / step`` and
        its product with the step is at most one, as a probability. A column that varies by less
        than that, such as a rare flag, has its own variance as the floor.

        Where many columns are nearly constant, or values other than a column's usual one are rare,
        a rare value in a new row would be all but impossible, so the floor follows the spread. If
        the sample has too few rare values for a component of their own, the noise of every
        component must explain them. It is then at least the variance of the column, as for a single
        Gaussian.
        """
        rarest = self._has_run(self._sorted.shape[1] - RARE_ROWS)
        by_spread = SPARSE_NOISE * self.spread
        on_grid = torch.minimum(self._step.square() / (2 * math.pi), self.variance)
        if self._is_sparse:
            rare = SPARSE_NOISE * self._shared_spread(rarest)
            return torch.maximum(torch.where(rarest, rare, by_spread), on_grid)
        by_variance = torch.maximum(LEAST_NOISE * self.variance, on_grid)
        follows_spread = (self.variance == 0) | (self._is_rare & rarest)
        floor = torch.where(follows_spread, by_spread, by_variance)
        return torch.where(self._is_rare & self._is_nearly_constant, self.variance, floor)

    def _shared_spread(self, unknown: Tensor) -> Tensor:
        """Return the spread (d,), raised to the median where it is ``unknown`` (d,).

        This holds for columns that are alike, such as pixels or embeddings.
        """
        known = self.spread[~unknown & (self.variance > 0)]
        return self.spread.clamp(min=known.quantile(0.5)) if _are_alike(known) else self.spread

    @property
    def _is_sparse(self) -> bool:
        """Whether more columns are nearly constant than a mixture can afford components for."""
        return int((self._is_rare & (self.variance > 0)).sum()) > MOST_RARE_COLUMNS

    @cached_property
    def _is_rare(self) -> Tensor:
        """Whether nearly all values of each column are the same, (d,)."""
        return self._has_run(math.ceil(RARE_SHARE * self._sorted.shape[1]))

    @property
    def _is_nearly_constant(self) -> Tensor:
        """Whether 1 to ``RARE_ROWS`` rows of the sample differ from the median of a column."""
        others = (self._x != self._sorted[:, self._sorted.shape[1] // 2]).sum(dim=0)
        return (others <= RARE_ROWS) & (self.variance > 0)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        mean, variance = _mean_and_variance(self._x, self._weights, self._seen)
        # The spread of a constant column is rounding, not data.
        low, high = self._range
        rounding = torch.maximum(low.abs(), high.abs()) * self._rounding
        variance = torch.where(variance.sqrt() > rounding, variance, 0)
        reach = (high - low).square()
        suspects = (reach > SUSPECT_RATIO * variance).nonzero()[:, 0]
        if len(suspects) and len(self._x) > 4:
            self._tame_(suspects, mean, variance)
        return mean, variance

    def _tame_(self, suspects: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Leave wild values out of the moments of some columns, in place.

        Values are wild when they lie so far out that they make up nearly all of the variance. In
        that scale, all other rows would look the same.
        """
        x = self._x[:, suspects]
        low, high = self._quartiles(suspects)
        reach = WILD_RANGES * (high - low)
        clipped = torch.minimum(torch.maximum(x, low - reach), high + reach)
        tame_mean, tame_variance = _mean_and_variance(clipped, self._weights)
        wild = (tame_variance > 0) & (tame_variance < 0.01 * variance[suspects]) & (reach > 0)
        mean[suspects[wild]] = tame_mean[wild]
        variance[suspects[wild]] = tame_variance[wild]

    @cached_property
    def _range(self) -> tuple[Tensor, Tensor]:
        """The least and the largest value of each column."""
        return self._x.amin(dim=0), self._x.amax(dim=0)

    @cached_property
    def _sorted(self) -> Tensor:
        """The values of each column in rising order, (d, m)."""
        columns = np.ascontiguousarray(self._x[:SORTED_ROWS].numpy().T)
        columns.sort(axis=1)
        return torch.from_numpy(columns)

    @cached_property
    def _middle(self) -> Tensor:
        """Interquartile range of each column."""
        low, high = self._quartiles(torch.arange(self.n_features))
        return high - low

    def _quartiles(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted lower and upper quartiles of some columns."""
        if self._weights is None:
            ordered = self._sorted[columns]
            n = ordered.shape[1]
            return ordered[:, n // 4], ordered[:, n * 3 // 4]
        ordered, order = self._x[:SORTED_ROWS, columns].sort(dim=0)
        below = self._weights[:SORTED_ROWS][order].cumsum(dim=0)
        low, high = (
            ordered.gather(0, (below <= q * below[-1]).sum(dim=0, keepdim=True)).squeeze(0)
            for q in (0.25, 0.75)
        )
        return low, high

    def _has_run(self, n: int) -> Tensor:
        """Return whether n or more values of each column are the same."""
        n, m = max(n, 2), self._sorted.shape[1]
        if n > m:
            return torch.zeros(self.n_features, dtype=torch.bool)
        return (self._sorted[:, n - 1 :] == self._sorted[:, : m - n + 1]).any(dim=1)

    @cached_property
    def _step(self) -> Tensor:
        """The step of which the differences of each column are multiples; 0 if there is none."""
        if self._sorted.shape[1] < 2:
            return torch.zeros_like(self.variance)
        differences = self._sorted.diff(dim=1)
        step = torch.where(differences > 0, differences, torch.inf).amin(dim=1)
        # Most columns without a grid show it in a few differences.
        on_grid = ~(_are_off_grid(differences[:, ::32], step) | step.isinf())
        on_grid[on_grid.clone()] = ~_are_off_grid(differences[on_grid], step[on_grid])
        return torch.where(on_grid, step, 0)


def _are_off_grid(differences: Tensor, step: Tensor) -> Tensor:
    """Return which columns have a difference, of (d, m), that is no multiple of their step (d,)."""
    steps = differences / step.unsqueeze(1)
    error = (steps - steps.round()).abs_().where(steps < GRID_STEPS, 0)
    return (error > GRID_ERROR).any(dim=1)


def _are_alike(spread: Tensor) -> bool:
    """Return whether columns of these spreads, as variances, may share a unit."""
    if not len(spread):
        return False
    small, large = torch.quantile(spread, spread.new_tensor([0.1, 0.9]))
    return bool(large < ALIKE_RATIO**2 * small)


def _fill_gaps_(x: Tensor, seen: Tensor) -> Tensor:
    """Repeat the observed values of each column (n, d) in its gaps; a column without any gets 0.

    Quantiles and runs of the filled column then agree closely with the observed values.
    """
    for j in (~seen).any(dim=0).nonzero()[:, 0].tolist():
        values = x[seen[:, j], j]
        gaps = (~seen[:, j]).nonzero()[:, 0]
        turn = torch.arange(len(gaps)) % max(1, len(values))
        x[gaps, j] = values[turn] if len(values) else 0.0
    return x


def _mean_and_variance(
    x: Tensor, weights: Tensor | None, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute mean and variance of each column of (n, d), over its ``seen`` values (n, d)."""
    if seen is not None:
        each = seen.to(x) if weights is None else seen * weights.unsqueeze(-1)
        share = each / each.sum(dim=0).clamp(min=torch.finfo(x.dtype).tiny)
        mean = (share * x).sum(dim=0)
        return mean, (share * (x - mean).square()).sum(dim=0)
    if weights is None:
        variance, mean = torch.var_mean(x, dim=0, correction=0)
        return mean, variance
    share = weights / weights.sum()
    mean = share @ x
    return mean, share @ (x - mean).square()


def find_whole_ranges(rows: Values) -> Tensor:
    """Return the lowest and highest value of columns of whole numbers, (2, d); NaN elsewhere."""
    first = to_float64(rows[:SORTED_ROWS])
    whole = ((first == first.round()) | first.isnan()).all(dim=0) & ~first.isnan().all(dim=0)
    found = first.new_full((2, first.shape[1]), torch.nan)
    if whole.any():
        x = rows if isinstance(rows, np.ndarray) else to_float64(rows).numpy()
        x = x if whole.all() else x[:, whole.numpy()]
        for place, end in zip(found, (np.fmin, np.fmax), strict=True):
            place[whole] = to_float64(end.reduce(x, axis=0))
    return found


def to_float64(values: Values) -> Tensor:
    """Copy values into a float64 tensor on the CPU; torch cannot share a read-only array."""
    if isinstance(values, Tensor):
        return values.detach().to("cpu", torch.float64, copy=True)
    return torch.from_numpy(values.astype(np.float64))
