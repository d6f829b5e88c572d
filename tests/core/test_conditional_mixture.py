"""Conditional mixtures against loops in float64, SciPy, finite differences and their own draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from scipy.special import logsumexp
from torch import Tensor

from factormix.core.conditional_mixture import (
    ConditionalMixture,
    bin_log_masses,
    cumulative,
    draw_random_mixture,
    draw_targets,
    log_densities,
    mean_and_variance,
    quantiles,
)
from factormix.errors import InputError

D, KINDS, SCALES, FEATURES = 4, 3, 2, 5


def make_mixture(dtype: torch.dtype = torch.float64, *, error: float = 3.0) -> ConditionalMixture:
    generator = torch.Generator().manual_seed(5)
    fixed = [torch.tensor(number, dtype=dtype) for number in (7.0, error, 0.05)]
    return draw_random_mixture(
        torch.randn(D, generator=generator).to(dtype),
        *fixed,
        n_kinds=KINDS,
        n_scales=SCALES,
        n_features=FEATURES,
        generator=generator,
    )


def make_contexts(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def loop_components(mixture: ConditionalMixture, x: Tensor) -> list[tuple[float, float, float]]:
    """Return log-share, mean and width of each component for one context, by loops."""
    p = {name: np.asarray(value, np.float64) for name, value in mixture._asdict().items()}
    c, found = np.asarray(x, np.float64), []
    squares = [(p["features"][:, m] @ c) ** 2 for m in range(FEATURES)]
    energies = [math.log(z + math.exp(p["feature_floors"][m])) for m, z in enumerate(squares)]
    for k in range(KINDS):
        step = p["slopes"][:, k] @ c + p["offsets"][k]
        mean = p["regression"] @ c + p["intercept"] + p["error"] * step
        for s in range(SCALES):
            gate = p["weights"][k, s] + p["gate_slopes"][:, k] @ c
            gate += sum(p["feature_weights"][m, k * SCALES + s] * e for m, e in enumerate(energies))
            log_width = (p["kind_log_widths"][k] + p["scale_log_widths"][k, s]) / 2
            width = max(p["error"] * math.exp(log_width), float(p["least_width"]))
            found.append((gate, mean, width))
    total = logsumexp([gate for gate, _, _ in found])
    return [(gate - total, mean, width) for gate, mean, width in found]


def test_log_density_is_the_sum_over_loops():
    mixture, x = make_mixture(), make_contexts(20)
    y = torch.linspace(-10, 20, 20, dtype=torch.float64)
    expected = [
        logsumexp(
            [g + stats.logistic.logpdf(float(t), m, s) for g, m, s in loop_components(mixture, c)]
        )
        for c, t in zip(x, y, strict=True)
    ]
    np.testing.assert_allclose(log_densities(mixture, x, y), expected, rtol=1e-10)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 5e-5)])
@pytest.mark.parametrize("low", [0, -3])
def test_bin_masses_are_differences_of_distribution_functions(dtype, rtol, low):
    mixture = make_mixture(dtype)
    x, n = make_contexts(16, dtype), 16
    expected = []
    for c, level in zip(x, range(low, low + n), strict=True):
        below = -np.inf if level == low else level - 0.5
        above = np.inf if level == low + n - 1 else level + 0.5
        parts = []
        for g, m, s in loop_components(mixture, c):
            a, b = (below - m) / s, (above - m) / s
            a, b = (-b, -a) if a + b > 0 else (a, b)
            upper, lower = stats.logistic.logcdf(b), stats.logistic.logcdf(a)
            parts.append(g + upper + np.log1p(-np.exp(lower - upper)))
        expected.append(logsumexp(parts))
    y = torch.arange(low, low + n).to(dtype)
    found = bin_log_masses(mixture, x, y, low, torch.full_like(y, low + n - 1))
    np.testing.assert_allclose(found, expected, rtol=rtol)


@pytest.mark.parametrize("error", [0.02, 3.0, 300.0])
def test_256_bins_sum_to_one_in_float32(error):
    mixture, contexts = make_mixture(torch.float32, error=error), make_contexts(5, torch.float32)
    for x in contexts * 10:
        y = torch.arange(256.0)
        masses = bin_log_masses(mixture, x.expand(256, D), y, 0, 255).double().exp()
        assert float(masses.sum()) == pytest.approx(1, abs=1e-4)


def test_a_number_without_alternatives_has_all_the_mass():
    mixture, x = make_mixture(), make_contexts(2)
    y = torch.tensor([7.0, -200.0], dtype=torch.float64)
    torch.testing.assert_close(bin_log_masses(mixture, x, y, y, y), torch.zeros_like(y))


def test_a_far_bin_keeps_a_finite_mass_and_gradient_in_float32():
    mixture = make_mixture(torch.float32, error=0.1)
    leaf = mixture.slopes.clone().requires_grad_()
    y = torch.tensor([255.0, 0.0, 200.0])
    contexts = make_contexts(3, torch.float32)
    masses = bin_log_masses(mixture._replace(slopes=leaf), contexts, y, 0, 255)
    masses.sum().backward()
    assert masses.isfinite().all()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_density_integrates_to_one():
    mixture, x = make_mixture(), make_contexts(3)
    grid = torch.linspace(-400, 400, 80001, dtype=torch.float64)
    for c in x:
        log_p = log_densities(mixture, c.expand(len(grid), D), grid)
        assert integrate.simpson(log_p.exp().numpy(), x=grid.numpy()) == pytest.approx(1, abs=1e-7)


def test_gradients_agree_with_finite_differences():
    mixture, x = make_mixture(), make_contexts(4)
    y = torch.tensor([0.0, 3.0, 9.0, 15.0], dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in mixture.learned]

    def masses(*tensors: Tensor) -> Tensor:
        return bin_log_masses(ConditionalMixture(*tensors, *mixture[9:]), x, y, 0, 15)

    def densities(*tensors: Tensor) -> Tensor:
        return log_densities(ConditionalMixture(*tensors, *mixture[9:]), x, y)

    assert torch.autograd.gradcheck(masses, leaves)
    assert torch.autograd.gradcheck(densities, leaves)


def test_mean_and_variance_are_the_moments_of_the_components():
    mixture, x = make_mixture(), make_contexts(6)
    mean, variance = mean_and_variance(mixture, x)
    for c, m, v in zip(x, mean, variance, strict=True):
        parts = loop_components(mixture, c)
        first = sum(math.exp(g) * mu for g, mu, _ in parts)
        second = sum(math.exp(g) * (mu**2 + (math.pi * s) ** 2 / 3) for g, mu, s in parts)
        assert float(m) == pytest.approx(first)
        assert float(v) == pytest.approx(second - first**2)


def test_quantiles_invert_the_distribution_function():
    mixture, x = make_mixture(), make_contexts(9)
    level = torch.linspace(0.001, 0.999, 9, dtype=torch.float64)
    found = quantiles(mixture, x, level)
    torch.testing.assert_close(cumulative(mixture, x, found), level, rtol=0, atol=1e-12)


def test_draws_follow_the_distribution():
    mixture, x = make_mixture(), make_contexts(1)
    generator = torch.Generator().manual_seed(0)
    draws = draw_targets(mixture, x.expand(20000, D), generator)
    result = stats.kstest(
        draws.numpy(),
        lambda y: cumulative(mixture, x.expand(len(y), D), torch.as_tensor(y)).numpy(),
    )
    assert result.pvalue > 0.01
    mean, variance = (float(moment[0]) for moment in mean_and_variance(mixture, x))
    assert float(draws.mean()) == pytest.approx(mean, abs=4 * math.sqrt(variance / 20000))


def test_contexts_too_far_out_for_a_draw_get_one_sentence():
    mixture, x = make_mixture(torch.float32), make_contexts(2, torch.float32)
    with pytest.raises(InputError, match="not finite: train the model without values that are far"):
        draw_targets(mixture, 1e38 * x)
