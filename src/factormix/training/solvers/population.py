"""The number of components: which ones go, which ones are split, which ones begin anew.

Nothing is removed unless it was watched: over some ticks, every batch tells what its rows would
lose without each component, and what they would lose without all candidates for removal at once.
The second tells twins from components that nothing can stand in for, such as those of a few rows
far from all others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.statistics import Components, Statistics

__all__ = ["Watch", "dispensable", "expendable", "judged", "split_heaviest"]

OWN_ROWS = 10.0
"""Rows of its own that a component must have had a chance to see before it is judged."""
LITTLE = 0.1
"""Share of the median component's loss below which another is worth no more than a new one."""


class Watch(NamedTuple):
    """What removing components would cost, summed over the rows since the watch began.

    All are of length 0 while nothing is watched.
    """

    candidates: Tensor
    """(K,), true for those that might go."""
    alone: Tensor
    """(K,), log-likelihood lost without each component."""
    together: Tensor
    """(K,), log-likelihood lost without all candidates."""
    rows: Tensor
    """(1,), rows watched."""

    @classmethod
    def nothing(cls, like: Tensor) -> Watch:
        """Watch nothing."""
        none = like.new_zeros(0)
        return cls(none.bool(), none, none.clone(), none.clone())

    @classmethod
    def begin(cls, candidates: Tensor, alone: Tensor) -> Watch:
        """Begin to watch, with candidates (K,) and what is known of losses from before, (K,)."""
        return cls(candidates, alone.clone(), torch.zeros_like(alone), alone.new_zeros(1))

    @property
    def active(self) -> bool:
        """Whether anything is watched."""
        return len(self.candidates) > 0

    def seen(self, statistics: Statistics) -> Watch:
        """Add what a batch told."""
        return Watch(
            self.candidates,
            self.alone + statistics.loss_alone,
            self.together + statistics.loss_together,
            self.rows + statistics.n_samples,
        )


def dispensable(watch: Watch, n: int) -> Tensor:
    """Return the numbers (n,) of the components whose removal costs least.

    Candidates come first, then the others.
    """
    order = torch.argsort(watch.alone + watch.together, stable=True)
    first = watch.candidates[order]
    return torch.cat([order[first], order[~first]])[:n]


def judged(watch: Watch, weight: Tensor, all_rows: float) -> Tensor:
    """Tell which components, (K,), have been watched long enough for their weight (K,).

    After ``all_rows``, a pass over the data, there is nothing more to see.
    """
    return (watch.rows * weight >= OWN_ROWS) | (watch.rows >= all_rows)


def expendable(watch: Watch, weight: Tensor, all_rows: float, samples: float) -> Tensor:
    """Return the numbers of the candidates that are worth less than a new component would be.

    ``weight`` (K,) are the shares of the components, ``all_rows`` the rows of a pass, and
    ``samples`` those learned from so far. A candidate that had no chance to be seen is left alone,
    unless it does not even have half a row of its own.
    """
    known = judged(watch, weight, all_rows) | (samples * weight < 0.5)
    little = watch.together <= LITTLE * watch.alone.median()
    return (watch.candidates & known & little).nonzero()[:, 0]


def split_heaviest(components: Components, target: Tensor) -> None:
    """Give each target component half of one of the heaviest, in place.

    The halves stand half a standard deviation to each side along the first loading, or along the
    noise where there is no loading.
    """
    Theta, U, weight, E = components[:4]
    while len(target):
        free = weight.clone()
        free[target] = -1
        # Nothing light is split: its half would be unused again.
        n = min(len(target), int((free >= 0.5 * free.max()).sum()))
        if free.max() < 0:
            return
        source, taken, target = free.topk(n).indices, target[:n], target[n:]
        apart = 0.5 * E[source].rsqrt()
        if Theta.shape[1] > 1:
            first = Theta[source, 1]
            apart = torch.where((first != 0).any(dim=1, keepdim=True), 0.5 * first, apart)
        weight[source] *= 0.5
        U[source] *= 0.5
        for tensor in components:
            tensor[taken] = tensor[source]
        Theta[source, 0] += apart
        Theta[taken, 0] -= apart
