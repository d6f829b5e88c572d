"""Components that come in several scales: the same centre and directions, nearer or farther out.

Rows of one kind often differ in how far out they are: patches of photographs in contrast, sensor
rows in loudness. A component of scale c has the covariance ``c Sigma``, so that

    log p_c(x) = log p(mu) (1 - 1/c) + log p(x) / c - d/2 log c

follows from ``log p``, that of scale one: all scales of a component cost one evaluation of it. The
mixture of them is an ordinary one of K times S components (``expanded``).

In the statistics of the shape that they share, a row counts by ``R u`` with ``u = E[1/c | x, k]``
instead of R, as in EM for Student's t (Lange, Little and Taylor, 1989): what lies far out because
its scale is large says no more about the shape than what lies near. Dividing by the sum of ``R u``
rather than of R converges faster to the same shape (Kent, Tyler and Vardi, 1994).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from factormix.core.parameters import Parameters, factor_major

__all__ = ["Spread", "expanded", "scale_logits", "scale_values", "spread_of"]

NEGLIGIBLE = 24.0
"""Nats below the largest of a row from which nothing reaches its sums."""
STEP = 1.7
"""Ratio of neighbouring scales, of variances."""
BELOW = 0.3
"""Share of the scales that are below one: the shape is such that ``1/c`` is one on average, so that
those above reach farther."""


def scale_values(n_scales: int, like: Tensor) -> Tensor:
    """Return c, (S,), rising, of the device and dtype of a tensor."""
    steps = torch.arange(n_scales, device=like.device, dtype=like.dtype) - BELOW * (n_scales - 1)
    return (math.log(STEP) * steps).exp()


class Spread(NamedTuple):
    """The densities of all scales as affine functions of that of scale one."""

    offset: Tensor
    """``log w_ks + log p_k(mu_k) (1 - 1/c_s) - d/2 log c_s``, (K, S), with w the weights."""
    slope: Tensor
    """``1 / c``, (S,)."""

    def joint(self, log_p: Tensor) -> Tensor:
        """Compute ``log sum_s w_ks p_ks(x)``, (B, K), for ``log p_k(x)`` of scale one, (B, K).

        On the processor, what is far below the largest of its row is that of the best scale alone,
        which is less by ``log S`` at most.
        """
        largest = self._best(log_p)
        if log_p.device.type != "cpu":
            rest = (o + s * log_p - largest for o, s in self._lines())
            return largest + torch.stack([r.exp() for r in rest]).sum(dim=0).log()
        near = largest > largest.amax(dim=1, keepdim=True) - NEGLIGIBLE
        rows, k = near.nonzero().unbind(dim=1)
        exact = self.offset[k].addcmul(log_p[rows, k].unsqueeze(-1), self.slope)
        return largest.index_put_((rows, k), exact.logsumexp(dim=-1))

    def _best(self, log_p: Tensor) -> Tensor:
        """Compute ``max_s log w_ks p_ks(x)``, (B, K)."""
        best, other = torch.full_like(log_p, -torch.inf), torch.empty_like(log_p)
        for offset, slope in self._lines():
            torch.maximum(best, torch.mul(log_p, slope, out=other).add_(offset), out=best)
        return best

    def _lines(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Serve the offset (K,) and the slope of each scale."""
        return zip(self.offset.unbind(dim=1), self.slope.unbind(), strict=True)

    def shares(self, log_p: Tensor, components: Tensor | None = None) -> Tensor:
        """Compute the posterior of the scale, (B, K, S).

        For ``log_p`` (P,) of pairs of a row and one of ``components`` (P,), it is (P, S).
        """
        offset = self.offset if components is None else self.offset[components]
        return torch.softmax(offset + log_p.unsqueeze(-1) * self.slope, dim=-1)


def spread_of(parameters: Parameters, weights: Tensor) -> Spread:
    """Gather what the scales of components need; ``weights`` (K, S) are those of all of them."""
    _, _, E, _, M = parameters
    d, c = E.shape[1], scale_values(weights.shape[1], E)
    peak = 0.5 * (E.log().sum(dim=1) + M.log().sum(dim=1) - d * math.log(2 * math.pi))
    log_weights = _log(weights) - weights.sum().log()
    offset = log_weights + peak.unsqueeze(1) * (1 - 1 / c) - 0.5 * d * c.log()
    return Spread(offset, 1 / c)


def expanded(parameters: Parameters, weights: Tensor) -> Parameters:
    """Return the mixture of all scales as one of K S components, those of a kind side by side."""
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
    """Return logarithms of weights, some of which may have died out."""
    return weights.clamp(min=torch.finfo(weights.dtype).tiny ** 0.5).log()
