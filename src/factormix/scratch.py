"""Arrays of a batch's size that each thread uses again and again.

A fresh array often costs more than what is computed into it, because the system hands its pages out
anew. Only for what dies inside the function that asks; autograd keeps what it is given, so while it
is on, every array is fresh.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["scratch"]


class _Kept(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}


_kept = _Kept()


def scratch(name: str, like: Tensor, *shape: int) -> Tensor | None:
    """Return the thread's array of that name and shape, or None while autograd is on.

    It goes into the ``out`` argument of an operation, where None asks for a fresh array.
    """
    if torch.is_grad_enabled():
        return None
    array = _kept.arrays.get(name)
    if array is None or (array.shape, array.dtype, array.device) != (
        shape,
        like.dtype,
        like.device,
    ):
        array = _kept.arrays[name] = like.new_empty(shape)
    return array
