"""A mixture of one target given a context: gated linear predictions, in kinds and scales.

Given a context x (d,) in whitened units, kind k and scale s have the gate ::

    g_ks = w_ks + v_k'x + sum_m B_m,ks log((u_m'x)^2 + exp(e_m))

and the logistic distribution of the target with ::

    mean   f(x) + sigma (A_k'x + b_k),  f(x) = r'x + c the regression of all rows, of error sigma
    width  sigma exp((s_k + t_ks) / 2), at least ``least_width``; the deviation is 1.81 of it

The density is ``sum_ks softmax(g)_ks p_ks(y)``. It has the form of a conditional of a mixture of
factor analyzers that share their factors u_m, with gates and predictions free of each other. Noise
and factors have heavy tails. The noise is logistic, and the factors follow Student's t, whose
logarithm is ``-a log(z^2 + e)``; both are mixtures of normal distributions in all scales.
Everything with d in it is one matrix product; the largest array is B x K x S.

A target that takes the whole numbers from ``low`` to ``high`` has the mass of the bin from y - 1/2
to y + 1/2. The outer bins are open, so that the masses of all numbers sum to one.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from factormix.errors import InputError

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

BISECTIONS = 60
"""Halvings of an interval for a quantile: float64 has 53 bits."""


class ConditionalMixture(NamedTuple):
    """The parameters, for a context of d numbers, K kinds, S scales and M features of the gate."""

    weights: Tensor
    """(K, S), w: logits of a context at the origin."""
    gate_slopes: Tensor
    """(d, K), v."""
    features: Tensor
    """(d, M), u."""
    feature_weights: Tensor
    """(M, K S), B."""
    feature_floors: Tensor
    """(M,), e: logarithms."""
    slopes: Tensor
    """(d, K), A."""
    offsets: Tensor
    """(K,), b."""
    kind_log_widths: Tensor
    """(K,), s: twice the logarithm."""
    scale_log_widths: Tensor
    """(K, S), t: twice the logarithm."""
    regression: Tensor
    """(d,), r."""
    intercept: Tensor
    """(), c."""
    error: Tensor
    """(), sigma."""
    least_width: Tensor
    """()."""

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """The tensors that training changes; the last four are fixed before it."""
        return self[:9]

    def to(self, **options: Any) -> ConditionalMixture:
        """Return the mixture with every tensor converted by ``Tensor.to``."""
        return ConditionalMixture(*(tensor.to(**options) for tensor in self))


def draw_random_mixture(
    regression: Tensor,
    intercept: Tensor,
    error: Tensor,
    least_width: Tensor,
    *,
    n_kinds: int,
    n_scales: int,
    n_features: int,
    generator: torch.Generator,
) -> ConditionalMixture:
    """Draw the random values that training starts from, around one regression of all rows."""
    d, K, S, M = len(regression), n_kinds, n_scales, n_features
    options: dict[str, Any] = {"dtype": regression.dtype, "device": regression.device}

    def normal(*shape: int, deviation: float) -> Tensor:
        # Drawn on the CPU, so that every device starts from the same values.
        return deviation * torch.randn(shape, generator=generator).to(**options)

    # Whitened contexts have length sqrt(d): features and gates of kinds then differ by about one.
    steep = 1 / math.sqrt(d)
    # Residuals of images have heavy tails: squares of the widths span three orders.
    spread = torch.linspace(-5, 1, S) if S > 1 else torch.full((1,), -1.0)
    return ConditionalMixture(
        weights=normal(K, S, deviation=0.1),
        gate_slopes=normal(d, K, deviation=steep),
        features=normal(d, M, deviation=steep),
        feature_weights=normal(M, K * S, deviation=0.1 / math.sqrt(M)),
        # A thirtieth of the squares that features begin with.
        feature_floors=torch.full((M,), -3.5).to(**options),
        slopes=normal(d, K, deviation=steep / 4),
        offsets=normal(K, deviation=0.1),
        kind_log_widths=normal(K, deviation=0.1),
        scale_log_widths=spread.to(**options) + normal(K, S, deviation=0.1),
        regression=regression,
        intercept=intercept,
        error=error,
        least_width=least_width,
    )


class _Components(NamedTuple):
    """The logistic distributions of the rows of a batch."""

    log_shares: Tensor
    """(B, K, S), logarithms that sum to one over kinds and scales."""
    means: Tensor
    """(B, K)."""
    widths: Tensor
    """(K, S)."""


def _condition(mixture: ConditionalMixture, x: Tensor) -> _Components:
    """Return the distributions given contexts (B, d)."""
    K, S = mixture.weights.shape
    columns = [
        mixture.gate_slopes,
        mixture.regression[:, None] + mixture.error * mixture.slopes,
        mixture.features,
    ]
    product = x @ torch.cat(columns, dim=1)
    linear, means, features = product[:, :K], product[:, K : 2 * K], product[:, 2 * K :]
    energies = torch.log(features.square() + mixture.feature_floors.exp())
    gates = (energies @ mixture.feature_weights).view(-1, K, S)
    gates = gates + (mixture.weights + linear[:, :, None])
    log_shares = torch.log_softmax(gates.view(-1, K * S), dim=1).view(-1, K, S)
    means = means + (mixture.intercept + mixture.error * mixture.offsets)
    log_widths = mixture.kind_log_widths[:, None] + mixture.scale_log_widths
    widths = mixture.error * torch.exp(0.5 * log_widths)
    return _Components(log_shares, means, widths.clamp(min=mixture.least_width))


def log_densities(mixture: ConditionalMixture, x: Tensor, y: Tensor) -> Tensor:
    """Return the log-densities (B,) of real-valued targets y (B,) given contexts x (B, d)."""
    found = _condition(mixture, x)
    z = (y[:, None] - found.means)[:, :, None] / found.widths
    log_p = logsigmoid(z) + logsigmoid(-z) - found.widths.log()
    return torch.logsumexp((found.log_shares + log_p).flatten(1), dim=1)


def bin_log_masses(
    mixture: ConditionalMixture, x: Tensor, y: Tensor, low: Tensor | float, high: Tensor | float
) -> Tensor:
    """Return the log-masses (B,) of whole-number targets y (B,) from ``low`` to ``high`` (B,)."""
    found = _condition(mixture, x)
    # PyTorch has no types for the functions of this class.
    log_p: Tensor = _LogisticLogMass.apply(  # type: ignore[no-untyped-call]
        y[:, None] - found.means, 1 / found.widths, y <= low, y >= high
    )
    return torch.logsumexp((found.log_shares + log_p).flatten(1), dim=1)


def mean_and_variance(mixture: ConditionalMixture, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and variances, (B,) each, of real-valued targets given contexts (B, d)."""
    found = _condition(mixture, x)
    shares = found.log_shares.exp()
    mean = (shares.sum(-1) * found.means).sum(-1)
    # About the mean, where squares are small and keep their digits.
    between = (shares.sum(-1) * (found.means - mean[:, None]).square()).sum(-1)
    within = (shares * found.widths.square()).sum((1, 2))
    return mean, between + math.pi**2 / 3 * within


def cumulative(mixture: ConditionalMixture, x: Tensor, y: Tensor) -> Tensor:
    """Return the probabilities (B,) of a target of at most y (B,) given contexts (B, d)."""
    return _cumulative(_condition(mixture, x), y)


def quantiles(mixture: ConditionalMixture, x: Tensor, level: Tensor) -> Tensor:
    """Return the targets (B,) below which the shares ``level`` (B,), in (0, 1), lie."""
    found = _condition(mixture, x)
    # Every component has its quantile between these, hence their mixture too.
    each = found.means[:, :, None] + torch.logit(level)[:, None, None] * found.widths
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

    Rounded and clipped to whole numbers, a draw is one of the distribution over these.
    """
    found = _condition(mixture, x)
    shares = found.log_shares.flatten(1).exp()
    if not torch.isfinite(shares).all():
        raise InputError(
            "a draw gave numbers that are not finite: train the model without values that are far"
            " from all others."
        )
    chosen = torch.multinomial(shares, 1, generator=generator)
    means = found.means.gather(1, chosen // found.widths.shape[1])[:, 0]
    uniform = torch.rand(means.shape, generator=generator, device=x.device, dtype=x.dtype)
    # Numbers of float32 between 0 and 1 are multiples of 2^-24; half of one keeps 0 out.
    noise = torch.logit(uniform, eps=2.0**-25)
    drawn: Tensor = means + found.widths.flatten()[chosen[:, 0]] * noise
    return drawn


def _cumulative(found: _Components, y: Tensor) -> Tensor:
    z = (y[:, None] - found.means)[:, :, None] / found.widths
    below: Tensor = (found.log_shares.exp() * torch.sigmoid(z)).sum((1, 2))
    return below


class _LogisticLogMass(torch.autograd.Function):
    """The logarithm of the logistic mass of bins of length 1; outer bins are open.

    With z = (y - mean) / width and h = 1 / (2 width), the mass is ``sinh h / (cosh z + cosh h)``,
    and with e = exp(-|z|) that is ``2 e sinh h / (1 + e^2 + 2 e cosh h)``: one exponential and one
    logarithm for each bin, and no digits lost in the tails.
    """

    @staticmethod
    def forward(
        ctx: Any, residuals: Tensor, precise: Tensor, lowest: Tensor, highest: Tensor
    ) -> Tensor:
        """Take residuals (B, K), 1 / widths (K, S) and which rows are in outer bins (B,)."""
        z, h = residuals[:, :, None] * precise, 0.5 * precise
        e = torch.exp(-z.abs())
        inside = e * (e + 2 * torch.cosh(h))
        log_mass = torch.log(2 * torch.sinh(h)) - z.abs() - torch.log1p(inside)
        outer = (lowest | highest).nonzero()[:, 0]
        towards = torch.where(lowest[outer], 1.0, -1.0).to(z)[:, None, None]
        log_mass[outer] = logsigmoid(towards * z[outer] + h)
        # If there is only one number, it has all the mass.
        alone = (lowest & highest).nonzero()[:, 0]
        log_mass[alone] = 0
        ctx.save_for_backward(residuals, precise, e, inside, outer, towards, alone)
        return log_mass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        residuals, precise, e, inside, outer, towards, alone = ctx.saved_tensors
        z, h = residuals[:, :, None] * precise, 0.5 * precise
        share = 1 / (1 + inside)
        by_z = torch.sign(z) * (e.square() - 1) * share
        by_h = 1 / torch.tanh(h) - 2 * torch.sinh(h) * e * share
        beyond = torch.sigmoid(-(towards * z[outer] + h))
        by_z[outer], by_h[outer] = towards * beyond, beyond
        by_z[alone], by_h[alone] = 0, 0
        by_z, by_h = by_z * grads[0], by_h * grads[0]
        by_precise = (by_z * residuals[:, :, None]).sum(0) + 0.5 * by_h.sum(0)
        return (by_z * precise).sum(-1), by_precise, None, None
