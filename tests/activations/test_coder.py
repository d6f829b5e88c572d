"""The encoder and decoder against the mixture's own methods and a dense computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from factormix import MFA, InputError, PrecisionMixture
from factormix.activations import MixtureCoder
from mixtures import draw_rows, make_mixture
from oracles import dense_precision, numpy

K, D, L = 12, 7, 3


@pytest.fixture(scope="module")
def mixture():
    return PrecisionMixture.from_parameters(make_mixture(K, D, L))


@pytest.fixture(scope="module")
def rows(mixture):
    return draw_rows(mixture.precision_form, 60)


def test_codes_are_those_of_the_dense_posterior(mixture, rows):
    found = MixtureCoder(mixture, torch.float64).encode(rows.view(6, 10, D))
    E, Gamma = mixture.precision_diag, mixture.precision_factors
    Sigma = np.linalg.inv(dense_precision(numpy(E), numpy(Gamma)))
    Lambda, mu = numpy(mixture.loadings), numpy(mixture.means)
    xt = numpy(rows)[:, None] - mu
    quadratic = np.einsum("nkd,kde,nke->nk", xt, np.linalg.inv(Sigma), xt)
    joint = np.log(numpy(mixture.weights)) - 0.5 * (quadratic + np.linalg.slogdet(Sigma)[1])
    shares = np.exp(joint - joint.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    best = joint.argmax(axis=1)
    assert np.allclose(numpy(found.responsibilities).reshape(60, K), shares, atol=1e-9)
    assert np.array_equal(found.components.view(-1), best)
    # E[z | x] = Lambda' Sigma^-1 (x - mu).
    codes = [Lambda[k].T @ np.linalg.solve(Sigma[k], xt[n, k]) for n, k in enumerate(best)]
    assert np.allclose(numpy(found.codes).reshape(60, L), codes, atol=1e-9)
    decoded = MixtureCoder(mixture, torch.float64).decode(found.codes, found.components)
    expected = [mu[k] + Lambda[k] @ z for k, z in zip(best, codes, strict=True)]
    assert np.allclose(numpy(decoded).reshape(60, D), expected, atol=1e-9)


def test_a_trained_model_encodes_as_its_methods_do():
    x = np.random.default_rng(0).normal(size=(400, 5)) * [1, 2, 3, 1, 1] + 50
    model = MFA(4, 2, random_state=0, dtype="float64").fit(x)
    coder = MixtureCoder(model, torch.float64)
    found = coder.encode(torch.from_numpy(x))
    assert np.array_equal(found.components, model.predict(x))
    assert np.allclose(found.responsibilities, model.predict_proba(x), atol=1e-8)
    assert np.allclose(found.codes, model.transform(x), atol=1e-8)
    decoded = coder(torch.from_numpy(x))
    assert np.allclose(decoded, model.inverse_transform(found.codes.numpy(), model.predict(x)))
    for k in range(4):
        own = found.components == k
        inside = coder.encode_in(torch.from_numpy(x), k)
        assert torch.allclose(inside[own], found.codes[own])


def test_gradients_are_those_of_finite_differences(mixture, rows):
    coder = MixtureCoder(mixture, torch.float64)
    x = rows[:4].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: coder.encode(x).codes, x)
    assert torch.autograd.gradcheck(lambda x: coder.encode(x).responsibilities, x)
    assert torch.autograd.gradcheck(coder, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_formats_stay_finite_inside_a_converted_network(dtype):
    # Squares of such features exceed float16, and precisions exceed both formats' digits.
    scales = torch.tensor([3000.0, 1.0, 0.01, 20.0])
    x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0)) * scales
    model = MFA(3, 2, random_state=0, max_epochs=5).fit(x.to(dtype).float())
    network = nn.Sequential(MixtureCoder(model)).to(dtype)
    assert network[0].means.dtype == torch.float32
    short = x.to(dtype)
    found = network[0].encode(short)
    same = MixtureCoder(model).encode(short.float())
    assert torch.equal(found.components, same.components)
    assert torch.equal(found.codes, same.codes.to(dtype))
    assert network(short).dtype == dtype
    assert network(short).isfinite().all()
    assert network.double()[0].means.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_factors", [0, 1, 12, 23])
def test_short_rows_stay_finite_at_any_rank(dtype, n_factors):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 24, generator=generator) @ torch.randn(24, 24, generator=generator)
    # A massive feature, and another with massive values in a few rows, as in language models.
    x[:, 0] *= 3000
    x[::50, 1] *= 2000
    short = x.clamp(-60_000, 60_000).to(dtype)
    model = MFA(4, n_factors, random_state=0, max_epochs=2).fit(short)
    found = MixtureCoder(model).encode(short)
    assert found.codes.isfinite().all()
    assert torch.allclose(found.responsibilities.sum(dim=1), torch.ones(1000), atol=1e-4)
    assert MixtureCoder(model)(short).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(mixture, rows, dtype):
    # Squares of such rows exceed float16.
    coder, x = MixtureCoder(mixture), 300 * rows.float()
    found, rebuilt, inside = coder.encode(x), coder(x), coder.encode_in(x, 2)
    with torch.autocast("cpu", dtype):
        again, again_rebuilt = coder.encode(x), MixtureCoder(mixture)(x)
        again_inside = coder.encode_in(x, 2)
        product = torch.ones(1, 1) @ torch.ones(1, 1)
    assert product.dtype == dtype
    assert all(map(torch.equal, found, again))
    assert torch.equal(rebuilt, again_rebuilt)
    assert torch.equal(inside, again_inside)


def test_codes_beyond_float16_become_its_largest_number():
    mixture = PrecisionMixture(
        torch.ones(1), torch.zeros(1, 2), torch.full((1, 2), 1e4), torch.full((1, 2, 1), 70.7)
    )
    coder = MixtureCoder(mixture)
    far = torch.tensor([[6e4, 6e4], [-6e4, -6e4], [1.0, 1.0]])
    assert coder.encode(far).codes.abs().max() > 65_504
    codes = coder.encode(far.half()).codes
    assert codes[:2, 0].tolist() == [65_504.0, -65_504.0]
    assert coder(far.half()).isfinite().all()
    assert coder.encode(torch.full((1, 2), torch.nan).half()).codes.isnan().all()


def test_narrow_components_have_exact_shares_in_float32():
    # Terms E mu^2 of 4e8 cancel: products in float32 are wrong by tens of nats.
    means = torch.tensor([[0.0], [0.02], [200.0]], dtype=torch.float64)
    mixture = PrecisionMixture(torch.ones(3), means, torch.full((3, 1), 1e4))
    x = torch.tensor([[0.0], [0.009], [0.02], [200.0]]).double().requires_grad_()
    exact = MixtureCoder(mixture, torch.float64).encode(x).responsibilities
    found = MixtureCoder(mixture).encode(x.float())
    assert torch.allclose(found.responsibilities.double(), exact, atol=1e-3)
    assert torch.equal(found.components, exact.argmax(dim=1))
    (gradient,) = torch.autograd.grad(found.responsibilities[1, 0], x)
    assert gradient[1].abs() > 1


def test_shapes_are_known_on_the_device_meta(mixture, rows):
    coder = MixtureCoder(mixture).to("meta")
    assert coder(rows.float().to("meta")).shape == rows.shape
    assert MixtureCoder(mixture)(rows[:0]).shape == (0, D)


def test_a_coder_is_saved_with_its_network(mixture, rows):
    coder = MixtureCoder(mixture)
    other = MixtureCoder(PrecisionMixture.from_parameters(make_mixture(K, D, L, seed=5)))
    other.load_state_dict(coder.state_dict())
    assert torch.equal(other(rows.float()), coder(rows.float()))


def test_a_mixture_without_factors_decodes_to_its_means():
    plain = PrecisionMixture(
        torch.ones(2), torch.tensor([[0.0, 0.0], [4.0, 4.0]]), torch.ones(2, 2)
    )
    x = torch.tensor([[0.1, 0.2], [5.0, 3.0]])
    assert torch.equal(MixtureCoder(plain)(x), plain.means)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda c: c.encode(torch.zeros(3, 5)),
            r"x must be a tensor of real numbers of shape \(..., 7\), not torch.float32 of shape",
        ),
        (lambda c: c.encode(torch.zeros(3, 7).long()), "x must be a tensor of real numbers"),
        (lambda c: c.encode(np.zeros((3, 7))), "x must be a tensor .*, not a ndarray"),
        (
            lambda c: c.decode(torch.zeros(2, 3), [0, 1]),
            "components must be a tensor .*, not a list",
        ),
        (
            lambda c: c.encode_in(torch.zeros(1, 7), 1.5),
            "component must lie between 0 and 11, not 1.5",
        ),
        (lambda c: c.decode(torch.zeros(2, 3), torch.zeros(3).long()), "one for each code"),
        (lambda c: c.decode(torch.zeros(1, 3), torch.tensor([12])), "lie between 0 and 11"),
        (lambda c: c.encode_in(torch.zeros(1, 7), 12), "component must lie between 0 and 11"),
    ],
)
def test_wrong_input_is_named(mixture, call, sentence):
    with pytest.raises(InputError, match=sentence):
        call(MixtureCoder(mixture))


def test_other_models_are_refused():
    with pytest.raises(InputError, match="mixture is a Linear: give a trained MFA"):
        MixtureCoder(nn.Linear(2, 2))
