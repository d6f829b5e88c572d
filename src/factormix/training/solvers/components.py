"""The number of components: which ones go, which ones are split, which ones begin anew; and ranks.

A component is watched before it is removed. Over some ticks, every batch sums up the
log-likelihood that its rows would lose without each component, and without all candidates for
removal at once. The second sum distinguishes twins from components that nothing can replace, such
as a component of a few rows far from all others. A component may be too light to meet a row of its
own during a watch. Its parameters then give the loss to expect.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.arrays import CACHE_ELEMENTS, Workspace, slice_rows
from factormix.core.averages import (
    Averages,
    Components,
    prediction_widths,
    rotate_averages,
    to_logits,
)
from factormix.core.density import component_log_prob, joint_operands
from factormix.core.noise import Noise
from factormix.core.parameters import Parameters
from factormix.core.ranks import factor_gains, select_factors, switch_off_, trim
from factormix.core.screening import CandidateSearch
from factormix.core.statistics import ALIGNMENT, Statistics
from factormix.training.distributed.communicator import SINGLE, Communicator
from factormix.training.solvers.schedule import Growth, Schedule

UNDECIDED = 0.5
"""Share of the factors without support that stay for another look. If only factors above chance
stay, components that have met few of their rows so far lose factors for good: of the ranks in
``benchmarks/activations_manifolds.py``, one pass, 92% instead of 97% are right."""


class Watch(NamedTuple):
    """The cost of removing components, summed over the rows since the watch began.

    All tensors have length 0 while nothing is watched.
    """

    candidates: Tensor
    """(K,), true for candidates for removal."""
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
        """Begin to watch, with candidates (K,) and the losses known from before, (K,)."""
        return cls(candidates, alone.clone(), torch.zeros_like(alone), alone.new_zeros(1))

    @property
    def active(self) -> bool:
        """Whether anything is watched."""
        return len(self.candidates) > 0

    def gather(self, communicator: Communicator, weight: Tensor) -> tuple[Watch, Tensor]:
        """Return the watch over the components of all processes, and their weights, (K,)."""
        if not self.active:
            return self, communicator.components.gather(weight)
        candidates, alone, together, weight = map(
            communicator.components.gather, (*self[:3], weight)
        )
        return Watch(candidates, alone, together, self.rows), weight

    def add(self, statistics: Statistics) -> Watch:
        """Add the losses of a batch."""
        assert statistics.removal is not None
        return Watch(
            self.candidates,
            self.alone + statistics.removal[0],
            self.together + statistics.removal[1],
            self.rows + statistics.n_samples,
        )


class Population(NamedTuple):
    """The components of a mixture in training, and the watch over them."""

    averages: Averages
    parameters: Parameters
    watch: Watch
    changed: Tensor | None = None
    """(n,) numbers of components that were split or made; None where there are none."""


class Context(NamedTuple):
    """The state of the run in which components are judged."""

    schedule: Schedule
    ticks: float
    samples: float = 0.0
    """Rows learned from so far."""
    communicator: Communicator = SINGLE
    search: CandidateSearch | None = None
    """A screen that evaluates few components for each row."""
    work: Workspace | None = None
    noise: Noise = Noise()


def prune(population: Population, context: Context) -> Population:
    """Remove the components that the others can replace, down to K along the schedule."""
    averages, parameters, watch = population[:3]
    schedule, ticks, communicator = context.schedule, context.ticks, context.communicator
    pruning = schedule.pruning
    over = ticks >= schedule.resizing
    if not over and float(watch.rows) < pruning.watch_ticks * schedule.tick_rows:
        return population
    seen, weight = watch.gather(communicator, averages.weight)
    k, wanted, changed = len(seen.candidates), schedule.components(ticks), None
    gone = rank_by_loss(seen)[: k - wanted]
    stay = torch.ones_like(seen.candidates)
    stay[gone] = False
    alone = seen.alone[stay]
    if len(gone):
        components = Components.of(averages, parameters)
        components, changed = communicator.components.keep(components, stay.nonzero()[:, 0])
        components.weight.div_(weight[stay].sum())
        averages, parameters = components.split()
    if wanted == schedule.n_components:
        return Population(averages, parameters, Watch.nothing(alone), changed)
    # Twice the number that must go before the next time.
    soon = wanted - schedule.components(ticks + pruning.watch_ticks)
    candidates = torch.zeros_like(alone).bool()
    candidates[alone.argsort()[: min(2 * soon, wanted - 1)]] = True
    known = pruning.memory * alone
    candidates, alone = (communicator.components.select(t) for t in (candidates, known))
    return Population(averages, parameters, Watch.begin(candidates, alone), changed)


def grow(
    population: Population, context: Context, bounds: tuple[Tensor, float] | None = None
) -> Population:
    """Split the heaviest components, up to K along the schedule; see ``split_heaviest``.

    ``bounds`` are the bound on E, (d,), and the floor of the eigenvalues of M. A half that is
    narrower in all directions obeys them.
    """
    (averages, parameters, watch), growth = population[:3], context.schedule.growth
    communicator = context.communicator
    k = communicator.components.count(len(averages.weight))
    new = context.schedule.components(context.ticks) - k
    if new <= 0:
        return population
    components = Components.of(averages, parameters)
    components, target = communicator.components.grow(components, new)
    changed = split_heaviest(components, target, communicator, new=True, growth=growth)
    if bounds is not None and growth.widening > 1:
        some = Averages(*(t[changed] for t in components[:3]))
        averages, found = rotate_averages(some, *bounds)
        for whole, part in zip(components, (*averages, *found[2:]), strict=True):
            whole[changed] = part
    return Population(*components.split(), watch, changed)


def replace_unused(population: Population, context: Context) -> tuple[Population, int]:
    """Replace components of little use by halves of the heaviest, after watching them.

    Return the population and how many began anew. Averages and parameters change in place.
    """
    averages, parameters, watch = population[:3]
    communicator, replacement = context.communicator, context.schedule.replacement
    count, changed = 0, None
    if not context.schedule.may_replace(context.ticks):
        return Population(averages, parameters, Watch.nothing(averages.weight)), 0
    seen, weight = watch.gather(communicator, averages.weight)
    least = replacement.unused_weight * weight.mean()
    light = weight < replacement.watched * least
    if watch.active:
        pi = parameters.log_weights.exp() if communicator.is_single else weight / weight.sum()
        target = find_expendable(seen, parameters, context, pi, weight < least)
        count = len(target)
        if count:
            components = Components.of(averages, parameters)
            changed = split_heaviest(components, target, communicator, weight=weight)
            averages, parameters = components.split()
            light[target] = False
    begins = bool(light.any())
    light, weight = communicator.components.select(light), averages.weight
    watch = Watch.begin(light, torch.zeros_like(weight)) if begins else Watch.nothing(weight)
    return Population(averages, parameters, watch, changed), count


def keep_supported(
    averages: Averages,
    parameters: Parameters,
    n_rows: float,
    bounds: tuple[Tensor, float],
    noise: Noise,
    communicator: Communicator,
    *,
    last: bool,
    widen: bool,
) -> tuple[Averages, Parameters]:
    """Switch off the factors that the rows do not support, and give up their memory, in place.

    ``n_rows`` is the number of rows behind the averages, ``bounds`` are the bound on E, (d,), and
    the floor of the eigenvalues of M. ``widen`` makes noise variances predict new rows. Weak
    factors gain support only when all rows have come and the factors have grown. So the better half
    of the factors without support stays, unless this is the ``last`` decision.
    """
    weight, M = averages.weight, parameters.latent_variances
    widths = prediction_widths(weight, M, n_rows, noise)
    # Processors may round differently, and all must keep the same factors.
    gains = communicator.agree(factor_gains(averages, bounds[0], noise, widths))
    undecided = 0.0 if last else UNDECIDED
    kept = select_factors(gains, weight * n_rows, averages.V.shape[1], undecided=undecided)
    switch_off_(averages, kept)
    averages.V.copy_(noise.pool(averages.V, weight))
    new = prediction_widths(weight, M.where(kept, 1), n_rows, noise) if widen else None
    (K, size, d), Gamma = averages.Theta.shape, parameters.precision_factors
    # In parts, because copies of all loadings would be as large as the model.
    for part in slice_rows(K, max(ALIGNMENT, CACHE_ELEMENTS // (size * d))):
        some, found = rotate_averages(
            averages.take(part), *bounds, widths=None if new is None else new[part]
        )
        for whole, one in zip(
            (averages.Theta, averages.V, parameters[2], Gamma, M),
            (some.Theta, some.V, *found[2:]),
            strict=True,
        ):
            whole[part] = communicator.agree(one)
    ranks = communicator.components.gather(kept.sum(dim=1))
    parameters = parameters._replace(logits=to_logits(weight))
    return trim(averages, parameters, int(ranks.max()))


def rank_by_loss(watch: Watch) -> Tensor:
    """Return the numbers (K,) of all components, the least loss first.

    Candidates come before all others.
    """
    order = torch.argsort(watch.alone + watch.together, stable=True)
    first = watch.candidates[order]
    return torch.cat([order[first], order[~first]])


def find_expendable(
    watch: Watch, parameters: Parameters, context: Context, pi: Tensor, among: Tensor
) -> Tensor:
    """Return the numbers of the candidates that are worth less than a new component would be.

    The watched rows must lose little without the candidates, compared with their loss without the
    median component. A light component may have met no row of its own. Unless ``own_rows`` of its
    rows or a whole pass went by, a second condition must hold: all rows learned from so far would
    lose less than one nat for each of its parameters. Parameters gain as much by fitting chance
    (Akaike's criterion). ``pi`` (K,) are the weights of the components of all processes;
    ``among`` (K,) is true for the components to consider.
    """
    replacement, all_rows = context.schedule.replacement, context.schedule.pass_rows
    _, d, l = parameters.shape
    known = (watch.rows * pi >= replacement.own_rows) | (watch.rows >= all_rows)
    little = replacement.little * watch.alone.median()
    worthless = watch.candidates & among & (watch.together <= little)
    # Either all processes estimate losses or none does.
    unknown = context.communicator.agree(worthless & ~known)
    if bool(unknown.any()):
        loss = estimate_losses(parameters, watch.candidates, context, pi, unknown)
        # The variances that one more component adds.
        own = context.noise.count_variances(2, d) - context.noise.count_variances(1, d)
        known |= min(context.samples, all_rows) * loss <= d * (l + 1) + own
    return (worthless & known).nonzero()[:, 0]


def estimate_losses(
    parameters: Parameters,
    candidates: Tensor,
    context: Context,
    pi: Tensor,
    among: Tensor,
) -> Tensor:
    """Estimate the average loss of a row without all candidates, (K,), 0 for the others.

    ``pi_k [log p(mu_k) - log p'(mu_k)]``, where p' is the mixture without the candidates (K,). Only
    components in ``among`` (K,) are estimated.
    """
    communicator, search = context.communicator, context.search
    here = communicator.components.select(candidates)
    means = parameters.means[communicator.components.select(among)]
    means = communicator.components.concatenate_selected(means, among)
    if search is not None:
        found = search.compare_without(means, parameters, here, context.work)
    else:
        joint = component_log_prob(means, joint_operands(parameters))
        without = joint.masked_fill(here, -math.inf)
        found = torch.stack([joint.logsumexp(dim=1), without.logsumexp(dim=1)], dim=1)
    found = communicator.components.log_sum(found, parameters.logits)
    loss = communicator.agree(found[:, 0] - found[:, 1])
    return torch.zeros_like(pi).masked_scatter(among, pi[among] * loss)


def split_heaviest(
    components: Components,
    target: Tensor,
    communicator: Communicator = SINGLE,
    *,
    new: bool = False,
    growth: Growth | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Give each target component half of one of the heaviest, in place.

    Return the numbers of all components on this rank that changed, (n,). ``new`` targets hold
    nothing yet. ``weight`` (K,) are the weights in all processes, if known.

    The halves stand half a standard deviation to each side along the strongest loading, or along
    the noise where there is no loading. ``growth.narrowing`` shortens this loading, so that a half
    that is split again before it has met many rows is split along another one. With
    ``growth.widening`` above one the halves stay in place: one is wider by this factor in all
    directions, the other narrower.
    """
    growth = growth or Growth()
    weight = communicator.components.gather(components.weight) if weight is None else weight
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
            # New components are interchangeable: take those that need not be sent far.
            taken = communicator.components.match_targets(source, taken)
        weight[source] *= 0.5
        weight[taken] = weight[source]
        changed += _halve(components, source, taken, communicator, growth)
    return torch.cat(changed) if changed else target[:0]


def _halve(
    components: Components,
    source: Tensor,
    taken: Tensor,
    communicator: Communicator,
    growth: Growth,
) -> list[Tensor]:
    """Give components (n,) half of others (n,), in place; return both numbers on this rank."""
    from_here, to_here = (communicator.components.to_local(numbers) for numbers in (source, taken))
    components.weight[from_here] *= 0.5
    halves = communicator.components.fetch_sources(components, source, taken)
    for tensor, half in zip(components, halves, strict=True):
        tensor[to_here] = half
    if growth.widening > 1:
        _widen(components, from_here, growth.widening)
        _widen(components, to_here, 1 / growth.widening)
    else:
        _shift(components, from_here, 0.5, growth.narrowing)
        _shift(components, to_here, -0.5, growth.narrowing)
    return [from_here, to_here]


def _widen(components: Components, index: Tensor, factor: float) -> None:
    """Multiply the deviations of components (n,) in all directions by a factor, in place."""
    components.Theta[index, 1:] *= factor
    components.V[index] *= factor**2
    components.E[index] /= factor**2
    # Gamma' E^-1 Gamma, and so M, stays the same.
    components.Gamma[index] /= factor


def _shift(components: Components, index: Tensor, way: float, narrowing: float) -> None:
    """Move components (n,) by ``way`` deviations along their strongest loadings, in place.

    Multiply these loadings by ``narrowing``.
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
