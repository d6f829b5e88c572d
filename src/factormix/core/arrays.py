"""Arrays of the size of a batch or of the factors that their owner uses again and again.

A fresh array often costs more than what is computed into it, because the system hands its pages out
anew. Whoever takes many steps or scores many blocks owns a `Workspace` and passes it along; what a
function leaves in it is valid until the owner's next call. Without one, every array is fresh.

Symmetric matrices by their lower triangles.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

__all__ = ["Workspace", "kept", "pairs", "symmetric_places"]


class _Kept(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}


class Workspace:
    """Keep one array per name and thread for its owner, who works without autograd.

    The owner may compute parts of its work in several threads at the same time.
    """

    def __init__(self) -> None:
        self._kept = _Kept()

    def array(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return the array of that name, of a shape and of the dtype and device of ``like``."""
        arrays, size = self._kept.arrays, math.prod(shape)
        found = arrays.get(name)
        if (
            found is None
            or len(found) < size
            or found.dtype != like.dtype
            or found.device != like.device
            # An array of inference mode cannot be written outside of it.
            or found.is_inference() > torch.is_inference_mode_enabled()
        ):
            # What was there goes first, so that never both are.
            arrays.pop(name, None)
            del found
            found = arrays[name] = like.new_empty(size)
        # The memory is that of the largest so far, as shapes change from call to call.
        return found[:size].view(shape)

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        """Copy and pickle as an empty one: what it holds means nothing to a copy."""
        return Workspace, ()


def kept(work: Workspace | None, name: str, like: Tensor, *shape: int) -> Tensor | None:
    """Return an array of the workspace, or None if there is no workspace.

    It goes into the ``out`` argument of an operation, where None asks for a fresh array.
    """
    return None if work is None else work.array(name, like, *shape)


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
