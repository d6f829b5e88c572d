"""Samples against data, bin by bin: NDB, the number of statistically different bins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from factormix.core import bins
from factormix.data.sources import Rows, as_rows, checked_rows
from factormix.errors import InputError
from factormix.estimators.validation import Array, check_count

__all__ = ["Binned", "ndb"]

Values = NDArray[np.float64]
BLOCK = 4096
"""Rows that are put into bins at once."""


@dataclass(frozen=True)
class Binned:
    """What ``ndb`` found.

    Attributes
    ----------
    n_different : int
        Bins whose shares of the two differ significantly. Samples of the right distribution have
        about ``alpha * n_bins``.
    n_bins : int
    share : float
        ``n_different / n_bins``: NDB/K in the paper.
    divergence : float
        Jensen-Shannon divergence of the two histograms, in nats.
    proportions, sample_proportions : array (n_bins,)
        Shares of the data and of the samples in each bin, the fullest first.
    p_values : array (n_bins,)
    centres : array (n_bins, d)
        What the bins are about: means of the data in them.
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
) -> Binned:
    """Count the bins in which samples (m, d) and data X (n, d) differ significantly.

    Bins are the cells of k-means centres of X; in each, the share of the data is tested against
    that of the samples (Richardson and Weiss, 2018, "On GANs and GMMs"). Empty and crowded bins
    show what a model never draws, or draws too often. Few samples find few differences: compare
    numbers of the same sizes.
    """
    from sklearn.cluster import MiniBatchKMeans

    n = check_count(n_bins, "n_bins", 2)
    if not 0 < alpha < 1:
        raise InputError(f"alpha must lie between 0 and 1, not {alpha!r}.")
    data, drawn = _complete(X, "X"), _complete(samples, "samples")
    if data.n_features != drawn.n_features:
        raise InputError(
            f"X has {data.n_features} features and samples have {drawn.n_features}: give rows of"
            " the same kind."
        )
    if data.n_rows < n:
        raise InputError(f"X has {data.n_rows} rows, fewer than n_bins={n}: lower n_bins.")
    found = MiniBatchKMeans(n, n_init=3, batch_size=BLOCK, random_state=random_state)
    found.fit(_whole(data))
    counts = [_counts(found, rows, n) for rows in (data, drawn)]
    order = np.argsort(-counts[0], kind="stable")
    first, second = (torch.from_numpy(c[order]) for c in counts)
    p = bins.p_values(first, second).numpy()
    return Binned(
        int((p < alpha).sum()),
        n,
        alpha,
        float(bins.jensen_shannon(first, second)),
        (first / first.sum()).numpy(),
        (second / second.sum()).numpy(),
        p,
        np.asarray(found.cluster_centers_, dtype=np.float64)[order],
    )


def _complete(given: Array | Rows, name: str) -> Rows:
    """Return rows in which nothing is missing."""
    rows = checked_rows(as_rows(given), name)
    if not getattr(rows, "complete", True):
        raise InputError(
            f"{name} has missing values (NaN), and bins need all of them: fill them in by impute."
        )
    return rows


def _whole(rows: Rows) -> NDArray[Any]:
    """Return all rows as one array."""
    blocks = [torch.as_tensor(block.rows).cpu().numpy() for block in rows.blocks(BLOCK)]
    return np.concatenate(blocks)


def _counts(found: Any, rows: Rows, n: int) -> Values:
    """Count rows in each bin, (n,)."""
    total = np.zeros(n)
    for block in rows.blocks(BLOCK):
        part = torch.as_tensor(block.rows).cpu().numpy().astype(found.cluster_centers_.dtype)
        total += np.bincount(found.predict(part), minlength=n)
    return total
