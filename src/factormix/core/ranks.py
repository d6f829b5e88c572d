"""The rank of each component: how many of its factors its rows support.

Without a factor, its variance becomes noise. The covariances with and without it have the same
diagonal, and only their determinants change the likelihood, so a row loses

    g = 1/2 [sum_i log(1 + a_i) - log(1 + sum_i a_i)],   a_i = E_i Lambda_i^2

A factor on a single feature is noise already, and gains nothing. With E the precisions that predict
new rows, g is compared with what chance gains. Among d features and n rows, with ratio c = d / n, a
factor of strength x (its variance in units of the noise) appears with the strength y = x + c / x,
along a direction in which new rows have only x - c / x (Johnstone and Lu, 2009; small c). New rows
gain where x^2 > 3 c, and there n g = n y^2 / 4 is 4/3 of d. Chance alone gains up to d. A factor
behind j stronger ones has d - j free numbers instead of d.

A factor that is switched off has the loading zero, and every step leaves it there. Factors come
strongest first. Projections (``density.PackedFactors``), the sums of a batch
(``statistics.sum_pairs``), steps (``parameters.group_by_rank``) and files
(``training/serialization.py``) leave zero factors out. Tensors have room for the highest rank in
every component, and zeros that were never written take no memory (``arrays.zero_pages``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from factormix.core.arrays import CACHE_ELEMENTS, slice_rows, zero_pages
from factormix.core.averages import Averages, bound_precisions
from factormix.core.noise import Noise
from factormix.core.parameters import Parameters

NATS_PER_NUMBER = 4 / 3
"""Nats that all rows must gain by each free number of a factor, see above. On tables of
scikit-learn 1 and 2 are as good held out, and Schwarz's 1/2 log n is worse on digits."""


def count_ranks(parameters: Parameters) -> Tensor:
    """Count the factors of each component that are not switched off, (K,)."""
    return (parameters.precision_factors != 0).any(dim=1).sum(dim=1)


def factor_gains(
    averages: Averages, max_precision: Tensor, noise: Noise, widths: Tensor | None = None
) -> Tensor:
    """Compute the nats that each factor gains for a row of its component, (K, l).

    ``max_precision`` (d,) is the bound on E, ``widths`` (K,) are the ``prediction_widths``. Where
    features or components share a noise variance, they share the noise that a factor becomes.
    """
    E, (Theta, _, weight) = bound_precisions(averages.V, max_precision, widths), averages
    gains = torch.empty_like(Theta[:, 1:, 0])
    # Factor by factor, because the squares of all would be as large as the loadings.
    for column, loading in zip(gains.unbind(dim=1), Theta[:, 1:].unbind(dim=1), strict=True):
        a = E * loading.square()
        if noise.isotropic:
            a = a.mean(dim=1, keepdim=True).expand_as(a)
        share = weight.clamp(1e-6, 1).unsqueeze(1) if noise.tied else a.new_ones(1)
        left = (share * a).log1p().div(share).sum(dim=1)
        column.copy_(0.5 * (left - a.sum(dim=1).log1p()).clamp(min=0))
    return gains


def select_factors(
    gains: Tensor, rows: Tensor, n_features: int, *, undecided: float = 0.0
) -> Tensor:
    """Return which factors to keep, (K, l), by their gains (K, l) and the numbers of rows (K,).

    Of the factors without support, the better ones stay too, up to the share ``undecided``.
    """
    ordered, order = gains.sort(dim=1, descending=True)
    numbers = n_features - torch.arange(gains.shape[1], device=gains.device)
    keep = (rows.unsqueeze(1) * ordered > NATS_PER_NUMBER * numbers).sum(dim=1)
    keep += (undecided * ((gains > 0).sum(dim=1) - keep)).long()
    return order.argsort(dim=1) < keep.unsqueeze(1)


def switch_off_(averages: Averages, kept: Tensor) -> None:
    """Turn the variance of factors that are not kept (K, l) into noise, in place."""
    loadings = averages.Theta[:, 1:].unbind(dim=1)
    for loading, one in zip(loadings, kept.unbind(dim=1), strict=True):
        gone = ~one.unsqueeze(1)
        averages.V.add_(torch.where(gone, loading, 0).square())
        loading.masked_fill_(gone, 0)


def trim(averages: Averages, parameters: Parameters, rank: int) -> tuple[Averages, Parameters]:
    """Return copies with room for ``rank`` factors of a component, whose zeros take no memory.

    M is one for zero factors, as ``rotate_averages`` leaves it.
    """
    Theta, Gamma, M = averages.Theta, parameters.precision_factors.mT, parameters.latent_variances
    M = M[:, :rank].contiguous()
    held = torch.nn.functional.pad(M != 1, (1, 0), value=True)
    averages = averages._replace(Theta=_copy_held(Theta[:, : rank + 1], held))
    return averages, parameters._replace(
        means=averages.Theta[:, 0],
        precision_factors=_copy_held(Gamma[:, :rank], held[:, 1:]).mT,
        latent_variances=M,
    )


def _copy_held(rows: Tensor, held: Tensor) -> Tensor:
    """Copy the rows (K, m, d) that are held (K, m), and leave the others zero."""
    K, m, d = rows.shape
    copy = zero_pages(rows, K, m, d)
    for part in slice_rows(K, CACHE_ELEMENTS // max(1, m * d)):
        copy[part][held[part]] = rows[part][held[part]]
    return copy
