"""Where the values of a table lie in a file, and what a table must be."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from factormix.errors import InputError

__all__ = ["Layout", "check_numeric", "check_table", "mapped_layout", "npy_layout"]

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """Say where the values of a table lie in a file.

    shape: (n, d), or (n, height, width[, channels]) for images.
    row_stride: bytes from one row to the next.
    columns: None where each row is contiguous; else (d,), the byte offset of every column, where
        each column is (Fortran order).
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    row_stride: int
    columns: NDArray[np.int64] | None = None

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0) -> Layout:
        """Describe an array in C order that begins at byte `offset`."""
        return cls(shape, dtype, offset, math.prod(shape[1:]) * dtype.itemsize)

    @property
    def n_features(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        return self.n_features * self.dtype.itemsize

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        if len(self.shape) == 2:
            return None
        return self.shape[1:3] if self.shape[3:] == (1,) else self.shape[1:]

    @property
    def end(self) -> int:
        """The number of bytes that the file must have."""
        last = self.offset + (self.shape[0] - 1) * self.row_stride
        if self.columns is None:
            return last + self.row_bytes
        return last + int(self.columns.max()) + self.dtype.itemsize

    def read(self, file: IO[bytes], first: int, out: Array) -> None:
        """Fill `out`, (m, d) in C order and in the file's dtype, with the rows from `first` on."""
        at = self.offset + first * self.row_stride
        if self.columns is not None:
            turned = np.empty(out.shape[::-1], self.dtype)
            for column, into in zip(self.columns.tolist(), turned, strict=True):
                _read_exactly(file, at + column, into)
            out[...] = turned.T
        elif self.row_stride == self.row_bytes:
            _read_exactly(file, at, out)
        else:
            for i in range(len(out)):
                _read_exactly(file, at + i * self.row_stride, out[i])


def npy_layout(file: IO[bytes], name: str) -> Layout:
    """Read the header of a .npy stream and check that it describes a table of real numbers."""
    try:
        # Version 3 exists for structured arrays only, which are turned down in any case.
        one = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if one else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, EOFError, OSError) as error:
        raise InputError(
            f"{name} is not a readable .npy file; write it again with numpy.save."
        ) from error
    check_numeric(dtype, name)
    check_table(shape, name, images=dtype == np.uint8)
    layout = Layout.contiguous(shape, dtype, file.tell())
    if not fortran:
        return layout
    # Where each feature, counted in C order, stands among the columns as Fortran order has them.
    columns = np.arange(layout.n_features).reshape(shape[1:], order="F").ravel()
    column_bytes = shape[0] * dtype.itemsize
    return Layout(shape, dtype, layout.offset, dtype.itemsize, columns * column_bytes)


def mapped_layout(X: Array, owner: Any) -> Layout | None:
    """Find where a view lies in the file by its address: its offset is that of the whole map."""
    start = owner.offset - owner.offset % mmap.ALLOCATIONGRANULARITY
    offset = start + X.ctypes.data - np.frombuffer(owner._mmap, np.uint8).ctypes.data
    (n, d), (row_stride, column_stride), item = X.shape, X.strides, X.dtype.itemsize
    if (column_stride == item or d == 1) and row_stride >= d * item:
        return Layout((n, d), X.dtype, offset, row_stride)
    if row_stride == item and column_stride >= n * item:
        return Layout((n, d), X.dtype, offset, item, np.arange(d) * column_stride)
    return None


def check_numeric(dtype: np.dtype[Any], name: str) -> None:
    """Turn down values that are not real numbers."""
    if dtype.kind not in "biuf":
        kinds = {"O": "objects", "U": "strings", "S": "strings", "c": "complex numbers"}
        raise InputError(
            f"{name} holds {kinds.get(dtype.kind, f'values of type {dtype}')}; "
            "only real numbers can be used, so convert it first."
        )


def check_table(shape: tuple[int, ...], name: str, *, images: bool = False) -> None:
    """Turn down what is empty or not a table; a stack of images passes where it is allowed."""
    stack = images and (len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3)))
    if len(shape) != 2 and not stack:
        how = "(-1, 1)" if len(shape) < 2 else "(len(X), -1)"
        raise InputError(
            f"{name} has shape {shape}; two dimensions, (rows, columns), are needed: "
            f"try X.reshape{how}."
        )
    if min(shape) < 1:
        raise InputError(f"{name} has shape {shape}, so it is empty; give at least one row.")


def _read_exactly(file: IO[bytes], at: int, out: Array) -> None:
    """Fill the contiguous array `out` with the bytes from position `at` on."""
    view = out.reshape(-1).view(np.uint8).data
    file.seek(at)
    while len(view):
        # One call reads 2 GB at most.
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise OSError("it is shorter than it was when it was opened")
        view = view[count:]
