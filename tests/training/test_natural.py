"""The natural-gradient solver beyond the contract of all solvers."""

from __future__ import annotations

import dataclasses
import math
import os

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from factormix import MFA, PrecisionMixture, datasets
from factormix.core.averages import Averages, Components, prediction_widths, rotate_averages
from factormix.data.batches import Batch
from factormix.errors import InputError
from factormix.solvers import EM, NaturalGradient, Problem
from factormix.training.solvers import step
from factormix.training.solvers.components import split_heaviest
from factormix.training.solvers.schedule import Growth, Seeding
from factormix.training.solvers.seeding import anneal_centroids


def clusters(K: int, d: int, n: int, seed: int = 0, l: int = 2) -> tuple[PrecisionMixture, Tensor]:
    """Make a mixture of long, thin components that pass each other, and n samples of it."""
    generator = torch.Generator().manual_seed(seed)
    normal = {"generator": generator, "dtype": torch.float64}
    means = torch.randn(K, d, **normal)  # type: ignore[call-overload]
    loadings = torch.tensor([1.0, 0.3], dtype=torch.float64)[:l] * torch.randn(K, d, l, **normal)  # type: ignore[call-overload]
    noise = torch.full((K, d), 0.05, dtype=torch.float64)
    truth = PrecisionMixture.from_generative(torch.full((K,), 1.0 / K), means, loadings, noise)
    return truth, truth.sample(n, generator=generator).float()


def components(model: MFA) -> list[int]:
    return [int(entry["components"]) for entry in model.history_]


def test_the_truth_is_recovered():
    truth, x = clusters(K=12, d=40, n=24_000)
    held_out = truth.sample(4000, generator=torch.Generator().manual_seed(9))
    model = MFA(12, 2, random_state=0).fit(x.numpy())
    best = truth.log_prob(held_out).mean().item()
    assert (
        model.score(held_out.numpy()) > best - 0.05
    )  # 1,920 parameters from 24,000 rows cost 0.04
    apart = torch.cdist(truth.means.detach(), torch.as_tensor(model.means_).double()).numpy()
    pairs = linear_sum_assignment(apart)
    assert apart[pairs].max() < 0.5
    assert np.abs(model.weights_[pairs[1]] * 12 - 1).max() < 0.2


def test_the_mean_of_a_component_with_strong_loadings_is_found():
    """Nearly all variance lies along one direction, where classical EM hardly moves a mean."""
    generator = np.random.default_rng(0)
    x = 3 + generator.normal(size=(5000, 1)) @ np.ones((1, 20))
    x += 0.01 * generator.normal(size=x.shape)
    model = MFA(1, 1, random_state=0, max_epochs=3).fit(x)
    assert np.abs(model.means_[0] - x.mean(axis=0)).max() < 0.1
    assert np.linalg.norm(model.loadings_[0]) == pytest.approx(math.sqrt(20), rel=0.05)


def test_it_is_above_em_in_fewer_passes():
    truth, x = clusters(K=12, d=20, n=6000, seed=3)
    held_out = truth.sample(4000, generator=torch.Generator().manual_seed(9)).numpy()
    ours = [MFA(12, 2, max_epochs=5, random_state=s).fit(x).score(held_out) for s in range(3)]
    em = EM(iterations=20, tol=0)
    theirs = [MFA(12, 2, solver=em, random_state=s).fit(x).score(held_out) for s in range(3)]
    assert np.median(ours) > np.median(theirs)


def test_excess_components_are_pruned_to_k():
    _, x = clusters(K=6, d=10, n=9000)
    model = MFA(6, 2, random_state=0, max_epochs=2).fit(x.numpy())
    numbers = components(model)
    assert max(numbers) > 6
    assert numbers[-1] == 6
    assert sorted(numbers[5:], reverse=True) == numbers[5:]
    assert model.weights_.shape == (6,)
    assert model.weights_.sum() == pytest.approx(1)


@pytest.mark.parametrize("rows", [20, 60, 500, 1500, 4000])
@pytest.mark.parametrize("epochs", [1, 2, None])
def test_k_components_are_left_however_short_the_run(rows, epochs):
    _, x = clusters(K=4, d=8, n=rows)
    model = MFA(5, 2, random_state=0, max_epochs=epochs).fit(x.numpy())
    assert model.means_.shape == (5, 8)
    assert np.isfinite(model.score(x.numpy()))


def test_a_component_whose_rows_others_explain_is_pruned_first():
    """Three clusters and twice as many components: one on each of them is left."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [20.0, 0.0], [0.0, 20.0]])
    x = centres.repeat(200, 1) + torch.randn(600, 2, generator=generator)
    solver = NaturalGradient(first_components=6)
    problem = Problem(3, 2, 1, torch.tensor(100.0), batches_per_epoch=20, epochs=2, batch_size=30)
    plan = solver.plan(problem)
    state = plan.init()
    for _ in range(2):
        for batch in x.split(30):
            state, _ = step(plan, state, Batch(batch))
    found = torch.cdist(centres, state.parameters.means)
    assert len(state.parameters.means) == 3
    assert found.min(dim=1).values.max() < 1


def test_a_stream_has_k_components_from_the_first_row():
    _, x = clusters(K=6, d=10, n=6000)
    model = MFA(6, 2, random_state=0, batch_size=100)
    for batch in x.split(100):
        model.partial_fit(batch.numpy())
        assert model.predict_proba(batch[:2].numpy()).shape == (2, 6)
    assert model.score(x.numpy()) > MFA(1, 2, random_state=0).fit(x.numpy()).score(x.numpy())


def test_many_components_grow_by_splitting():
    _, x = clusters(K=30, d=6, n=12_000)
    model = MFA(60, 2, solver=NaturalGradient(first_components=15), random_state=0).fit(x.numpy())
    numbers = components(model)
    seeded = [n for n, e in zip(numbers, model.history_, strict=True) if e["epoch"] > 0.3]
    assert min(seeded) >= 15
    assert numbers[-1] == 60
    assert model.history_[-1]["components_in_use"] >= 0.98 * 60


@pytest.mark.parametrize("K", [10, 100])
def test_components_expect_new_rows_to_be_wider(K):
    """By (n + p) / (n - p), for n rows to which p numbers were fitted in each feature."""
    _, x = clusters(K=30, d=6, n=2000)
    model = MFA(K, 1, max_epochs=4, batch_size=500, random_state=0).fit(x.numpy())
    state = model._run.state
    widths = 1 / (state.parameters.precision_diag * state.averages.V)
    free = state.parameters.precision_diag < 0.999 * state.applied_bound
    n, p = 2000 / K, 2
    assert widths[free].median() == pytest.approx((n + p) / (n - p), rel=0.1)
    assert (widths[free] > 1).float().mean() > 0.99


def test_missing_entries_do_not_make_variances_wider_and_wider():
    """Imputed entries have the variances of the model; only the result has wider ones."""
    _, x = clusters(K=30, d=6, n=1200)
    gaps = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    rows = x.masked_fill(gaps, torch.nan).numpy()
    model = MFA(110, 0, max_epochs=12, batch_size=300, random_state=0).fit(rows)
    state = model._run.state
    free = state.parameters.precision_diag < 0.999 * state.applied_bound
    widths = 1 / (state.parameters.precision_diag * state.averages.V)
    assert widths[free].max() < 1.001
    wider = state.parameters.precision_diag / state.mixture.precision_diag
    assert (wider[free] > 1.02).all()
    assert model.noise_variances_.mean() < 1.5 * rows[~np.isnan(rows)].var()


@pytest.mark.parametrize("l", [0, 2])
def test_wider_noise_after_gaps_keeps_loadings_and_bounds(l):
    """The residual variance is widened and then bounded: variances at the bound stay there."""
    _, x = clusters(K=3, d=6, n=300, l=2)
    x[:, 3] *= 1e-3
    gaps = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    rows = x.masked_fill(gaps, torch.nan).numpy()
    state = MFA(3, l, max_precision=100, dtype="float64", random_state=0).fit(rows)._run.state
    narrow, wide = state.parameters, state.mixture
    widths = prediction_widths(state.averages.weight, narrow.latent_variances, state.widened_rows)
    noise = torch.maximum(state.averages.V * widths.unsqueeze(1), 1 / state.applied_bound)
    assert (noise[:, 3] == 1 / state.applied_bound[3]).all()

    def covariance(values):
        E, Gamma = torch.diag_embed(values.precision_diag), values.precision_factors
        return torch.linalg.inv(E - Gamma @ Gamma.mT)

    added = torch.diag_embed(noise - 1 / narrow.precision_diag)
    torch.testing.assert_close(covariance(wide), covariance(narrow) + added)
    torch.testing.assert_close(wide.means, narrow.means)
    Gamma = wide.precision_factors
    M = torch.eye(l, dtype=Gamma.dtype) - Gamma.mT @ (Gamma / wide.precision_diag.unsqueeze(-1))
    torch.testing.assert_close(M, torch.diag_embed(wide.latent_variances))


def test_tiny_weights_work():
    _, x = clusters(K=3, d=2, n=220, l=1)
    model = MFA(101, 1, solver=NaturalGradient(seed_rows=200), batch_size=100, random_state=0)
    model.partial_fit(x.numpy(), sample_weight=np.full(len(x), 1e-20))
    assert np.isfinite(model.score(x.numpy()))


def test_rows_that_averages_remember_are_counted():
    problem = Problem(3, 2, 1, seed=0, batch_size=50)
    plan = NaturalGradient(seed_rows=100).plan(problem)
    # The first hundred rows are known from seeding, before they are learned from.
    state, weights = plan.init(), np.full(100, 1 / 100)
    x = clusters(K=3, d=2, n=1050, l=1)[1]
    for part in x.split(50):
        before, (state, _) = state.samples, step(plan, state, Batch(part))
        for _ in range(int(state.samples - before) // 50):
            rate = plan.schedule.rate(before / 50)
            weights = np.append(weights * (1 - rate), np.full(50, rate / 50))
            before += 50
    assert len(weights) == 1150
    assert state.concentration == pytest.approx(np.sum(weights**2), rel=1e-6)


@pytest.mark.slow
@pytest.mark.skipif("FACTORMIX_DATA" not in os.environ, reason="needs the real FashionMNIST")
def test_a_single_pass_uses_hundreds_of_components():
    """Light components are replaced in time, though none of their rows may be seen meanwhile."""
    train, test = (
        datasets.load("fashion-mnist", classes=list(range(9)), split=split)
        for split in ("train", "test")
    )
    model = MFA(400, 4, max_epochs=1, max_precision=400, random_state=0).fit(train.data)
    assert model.history_[-1]["components_in_use"] >= 0.98 * 400
    assert model.score(test.data) > 960


def test_a_component_that_loses_its_samples_is_revived():
    generator = torch.Generator().manual_seed(0)
    solver = NaturalGradient(forgetting=0.2)
    plan = solver.plan(Problem(4, 3, 1, torch.tensor(100.0), batch_size=100))
    state = plan.init()
    centres = 10 * torch.randn(4, 3, generator=generator)
    revived = []
    for phase in (centres, centres[:2]):
        for _ in range(60):
            which = torch.randint(len(phase), (100,), generator=generator)
            x = phase[which] + torch.randn(100, 3, generator=generator)
            state, info = step(plan, state, Batch(x))
        revived.append(info.scalars["revived"])
    assert revived[1] > revived[0]
    assert (state.parameters.log_weights.exp() > 0.1 / 4).all()


def test_forgetting_follows_a_drift_that_a_decreasing_rate_does_not():
    generator = torch.Generator().manual_seed(0)

    def batch(n: int) -> Tensor:
        return torch.randn(200, 4, generator=generator) + 0.05 * n

    scores = {}
    for forgetting in (None, 0.2):
        solver = NaturalGradient(forgetting=forgetting)
        model = MFA(2, 1, solver=solver, scaling=None, max_precision=10, random_state=0)
        for n in range(300):
            model.partial_fit(batch(n).numpy())
        scores[forgetting] = model.score(batch(300).numpy())
    assert scores[0.2] > scores[None] + 1


@pytest.mark.parametrize("far", [1e3, 1e4])
def test_a_far_outlier_keeps_its_component_and_spoils_no_other(far):
    x = np.random.default_rng(0).standard_normal((500, 6))
    x[0] = far
    for seed in range(3):
        scores = MFA(4, 2, random_state=seed).fit(x).score_samples(x)
        assert np.median(scores) > -10


@pytest.mark.parametrize("solver", ["natural", "em"])
def test_rows_too_far_apart_for_the_format_are_refused(solver):
    x = np.random.default_rng(0).standard_normal((500, 6))
    x[0] = 1e18
    with pytest.raises(InputError, match=r"1e\+18 in column 0 .* use dtype='float64'"):
        MFA(4, 2, random_state=0, solver=solver).fit(x)


@pytest.mark.parametrize(("rows", "epochs"), [(2000, 1), (2000, 3), (900, 8)])
def test_a_short_run_grows_to_k(rows, epochs):
    x = np.random.default_rng(0).standard_normal((rows, 5))
    solver = NaturalGradient(first_components=5)
    assert MFA(40, 1, solver=solver, max_epochs=epochs, random_state=0).fit(x).means_.shape[0] == 40


def test_excess_components_leave_a_stream_gradually():
    _, x = clusters(K=6, d=10, n=6000)
    solver = NaturalGradient(first_components=20)
    model = MFA(7, 2, solver=solver, random_state=0, batch_size=100)
    numbers = [len(model.partial_fit(batch.numpy()).weights_) for batch in x.split(100)]
    assert len(set(numbers)) > 5
    assert numbers[-1] == 7


def test_a_run_stops_when_it_has_converged():
    _, x = clusters(K=3, d=5, n=3000)
    model = MFA(3, 2, random_state=0, max_epochs=300).fit(x.numpy())
    assert model.converged_
    assert model.n_iter_ < 300
    endless = MFA(3, 2, solver=NaturalGradient(tol=0), random_state=0, max_epochs=30)
    assert endless.fit(x.numpy()).n_iter_ == 30


def test_halves_of_a_split_lie_on_both_sides_and_share_the_weight():
    generator = torch.Generator().manual_seed(0)
    Theta, V = torch.randn(3, 2, 4, generator=generator), torch.rand(3, 4, generator=generator)
    weight = torch.tensor([0.7, 0.3, 0.0])
    tensors = Components(Theta, V, weight, torch.ones(3, 4), torch.zeros(3, 4, 1), torch.ones(3, 1))
    before = [t.clone() for t in tensors]
    split_heaviest(tensors, torch.tensor([2]))
    torch.testing.assert_close(weight, torch.tensor([0.35, 0.3, 0.35]))
    torch.testing.assert_close((Theta[0, 0] + Theta[2, 0]) / 2, before[0][0, 0])
    torch.testing.assert_close(Theta[0, 0] - Theta[2, 0], before[0][0, 1])
    torch.testing.assert_close(V[[0, 2]], before[1][[0, 0]])


def test_halves_are_narrower_across_the_cut_and_the_next_cut_is_along_another_loading():
    generator = torch.Generator().manual_seed(0)
    Theta, V = 0.1 * torch.randn(3, 3, 4, generator=generator), torch.full((3, 4), 0.5)
    Theta[:, [1, 2], [0, 1]] += torch.tensor([1.2, 1.0])
    weight = torch.tensor([1.0, 0.0, 0.0])
    bound = torch.full((4,), 1e6)
    components = Components.of(*rotate_averages(Averages(Theta, V, weight), bound, 1e-6))
    before = components.Theta[0].clone()
    split_heaviest(components, torch.tensor([1]), new=True, growth=Growth(narrowing=0.6))
    for half, way in ((0, 0.5), (1, -0.5)):
        torch.testing.assert_close(components.Theta[half, 0], before[0] + way * before[1])
        torch.testing.assert_close(components.Theta[half, 1], 0.6 * before[1])
        torch.testing.assert_close(components.Theta[half, 2], before[2])
    # E, Gamma and M match the loadings of the halves.
    dense = components.split()[1]
    for half in (0, 1):
        Lambda = components.Theta[half, 1:].mT
        covariance = Lambda @ Lambda.mT + components.V[half].diag()
        E, Gamma = dense.precision_diag[half], dense.precision_factors[half]
        torch.testing.assert_close(E.diag() - Gamma @ Gamma.mT, torch.linalg.inv(covariance))
        M = torch.linalg.inv(torch.eye(2) + Lambda.mT @ (E.unsqueeze(1) * Lambda))
        torch.testing.assert_close(M.diagonal(), dense.latent_variances[half])
    # The first loading is the weaker one now.
    assert components.M[0, 0] > components.M[0, 1]
    before = components.Theta[0].clone()
    split_heaviest(components, torch.tensor([2]), new=True, growth=Growth(narrowing=0.6))
    torch.testing.assert_close(components.Theta[0, 0], before[0] + 0.5 * before[2])


def test_growing_components_find_far_clusters_of_a_stream():
    """Ten are there first, each for ten true ones."""
    generator = torch.Generator().manual_seed(0)
    normal = {"generator": generator, "dtype": torch.float64}
    means, loadings = torch.randn(100, 64, **normal), 0.3 * torch.randn(100, 64, 2, **normal)  # type: ignore[call-overload]
    truth = PrecisionMixture.from_generative(
        torch.ones(100), means, loadings, torch.full_like(means, 0.02)
    )
    x = truth.sample(26_000, generator=generator).float()
    solver = NaturalGradient(first_components=10)
    model = MFA(300, 2, solver=solver, batch_size=80, random_state=0)
    model.partial_fit([part.numpy() for part in x[:24_000].split(1000)])
    lost = truth.log_prob(x[24_000:].double()).mean() - model.score(x[24_000:].numpy())
    # It is 11 where a component is cut again and again along the same loading.
    assert lost < 6


@pytest.mark.parametrize(
    ("option", "value"),
    [("offset", 0.0), ("tol", -2e-5),
     ("offset", math.nan), ("cooling", 0.0), ("cooling", 1.5),
     ("forgetting", 0.0), ("forgetting", 1.5), ("min_eigenvalue", 1.0), ("exponent", -0.5),
     ("first_components", 0), ("first_components", 2.5), ("patience", 2.0), ("widening", 0.9),
     ("first_components", True), ("offset", "5"), ("seed_rows", 0), ("seed_rows", -1),
     ("tol", -1.0), ("patience", 0), ("unused_weight", 1.0)],
)  # fmt: skip
def test_an_option_out_of_range_is_refused(option, value):
    with pytest.raises(InputError, match=rf"^{option} must .*, not .*\.$"):
        NaturalGradient(**{option: value})


def test_every_option_has_a_default_that_is_allowed():
    options = {f.name: f.default for f in dataclasses.fields(NaturalGradient)}
    assert NaturalGradient(**options) == NaturalGradient()
    assert NaturalGradient(first_components=np.int64(5)).first_components == 5  # type: ignore[arg-type]


@pytest.mark.parametrize("n_components", [1, 4])
def test_few_long_rows_have_the_centroids_of_a_smaller_space(n_components):
    """Rows that span few dimensions are annealed within them, with the same result."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 40, generator=generator, dtype=torch.float64)
    first = torch.randn(n_components, 40, generator=generator, dtype=torch.float64)
    weights = torch.rand(30, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(200, 40, generator=generator, dtype=torch.float64)).Q

    def annealed(rows: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        draws = torch.Generator().manual_seed(1)
        seeding = Seeding(steps=400, step_rows=16)
        return anneal_centroids(rows, weights, first.clone(), draws, seeding)

    expected = annealed(rows, first) @ turn.mT
    torch.testing.assert_close(annealed(rows @ turn.mT, first @ turn.mT), expected)
