"""Inspect a fitted mixture: factors, components, typical rows; two models; samples against data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factormix.core import inspection
from factormix.core.missing import RowBlock
from factormix.core.parameters import change_units, precise_dtype
from factormix.data.checks import ensure_finite_rows
from factormix.data.sources.base import Rows
from factormix.data.sources.convert import as_rows
from factormix.errors import InputError
from factormix.estimators.mfa import MFA
from factormix.estimators.validation import Array, check_count, check_mixture, check_rows
from factormix.training.evaluation import evaluate
from factormix.training.threads import use_threads

__all__ = [
    "BinnedProportions",
    "Comparison",
    "Estimate",
    "Match",
    "NearestRows",
    "VarianceExplained",
    "Varimax",
    "communalities",
    "compare",
    "confusion",
    "distances",
    "ndb",
    "nearest_rows",
    "overlaps",
    "variance_explained",
    "varimax",
]

Values = NDArray[np.float64]

OTHER_COMPONENT_PENALTY = 1e9
"""Nats subtracted from rows of other components: more than rows differ by."""
BLOCK_ROWS = 4096
"""Rows of a batch of k-means: scikit-learn advises at least 256 for each core."""


@dataclass(frozen=True)
class Varimax:
    """A mixture with rotated factors and the same density; plots accept it like a model.

    Attributes
    ----------
    loadings_ : array (K, d, l)
        Loadings that are large for some features and near zero for the others.
    rotation_ : array (K, l, l)
        The rotation of each component: its loadings were multiplied by it.
    weights_, means_, precision_diag_, precision_factors_, noise_variances_
        As in the model.
    """

    loadings_: Values
    rotation_: Values
    weights_: Values
    means_: Values
    precision_diag_: Values
    precision_factors_: Values
    noise_variances_: Values
    model: MFA

    def transform(self, X: Array | Rows) -> Values:
        """Compute the latent code of each row (n, d) in the rotated factors of its component."""
        codes, best = (np.asarray(a) for a in (self.model.transform(X), self.model.predict(X)))
        turned: Values = np.einsum("nl,nlm->nm", codes, self.rotation_[best])
        return turned


def varimax(model: MFA) -> Varimax:
    """Rotate the factors of each component so that each loads on few features (varimax)."""
    check_mixture(model)
    turned = inspection.varimax(torch.as_tensor(model.loadings_).double())
    names = ("weights_", "means_", "precision_diag_", "precision_factors_", "noise_variances_")
    fitted = {name: _array(getattr(model, name)) for name in names}
    return Varimax(_array(turned.loadings), _array(turned.rotation), **fitted, model=model)


class VarianceExplained(NamedTuple):
    """Shares of the variance, summed over the features in units of the data."""

    between: float
    """Share of the mixture's variance between the means of its components."""
    factors: float
    """Share that factors explain."""
    noise: float
    """Share of the noise."""
    per_factor: Values
    """(K, l), the share of each component's own variance that each of its factors explains."""


def variance_explained(model: MFA, *, standardised: bool = False) -> VarianceExplained:
    """Split the variance into shares: between components, of each factor, of the noise.

    Features with a large variance count most; ``standardised=True`` gives all the same weight.
    """
    check_mixture(model)
    parameters = model._data_parameters()
    if standardised:
        deviation = inspection.feature_variances(parameters).sqrt()
        parameters = change_units(parameters, torch.zeros_like(deviation), 1 / deviation)
    found = inspection.variance_shares(parameters)
    return VarianceExplained(
        float(found.between),
        float(found.within_factors),
        float(found.within_noise),
        _array(found.factors),
    )


def communalities(model: MFA) -> Values:
    """Compute the share of each feature's variance that a component's factors explain, (K, d)."""
    check_mixture(model)
    return _array(inspection.communalities(model._data_parameters()))


def overlaps(model: MFA, other: MFA | None = None) -> Values:
    """Compute the overlap of components, (K, K), or with another model's components, (K, J).

    The overlap is the Bhattacharyya coefficient, the integral of ``sqrt(p_k p_j)``: one for equal
    Gaussians, zero for disjoint ones. In many dimensions it is nearly zero for most pairs; use
    ``distances`` there.
    """
    return np.exp(-distances(model, other))


def distances(model: MFA, other: MFA | None = None) -> Values:
    """Compute Bhattacharyya distances between components, (K, K), or to another model's, (K, J).

    ``overlaps`` is ``exp(-distance)``. The distance still distinguishes near from far pairs when
    the overlap rounds to zero.
    """
    check_mixture(model)
    if other is not None:
        check_mixture(other)
    one = model._data_parameters()
    two = one if other is None else other._data_parameters()
    return _array(inspection.bhattacharyya(one, two))


def confusion(model: MFA, X: Array | Rows) -> Values:
    """Compute how much each component shares its rows with the others, (K, K).

    Row k is the mean of ``p(j | x)`` over the rows of X (n, d) whose most probable component is k;
    it sums to one, or is NaN if k has no rows.
    """
    check_mixture(model)
    rows, run = _require_complete(check_rows(model, X)), model._run

    def of_block(block: RowBlock) -> tuple[Tensor, Tensor]:
        R = torch.softmax(block.joint(), dim=1)
        own = torch.nn.functional.one_hot(R.argmax(dim=1), R.shape[1]).to(R)
        return own.mT @ R, own.sum(dim=0)

    K = run.parameters.shape[0]
    total, count = np.zeros((K, K)), np.zeros(K)
    with use_threads() as threads:
        for _, (shared, own) in evaluate(threads, run.parameters, run.units, rows, of_block):
            total += _array(shared)
            count += _array(own)
    with np.errstate(invalid="ignore"):
        return np.asarray(total / count[:, None])


class NearestRows(NamedTuple):
    """The rows that each component explains best."""

    rows: NDArray[np.intp]
    """(K, n), numbers of the rows, the best first."""
    log_likelihoods: Values
    """(K, n), ``log p_k(x)`` of each."""


def nearest_rows(model: MFA, X: Array | Rows, n_rows: int = 5) -> NearestRows:
    """Find the rows of X (n, d) that are nearest to each component, in the component's own metric.

    These are the rows of least Mahalanobis distance among the rows whose most probable component it
    is. If there are too few, rows of other components follow.
    """
    check_mixture(model)
    rows, run = _require_complete(check_rows(model, X)), model._run
    n = min(check_count(n_rows, "n_rows", 1), rows.n_rows)

    def of_block(block: RowBlock) -> tuple[Tensor, Tensor, int]:
        x = block.x
        found = block.components().to(precise_dtype(x.device))
        own = (found + block.ops.log_weights).argmax(dim=1, keepdim=True)
        # Rows of other components come after all of its own.
        ranked = (found - OTHER_COMPONENT_PENALTY).scatter(1, own, found.gather(1, own))
        best = ranked.topk(min(n, len(x)), dim=0)
        return best.values, best.indices, len(x)

    K, first = run.parameters.shape[0], 0
    levels, numbers = np.empty((0, K)), np.empty((0, K), dtype=np.intp)
    with use_threads() as threads:
        for _, (values, places, size) in evaluate(
            threads, run.parameters, run.units, rows, of_block
        ):
            levels = np.concatenate([levels, _array(values)])
            numbers = np.concatenate([numbers, places.cpu().numpy() + first])
            order = np.argsort(-levels, axis=0, kind="stable")[:n]
            levels = np.take_along_axis(levels, order, axis=0)
            numbers = np.take_along_axis(numbers, order, axis=0)
            first += size
    penalty = OTHER_COMPONENT_PENALTY
    levels = np.where(levels < -penalty / 2, levels + penalty, levels)
    return NearestRows(numbers.T, levels.T - run.units.log_volume)


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
    """A component of one model and its counterpart in another."""

    first: int
    second: int
    distance: float
    """Bhattacharyya distance; 0 for equal Gaussians."""
    weights: tuple[float, float]

    @property
    def overlap(self) -> float:
        """The Bhattacharyya coefficient, one for equal Gaussians."""
        return math.exp(-self.distance)


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare`` for a first and a second model.

    Attributes
    ----------
    difference : Estimate or None
        Mean log-likelihood of rows under the first minus under the second; None without rows.
    log_likelihoods : tuple or None
        The two means.
    divergence, reverse : Estimate
        ``KL(first || second)`` and ``KL(second || first)`` in nats, from samples.
    matches : list of Match
        Pairs of each component of the smaller model and a different one of the larger, with the
        least sum of distances, in the order of the first model.
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
    >>> from factormix.inspection import compare
    >>> X = load_iris().data
    >>> one, three = (MFA(K, 1, random_state=0).fit(X[::2]) for K in (1, 3))
    >>> compare(three, one, X[1::2]).difference.mean > 0
    True
    """
    for model in (first, second):
        check_mixture(model)
    n = check_count(n_samples, "n_samples", 2)
    _check_same_features(first, second)
    found = Comparison(
        _estimate_divergence(first, second, n, random_state),
        _estimate_divergence(second, first, n, random_state),
        _match_components(first, second),
    )
    if X is None:
        return found
    one, two = (np.asarray(m.score_samples(X), dtype=np.float64) for m in (first, second))
    means = float(one.mean()), float(two.mean())
    return replace(found, difference=Estimate.of(one - two), log_likelihoods=means)


def _check_same_features(first: MFA, second: MFA) -> None:
    if first.n_features_in_ != second.n_features_in_:
        raise InputError(
            f"the first model has {first.n_features_in_} features and the second"
            f" {second.n_features_in_}: compare models of the same rows."
        )
    names = [getattr(model, "feature_names_in_", None) for model in (first, second)]
    if names[0] is not None and names[1] is not None and names[0].tolist() != names[1].tolist():
        raise InputError(
            "the two models have different columns, or the same in another order: train both on"
            " the same columns."
        )


def _estimate_divergence(p: MFA, q: MFA, n: int, seed: int) -> Estimate:
    """Estimate ``KL(p || q)`` from n samples of p."""
    mixtures = p.mixture_, q.mixture_
    drawn = mixtures[0].sample(n, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        ratio = mixtures[0].log_prob(drawn) - mixtures[1].log_prob(drawn)
    return Estimate.of(ratio.cpu().double().numpy())


def _match_components(first: MFA, second: MFA) -> list[Match]:
    """Match components so that the sum of their distances is least."""
    from scipy.optimize import linear_sum_assignment

    one, two = first._data_parameters(), second._data_parameters()
    distances = inspection.bhattacharyya(one, two).cpu().numpy()
    weights = [p.log_weights.exp().cpu().numpy() for p in (one, two)]
    return [
        Match(int(k), int(j), float(distances[k, j]), (float(weights[0][k]), float(weights[1][j])))
        for k, j in zip(*linear_sum_assignment(distances), strict=True)
    ]


@dataclass(frozen=True)
class BinnedProportions:
    """The result of ``ndb``: data and samples in the same bins.

    Attributes
    ----------
    n_different : int
        Number of bins in which the shares of data and samples differ significantly. Samples of the
        right distribution have about ``alpha * n_bins``.
    n_bins : int
    share : float
        ``n_different / n_bins``: NDB/K in the paper.
    divergence : float
        Jensen-Shannon divergence of the two histograms, in nats.
    proportions, sample_proportions : array (n_bins,)
        Shares of the data and of the samples in each bin, the fullest first.
    p_values : array (n_bins,)
    centres : array (n_bins, d)
        Means of the data in each bin.
    """

    n_different: int
    n_bins: int
    alpha: float
    divergence: float
    proportions: Values = field(repr=False)
    sample_proportions: Values = field(repr=False)
    p_values: Values = field(repr=False)
    centres: Values = field(repr=False)

    @property
    def share(self) -> float:
        """The share of bins that differ."""
        return self.n_different / self.n_bins

    @property
    def different(self) -> NDArray[np.bool_]:
        """Which bins differ, (n_bins,)."""
        return np.asarray(self.p_values < self.alpha)


def ndb(
    X: Array | Rows,
    samples: Array | Rows,
    n_bins: int = 100,
    *,
    alpha: float = 0.05,
    random_state: int | None = 0,
) -> BinnedProportions:
    """Count the bins in which samples (m, d) and data X (n, d) differ significantly.

    Bins are the cells of k-means centres of X. In each bin, the shares of data and samples are
    compared by a test (Richardson and Weiss, 2018, "On GANs and GMMs"). Empty and crowded bins show
    what a model never draws, or draws too often. Few samples show few differences: compare results
    of equal sizes only.
    """
    from sklearn.cluster import MiniBatchKMeans

    n = check_count(n_bins, "n_bins", 2)
    if not 0 < alpha < 1:
        raise InputError(f"alpha must lie between 0 and 1, not {alpha!r}.")
    data, drawn = _read_complete(X, "X"), _read_complete(samples, "samples")
    if data.shape[1] != drawn.shape[1]:
        raise InputError(
            f"X has {data.shape[1]} features and samples have {drawn.shape[1]}: give rows of the"
            " same kind."
        )
    if len(data) < n:
        raise InputError(f"X has {len(data)} rows, fewer than n_bins={n}: lower n_bins.")
    kmeans = MiniBatchKMeans(n, n_init=3, batch_size=BLOCK_ROWS, random_state=random_state)
    kmeans.fit(data)
    cells = (kmeans.predict(x.astype(kmeans.cluster_centers_.dtype)) for x in (data, drawn))
    counts = [np.bincount(cell, minlength=n).astype(np.float64) for cell in cells]
    order = np.argsort(-counts[0], kind="stable")
    first, second = (torch.from_numpy(c[order]) for c in counts)
    p = inspection.p_values(first, second).numpy()
    return BinnedProportions(
        int((p < alpha).sum()),
        n,
        alpha,
        float(inspection.jensen_shannon(first, second)),
        (first / first.sum()).numpy(),
        (second / second.sum()).numpy(),
        p,
        np.asarray(kmeans.cluster_centers_, dtype=np.float64)[order],
    )


def _read_complete(given: Array | Rows, name: str) -> NDArray[Any]:
    """Return rows (n, d), in which nothing may be missing, as one array."""
    blocks = _require_complete(as_rows(given), name).blocks(BLOCK_ROWS)
    return np.concatenate([torch.as_tensor(block.rows).cpu().numpy() for block in blocks])


def _require_complete(rows: Rows, name: str = "X") -> Rows:
    """Return checked rows, in which nothing may be missing."""
    rows = ensure_finite_rows(rows, name)
    if not getattr(rows, "complete", True):
        raise InputError(
            f"{name} has missing values (NaN), which cannot be used here: fill them in with impute."
        )
    return rows


def _array(values: Any) -> Values:
    """Return values as a float64 array."""
    values = values.detach().cpu() if isinstance(values, Tensor) else values
    return np.asarray(values, dtype=np.float64)
