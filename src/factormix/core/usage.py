"""Which components of a mixture are in use."""

from __future__ import annotations

from typing import Any

__all__ = ["components_in_use", "in_use"]

SHARE = 0.1
"""A component is in use from this share of the average weight."""


def in_use(weights: Any) -> Any:
    """Tell which components weigh at least 0.1 / K, (K,), for an array or tensor of weights (K,).

    At least one does, as the weights sum to one.
    """
    return weights >= SHARE / len(weights)


def components_in_use(weights: Any) -> int:
    """Count the components in use, for an array or tensor of weights (K,)."""
    return int(in_use(weights).sum())
