"""The number of components: which ones go, which ones are split, which ones begin anew.

Nothing is removed unless it was watched: over some ticks, every batch tells what its rows would
lose without each component, and what they would lose without all candidates for removal at once.
The second tells twins from components that nothing can stand in for, such as those of a few rows
far from all others. A component may be too light to show itself in a watch; then its own parameters
tell what its rows would lose."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import Workspace
from factormix.core.averages import Components, Running, precision_form
from factormix.core.density import component_log_prob, joint_operands
from factormix.core.parameters import Parameters
from factormix.core.screening import CandidateSearch
from factormix.core.statistics import Statistics
from factormix.training.distributed import components as placement
from factormix.training.distributed.processes import ALONE, Processes
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

    def of_all(self, processes: Processes, weight: Tensor) -> tuple[Watch, Tensor]:
        """Return what is known of the components of all processes, and their weights, (K,)."""
        if not self.active:
            return self, placement.whole(processes, weight)
        weight, alone, together, candidates = placement.wholes(
            processes, [weight, self.alone, self.together, self.candidates]
        )
        return Watch(candidates, alone, together, self.rows), weight

    def seen(self, statistics: Statistics) -> Watch:
        """Add the losses of a batch."""
        assert statistics.removal is not None
        return Watch(
            self.candidates,
            self.alone + statistics.removal.alone,
            self.together + statistics.removal.together,
            self.rows + statistics.n_samples,
        )


class Population(NamedTuple):
    """The components of a mixture in training, and what is known of their use."""

    running: Running
    parameters: Parameters
    watch: Watch
    changed: Tensor | None = None
    """(n,) numbers of components that were split or made; None where there are none."""


def pruned(
    population: Population, schedule: Schedule, ticks: float, processes: Processes = ALONE
) -> Population:
    """Take away the components that the others can replace, down to K along the schedule."""
    running, parameters, watch = population[:3]
    over = ticks >= schedule.resizing
    if not over and float(watch.rows) < WATCH_TICKS * schedule.tick_rows:
        return population
    seen, weight = watch.of_all(processes, running.weight)
    k, wanted, changed = len(seen.candidates), schedule.components(ticks), None
    gone = dispensable(seen, k - wanted)
    stay = torch.ones_like(seen.candidates)
    stay[gone] = False
    alone = seen.alone[stay]
    if len(gone):
        components = Components.of(running, parameters)
        components = placement.kept(processes, components, stay.nonzero()[:, 0])
        components.weight.div_(weight[stay].sum())
        running, parameters = components.parted()
        if processes.divided:
            # Some came from other processes.
            changed = torch.arange(len(components.weight), device=weight.device)
    if wanted == schedule.n_components:
        return Population(running, parameters, Watch.nothing(alone), changed)
    # Twice as many as will have to go before the next time.
    soon = wanted - schedule.components(ticks + WATCH_TICKS)
    candidates = torch.zeros_like(alone).bool()
    candidates[alone.argsort()[: min(2 * soon, wanted - 1)]] = True
    candidates, alone = (placement.mine(processes, t) for t in (candidates, MEMORY * alone))
    return Population(running, parameters, Watch.begin(candidates, alone), changed)


def grown(
    population: Population,
    schedule: Schedule,
    ticks: float,
    processes: Processes = ALONE,
    *,
    widening: float = 1.0,
    narrowing: float = 1.0,
    bounds: tuple[Tensor, float] | None = None,
) -> Population:
    """Split the heaviest components, up to K along the schedule; see ``split_heaviest``.

    ``bounds`` are those of E, (d,), and of the eigenvalues of M, which halves obey that are
    narrower in all directions.
    """
    running, parameters, watch = population[:3]
    new = schedule.components(ticks) - placement.n_components(processes, len(running.weight))
    if new <= 0:
        return population
    components = Components.of(running, parameters)
    components, target = placement.with_room(processes, components, new)
    changed = split_heaviest(
        components, target, processes, new=True, widening=widening, narrowing=narrowing
    )
    if bounds is not None and widening > 1:
        some = Running(*(t[changed] for t in components[:3]))
        averages, found = precision_form(some, *bounds)
        for whole, part in zip(components, (*averages, *found[2:]), strict=True):
            whole[changed] = part
    return Population(*components.parted(), watch, changed)


def revived(
    population: Population,
    schedule: Schedule,
    ticks: float,
    samples: float,
    unused_weight: float,
    search: CandidateSearch | None = None,
    processes: Processes = ALONE,
    work: Workspace | None = None,
) -> tuple[Population, int]:
    """Give components that are of little use half of the heaviest, after watching them.

    ``samples`` are the rows learned from so far; a component is unused below ``unused_weight``
    times the average weight. Return the population and how many began anew. Averages and
    parameters are changed in place. ``search`` evaluates few components for each row, in the
    memory of ``work``.
    """
    running, parameters, watch = population[:3]
    count, changed = 0, None
    if not schedule.may_replace(ticks):
        weight = running.weight
        return Population(running, parameters, Watch.nothing(weight)), 0
    seen, weight = watch.of_all(processes, running.weight)
    least = unused_weight * weight.mean()
    light = weight < WATCHED * least
    if watch.active:
        pi = None if processes.alone else weight / weight.sum()
        target = expendable(
            seen,
            parameters,
            schedule.pass_rows,
            samples,
            search,
            processes,
            pi,
            weight < least,
            work,
        )
        count = len(target)
        if count:
            components = Components.of(running, parameters)
            changed = split_heaviest(components, target, processes, weight=weight)
            running, parameters = components.parted()
            light[target] = False
    begins = bool(light.any())
    light, weight = placement.mine(processes, light), running.weight
    watch = Watch.begin(light, torch.zeros_like(weight)) if begins else Watch.nothing(weight)
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
    search: CandidateSearch | None = None,
    processes: Processes = ALONE,
    pi: Tensor | None = None,
    among: Tensor | None = None,
    work: Workspace | None = None,
) -> Tensor:
    """Return the numbers of the candidates that are worth less than a new component would be.

    The watched rows must lose little without the candidates, compared with what they would lose
    without the median component. As a light component may have had no chance to be seen, one more
    thing must hold, unless ``OWN_ROWS`` of its rows or ``all_rows``, those of a pass, went by: all
    rows learned from so far, ``samples``, would lose less than one nat for each of its parameters.
    That is what parameters gain by fitting themselves to chance (Akaike's criterion). ``pi`` (K,)
    are the weights of the components of all processes, where there are several; ``among`` (K,) is
    true for those about which is asked.
    """
    pi, (_, d, l) = parameters.log_weights.exp() if pi is None else pi, parameters.shape
    known = (watch.rows * pi >= OWN_ROWS) | (watch.rows >= all_rows)
    worthless = watch.candidates & (watch.together <= LITTLE * watch.alone.median())
    if among is not None:
        worthless &= among
    # All processes must ask, or none.
    unknown = processes.agreed(worthless & ~known)
    if bool(unknown.any()):
        loss = expected_loss(parameters, watch.candidates, search, processes, pi, unknown, work)
        known |= min(samples, all_rows) * loss <= d * (l + 2)
    return (worthless & known).nonzero()[:, 0]


def expected_loss(
    parameters: Parameters,
    candidates: Tensor,
    search: CandidateSearch | None = None,
    processes: Processes = ALONE,
    pi: Tensor | None = None,
    asked: Tensor | None = None,
    work: Workspace | None = None,
) -> Tensor:
    """Estimate what a row loses on average without all candidates, (K,), 0 for the others.

    ``pi_k [log p(mu_k) - log p'(mu_k)]``, where p' is the mixture without the candidates (K,). It
    is estimated for those ``asked`` about, (K,), or all candidates.
    """
    # What few components say of a row depends on the rows around it: all of them, always.
    asked = candidates if asked is None or search is not None else asked
    here = placement.mine(processes, candidates)
    means = parameters.means[placement.mine(processes, asked)]
    if processes.divided:
        counts = [int(part.sum()) for part in torch.split(asked, processes.counts)]
        means = placement.joined(processes, means, counts)
    if search is not None:
        found = search.compare_without(means, parameters, here, work)
    else:
        joint = component_log_prob(means, joint_operands(parameters))
        without = joint.masked_fill(here, -math.inf)
        found = torch.stack([joint.logsumexp(dim=1), without.logsumexp(dim=1)], dim=1)
    if processes.divided:
        # Weights are normalised among the components here.
        found = found + parameters.logits.logsumexp(dim=0)
        found = processes.gathered(found).logsumexp(dim=0)
    loss = processes.agreed(found[:, 0] - found[:, 1])
    pi = parameters.log_weights.exp() if pi is None else pi
    return torch.zeros_like(pi).masked_scatter(asked, pi[asked] * loss)


def split_heaviest(
    components: Components,
    target: Tensor,
    processes: Processes = ALONE,
    *,
    new: bool = False,
    widening: float = 1.0,
    narrowing: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Give each target component half of one of the heaviest, in place.

    Return the numbers of all components here that changed, (n,). Targets may be ``new``, without
    anything that they were before. ``weight`` (K,) are the weights in all processes, if known.

    The halves stand half a standard deviation to each side along the strongest loading, or along
    the noise where there is no loading. That loading is ``narrowing`` times as long in them: where
    they are to be split again before rows have told them much, it is then along another one. With
    ``widening`` above one they stay where they are: one is wider by this factor, the other
    narrower.
    """
    weight = placement.whole(processes, components.weight) if weight is None else weight
    weight, changed = weight.clone(), list[Tensor]()
    while len(target):
        free = weight.clone()
        free[target] = -1
        # Nothing light is split: its half would be unused again.
        n = min(len(target), int((free >= 0.5 * free.max()).sum()))
        if free.max() < 0:
            break
        source, taken, target = free.topk(n).indices, target[:n], target[n:]
        if new:
            # Whichever of them has which number is all the same, and few need be sent.
            taken = placement.near(processes, source, taken)
        weight[source] *= 0.5
        weight[taken] = weight[source]
        changed += _halve(components, source, taken, processes, widening, narrowing)
    return torch.cat(changed) if changed else target[:0]


def _halve(
    components: Components,
    source: Tensor,
    taken: Tensor,
    processes: Processes,
    widening: float,
    narrowing: float,
) -> list[Tensor]:
    """Give components (n,) half of others (n,), in place; return the numbers here of both."""
    from_here, to_here = (placement.local(processes, numbers) for numbers in (source, taken))
    components.weight[from_here] *= 0.5
    owners = placement.in_line(processes, processes.counts) if processes.divided else [taken]
    halves = placement.fetched(
        processes, components, [source[torch.isin(taken, line.to(taken))] for line in owners]
    )
    for tensor, half in zip(components, halves, strict=True):
        tensor[to_here] = half
    if widening > 1:
        _widen(components, from_here, widening)
        _widen(components, to_here, 1 / widening)
    else:
        _part(components, from_here, 0.5, narrowing)
        _part(components, to_here, -0.5, narrowing)
    return [from_here, to_here]


def _widen(components: Components, index: Tensor, factor: float) -> None:
    """Multiply the deviations of components (n,) in all directions by a factor, in place."""
    components.Theta[index, 1:] *= factor
    components.V[index] *= factor**2
    components.E[index] /= factor**2
    # Gamma' E^-1 Gamma, and so M, is what it was.
    components.Gamma[index] /= factor


def _part(components: Components, index: Tensor, way: float, narrowing: float) -> None:
    """Move components (n,) so many deviations along their strongest loadings, in place.

    These loadings become ``narrowing`` times as long.
    """
    Theta, _, _, E, Gamma, M = components
    noise = E[index].rsqrt()
    if not M.shape[1]:
        Theta[index, 0] += way * noise
        return
    strongest = M[index].argmin(dim=1)
    loading = Theta[index, 1 + strongest]
    there = (loading != 0).any(dim=1, keepdim=True)
    Theta[index, 0] += way * torch.where(there, loading, noise)
    if narrowing < 1:
        before = M[index, strongest]
        # Lambda' E Lambda is 1 / M - 1.
        after = before / (before + narrowing**2 * (1 - before))
        Theta[index, 1 + strongest] = narrowing * loading
        M[index, strongest] = after
        # Gamma is E Lambda M^(1/2).
        Gamma.mT[index, strongest] *= narrowing * (after / before).sqrt().unsqueeze(1)
