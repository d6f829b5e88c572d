"""Mixtures of many components, as tests of screens need them."""

from __future__ import annotations

import torch
from torch import Tensor

from factormix.core.parameters import Parameters, from_generative
from factormix.core.sampling import sample


def many(
    K: int = 300,
    d: int = 20,
    l: int = 2,
    *,
    spread: float = 3.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Parameters:
    """Make a mixture whose means vary along all features, in most along the first ones."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scales = spread * torch.linspace(1, 0.1, d, dtype=torch.float64)
    means, loadings = normal(K, d) * scales, 0.5 * normal(K, d, l)
    variances = 0.2 + 0.3 * torch.rand(K, d, generator=generator, dtype=torch.float64)
    logits = 0.5 * normal(K)
    return Parameters(*(t.to(dtype) for t in from_generative(logits, means, loadings, variances)))


def drawn(parameters: Parameters, n: int, seed: int = 1) -> Tensor:
    """Draw rows (n, d)."""
    return sample(parameters, n, generator=torch.Generator().manual_seed(seed))[0]
