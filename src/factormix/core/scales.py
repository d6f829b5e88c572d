"""Components with several scales: the same centre and directions, nearer or farther out.

Rows of one kind often differ in their distance from the centre: patches of photographs in contrast,
sensor rows in loudness. A component of scale c has the covariance ``c Sigma``, and its density

    log p_c(x) = log p(mu) (1 - 1/c) + log p(x) / c - d/2 log c

follows from ``log p`` of scale one: all scales of a component cost one evaluation. Their mixture is
an ordinary mixture of K times S components (``expanded``).

In the statistics of the shared shape, a row counts by ``R u`` with ``u = E[1/c | x, k]`` instead of
R, as in EM for Student's t (Lange, Little and Taylor, 1989): a row that lies far out because its
scale is large says no more about the shape than a near one. Sums are divided by ``sum R u`` rather
than ``sum R``, which converges faster (Kent, Tyler and Vardi, 1994). Both are the same at the
maximum where scales lie densely, and nearly so with a few of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.density import LEAST_RATIO
from factormix.core.parameters import Parameters, factor_major

NEGLIGIBLE_NATS = 20.0
"""Nats below the largest joint density of a row from which a component is not evaluated exactly:
``exp(-20)`` is below the rounding of a float32 sum."""
STEP = 1.7
"""Ratio of neighbouring scales, as variances (``benchmarks/many.py``, patches)."""
BELOW = 0.3
"""Share of the scales that are below one. The mean of ``1/c`` is one, so the scales above one reach
farther (``benchmarks/many.py``, patches)."""


def scale_values(n_scales: int, like: Tensor) -> Tensor:
    """Return c, (S,), rising, of the device and dtype of a tensor."""
    steps = torch.arange(n_scales, device=like.device, dtype=like.dtype) - BELOW * (n_scales - 1)
    return (math.log(STEP) * steps).exp()


class Spread(NamedTuple):
    """Log-densities of all scales as affine functions of the log-density of scale one."""

    offset: Tensor
    """``log w_ks + log p_k(mu_k) (1 - 1/c_s) - d/2 log c_s``, (S, K), with w the weights."""
    slope: Tensor
    """``1 / c``, (S,)."""
    peak: Tensor
    """``log p_k(mu_k)`` of scale one, (K,)."""
    log_weights: Tensor
    """``log sum_s w_ks``, (K,)."""
    d: int
    """Number of features."""

    def joint(self, log_p: Tensor) -> Tensor:
        """Compute ``log sum_s w_ks p_ks(x)``, (B, K), for ``log p_k(x)`` of scale one, (B, K).

        On the CPU, a component far below the largest of its row has its upper bound instead.
        """
        if log_p.device.type != "cpu":
            return torch.stack(
                [o + s * log_p for o, s in zip(self.offset, self.slope, strict=True)]
            ).logsumexp(dim=0)
        bound = self._bound(log_p)
        best = bound.argmax(dim=1)
        largest = self._joint_of(log_p.gather(1, best.unsqueeze(1)).squeeze(1), best)
        rows, k = (bound > largest.unsqueeze(1) - NEGLIGIBLE_NATS).nonzero().unbind(dim=1)
        return bound.index_put_((rows, k), self._joint_of(log_p[rows, k], k))

    def _bound(self, log_p: Tensor) -> Tensor:
        """Compute ``log w_k + max_c log p_kc(x)``, (B, K), over all c from the least to the most.

        With ``q = (x - mu)' P (x - mu)``, the best of all scales is ``q / d``.
        """
        q = torch.sub(self.peak, log_p).mul_(2)
        least, most = (1 / self.slope[[0, -1]]).tolist()
        c = (q / self.d).clamp_(least, most)
        return (self.log_weights + self.peak) - q.div_(c).add_(c.log_(), alpha=self.d).mul_(0.5)

    def _joint_of(self, log_p: Tensor, components: Tensor) -> Tensor:
        """Compute ``log sum_s w_ks p_ks(x)`` of pairs of a row and a component, (P,)."""
        every, largest = self._shares(log_p, components)
        return every.sum(dim=0).log_().add_(largest)

    def shares(self, log_p: Tensor, components: Tensor) -> Tensor:
        """Compute the posterior of the scale, (S, P), of pairs of a row and a component, (P,)."""
        every, _ = self._shares(log_p, components)
        return every.div_(every.sum(dim=0))

    def _shares(self, log_p: Tensor, components: Tensor) -> tuple[Tensor, Tensor]:
        """Compute densities of all scales over the largest, (S, P), and its logarithm, (P,)."""
        # Pairs along the last axis: reductions over the short axis of scales would be slow.
        every = self.offset.index_select(1, components)
        every.addcmul_(log_p, self.slope.unsqueeze(1))
        largest = every.amax(dim=0)
        return every.sub_(largest).clamp_(min=math.log(LEAST_RATIO)).exp_(), largest


def make_spread(parameters: Parameters, weights: Tensor) -> Spread:
    """Gather the affine functions of all scales, whose weights are (K, S)."""
    _, _, E, _, M = parameters
    d, c = E.shape[1], scale_values(weights.shape[1], E)
    peak = 0.5 * (E.log().sum(dim=1) + M.log().sum(dim=1) - d * math.log(2 * math.pi))
    log_weights = _log(weights) - weights.sum().log()
    offset = log_weights + peak.unsqueeze(1) * (1 - 1 / c) - 0.5 * d * c.log()
    return Spread(offset.mT.contiguous(), 1 / c, peak, log_weights.logsumexp(dim=1), d)


def expanded(parameters: Parameters, weights: Tensor) -> Parameters:
    """Return the mixture of all scales as one of K S components, the scales of a kind together."""
    _, mu, E, Gamma, M = parameters
    S = weights.shape[1]
    c = scale_values(S, E).repeat(len(E)).unsqueeze(1)
    mu, E, Gamma, M = (t.repeat_interleave(S, dim=0) for t in (mu, E, Gamma.mT, M))
    return Parameters(
        scale_logits(weights), mu, E / c, factor_major((Gamma / c.sqrt().unsqueeze(1)).mT), M
    )


def scale_logits(weights: Tensor) -> Tensor:
    """Return the logits of the mixture of all scales, (K S,), of weights (K, S)."""
    return _log(weights).reshape(-1)


def _log(weights: Tensor) -> Tensor:
    """Return the logarithms of weights, some of which may be zero."""
    return weights.clamp(min=torch.finfo(weights.dtype).tiny ** 0.5).log()
