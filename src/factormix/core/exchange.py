"""Responsibilities of rows whose components lie on several ranks.

A row's responsibilities depend on the other components through one number, the normaliser. So each
rank summarises its components for every row: the largest ``logit_k + log p_k(x)`` and the sum of
all relative to it. Where the use of components is watched, the summary also has the second best
component and the best one that is not a candidate for removal. Logits need not be normalised on a
rank: their sum is exchanged too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.density import LEAST_RATIO
from factormix.core.parameters import Parameters
from factormix.core.statistics import best_of_others, losses_of_rows, sum_losses


class RowSummary(NamedTuple):
    """Summary of the components of one rank for every row."""

    values: Tensor
    """The largest joint log-density and the sum relative to it, (B, 2); with candidates also the
    second largest and the largest that is no candidate, (B, 4)."""
    best: Tensor
    """The component of this rank with the largest, (B,)."""

    @property
    def largest(self) -> Tensor:
        """The largest joint log-density of this rank, (B,)."""
        return self.values[:, 0]


class Normaliser(NamedTuple):
    """The summaries of all ranks together, for the rows of one tensor."""

    log_total: Tensor
    """``log sum_k exp(logit_k) p_k(x)``, (B,)."""
    log_mass: Tensor
    """``log sum_k exp(logit_k)``, scalar."""
    summaries: Tensor
    """Of each rank, (R, B, 2 or 4)."""

    @property
    def log_prob(self) -> Tensor:
        """``log p(x)``, (B,)."""
        return self.log_total - self.log_mass

    def normalise_(self, relative: Tensor, largest: Tensor) -> Tensor:
        """Turn ``exp(joint - largest)``, (B, C), of this rank into responsibilities, in place."""
        least = math.log(LEAST_RATIO)
        whole = (largest - self.log_total).clamp_(min=least).exp_().unsqueeze(1)
        # Bounded first, so that no product is a denormal number.
        return torch.maximum(relative, LEAST_RATIO / whole, out=relative).mul_(whole)

    def removal_losses(
        self, rank: int, best: Tensor, candidates: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Sum the losses of rows without components of a rank, as ``statistics.removal_losses``.

        ``best`` (B,) is the component of that rank that explains each row best.
        """
        largest, winning_rank = self.summaries[..., 0].max(dim=0)
        winner = torch.nn.functional.one_hot(winning_rank, len(self.summaries)).bool().mT
        # The best of the other ranks, or the second best of the rank that has the best.
        second = torch.where(winner, self.summaries[..., 2], self.summaries[..., 0]).amax(dim=0)
        other = self.summaries[..., 3].amax(dim=0)
        losses = losses_of_rows(largest, second, other, weights)
        # Rows that another rank explains best are masked: zero times infinity is not a number.
        return sum_losses(losses.masked_fill(~winner[rank], 0), best, candidates)


class Exchange(NamedTuple):
    """The link between ranks that hold different components and see the same rows."""

    gather: Callable[[Tensor], Tensor]
    """Takes the tensor of this rank and returns the tensors of all, (R, ...)."""
    rank: int
    most_components: int
    """The largest number of components on a rank."""

    def normalisers(self, summaries: list[RowSummary], parameters: Parameters) -> list[Normaliser]:
        """Exchange the summaries of several sets of rows in one message."""
        mass = parameters.logits.logsumexp(dim=0, keepdim=True)
        message = torch.cat([mass, *(one.values.reshape(-1) for one in summaries)])
        gathered = self.gather(message)
        log_mass, found, first = gathered[:, 0].logsumexp(dim=0), list[Normaliser](), 1
        for one in summaries:
            size = one.values.numel()
            part = gathered[:, first : first + size].view(len(gathered), *one.values.shape)
            first += size
            largest = part[..., 0].amax(dim=0)
            total = (part[..., 1] * (part[..., 0] - largest).exp()).sum(dim=0)
            found.append(Normaliser(largest + total.log(), log_mass, part))
        return found


def summarise_(joint: Tensor, candidates: Tensor | None = None) -> RowSummary:
    """Summarise ``logit_k + log p_k``, (B, C), which becomes ``exp(joint - largest)`` in place."""
    largest, best = joint.max(dim=1)
    more = []
    if candidates is not None:
        second = joint.scatter(1, best.unsqueeze(1), -torch.inf).amax(dim=1)
        more = [second, best_of_others(joint, candidates)]
    total = joint.sub_(largest.unsqueeze(1)).clamp_(min=math.log(LEAST_RATIO)).exp_().sum(dim=1)
    return RowSummary(torch.stack([largest, total, *more], dim=1), best)
