"""What a mixture of very many components says of a batch, by few components for each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.density import log_normaliser, log_prob, operands, squared
from factormix.core.expectation import Collected
from factormix.core.parameters import Parameters
from factormix.core.screening import Block, Screen, Shortlists, blocks, shortlists
from factormix.core.statistics import Statistics
from factormix.core.workspace import Workspace

__all__ = ["Few", "Found", "screened_statistics", "sorted_rows"]


class Found(NamedTuple):
    """What the evaluated components say of each row."""

    log_prob: Tensor
    """``log p(x)`` without the components that were left out, (B,)."""
    component: Tensor
    """The most probable component, (B,)."""
    Y: Tensor
    """``Gamma_k' (x - mu_k)`` of that component, (B, l)."""


class Few(NamedTuple):
    """A screen, and how many components it lets through."""

    screen: Screen
    n_candidates: int

    def best(self, x: Tensor, parameters: Parameters, work: Workspace | None = None) -> Found:
        """Evaluate the components that the screen chooses, for rows x (B, d)."""
        l = parameters.shape[2]
        found = Found(x.new_empty(len(x)), x.new_empty(len(x)).long(), x.new_empty(len(x), l))
        for place, block in self._each(x, parameters, work):
            which = block.joint.argmax(dim=1)
            found.log_prob[place] = log_normaliser(block.joint)[0]
            found.component[place] = block.components[which]
            found.Y[place] = block.Y[torch.arange(len(which), device=x.device), which]
        return found

    def with_and_without(self, x: Tensor, parameters: Parameters, gone: Tensor) -> Tensor:
        """Compute ``log p(x)`` of rows x (B, d), and that without components, (B, 2).

        Those for which gone (K,) is true are left out; minus infinity where nothing else was
        looked at.
        """
        found = x.new_empty(len(x), 2)
        for place, block in self._each(x, parameters):
            without = block.joint.masked_fill(gone[block.components], -torch.inf)
            found[place, 0] = block.joint.logsumexp(dim=1)
            found[place, 1] = without.logsumexp(dim=1)
        return found

    def _each(
        self, x: Tensor, parameters: Parameters, work: Workspace | None = None
    ) -> Iterator[tuple[Tensor, Block]]:
        """Give every block with the numbers of its rows, (m,)."""
        log_weights = parameters.log_weights
        lists = shortlists(x, self.screen, log_weights, self.n_candidates)
        order, _ = sorted_rows(lists, len(x))
        rows = x[order]
        for block in blocks(rows, squared(rows), parameters, self.screen, log_weights, lists, work):
            # Rows that fill a block are copies of a real one, which they write again.
            yield order[block.place], block


def screened_statistics(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None = None,
    *,
    few: Few,
    candidates: Tensor | None = None,
    n_probes: int = 0,
    work: Workspace | None = None,
) -> Statistics:
    """Sum the expected statistics over a batch x (B, d), each row by the components of its block.

    As ``expected_statistics``, but for the components that the screen leaves out. ``n_probes`` rows
    are evaluated in full too, to tell what that costs.
    """
    log_weights, screen = parameters.log_weights, few.screen
    lists = shortlists(x, screen, log_weights, few.n_candidates)
    order, real = sorted_rows(lists, len(x))
    rows = x[order]
    squares = squared(rows, work)
    used = real.to(x.dtype)
    if weights is not None:
        used *= weights[order]
    collected = Collected(parameters, rows, squares, used, candidates)
    for block in blocks(rows, squares, parameters, screen, log_weights, lists, work):
        collected.add(block.place, block.joint, block.Y, block.components, work)
    statistics = collected.statistics(screen.Gamma_mu)
    missed = x.new_zeros(2)
    if n_probes:
        scores = torch.cat(collected.log_likelihoods)
        missed = _missed(rows, scores, used, parameters, n_probes)
    return statistics._replace(missed=missed)


def _missed(
    rows: Tensor, scores: Tensor, used: Tensor, parameters: Parameters, n_probes: int
) -> Tensor:
    """Evaluate a few of the sorted rows in full: what they lost, and their weight, (2,)."""
    step = max(1, len(rows) // n_probes)
    probes = slice(step // 2, None, step)
    full = log_prob(rows[probes], operands(parameters, centre=False, diagonal=True))
    lost = (full - scores[probes]).clamp(min=0)
    return torch.stack([lost @ used[probes], used[probes].sum()])


def sorted_rows(lists: Shortlists, n_rows: int) -> tuple[Tensor, Tensor]:
    """Return the rows of all blocks in one sequence, (n * m,), and which of them are real."""
    order = lists.rows.view(-1)
    return order.clamp(max=n_rows - 1), order < n_rows
