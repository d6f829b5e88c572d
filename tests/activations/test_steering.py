"""Steering: the exact arithmetic of each move, and a network that is unchanged afterwards."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

from factormix import InputError, PrecisionMixture
from factormix.activations import MixtureCoder, steer
from mixtures import make_mixture
from networks import Network, make_ids

WIDTH = 8


@pytest.fixture(scope="module")
def mixture():
    return PrecisionMixture.from_parameters(make_mixture(5, WIDTH, 3, spread=1.0))


def hidden_after(network, ids, layer="blocks.1"):
    """Return what a forward pass gives at a layer."""
    seen = []
    hook = dict(network.named_modules())[layer].register_forward_hook(
        lambda module, arguments, output: seen.append(output)
    )
    try:
        network(ids)
    finally:
        hook.remove()
    return seen[0]


def test_moves_are_exact_and_reach_what_follows(mixture):
    network, ids = Network().eval(), make_ids(3)
    x = network.hidden(ids, 2).detach()
    Lambda, mu = mixture.loadings.float(), mixture.means.float()
    code = torch.tensor([0.5, -1.0, 2.0])
    coder = MixtureCoder(mixture)
    z = coder.encode_in(x, 2)
    for options, expected in (
        ({"component": 2, "factor": 1, "amount": 1.5}, x + 1.5 * Lambda[2, :, 1]),
        ({"how": "centroid", "component": 2, "amount": 0.25}, 0.75 * x + 0.25 * mu[2]),
        ({"how": "code", "component": 2, "code": code}, x + (code - z) @ Lambda[2].T),
        (
            {"how": "code", "component": 2, "code": {1: 2.0}},
            x + (2.0 - z[..., 1:2]) * Lambda[2, :, 1],
        ),
        ({"how": "off"}, x),
    ):
        with steer(network, "blocks.1", mixture, **options):
            found, beside = hidden_after(network, ids)
            logits = network(ids)
        assert beside == "beside"
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        last = found + torch.tanh(network.blocks[2].mix(found))
        torch.testing.assert_close(logits, network.head(last))
    assert torch.equal(hidden_after(network, ids)[0], x)


def test_a_code_that_was_set_is_encoded_near_it(mixture):
    """Posterior means shrink: moving x by Lambda dz moves its code by (I - M) dz."""
    network, ids = Network().eval(), make_ids(3)
    coder, target = MixtureCoder(mixture, torch.float64), torch.tensor([1.0, 0.0, -1.0])
    x = network.hidden(ids, 2).detach().double()
    with steer(network.double(), "blocks.1", coder, "code", component=1, code=target):
        moved = hidden_after(network, ids)[0]
    before, after = coder.encode_in(x, 1), coder.encode_in(moved, 1)
    M = coder.latent_variances[1]
    torch.testing.assert_close(after, before + (1 - M) * (target - before), atol=1e-5, rtol=1e-5)


def test_only_members_are_moved(mixture):
    network, ids = Network().eval(), make_ids(20)
    x = network.hidden(ids, 1).detach()
    own = MixtureCoder(mixture).encode(x).components
    k = int(own.flatten().mode().values)
    assert 0 < (own == k).float().mean() < 1
    with steer(network, "blocks.0", mixture, component=k, amount=2.0, members_only=True):
        found = hidden_after(network, ids, "blocks.0")[0]
    moved = (found != x).any(dim=-1)
    assert torch.equal(moved, own == k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how", ["loading", "centroid", "code"])
def test_the_dtype_of_the_network_is_kept(mixture, dtype, how):
    network, ids = Network().eval().to(dtype), make_ids(2)
    code = {"code": {0: 1.0}} if how == "code" else {}
    with steer(network, "blocks.1", mixture, how, amount=0.5, **code):
        found = hidden_after(network, ids)[0]
        assert network(ids).dtype == dtype
    assert found.dtype == dtype
    assert found.isfinite().all()


@pytest.mark.parametrize("how", ["loading", "centroid", "code"])
def test_autocast_changes_no_move(mixture, how):
    x = 100 * torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(0))
    code = {"code": {0: 1.0}} if how == "code" else {}
    options = {"component": 1, "amount": 0.5, "members_only": True, **code}
    moved = steer(Network(), "blocks.1", mixture, how, **options).move(x)
    with torch.autocast("cpu", torch.bfloat16):
        again = steer(Network(), "blocks.1", mixture, how, **options).move(x)
    assert torch.equal(moved, again)


def test_hooks_are_removed_after_errors_and_nest(mixture):
    network, ids = Network().eval(), make_ids(2)
    before = network(ids)
    with pytest.raises(RuntimeError, match="inside"), steer(network, "blocks.1", mixture):
        raise RuntimeError("inside")
    assert not network.blocks[1]._forward_hooks
    steering = steer(network, "blocks.1", mixture, amount=1.0)
    with steering, steering:
        twice = hidden_after(network, ids)[0]
    expected = network.hidden(ids, 2) + 2 * mixture.loadings[0, :, 0].float()
    torch.testing.assert_close(twice, expected, atol=1e-5, rtol=1e-5)
    with steering:
        steering.how = "off"
        assert torch.equal(network(ids), before)
    assert torch.equal(network(ids), before)


def test_gradients_flow_through_a_move(mixture):
    network, ids = Network().eval(), make_ids(2)
    with steer(network, "blocks.1", mixture, "centroid", amount=0.5):
        network(ids).sum().backward()
    steered = network.embed.weight.grad.clone()
    assert steered.isfinite().all()
    assert steered.abs().sum() > 0


Pair = namedtuple("Pair", "hidden rest")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda h: h,
        lambda h: (h, 1),
        lambda h: [h, 1],
        lambda h: Pair(h, 1),
        lambda h: OrderedDict(hidden=h, rest=1),
        lambda h: ((h, 2), 1),
    ],
)
def test_outputs_of_any_form_keep_it(mixture, wrap):
    class Layer(nn.Module):
        def forward(self, x):
            return wrap(x)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x):
            return self.layer(x)

    x = torch.zeros(2, WIDTH)
    network = Whole()
    with steer(network, "layer", mixture, "centroid", component=3):
        found = network(x)
    expected = wrap(mixture.means[3].float().expand(2, WIDTH))
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layer": "block.1"}, "no layer 'block.1'"),
        ({"layer": "blocks"}, "'blocks' is a ModuleList, which is not called"),
        ({"component": 5}, "component must lie between 0 and 4, not 5"),
        ({"component": 1.5}, "component must lie between 0 and 4, not 1.5"),
        ({"component": "a"}, "component must lie between 0 and 4, not 'a'"),
        ({"factor": None}, "factor must lie between 0 and 2, not None"),
        ({"amount": "2"}, "amount must be a finite number, not '2'"),
        ({"how": "code", "code": "zero"}, "code must be 3 finite numbers"),
        ({"how": "code", "code": {"a": 1.0}}, "code has no factor 'a'"),
        ({"how": "code", "code": {0: "x"}}, "code must be 3 finite numbers"),
        ({"network": len}, "the network is a builtin_function_or_method"),
        ({"factor": 3}, "factor must lie between 0 and 2, not 3"),
        ({"how": "up"}, "how must be one of 'loading'"),
        ({"amount": float("nan")}, "amount must be a finite number"),
        ({"how": "code"}, "go together"),
        ({"code": {0: 1.0}}, "go together"),
        ({"how": "code", "code": {3: 1.0}}, "code has no factor 3"),
        ({"how": "code", "code": torch.zeros(2)}, "code must be 3 finite numbers"),
        ({"how": "code", "code": {0: float("inf")}}, "code must be 3 finite numbers"),
    ],
)
def test_wrong_options_are_named_before_the_pass(mixture, options, sentence):
    with pytest.raises(InputError, match=sentence):
        steer(**{"network": Network(), "mixture": mixture, "layer": "blocks.1", **options})


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("how", "up", "how must be one of 'loading'"),
        ("how", "code", "how='code' needs a code"),
        ("amount", "2", "amount must be a finite number, not '2'"),
    ],
)
def test_wrong_changes_within_the_context_are_named(mixture, name, value, sentence):
    network, ids = Network().eval(), make_ids(1)
    before = network(ids)
    with steer(network, "blocks.1", mixture) as steering:
        setattr(steering, name, value)
        with pytest.raises(InputError, match=sentence):
            network(ids)
    assert torch.equal(network(ids), before)


def test_some_factors_of_a_code_may_be_whole_numbers(mixture):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    codes = [{0: 1, 2: 2}, {0: 1.0, 2: 2.0}]
    first, second = (steer(Network(), "blocks.1", mixture, "code", code=c).move(x) for c in codes)
    assert torch.equal(first, second)


def test_numbers_may_come_in_tensors_as_those_of_codes_do(mixture):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    component = MixtureCoder(mixture).encode(x).components[0]
    plain = steer(Network(), "blocks.1", mixture, component=int(component), factor=1)
    found = steer(Network(), "blocks.1", mixture, component=component, factor=torch.tensor(1))
    assert torch.equal(found.move(x), plain.move(x))
    for wrong in (torch.tensor(5), torch.tensor(1.0), torch.tensor([0, 1])):
        with pytest.raises(InputError, match="component must lie between 0 and 4"):
            steer(Network(), "blocks.1", mixture, component=wrong)


def test_a_layer_of_another_width_is_named(mixture):
    network = Network()
    with (
        steer(network, "head", mixture),
        pytest.raises(InputError, match="the mixture has 8 features: steer the layer"),
    ):
        network(make_ids(1))
