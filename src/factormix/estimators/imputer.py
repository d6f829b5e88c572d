"""``MFAImputer``: fill in missing values of a table by mixtures of several sizes."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import OneToOneFeatureMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from factormix.core.mixture import PrecisionMixture
from factormix.core.parameters import Parameters, factor_major
from factormix.data.batches import Batch
from factormix.data.checks import ensure_finite_rows
from factormix.data.columns import to_float64
from factormix.data.features import describe_features
from factormix.data.sources.arrays import ArrayRows
from factormix.data.sources.base import Rows
from factormix.data.sources.convert import as_rows
from factormix.data.units import Units
from factormix.defaults import DTYPE
from factormix.errors import InputError
from factormix.estimators.fitting import FitsBar, WorkingScale, cover_columns, draw_sample
from factormix.estimators.imputation import ImputingModel, build_imputer
from factormix.estimators.mfa import MFA
from factormix.estimators.storage import Settings, Tensors
from factormix.estimators.validation import (
    Array,
    check_count,
    check_device,
    check_options,
    check_positive,
    check_seed,
    set_features_,
)
from factormix.training.serialization import add_prefix, select_prefix

# These sizes, and the noise floor of 0.04, were chosen on the eight tuning tables of
# ``benchmarks/missing.py``, whose page judges them on ten others.
SIZES = (1, 3, 8, 16)
"""Numbers of components of the mixtures, as far as there are enough rows."""
IMPUTER_ROWS_PER_COMPONENT = 30
"""Rows that are enough for one of them."""
MAX_FACTORS, MAX_FACTORS_OF_LARGE, LARGE_SIZE = 10, 5, 8
"""Maximum number of factors, below and from ``LARGE_SIZE`` components."""
CALIBRATION_FOLD = 4
"""One row in this many calibrates intervals, by mixtures that are trained on the others."""
CALIBRATION_ROWS = 1000
"""Maximum number of rows that calibrate intervals."""
HIDDEN_SHARE, N_MASKS = 0.3, 4
"""Share of the entries of these rows that is hidden at a time, as in ``benchmarks/missing.py``, and
how many times: an entry is hidden with a probability of 1 - 0.7^4, three quarters."""
MIN_HIDDEN = 100
"""Fewest hidden entries that calibrate intervals: their share in a 90% interval has an error of
sqrt(0.9 * 0.1 / 100), 3%."""
CALIBRATION_EPOCHS = 20
"""Maximum number of passes of the mixtures that calibrate intervals. On the eight tuning tables of
``benchmarks/missing.py``, 90% intervals hold 89.2% of the entries after 20, 40 and 80 passes."""


@dataclass(eq=False, repr=False)
class MFAImputer(OneToOneFeatureMixin, ImputingModel):
    """Fill in missing values (NaN) by the conditional mean of a few mixtures of factor analyzers.

    Mixtures of several sizes are trained on the observed entries, with standardised features and a
    noise floor, so that none of them overfits. A missing entry gets the mean of their conditional
    distributions. Intervals are calibrated by hiding entries of some training rows: an interval
    ends where the given share of these entries lies. The defaults suit tables. For images and other
    large data, one mixture of a suitable size (``MFA.impute``) is better.

    Parameters
    ----------
    n_components : sequence of int or None
        Numbers of components of the mixtures. None takes 1, 3, 8 and 16, with at least 30 rows for
        each component.
    n_factors : int or None
        Number of factors of every mixture. None takes half the number of features, at most 10, or
        at most 5 in mixtures of 8 components or more.
    noise_floor : float
        Least noise variance, as a share of each feature's variance.
    max_epochs : int or None
        Maximum number of passes over the data for each mixture. None leaves it to the solver.
    random_state : int, RandomState or None
        Seed of training, and of draws.
    device : str, torch.device or None
        Where to compute.
    dtype : str or torch.dtype
        ``"float32"`` or ``"float64"``, in which the mixtures are trained.
    verbose : int
        1 shows a progress bar.

    Attributes
    ----------
    mixtures_ : list of PrecisionMixture
        The mixtures, in units of the data.
    n_features_in_ : int
    feature_names_in_ : array (d,)
        Names of the columns, if the table had names.

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

    n_components: Any = None
    n_factors: int | None = None
    _: KW_ONLY
    noise_floor: float = 0.04
    max_epochs: int | None = None
    random_state: int | np.random.RandomState | None = None
    device: str | torch.device | None = None
    dtype: str | torch.dtype = DTYPE
    verbose: int = 0

    _units: Units = field(init=False)
    _members: list[Parameters] = field(init=False)
    _levels: Tensor = field(init=False)
    """(n,), levels of hidden entries in their conditional distributions, in rising order."""

    def fit(self, X: Array | Rows, y: object = None) -> Self:
        """Train the mixtures on the observed entries of X (n, d)."""
        noise_floor = check_positive(self.noise_floor, "noise_floor", or_none=False)
        seed = check_seed(self.random_state)
        rows = ensure_finite_rows(as_rows(X))
        models = self._build_mixtures(rows, seed, self.max_epochs)
        sample = cover_columns(rows, draw_sample(rows, seed))
        scale = WorkingScale.estimate(check_options(models[0]), sample, 1 / noise_floor)
        sizes = [float(model.n_components or 1) for model in models]
        # Calibration trains the same sizes again, on fewer rows.
        fits = [(place, i) for place in ("training", "calibration") for i in range(len(sizes))]
        bar = FitsBar({fit: sizes[fit[1]] for fit in fits}, shown=bool(self.verbose))
        try:
            members = _train(models, X, rows, scale, bar, "training")
            self._levels = self._calibrate(sample, scale, seed, bar)
        finally:
            bar.close()
        self._units, self._members = scale.units, members
        set_features_(self, describe_features(rows))
        return self

    def transform(self, X: Array | Rows) -> Any:
        """Return X (n, d) with the conditional mean in place of missing entries."""
        return self.impute(X)

    @property
    def mixtures_(self) -> list[PrecisionMixture]:
        """The mixtures, in units of the data and in float64."""
        check_is_fitted(self)
        return [PrecisionMixture.from_parameters(self._units.to_data(p)) for p in self._members]

    def _build_mixtures(self, rows: Rows, seed: int, max_epochs: int | None) -> list[MFA]:
        """Return the untrained mixtures."""
        n, d = rows.n_rows, rows.n_features
        if n < 2:
            raise InputError(f"X has n_samples={n}, too few to learn from: give 2 rows or more.")
        sizes = self.n_components
        if sizes is None:
            sizes = [K for K in SIZES if n >= IMPUTER_ROWS_PER_COMPONENT * K] or [1]
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
        options: dict[str, Any] = {"scaling": "feature", "max_epochs": max_epochs}
        options |= {"random_state": seed, "device": self.device, "dtype": self.dtype}
        if self.n_factors is not None:
            return [MFA(K, self.n_factors, **options) for K in sizes]
        most = {K: MAX_FACTORS_OF_LARGE if K >= LARGE_SIZE else MAX_FACTORS for K in sizes}
        return [MFA(K, min(d // 2, most[K]), **options) for K in sizes]

    def _calibrate(self, sample: Batch, scale: WorkingScale, seed: int, bar: FitsBar) -> Tensor:
        """Compute the levels of hidden entries of rows that were not trained on, (n,), sorted.

        The mixtures for it are trained on the other rows of the sample (n, d).
        """
        table = to_float64(sample.rows)
        held_out = torch.arange(len(table)) % CALIBRATION_FOLD == 0
        others = ArrayRows(table[~held_out])
        if others.n_rows < 2:
            return torch.zeros(0, dtype=torch.float64)
        models = self._build_mixtures(others, seed, self.max_epochs or CALIBRATION_EPOCHS)
        members = _train(models, table, others, scale, bar, "calibration")
        imputer = build_imputer(members, scale.units)
        like = imputer.parameters.means
        batch = Batch(table[held_out][:CALIBRATION_ROWS].repeat(N_MASKS, 1))
        working = scale.units.to_working(batch, like.device, like.dtype)
        x, _ = working.tensors()
        gaps = torch.zeros_like(x, dtype=torch.bool) if working.missing is None else working.missing
        random = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
        hidden = (random.to(x.device) < HIDDEN_SHARE) & ~gaps
        with torch.no_grad():
            return imputer.levels(x, hidden, gaps).sort().values.to("cpu", torch.float64)

    def _imputing_mixtures(self) -> tuple[Sequence[Parameters], Units]:
        return self._members, self._units

    def _interval_level(self, level: float) -> float:
        """Return the level below which that share of the hidden entries lies."""
        if len(self._levels) < MIN_HIDDEN:
            return level
        found = float(torch.quantile(self._levels, level))
        # The entries cannot resolve levels closer to 0 or 1 than this.
        least = 0.5 / len(self._levels)
        return min(max(found, least), 1 - least)

    def _pack(self, *, training_state: bool) -> tuple[Tensors, Settings]:
        tensors: dict[str, Tensor] = {
            "units.offset": self._units.offset,
            "units.scale": self._units.scale,
            "levels": self._levels,
        }
        for i, member in enumerate(self._members):
            tensors |= add_prefix(f"member{i}.", member._asdict())
        return tensors, {"members": len(self._members)}

    def _unpack_(self, tensors: Tensors, settings: Settings) -> int:
        place = check_device(self.device)
        self._units = Units(tensors["units.offset"], tensors["units.scale"])
        self._levels = tensors["levels"]
        self._members = []
        for i in range(settings["members"]):
            own = select_prefix(f"member{i}.", tensors)
            member = Parameters(**{name: tensor.to(place) for name, tensor in own.items()})
            # In the order of memory that training leaves, so that results are the same.
            factors = factor_major(member.precision_factors)
            self._members.append(member._replace(precision_factors=factors))
        return len(self._units.offset)


def _train(
    models: Sequence[MFA],
    X: Array | Rows,
    rows: Rows,
    scale: WorkingScale,
    bar: FitsBar,
    place: str,
) -> list[Parameters]:
    """Train mixtures on rows made from X, and return their parameters in working units."""
    for i, model in enumerate(models):
        model.callbacks = (bar.follow((place, i), f"{place}, K={model.n_components}"),)
        model._fit_rows(X, rows, scale)
    return [model._run.parameters for model in models]
