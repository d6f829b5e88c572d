"""Arrays of the size of a batch or of the factors that each thread uses again and again.

A fresh array often costs more than what is computed into it, because the system hands its pages out
anew. Solvers and estimators switch it on around work whose arrays die inside it; what users call
with their own tensors, under whatever mode of torch, gets fresh arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["may_reuse", "reusing", "scratch"]


class _Kept(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}
        self.depth = 0


_kept = _Kept()


@contextmanager
def reusing() -> Iterator[None]:
    """Let ``scratch`` hand out kept arrays inside the block, in this thread."""
    _kept.depth += 1
    try:
        yield
    finally:
        _kept.depth -= 1


def may_reuse() -> bool:
    """Tell whether arrays may be overwritten now.

    Autograd keeps what it is given, and arrays of inference mode cannot be used outside of it.
    """
    return _kept.depth > 0 and not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def scratch(name: str, like: Tensor, *shape: int) -> Tensor | None:
    """Return the thread's array of that name and shape, or None outside of ``reusing``.

    It goes into the ``out`` argument of an operation, where None asks for a fresh array.
    """
    if not may_reuse():
        return None
    array = _kept.arrays.get(name)
    if array is None or (array.shape, array.dtype, array.device) != (
        shape,
        like.dtype,
        like.device,
    ):
        array = _kept.arrays[name] = like.new_empty(shape)
    return array
