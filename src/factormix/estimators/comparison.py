"""Two densities side by side: which explains rows better, how far apart they are, what matches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from factormix.core.overlap import bhattacharyya
from factormix.data.sources import Rows
from factormix.errors import InputError
from factormix.estimators.mfa import MFA
from factormix.estimators.validation import Array, check_count, check_mixture

__all__ = ["Comparison", "Estimate", "Match", "compare"]


@dataclass(frozen=True)
class Estimate:
    """A mean over rows, and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        """Write mean ± error."""
        return f"{self.mean:.5g} ± {self.error:.2g}"

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Estimate:
        """Estimate the mean of independent values (n,)."""
        error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(float(values.mean()), float(error))


@dataclass(frozen=True)
class Match:
    """Two components that stand for each other."""

    first: int
    second: int
    distance: float
    """Bhattacharyya distance; 0 for the same Gaussian."""
    weights: tuple[float, float]

    @property
    def overlap(self) -> float:
        """The Bhattacharyya coefficient, one for the same Gaussian."""
        return math.exp(-self.distance)


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found about two models, called first and second.

    Attributes
    ----------
    difference : Estimate or None
        How much higher the mean log-likelihood of rows is under the first; None without rows.
    log_likelihoods : tuple or None
        The two means.
    divergence, reverse : Estimate
        ``KL(first || second)`` and ``KL(second || first)`` in nats, from samples.
    matches : list of Match
        Each component of the smaller model with another of the larger, nearest in sum, in the
        order of the first model.
    """

    divergence: Estimate
    reverse: Estimate
    matches: list[Match] = field(repr=False)
    difference: Estimate | None = None
    log_likelihoods: tuple[float, float] | None = None


def compare(
    first: MFA,
    second: MFA,
    X: Array | Rows | None = None,
    *,
    n_samples: int = 10_000,
    random_state: int = 0,
) -> Comparison:
    """Compare two mixtures of the same features: on rows X (n, d), by samples, and by components.

    Rows should be new to both models. Divergences are means of ``log p - log q`` over
    ``n_samples`` samples of p.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from factormix import MFA
    >>> from factormix.reading import compare
    >>> X = load_iris().data
    >>> one, three = (MFA(K, 1, random_state=0).fit(X[::2]) for K in (1, 3))
    >>> compare(three, one, X[1::2]).difference.mean > 0
    True
    """
    for model in (first, second):
        check_mixture(model)
    n = check_count(n_samples, "n_samples", 2)
    _check_alike(first, second)
    levels = None
    if X is not None:
        levels = [np.asarray(m.score_samples(X), dtype=np.float64) for m in (first, second)]
    return Comparison(
        _divergence(first, second, n, random_state),
        _divergence(second, first, n, random_state),
        _matches(first, second),
        None if levels is None else Estimate.of(levels[0] - levels[1]),
        None if levels is None else (float(levels[0].mean()), float(levels[1].mean())),
    )


def _check_alike(first: MFA, second: MFA) -> None:
    if first.n_features_in_ != second.n_features_in_:
        raise InputError(
            f"the first model has {first.n_features_in_} features and the second"
            f" {second.n_features_in_}: compare models of the same rows."
        )
    names = [getattr(model, "feature_names_in_", None) for model in (first, second)]
    if names[0] is not None and names[1] is not None and names[0].tolist() != names[1].tolist():
        raise InputError(
            "the two models have other columns, or have them in another order: train both on the"
            " same ones."
        )


def _divergence(p: MFA, q: MFA, n: int, seed: int) -> Estimate:
    """Estimate ``KL(p || q)`` from n samples of p."""
    import torch

    mixtures = p.mixture_, q.mixture_
    drawn = mixtures[0].sample(n, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        ratio = mixtures[0].log_prob(drawn) - mixtures[1].log_prob(drawn)
    return Estimate.of(ratio.cpu().double().numpy())


def _matches(first: MFA, second: MFA) -> list[Match]:
    """Match components so that the sum of their distances is least."""
    from scipy.optimize import linear_sum_assignment

    one, two = first._fitted(), second._fitted()
    distances = bhattacharyya(one, two).cpu().numpy()
    weights = [p.log_weights.exp().cpu().numpy() for p in (one, two)]
    return [
        Match(int(k), int(j), float(distances[k, j]), (float(weights[0][k]), float(weights[1][j])))
        for k, j in zip(*linear_sum_assignment(distances), strict=True)
    ]
