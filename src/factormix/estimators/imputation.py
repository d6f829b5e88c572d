"""Fill in missing entries of rows by one or several mixtures, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.core.conditionals import Imputer
from factormix.core.parameters import Parameters
from factormix.data.batches import Batch
from factormix.data.checks import ensure_finite_blocks
from factormix.data.sources.base import Rows
from factormix.data.units import Units, as_tensor
from factormix.errors import InputError
from factormix.estimators.storage import StoredModel
from factormix.estimators.validation import (
    Array,
    check_count,
    check_seed,
    join_results,
    like_input,
)
from factormix.training.evaluation import FARTHEST, SCORE_ELEMENTS, to_score_dtype
from factormix.training.solvers.base import is_number
from factormix.training.threads import use_threads

ColumnChoice = Sequence[int] | Sequence[str] | Array


class Imputation(NamedTuple):
    """Rows with missing entries filled in, and how certain these are; each array is (n, d)."""

    mean: Any
    """The rows, with the conditional mean in place of missing entries."""
    std: Any
    """Conditional standard deviation of missing entries; 0 where an entry is observed."""
    lower: Any
    """Lower end of the interval; the value itself where an entry is observed."""
    upper: Any
    """Upper end of the interval; the value itself where an entry is observed."""

    def __repr__(self) -> str:
        """Return the shape of the arrays."""
        return f"Imputation(mean, std, lower, upper: each {tuple(self.mean.shape)})"


class ImputingModel(TransformerMixin, StoredModel):
    """A transformer whose mixtures fill in missing entries."""

    random_state: Any

    def impute(
        self, X: Array | Rows, *, n_draws: int | None = None, interval: float | None = None
    ) -> Any:
        """Fill in the missing entries (NaN) of X (n, d), given the observed ones of the same row.

        Parameters
        ----------
        X : array or rows (n, d)
            Rows with missing entries; observed entries are returned as they are.
        n_draws : int or None
            Number of completions, (n_draws, n, d), to draw from the distribution of the missing
            entries (multiple imputation), instead of returning its mean. They are the same in
            every call when ``random_state`` is an integer.
        interval : float or None
            Return an ``Imputation`` (mean, std, lower, upper), whose lower and upper ends enclose
            this share of the distribution of each missing entry: ``0.9`` leaves out 5% on each
            side.

        Returns
        -------
        array (n, d), or (n_draws, n, d), or an ``Imputation`` of four arrays (n, d)
        """
        check_is_fitted(self)
        check_imputation(n_draws, interval)
        rows = self._check_rows(X)
        blocks = impute_blocks(self, rows, n_draws=n_draws, interval=interval)
        results = join_results((parts for _, parts in blocks), rows.n_rows)
        if interval is not None:
            return Imputation(*(like_input(t, X) for t in results))
        return like_input(results[0] if n_draws is None else torch.stack(results), X)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _imputing_mixtures(self) -> tuple[Sequence[Parameters], Units]:
        """Return the mixtures, in working units, and these units."""
        raise NotImplementedError

    def _interval_level(self, level: float) -> float:
        """Return the level of the conditional distribution at which an interval ends."""
        return level


def impute_blocks(
    model: ImputingModel,
    rows: Rows,
    *,
    n_draws: int | None = None,
    interval: float | None = None,
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield blocks of filled in rows (B, d) in units of the data, in the order of the rows.

    Each comes with the number of entries filled in. A block is a list: the rows; or ``n_draws``
    completions; or, with an interval, mean, standard deviation, lower and upper end.
    """
    members, units = model._imputing_mixtures()
    imputer = build_imputer(members, units)
    like, (K, d, l) = imputer.parameters.means, imputer.parameters.shape
    generator = torch.Generator(like.device).manual_seed(check_seed(model.random_state))
    tails = [] if interval is None else [(1 - interval) / 2, (1 + interval) / 2]
    levels = [model._interval_level(tail) for tail in tails]

    def impute_block(block: Batch) -> tuple[int, list[Tensor]]:
        given = as_tensor(block.rows).to(like.device)
        precise = given.to(torch.float64 if like.device.type != "mps" else torch.float32)
        batch = units.to_working(block, like.device, like.dtype)
        missing = batch.missing
        if missing is None:
            if levels:
                return 0, [precise, torch.zeros_like(precise), precise, precise]
            return 0, [precise] * (n_draws or 1)
        x = batch.tensors()[0].clamp(-FARTHEST[like.dtype], FARTHEST[like.dtype])
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

    with torch.no_grad(), use_threads():
        size = max(1, SCORE_ELEMENTS // (d + K * (l + 1)))
        for block in ensure_finite_blocks(rows, size, getattr(rows, "name", "X")):
            yield impute_block(block)


def build_imputer(members: Sequence[Parameters], units: Units) -> Imputer:
    """Build the imputer of rows in working units, in the precision that all mixtures need."""
    precise = [to_score_dtype(one) for one in members]
    dtype = max((one.means.dtype for one in precise), key=lambda t: t.itemsize)
    mixtures = [Parameters(*(t.to(dtype) for t in one)) for one in precise]
    with torch.no_grad():
        return Imputer(*mixtures, centre=units.is_identity)


def check_imputation(n_draws: int | None, interval: Any) -> None:
    """Check the options of ``impute``."""
    if n_draws is not None and interval is not None:
        raise InputError("n_draws and interval exclude each other: call impute twice.")
    if n_draws is not None:
        check_count(n_draws, "n_draws", 1)
    if interval is not None and not (is_number(interval) and 0 < interval < 1):
        raise InputError(f"interval must lie between 0 and 1, as in 0.9, not {interval!r}.")


def number_columns(columns: ColumnChoice, names: Sequence[str]) -> Tensor:
    """Turn names of features into their numbers; leave numbers and masks as they are."""
    given = np.atleast_1d(np.asarray(columns))
    if given.dtype.kind not in "OU":
        return torch.as_tensor(given)
    unknown = [str(name) for name in given if str(name) not in names]
    if unknown:
        there = f"it has {', '.join(names[:10])}" if names else "its columns have no names"
        raise InputError(f"the model has no column {unknown[0]!r}; {there}.")
    return torch.tensor([names.index(str(name)) for name in given])
