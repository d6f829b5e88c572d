"""The natural step of means and covariances, against dense computations."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from factormix.core.averages import Averages, StepOptions, natural_step, rotate_averages
from factormix.core.covariance import covariance_step
from factormix.core.density import log_prob, operands
from factormix.core.expectation import expected_statistics
from factormix.core.parameters import Parameters, latent_variances, loadings
from factormix.core.statistics import ProductSums, Statistics
from factormix.training.threads import Threads
from mixtures import FLOOR, draw_rows, make_bound, make_mixture, start_averages

K, D, L = 70, 9, 8
BOUND = make_bound(D)
OPTIONS = StepOptions(0.1, BOUND, FLOOR)


def start(l: int = L, spread: float = 1.0) -> tuple[Averages, Parameters]:
    return start_averages(make_mixture(K=K, d=D, l=l, spread=spread))


def covariances(averages: Averages) -> Tensor:
    Lambda = averages.Theta[:, 1:]
    return Lambda.mT @ Lambda + torch.diag_embed(averages.V)


def sum_products(parameters: Parameters, x: Tensor) -> Statistics:
    found = expected_statistics(parameters, x, convert=False)
    assert isinstance(found.sums, ProductSums)
    return found


def sum_for_all(parameters: Parameters, x: Tensor) -> Statistics:
    """Sum products of features for all components, touched or not."""
    found = sum_products(parameters, x)
    return found._replace(sums=found.sums.spread_to_all(K))


def test_means_and_covariances_are_averaged():
    """With one factor fewer than features, variances adapt to the last direction in some steps."""
    averages, parameters = start()
    x = draw_rows(make_mixture(K=K, d=D, l=L, seed=5, spread=1.0), 3000)
    statistics, rate = sum_for_all(parameters, x), 0.1
    count, linear, triangles = statistics.sums.tensors.values()
    weight = (1 - rate) * averages.weight + rate * count[:, 0] / len(x)
    a = rate * count[:, 0] / len(x) / weight
    # First and second moments of old averages and of the batch are mixed by their shares.
    places = torch.tril_indices(D, D)
    products = torch.zeros(K, D, D, dtype=torch.float64)
    products[:, places[0], places[1]] = products[:, places[1], places[0]] = triangles[:, 0]
    first = linear / count
    second = products / count.unsqueeze(-1)
    mu = averages.Theta[:, 0]
    old_second = covariances(averages) + mu.unsqueeze(2) * mu.unsqueeze(1)
    mean = mu + a.unsqueeze(1) * (first - mu)
    mixed = old_second + a.view(-1, 1, 1) * (second - old_second)
    expected = mixed - mean.unsqueeze(2) * mean.unsqueeze(1)
    new, found = covariance_step(*copy.deepcopy((averages, parameters)), statistics, OPTIONS)
    torch.testing.assert_close(new.weight, weight)
    torch.testing.assert_close(new.Theta[:, 0], mean)
    error = (covariances(new) - expected).square().sum(dim=(1, 2))
    distance = (covariances(averages) - expected).square().sum(dim=(1, 2))
    assert float((error / distance).median()) < 0.02
    torch.testing.assert_close(1 / found.precision_diag, new.V)
    torch.testing.assert_close(loadings(found), new.Theta[:, 1:].mT)
    torch.testing.assert_close(
        found.latent_variances, latent_variances(found.precision_diag, found.precision_factors)
    )


@pytest.mark.parametrize("l", [6, 8])
def test_steps_by_all_rows_never_lose_and_arrive_sooner_than_em(l: int):
    """Components are far apart, so that only their shapes must be found."""
    x = draw_rows(make_mixture(K=K, d=D, l=l, spread=30.0), 4000)
    likelihoods: dict[str, list[float]] = {}
    for name, step in (("em", natural_step), ("covariance", covariance_step)):
        averages, parameters = start(l, spread=30.0)
        averages.Theta[:, 1:] = 0.1 * torch.rand(
            K, l, D, generator=torch.Generator().manual_seed(1)
        )
        averages.V.fill_(1.0)
        averages, parameters = rotate_averages(averages, BOUND, FLOOR)
        values = likelihoods[name] = []
        for _ in range(40):
            statistics = sum_products(parameters, x)
            values.append(float(statistics.log_likelihood) / len(x))
            options = StepOptions(1.0, BOUND, FLOOR)
            averages, parameters = step(averages, parameters, statistics, options)
    rising = likelihoods["covariance"]
    assert all(after > before - 1e-3 for before, after in pairwise(rising))
    assert rising[8] > likelihoods["em"][-1]


def test_components_that_no_row_touches_are_rewritten_only_for_a_new_bound():
    averages, parameters = start(spread=8.0)
    x = draw_rows(make_mixture(K=K, d=D, l=L, spread=8.0), 60)[:20].repeat(20, 1)
    statistics = sum_products(parameters, x)
    touched = statistics.sums.touched
    assert touched is not None
    rest = torch.ones(K, dtype=torch.bool)
    rest[touched] = False
    assert rest.any()
    same = copy.deepcopy((averages, parameters, statistics))
    new, found = covariance_step(*same, OPTIONS)
    assert torch.equal(new.Theta[rest], averages.Theta[rest])
    torch.testing.assert_close(new.weight[rest], 0.9 * averages.weight[rest])
    options = StepOptions(0.1, make_bound(D, 0.5), FLOOR, everywhere=True)
    same = copy.deepcopy((averages, parameters, statistics))
    new, found = covariance_step(*same, options)
    assert (found.precision_diag <= 0.5).all()
    torch.testing.assert_close(new.Theta[rest, 0], averages.Theta[rest, 0])


def test_groups_computed_at_the_same_time_give_the_same_bits():
    averages, parameters = start()
    statistics = sum_for_all(parameters, draw_rows(make_mixture(K=K, d=D, l=L, seed=5), 3000))
    same = copy.deepcopy((averages, parameters, statistics))
    step = partial(covariance_step, options=OPTIONS, matrix_elements=8 * D * D)
    found = [step(averages, parameters, statistics)]
    with ThreadPoolExecutor(3) as pool:
        found.append(step(*same, map_groups=pool.map, n_groups=3))
    for one, other in zip(*(a + b for a, b in found), strict=True):
        assert torch.equal(one, other)


def test_nothing_moves_where_no_component_was_touched():
    averages, parameters = start()
    found = sum_products(parameters, draw_rows(make_mixture(K=K, d=D, l=L), 100))
    empty = {name: tensor[:0] for name, tensor in found.sums.tensors.items()}
    none = found._replace(sums=found.sums.replace(torch.zeros(0, dtype=torch.long), **empty))
    same = copy.deepcopy((averages, parameters))
    new, _ = covariance_step(*same, none, OPTIONS, map_groups=Threads(2).map, n_groups=2)
    assert torch.equal(new.Theta, averages.Theta)
    torch.testing.assert_close(new.weight, 0.9 * averages.weight)


@pytest.mark.parametrize("sd", [1e-2, 3e-3, 1e-3])
def test_tight_components_far_from_zero_lose_no_digits(sd: float):
    """Projections are used where products in single precision would not resolve the noise."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mu, W = normal(K, D), sd * normal(K, D, D) / D**0.5
    which = torch.arange(K).repeat(40)
    x = (mu[which] + (W[which] @ normal(len(which), D, 1))[..., 0]).float()
    found = {}
    for dtype in (torch.float32, torch.float64):
        options = StepOptions(0.5, torch.full((D,), 1e9, dtype=dtype), 1e-6)
        Theta = torch.cat([mu.unsqueeze(1), 0.3 * W.mT[:, :L]], dim=1).to(dtype)
        V = torch.full((K, D), (0.5 * sd) ** 2, dtype=dtype)
        averages = Averages(Theta, V, torch.full((K,), 1 / K, dtype=dtype))
        averages, parameters = rotate_averages(averages, options.max_precision, 1e-6)
        for _ in range(8):
            statistics = expected_statistics(parameters, x.to(dtype), convert=False)
            products = isinstance(statistics.sums, ProductSums)
            step = covariance_step if products else natural_step
            averages, parameters = step(averages, parameters, statistics, options)
        precise = Parameters(*(t.double() for t in parameters))
        found[dtype] = float(log_prob(x.double(), operands(precise)).mean())
    # Steps by projections are slower, which explains the difference.
    assert found[torch.float32] > found[torch.float64] - 2


def test_equal_rows_leave_bounded_and_finite_parameters():
    averages, parameters = start()
    x = torch.full((400, D), 0.5, dtype=torch.float64)
    options = StepOptions(0.5, make_bound(D, 100.0), FLOOR)
    for _ in range(30):
        statistics = sum_products(parameters, x)
        averages, parameters = covariance_step(averages, parameters, statistics, options)
    for tensor in (*averages, *parameters):
        assert tensor.isfinite().all()
    assert (parameters.precision_diag <= 100 * (1 + 1e-9)).all()
    assert (parameters.latent_variances >= FLOOR).all()


def test_single_precision_gives_nearly_the_same_as_double():
    averages, parameters = start()
    x = draw_rows(make_mixture(K=K, d=D, l=L, seed=5, spread=1.0), 3000)
    statistics = sum_for_all(parameters, x)
    sums = {name: tensor.float() for name, tensor in statistics.sums.tensors.items()}
    single = (
        Averages(*(t.float() for t in averages)),
        Parameters(*(t.float() for t in parameters)),
        statistics._replace(sums=statistics.sums.replace(None, **sums)),
    )
    new, found = covariance_step(averages, parameters, statistics, OPTIONS)
    ours, theirs = covariance_step(*single, StepOptions(0.1, BOUND.float(), FLOOR))
    assert ours.Theta.dtype == torch.float32
    torch.testing.assert_close(covariances(ours).double(), covariances(new), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        theirs.precision_diag.double(), found.precision_diag, rtol=1e-3, atol=0
    )
