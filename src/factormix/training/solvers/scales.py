"""The scales of components in training: how they begin, and how they follow."""

from __future__ import annotations

import torch
from torch import Tensor

from factormix.core.averages import Running, logits_of
from factormix.core.parameters import Parameters
from factormix.core.scales import scale_values
from factormix.core.statistics import Statistics
from factormix.data.batches import Batch
from factormix.errors import InputError
from factormix.training.solvers.base import Problem

__all__ = [
    "begun",
    "bound_of_one",
    "check_complete",
    "check_scales",
    "followed",
    "joined_by",
    "kinds",
    "no_gaps",
    "with_weights",
]

WIDTH = 0.5
"""Standard deviation of the logarithm of the scale to begin with."""
LEAST = 1e-8
"""Share of a component that its rarest scale keeps: one that has died out would never return."""


def kinds(n_components: int, n_scales: int) -> int:
    """Return how many kinds of components there are, each in all scales."""
    return n_components // n_scales


def check_scales(n_scales: int, problem: Problem) -> None:
    """Refuse a problem that components in several scales cannot solve."""
    if n_scales == 1:
        return
    if problem.n_components % n_scales:
        raise InputError(
            f"n_components={problem.n_components} is no multiple of scales={n_scales}: choose one,"
            f" such as {n_scales * max(1, round(problem.n_components / n_scales))}."
        )
    if problem.processes.divided:
        raise InputError(
            "components in several scales cannot be divided over processes: use scales=1 or"
            ' mesh="data".'
        )


def check_complete(n_scales: int, batch: Batch) -> None:
    """Refuse rows with gaps where components come in several scales."""
    if n_scales > 1 and batch.missing is not None and bool(batch.missing.any()):
        raise no_gaps()


def no_gaps() -> InputError:
    """Return what is said of rows with gaps where components come in several scales."""
    return InputError(
        "rows with missing values (NaN) cannot train components in several scales: use scales=1,"
        " or fill them in by impute."
    )


def bound_of_one(bound: Tensor, scales: Tensor) -> Tensor:
    """Return the bound on E, (d,), of scale one by which the narrowest scale obeys ``bound``."""
    return bound * scale_values(scales.shape[1], bound)[0] if len(scales) else bound


def begun(running: Running, n_scales: int) -> Tensor:
    """Return the weights of all scales of components to begin with, (K, S)."""
    log_c = scale_values(n_scales, running.weight).log()
    return _by(running.weight, torch.softmax(-0.5 * (log_c / WIDTH).square(), dim=0))


def followed(scales: Tensor, statistics: Statistics, rate: float) -> Tensor:
    """Move the weights of all scales (K, S) by a step of this rate, in place."""
    assert statistics.scales is not None
    scales.mul_(1 - rate).add_(statistics.scales, alpha=rate / float(statistics.n_samples))
    return scales.clamp_(min=LEAST / len(scales))


def joined_by(scales: Tensor, running: Running, changed: Tensor) -> Tensor:
    """Return the weights of all scales (K, S) after components (n,) were split or made."""
    average = scales.sum(dim=0) / scales.sum()
    whole = scales.new_zeros(len(running.weight), len(average))
    whole[: len(scales)] = scales
    whole[changed] = _by(running.weight[changed], average)
    return whole


def with_weights(parameters: Parameters, scales: Tensor) -> Parameters:
    """Return parameters in which a component weighs what its scales (K, S) do together."""
    return parameters._replace(logits=logits_of(scales.sum(dim=1)))


def _by(weight: Tensor, shares: Tensor) -> Tensor:
    """Divide weights (n,) by shares (S,): (n, S)."""
    return weight.unsqueeze(1) * shares
