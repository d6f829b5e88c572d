"""The processes that torchrun has started for a command, of which one speaks for all."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

__all__ = ["Crew", "is_first", "says_it_first"]

T = TypeVar("T")


class Crew:
    """The processes of one command; most commands have one."""

    def __init__(self, mesh: str | None, device: str | None) -> None:
        from factormix.defaults import MESH
        from factormix.estimators.validation import check_device
        from factormix.training.meshes import local_device, parse_mesh, processes_for, world

        self.mesh: Any = MESH if mesh is None else parse_mesh(mesh)
        self._arguments = [] if mesh is None else [f"--mesh={mesh}"]
        where = check_device(device) if world()[0] > 1 else None
        self._processes = processes_for(self.mesh, local_device(where or check_device("cpu")))

    @property
    def first(self) -> bool:
        """Whether this process reports and writes."""
        return self._processes.first

    @property
    def divided(self) -> bool:
        """Whether each process has some of the components only."""
        return self._processes.divided

    def together(self, work: Callable[[], T]) -> T:
        """Do what may fail in some of the processes; then all of them say the same."""
        return self._processes.together(work)

    def again(self, command: list[str]) -> str:
        """Write a command with which these processes go on."""
        if self._processes.alone:
            return shlex.join([*command, *self._arguments])
        count = os.environ.get("LOCAL_WORLD_SIZE", str(self._processes.everybody.size))
        start = ["torchrun", f"--nproc-per-node={count}", "-m"]
        return shlex.join([*start, *command, *self._arguments])


def is_first() -> bool:
    """Tell whether this is the process that speaks for all."""
    return os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


def says_it_first(message: str) -> bool:
    """Tell whether none of the other processes has complained of the same."""
    address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    if os.environ.get("WORLD_SIZE", "1") == "1" or not address or not port:
        return True
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    mark = hashlib.sha256(message.encode()).hexdigest()
    try:
        store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=5))
        return bool(store.add(f"factormix/{attempt}/{mark}", 1) == 1)
    except (RuntimeError, ValueError):
        # Whoever keeps the store has gone: better said twice than not at all.
        return True
