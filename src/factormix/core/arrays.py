"""Memory that is reused or never written, and symmetric matrices stored as lower triangles.

A new array often costs more than the computation that fills it, because the operating system
zeroes its pages. Code that takes many steps or scores many blocks owns a `Workspace` and passes it
along. An array in a workspace is valid until the owner's next call. Without a workspace, every
array is new.
"""

from __future__ import annotations

import math
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

CACHE_ELEMENTS = 1 << 20
"""Elements of a temporary array that is read again while it is still in the processor's cache:
4 MiB in float32."""
BLOCK_ELEMENTS = 1 << 22
"""Elements of a temporary array whose size would otherwise grow with the data: 16 MiB in float32,
so that several of them fit beside a small model."""
LEAST_PAGES = 1 << 25
"""Bytes of an array from which its pages are asked for one by one: the largest that glibc takes
from memory freed before. To write 30% of the rows then takes 3.5 ms for zeros of 30 MiB, and 10 ms
on new pages; of 64 MiB it takes 36 and 22 ms. No script repeats it."""


class Workspace:
    """Keep one array per name and thread for an owner that works without autograd.

    The owner may compute parts of its work in several threads at the same time.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def array(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return the array of this name, with a shape and the dtype and device of ``like``."""
        arrays: dict[str, Tensor] = self._local.__dict__
        size, found = math.prod(shape), arrays.get(name)
        if (
            found is None
            or len(found) < size
            or found.dtype != like.dtype
            or found.device != like.device
            # An array made in inference mode cannot be written outside of it.
            or found.is_inference() > torch.is_inference_mode_enabled()
        ):
            # Free the old array before the new one is made.
            arrays.pop(name, None)
            del found
            found = arrays[name] = like.new_empty(size)
        # The largest shape so far determines the memory, as shapes change from call to call.
        return found[:size].view(shape)

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        """Copy and pickle as an empty workspace."""
        return Workspace, ()


def reuse(work: Workspace | None, name: str, like: Tensor, *shape: int) -> Tensor | None:
    """Return an array of the workspace, or None without a workspace.

    The result goes into the ``out`` argument of an operation, where None means a new array.
    """
    return None if work is None else work.array(name, like, *shape)


def zero_pages(like: Tensor, *shape: int) -> Tensor:
    """Return zeros of the dtype and device of ``like`` that take memory where they are written.

    On the CPU, the operating system provides a page of memory when it is first written to. So the
    factors of components take memory by their ranks, as long as nobody writes zeros over zeros.
    Other devices provide all memory at once.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < LEAST_PAGES:
        return like.new_zeros(shape)
    # By default, forked processes would write into the same memory.
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    )
    memory = mmap.mmap(-1, size, **private)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # Large pages, of 2 MiB, would hold factors of many components.
        with suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def slice_rows(n: int, size: int) -> list[slice]:
    """Cut n rows into slices of ``size`` or fewer, at least 1; no rows give one empty slice."""
    size = max(1, size)
    return [slice(first, min(first + size, n)) for first in range(0, max(n, 1), size)]


def triangle_indices(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the lower triangle of a matrix, each (size (size+1) / 2,)."""
    rows, columns = torch.tril_indices(size, size, device=device)
    return rows, columns


def symmetric_places(size: int, device: torch.device) -> Tensor:
    """Return the place of each element of a symmetric matrix in its lower triangle, (size^2,)."""
    rows, columns = triangle_indices(size, device)
    place = torch.empty(size, size, dtype=torch.long, device=device)
    place[rows, columns] = place[columns, rows] = torch.arange(len(rows), device=device)
    return place.reshape(-1)
