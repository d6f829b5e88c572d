"""Components that are pruned, split, replaced or left alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from factormix.core.averages import Averages, Components, rotate_averages
from factormix.core.expectation import expected_statistics
from factormix.core.parameters import Parameters, factor_rows, latent_variances
from factormix.training.solvers.components import (
    Context,
    Population,
    Watch,
    estimate_losses,
    find_expendable,
    grow,
    prune,
    rank_by_loss,
    replace_unused,
)
from factormix.training.solvers.schedule import Growth, Schedule


def context(
    K: int = 3,
    first: int = 3,
    ticks: float = 100,
    planned: float = math.inf,
    batches: int = 0,
    samples: float = 1e6,
    widening: float = 1.0,
) -> Context:
    """Describe a run in batches of 100 rows; without a number of batches, it is a stream."""
    growth = Growth(widening=widening)
    return Context(Schedule(K, first, 100, batches, planned, growth=growth), ticks, samples)


def expendable(
    some: Population, pass_batches: int = 0, samples: float = 1e6, among: Tensor | None = None
) -> list[int]:
    run = context(batches=pass_batches, samples=samples)
    pi = some.parameters.log_weights.exp()
    among = torch.ones(len(pi)).bool() if among is None else among
    return find_expendable(some.watch, some.parameters, run, pi, among).tolist()


def population(means: Tensor, weight: Tensor) -> Population:
    """Make unit Gaussians, one for each of the means (K, d)."""
    Theta = torch.stack([means, torch.zeros_like(means)], dim=1)
    averages = Averages(Theta, torch.ones_like(means), weight)
    parts = rotate_averages(averages, torch.full_like(means[0], 100.0), 1e-6)
    return Population(*parts, Watch.nothing(weight))


def covariances(parameters: Parameters) -> Tensor:
    """Invert the precisions, (K, d, d)."""
    E, Gamma = parameters.precision_diag, parameters.precision_factors
    return torch.linalg.inv(E.diag_embed() - Gamma @ Gamma.mT)


def watched(some: Population, x: Tensor, candidates: list[bool]) -> Population:
    """Watch a population over rows (n, d)."""
    chosen = torch.tensor(candidates)
    statistics = expected_statistics(some.parameters, x, candidates=chosen)
    watch = Watch.begin(chosen, torch.zeros_like(some.averages.weight)).add(statistics)
    return some._replace(watch=watch)


def rows(*groups: tuple[list[float], int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.cat(
        [torch.tensor(c) + torch.randn(n, len(c), generator=generator) for c, n in groups]
    )


TWINS = torch.tensor([[0.0, 0.0], [0.0, 0.0], [30.0, 0.0]])
"""Two components in one place, and one elsewhere."""


def test_losses_equal_the_loss_of_rows_without_the_component():
    """Against the mixture without the component, over the rows that it explains best."""
    means = torch.tensor([[0.0, 0.0], [2.0, 0.0], [300.0, 0.0]])
    some = population(means, torch.tensor([0.5, 0.3, 0.2]))
    x = rows(([0.0, 0.0], 50), ([2.0, 0.0], 30), ([300.0, 0.0], 20))
    watch = watched(some, x, [True, True, False]).watch
    log_weight, E = some.averages.weight.log(), some.parameters.precision_diag
    constant = log_weight + 0.5 * (E.log() - math.log(2 * math.pi)).sum(dim=1)
    joint = constant - 0.5 * (E * (x.unsqueeze(1) - means).square()).sum(dim=2)
    whole, winner = joint.logsumexp(dim=1), joint.argmax(dim=1)
    for k in range(3):
        rest = joint[:, [j for j in range(3) if j != k]].logsumexp(dim=1)
        lost = (whole - rest)[winner == k].sum()
        assert float(watch.alone[k]) == pytest.approx(float(lost), rel=1e-3)
    for k in range(2):
        lost = (whole - joint[:, 2])[winner == k].sum()
        assert float(watch.together[k]) == pytest.approx(float(lost), rel=1e-3)
    assert float(watch.together[2]) == 0
    assert float(watch.rows) == 100


def test_at_most_one_of_two_twins_is_removed():
    some = population(TWINS, torch.tensor([0.4, 0.4, 0.2]))
    x = rows(([0.0, 0.0], 80), ([30.0, 0.0], 20))
    some = watched(some, x, [True, True, False])
    assert rank_by_loss(some.watch)[:1].tolist() in ([0], [1])
    assert len(expendable(some)) <= 1
    apart = population(TWINS + torch.tensor([[0.5], [-0.5], [0.0]]), some.averages.weight)
    apart = watched(apart, x, [True, True, False])
    assert rank_by_loss(apart.watch)[:1].tolist() in ([0], [1])
    assert expendable(apart) == []


def test_pruning_leaves_one_of_the_twins_and_all_of_the_weight():
    some = population(TWINS, torch.tensor([0.4, 0.4, 0.2]))
    x = rows(([0.0, 0.0], 800), ([30.0, 0.0], 200))
    left = prune(watched(some, x, [False] * 3), context(2, 3, ticks=1e3))
    assert sorted(left.parameters.means[:, 0].tolist()) == pytest.approx([0, 30])
    assert float(left.averages.weight.sum()) == pytest.approx(1)
    # The average of the squares is that of a share, so that variances stay.
    variances = left.averages.V
    torch.testing.assert_close(variances, torch.ones(2, 2))
    assert not left.watch.active


def test_pruning_waits_until_it_has_watched():
    some = population(TWINS, torch.tensor([0.4, 0.4, 0.2]))
    some = watched(some, rows(([0.0, 0.0], 80)), [False] * 3)
    assert prune(some, context(2, 3, ticks=6)) is some


def test_a_rare_component_is_not_expendable():
    """Five of a thousand rows stand where nothing else could explain them."""
    means = torch.tensor([[0.0, 0.0], [0.0, 3.0], [50.0, 0.0]])
    some = population(means, torch.tensor([0.5, 0.495, 0.005]))
    x = rows(([0.0, 0.0], 500), ([0.0, 3.0], 495), ([50.0, 0.0], 5))
    some = watched(some, x, [False, False, True])
    assert expendable(some, pass_batches=10) == []
    kept, n = replace_unused(some, context(planned=1000.0, batches=10))
    assert n == 0
    torch.testing.assert_close(kept.parameters.means, means)


def useless(n: int) -> Population:
    """Make a population whose last component explains none of the n rows it was watched over."""
    means = torch.tensor([[0.0, 0.0], [0.0, 9.0], [50.0, 0.0]])
    some = population(means, torch.tensor([0.5, 0.49, 0.01]))
    return watched(some, rows(([0.0, 0.0], n // 2), ([0.0, 9.0], n // 2)), [False, False, True])


def test_unwatched_components_are_judged_by_their_parameters():
    few, many = useless(100), useless(2000)
    assert expendable(few) == []
    # Twenty rows of its own should have come, or a whole pass is all there is to see.
    assert expendable(many) == [2]
    assert expendable(few, pass_batches=1) == [2]
    # About others nobody asks.
    among = torch.tensor([True, True, False])
    assert expendable(few, pass_batches=1, among=among) == []
    assert expendable(few, pass_batches=1, among=~among) == [2]
    # It gains less than its six parameters would by chance: on half a row, or beside another.
    assert expendable(few, samples=0.4) == [2]
    means = few.parameters.means.clone()
    means[2] = torch.tensor([0.0, 9.0])
    near = population(means, few.averages.weight)
    assert expendable(near._replace(watch=few.watch), samples=200.0) == [2]


def test_expected_losses_equal_losses_of_rows_at_the_means():
    """Against the dense densities with and without the candidates."""
    means = torch.tensor([[0.0, 0.0], [2.0, 0.0], [4.0, 1.0], [50.0, 0.0]])
    weight = torch.tensor([0.4, 0.3, 0.2, 0.1])
    p = population(means, weight).parameters
    joint = weight.log() + torch.stack(
        [
            torch.distributions.Normal(m, e.rsqrt()).log_prob(means).sum(dim=1)
            for m, e in zip(p.means, p.precision_diag, strict=True)
        ],
        dim=1,
    )
    chosen = torch.tensor([False, True, True, True])
    lost = weight * (joint.logsumexp(dim=1) - joint[:, 0])
    lost[0] = 0
    for asked in (chosen, torch.tensor([False, True, False, True])):
        found = estimate_losses(p, chosen, context(), weight, asked)
        torch.testing.assert_close(found, lost * asked, rtol=1e-4, atol=1e-5)


def test_a_useless_component_starts_again_beside_the_heaviest():
    new, n = replace_unused(useless(2000), context())
    assert n == 1
    assert new.parameters.means[2].norm() < 2
    torch.testing.assert_close(new.averages.weight, torch.tensor([0.25, 0.49, 0.25]))


def test_nothing_is_replaced_before_it_is_known_or_near_the_end():
    same, n = replace_unused(useless(100), context())
    assert n == 0
    assert float(same.parameters.means[2, 0]) == 50
    assert same.watch.candidates.tolist() == [False, False, True]
    late, n = replace_unused(useless(2000), context(ticks=95, planned=100.0, batches=10))
    assert n == 0
    assert not late.watch.active
    assert float(late.parameters.means[2, 0]) == 50


def test_light_components_are_watched_first():
    some = useless(2000)._replace(watch=Watch.nothing(torch.zeros(1)))
    after, n = replace_unused(some, context())
    assert n == 0
    assert after.watch.candidates.tolist() == [False, False, True]
    assert float(after.watch.rows) == 0


def test_growing_splits_the_heaviest_and_keeps_weight_and_mean():
    means = torch.tensor([[0.0, 0.0], [30.0, 0.0]])
    some = population(means, torch.tensor([0.7, 0.3]))
    assert grow(some, context(3, 2, ticks=0)) is some
    more = grow(some, context(3, 2, ticks=1e3))
    assert len(more.averages.weight) == 3
    torch.testing.assert_close(more.averages.weight.sort().values, torch.tensor([0.3, 0.35, 0.35]))
    mean = more.averages.weight @ more.parameters.means
    torch.testing.assert_close(mean, torch.tensor([9.0, 0.0]))


def test_halves_may_be_wider_and_narrower_and_are_as_definite():
    generator = torch.Generator().manual_seed(0)
    Theta, V = torch.randn(1, 3, 4, generator=generator), torch.rand(1, 4, generator=generator)
    first = Averages(Theta.double(), V.double() + 0.1, torch.ones(1).double())
    averages, parameters = rotate_averages(first, torch.full((4,), 1e3).double(), 1e-6)
    before = covariances(parameters)[0]
    some = Population(averages, parameters, Watch.nothing(averages.weight))
    more = grow(some, context(2, 1, ticks=1e3, widening=1.2))
    after = covariances(more.parameters)
    torch.testing.assert_close(after[0], before * 1.2**2)
    torch.testing.assert_close(after[1], before / 1.2**2)
    torch.testing.assert_close(more.parameters.means, parameters.means[:1].expand(2, -1))
    torch.testing.assert_close(
        latent_variances(*more.parameters[2:4]), more.parameters.latent_variances
    )


def test_components_grow_in_the_same_memory():
    """Old tensors show the same memory, of which they were alone; what is shared is copied."""
    averages, parameters = population(TWINS, torch.tensor([0.2, 0.3, 0.5]))[:2]
    components = Components.of(averages, parameters)
    before = [t.clone() for t in components]
    more = components.append_empty(4)
    for old, still, new in zip(before, components, more, strict=True):
        assert new.shape == (7, *old.shape[1:])
        assert torch.equal(new[:3], old)
        assert torch.equal(still, old)
        assert (new[3:] == 0).all()
        assert new.data_ptr() == still.data_ptr()
    assert factor_rows(more.Gamma).data_ptr() == more.Gamma.data_ptr()
    assert parameters.means.data_ptr() == more.Theta.data_ptr()
    some = Components(*(t[1:3] for t in more))
    copied = some.append_empty(1)
    for old, new in zip(some, copied, strict=True):
        assert torch.equal(new[:2], old)
        assert (new[2:] == 0).all()
        assert new.data_ptr() != old.data_ptr()
    shown = more.V.numpy()
    assert Components(*more).append_empty(1).V.data_ptr() != shown.ctypes.data


def test_a_narrower_half_obeys_the_bound():
    bound = torch.full((2,), 1.5)
    some, other = (population(torch.zeros(1, 2), torch.ones(1)) for _ in range(2))
    run = context(2, 1, ticks=1e3, widening=1.5)
    free = grow(some, run)
    assert (free.parameters.precision_diag > 2).any()
    held = grow(other, run, (bound, 1e-6))
    torch.testing.assert_close(held.parameters.precision_diag.amax(dim=0), bound)
    torch.testing.assert_close(held.averages.V, free.averages.V)
