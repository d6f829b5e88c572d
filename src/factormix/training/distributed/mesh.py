"""The mesh of processes of a run, by ``torch.distributed``.

``torchrun`` starts the processes and gives each its rank in the environment. A program may also
call ``torch.distributed.init_process_group`` itself.
"""

from __future__ import annotations

import atexit
import os
import re
from typing import Any

import torch
from torch import distributed as dist

from factormix.errors import InputError, first_line
from factormix.training.distributed.communicator import SINGLE, Communicator, Group

AXES = ("data", "components")
_made: dict[tuple[str, int, int], tuple[Group, Group, Group]] = {}
"""Groups of processes are made once, because making them involves all processes."""


def world() -> tuple[int, int]:
    """Return the number of processes and the rank of this one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    try:
        return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    except ValueError as error:
        raise InputError(
            "WORLD_SIZE and RANK in the environment are not whole numbers: start by torchrun, which"
            " sets them, or unset them."
        ) from error


def parse_mesh(text: str) -> Any:
    """Read a mesh from the command line: data, components, none, or DATAxCOMPONENTS."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found:
        return int(found[1]), int(found[2])
    return None if text == "none" else text


def check_mesh(mesh: Any) -> None:
    """Check that a mesh is of a known kind."""
    if mesh is None or mesh in ("auto", *AXES) or hasattr(mesh, "mesh_dim_names"):
        return
    numbers = isinstance(mesh, (tuple, list)) and len(mesh) == 2
    if not numbers or not all(type(n) is int and n > 0 for n in mesh):
        raise InputError(
            "mesh must be 'auto', 'data', 'components', two numbers of processes (along the data,"
            f" along the components), a DeviceMesh with these names, or None, not {mesh!r}."
        )


def local_device(device: torch.device) -> torch.device:
    """Return the device of this process, where processes of a machine have devices of their own."""
    if device.type == "cpu" or world()[0] == 1 or "LOCAL_RANK" not in os.environ:
        return device
    count = torch.get_device_module(device.type).device_count()
    return torch.device(device.type, int(os.environ["LOCAL_RANK"]) % max(1, count))


def join_mesh(mesh: Any, device: torch.device) -> Communicator:
    """Return the communicator of this process; all processes of the run call this."""
    check_mesh(mesh)
    size, _ = world()
    if mesh is None or (size == 1 and mesh in ("auto", *AXES)):
        return SINGLE
    n_data, n_parts = _shape(mesh, size)
    if n_data * n_parts != size:
        raise InputError(
            f"the mesh {n_data} x {n_parts} needs {n_data * n_parts} processes, and there"
            f" {'is 1' if size == 1 else f'are {size}'}: start that many with torchrun"
            " --nproc-per-node, or choose another mesh."
        )
    if size == 1:
        return SINGLE
    _begin(device)
    key = device.type, n_data, n_parts
    if hasattr(mesh, "mesh_dim_names"):
        return Communicator(_world_group(), *_axes(mesh))
    if key not in _made:
        made = dist.device_mesh.init_device_mesh(
            device.type, (n_data, n_parts), mesh_dim_names=AXES
        )
        _made[key] = (_world_group(), *_axes(made))
    return Communicator(*_made[key])


def _shape(mesh: Any, size: int) -> tuple[int, int]:
    """Return the number of processes along the data and along the components."""
    if hasattr(mesh, "mesh_dim_names"):
        names = mesh.mesh_dim_names or ()
        if not names or not set(names) <= set(AXES):
            raise InputError(
                f"the axes of the DeviceMesh must be named 'data' and 'components', not {names!r}."
            )
        sizes = dict(zip(names, mesh.shape, strict=True))
        return sizes.get("data", 1), sizes.get("components", 1)
    if isinstance(mesh, str):
        return (1, size) if mesh == "components" else (size, 1)
    return mesh[0], mesh[1]


def _begin(device: torch.device) -> None:
    """Connect the processes, unless they are connected already."""
    if dist.is_initialized():
        return
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(backend, **_meeting_place())
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the processes of this run cannot find each other ({first_line(error)}): start them by"
            " torchrun, or use mesh=None for this process alone."
        ) from error
    atexit.register(_end)


def _meeting_place() -> dict[str, Any]:
    """Return the store in which processes leave their addresses, one for each start by torchrun.

    Its agent keeps one store for all starts. Processes that restart after one of them died must not
    find the old addresses.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is None:
        return {}
    from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

    store, rank, size = next(rendezvous("env://"))
    return {
        "store": PrefixStore(f"start-{attempt}", store),
        "rank": rank,
        "world_size": size,
    }


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _world_group() -> Group:
    """Return the group of all processes, with messages in the memory of the CPU."""
    size, rank = dist.get_world_size(), dist.get_rank()
    handle = None if "gloo" in dist.get_backend_config() else dist.new_group(backend="gloo")
    return Group(size, rank, handle, tuple(range(size)))


def _axes(mesh: Any) -> tuple[Group, Group]:
    """Return the processes along each axis of a mesh."""
    found = []
    for name in AXES:
        if name not in mesh.mesh_dim_names or mesh[name].size() == 1:
            found.append(Group())
            continue
        handle = mesh.get_group(name)
        ranks = tuple(dist.get_process_group_ranks(handle))
        found.append(Group(len(ranks), mesh.get_local_rank(name), handle, ranks))
    return found[0], found[1]
