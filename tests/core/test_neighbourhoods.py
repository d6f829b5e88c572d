"""Neighbourhoods against dense normal distributions in float64."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from factormix.core.neighbourhoods import (
    N_SIDES,
    Neighbourhood,
    estimate_moments,
    list_offsets,
    share_sides,
)

C = 2
"""Channels."""


def make_moments(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    A = torch.randn(n, n, generator=random).double()
    return torch.randn(n, generator=random).double() * 5, A @ A.T / n + 0.1 * torch.eye(n).double()


def test_causal_offsets_come_before_the_pixel_and_are_the_nearest():
    offsets = [tuple(o) for o in list_offsets(4, causal=True)]
    assert offsets == [(0, -1), (-1, 0), (-1, -1), (-1, 1)]
    assert all(o < (0, 0) for o in map(tuple, list_offsets(40, causal=True)))
    around = {tuple(o) for o in list_offsets(9, causal=False)}
    assert around == {(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)}


@pytest.mark.parametrize("causal", [True, False])
def test_many_offsets_are_the_nearest_of_all_and_need_little_memory(causal):
    tracemalloc.start()
    found = list_offsets(500, causal=causal)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    wide = [(y, x) for y in range(-40, 41) for x in range(-40, 41)]
    squares = sorted(y**2 + x**2 for y, x in wide if not causal or (y, x) < (0, 0))
    assert np.square(found).sum(axis=1).tolist() == squares[:500]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_missing_neighbours_have_their_conditional_expectation(dtype):
    offsets, floor = list_offsets(3, causal=True), 0.01
    mean, covariance = make_moments(3 * C)
    found = Neighbourhood.build(mean, covariance, share_sides([offsets]), floor)
    values = torch.randn(4, 3 * C, generator=torch.Generator().manual_seed(0)).to(dtype)
    known = np.array([[1, 1, 1], [0, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
    x = found.whiten(values, known)
    total = covariance.numpy() + floor * np.eye(3 * C)
    for row, mask, context in zip(values.double().numpy(), known, x.double().numpy(), strict=True):
        o = np.repeat(mask, C)
        z = row - mean.numpy()
        if not o.all():
            z[~o] = total[~o][:, o] @ np.linalg.pinv(total[o][:, o]) @ z[o] if o.any() else 0.0
        expected = found.rotation.numpy().T @ z
        np.testing.assert_allclose(context[N_SIDES:], expected, rtol=1e-4, atol=1e-5)
    # Of the three nearest offsets, (0, -1) and (-1, -1) are on the left; two are above.
    np.testing.assert_allclose(x[1, :N_SIDES], [0, 0.5, 0, 0])
    np.testing.assert_allclose(x[3, :N_SIDES], [1, 1, 0, 0])


def test_contexts_are_differentiable_after_some_were_made_without_gradients():
    mean, covariance = make_moments(3 * C)
    found = Neighbourhood.build(mean, covariance, share_sides([list_offsets(3, causal=True)]), 0.01)
    values, known = torch.zeros(2, 3 * C), np.array([[1, 1, 1], [0, 1, 1]], bool)
    with torch.inference_mode():
        found.whiten(values, known)
    values.requires_grad_()
    (gradient,) = torch.autograd.grad(found.whiten(values, known).sum(), values)
    assert gradient.abs().sum() > 0


def test_whitened_contexts_have_unit_variance_and_ignore_unknown_values():
    mean, covariance = make_moments(6)
    found = Neighbourhood.build(mean, covariance, torch.zeros(3, 4).double(), 1e-9)
    z = torch.distributions.MultivariateNormal(mean, covariance).sample((20000,))
    x = found.whiten(z, np.ones((20000, 3), bool))[:, N_SIDES:]
    torch.testing.assert_close(x.T.cov(), torch.eye(6).double(), rtol=0, atol=0.05)
    known = np.array([[True, False, True]])
    torch.testing.assert_close(found.whiten(z[:1], known), found.whiten(z[:1] * 1, known))
    changed = z[:1].clone()
    changed[:, 2:4] = 99.0
    torch.testing.assert_close(found.whiten(changed, known), found.whiten(z[:1], known))


def test_moments_of_complete_rows_are_the_usual_ones():
    rows = torch.randn(300, 4, generator=torch.Generator().manual_seed(1)) * 3 + 100
    blocks = [(part, np.ones(part.shape, bool)) for part in rows.split(70)]
    mean, covariance, floor = estimate_moments(blocks, 0.5, 0.1)
    torch.testing.assert_close(mean, rows.double().mean(0))
    torch.testing.assert_close(covariance, rows.double().T.cov(correction=0))
    assert floor == pytest.approx(0.1 * float(covariance.diagonal().mean()))
    assert estimate_moments(blocks, 0.5, 0.0)[2] == 0.5
    equal = [(torch.full((9, 4), 0.1), np.ones((9, 4), bool))]
    assert estimate_moments(equal, 0.5, 0.1)[2] == 0.5


def test_moments_of_incomplete_rows_are_those_of_the_distribution():
    mean, covariance = make_moments(5)
    torch.manual_seed(0)
    rows = torch.distributions.MultivariateNormal(mean, covariance).sample((40000,))
    known = np.ones(rows.shape, bool)
    known[:20000, 0] = False
    known[10000:30000, 3] = False
    found, spread, _ = estimate_moments([(rows * torch.from_numpy(known), known)], 1e-9, 0.0)
    torch.testing.assert_close(found, mean, rtol=0, atol=0.05)
    torch.testing.assert_close(spread, covariance, rtol=0, atol=0.08)
