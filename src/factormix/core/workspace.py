"""Arrays of the size of a batch or of the factors that their owner uses again and again.

A fresh array often costs more than what is computed into it, because the system hands its pages out
anew. Whoever takes many steps or scores many blocks owns a `Workspace` and passes it along; what a
function leaves in it is valid until the owner's next call. Without one, every array is fresh.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["Workspace", "kept"]


class Workspace:
    """Keep one array per name for its owner, who works in one thread and without autograd."""

    def __init__(self) -> None:
        self._arrays: dict[str, Tensor] = {}

    def array(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return the array of that name, of a shape and of the dtype and device of ``like``."""
        found = self._arrays.get(name)
        if (
            found is None
            or found.shape != shape
            or found.dtype != like.dtype
            or found.device != like.device
        ):
            found = self._arrays[name] = like.new_empty(shape)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Workspace:
        """Return an empty one: what is in it has no meaning to a copy."""
        return Workspace()

    def __getstate__(self) -> dict[str, Any]:
        return {"_arrays": {}}


def kept(work: Workspace | None, name: str, like: Tensor, *shape: int) -> Tensor | None:
    """Return an array of the workspace, or None if there is no workspace.

    It goes into the ``out`` argument of an operation, where None asks for a fresh array.
    """
    return None if work is None else work.array(name, like, *shape)
