"""Ranks of components: gains of factors against dense determinants, and the price of a factor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from tests.mixtures import draw_rows, latent_sums, sum_all_pairs
from tests.oracles import numpy

from factormix.core.averages import (
    Averages,
    StepOptions,
    natural_step,
    rotate_averages,
)
from factormix.core.density import (
    joint_operands,
    log_prob,
    operands,
    project,
    project_packed,
)
from factormix.core.expectation import expected_statistics
from factormix.core.missing import observed_components, observed_operands
from factormix.core.noise import Noise
from factormix.core.parameters import (
    Parameters,
    covariances,
    factor_major,
    group_by_rank,
    latent_log_determinant,
)
from factormix.core.ranks import (
    NATS_PER_NUMBER,
    count_ranks,
    factor_gains,
    select_factors,
    switch_off_,
    trim,
)
from factormix.core.screening import CandidateSearch, make_screen
from factormix.core.statistics import LatentSums

FLOOR = 1e-9


def make_averages(K: int = 3, d: int = 6, l: int = 1, seed: int = 0) -> Averages:
    generator = torch.Generator().manual_seed(seed)
    Theta = torch.randn(K, l + 1, d, generator=generator, dtype=torch.float64)
    V = 0.2 + torch.rand(K, d, generator=generator, dtype=torch.float64)
    weight = torch.softmax(torch.randn(K, generator=generator, dtype=torch.float64), 0)
    return Averages(Theta, V, weight)


def free_bound(d: int = 6) -> torch.Tensor:
    return torch.full((d,), 1e9, dtype=torch.float64)


def make_mixed(
    ranks: tuple[int, ...] = (0, 1, 3, 2), d: int = 6, l: int = 5
) -> tuple[Averages, Parameters]:
    """Make a mixture whose components have these ranks, in tensors that hold l factors."""
    averages = make_averages(len(ranks), d, l)
    kept = torch.arange(l) < torch.tensor(ranks).unsqueeze(1)
    switch_off_(averages, kept)
    return rotate_averages(averages, free_bound(d), FLOOR)


@pytest.mark.parametrize("kind", ["component", "isotropic", "tied"])
def test_gains_are_differences_of_dense_determinants(kind):
    averages, d = make_averages(), 6
    if kind != "component":
        averages.V.fill_(0.7)
    found = factor_gains(averages, free_bound(), Noise(kind))[:, 0]
    Theta, V, weight = map(numpy, averages)
    total = 0.0
    for k in range(3):
        loading = Theta[k, 1]
        with_factor = np.linalg.slogdet(np.diag(V[k]) + np.outer(loading, loading))[1]
        left = {"component": loading**2, "isotropic": np.full(d, (loading**2).mean())}
        if kind == "tied":
            # The noise of all rows grows by the share of the component.
            grown = np.log((V[0] + weight[k] * loading**2) / V[0]).sum() / weight[k]
            total = np.log(V[k]).sum() + grown
        else:
            total = np.log(V[k] + left[kind]).sum()
        assert float(found[k]) == pytest.approx(0.5 * (total - with_factor))


def test_a_factor_on_one_feature_gains_nothing():
    averages = make_averages()
    averages.Theta[:, 1, 1:] = 0
    assert factor_gains(averages, free_bound(), Noise()).abs().max() < 1e-12


def test_new_rows_gain_by_a_factor_where_the_price_says_so():
    """The oracle: rows of unit noise with one strong direction, and new rows of the same kind."""
    d, n, rng = 40, 2000, np.random.default_rng(0)
    middle = np.sqrt(3 * d / n)

    def measure(strength: float) -> tuple[float, float]:
        """Return the nats of all training rows, and of as many new rows, by the first direction."""
        train = rng.normal(size=(n, d))
        train[:, 0] *= np.sqrt(1 + strength)
        values, vectors = np.linalg.eigh(train.T @ train / n)
        s, direction = values[-1], vectors[:, -1]
        seen = 1 + strength * direction[0] ** 2
        return n / 2 * (s - 1 - np.log(s)), n / 2 * (seen * (1 - 1 / s) - np.log(s))

    at, above, below = (
        np.mean([measure(factor * middle) for _ in range(30)], axis=0)
        for factor in (1.0, 1.25, 0.8)
    )
    assert below[1] < 0 < above[1]
    assert at[0] == pytest.approx(NATS_PER_NUMBER * d, rel=0.15)


def test_factors_are_kept_by_their_gain_and_the_rows():
    gains = torch.tensor([[0.03, 0.5, 0.009, 0.2]] * 3)
    rows = torch.tensor([1000.0, 100.0, 10.0])
    # Ten features cost 13.3, 12, 10.7 and 9.3 nats.
    expected = [[1, 1, 0, 1], [0, 1, 0, 1], [0, 0, 0, 0]]
    assert select_factors(gains, rows, 10).int().tolist() == expected
    waiting = select_factors(gains, rows, 10, undecided=0.5).int().tolist()
    assert waiting == [[1, 1, 0, 1], [1, 1, 0, 1], [0, 1, 0, 1]]


def test_switching_off_keeps_the_variance_of_every_feature():
    averages = make_averages(l=3)
    kept = torch.tensor([[True, False, True]]).expand(3, 3)
    off = Averages(*(t.clone() for t in averages))
    switch_off_(off, kept)
    before, after = (t.Theta[:, 1:].square().sum(1) + t.V for t in (averages, off))
    torch.testing.assert_close(before, after)
    assert not off.Theta[:, 2].any()
    torch.testing.assert_close(off.Theta[:, 3], averages.Theta[:, 3])


def test_the_likelihood_of_mixed_ranks_is_dense():
    averages, parameters = make_mixed()
    assert count_ranks(parameters).tolist() == [0, 1, 3, 2]
    trimmed = trim(averages, parameters, 3)[1]
    assert trimmed.shape == (4, 6, 3)
    x = 2 * torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    Sigma, pi, mu = (
        numpy(t) for t in (covariances(parameters), averages.weight, averages.Theta[:, 0])
    )

    def dense(columns: list[int]) -> np.ndarray:
        place = np.ix_(columns, columns)
        each = [
            multivariate_normal(mu[k][columns], Sigma[k][place]).logpdf(numpy(x)[:, columns])
            for k in range(4)
        ]
        return logsumexp(np.log(pi)[:, None] + each, axis=0)

    for one in (parameters, trimmed):
        found = numpy(log_prob(x, operands(one)))
        np.testing.assert_allclose(found, dense(list(range(6))), rtol=1e-10)
        missing = torch.zeros(50, 6, dtype=torch.bool)
        missing[:, 2] = True
        observed = numpy(observed_components(x, missing, observed_operands(one)).squeeze(1))
        found = logsumexp(observed + numpy(one.log_weights), axis=1)
        np.testing.assert_allclose(found, dense([0, 1, 3, 4, 5]), rtol=1e-10)


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_steps_leave_switched_off_factors_alone(rate):
    averages, parameters = make_mixed()
    x = torch.randn(400, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    narrow = trim(averages, parameters, 3)
    for wide in (True, False):
        before = (averages, parameters) if wide else narrow
        copies = [type(t)(*(one.clone() for one in t)) for t in before]
        statistics = expected_statistics(copies[1], x)
        step = StepOptions(rate, free_bound(), FLOOR)
        found = natural_step(*copies, statistics, step)
        assert count_ranks(found[1]).tolist() == [0, 1, 3, 2]
        if wide:
            expected = found
    torch.testing.assert_close(covariances(found[1]), covariances(expected[1]))


MANY = (0, 1, 2, 3, 5) * 6


def test_projections_follow_the_sum_of_the_ranks():
    parameters = make_mixed(MANY, d=9)[1]
    x = torch.randn(20, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    ops = operands(parameters)
    assert ops.packed is not None
    log_p, Y = project_packed(x, ops, ops.packed)
    assert Y.values.shape == (20, sum(MANY))
    assert ops.packed.Gamma.shape == (sum(MANY), 9)
    _, mu, E, Gamma, _ = parameters
    xt = x.unsqueeze(1) - mu
    every = torch.einsum("bkd,kdl->bkl", xt, Gamma)
    torch.testing.assert_close(Y.unpack(), every)
    rows, components = torch.randint(20, (50,)), torch.randint(len(MANY), (50,))
    torch.testing.assert_close(Y.take(rows, components), every[rows, components])
    precisions = E.diag_embed() - Gamma @ Gamma.mT
    quadratic = torch.einsum("bki,kij,bkj->bk", xt, precisions, xt)
    volume = torch.linalg.slogdet(precisions).logabsdet - 9 * np.log(2 * np.pi)
    torch.testing.assert_close(log_p, 0.5 * (volume - quadratic))


@pytest.mark.parametrize("elements", [1, 4 * 9 * 5, 1 << 20])
def test_determinants_leave_out_factors_beyond_the_rank(elements):
    _, _, E, Gamma, _ = make_mixed(MANY, d=9)[1]
    # Off the diagonal too, as rounding may leave it.
    Gamma = torch.where(Gamma != 0, Gamma + 0.01, 0)
    dense = torch.linalg.slogdet(E.diag_embed() - Gamma @ Gamma.mT).logabsdet - E.log().sum(dim=1)
    for ranks in (None, torch.tensor(MANY)):
        found = latent_log_determinant(E, Gamma, ranks, elements)
        torch.testing.assert_close(found, dense)
    # What lies beyond is not read.
    ranks = torch.tensor(MANY)
    Gamma = torch.where(torch.arange(5) < ranks.view(-1, 1, 1), Gamma, torch.nan)
    found = latent_log_determinant(E, Gamma, ranks, 1)
    torch.testing.assert_close(found, dense)


def test_components_without_any_factor_have_no_projections():
    parameters = make_mixed((0,) * 30)[1]
    x = torch.randn(8, 6, dtype=torch.float64)
    ops = operands(parameters)
    assert ops.packed is not None
    log_p, Y = project_packed(x, ops, ops.packed)
    assert Y.values.shape == (8, 0)
    assert not Y.unpack().any()
    assert not Y.take(torch.tensor([1, 2]), torch.tensor([0, 29])).any()
    Sigma = [np.diag(1 / numpy(e)) for e in parameters.precision_diag]
    dense = [
        multivariate_normal(numpy(mu), sigma).logpdf(numpy(x))
        for mu, sigma in zip(parameters.means, Sigma, strict=True)
    ]
    np.testing.assert_allclose(numpy(log_p).T, dense)


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_components_of_each_rank_step_as_if_alone(share):
    """Zero factors are left out of products, and components of similar ranks step in groups."""
    ranks = (0, 1, 2, 3, 16) * 6
    averages, parameters = make_mixed(ranks, d=20, l=16)
    K, generator = len(ranks), torch.Generator().manual_seed(3)
    which = torch.randint(int(share * K), (500,), generator=generator)
    noise = torch.randn(500, 20, dtype=torch.float64, generator=generator)
    x = parameters.means[which] + 0.1 * noise
    assert operands(parameters).packed is not None
    widths = group_by_rank(parameters.latent_variances)
    assert widths is not None
    assert widths.tolist() == [1, 1, 2, 4, 16] * 6
    statistics = expected_statistics(parameters, x)
    for found, dense in zip(
        latent_sums(statistics, K), sum_all_pairs(parameters, x, np.ones(500)), strict=True
    ):
        np.testing.assert_allclose(numpy(found), dense, rtol=1e-6, atol=1e-5)
    A, B, S = latent_sums(statistics, K)
    options = StepOptions(0.2, free_bound(20), FLOOR, n_components=K, n_rows=900.0)
    alone = []
    for k, rank in enumerate(ranks):
        own = [type(t)(*(one[k : k + 1].clone() for one in t)) for t in (averages, parameters)]
        sums = LatentSums(
            None,
            A[k : k + 1, : rank + 1, : rank + 1].clone(),
            B[k : k + 1, : rank + 1].clone(),
            S[k : k + 1].clone(),
        )
        if share == 1 or bool(A[k, 0, 0] > 0):
            own = list(natural_step(*trim(*own, rank), statistics._replace(sums=sums), options))
        alone.append((covariances(own[1])[0], own[0].Theta[0, 0]))
    found, new = natural_step(averages, parameters, statistics, options)
    assert count_ranks(new).tolist() == list(ranks)
    for k, (Sigma, mean) in enumerate(alone):
        torch.testing.assert_close(covariances(new)[k], Sigma)
        torch.testing.assert_close(found.Theta[k, 0], mean)


def test_pairs_of_mixed_ranks_are_evaluated_without_zero_factors():
    """By a screen, and with each component's own number of sums."""
    ranks, K, l = (0, 1, 2, 3, 16) * 12, 60, 16
    parameters = make_mixed(ranks, d=20, l=l)[1]
    x = draw_rows(parameters, 400)
    joint, Y = project(x, joint_operands(parameters))
    log_weights = parameters.log_weights
    search = CandidateSearch(make_screen(parameters), 20, part_elements=20 * 7)
    block = search.evaluate(x, x.square(), parameters, log_weights)
    torch.testing.assert_close(block.joint, joint.gather(1, block.components))
    index = torch.arange(400).unsqueeze(1), block.components
    torch.testing.assert_close(block.Y, Y[index])
    found = expected_statistics(parameters, x, search=search._replace(n_candidates=K))
    dense = sum_all_pairs(parameters, x, np.ones(400))
    for ours, theirs in zip(latent_sums(found, K), dense, strict=True):
        np.testing.assert_allclose(numpy(ours), theirs, rtol=1e-6, atol=2e-3)


@pytest.mark.parametrize("K", [30, 5])
def test_sums_of_mixed_ranks_are_those_of_all_pairs(K):
    """Pair by pair, and as dense products."""
    ranks = ((0, 1, 2, 3, 20) * 6)[:K]
    parameters = make_mixed(ranks, d=24, l=20)[1]
    x = draw_rows(parameters, 700)
    assert operands(parameters).packed is not None
    found = latent_sums(expected_statistics(parameters, x), K)
    for ours, theirs in zip(found, sum_all_pairs(parameters, x, np.ones(700)), strict=True):
        np.testing.assert_allclose(numpy(ours), theirs, rtol=1e-6, atol=2e-3)


@pytest.mark.parametrize("screened", [False, True])
def test_zero_factors_before_others_leave_sums_right(screened):
    """No step puts them there, but the parameters of a mixture may."""
    sorted_ = make_mixed((0, 1, 2, 3, 20) * 12, d=24, l=20)[1]
    parameters = sorted_._replace(
        precision_factors=factor_major(sorted_.precision_factors.roll(4, dims=2)),
        latent_variances=sorted_.latent_variances.roll(4, dims=1),
    )
    x = draw_rows(parameters, 400)
    search = CandidateSearch(make_screen(parameters), 60) if screened else None
    found = latent_sums(expected_statistics(parameters, x, search=search), 60)
    for ours, theirs in zip(found, sum_all_pairs(parameters, x, np.ones(400)), strict=True):
        np.testing.assert_allclose(numpy(ours), theirs, rtol=1e-6, atol=2e-3)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")
def test_zero_factors_take_no_memory():
    """Before and after a step."""
    d, l = 1024, 63
    ranks, bound = torch.tensor([l] + 149 * [4]), torch.full((d,), 1e4)
    generator = torch.Generator().manual_seed(0)
    Theta = torch.randn(150, l + 1, d, generator=generator)
    Theta[:, 1:] *= (torch.arange(l) < ranks.unsqueeze(1)).unsqueeze(2)
    averages = Averages(Theta, torch.ones(150, d), torch.full((150,), 1 / 150))
    averages, parameters = trim(*rotate_averages(averages, bound, 1e-6), l)

    def share_in_memory() -> float:
        arrays = averages.Theta, parameters.precision_factors
        resident = resident_bytes({t.data_ptr() for t in arrays})
        return resident / sum(t.nbytes for t in arrays)

    assert share_in_memory() < 0.2
    x = parameters.means + torch.randn(150, d, generator=generator)
    statistics = expected_statistics(parameters, x)
    step = StepOptions(0.1, bound, 1e-6)
    averages, parameters = natural_step(averages, parameters, statistics, step)
    assert count_ranks(parameters).tolist() == ranks.tolist()
    assert share_in_memory() < 0.2


def resident_bytes(addresses: set[int]) -> int:
    """Count the bytes in memory of the mappings of this process with these addresses."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            first, last = (int(part, 16) for part in name.split("-"))
            inside = any(first <= address < last for address in addresses)
        elif inside and name == "Rss:":
            total += 1024 * int(values[0])
    return total
