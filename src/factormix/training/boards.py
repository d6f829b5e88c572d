"""Memory that processes of one machine share, for what would take long to send at every step.

Each of them writes on a board, tells the others so by a message of one number, and reads what they
have written. That moves the bytes once, where a message copies them into the system and out again.
Processes of several machines, and those that find no such memory, go on by messages.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from factormix.training.processes import Group, Processes

__all__ = ["Board", "board_of"]

FOLDER = Path("/dev/shm")
"""Where Linux keeps files in memory, the same for all processes of a machine."""
ALIGNED = 64
"""Bytes at whose multiples tensors begin."""
FEW = 8
"""Tensors that a page holds at most."""
MORE = 1.5
"""Times the memory needed that is taken where a mixture has grown, as it may grow again."""


class Board:
    """Two pages for each process of a group: one is written while the other may still be read.

    Whoever writes a page has met all others after what they read before it, so that no page is
    written that somebody reads.
    """

    def __init__(self, memory: Tensor, group: Group) -> None:
        self._pages = memory.view(group.size, 2, -1)
        self._place, self._page = group.place, 0

    @property
    def room(self) -> int:
        """Bytes that fit on a page."""
        return self._pages.shape[2]

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Write tensors on the next page of this process."""
        self._page = 1 - self._page
        for space, t in zip(self.read(self._place, tensors), tensors, strict=True):
            space.copy_(t)

    def read(self, place: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return what the process at a place has written, of the shapes and dtypes of others.

        It is there until the next but one exchange.
        """
        page, found, first = self._pages[place, self._page], [], 0
        for t in like:
            size = t.numel() * t.element_size()
            found.append(page[first : first + size].view(t.dtype).view(t.shape))
            first += _aligned(size)
        return found


def board_of(processes: Processes, n_numbers: int, like: Tensor) -> Board | None:
    """Return a board of those with the same components, or None where they have none.

    A page holds so many numbers in a few tensors, of the dtype and device of ``like``. All
    processes call it at the same time, with the same arguments.
    """
    if like.device.type != "cpu" or processes.boardless:
        return None
    needed = n_numbers * like.element_size() + FEW * ALIGNED
    if processes.board is None or processes.board.room < needed:
        grown = processes.board is not None
        processes.board = _opened(processes, _aligned(int(MORE * needed) if grown else needed))
        processes.boardless = processes.board is None
    return processes.board


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _opened(processes: Processes, room: int) -> Board | None:
    """Open a board with pages of so many bytes, in all processes or in none."""
    group = processes.data
    size = group.size * 2 * room
    own = _made(size) if group.place == 0 else None
    memory = None
    try:
        path = processes.each(own)[group.ranks[0]]
        memory = None if path is None else _mapped(path, size)
        # When all have it open, nobody needs its name, and nothing is left behind.
        somebody_lacks_it = processes.any(memory is None)
    finally:
        if own is not None:
            os.unlink(own)
    return None if somebody_lacks_it or memory is None else Board(memory, group)


def _made(size: int) -> str | None:
    """Make a file in memory of so many bytes, and return its path, or None where there is none."""
    if not FOLDER.is_dir():
        return None
    path = None
    try:
        number, path = tempfile.mkstemp(prefix="factormix-", dir=FOLDER)
        try:
            # Memory that is not there is found missing now, and not by a signal when it is used.
            os.posix_fallocate(number, 0, size)
        finally:
            os.close(number)
    except OSError:
        if path is not None:
            os.unlink(path)
        return None
    return path


def _mapped(path: str, size: int) -> Tensor | None:
    """Return the bytes of a file as a tensor that is shared, (size,); None if it is not here."""
    try:
        number = os.open(path, os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(number, size), dtype=torch.uint8)
        finally:
            os.close(number)
    except (OSError, ValueError):
        return None
