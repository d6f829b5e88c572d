"""A mixture of one target given a context: gated linear predictions, in kinds and scales.

Given a context x (d,) in whitened units, kind k and scale s have the gate ::

    g_ks = w_ks + v_k'x - exp(-t_ks) / 2 (|U_k'x|^2 + sum_j exp(D_kj) x_j^2)

and the normal distribution of the target with ::

    mean      f(x) + sigma (A_k'x + b_k),  f(x) = r'x + c the regression of all rows, of error sigma
    variance  sigma^2 exp(s_k + t_ks), at least ``least_deviation^2``

The density is ``sum_ks softmax(g)_ks N_ks(y)``. It is the conditional of a mixture of factor
analyzers whose gates and predictions are free of each other. Everything with d in it is one of two
matrix products, by x and by its squares; the largest array is B x K x S.

A target that takes whole numbers 0 to L - 1 has the mass of the bin from y - 1/2 to y + 1/2. The
outer bins are open, so that the masses of all L numbers sum to one.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ConditionalMixture",
    "bin_log_masses",
    "cumulative",
    "draw_random_mixture",
    "draw_targets",
    "log_densities",
    "mean_and_variance",
    "quantiles",
]

FAR = 1e5
"""Edge of the outer bins in units of the target: further than any mean and deviation of levels."""
BISECTIONS = 60
"""Halvings of an interval for a quantile: float64 has 53 bits."""


class ConditionalMixture(NamedTuple):
    """The parameters, for a context of d numbers, K kinds, S scales and l factors of a gate."""

    weights: Tensor
    """(K, S), w: logits of a context at the origin."""
    gate_slopes: Tensor
    """(d, K), v."""
    gate_factors: Tensor
    """(d, K * l), U: the factors of a kind side by side."""
    gate_diagonal: Tensor
    """(d, K), D: logarithms."""
    slopes: Tensor
    """(d, K), A."""
    offsets: Tensor
    """(K,), b."""
    kind_log_variances: Tensor
    """(K,), s."""
    scale_log_variances: Tensor
    """(K, S), t."""
    regression: Tensor
    """(d,), r."""
    intercept: Tensor
    """(), c."""
    error: Tensor
    """(), sigma."""
    least_deviation: Tensor
    """()."""

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """The tensors that training changes; the last four are fixed before it."""
        return self[:8]

    def to(self, **options: Any) -> ConditionalMixture:
        """Return the mixture with every tensor converted by ``Tensor.to``."""
        return ConditionalMixture(*(tensor.to(**options) for tensor in self))


def draw_random_mixture(
    regression: Tensor,
    intercept: Tensor,
    error: Tensor,
    least_deviation: Tensor,
    *,
    n_kinds: int,
    n_scales: int,
    n_factors: int,
    generator: torch.Generator,
) -> ConditionalMixture:
    """Draw the random values that training starts from, around one regression of all rows."""
    d, K, S = len(regression), n_kinds, n_scales
    options: dict[str, Any] = {"dtype": regression.dtype, "device": regression.device}

    def normal(*shape: int, deviation: float) -> Tensor:
        # Drawn on the CPU, so that every device starts from the same values.
        return deviation * torch.randn(shape, generator=generator).to(**options)

    # Whitened contexts have length sqrt(d): gates of kinds then differ by about one.
    steep = 1 / math.sqrt(d)
    # Residuals of images have heavy tails: variances of the scales span four orders.
    spread = torch.linspace(-5, 3, S) if S > 1 else torch.zeros(1)
    return ConditionalMixture(
        weights=normal(K, S, deviation=0.1),
        gate_slopes=normal(d, K, deviation=steep),
        gate_factors=normal(d, K * n_factors, deviation=steep / 2),
        gate_diagonal=math.log(steep / 2) + normal(d, K, deviation=0.1),
        slopes=normal(d, K, deviation=steep / 4),
        offsets=normal(K, deviation=0.1),
        kind_log_variances=normal(K, deviation=0.1),
        scale_log_variances=spread.to(**options) + normal(K, S, deviation=0.1),
        regression=regression,
        intercept=intercept,
        error=error,
        least_deviation=least_deviation,
    )


class _Components(NamedTuple):
    """The normal distributions of the rows of a batch."""

    log_shares: Tensor
    """(B, K, S), logarithms that sum to one over kinds and scales."""
    means: Tensor
    """(B, K)."""
    deviations: Tensor
    """(K, S)."""


def _condition(mixture: ConditionalMixture, x: Tensor) -> _Components:
    """Return the distributions given contexts (B, d)."""
    K, S = mixture.weights.shape
    columns = [
        mixture.gate_slopes,
        mixture.regression[:, None] + mixture.error * mixture.slopes,
        mixture.gate_factors,
    ]
    product = x @ torch.cat(columns, dim=1)
    linear, means, projected = product[:, :K], product[:, K : 2 * K], product[:, 2 * K :]
    distances = projected.square().view(len(x), K, -1).sum(-1)
    distances = distances + x.square() @ mixture.gate_diagonal.exp()
    narrow = -0.5 * torch.exp(-mixture.scale_log_variances)
    gates = (mixture.weights + linear[:, :, None]) + narrow * distances[:, :, None]
    log_shares = torch.log_softmax(gates.view(len(x), K * S), dim=1).view(len(x), K, S)
    means = means + (mixture.intercept + mixture.error * mixture.offsets)
    log_variances = mixture.kind_log_variances[:, None] + mixture.scale_log_variances
    deviations = mixture.error * torch.exp(0.5 * log_variances)
    return _Components(log_shares, means, deviations.clamp(min=mixture.least_deviation))


def log_densities(mixture: ConditionalMixture, x: Tensor, y: Tensor) -> Tensor:
    """Return the log-densities (B,) of real-valued targets y (B,) given contexts x (B, d)."""
    found = _condition(mixture, x)
    z = (y[:, None] - found.means)[:, :, None] / found.deviations
    log_p = -0.5 * z.square() - found.deviations.log() - 0.5 * math.log(2 * math.pi)
    return torch.logsumexp((found.log_shares + log_p).flatten(1), dim=1)


def bin_log_masses(mixture: ConditionalMixture, x: Tensor, y: Tensor, levels: int) -> Tensor:
    """Return the log-masses (B,) of whole-number targets y (B,), 0 to ``levels`` - 1."""
    found = _condition(mixture, x)
    low = torch.where(y <= 0, -FAR, y - 0.5)
    high = torch.where(y >= levels - 1, FAR, y + 0.5)
    precise = 1 / found.deviations
    a = (low[:, None] - found.means)[:, :, None] * precise
    b = (high[:, None] - found.means)[:, :, None] * precise
    # PyTorch has no types for the functions of this class.
    log_p: Tensor = _NormalLogMass.apply(a, b)  # type: ignore[no-untyped-call]
    return torch.logsumexp((found.log_shares + log_p).flatten(1), dim=1)


def mean_and_variance(mixture: ConditionalMixture, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and variances, (B,) each, of real-valued targets given contexts (B, d)."""
    found = _condition(mixture, x)
    shares = found.log_shares.exp()
    mean = (shares.sum(-1) * found.means).sum(-1)
    # About the mean, where squares are small and keep their digits.
    between = (shares.sum(-1) * (found.means - mean[:, None]).square()).sum(-1)
    return mean, between + (shares * found.deviations.square()).sum((1, 2))


def cumulative(mixture: ConditionalMixture, x: Tensor, y: Tensor) -> Tensor:
    """Return the probabilities (B,) of a target of at most y (B,) given contexts (B, d)."""
    return _cumulative(_condition(mixture, x), y)


def quantiles(mixture: ConditionalMixture, x: Tensor, level: Tensor) -> Tensor:
    """Return the targets (B,) below which the shares ``level`` (B,), in (0, 1), lie."""
    found = _condition(mixture, x)
    # Every normal distribution has its quantile between these, hence their mixture too.
    z = torch.special.ndtri(level)[:, None, None] * found.deviations
    each = found.means[:, :, None] + z
    low, high = each.amin((1, 2)), each.amax((1, 2))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = _cumulative(found, middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    found_quantiles: Tensor = (low + high) / 2
    return found_quantiles


def draw_targets(
    mixture: ConditionalMixture, x: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Draw one real-valued target (B,) for each context (B, d).

    Rounded and clipped to 0 to L - 1, a draw is one of the distribution over whole numbers.
    """
    found = _condition(mixture, x)
    shares = found.log_shares.flatten(1).exp()
    chosen = torch.multinomial(shares, 1, generator=generator)
    means = found.means.gather(1, chosen // found.deviations.shape[1])[:, 0]
    noise = torch.randn(means.shape, generator=generator, device=x.device, dtype=x.dtype)
    drawn: Tensor = means + found.deviations.flatten()[chosen[:, 0]] * noise
    return drawn


def _cumulative(found: _Components, y: Tensor) -> Tensor:
    z = (y[:, None] - found.means)[:, :, None] / found.deviations
    below: Tensor = (found.log_shares.exp() * torch.special.ndtr(z)).sum((1, 2))
    return below


class _NormalLogMass(torch.autograd.Function):
    """The logarithm of the standard normal mass between a and b > a.

    In the upper tail both functions are near one; mirrored into the lower tail, their logarithms
    keep their digits. The derivatives are the densities at the ends over the mass.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        mirrored = a + b > 0
        low = torch.where(mirrored, -b, a)
        log_high = _log_ndtr(torch.where(mirrored, -a, b))
        log_low = _log_ndtr(low)
        log_mass = log_high + torch.log1p(-torch.exp(log_low - log_high))
        ctx.save_for_backward(a, b, log_mass)
        return log_mass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b, log_mass = ctx.saved_tensors
        constant = log_mass + 0.5 * math.log(2 * math.pi)
        at_a = torch.exp(-0.5 * a.square() - constant)
        at_b = torch.exp(-0.5 * b.square() - constant)
        return -grads[0] * at_a, grads[0] * at_b


def _log_ndtr(z: Tensor) -> Tensor:
    """Return the logarithm of the normal distribution function.

    PyTorch's own is not vectorised: in float32 this one takes two thirds of its time, and differs
    from it by less than 1e-6 of the value. Below -5 it is the continued fraction of Mills' ratio
    (Abramowitz and Stegun, 26.2.14) to six terms.
    """
    if z.dtype != torch.float32:
        precise: Tensor = torch.special.log_ndtr(z)
        return precise
    near = torch.log(0.5 * torch.erfc(z.clamp(min=-5) * -math.sqrt(0.5)))
    x = -z.clamp(max=-5)
    fraction = x
    for term in range(6, 0, -1):
        fraction = x + term / fraction
    far = -0.5 * x.square() - torch.log(fraction) - 0.5 * math.log(2 * math.pi)
    return torch.where(z > -5, near, far)
