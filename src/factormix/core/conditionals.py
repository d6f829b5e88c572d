"""Marginals and conditionals of a mixture: mixtures of fewer features, again in precision form.

With o the features that are kept or given and m the others, the marginal of o has the same noise
and the rows o of the loadings. Given ``x_o``, the precision of ``x_m`` is that of the whole,
restricted to m: ``E_m - Gamma_m Gamma_m'``. Its mean is ``mu_m + Lambda_m E[z | x_o]``, and the
weights are ``p(k | x_o)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from factormix.core.constraints import diagonalise
from factormix.core.observed import observed_operands, project_observed
from factormix.core.parameters import (
    Parameters,
    from_generative,
    like_tensor,
    loadings,
    noise_variances,
    precise_dtype,
)

__all__ = ["conditional", "marginal"]


def marginal(parameters: Parameters, kept: Tensor) -> Parameters:
    """Return the mixture of some features, whose numbers (q,) give the new order."""
    precise = _precise(parameters)
    found = from_generative(
        precise.logits,
        precise.means[:, kept],
        loadings(precise)[:, kept],
        noise_variances(precise.precision_diag[:, kept]),
    )
    return _like(found, parameters)


def conditional(parameters: Parameters, given: Tensor, values: Tensor) -> Parameters:
    """Return the mixture of the other features, in their order, given some (q,) at values (q,)."""
    precise = _precise(parameters)
    logits, mu, E, Gamma, _ = precise
    missing = torch.ones(1, mu.shape[1], dtype=torch.bool, device=mu.device)
    missing[0, given] = False
    x = torch.zeros_like(mu[:1])
    x[0, given] = values.to(mu)
    log_p, z, _ = project_observed(x, missing, observed_operands(precise))
    m = missing[0]
    means = mu[:, m] + (loadings(precise)[:, m] @ z[0].unsqueeze(-1)).squeeze(-1)
    Gamma_m, M = diagonalise(E[:, m], Gamma[:, m], 0.0)
    logits = torch.log_softmax(precise.log_weights + log_p[0], dim=0)
    return _like(Parameters(logits, means, E[:, m], Gamma_m, M), parameters)


def _precise(parameters: Parameters) -> Parameters:
    dtype = precise_dtype(parameters.means.device)
    logits, mu, E, Gamma = (t.detach().to(dtype) for t in parameters[:4])
    # The M of float32 has lost digits; E and Gamma are the density itself.
    return Parameters(logits, mu, E, *diagonalise(E, Gamma, 0.0))


def _like(found: Parameters, parameters: Parameters) -> Parameters:
    return Parameters(*(t.to(**like_tensor(parameters.means)) for t in found))
