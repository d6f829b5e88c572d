"""Scores of rows by a mixture whose components are divided among processes.

Every process serves the same rows, evaluates all of its components, and tells of each row what they
say together and what its best one says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from factormix.core import density
from factormix.core.density import Operands
from factormix.core.observed import ObservedOperands
from factormix.core.parameters import Parameters, precise_dtype
from factormix.core.workspace import Workspace
from factormix.data.columns import precise
from factormix.data.sources import Rows
from factormix.data.units import Units
from factormix.training.evaluation import evaluate, joint_log_prob_of, observed_joint_of
from factormix.training.processes import Processes
from factormix.training.threads import team

__all__ = ["divided_mean", "divided_scores"]

MESSAGE_ROWS = 8192
"""Rows of which processes tell each other at once."""

Scored = tuple[Tensor, Tensor, Tensor]
"""Log-likelihoods in working units, the best component of each row, and weights, (B,) each."""


def divided_scores(
    processes: Processes, parameters: Parameters, units: Units, rows: Rows
) -> Iterator[Scored]:
    """Yield scores of rows (n, d) in their order; all processes have to ask for them."""
    edges = torch.tensor([0, *accumulate(processes.counts)])
    mass = parameters.logits.to(precise_dtype(parameters.means.device)).logsumexp(dim=0)
    log_mass = processes.gathered(mass).logsumexp(dim=0)
    for mine in _regrouped(_here(parameters, units, rows, mass)):
        told, weights = mine[:, :3], mine[:, 3]
        each = processes.gathered(told)
        who = each[..., 1].argmax(dim=0)
        component = each[..., 2].gather(0, who.unsqueeze(0)).squeeze(0).long()
        component = component + edges.to(who.device)[who]
        yield each[..., 0].logsumexp(dim=0) - log_mass, component, weights


def divided_mean(processes: Processes, parameters: Parameters, units: Units, rows: Rows) -> float:
    """Compute the mean log-likelihood of rows (n, d) in units of the data, by their weights."""
    total = weight = 0.0
    for scores, _, weights in divided_scores(processes, parameters, units, rows):
        total, weight = total + float(scores @ weights), weight + float(weights.sum())
    return total / weight - units.log_volume


def _here(parameters: Parameters, units: Units, rows: Rows, mass: Tensor) -> Iterator[Tensor]:
    """Yield what components here say of rows, (B, 4): together, at best, which, and the weight."""
    joint_log_prob, partial_joint = joint_log_prob_of(parameters), observed_joint_of(parameters)

    def told(joint: Tensor) -> Sequence[Tensor]:
        together, (best, which) = density.log_normaliser(joint)[0], joint.max(dim=1)
        return [t.to(mass) for t in (together + mass, best + mass, which)]

    def of_rows(x: Tensor, ops: Operands, work: Workspace) -> Sequence[Tensor]:
        return told(joint_log_prob(x, ops, work))

    def of_partial(x: Tensor, missing: Tensor, ops: ObservedOperands) -> Sequence[Tensor]:
        together, best, which = told(partial_joint(x, missing, ops))
        return [together + units.missing_volume(missing).to(together), best, which]

    with team() as threads:
        for weights, parts in evaluate(threads, parameters, units, rows, of_rows, of_partial):
            given = torch.ones_like(parts[0]) if weights is None else precise(weights)
            yield torch.stack([*parts, given.to(mass)], dim=1)


def _regrouped(parts: Iterator[Tensor]) -> Iterator[Tensor]:
    """Put parts together so that every process has the same, (at most ``MESSAGE_ROWS``, 4)."""
    held, count = list[Tensor](), 0
    for part in parts:
        held.append(part)
        count += len(part)
        while count >= MESSAGE_ROWS:
            everything = torch.cat(held)
            yield everything[:MESSAGE_ROWS]
            held, count = [everything[MESSAGE_ROWS:]], count - MESSAGE_ROWS
    if count:
        yield torch.cat(held)
