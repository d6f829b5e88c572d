"""The step of means and covariances themselves, against dense computations."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from factormix.core import quadratic
from factormix.core.averages import Running, natural_step, precision_form
from factormix.core.density import log_prob, operands
from factormix.core.direct import direct_step
from factormix.core.expectation import expected_statistics
from factormix.core.parameters import Parameters, latent_variances, loadings
from factormix.core.statistics import Statistics
from factormix.training.threads import Team
from many import drawn, many

K, D, L = 70, 9, 8
BOUND = torch.full((D,), 1e6, dtype=torch.float64)
FLOOR = 1e-9


def start(l: int = L, spread: float = 1.0) -> tuple[Running, Parameters]:
    truth = many(K=K, d=D, l=l, spread=spread)
    Theta = torch.cat([truth.means.unsqueeze(1), loadings(truth).mT], dim=1)
    return precision_form(
        Running(Theta, 1 / truth.precision_diag, truth.log_weights.exp()), BOUND, FLOOR
    )


def copies(*tuples):
    return [type(one)(*(None if t is None else t.clone() for t in one)) for one in tuples]


def covariances(running: Running) -> Tensor:
    Lambda = running.Theta[:, 1:]
    return Lambda.mT @ Lambda + torch.diag_embed(running.V)


def sums_of(parameters: Parameters, x: Tensor) -> Statistics:
    found = expected_statistics(parameters, x, finish=False)
    assert found.by_products
    return found


def test_with_a_factor_less_than_features_it_averages_means_and_covariances():
    """The one direction without a factor is met by variances in the course of some steps."""
    running, parameters = start()
    x = drawn(many(K=K, d=D, l=L, seed=5, spread=1.0), 3000)
    statistics, rate = sums_of(parameters, x).whole(K), 0.1
    weight = (1 - rate) * running.weight + rate * statistics.A[:, 0] / len(x)
    a = rate * statistics.A[:, 0] / len(x) / weight
    # Sums of averages, from scratch: R x and R x x' of both are mixed by their shares.
    places = torch.tril_indices(D, D)
    products = torch.zeros(K, D, D, dtype=torch.float64)
    products[:, places[0], places[1]] = products[:, places[1], places[0]] = statistics.B[:, 0]
    first = statistics.S / statistics.A
    second = products / statistics.A.unsqueeze(-1)
    mu = running.Theta[:, 0]
    old_second = covariances(running) + mu.unsqueeze(2) * mu.unsqueeze(1)
    mean = mu + a.unsqueeze(1) * (first - mu)
    mixed = old_second + a.view(-1, 1, 1) * (second - old_second)
    expected = mixed - mean.unsqueeze(2) * mean.unsqueeze(1)
    new, found = direct_step(*copies(running, parameters), statistics, rate, BOUND, FLOOR)
    torch.testing.assert_close(new.weight, weight)
    torch.testing.assert_close(new.Theta[:, 0], mean)
    error = (covariances(new) - expected).square().sum(dim=(1, 2))
    distance = (covariances(running) - expected).square().sum(dim=(1, 2))
    assert float((error / distance).median()) < 0.02
    torch.testing.assert_close(1 / found.precision_diag, new.V)
    torch.testing.assert_close(loadings(found), new.Theta[:, 1:].mT)
    torch.testing.assert_close(
        found.latent_variances, latent_variances(found.precision_diag, found.precision_factors)
    )


@pytest.mark.parametrize("l", [6, 8])
def test_steps_of_all_rows_go_up_and_arrive_sooner_than_those_of_em(l: int):
    """Components are far apart, so that only their shapes are to be found."""
    x = drawn(many(K=K, d=D, l=l, spread=30.0), 8000)
    likelihoods: dict[str, list[float]] = {}
    for name, step in (("em", natural_step), ("direct", direct_step)):
        running, parameters = start(l, spread=30.0)
        running.Theta[:, 1:] = 0.1 * torch.rand(K, l, D, generator=torch.Generator().manual_seed(1))
        running.V.fill_(1.0)
        running, parameters = precision_form(running, BOUND, FLOOR)
        values = likelihoods[name] = []
        for _ in range(40):
            values.append(float(log_prob(x, operands(parameters)).mean()))
            running, parameters = step(
                running, parameters, sums_of(parameters, x), 1.0, BOUND, FLOOR
            )
    up = likelihoods["direct"]
    assert all(after > before - 1e-3 for before, after in pairwise(up))
    assert up[8] > likelihoods["em"][-1]


def test_what_no_row_touched_stays_and_is_rewritten_everywhere_for_a_new_bound():
    running, parameters = start(spread=8.0)
    x = drawn(many(K=K, d=D, l=L, spread=8.0), 60)[:20].repeat(20, 1)
    statistics = sums_of(parameters, x)
    touched = statistics.touched
    assert touched is not None
    rest = torch.ones(K, dtype=torch.bool)
    rest[touched] = False
    assert rest.any()
    new, found = direct_step(*copies(running, parameters, statistics), 0.1, BOUND, FLOOR)
    assert torch.equal(new.Theta[rest], running.Theta[rest])
    torch.testing.assert_close(new.weight[rest], 0.9 * running.weight[rest])
    bound = torch.full_like(BOUND, 0.5)
    new, found = direct_step(
        *copies(running, parameters, statistics), 0.1, bound, FLOOR, everywhere=True
    )
    assert (found.precision_diag <= 0.5).all()
    torch.testing.assert_close(new.Theta[rest, 0], running.Theta[rest, 0])


def test_groups_that_are_computed_at_the_same_time_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(quadratic, "PART_ELEMENTS", 8 * D * D)
    running, parameters = start()
    statistics = sums_of(parameters, drawn(many(K=K, d=D, l=L, seed=5), 3000)).whole(K)
    found = [direct_step(*copies(running, parameters, statistics), 0.1, BOUND, FLOOR)]
    with ThreadPoolExecutor(3) as pool:
        found.append(
            direct_step(
                *copies(running, parameters, statistics), 0.1, BOUND, FLOOR,
                each=pool.map, n_groups=3,
            )
        )  # fmt: skip
    for one, other in zip(*(a + b for a, b in found), strict=True):
        assert torch.equal(one, other)


def test_nothing_is_stepped_where_no_component_was_touched():
    running, parameters = start()
    none = sums_of(parameters, drawn(many(K=K, d=D, l=L), 100))
    none = none._replace(
        A=none.A[:0], B=none.B[:0], S=none.S[:0], touched=torch.zeros(0, dtype=torch.long)
    )
    threads = Team(2)
    try:
        new, _ = direct_step(
            *copies(running, parameters), none, 0.1, BOUND, FLOOR, each=threads.each, n_groups=2
        )
    finally:
        threads.close()
    assert torch.equal(new.Theta, running.Theta)
    torch.testing.assert_close(new.weight, 0.9 * running.weight)


@pytest.mark.parametrize("sd", [1e-2, 3e-3, 1e-3])
def test_tight_components_far_from_zero_lose_no_digits(sd: float):
    """Where sums of products in single precision would not tell their noise, y is used."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mu, W = normal(K, D), sd * normal(K, D, D) / D**0.5
    which = torch.arange(K).repeat(40)
    x = (mu[which] + (W[which] @ normal(len(which), D, 1))[..., 0]).float()
    found = {}
    for dtype in (torch.float32, torch.float64):
        bound = torch.full((D,), 1e9, dtype=dtype)
        Theta = torch.cat([mu.unsqueeze(1), 0.3 * W.mT[:, :L]], dim=1).to(dtype)
        V = torch.full((K, D), (0.5 * sd) ** 2, dtype=dtype)
        running = Running(Theta, V, torch.full((K,), 1 / K, dtype=dtype))
        running, parameters = precision_form(running, bound, 1e-6)
        for _ in range(8):
            sums = expected_statistics(parameters, x.to(dtype), finish=False)
            step = direct_step if sums.by_products else natural_step
            running, parameters = step(running, parameters, sums, 0.5, bound, 1e-6)
        precise = Parameters(*(t.double() for t in parameters))
        found[dtype] = float(log_prob(x.double(), operands(precise)).mean())
    # Steps by y are slower, which is what is lost.
    assert found[torch.float32] > found[torch.float64] - 2


def test_it_is_bounded_and_finite_for_rows_that_are_all_the_same():
    running, parameters = start()
    x = torch.full((400, D), 0.5, dtype=torch.float64)
    bound = torch.full_like(BOUND, 100.0)
    for _ in range(30):
        found = sums_of(parameters, x)
        running, parameters = direct_step(running, parameters, found, 0.5, bound, FLOOR)
    for tensor in (*running, *parameters):
        assert tensor.isfinite().all()
    assert (parameters.precision_diag <= 100 * (1 + 1e-9)).all()
    assert (parameters.latent_variances >= FLOOR).all()


def test_single_precision_gives_what_double_does():
    running, parameters = start()
    x = drawn(many(K=K, d=D, l=L, seed=5, spread=1.0), 3000)
    statistics = sums_of(parameters, x).whole(K)
    single = [
        type(t)(*(None if v is None else v.float() for v in t))
        for t in (running, parameters, statistics)
    ]
    new, found = direct_step(*copies(running, parameters, statistics), 0.1, BOUND, FLOOR)
    ours, theirs = direct_step(*single, 0.1, BOUND.float(), FLOOR)
    assert ours.Theta.dtype == torch.float32
    torch.testing.assert_close(covariances(ours).double(), covariances(new), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        theirs.precision_diag.double(), found.precision_diag, rtol=1e-3, atol=0
    )
