"""Missing values of a table filled in by a few mixtures of different sizes."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters
from factormix.data.batches import Batch
from factormix.data.checks import ensure_finite_rows
from factormix.data.columns import to_float64
from factormix.data.features import Features, describe_features
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows
from factormix.data.sources.convert import as_rows
from factormix.data.units import Units
from factormix.errors import InputError
from factormix.estimators.fitting import Shared, draw_sample, with_every_column
from factormix.estimators.imputation import (
    Imputing,
    imputer_of,
)
from factormix.estimators.mfa import MFA
from factormix.estimators.storage import Settings, StoredModel, Tensors
from factormix.estimators.validation import (
    Array,
    check_count,
    check_device,
    check_positive,
    check_seed,
    remember_features,
)

__all__ = ["MFAImputer"]

SIZES = (1, 3, 8, 16)
"""Components of the mixtures, as far as there are rows for them."""
ROWS = 30
"""Rows for each component."""
MOST_FACTORS, FEW_FACTORS = 10, 5
"""Most factors of a mixture, with few and with many components."""
JUDGED, HIDDEN, MASKS, ENOUGH = 1000, 0.3, 4, 100
"""Most rows by which intervals are calibrated, the share of their entries that is hidden at a time,
how many times, and the fewest such entries for it."""
MOST_EPOCHS = 80
"""Passes of the training for it."""
FOLD = 4
"""One row in so many calibrates mixtures that are trained on the others."""
MANY = 8
"""Components that are many."""


class MFAImputer(StoredModel, Imputing, OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """Fill in missing values (NaN) by the conditional mean of a few mixtures of factor analyzers.

    Several sizes of mixture are trained on the observed entries, each with features in units of
    their spread and a noise variance of at least ``noise``, so that none of them explains chance.
    What is missing then has the mean of their conditional distributions. Intervals are calibrated:
    entries of the training rows are hidden, and an interval ends where that share of them lay. The
    recipe is for tables;
    for images and other large data, one mixture (``MFA.impute``) of a size of its own is better.

    Parameters
    ----------
    n_components : sequence of int or None
        Components of the mixtures. None takes 1, 3, 8 and 16, at most one for 30 rows.
    n_factors : int or None
        Factors of every mixture. None takes half as many as there are features, at most 10, or at
        most 5 in mixtures of 8 components or more.
    noise : float
        Least noise variance, as a share of the spread of a feature.
    max_epochs : int or None
        Most passes over the data for each mixture. None leaves it to the solver.
    random_state : int, RandomState or None
        Seed of training, and of draws.
    device : str, torch.device or None
        Where to compute.

    Attributes
    ----------
    mixtures_ : list of PrecisionMixture
        The mixtures, in units of the data.
    n_features_in_ : int
    feature_names_in_ : array (d,)
        Names of the columns, where the table had them.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.datasets import load_iris
    >>> from factormix import MFAImputer
    >>> X = load_iris().data
    >>> X[np.random.default_rng(0).random(X.shape) < 0.3] = np.nan
    >>> filled = MFAImputer(random_state=0).fit_transform(X)
    >>> bool(np.isnan(filled).any())
    False
    """

    image_shape_: tuple[int, ...] | None
    _units: Units
    _members: list[Parameters]
    _levels: Tensor
    """(n,), where entries of the training rows lie in their conditional distributions."""

    def __init__(
        self,
        n_components: Any = None,
        n_factors: int | None = None,
        *,
        noise: float = 0.04,
        max_epochs: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self.n_components = n_components
        self.n_factors = n_factors
        self.noise = noise
        self.max_epochs = max_epochs
        self.random_state = random_state
        self.device = device

    def fit(self, X: Array | Rows, y: object = None) -> Self:
        """Train the mixtures on the observed entries of X (n, d)."""
        noise = check_positive(self.noise, "noise")
        seed = check_seed(self.random_state)
        rows = ensure_finite_rows(as_rows(X))
        members = list(self._planned(rows, seed))
        sample = with_every_column(rows, draw_sample(rows, seed))
        shared = Shared.estimate(members[0], sample, max_precision=1 / noise)
        trained = [model._fit(X, rows, shared)._run.parameters for model in members]
        self._levels = self._calibrated(rows, sample, shared, seed)
        self._units, self._members = shared.units, trained
        remember_features(self, describe_features(rows))
        return self

    def _calibrated(self, rows: Rows, sample: Batch, shared: Shared, seed: int) -> Tensor:
        """Find where hidden entries of rows that were not trained on lie, (n,), in rising order.

        The mixtures for it are trained on a part of a sample of the rows, (n, d).
        """
        table = to_float64(sample.rows)
        judges = torch.arange(len(table)) % FOLD == 0
        others = ArrayRows(table[~judges])
        if others.n_rows < 2:
            return torch.zeros(0, dtype=torch.float64)
        members = [
            model._fit(table, others, shared)._run.parameters
            for model in self._planned(others, seed, MOST_EPOCHS)
        ]
        imputer = imputer_of(members, shared.units)
        like = imputer.parameters.means
        batch = Batch(table[judges][:JUDGED].repeat(MASKS, 1))
        working = shared.units.to_working(batch, like.device, like.dtype)
        x, _ = working.tensors()
        gaps = torch.zeros_like(x, dtype=torch.bool) if working.missing is None else working.missing
        random = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
        hidden = (random.to(x.device) < HIDDEN) & ~gaps
        with torch.no_grad():
            return imputer.levels(x, hidden, gaps).sort().values.to("cpu", torch.float64)

    def _level(self, level: float) -> float:
        """Return the level below which that share of the hidden entries lay."""
        if len(self._levels) < ENOUGH:
            return level
        # No surer than what so many entries can tell.
        found = float(torch.quantile(self._levels, level))
        return min(max(found, 0.5 / len(self._levels)), 1 - 0.5 / len(self._levels))

    def transform(self, X: Array | Rows) -> Any:
        """Return X (n, d) with the conditional mean in the place of what is missing."""
        return self.impute(X)

    def _completing(self) -> tuple[Sequence[Parameters], Units]:
        return self._members, self._units

    @property
    def mixtures_(self) -> list[Any]:
        """The mixtures, in units of the data and in float64."""
        check_is_fitted(self)
        return [PrecisionMixture.from_parameters(self._units.to_data(p)) for p in self._members]

    def _planned(self, rows: Rows, seed: int, most: int | None = None) -> Iterator[MFA]:
        """Yield the mixtures to train."""
        n, d = rows.n_rows, rows.n_features
        if n < 2:
            raise InputError(f"X has n_samples={n}, too few to learn from: give 2 rows or more.")
        sizes = self.n_components
        if sizes is None:
            sizes = [K for K in SIZES if n >= ROWS * K] or [1]
        elif isinstance(sizes, numbers.Integral):
            sizes = [sizes]
        try:
            sizes = [check_count(K, "n_components", 1) for K in sizes]
        except TypeError:
            sizes = []
        if not sizes:
            raise InputError(
                "n_components must be None, a number or a list of numbers of components, not"
                f" {self.n_components!r}."
            )
        for K in sizes:
            factors = FEW_FACTORS if K >= MANY else MOST_FACTORS
            l = min(d // 2, factors) if self.n_factors is None else self.n_factors
            yield MFA(
                K,
                l,
                scaling="feature",
                max_epochs=self.max_epochs or most,
                random_state=seed,
                device=self.device,
            )

    def __sklearn_is_fitted__(self) -> bool:
        """Say whether there are mixtures."""
        return hasattr(self, "_members")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _pack(self, *, training_state: bool) -> tuple[Tensors, Settings]:
        tensors: dict[str, Tensor] = {
            "units.offset": self._units.offset,
            "units.scale": self._units.scale,
            "levels": self._levels,
        }
        for i, member in enumerate(self._members):
            tensors |= {f"member{i}.{name}": t for name, t in member._asdict().items()}
        names = getattr(self, "feature_names_in_", None)
        sizes = self.n_components
        seed: Any = self.random_state
        return tensors, {
            "options": {
                "n_components": [int(K) for K in sizes] if np.ndim(sizes) else sizes,
                "n_factors": self.n_factors,
                "noise": float(self.noise),
                "max_epochs": self.max_epochs,
                "random_state": int(seed) if isinstance(seed, numbers.Integral) else None,
            },
            "feature_names": None if names is None else [str(name) for name in names],
            "image_shape": self.image_shape_,
            "members": len(self._members),
        }

    @classmethod
    def _unpack(
        cls, tensors: Tensors, settings: Settings, device: str | torch.device | None
    ) -> Self:
        place = check_device(device)
        model = cls(**settings["options"], device=device)
        model._units = Units(tensors["units.offset"], tensors["units.scale"])
        model._levels = tensors["levels"]
        model._members = [
            Parameters(*(tensors[f"member{i}.{name}"].to(place) for name in Parameters._fields))
            for i in range(settings["members"])
        ]
        names, shape = settings["feature_names"], settings["image_shape"]
        count = len(tensors["units.offset"])
        remember_features(model, Features(count, names and tuple(names), shape and tuple(shape)))
        return model
