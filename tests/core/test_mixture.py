"""The mixture as a torch distribution and module: its contract, and how it is trained."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits, load_iris
from sklearn.mixture import GaussianMixture
from torch import Tensor, distributions, nn
from torch.func import functional_call

from factormix import InputError, PrecisionMixture
from mixtures import draw_rows, make_mixture
from oracles import TOLERANCE, assert_close, cases, dense_M, dense_precision, numpy, random_case


@given(cases())
def test_the_constructor_rotates_the_factors_and_leaves_every_precision_as_it_is(case):
    mixture = case.mixture
    tolerance = TOLERANCE[case.dtype]
    P = dense_precision(mixture.precision_diag, mixture.precision_factors)
    assert_close(torch.tensor(P), case.dense.P, tolerance)
    M = dense_M(mixture.precision_diag, mixture.precision_factors)
    assert_close(torch.diag_embed(mixture.latent_variances), M, tolerance)
    assert_close(mixture.weights, case.dense.weights / case.dense.weights.sum(), tolerance)
    assert_close(mixture.means, case.dense.means, tolerance)
    assert_close(mixture.noise_variances, 1 / case.dense.E, tolerance)


@given(cases())
def test_generative_parameters_make_the_same_mixture_again(case):
    mixture = case.mixture
    again = PrecisionMixture.from_generative(
        mixture.weights, mixture.means, mixture.loadings, mixture.noise_variances
    )
    assert_close(again.log_prob(case.x), case.dense.log_prob(case.points), TOLERANCE[case.dtype])
    Lambda, other = numpy(again.loadings), numpy(mixture.loadings)
    product = torch.tensor(Lambda @ np.swapaxes(Lambda, 1, 2))
    assert_close(product, other @ np.swapaxes(other, 1, 2), TOLERANCE[case.dtype])


def test_sizes_and_description():
    mixture = random_case(3, 5, 2).mixture
    assert (mixture.n_components, mixture.n_features, mixture.n_factors) == (3, 5, 2)
    assert repr(mixture) == "PrecisionMixture(n_components=3, n_features=5, n_factors=2)"
    assert [name for name, _ in mixture.named_buffers()] == [
        "logits",
        "means",
        "precision_diag",
        "precision_factors",
    ]
    assert not list(mixture.parameters())
    trainable = mixture.trainable()
    assert repr(trainable) == "TrainableMixture(n_components=3, n_features=5, n_factors=2)"
    assert [name for name, _ in trainable.named_parameters()] == [
        "logits",
        "scaled_means",
        "log_noise",
        "scaled_loadings",
    ]


def test_without_factors_it_is_scikit_learns_diagonal_mixture():
    X = load_iris().data
    theirs = GaussianMixture(3, covariance_type="diag", random_state=0).fit(X)
    ours = PrecisionMixture(
        *map(torch.from_numpy, (theirs.weights_, theirs.means_, theirs.precisions_))
    )
    assert ours.n_factors == 0
    x = torch.from_numpy(X)
    assert_close(ours.log_prob(x), theirs.score_samples(X), 1e-10)
    assert_close(ours.responsibilities(x), theirs.predict_proba(X), 1e-10)
    assert_close(ours.loadings, np.zeros((3, 4, 0)), 0)


def test_integers_become_the_default_dtype_and_arguments_are_not_shared():
    means = torch.tensor([[0, 1], [2, 3]])
    assert PrecisionMixture(torch.ones(2), means, torch.ones(2, 2)).means.dtype == torch.float32
    weights, means, E, Gamma = random_case(2, 3, 1).arguments
    before = [t.clone() for t in (weights, means, E, Gamma)]
    for mixture in (
        PrecisionMixture(weights, means, E, Gamma),
        PrecisionMixture.from_generative(weights, means, Gamma, E),
    ):
        for values in mixture.buffers():
            values.add_(1)
    for tensor, old in zip((weights, means, E, Gamma), before, strict=True):
        assert torch.equal(tensor, old)


GOOD = {
    "weights": torch.ones(2),
    "means": torch.zeros(2, 3),
    "precision_diag": torch.ones(2, 3),
    "precision_factors": torch.full((2, 3, 1), 0.1),
}
NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weights", torch.ones(3), "weights must be 2 positive numbers, one for each of the means"),
        ("weights", torch.tensor([1.0, 0.0]), "weights must be 2 positive numbers"),
        ("weights", torch.tensor([1.0, -1.0]), "weights must be 2 positive numbers"),
        ("weights", torch.tensor([1.0, NAN]), "weights must be 2 positive numbers"),
        ("weights", torch.tensor([1.0, math.inf]), "must be finite"),
        ("means", torch.zeros(3), r"means must have the shape \(K, d\), not \(3,\)"),
        ("means", torch.full((2, 3), NAN), "must be finite: they hold NaN or infinities"),
        ("precision_diag", torch.ones(2, 2), r"precision_diag must be positive, of the shape"),
        ("precision_diag", torch.zeros(2, 3), "precision_diag must be positive"),
        ("precision_factors", torch.zeros(2, 3), r"must have the shape \(2, 3, l\), not \(2, 3\)"),
        ("precision_factors", torch.full((2, 3, 1), NAN), "must be finite"),
        ("precision_factors", torch.ones(2, 3, 1), "must be positive definite; scale the factors"),
    ],
)
def test_bad_parameters_get_one_sentence(name, value, message):
    PrecisionMixture(**GOOD)
    with pytest.raises(InputError, match=message) as raised:
        PrecisionMixture(**(GOOD | {name: value}))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loadings", torch.zeros(2, 4, 1), r"loadings must have the shape \(2, 3, l\)"),
        ("noise_variances", torch.zeros(2, 3), "noise_variances must be positive"),
        ("loadings", torch.full((2, 3, 1), math.inf), "must be finite"),
    ],
)
def test_bad_generative_parameters_are_named_as_they_were_given(name, value, message):
    good = {
        "weights": torch.ones(2),
        "means": torch.zeros(2, 3),
        "loadings": torch.zeros(2, 3, 1),
        "noise_variances": torch.ones(2, 3),
    }
    PrecisionMixture.from_generative(**good)
    with pytest.raises(InputError, match=message):
        PrecisionMixture.from_generative(**(good | {name: value}))


def test_data_of_another_width_and_a_component_that_is_not_there_get_one_sentence():
    mixture = PrecisionMixture(**GOOD)
    for x in (torch.zeros(5, 4), torch.tensor(0.0), torch.zeros(3, 3, 1)):
        for compute in (mixture.log_prob, mixture.responsibilities, mixture.posterior):
            with pytest.raises(InputError, match=r"x must have the shape \(\.\.\., 3\)"):
                compute(x)
    for component in (2, -1):
        with pytest.raises(InputError, match="component must lie between 0 and 1, not"):
            mixture.sample(1, component=component)


def test_another_dtype_gives_the_same_density_in_that_dtype():
    case = random_case(3, 5, 2)
    mixture = case.mixture
    with torch.no_grad():
        exact = mixture.log_prob(case.x)
        single = mixture.to(torch.float32).log_prob(case.x.float())
        assert single.dtype == torch.float32
        assert_close(single, exact, 1e-4)
        assert mixture.double().log_prob(case.x).dtype == torch.float64


def test_the_state_survives_a_file():
    case = random_case(3, 5, 2)
    mixture, other = case.mixture, random_case(3, 5, 2, seed=1).mixture
    file = io.BytesIO()
    torch.save(mixture.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        different = other.log_prob(case.x)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert not torch.allclose(other.log_prob(case.x), different)
        assert torch.equal(other.log_prob(case.x), mixture.log_prob(case.x))
    assert set(mixture.state_dict()) == {n for n, _ in mixture.named_buffers()}


def test_a_copy_is_independent():
    case = random_case(2, 3, 1)
    mixture = case.mixture
    with torch.no_grad():
        value = mixture.log_prob(case.x)
        twin = copy.deepcopy(mixture)
        twin.means.add_(1)
        assert torch.equal(mixture.log_prob(case.x), value)
        assert not torch.allclose(twin.log_prob(case.x), value)


def in_place(mixture: PrecisionMixture) -> None:
    mixture.scaled_means.add_(1)


def by_data(mixture: PrecisionMixture) -> None:
    mixture.scaled_means.data.add_(1)


def by_vector(mixture: PrecisionMixture) -> None:
    vector = nn.utils.parameters_to_vector(mixture.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, mixture.parameters())


def by_new_parameters(mixture: PrecisionMixture) -> None:
    for _ in range(2):
        mixture.scaled_means = nn.Parameter(mixture.scaled_means.detach() + 1)


def by_state_dict(mixture: PrecisionMixture) -> None:
    mixture.load_state_dict({n: t * 0.9 for n, t in mixture.state_dict().items()})


def by_optimiser(mixture: PrecisionMixture) -> None:
    optimiser = torch.optim.Adam(mixture.parameters(), lr=0.05)
    for parameter in mixture.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()


def by_fused_optimiser(mixture: PrecisionMixture) -> None:
    optimiser = torch.optim.SGD(mixture.parameters(), lr=0.05, fused=True)
    for parameter in mixture.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()


def by_logits(mixture: PrecisionMixture) -> None:
    mixture.logits[0] += 1


@pytest.mark.parametrize(
    "change",
    [
        in_place,
        by_data,
        by_vector,
        by_new_parameters,
        by_state_dict,
        by_optimiser,
        by_fused_optimiser,
        by_logits,
    ],
)
@torch.no_grad()
def test_scoring_follows_every_way_to_change_a_parameter(change):
    case = random_case(2, 3, 1)
    mixture = case.mixture.trainable()
    before = mixture.log_prob(case.x)
    change(mixture)
    after = mixture.log_prob(case.x)
    with torch.enable_grad():
        fresh = mixture.log_prob(case.x).detach()
    assert not torch.allclose(fresh, before), "the change must matter"
    assert torch.equal(after, fresh)


def test_scoring_works_in_inference_mode():
    case = random_case(2, 3, 1)
    outside = case.mixture.trainable()
    with torch.inference_mode():
        inside = case.mixture.trainable().log_prob(case.x)
        assert torch.equal(outside.log_prob(case.x), inside)
    # What inference mode left behind must not break training later.
    with torch.no_grad():
        outside.log_prob(case.x)
    outside.log_prob(case.x).sum().backward()
    assert all(p.grad is not None for p in outside.parameters())


def make_torch_mixture(
    weights: Tensor, means: Tensor, loadings: Tensor, noise: Tensor
) -> distributions.MixtureSameFamily:
    """Build the oracle of torch from the generative parameters."""
    return distributions.MixtureSameFamily(
        distributions.Categorical(weights),
        distributions.LowRankMultivariateNormal(means, loadings, noise),
    )


def draw_generative(K: int, d: int, l: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Draw weights, means, loadings and noise variances in float64."""
    generator = torch.Generator().manual_seed(seed)
    like = {"generator": generator, "dtype": torch.float64}
    return (
        0.1 + torch.rand(K, **like),
        2 * torch.randn(K, d, **like),
        torch.randn(K, d, l, **like),
        0.2 + torch.rand(K, d, **like),
    )


@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (1, 2, 2)])
@pytest.mark.parametrize(("K", "d", "l"), [(3, 4, 2), (1, 1, 1), (2, 3, 5)])
def test_it_is_the_distribution_that_torch_makes_of_the_same_parameters(K, d, l, shape):
    arguments = draw_generative(K, d, l)
    ours, theirs = PrecisionMixture.from_generative(*arguments), make_torch_mixture(*arguments)
    x = 2 * torch.randn(*shape, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for mixture in (ours, ours.trainable()):
        assert isinstance(mixture, distributions.Distribution)
        assert mixture.batch_shape == theirs.batch_shape == ()
        assert mixture.event_shape == theirs.event_shape == (d,)
        torch.testing.assert_close(mixture.log_prob(x), theirs.log_prob(x))
        for name in ("mean", "variance", "stddev"):
            torch.testing.assert_close(getattr(mixture, name), getattr(theirs, name))
        assert mixture.support.check(x).shape == shape
        assert mixture.sample(shape).shape == mixture.rsample(shape).shape == (*shape, d)
        assert not mixture.sample(shape).requires_grad
        assert mixture.component_log_prob(x).shape == (*shape, K)
        assert mixture.responsibilities(x).shape == (*shape, K)
        assert mixture.posterior(x).means.shape == (*shape, K, l)
        for name, constraint in mixture.arg_constraints.items():
            assert constraint.check(getattr(mixture, name)).all()


@pytest.mark.parametrize("sampler", ["sample", "rsample"])
def test_samples_have_the_mean_and_variance_of_the_mixture(sampler):
    torch.manual_seed(0)
    mixture = PrecisionMixture.from_generative(*draw_generative(3, 4, 2)).trainable()
    with torch.no_grad():
        x = getattr(mixture, sampler)((200, 200))
        assert x.shape == (200, 200, 4)
        z = ((x - mixture.mean) / mixture.stddev).flatten(0, 1)
        # Five standard errors; squares of a mixture vary less than those of a Gaussian do here.
        assert z.mean(dim=0).abs().max() < 5 / len(z) ** 0.5
        assert (z.square().mean(dim=0) - 1).abs().max() < 5 * z.square().std() / len(z) ** 0.5


def test_it_is_the_base_of_a_transformed_distribution():
    mixture = PrecisionMixture.from_generative(*draw_generative(2, 3, 1))
    ours = distributions.TransformedDistribution(mixture, [distributions.ExpTransform()])
    theirs = distributions.TransformedDistribution(
        make_torch_mixture(*draw_generative(2, 3, 1)), [distributions.ExpTransform()]
    )
    x = ours.sample((5, 2))
    assert (x > 0).all()
    torch.testing.assert_close(ours.log_prob(x), theirs.log_prob(x))


def correlate(mixture: distributions.Distribution) -> Tensor:
    """Compute the covariance of the first two features in each component, (K,)."""
    if isinstance(mixture, PrecisionMixture):
        return (mixture.loadings[:, 0] * mixture.loadings[:, 1]).sum(dim=1)
    return mixture.component_distribution.covariance_matrix[:, 0, 1]


@pytest.mark.parametrize("strength", [1.0, 0.0])
def test_gradients_reach_the_generative_parameters(strength):
    """Without loadings, all eigenvalues of M are equal and eigenvectors have no derivative."""
    weights, means, loadings, noise = draw_generative(3, 4, 2)
    arguments = [t.requires_grad_() for t in (weights, means, strength * loadings, noise)]
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = PrecisionMixture.from_generative(*arguments), make_torch_mixture(*arguments)
    for compute in (lambda p: p.log_prob(x), lambda p: p.mean, lambda p: p.variance, correlate):
        factor = torch.linspace(1, 2, len(compute(ours)), dtype=torch.float64)
        found, expected = (
            torch.autograd.grad(
                compute(p) @ factor, arguments, retain_graph=True, materialize_grads=True
            )
            for p in (ours, theirs)
        )
        for computed, dense in zip(found, expected, strict=True):
            torch.testing.assert_close(computed, dense)


def test_gradients_reach_the_parameters_in_precision_form():
    arguments = [t.requires_grad_() for t in random_case(2, 3, 2).arguments]
    x = random_case(2, 3, 2).x
    gaps = x.clone()
    gaps[0, 1] = gaps[2] = NAN

    def compute(*values: Tensor) -> tuple[Tensor, ...]:
        mixture = PrecisionMixture(*values)
        return mixture.log_prob(x), mixture.log_prob(gaps), mixture.mean, mixture.variance

    assert torch.autograd.gradcheck(compute, arguments)


@pytest.mark.parametrize("l", [0, 2])
def test_gradients_of_the_trainable_form_agree_with_finite_differences(l):
    case = random_case(2, 3, l)
    mixture = case.mixture.trainable()
    names, values = zip(*mixture.named_parameters(), strict=True)
    x = case.x.clone()
    x[0, 1] = NAN

    def compute(*values: Tensor) -> Tensor:
        return functional_call(mixture, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(compute, [v.detach().clone().requires_grad_() for v in values])


def test_samples_of_one_component_have_exact_gradients():
    """With one factor, the rotation of factors is the identity and draws are smooth functions."""
    arguments = draw_generative(2, 3, 1)[1:]

    def draw(*values: Tensor) -> Tensor:
        mixture = PrecisionMixture.from_generative(torch.ones(2), *values)
        return mixture.rsample((2, 3), generator=torch.Generator().manual_seed(0))

    assert torch.autograd.gradcheck(draw, [t.requires_grad_() for t in arguments])


def test_gradients_of_samples_are_unbiased_except_in_the_weights():
    """The mean of x^2 has a known gradient, and a sum over components gives all of it."""
    torch.manual_seed(0)
    mixture = PrecisionMixture.from_generative(*draw_generative(2, 3, 2)).trainable()
    values = list(mixture.parameters())
    expected = torch.autograd.grad((mixture.mean.square() + mixture.variance).sum(), values)
    draws = mixture.rsample(100_000).square().sum(dim=1).mean()
    found = torch.autograd.grad(draws, values, materialize_grads=True)
    assert not found[0].any(), "the weights get no gradient"
    each = torch.stack([mixture.rsample(50_000, k).square().sum(dim=1).mean() for k in (0, 1)])
    whole = torch.autograd.grad(mixture.weights @ each, values)
    for computed, known in [*zip(found[1:], expected[1:], strict=True), (whole[0], expected[0])]:
        assert known.abs().max() > 0.1
        assert (computed - known).abs().max() < 0.03 * known.abs().max()


def test_nan_entries_are_missing():
    case = random_case(3, 4, 2)
    mixture, x = case.mixture, case.x.clone()
    assert torch.equal(mixture.log_prob(x), mixture.log_prob(x, missing=False))
    x[1, [0, 2]] = x[2, 3] = x[3] = NAN
    found = mixture.log_prob(x)
    torch.testing.assert_close(found[0], mixture.log_prob(case.x[0]))
    torch.testing.assert_close(found[1], mixture.marginal([1, 3]).log_prob(x[1, [1, 3]]))
    torch.testing.assert_close(found[2], mixture.marginal([0, 1, 2]).log_prob(x[2, :3]))
    torch.testing.assert_close(found[3], torch.zeros_like(found[3]))
    torch.testing.assert_close(mixture.responsibilities(x)[3], mixture.weights)
    assert torch.equal(mixture.log_prob(x, x.isnan()), found)
    assert torch.equal(mixture.log_prob(x[:4].view(2, 2, 4)), mixture.log_prob(x[:4]).view(2, 2))
    assert mixture.posterior(x[:4].view(2, 2, 4)).variances.shape == (2, 2, 3, 2)
    assert mixture.log_prob(x, missing=False).isnan().tolist() == x.isnan().any(dim=1).tolist()


@given(cases())
def test_the_trainable_form_starts_as_the_same_mixture(case):
    found = case.mixture.trainable().log_prob(case.x)
    assert_close(found, case.dense.log_prob(case.points), TOLERANCE[case.dtype])
    assert found.dtype == case.dtype


@torch.no_grad()
@given(
    cases(),
    st.sampled_from([0.1, 1.0, 10.0, 1e4]),
    st.integers(0, 2**32 - 1),
)
def test_any_real_parameters_make_a_mixture(case, size, seed):
    mixture = case.mixture.trainable(noise_floor=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for name, values in mixture.named_parameters():
        # The logarithm of a variance has a range that its dtype can hold.
        scale = min(size, 10) if name == "log_noise" else size
        values.copy_(scale * torch.randn(values.shape, generator=generator))
    E, M = mixture.precision_diag.double(), mixture.latent_variances
    assert (E > 0).all()
    assert (mixture.noise_variances > 0.999e-3 * mixture.scale.square()).all()
    assert ((M > 0.5e-6) & (M <= 1)).all()
    for values in (mixture.log_prob(case.x), mixture.mean, mixture.sample(3)):
        assert values.isfinite().all()
    if case.dtype == torch.float64:
        assert_close(M.diag_embed(), dense_M(E, mixture.precision_factors), 1e-9)
        Lambda, D = mixture.loadings, mixture.noise_variances
        dense = distributions.MultivariateNormal(mixture.means, Lambda @ Lambda.mT + D.diag_embed())
        expected = dense.log_prob(case.x.unsqueeze(1))
        assert_close(mixture.component_log_prob(case.x), expected, 1e-6)


def test_the_trainable_form_is_a_module():
    case = random_case(3, 4, 2)
    mixture, other = case.mixture.trainable(), random_case(3, 4, 2, seed=1).mixture.trainable()
    other.load_state_dict(mixture.state_dict())
    assert torch.equal(other.log_prob(case.x), mixture.log_prob(case.x))
    single = copy.deepcopy(mixture).to(torch.float32)
    assert single.log_prob(case.x.float()).dtype == torch.float32
    assert_close(single.log_prob(case.x.float()), numpy(mixture.log_prob(case.x)), 1e-4)
    fixed = mixture.fixed()
    before = fixed.log_prob(case.x)
    assert torch.equal(before, mixture.log_prob(case.x))
    with torch.no_grad():
        for values in mixture.parameters():
            values.add_(1)
    assert torch.equal(fixed.log_prob(case.x), before)
    assert not before.requires_grad
    torch.testing.assert_close(
        mixture.component(1).log_prob(case.x), mixture.component_log_prob(case.x)[:, 1]
    )
    assert type(mixture.marginal([0])) is type(mixture.component(0)) is PrecisionMixture
    with pytest.raises(InputError, match="noise_floor must lie between 0 and 1, not 0"):
        case.mixture.trainable(noise_floor=0)


@pytest.mark.parametrize(
    ("rate", "missing", "least"), [(0.01, 0.0, 100.0), (0.1, 0.0, 130.0), (0.1, 0.2, 90.0)]
)
def test_adam_trains_on_digits_without_a_constraint(rate, missing, least):
    """Some pixels of the digits are constant: their noise has no maximum of the likelihood."""
    X = torch.from_numpy(load_digits().data).float() / 16
    generator = torch.Generator().manual_seed(0)
    variances = X.var(dim=0).clamp(min=1e-3 * X.var()).expand(10, 64)
    loadings = torch.randn(10, 64, 4, generator=generator)
    mixture = PrecisionMixture.from_generative(
        torch.ones(10),
        X[torch.randperm(len(X), generator=generator)[:10]],
        0.1 * variances.sqrt().unsqueeze(-1) * loadings,
        variances,
    ).trainable()
    X[torch.rand(X.shape, generator=generator) < missing] = NAN
    optimiser = torch.optim.Adam(mixture.parameters(), lr=rate)
    values = []
    for step in range(500):
        rows = X if not missing else X[step % 10 :: 10]
        optimiser.zero_grad()
        value = mixture.log_prob(rows).mean()
        (-value).backward()
        optimiser.step()
        values.append(value.item())
    assert np.isfinite(values).all()
    assert values[0] < 40
    assert np.mean(values[-10:]) > least


class Affine(nn.Module):
    """A layer ``x -> scale * x + shift`` with the logarithm of its Jacobian."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(d))
        self.shift = nn.Parameter(torch.zeros(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.log_scale.exp() + self.shift


def test_it_trains_inside_a_larger_model():
    """A change of variables in front of the mixture keeps the likelihood comparable."""
    X = torch.from_numpy(load_iris().data).float()
    generator = torch.Generator().manual_seed(0)
    start = torch.rand(3, 4, generator=generator), torch.ones(3, 4)
    factors = 0.1 * torch.randn(3, 4, 2, generator=generator)
    mixture = PrecisionMixture(torch.ones(3), *start, factors).trainable(noise_floor=0.01)
    model = nn.Sequential(Affine(4), mixture)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    values = []
    for _ in range(250):
        optimiser.zero_grad()
        value = model(X).mean() + model[0].log_scale.sum()
        (-value).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        optimiser.step()
        values.append(value.item())
    single = GaussianMixture(1, covariance_type="diag").fit(X.numpy()).score(X.numpy())
    assert values[-1] > single + 1, "three components with factors explain more than one without"
    assert np.isfinite(values).all()
    with torch.no_grad():
        scored = model(X).mean() + model[0].log_scale.sum()
    assert scored == pytest.approx(values[-1], abs=0.2)


def test_inference_mode_leaves_nothing_behind():
    mixture = PrecisionMixture(torch.ones(2), torch.zeros(2, 3), torch.ones(2, 3))
    x = torch.randn(7, 3)
    with torch.inference_mode():
        first = mixture.log_prob(x).clone()
    with torch.no_grad():
        assert torch.equal(mixture.log_prob(x), first)
        assert torch.allclose(
            torch.func.vmap(lambda row: mixture.log_prob(row, missing=False))(x), first
        )


def test_precision_form_has_the_diagonal_of_m():
    mixture = random_case(3, 4, 2).mixture
    assert torch.equal(mixture.precision_form.latent_variances, mixture.latent_variances)


def test_component_of_a_mixture_is_that_component() -> None:
    case = random_case(4, 5, 2)
    alone = case.mixture.component(2)
    expected = case.mixture.component_log_prob(case.x)[:, 2]
    torch.testing.assert_close(alone.log_prob(case.x), expected)
    with pytest.raises(InputError, match="between 0 and 3"):
        case.mixture.component(4)


def test_arrays_are_taken_as_tensors_are():
    case = random_case(3, 4, 2)
    mixture, x = case.mixture, case.x
    rows = numpy(x)
    missing = np.random.default_rng(0).random(rows.shape) < 0.3
    for name in ("component_log_prob", "log_prob", "responsibilities"):
        method = getattr(mixture, name)
        assert torch.equal(method(rows), method(x))
        assert torch.equal(method(rows, missing), method(x, torch.tensor(missing)))
    assert torch.equal(mixture.log_prob(rows.tolist()), mixture.log_prob(x))
    with pytest.raises(InputError, match="rows of numbers"):
        mixture.log_prob([["a", "b", "c", "d"]])


@pytest.mark.parametrize("trainable", [False, True])
def test_autocast_changes_nothing(trainable):
    fixed = PrecisionMixture.from_parameters(make_mixture(4, 6, 2)).float()
    x = 300 * draw_rows(fixed.precision_form, 20)

    def compute():
        torch.manual_seed(0)
        mixture = fixed.trainable() if trainable else fixed
        posterior = mixture.posterior(x)
        rest = mixture.condition([0], [1.0]).means, mixture.marginal([1, 2]).precision_diag
        moments = mixture.mean, mixture.variance, mixture.loadings, mixture.sample(3)
        return mixture.log_prob(x), mixture.responsibilities(x), *posterior, *rest, *moments

    found = compute()
    with torch.autocast("cpu", torch.float16):
        again = compute()
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("trainable", [False, True])
def test_a_converted_network_keeps_its_mixture_in_float32(dtype, trainable):
    fixed = PrecisionMixture.from_parameters(make_mixture(4, 6, 2)).float()
    short = (300 * draw_rows(fixed.precision_form, 20)).to(dtype)
    mixture = fixed.trainable() if trainable else fixed
    expected = mixture.log_prob(short.float())
    network = nn.Sequential(mixture).to(dtype)
    assert {tensor.dtype for tensor in network.state_dict().values()} == {torch.float32}
    assert torch.equal(network(short), expected)
    assert network.double()[0].means.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_tensors_make_a_mixture_in_float32(dtype):
    fixed = PrecisionMixture.from_parameters(make_mixture(4, 6, 2))
    names = ("weights", "means", "precision_diag", "precision_factors")
    given = [getattr(fixed, name).to(dtype) for name in names]
    mixture = PrecisionMixture(*given)
    assert mixture.means.dtype == torch.float32
    assert torch.equal(mixture.means, given[1].float())
