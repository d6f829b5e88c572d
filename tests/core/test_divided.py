"""What places tell each other of rows, against the responsibilities of all components."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, logsumexp, softmax
from torch import Tensor

from conftest import numpy
from factormix.core.divided import Exchange, Heard, hear, told
from factormix.core.parameters import Parameters
from many import many

PLACES = (slice(0, 5), slice(5, 12))


def heard(joint: Tensor, parameters: Parameters) -> list[tuple[Heard, Tensor, Tensor]]:
    """Let two places tell each other; return what each hears, has told, and has made of joint."""
    parts = [joint[:, place].clone() for place in PLACES]
    here = [Parameters(*(t[place] for t in parameters)) for place in PLACES]
    mine = [told(part)[0] for part in parts]
    said = [
        torch.cat([some.logits.logsumexp(dim=0, keepdim=True), one.reshape(-1)])
        for some, one in zip(here, mine, strict=True)
    ]
    found = []
    for place, (some, one) in enumerate(zip(here, mine, strict=True)):

        def gather(message: Tensor, place: int = place) -> Tensor:
            assert torch.equal(message, said[place])
            return torch.stack(said)

        found += hear([one], some, Exchange(gather, place, 7))
    return list(zip(found, mine, parts, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_of_places_are_the_responsibilities_of_all(dtype: torch.dtype):
    parameters = Parameters(*(t.to(dtype) for t in many(K=12)))
    generator = torch.Generator().manual_seed(0)
    joint = 20 * torch.randn(40, 12, generator=generator, dtype=dtype)
    # What is far from all components of a place leaves it almost nothing, and no tiny numbers.
    joint[:8, PLACES[0]] -= torch.linspace(20, 2000, 8, dtype=dtype).unsqueeze(1)
    exact = numpy(joint.double())
    total = logsumexp(exact, axis=1)
    logits = numpy(parameters.logits.double())
    for place, (all_say, mine, relative) in zip(PLACES, heard(joint, parameters), strict=True):
        best = exact[:, place].max(axis=1)
        np.testing.assert_allclose(mine[:, 0], best, rtol=1e-6)
        np.testing.assert_allclose(all_say.log_prob, total - logsumexp(logits), rtol=1e-5)
        shares = all_say.shares(relative, mine[:, 0])
        assert (shares >= 0.99e-30).all()
        np.testing.assert_allclose(
            shares, softmax(exact, axis=1)[:, place], rtol=1e-4, atol=1.01e-30
        )


def test_places_tell_the_second_best_and_the_best_that_stays():
    generator = torch.Generator().manual_seed(0)
    joint = torch.randn(40, 5, generator=generator)
    candidates = torch.tensor([True, False, True, False, False])
    expected = np.sort(numpy(joint), axis=1)
    others = numpy(joint[:, ~candidates]).max(axis=1)
    weights = np.exp(log_softmax(numpy(joint.double()), axis=1))
    best_of_all = numpy(joint).argmax(axis=1)
    mine, which = told(joint, candidates)
    np.testing.assert_array_equal(which, best_of_all)
    np.testing.assert_array_equal(mine[:, 2], expected[:, -2])
    np.testing.assert_array_equal(mine[:, 3], others)
    np.testing.assert_allclose(joint / mine[:, 1:2], weights, rtol=1e-5)
    everything = told(torch.zeros(3, 2), torch.tensor([True, True]))[0]
    assert (everything[:, 3] == -torch.inf).all()
