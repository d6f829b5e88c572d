"""Write one model file from ranks that each have some of the components.

The first rank lays the file out and writes its own part of every tensor. The others send their
parts in pieces, so that no rank ever holds more than one piece of another. The file is identical to
one that ``write_file`` writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch import distributed as dist

from factormix.files import replacing
from factormix.training.distributed.communicator import Communicator
from factormix.training.serialization import describe_for_checksum, make_header, write_error

PIECE_BYTES = 16 << 20
"""Bytes that are sent at a time: large beside the latency of a message, small beside a model."""
PER_COMPONENT = re.compile(
    r"(best\.)?(parameters\..*|averages\..*|watch\.(candidates|alone|together)|totals\.[ABS]"
    r"|clusters\.(counts|sums|seen|squares))"
)
"""Names of the tensors whose first axis has the components."""
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors."""


def has_component_rows(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor of this name has a row for each component."""
    # An inactive watch has no rows.
    return bool(PER_COMPONENT.fullmatch(name)) and (tensor.ndim > 1 or len(tensor) > 0)


def write_from_ranks(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    settings: Any,
    communicator: Communicator,
) -> None:
    """Write tensors and JSON-ready settings to a file atomically; all ranks call this.

    Tensors with a row for each component have the rows of the rank's own components.
    """
    header = make_header(settings)
    with ExitStack() as stack:
        layout = _Layout(tensors, header, communicator.components.count(0))
        file = communicator.run_together(
            lambda: _opened(path, layout, stack) if communicator.is_first else None
        )
        failure: OSError | None = None
        # Other ranks with the same components have nothing to add.
        for name in sorted(tensors) if communicator.data.rank == 0 else ():
            for piece in _pieces(name, tensors[name], communicator):
                try:
                    if file is not None and failure is None:
                        layout.add(file, name, piece)
                except OSError as error:
                    # The other ranks go on sending, and learn of it at the end.
                    failure = error

        def finish() -> None:
            if file is None:
                return
            try:
                if failure is not None:
                    raise failure
                layout.finish(file)
                stack.pop_all().close()
            except OSError as error:
                raise write_error(path, error) from error

        communicator.run_together(finish)


def _opened(path: str | os.PathLike[str], layout: _Layout, stack: ExitStack) -> IO[bytes]:
    """Open a file beside the target, which it replaces on success."""
    try:
        temporary: Path = stack.enter_context(replacing(path))
        file = stack.enter_context(temporary.open("wb"))
        file.write(layout.head)
        file.truncate(len(layout.head) + layout.size)
    except OSError as error:
        raise write_error(path, error) from error
    return file


class _Layout:
    """The place of each tensor in a safetensors file, and the checksum of the written bytes."""

    def __init__(self, tensors: Mapping[str, Tensor], header: dict[str, str], n: int) -> None:
        self._at, self.size = dict[str, int](), 0
        self._shapes = dict[str, tuple[int, ...]]()
        self._dtypes = {name: str(t.dtype) for name, t in tensors.items()}
        table: dict[str, Any] = {"__metadata__": header | {"checksum": "0" * 64}}
        # The widest types first, so that each is aligned to its width.
        for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
            tensor = tensors[name]
            shape = tuple(tensor.shape)
            shape = (n, *shape[1:]) if has_component_rows(name, tensor) else shape
            end = self.size + tensor.element_size() * torch.Size(shape).numel()
            table[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(shape),
                "data_offsets": [self.size, end],
            }
            self._at[name], self._shapes[name], self.size = self.size, shape, end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.head = len(text).to_bytes(8, "little") + text
        self._sum = hashlib.sha256(f"{header['format_version']}\0{header['settings']}\0".encode())
        self._last = ""

    def add(self, file: IO[bytes], name: str, piece: Tensor) -> None:
        """Write the next piece of a tensor; tensors come in the order of their names."""
        if name != self._last:
            self._sum.update(describe_for_checksum(name, self._dtypes[name], self._shapes[name]))
            file.seek(len(self.head) + self._at[name])
            self._last = name
        data = piece.reshape(-1).view(torch.uint8).numpy().data
        self._sum.update(data)
        file.write(data)

    def finish(self, file: IO[bytes]) -> None:
        """Write the checksum into its place in the header."""
        file.seek(self.head.index(b'"checksum":"') + len(b'"checksum":"'))
        file.write(self._sum.hexdigest().encode())
        file.flush()


def _pieces(name: str, tensor: Tensor, communicator: Communicator) -> Iterator[Tensor]:
    """Yield a tensor in pieces: all of it on the first rank, its own part elsewhere."""
    rank = communicator.components.group.rank
    if not has_component_rows(name, tensor):
        if rank == 0:
            yield tensor.detach().cpu().contiguous()
        return
    row = tensor[:1].numel() * tensor.element_size()
    size = max(1, PIECE_BYTES // max(1, row))
    group, ranks = communicator.world.handle, communicator.components.group.ranks
    for owner, count in enumerate(communicator.components.counts):
        if rank not in (0, owner):
            continue
        for first in range(0, count, size):
            shape = (min(size, count - first), *tensor.shape[1:])
            if owner == rank:
                piece = tensor[first : first + size].detach().to("cpu").contiguous()
            else:
                piece = torch.empty(shape, dtype=tensor.dtype)
            if owner != 0:
                plain = piece.view(torch.uint8) if piece.dtype == torch.bool else piece
                with communicator.sending(*([plain] if rank else [])):
                    if rank:
                        dist.send(plain, ranks[0], group)
                    else:
                        dist.recv(plain, ranks[owner], group)
            yield piece
