"""Symmetric matrices by their lower triangles."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pairs", "symmetric_places"]


def pairs(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the lower triangle of a matrix, each (size (size+1) / 2,)."""
    rows, columns = torch.tril_indices(size, size, device=device)
    return rows, columns


def symmetric_places(size: int, device: torch.device) -> Tensor:
    """Return where each element of a symmetric matrix stands in its lower triangle, (size^2,)."""
    rows, columns = pairs(size, device)
    place = torch.empty(size, size, dtype=torch.long, device=device)
    place[rows, columns] = place[columns, rows] = torch.arange(len(rows), device=device)
    return place.reshape(-1)
