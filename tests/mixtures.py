"""Mixtures of many components for tests of E-steps, steps and screens."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor

from factormix.core.averages import Averages, rotate_averages
from factormix.core.density import sample
from factormix.core.missing import regression
from factormix.core.parameters import Parameters, from_generative
from factormix.core.statistics import LatentSums, Statistics
from oracles import dense_precision, numpy

FLOOR = 1e-9
"""Floor of the eigenvalues of M: low enough to change nothing."""


def make_mixture(
    K: int = 300,
    d: int = 20,
    l: int = 2,
    *,
    spread: float = 3.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Parameters:
    """Make a mixture whose means vary along all features, most along the first ones."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scales = spread * torch.linspace(1, 0.1, d, dtype=torch.float64)
    means, loadings = normal(K, d) * scales, 0.5 * normal(K, d, l)
    variances = 0.2 + 0.3 * torch.rand(K, d, generator=generator, dtype=torch.float64)
    logits = 0.5 * normal(K)
    return Parameters(*(t.to(dtype) for t in from_generative(logits, means, loadings, variances)))


def draw_rows(parameters: Parameters, n: int, seed: int = 1) -> Tensor:
    """Draw rows (n, d) of a mixture."""
    return sample(parameters, n, generator=torch.Generator().manual_seed(seed))[0]


def make_bound(d: int, value: float = 1e6) -> Tensor:
    """Make a bound on the precisions of d features."""
    return torch.full((d,), value, dtype=torch.float64)


def start_averages(
    mixture: Parameters, bound: Tensor | None = None, widths: Tensor | None = None
) -> tuple[Averages, Parameters]:
    """Make running averages at a mixture, and the parameters that follow from them."""
    bound = make_bound(mixture.shape[1]) if bound is None else bound
    V, weight = mixture.precision_diag.reciprocal(), mixture.log_weights.exp()
    return rotate_averages(Averages(regression(mixture), V, weight), bound, FLOOR, widths=widths)


def latent_sums(statistics: Statistics, n_components: int) -> tuple[Tensor, ...]:
    """Return A, B and S of all components."""
    assert isinstance(statistics.sums, LatentSums)
    return tuple(statistics.sums.spread_to_all(n_components).tensors.values())


def name_tensors(value: object, name: str = "") -> dict[str, Tensor]:
    """Collect the tensors of a contribution, whose fields may be tuples and dataclasses."""
    if isinstance(value, Tensor):
        return {name: value}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        fields = {} if value is None else value._asdict()
    return {
        key: tensor
        for field, part in fields.items()
        for key, tensor in name_tensors(part, f"{name}.{field}").items()
    }


def assert_same_statistics(found: Statistics, expected: Statistics, n_components: int) -> None:
    """Compare all totals and all sums."""
    for ours, theirs in zip(found.totals, expected.totals, strict=True):
        torch.testing.assert_close(ours, theirs)
    sums = (latent_sums(one, n_components) for one in (found, expected))
    for ours, theirs in zip(*sums, strict=True):
        torch.testing.assert_close(ours, theirs)


def sum_all_pairs(parameters: Parameters, x: Tensor, weights: np.ndarray) -> list[np.ndarray]:
    """Sum ``R [1,z][1,z]'``, ``R [1,z] x'`` and ``R x^2`` over all pairs, without factormix."""
    log_pi, mu = numpy(parameters.log_weights), numpy(parameters.means)
    E, Gamma = parameters.precision_diag, parameters.precision_factors
    P, X, M = dense_precision(E, Gamma), numpy(x), numpy(parameters.latent_variances)
    d = X.shape[1]
    xt = X[:, None, :] - mu
    joint = log_pi - 0.5 * np.einsum("nkd,kde,nke->nk", xt, P, xt, optimize=True)
    joint += 0.5 * np.linalg.slogdet(P)[1] - 0.5 * d * np.log(2 * np.pi)
    R = np.exp(joint - logsumexp(joint, axis=1, keepdims=True)) * weights[:, None]
    z = np.sqrt(M) * np.einsum("kdl,nkd->nkl", numpy(Gamma), xt)
    one_z = np.concatenate([np.ones((*z.shape[:2], 1)), z], axis=2)
    A = np.einsum("nk,nki,nkj->kij", R, one_z, one_z)
    A[:, 1:, 1:] += R.sum(axis=0)[:, None, None] * (np.eye(M.shape[1]) * M[:, None, :])
    return [A, np.einsum("nk,nki,nd->kid", R, one_z, X), R.T @ X**2]
