"""Marginals and conditionals of a mixture: mixtures of fewer features, again in precision form.

With o the features that are kept or given and m the others, the marginal of o has the same noise
and the rows o of the loadings. Given ``x_o``, the precision of ``x_m`` is the whole precision
restricted to m: ``E_m - Gamma_m Gamma_m'``. Its mean is ``mu_m + Lambda_m E[z | x_o]``, and the
weights are ``p(k | x_o)``.

`Imputer` gives means, deviations, draws and quantiles of missing entries for many rows at once.
Given ``x_o`` and the component, entry j has the mean ``Theta_j' [1, z]`` with z the posterior mean,
and the variance ``Lambda_j' Cov(z) Lambda_j + D_j``. No array of size B x K x d is formed: means
and second moments are products of B x K (l+1) and of B x K (l+1)(l+2)/2 numbers with d columns.
Quantiles are found entry by entry, each among the components that matter to its row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from factormix.core.arrays import BLOCK_ELEMENTS, triangle_indices
from factormix.core.density import decode
from factormix.core.missing import (
    Observed,
    PreparedMixture,
    factor_observed,
    observed_operands,
    project_observed,
    regression,
    row_blocks,
)
from factormix.core.parameters import (
    Parameters,
    diagonalise,
    diagonalise_precisely,
    factor_major,
    from_generative,
    like_tensor,
    loadings,
    noise_variances,
)


def marginal(parameters: Parameters, features: Tensor) -> Parameters:
    """Return the mixture of some features, whose numbers (q,) give the new order."""
    precise = diagonalise_precisely(parameters)
    found = from_generative(
        precise.logits,
        precise.means[:, features],
        loadings(precise)[:, features],
        noise_variances(precise.precision_diag[:, features]),
    )
    return _like(found, parameters)


def conditional(parameters: Parameters, given: Tensor, values: Tensor) -> Parameters:
    """Return the mixture of the other features, in their order, given some (q,) at values (q,)."""
    precise = diagonalise_precisely(parameters)
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


def _like(found: Parameters, parameters: Parameters) -> Parameters:
    return Parameters(*(t.to(**like_tensor(parameters.means)) for t in found))


NEGLIGIBLE_SHARE = 1e-9
"""Responsibility below which a component does not count for a quantile: it moves the level of the
quantile by less than this number."""
MOST_ITERATIONS = 200
"""Most steps towards a quantile; about five are usual, and bisection alone needs less than 100 for
all digits of float64."""


class Imputer:
    """Complete rows (B, d) by a mixture, whose parameters are of the rows' dtype and device.

    With several mixtures, missing entries follow the mean of their conditional distributions.
    """

    def __init__(self, *mixtures: Parameters, centre: bool = True) -> None:
        parameters = mixtures[0] if len(mixtures) == 1 else side_by_side(mixtures)
        self.parameters = parameters
        self._sizes = [len(one.means) for one in mixtures]
        self.mixture = PreparedMixture(parameters, centre=centre)
        self.ops = self.mixture.observed
        self.Theta = regression(parameters)
        self.D = noise_variances(parameters.precision_diag)

    def mean(self, x: Tensor, missing: Tensor) -> Tensor:
        """Return rows (B, d) with missing entries replaced by their conditional mean."""
        parts = []
        for part in self._blocks(x):
            shares, projected = self._given(x[part], missing[part])
            codes = torch.cat([torch.ones_like(shares).unsqueeze(-1), projected.means], dim=-1)
            weighted = (shares.unsqueeze(-1) * codes).view(len(shares), -1)
            expected = weighted @ self.Theta.reshape(-1, x.shape[1])
            parts.append(torch.where(missing[part], expected, x[part]))
        return torch.cat(parts)

    def deviation(self, x: Tensor, missing: Tensor) -> Tensor:
        """Return the conditional standard deviation of every entry, (B, d), 0 where observed."""
        _, d, l = self.parameters.shape
        # Relative to the median of the means, so that squares are small and keep their digits.
        Theta = self.Theta.clone()
        Theta[:, 0] -= self.parameters.means.median(dim=0).values
        rows, columns = triangle_indices(l + 1, x.device)
        Theta = Theta.transpose(0, 1)
        products = Theta[rows] * Theta[columns]
        products[rows != columns] *= 2
        products[0] += self.D
        parts = []
        for part in self._blocks(x):
            factored = factor_observed(x[part], missing[part], self.ops)
            shares = self._share(factored.log_prob)
            T = factored.moments(self.ops.ops.latent_variances, shares.mT)
            first = T[columns == 0].view(-1, len(shares)).mT @ Theta.reshape(-1, d)
            second = T.view(-1, len(shares)).mT @ products.reshape(-1, d)
            variance = (second - first.square()).clamp(min=0)
            parts.append(variance.sqrt().masked_fill(~missing[part], 0))
        return torch.cat(parts)

    def draws(
        self, x: Tensor, missing: Tensor, n: int, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw n completions of rows, (n, B, d), from the distribution of the missing entries."""
        like, (B, d), l = like_tensor(x), x.shape, self.parameters.shape[2]
        drawn = x.new_empty(n, B, d)
        for part in self._blocks(x):
            shares, (_, means, roots) = self._given(x[part], missing[part])
            chosen = torch.multinomial(shares, n, replacement=True, generator=generator)
            b = torch.arange(len(shares), device=x.device)
            for i, k in enumerate(chosen.unbind(dim=1)):
                noise = torch.randn(len(b), l, 1, generator=generator, **like)
                z = means[b, k] + (roots[b, k].mT @ noise).squeeze(-1)
                rows = decode(self.parameters, z, k)
                rows += torch.randn(len(b), d, generator=generator, **like) * self.D[k].sqrt()
                drawn[i, part] = torch.where(missing[part], rows, x[part])
        return drawn

    def quantiles(self, x: Tensor, missing: Tensor, levels: Sequence[float]) -> Tensor:
        """Return the conditional quantiles of missing entries, (len(levels), B, d).

        Observed entries keep their values at every level.
        """
        found = x.unsqueeze(0).repeat(len(levels), 1, 1)
        for part in self._blocks(x):
            shares, projected = self._given(x[part], missing[part])
            ordered, which = shares.sort(dim=1, descending=True)
            count = max(1, int((ordered > NEGLIGIBLE_SHARE).sum(dim=1).amax()))
            ordered, which = ordered[:, :count], which[:, :count]
            for i, j in self._cut_entries(missing[part], count):
                means, deviations = self._describe_entries(projected, which[i], i, j)
                for values, level in zip(found, levels, strict=True):
                    values[part][i, j] = mixture_quantiles(ordered[i], means, deviations, level)
        return found

    def levels(self, x: Tensor, hidden: Tensor, missing: Tensor) -> Tensor:
        """Return the levels of hidden entries in their conditional distributions, (N,).

        Entries of x (B, d) that are ``hidden`` (B, d) are known, but not conditioned on. Entries
        that are ``missing`` are not known.
        """
        found, K = [], self.parameters.shape[0]
        every = torch.arange(K, device=x.device)
        for part in self._blocks(x):
            shares, projected = self._given(x[part], hidden[part] | missing[part])
            for i, j in self._cut_entries(hidden[part], K):
                k = every.expand(len(i), K)
                means, deviations = self._describe_entries(projected, k, i, j)
                u = (x[part][i, j].unsqueeze(1) - means) / deviations
                found.append((shares[i] * torch.special.ndtr(u)).sum(dim=1))
        return torch.cat(found)

    def _blocks(self, x: Tensor) -> list[slice]:
        return row_blocks(len(x), *self.parameters.latent_variances.shape)

    def _given(self, x: Tensor, missing: Tensor) -> tuple[Tensor, Observed]:
        """Compute ``p(k | x_o)``, (B, K), and the posterior of z, given the observed entries."""
        projected = project_observed(x, missing, self.ops)
        return self._share(projected.log_prob), projected

    def _share(self, log_prob: Tensor) -> Tensor:
        """Compute ``p(k | x_o)``, (B, K), of ``log p_k(x_o)``: the mean over the mixtures."""
        joint = log_prob + self.ops.ops.log_weights
        each = [torch.softmax(part, dim=1) for part in joint.split_with_sizes(self._sizes, 1)]
        return torch.cat(each, dim=1) / len(each)

    def _cut_entries(self, chosen: Tensor, n_components: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Cut the rows and columns of chosen entries (B, d) into parts, for some components."""
        size = max(1, BLOCK_ELEMENTS // (n_components * (self.parameters.shape[2] + 1) ** 2))
        rows, columns = chosen.nonzero(as_tuple=True)
        return zip(torch.split(rows, size), torch.split(columns, size), strict=True)

    def _describe_entries(
        self, projected: Observed, k: Tensor, i: Tensor, j: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return means and deviations, (N, c), of entries (i, j) (N,) in components k (N, c)."""
        i, j = i.unsqueeze(-1), j.unsqueeze(-1)
        Theta = self.Theta.mT[k, j]
        mu, Lambda = Theta[..., 0], Theta[..., 1:]
        means = mu + (Lambda * projected.means[i, k]).sum(dim=-1)
        spread = (projected.roots[i, k] @ Lambda.unsqueeze(-1)).square().sum(dim=(-2, -1))
        return means, (spread + self.D[k, j]).sqrt()


def side_by_side(mixtures: Sequence[Parameters]) -> Parameters:
    """Combine the components of several mixtures, which have equal weights, into one mixture.

    Factors that a component lacks are zero.
    """
    most = max(one.shape[2] for one in mixtures)
    parts = []
    for one in mixtures:
        lacking = (0, most - one.shape[2])
        Gamma = torch.nn.functional.pad(one.precision_factors, lacking)
        M = torch.nn.functional.pad(one.latent_variances, lacking, value=1.0)
        parts.append((one.log_weights, one.means, one.precision_diag, factor_major(Gamma), M))
    return Parameters(*(torch.cat(kind) for kind in zip(*parts, strict=True)))


def mixture_quantiles(weights: Tensor, means: Tensor, deviations: Tensor, level: float) -> Tensor:
    """Find the quantiles (N,) at a level of N mixtures of c Gaussians on the line, each (N, c).

    By Newton's method on the distribution function, with bisection where a step would leave the
    bracket. The quantile lies between the quantiles of the components.
    """
    share = weights / weights.sum(dim=1, keepdim=True)
    own = means + deviations * torch.special.ndtri(means.new_tensor(level))
    low, high = own.amin(dim=1), own.amax(dim=1)
    t: Tensor = (share * own).sum(dim=1)
    close = 4 * torch.finfo(t.dtype).eps
    for _ in range(MOST_ITERATIONS):
        u = (t.unsqueeze(1) - means) / deviations
        excess = (share * torch.special.ndtr(u)).sum(dim=1) - level
        slope = (share / deviations * torch.exp(-0.5 * u.square())).sum(dim=1)
        low, high = torch.where(excess < 0, t, low), torch.where(excess > 0, t, high)
        newton = t - excess * math.sqrt(2 * math.pi) / slope
        inside = (newton > low) & (newton < high)
        following = torch.where(inside, newton, 0.5 * (low + high))
        following = torch.where(excess == 0, t, following)
        done = (following - t).abs() <= close * (t.abs() + deviations.amin(dim=1))
        t = following
        if done.all():
            break
    return t
