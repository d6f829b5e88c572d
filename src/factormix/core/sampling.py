"""Samples of the generative model ``x = mu_k + Lambda_k z + eps`` of a mixture."""

from __future__ import annotations

import torch
from torch import Tensor

from factormix.core.parameters import Parameters, like_tensor, loadings, noise_variances

__all__ = ["decode", "sample"]


def sample(
    parameters: Parameters,
    n: int,
    *,
    component: int | None = None,
    noise: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw n samples (n, d) and the component of each (n,).

    Components are drawn by their weights unless one is given. ``noise=False`` leaves out eps, as
    pictures of such models usually do.
    """
    _, d, l = parameters.shape
    mu = parameters.means
    like = like_tensor(mu)
    if component is None:
        weights = parameters.log_weights.exp()
        # At least one, because multinomial refuses to draw none.
        components = torch.multinomial(weights, max(n, 1), replacement=True, generator=generator)[
            :n
        ]
    else:
        components = torch.full((n,), component, dtype=torch.long, device=mu.device)
    z = torch.randn(n, l, generator=generator, **like)
    x = decode(parameters, z, components)
    if noise:
        scale = noise_variances(parameters.precision_diag).sqrt()
        x += torch.randn(n, d, generator=generator, **like) * scale[components]
    return x, components


def decode(parameters: Parameters, z: Tensor, components: Tensor) -> Tensor:
    """Compute ``mu_k + Lambda_k z``, (n, d), for codes z (n, l) of the given components (n,)."""
    x = parameters.means[components]
    if z.shape[1] == 0:
        return x
    Lambda = loadings(parameters)
    for k in torch.unique(components).tolist():
        rows = components == k
        x[rows] += z[rows] @ Lambda[k].mT
    return x
