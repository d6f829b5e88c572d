"""Mixtures of many components, as tests of screens need them."""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor

from conftest import dense_precision, numpy
from factormix.core.density import sample
from factormix.core.parameters import Parameters, from_generative


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


def brute(parameters: Parameters, x: Tensor, weights: np.ndarray) -> list[np.ndarray]:
    """Sum ``R [1,z][1,z]'``, ``R [1,z] x'`` and ``R x^2`` over all pairs, without factormix."""
    pi, mu = numpy(parameters.log_weights), numpy(parameters.means)
    E, Gamma = parameters.precision_diag, parameters.precision_factors
    P, X, M = dense_precision(E, Gamma), numpy(x), numpy(parameters.latent_variances)
    d = X.shape[1]
    xt = X[:, None, :] - mu
    joint = pi - 0.5 * np.einsum("nkd,kde,nke->nk", xt, P, xt)
    joint += 0.5 * np.linalg.slogdet(P)[1] - 0.5 * d * np.log(2 * np.pi)
    R = np.exp(joint - logsumexp(joint, axis=1, keepdims=True)) * weights[:, None]
    z = np.sqrt(M) * np.einsum("kdl,nkd->nkl", numpy(Gamma), xt)
    one_z = np.concatenate([np.ones((*z.shape[:2], 1)), z], axis=2)
    A = np.einsum("nk,nki,nkj->kij", R, one_z, one_z)
    A[:, 1:, 1:] += R.sum(axis=0)[:, None, None] * (np.eye(M.shape[1]) * M[:, None, :])
    return [A, np.einsum("nk,nki,nd->kid", R, one_z, X), R.T @ X**2]
