"""Statistics of components that are divided: each place has some of them and all rows of a batch.

What a row says about a component depends on all others by one number, the normaliser. Each place
tells of every row its largest ``log pi_k + log p_k`` and the sum of all relative to it; where the
use of components is watched, also its second best, and its best that is not a candidate for
removal. Weights need not be normalised at a place: their sum is told too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import Workspace, kept
from factormix.core.density import Operands, operands, project, squared
from factormix.core.expectation import Collected, best_of_others
from factormix.core.parameters import Parameters
from factormix.core.screening import Block, Few, blocks, shortlists, sorted_rows
from factormix.core.statistics import Statistics

__all__ = [
    "Exchange",
    "Heard",
    "divided_statistics",
    "hear",
    "here_operands",
    "told",
]

LEAST = 1e-30
"""What a share is at least; see ``log_normaliser``."""


class Exchange(NamedTuple):
    """How what is said at one place reaches all others."""

    gather: Callable[[Tensor], Tensor]
    """Takes what this place says, and returns what each says, (R, ...)."""
    place: int
    most: int
    """The number of components where most are, the same at all places."""


class Heard(NamedTuple):
    """What all places together say of rows."""

    log_total: Tensor
    """``log sum_k exp(logit_k) p_k(x)``, (B,)."""
    log_mass: Tensor
    """``log sum_k exp(logit_k)``, scalar: what the former has to be less to be ``log p(x)``."""
    each: Tensor
    """What each place told, (R, B, 2 or 4)."""

    @property
    def log_prob(self) -> Tensor:
        """``log p(x)``, (B,)."""
        return self.log_total - self.log_mass

    def shares(
        self, relative: Tensor, largest: Tensor, rows: Tensor | slice = slice(None)
    ) -> Tensor:
        """Compute the responsibilities of components here, (m, C), by what ``told`` made of joint.

        ``relative`` (m, C) is used up; ``largest`` (m,) is what it is relative to.
        """
        whole = (largest - self.log_total[rows]).clamp_(min=math.log(LEAST)).exp_().unsqueeze(1)
        # Bounded first: numbers too small for the format would slow down all that follows.
        return torch.maximum(relative, LEAST / whole, out=relative).mul_(whole)

    def losses(
        self, place: int, which: Tensor, candidates: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Sum what rows would lose without components of a place, (2, K); see ``removal_losses``.

        ``which`` (B,) is the component of that place that explains each row best.
        """
        best, who = self.each[..., 0].max(dim=0)
        winner = torch.nn.functional.one_hot(who, len(self.each)).bool().mT
        # The best of the other places, or the second best of the place that has the best.
        second = torch.where(winner, self.each[..., 2], self.each[..., 0]).amax(dim=0)
        other = self.each[..., 3].amax(dim=0)
        losses = torch.nn.functional.softplus(torch.stack([best - second, best - other]))
        if weights is not None:
            losses = losses * weights
        # Zero times infinity is no number, and other places' rows are none of this one's.
        losses = losses.masked_fill(~winner[place], 0)
        sums = losses.new_zeros(2, len(candidates)).index_add_(1, which, losses)
        sums[1].masked_fill_(~candidates, 0)
        return sums


def here_operands(parameters: Parameters) -> Operands:
    """Gather operands for which ``project`` gives ``logit_k + log p_k``, for centred data."""
    ops = operands(parameters, centre=False, diagonal=True)
    return ops._replace(constant=ops.constant + parameters.logits)


def told(joint: Tensor, candidates: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Summarise what components of a place say of rows by ``joint`` (B, C): (B, 2), or (B, 4).

    Return also the best of these components, (B,). In the place of ``joint`` is then its
    exponential, relative to the largest of each row.
    """
    largest, which = joint.max(dim=1)
    more = []
    if candidates is not None:
        second = joint.scatter(1, which.unsqueeze(1), -torch.inf).amax(dim=1)
        more = [second, best_of_others(joint, candidates)]
    total = joint.sub_(largest.unsqueeze(1)).clamp_(min=math.log(LEAST)).exp_().sum(dim=1)
    return torch.stack([largest, total, *more], dim=1), which


def hear(mine: list[Tensor], parameters: Parameters, exchange: Exchange) -> list[Heard]:
    """Tell summaries of rows, (B, 2 or 4) each, in one message, and return what all say."""
    mass = parameters.logits.logsumexp(dim=0, keepdim=True)
    message = torch.cat([mass, *(one.reshape(-1) for one in mine)])
    each = exchange.gather(message)
    log_mass, heard, first = each[:, 0].logsumexp(dim=0), [], 1
    for one in mine:
        part = each[:, first : first + one.numel()].view(len(each), *one.shape)
        first += one.numel()
        largest = part[..., 0].amax(dim=0)
        total = (part[..., 1] * (part[..., 0] - largest).exp()).sum(dim=0)
        heard.append(Heard(largest + total.log(), log_mass, part))
    return heard


def divided_statistics(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None = None,
    *,
    exchange: Exchange,
    candidates: Tensor | None = None,
    few: Few | None = None,
    n_probes: int = 0,
    work: Workspace | None = None,
) -> Statistics:
    """Sum the expected statistics of the components here over a batch x (B, d).

    As ``expected_statistics`` and ``screened_statistics``; the log-likelihood is that of all
    components. ``candidates`` are those among the components here.
    """
    if few is not None:
        return _screened(parameters, x, weights, exchange, candidates, few, n_probes, work)
    squares, ops = squared(x, work), here_operands(parameters)
    joint, Y = project(x, ops, squares, work)
    mine, best = told(joint, candidates)
    (heard,) = hear([mine], parameters, exchange)
    collected = Collected(parameters, x, squares, weights, candidates)
    if candidates is not None:
        collected.losses += heard.losses(exchange.place, best, candidates, weights)
    everything = slice(0, len(x))
    R = heard.shares(joint, mine[:, 0])
    collected.add_shares(everything, heard.log_prob, R, Y, work=work)
    K, _, l = parameters.shape
    return collected.statistics(ops.Gamma_mu.view(K, l))


def _screened(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None,
    exchange: Exchange,
    candidates: Tensor | None,
    few: Few,
    n_probes: int,
    work: Workspace | None,
) -> Statistics:
    """Do so by the components that the screen of this place lets through."""
    screen, logits = few.screen, parameters.logits
    lists = shortlists(x, screen, logits, few.n_candidates)
    order, real = sorted_rows(lists, len(x))
    rows = torch.index_select(x, 0, order, out=kept(work, "sorted", x, len(order), x.shape[1]))
    squares = squared(rows, work)
    # All of them are kept until the normaliser is known.
    found = list(blocks(rows, squares, parameters, screen, logits, lists, work, keep=True))
    mine, best = _told_by_blocks(found, order, len(x), candidates)
    summaries, probes = [mine], slice(0, 0)
    if n_probes:
        step = max(1, len(x) // n_probes)
        probes = slice(step // 2, None, step)
        summaries.append(told(project(x[probes], here_operands(parameters))[0])[0])
    heard, *full = hear(summaries, parameters, exchange)
    used = real.to(x.dtype)
    if weights is not None:
        used *= weights[order]
    collected = Collected(parameters, rows, squares, used, candidates)
    if candidates is not None:
        collected.losses += heard.losses(exchange.place, best, candidates, weights)
    for block in found:
        place = order[block.place]
        R = heard.shares(block.joint, mine[place, 0], place)
        collected.add_shares(block.place, heard.log_prob[place], R, block.Y, block.components, work)
    missed = x.new_zeros(2)
    for probed in full:
        lost = (probed.log_prob - heard.log_prob[probes]).clamp(min=0)
        counted = torch.ones_like(lost) if weights is None else weights[probes]
        missed = torch.stack([lost @ counted, counted.sum()])
    return collected.statistics(screen.Gamma_mu)._replace(missed=missed)


def _told_by_blocks(
    found: list[Block], order: Tensor, n_rows: int, candidates: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Summarise blocks in the order of the batch, (B, 2 or 4), with the best component, (B,)."""
    mine = found[0].joint.new_empty(n_rows, 2 if candidates is None else 4)
    best = torch.empty(n_rows, dtype=torch.long, device=mine.device)
    for block in found:
        some = None if candidates is None else candidates[block.components]
        place = order[block.place]
        mine[place], which = told(block.joint, some)
        best[place] = block.components[which]
    return mine, best
