"""The data of the benchmark: training rows, held-out rows and, if known, the true mixture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from models import LowRankMixture
from numpy.typing import NDArray
from settings import FLOOR, Setting

from factormix import datasets
from factormix.errors import InputError

__all__ = ["Problem", "load", "why_missing"]

HELD_OUT_ROWS = 9000
SYNTHETIC_FEATURES = 1024
SYNTHETIC_ROWS = 160_000


@dataclass(frozen=True)
class Problem:
    """Rows as float32 arrays (n, d)."""

    train: NDArray[np.float32]
    held_out: NDArray[np.float32]
    truth: LowRankMixture | None = None


def load(setting: Setting, *, quick: bool = False) -> Problem:
    """Load or make the data of a setting."""
    if setting.dataset == "synthetic":
        features = 20 if quick else SYNTHETIC_FEATURES
        return synthetic(
            setting.components, features, setting.factors, setting.rows or SYNTHETIC_ROWS
        )
    classes = range(9) if setting.dataset in ("mnist", "fashion-mnist") else None
    train, held_out = (
        datasets.load(setting.dataset, classes=classes, split=split).data
        for split in ("train", "test")
    )
    if setting.rows is not None:
        train, held_out = train[: setting.rows], held_out[: setting.rows // 4]
    return Problem(train, held_out)


def why_missing(dataset: str) -> str | None:
    """Say why a data set cannot be had here, or return None."""
    if dataset == "synthetic":
        return None
    try:
        datasets.load(dataset, split="test")
    except InputError as error:
        return str(error)
    return None


def synthetic(components: int, features: int, factors: int, rows: int) -> Problem:
    """Draw a mixture, and samples of it, that are hard to tell apart by distance alone.

    The standard deviation along the first loading column is nearly that of the means, so
    components are long and pass close by each other, while their noise is small: k-means cuts them
    to pieces, the likelihood does not. Weights vary by a factor of three, noise variances by ten,
    from the common floor upwards. There are 800 rows for a component on average: the
    likelihood that p parameters cost when estimated from n rows, p / 2n, is then below 0.4% here.
    """
    generator = torch.Generator().manual_seed(20)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    K, d, l = components, features, factors
    weights = 0.5 + uniform(K)
    means = 0.5 + 0.1 * normal(K, d)
    spread = torch.linspace(0.1, 0.03, l, dtype=torch.float64)
    loadings = spread * normal(K, d, l)
    noise_variances = FLOOR * 10 ** uniform(K, d)
    weights /= weights.sum()
    n = rows + min(HELD_OUT_ROWS, rows // 4)
    chosen = torch.multinomial(weights, n, replacement=True, generator=generator)
    x = torch.empty(n, d)
    for k in range(K):
        of_k = (chosen == k).nonzero().squeeze(1)
        noise = noise_variances[k].sqrt() * normal(len(of_k), d)
        x[of_k] = (means[k] + normal(len(of_k), l) @ loadings[k].mT + noise).float()
    truth = LowRankMixture.from_generative(weights, means, loadings, noise_variances)
    return Problem(x[:rows].numpy(), x[rows:].numpy(), truth)
