"""Rotations of the latent space that make loadings easier to read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Rotated", "varimax", "varimax_criterion"]

STEPS = 500
TOLERANCE = 1e-9
"""Relative gain of the criterion below which a rotation is done."""


class Rotated(NamedTuple):
    """Loadings after a rotation, and the rotation."""

    loadings: Tensor
    """(K, d, l), ``Lambda R``, columns of the largest sum of squares first."""
    rotation: Tensor
    """R, (K, l, l), orthogonal; codes z become ``R' z``."""


def varimax(loadings: Tensor) -> Rotated:
    """Rotate the loadings (K, d, l) of each component so that their squares vary most.

    Loadings of a factor are then large for some features and near zero for the others (Kaiser,
    1958). ``Lambda Lambda'``, and with it every density, stays as it is. A column's largest element
    is positive.
    """
    K, _, l = loadings.shape
    R = torch.eye(l, dtype=loadings.dtype, device=loadings.device).repeat(K, 1, 1)
    if l < 2:
        return _ordered(loadings, R)
    before = varimax_criterion(loadings)
    for _ in range(STEPS):
        L = loadings @ R
        # The gradient of the criterion; its polar factor is the next rotation.
        gradient = loadings.mT @ (L.pow(3) - L * L.square().mean(dim=1, keepdim=True))
        U, _, Vh = torch.linalg.svd(gradient)
        R = U @ Vh
        now = varimax_criterion(loadings @ R)
        if bool((now - before <= TOLERANCE * now.abs()).all()):
            break
        before = now
    return _ordered(loadings, R)


def varimax_criterion(loadings: Tensor) -> Tensor:
    """Compute the sum over factors of the variance of the squared loadings (K, d, l), (K,)."""
    squares = loadings.square()
    return (squares - squares.mean(dim=1, keepdim=True)).square().mean(dim=1).sum(dim=1)


def _ordered(loadings: Tensor, R: Tensor) -> Rotated:
    """Put the strongest column first, and make the largest element of each positive."""
    L = loadings @ R
    order = L.square().sum(dim=1).argsort(dim=1, descending=True)
    L, R = (t.gather(2, order.unsqueeze(1).expand_as(t)) for t in (L, R))
    if L.shape[2] == 0:
        return Rotated(L, R)
    largest = L.gather(1, L.abs().argmax(dim=1, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).to(L)
    return Rotated(L * sign, R * sign)
