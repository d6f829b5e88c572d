"""The mixture as a torch module: what it is made of, how it changes, and where it can sit."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from sklearn.datasets import load_iris
from sklearn.mixture import GaussianMixture
from torch import nn

from factormix import InputError, PrecisionMixture
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
    assert [name for name, _ in mixture.named_parameters()] == [
        "logits",
        "means",
        "precision_diag",
        "precision_factors",
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
        with torch.no_grad():
            for parameter in mixture.parameters():
                parameter.add_(1)
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
    for x in (torch.zeros(5, 4), torch.zeros(3), torch.zeros(1, 1, 3)):
        for compute in (mixture.log_prob, mixture.responsibilities, mixture.posterior):
            with pytest.raises(InputError, match=r"x must have the shape \(n, 3\)"):
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
    assert set(mixture.state_dict()) == {n for n, _ in mixture.named_parameters()}


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
    mixture.means.add_(1)


def by_data(mixture: PrecisionMixture) -> None:
    mixture.means.data.add_(1)


def by_vector(mixture: PrecisionMixture) -> None:
    vector = nn.utils.parameters_to_vector(mixture.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, mixture.parameters())


def by_new_parameters(mixture: PrecisionMixture) -> None:
    for _ in range(2):
        mixture.means = nn.Parameter(mixture.means.detach() + 1)


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


def by_constraint(mixture: PrecisionMixture) -> None:
    mixture.constrain_(max_precision=0.2)


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
        by_constraint,
        by_logits,
    ],
)
@torch.no_grad()
def test_scoring_follows_every_way_to_change_a_parameter(change):
    case = random_case(2, 3, 1)
    mixture = case.mixture
    before = mixture.log_prob(case.x)
    change(mixture)
    after = mixture.log_prob(case.x)
    with torch.enable_grad():
        fresh = mixture.log_prob(case.x).detach()
    assert not torch.allclose(fresh, before), "the change must matter"
    assert torch.equal(after, fresh)


def test_scoring_works_in_inference_mode():
    case = random_case(2, 3, 1)
    outside = case.mixture
    with torch.inference_mode():
        inside = case.mixture.log_prob(case.x)
        assert torch.equal(outside.log_prob(case.x), inside)
    # What inference mode left behind must not break training later.
    with torch.no_grad():
        outside.log_prob(case.x)
    outside.log_prob(case.x).sum().backward()
    assert all(p.grad is not None for p in outside.parameters())


@torch.no_grad()
def test_constraining_without_a_bound_leaves_a_valid_mixture_as_it_is():
    for dtype in (torch.float64, torch.float32):
        case = random_case(3, 5, 2, dtype=dtype)
        mixture = case.mixture
        assert mixture.constrain_() is mixture
        assert_close(mixture.precision_diag, case.dense.E, 0)
        assert_close(mixture.log_prob(case.x), case.dense.log_prob(case.points), TOLERANCE[dtype])


@torch.no_grad()
@pytest.mark.parametrize("bound", [0.5, torch.tensor([0.2, 1.0, 0.5, 100.0, 0.3])])
def test_constraining_restores_what_must_hold(bound):
    mixture = random_case(3, 5, 2).mixture
    mixture.precision_factors.mul_(5)
    mixture.precision_factors += torch.randn(
        3, 5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    mixture.constrain_(max_precision=bound, min_eigenvalue=0.1)
    E = mixture.precision_diag
    assert (E > 0).all()
    assert (torch.as_tensor(bound) >= E).all()
    M = dense_M(E, mixture.precision_factors)
    assert np.abs(M - np.eye(2) * np.diagonal(M, axis1=1, axis2=2)[:, None]).max() < 1e-12
    assert np.diagonal(M, axis1=1, axis2=2).min() > 0.1 - 1e-12
    assert (np.linalg.eigvalsh(dense_precision(E, mixture.precision_factors)) > 0).all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_constraining_makes_a_density_of_what_a_wild_step_left(dtype):
    case = random_case(3, 5, 2, dtype=dtype)
    mixture = case.mixture
    mixture.precision_diag[0, 0] = -1.0
    mixture.precision_diag[1] = 0.0
    mixture.precision_factors[2].mul_(1e6)
    mixture.constrain_(max_precision=20.0, min_eigenvalue=0.1)
    assert (mixture.precision_diag > 0).all()
    assert (mixture.latent_variances > 0.1 - 1e-5).all()
    assert (mixture.latent_variances < 1 + 1e-5).all()
    assert mixture.component_log_prob(case.x).isfinite().all()


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
    mixture = PrecisionMixture(torch.ones(3), *start, factors)
    model = nn.Sequential(Affine(4), mixture)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    values = []
    for _ in range(250):
        optimiser.zero_grad()
        value = model(X).mean() + model[0].log_scale.sum()
        (-value).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        optimiser.step()
        mixture.constrain_(max_precision=100.0, min_eigenvalue=0.01)
        values.append(value.item())
    single = GaussianMixture(1, covariance_type="diag").fit(X.numpy()).score(X.numpy())
    assert values[-1] > single + 1, "three components with factors explain more than one without"
    assert np.isfinite(values).all()
    assert (mixture.latent_variances > 0.01 - 1e-5).all()
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
            torch.func.vmap(lambda row: mixture.log_prob(row[None]))(x)[:, 0], first
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
