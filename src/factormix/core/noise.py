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
        """Whether components share variances: the noise of one depends on all the others."""
        return self.kind == "tied"

    @property
    def isotropic(self) -> bool:
        """Whether features share variances, so that the noise depends on their units."""
        return self.kind == "isotropic"

    def pool(self, values: Tensor, weight: Tensor) -> Tensor:
        """Average values (K, d) over components, by their weights (K,), or over features, if these
        share a variance."""
        if self.isotropic:
            return values.mean(dim=1, keepdim=True).expand_as(values)
        if not self.tied:
            return values
        sums = torch.cat([weight @ values, weight.sum().unsqueeze(0)])
        if self.sum_parts is not None:
            sums = self.sum_parts(sums)
        return (sums[:-1] / sums[-1]).expand_as(values)

    def pool_gradient(self, gradient: Tensor) -> Tensor:
        """Return the direction of E from its gradient (K, d), equal where E is shared.

        If components share E, their gradients are summed, because each is weighed by its rows
        already. If features share E, it gets their mean, which is the projection of the gradient:
        the sum would make the step d times as long.
        """
        if self.isotropic:
            return gradient.mean(dim=1, keepdim=True).expand_as(gradient).contiguous()
        return gradient.sum(dim=0).expand_as(gradient).contiguous() if self.tied else gradient

    def pool_bound(self, bound: Tensor) -> Tensor:
        """Return the bound on E (d,) that the noise obeys: the lowest where features share E."""
        return bound.amin().expand_as(bound).contiguous() if self.isotropic else bound

    def count_variances(self, n_components: int, n_features: int) -> int:
        """Count the variances that are free."""
        return (1 if self.tied else n_components) * (1 if self.isotropic else n_features)
