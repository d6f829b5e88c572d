"""What a mixture of very many components says of a batch, by few components for each row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.density import log_prob, operands, squared
from factormix.core.expectation import Collected
from factormix.core.parameters import Parameters, factor_rows
from factormix.core.screening import Screen
from factormix.core.shortlists import Shortlists, shortlists
from factormix.core.statistics import Statistics
from factormix.core.workspace import Workspace, kept

__all__ = ["Block", "Few", "Found", "blocks", "screened_statistics", "sorted_rows"]

ASKED = 4096
"""Rows at a time, where there may be any number of them."""
GATHERED = 1 << 23
"""Elements of a few components, whose parameters are gathered at a time."""
PROBED = 1 << 22
"""Elements of the means of a few components, by which rows in full are evaluated at a time."""


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
        l, parts = parameters.shape[2], list[Found]()
        lists = shortlists(x, self.screen, parameters.log_weights, self.n_candidates)
        for block in self._each(x, parameters, lists, work):
            joint, Y = block.joint, block.Y
            best, which = joint.max(dim=1)
            # As ``log_normaliser``, but nothing else needs the joint or the shares.
            shares = joint.sub_(best.unsqueeze(1)).clamp_(min=math.log(1e-30)).exp_()
            parts.append(
                Found(
                    shares.sum(dim=1).log_().add_(best),
                    torch.index_select(block.components, 0, which),
                    Y.gather(1, which.view(-1, 1, 1).expand(-1, 1, l)).squeeze(1),
                )
            )
        return Found(*(_in_order(torch.cat(t), lists, len(x)) for t in zip(*parts, strict=True)))

    def with_and_without(
        self, x: Tensor, parameters: Parameters, gone: Tensor, work: Workspace | None = None
    ) -> Tensor:
        """Compute ``log p(x)`` of rows x (B, d), and that without components, (B, 2).

        Those for which gone (K,) is true are left out; minus infinity where nothing else was
        looked at. Arrays of components lie in ``work``.
        """
        log_weights, whole = parameters.log_weights, list[Tensor]()
        # They may be far more than those of a batch: the workspace is for components alone.
        for part in torch.split(x, ASKED):
            lists, found = shortlists(part, self.screen, log_weights, self.n_candidates), []
            rows = part[sorted_rows(lists, len(part))[0]]
            squares = rows.square()
            for block in blocks(rows, squares, parameters, self.screen, log_weights, lists, work):
                without = block.joint.masked_fill(gone[block.components], -torch.inf)
                found.append(torch.stack([block.joint, without], dim=1).logsumexp(dim=2))
            whole.append(_in_order(torch.cat(found), lists, len(part)))
        return torch.cat(whole)

    def _each(
        self,
        x: Tensor,
        parameters: Parameters,
        lists: Shortlists,
        work: Workspace | None = None,
    ) -> Iterator[Block]:
        """Evaluate every block of rows x (B, d)."""
        order, _ = sorted_rows(lists, len(x))
        rows = torch.index_select(x, 0, order, out=kept(work, "sorted", x, len(order), x.shape[1]))
        squares, log_weights = squared(rows, work), parameters.log_weights
        return blocks(rows, squares, parameters, self.screen, log_weights, lists, work)


def _in_order(sorted_values: Tensor, lists: Shortlists, n_rows: int) -> Tensor:
    """Bring what blocks say of their rows, (n * m, ...), into the order of the batch, (B, ...)."""
    whole = torch.empty_like(sorted_values)
    # Each row has a number of its own, and those that fill blocks have the last ones.
    return whole.index_copy_(0, lists.rows.view(-1), sorted_values)[:n_rows]


def screened_statistics(
    parameters: Parameters,
    x: Tensor,
    weights: Tensor | None = None,
    *,
    few: Few,
    candidates: Tensor | None = None,
    n_probes: int = 0,
    work: Workspace | None = None,
    finish: bool = True,
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
    statistics = collected.statistics(screen.Gamma_mu, finish=finish)
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
    full = _in_full(rows[probes], parameters)
    lost = (full - scores[probes]).clamp(min=0)
    return torch.stack([lost @ used[probes], used[probes].sum()])


def _in_full(rows: Tensor, parameters: Parameters) -> Tensor:
    """Compute ``log p`` of rows (n, d) by all components, (n,), a part of them at a time."""
    K, d, _ = parameters.shape
    found, size = list[Tensor](), max(1, PROBED // d)
    for first in range(0, K, size):
        some = Parameters(*(t[first : first + size] for t in parameters))
        ops = operands(some, centre=False, diagonal=True)
        # Weights are normalised among the components of a part.
        found.append(log_prob(rows, ops) + some.logits.logsumexp(dim=0))
    return torch.stack(found).logsumexp(dim=0) - parameters.logits.logsumexp(dim=0)


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
    m, constant = lists.rows.shape[1], screen.constant + log_weights
    (_, d, l), own = parameters.shape, None if keep else work
    size = max(1, GATHERED // (d * (l + 2)))
    for i, components in enumerate(lists.components):
        place, found = slice(i * m, (i + 1) * m), []
        for few in torch.split(components, size):
            some = _gathered(parameters, screen, constant, few, work)
            # What lies in the workspace does so until the next few are evaluated.
            here = own if len(few) == len(components) else None
            found.append(_evaluated(x[place], squares[place], some, here))
        joint, Y = found[0] if len(found) == 1 else map(_joined, zip(*found, strict=True))
        yield Block(place, components, joint, Y)


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """Join what some components say and what others say, along the axis of components."""
    return torch.cat(parts, dim=1)


class _Some(NamedTuple):
    """What rows are multiplied by for some components, as ``Operands``, each factor by itself."""

    E: Tensor
    """(C, d)."""
    E_mu: Tensor
    """(C, d)."""
    Gamma: Tensor
    """(l * C, d): the first factors of all, then the second ones."""
    Gamma_mu: Tensor
    """(l * C,)."""
    constant: Tensor
    """(C,)."""


def _gathered(
    parameters: Parameters,
    screen: Screen,
    constant: Tensor,
    index: Tensor,
    work: Workspace | None,
) -> _Some:
    """Gather what some components (C,) are evaluated by."""
    _, mu, E, Gamma, _ = parameters
    (_, d, l), C = parameters.shape, len(index)
    some_E = torch.index_select(E, 0, index, out=kept(work, "some E", E, C, d))
    some_mu = torch.index_select(mu, 0, index, out=kept(work, "some E mu", E, C, d))
    numbers = (index * l + torch.arange(l, device=index.device).unsqueeze(1)).view(-1)
    some_Gamma = torch.index_select(
        factor_rows(Gamma), 0, numbers, out=kept(work, "some Gamma", E, l * C, d)
    )
    return _Some(
        some_E,
        torch.mul(some_mu, some_E, out=None if work is None else some_mu),
        some_Gamma,
        torch.index_select(screen.Gamma_mu.reshape(-1), 0, numbers),
        torch.index_select(constant, 0, index),
    )


def _evaluated(
    x: Tensor, squares: Tensor, some: _Some, work: Workspace | None
) -> tuple[Tensor, Tensor]:
    """Compute ``log pi_k + log p_k(x)``, (m, C), and Y, (m, C, l), as ``density.project``."""
    m, C, l = len(x), len(some.E), len(some.Gamma) // len(some.E)
    joint = torch.addmm(some.constant, squares, some.E.mT, alpha=-0.5).addmm_(x, some.E_mu.mT)
    if l == 0:
        return joint, x.new_zeros(m, C, 0)
    Y = torch.addmm(
        some.Gamma_mu, x, some.Gamma.mT, beta=-1, out=kept(work, "Y", x, m, l * C)
    ).view(m, l, C)
    # Each factor lies by itself, so that these passes go through memory in its order.
    for y in Y.unbind(dim=1):
        joint.addcmul_(y, y, value=0.5)
    return joint, Y.mT
