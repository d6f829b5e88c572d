"""``MFAAnomaly``: a mixture as an anomaly detector of river, in the extra ``river``."""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.data.sources.arrays import ArrayRows
from factormix.errors import InputError
from factormix.estimators.mfa import MFA
from factormix.training.solvers import NaturalGradient

try:
    from river import base
except ImportError as missing:
    raise ImportError('factormix.river needs river: pip install "factormix[river]"') from missing

__all__ = ["MFAAnomaly"]

MAX_WAITING = 1000
"""Maximum number of rows to collect while all are equal, so that they have no scale: ten times the
default warm-up."""


class MFAAnomaly(base.AnomalyDetector):
    """Mixture of factor analyzers that learns a stream and scores how unlikely a row is.

    The score is the negative log-likelihood of the observed features of a row; features that are
    absent, None or NaN are missing. Rows are learned a few at a time. The first ``warm_up`` rows
    have the score 0. They set the features, and features that appear later are ignored.

    Parameters
    ----------
    n_components
        K, the number of mixture components.
    n_factors
        l, the number of factors of each component. None takes 8, or one less than the number of
        features.
    batch_size
        Number of rows that are learned at once.
    warm_up
        Number of rows with which the model starts, at least 10.
    forgetting
        Least learning rate: about ``batch_size / forgetting`` rows are remembered. None remembers
        all rows equally.
    seed
        Seed of the initial values.

    Attributes
    ----------
    model : MFA or None
        The mixture; None during the warm-up.

    Examples
    --------
    >>> import random
    >>> from factormix.river import MFAAnomaly
    >>> draw = random.Random(0)
    >>> detector = MFAAnomaly(n_components=2, seed=0)
    >>> for _ in range(300):
    ...     detector.learn_one({"a": draw.gauss(0, 1), "b": draw.gauss(5, 1)})
    >>> detector.score_one({"a": 0, "b": 5}) < detector.score_one({"a": 9, "b": 5})
    True
    """

    def __init__(
        self,
        n_components: int = 5,
        n_factors: int | None = None,
        batch_size: int = 50,
        warm_up: int = 100,
        forgetting: float | None = 0.01,
        seed: int | None = None,
    ) -> None:
        self.n_components = n_components
        self.n_factors = n_factors
        self.batch_size = batch_size
        self.warm_up = warm_up
        self.forgetting = forgetting
        self.seed = seed
        self.model: MFA | None = None
        self._features = dict[Hashable, int]()
        self._waiting = list[Any]()
        """Rows that are learned next: dictionaries during the warm-up, then arrays."""

    def learn_one(self, x: Mapping[Hashable, Any]) -> None:
        """Learn a row, together with the next ones."""
        if self.model is None:
            self._waiting.append({name: _number(name, value) for name, value in x.items()})
            if len(self._waiting) >= max(10, self.warm_up):
                self._start()
            return
        self._waiting.append(self._row(x))
        if len(self._waiting) >= self.batch_size:
            rows, self._waiting = np.stack(self._waiting), []
            self.model.partial_fit(ArrayRows(rows).mark_finite())

    def learn_many(self, X: Any) -> None:
        """Learn the rows of a data frame (n, d)."""
        for x in X.to_dict("records"):
            self.learn_one(x)

    def score_one(self, x: Mapping[Hashable, Any]) -> float:
        """Return the negative log-likelihood of a row: a high score is unusual."""
        if self.model is None:
            return 0.0
        rows = ArrayRows(self._row(x)[None]).mark_finite()
        return -float(self.model.score_samples(rows)[0])

    def score_many(self, X: Any) -> Any:
        """Return the scores of the rows of a data frame (n, d), as a series (n,)."""
        import pandas as pd

        if self.model is None or not len(X):
            return pd.Series(np.zeros(len(X)), index=X.index, name="score")
        rows = np.stack([self._row(x) for x in X.to_dict("records")])
        scores = self.model.score_samples(ArrayRows(rows).mark_finite())
        return pd.Series(-scores, index=X.index, name="score")

    def _start(self) -> None:
        """Start the model with the waiting rows, if their scale can be estimated."""
        names = {name for x in self._waiting for name, value in x.items() if not math.isnan(value)}
        # The order of features in a dictionary means nothing.
        features = {name: j for j, name in enumerate(sorted(names, key=str))}
        rows = np.array([_in_order(x, features) for x in self._waiting])
        model = MFA(
            self.n_components,
            self.n_factors,
            solver=NaturalGradient(forgetting=self.forgetting),
            batch_size=self.batch_size,
            random_state=self.seed,
        )
        try:
            model.partial_fit(ArrayRows(rows))
        except InputError:
            if len(self._waiting) < MAX_WAITING and features:
                return
            raise
        self.model, self._features, self._waiting = model, features, []

    def _row(self, x: Mapping[Hashable, Any]) -> NDArray[np.float64]:
        known = {name: _number(name, value) for name, value in x.items() if name in self._features}
        return np.array(_in_order(known, self._features))


def _in_order(x: Mapping[Hashable, float], features: Mapping[Hashable, int]) -> list[float]:
    return [x.get(name, math.nan) for name in features]


def _number(name: Hashable, value: Any) -> float:
    """Return a value as a number, NaN if it is missing."""
    if value is None:
        return math.nan
    if not isinstance(value, numbers.Real):
        raise InputError(
            f"the feature {name!r} is {value!r}, which is not a number: encode it, as with"
            " preprocessing.OneHotEncoder, or leave it out."
        )
    if math.isinf(value):
        raise InputError(f"the feature {name!r} is infinite: leave it out, or the row.")
    return float(value)
