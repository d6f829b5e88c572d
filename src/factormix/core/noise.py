"""Noise models: which noise variances of a mixture are equal.

==============  ===========================================================================
``component``   each component has a variance for each feature, D (K, d)
``tied``        all components share one variance for each feature
``isotropic``   each component has one variance, the same for all features
==============  ===========================================================================

Given the loadings, the likeliest variances of the last two are means of the likeliest variances V
of the first: over components by their weights, or over features. Means are linear, as running
averages are, so a mixture in training keeps V at its mean and needs no other statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Noise(NamedTuple):
    """A noise model, as a step applies it."""

    kind: str = "component"
    """``"component"``, ``"tied"`` or ``"isotropic"``."""
    sum_parts: Callable[[Tensor], Tensor] | None = None
    """Adds tensors over the processes that have the other components; None where there are none."""
    width: Tensor | None = None
    """Scalar, the ``tied_width`` where noise is tied and widened."""

    @property
    def tied(self) -> bool:
        """Whether the noise of a component depends on all the others."""
        return self.kind == "tied"

    def pool(self, values: Tensor, weight: Tensor) -> Tensor:
        """Return values (K, d) averaged over what shares a variance; weights are (K,)."""
        if self.kind == "isotropic":
            return values.mean(dim=1, keepdim=True).expand_as(values)
        if not self.tied:
            return values
        sums = torch.cat([weight @ values, weight.sum().unsqueeze(0)])
        if self.sum_parts is not None:
            sums = self.sum_parts(sums)
        return (sums[:-1] / sums[-1]).expand_as(values)

    def pool_gradient(self, gradient: Tensor) -> Tensor:
        """Return the direction of E from its gradient (K, d), equal where E is shared.

        Shared by components, E has the sum of their gradients, as each weighs its own by its rows.
        Shared by features, it has the mean, which is the projection of the gradient: the sum would
        make the step d times as long.
        """
        if self.kind == "isotropic":
            return gradient.mean(dim=1, keepdim=True).expand_as(gradient).contiguous()
        return gradient.sum(dim=0).expand_as(gradient).contiguous() if self.tied else gradient


def pool_bound(kind: str, bound: Tensor) -> Tensor:
    """Return a bound on E (d,) that a noise model can obey: the lowest one for isotropic noise."""
    return bound.amin().expand_as(bound).contiguous() if kind == "isotropic" else bound


def count_variances(kind: str, n_components: int, n_features: int) -> int:
    """Count the noise variances that are free."""
    sizes = {"component": n_components * n_features, "tied": n_features, "isotropic": n_components}
    return sizes[kind]
