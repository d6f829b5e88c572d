"""What a trained mixture tells about what it does not see: imputation, marginals, conditionals."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.core.conditionals import Imputer
from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters
from factormix.data.batches import Batch
from factormix.data.checks import ensure_finite_blocks
from factormix.data.sources.base import Rows
from factormix.data.units import Units, as_tensor
from factormix.errors import InputError
from factormix.estimators.validation import (
    Array,
    check_count,
    check_rows,
    check_seed,
    like_input,
)
from factormix.training.evaluation import FARTHEST, SCORE_ELEMENTS, in_score_dtype
from factormix.training.run import Run
from factormix.training.threads import team

__all__ = [
    "CompletingMixture",
    "Imputation",
    "Imputing",
    "check_completion",
    "completed_blocks",
    "imputer_of",
]

Columns = Sequence[int] | Sequence[str] | Array


class Imputation(NamedTuple):
    """Completed rows, with how much is known about what was missing; each (n, d)."""

    mean: Any
    """The rows, with the conditional mean in the place of missing entries."""
    std: Any
    """Conditional standard deviation of missing entries; 0 where an entry is observed."""
    lower: Any
    """Lower end of the interval; the value itself where an entry is observed."""
    upper: Any
    """Upper end of the interval; the value itself where an entry is observed."""


class Imputing:
    """The part of an estimator that fills in what is missing."""

    random_state: int | np.random.RandomState | None

    def _completing(self) -> tuple[Sequence[Parameters], Units]:
        """Return the mixtures that fill in, in working units, and these units."""
        raise NotImplementedError(f"{type(self).__name__} does not say by what it fills in")

    def _level(self, level: float) -> float:
        """Return the level of the conditional distribution at which to end an interval."""
        return level

    def impute(
        self, X: Array | Rows, *, n_draws: int | None = None, interval: float | None = None
    ) -> Any:
        """Fill in the missing entries (NaN) of X (n, d), given the observed ones of the same row.

        Parameters
        ----------
        X : array or rows (n, d)
            Rows of which entries are missing; observed entries are returned as they are.
        n_draws : int or None
            Return so many completions, (n_draws, n, d), drawn from the distribution of what is
            missing (multiple imputation), instead of its mean. They are the same in every call when
            ``random_state`` is an integer.
        interval : float or None
            Return an ``Imputation`` (mean, std, lower, upper), whose lower and upper ends enclose
            this share of the distribution of each missing entry: ``0.9`` leaves out 5% on each
            side.

        Returns
        -------
        array (n, d), or (n_draws, n, d), or an ``Imputation`` of four arrays (n, d)
        """
        check_is_fitted(self)
        check_completion(n_draws, interval)
        rows = check_rows(self, X)
        kept, first = list[Tensor](), 0
        for _, parts in completed_blocks(self, rows, n_draws=n_draws, interval=interval):
            kept = kept or [part.new_empty(rows.n_rows, *part.shape[1:]) for part in parts]
            for whole, part in zip(kept, parts, strict=True):
                whole[first : first + len(part)] = part
            first += len(parts[0])
        if interval is not None:
            return Imputation(*(like_input(t, X) for t in kept))
        return like_input(kept[0] if n_draws is None else torch.stack(kept), X)


class CompletingMixture(Imputing):
    """The part of a mixture that fills in, leaves out and conditions on features."""

    _run: Run

    def _completing(self) -> tuple[Sequence[Parameters], Units]:
        return [self._run.parameters], self._run.units

    def marginal(self, columns: Columns) -> PrecisionMixture:
        """Return the density of some features, by number, name or mask, in units of the data."""
        check_is_fitted(self)
        return self._mixture().marginal(self._numbers(columns))

    def condition(self, columns: Columns, values: Array) -> PrecisionMixture:
        """Return the density of all other features, in their order, given some at values (q,).

        Features are given by number, name or mask; values and the result are in units of the data.
        ``impute`` gives the conditional mean, spread and draws for many rows at once.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from factormix import MFA
        >>> X = load_iris().data
        >>> model = MFA(3, 2, random_state=0).fit(X)
        >>> petals = model.condition([0, 1], [5.0, 3.5])  # of a flower with such sepals
        >>> petals.n_features, petals.sample(100).shape
        (2, torch.Size([100, 2]))
        """
        check_is_fitted(self)
        known = as_tensor(np.atleast_1d(np.asarray(values, dtype=np.float64)))
        return self._mixture().condition(self._numbers(columns), known)

    def _mixture(self) -> PrecisionMixture:
        mixture: PrecisionMixture = self.mixture_  # type: ignore[attr-defined]
        return mixture

    def _numbers(self, columns: Columns) -> Tensor:
        """Turn names of features into their numbers; leave numbers and masks as they are."""
        given = np.atleast_1d(np.asarray(columns))
        if given.dtype.kind not in "OU":
            return torch.as_tensor(given)
        names = [str(name) for name in getattr(self, "feature_names_in_", ())]
        unknown = [str(name) for name in given if str(name) not in names]
        if unknown:
            there = f"it has {', '.join(names[:10])}" if names else "its columns have no names"
            raise InputError(f"the model has no column {unknown[0]!r}; {there}.")
        return torch.tensor([names.index(str(name)) for name in given])


def check_completion(n_draws: int | None, interval: Any) -> None:
    """Check what is asked of missing entries."""
    if n_draws is not None and interval is not None:
        raise InputError("n_draws and interval cannot be asked for at once: call impute twice.")
    if n_draws is not None:
        check_count(n_draws, "n_draws", 1)
    number = isinstance(interval, numbers.Real) and not isinstance(interval, bool)
    if interval is not None and not (number and 0 < interval < 1):
        raise InputError(f"interval must lie between 0 and 1, as in 0.9, not {interval!r}.")


def imputer_of(members: Sequence[Parameters], units: Units) -> Imputer:
    """Make what fills in rows in working units, in the precision that all mixtures need."""
    precise = [in_score_dtype(one) for one in members]
    dtype = max((one.means.dtype for one in precise), key=lambda t: t.itemsize)
    mixtures = [Parameters(*(t.to(dtype) for t in one)) for one in precise]
    with torch.no_grad():
        return Imputer(*mixtures, centre=units.is_identity)


def completed_blocks(
    model: Any, rows: Rows, *, n_draws: int | None = None, interval: float | None = None
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield blocks of completed rows (B, d) in units of the data, in the order of the rows.

    Each comes with the number of entries filled in, and is a list: the rows; or ``n_draws``
    completions; or, with an interval, mean, standard deviation, lower and upper end.
    """
    members, units = model._completing()
    imputer = imputer_of(members, units)
    like, (K, d, l) = imputer.parameters.means, imputer.parameters.shape
    generator = torch.Generator(like.device).manual_seed(check_seed(model.random_state))
    tails = [] if interval is None else [(1 - interval) / 2, (1 + interval) / 2]
    levels = [model._level(tail) for tail in tails]

    def complete(block: Batch) -> tuple[int, list[Tensor]]:
        given = as_tensor(block.rows).to(like.device)
        precise = given.to(torch.float64 if like.device.type != "mps" else torch.float32)
        batch = units.to_working(block, like.device, like.dtype)
        if batch.missing is None:
            count = 4 if levels else n_draws or 1
            same = [precise] * count
            return 0, [precise, torch.zeros_like(precise), *same[2:]] if levels else same
        x = batch.tensors()[0].clamp(-FARTHEST[like.dtype], FARTHEST[like.dtype])
        missing = batch.missing
        if n_draws is not None:
            found = list(imputer.draws(x, missing, n_draws, generator))
        else:
            found = [imputer.mean(x, missing)]
            found += list(imputer.quantiles(x, missing, levels)) if levels else []
        filled = [torch.where(missing, units.values_to_data(t), precise) for t in found]
        if levels:
            scale = units.scale.to(precise)
            filled.insert(1, imputer.deviation(x, missing).to(precise) * scale)
        return int(missing.sum()), filled

    with torch.no_grad(), team():
        size = max(1, SCORE_ELEMENTS // (d + K * (l + 1)))
        for block in ensure_finite_blocks(rows, size, getattr(rows, "name", "X")):
            yield complete(block)
