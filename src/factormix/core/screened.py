"""What a mixture of very many components says of a batch, by few components for each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.density import Operands, log_normaliser, log_prob, operands, project, squared
from factormix.core.expectation import Collected
from factormix.core.parameters import Parameters
from factormix.core.screening import Screen
from factormix.core.shortlists import Shortlists, shortlists
from factormix.core.statistics import Statistics
from factormix.core.workspace import Workspace, kept

__all__ = ["Block", "Few", "Found", "blocks", "screened_statistics", "sorted_rows"]


class Block(NamedTuple):
    """Rows that are near each other, and what their components say of them."""

    place: slice
    """Where the rows lie in the sorted batch."""
    components: Tensor
    """(C,)."""
    joint: Tensor
    """``log pi_k + log p_k(x)``, (m, C)."""
    Y: Tensor
    """``Gamma_k' (x - mu_k)``, (m, C, l)."""


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
        rows = torch.index_select(x, 0, order, out=kept(work, "sorted", x, len(order), x.shape[1]))
        squares = squared(rows, work)
        for block in blocks(rows, squares, parameters, self.screen, log_weights, lists, work):
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
    rows = torch.index_select(x, 0, order, out=kept(work, "sorted", x, len(order), x.shape[1]))
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


def blocks(
    x: Tensor,
    squares: Tensor,
    parameters: Parameters,
    screen: Screen,
    log_weights: Tensor,
    lists: Shortlists,
    work: Workspace | None = None,
    *,
    keep: bool = False,
) -> Iterator[Block]:
    """Evaluate every block of the sorted rows x and their squares, both (n * m, d), exactly.

    What a block holds is valid until the next one if there is a workspace, unless it is to be kept.
    """
    m = lists.rows.shape[1]
    for i, components in enumerate(lists.components):
        place = slice(i * m, (i + 1) * m)
        ops = _some_operands(parameters, screen, log_weights, components, work)
        joint, Y = project(x[place], ops, squares[place], None if keep else work)
        yield Block(place, components, joint, Y)


def _some_operands(
    parameters: Parameters,
    screen: Screen,
    log_weights: Tensor,
    index: Tensor,
    work: Workspace | None,
) -> Operands:
    """Gather operands of some components (C,), for which ``project`` gives ``log pi + log p``."""
    _, mu, E, Gamma, M = parameters
    (_, d, l), C = parameters.shape, len(index)
    some_E = torch.index_select(E, 0, index, out=kept(work, "some E", E, C, d))
    some_mu = torch.index_select(mu, 0, index, out=kept(work, "some E mu", E, C, d))
    rows = Gamma.mT.reshape(len(E), l * d)
    some_Gamma = torch.index_select(rows, 0, index, out=kept(work, "some Gamma", E, C, l * d))
    E_mu = torch.mul(some_mu, some_E, out=None if work is None else some_mu)
    weights = log_weights[index]
    return Operands(
        None,
        some_E,
        E_mu,
        some_Gamma.view(C * l, d),
        screen.Gamma_mu[index].view(C * l),
        screen.constant[index] + weights,
        weights,
        M[index],
    )
