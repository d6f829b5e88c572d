"""The number of components: which ones go, which ones are split, which ones begin anew.

Nothing is removed unless it was watched: over some ticks, every batch tells what its rows would
lose without each component, and what they would lose without all candidates for removal at once.
The second tells twins from components that nothing can stand in for, such as those of a few rows
far from all others. A component may be too light to show itself in a watch; then its own parameters
tell what its rows would lose.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.density import component_log_prob, joint_operands
from factormix.core.parameters import Parameters
from factormix.core.screened import Few
from factormix.core.statistics import Components, Running, Statistics
from factormix.training.solvers.schedule import Schedule

__all__ = [
    "Population",
    "Watch",
    "dispensable",
    "expected_loss",
    "expendable",
    "grown",
    "pruned",
    "revived",
    "split_heaviest",
]

OWN_ROWS = 10.0
"""Rows of its own that a component must have had a chance to see to be judged by them alone."""
LITTLE = 0.1
"""Share of the median component's loss below which another is worth no more than a new one."""
WATCHED = 2.0
"""Times the weight of an unused component below which one is watched, so that it is known by the
time it is unused."""
WATCH_TICKS = 2.0
"""Ticks for which components in excess are watched before some of them go."""
MEMORY = 0.6
"""Share that earlier watches keep in what is known of the components in excess."""


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


class Population(NamedTuple):
    """The components of a mixture in training, and what is known of their use."""

    running: Running
    parameters: Parameters
    watch: Watch
    changed: Tensor | None = None
    """(n,) numbers of components that were split or made; None where there are none."""


def pruned(population: Population, schedule: Schedule, ticks: float) -> Population:
    """Take away the components that the others can replace, down to K along the schedule."""
    running, parameters, watch = population[:3]
    over = ticks >= schedule.resizing
    if not over and float(watch.rows) < WATCH_TICKS * schedule.tick_rows:
        return population
    k, wanted = len(watch.candidates), schedule.components(ticks)
    gone = dispensable(watch, k - wanted)
    stay = torch.ones_like(watch.candidates)
    stay[gone] = False
    alone = watch.alone[stay]
    if len(gone):
        components = Components.of(running, parameters).take(stay.nonzero()[:, 0])
        components.weight.div_(components.weight.sum())
        running, parameters = components.parted()
    if wanted == schedule.n_components:
        return Population(running, parameters, Watch.nothing(alone))
    # Twice as many as will have to go before the next time.
    soon = wanted - schedule.components(ticks + WATCH_TICKS)
    candidates = torch.zeros_like(alone).bool()
    candidates[alone.argsort()[: min(2 * soon, wanted - 1)]] = True
    return Population(running, parameters, Watch.begin(candidates, MEMORY * alone))


def grown(population: Population, schedule: Schedule, ticks: float) -> Population:
    """Split the heaviest components, up to K along the schedule."""
    running, parameters, watch = population[:3]
    k = len(running.weight)
    new = schedule.components(ticks) - k
    if new <= 0:
        return population
    components = Components.of(running, parameters).with_room(new)
    target = torch.arange(k, k + new, device=components.weight.device)
    changed = split_heaviest(components, target)
    return Population(*components.parted(), watch, changed)


def revived(
    population: Population,
    schedule: Schedule,
    ticks: float,
    samples: float,
    unused_weight: float,
    few: Few | None = None,
) -> tuple[Population, int]:
    """Give components that are of little use half of the heaviest, after watching them.

    ``samples`` are the rows learned from so far; a component is unused below ``unused_weight``
    times the average weight. Return the population and how many began anew. Averages and
    parameters are changed in place. ``few`` looks at few components for each row.
    """
    running, parameters, watch = population[:3]
    weight, count, changed = running.weight, 0, None
    if not schedule.may_replace(ticks):
        return Population(running, parameters, Watch.nothing(weight)), 0
    least = unused_weight * weight.mean()
    light = weight < WATCHED * least
    if watch.active:
        target = expendable(watch, parameters, schedule.pass_rows, samples, few)
        target = target[weight[target] < least]
        count = len(target)
        if count:
            components = Components.of(running, parameters)
            changed = split_heaviest(components, target)
            running, parameters = components.parted()
            light[target] = False
    watch = Watch.begin(light, torch.zeros_like(weight)) if light.any() else Watch.nothing(weight)
    return Population(running, parameters, watch, changed), count


def dispensable(watch: Watch, n: int) -> Tensor:
    """Return the numbers (n,) of the components whose removal costs least.

    Candidates come first, then the others.
    """
    order = torch.argsort(watch.alone + watch.together, stable=True)
    first = watch.candidates[order]
    return torch.cat([order[first], order[~first]])[:n]


def expendable(
    watch: Watch,
    parameters: Parameters,
    all_rows: float,
    samples: float,
    few: Few | None = None,
) -> Tensor:
    """Return the numbers of the candidates that are worth less than a new component would be.

    The watched rows must lose little without the candidates, compared with what they would lose
    without the median component. As a light component may have had no chance to be seen, one more
    thing must hold, unless ``OWN_ROWS`` of its rows or ``all_rows``, those of a pass, went by: all
    rows learned from so far, ``samples``, would lose less than one nat for each of its parameters.
    That is what parameters gain by fitting themselves to chance (Akaike's criterion).
    """
    weight, (_, d, l) = parameters.log_weights.exp(), parameters.shape
    known = (watch.rows * weight >= OWN_ROWS) | (watch.rows >= all_rows)
    loss = expected_loss(parameters, watch.candidates, few)
    known |= min(samples, all_rows) * loss <= d * (l + 2)
    little = watch.together <= LITTLE * watch.alone.median()
    return (watch.candidates & known & little).nonzero()[:, 0]


def expected_loss(parameters: Parameters, candidates: Tensor, few: Few | None = None) -> Tensor:
    """Estimate what a row loses on average without all candidates, (K,), 0 for the others.

    ``pi_k [log p(mu_k) - log p'(mu_k)]``, where p' is the mixture without the candidates (K,).
    """
    if few is not None:
        means = parameters.means[candidates]
        found = few.with_and_without(means, parameters, candidates)
        loss = found[:, 0] - found[:, 1]
    else:
        joint = component_log_prob(parameters.means[candidates], joint_operands(parameters))
        without = joint.masked_fill(candidates, -math.inf)
        loss = joint.logsumexp(dim=1) - without.logsumexp(dim=1)
    weight = parameters.log_weights.exp()
    return torch.zeros_like(weight).masked_scatter(candidates, weight[candidates] * loss)


def split_heaviest(components: Components, target: Tensor) -> Tensor:
    """Give each target component half of one of the heaviest, in place.

    Return the numbers of all components that changed, (n,).

    The halves stand half a standard deviation to each side along the first loading, or along the
    noise where there is no loading.
    """
    Theta, _, weight, E = components[:4]
    changed = []
    while len(target):
        free = weight.clone()
        free[target] = -1
        # Nothing light is split: its half would be unused again.
        n = min(len(target), int((free >= 0.5 * free.max()).sum()))
        if free.max() < 0:
            break
        source, taken, target = free.topk(n).indices, target[:n], target[n:]
        apart = 0.5 * E[source].rsqrt()
        if Theta.shape[1] > 1:
            first = Theta[source, 1]
            apart = torch.where((first != 0).any(dim=1, keepdim=True), 0.5 * first, apart)
        weight[source] *= 0.5
        for tensor in components:
            tensor[taken] = tensor[source]
        Theta[source, 0] += apart
        Theta[taken, 0] -= apart
        changed += [source, taken]
    return torch.cat(changed) if changed else target[:0]
