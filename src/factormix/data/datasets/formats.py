"""Readers of the original file formats: bytes in, images and labels out.

Each format has two steps, so that a checksum can be put between them. `unpack_*` turns the bytes
of one file into its content, the part that does not depend on how it was compressed. `decode_*`
turns the contents of all files of a split into `Images`. Nothing is returned from a file that is
shorter, longer or different from what its header says.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factormix.data.datasets.modules import optional_module
from factormix.errors import InputError

__all__ = [
    "Images",
    "decode_csv",
    "decode_faces",
    "decode_idx",
    "decode_svhn",
    "decode_svhn_part",
    "unpack_faces",
    "unpack_gzip",
    "unpack_nothing",
]

_FACE_SIZE = 64
_FACES_PER_PERSON = 10


@dataclass(frozen=True, eq=False)
class Images:
    """Hold decoded images: pixels uint8 (n, h, w) or (n, h, w, 3), labels int64 (n,)."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    note: str = ""


def unpack_nothing(raw: bytes, path: Path) -> bytes:
    """Return the bytes of a file whose content is the file itself."""
    return raw


def unpack_gzip(raw: bytes, path: Path) -> bytes:
    """Decompress a gzip file; bytes without gzip's mark are taken to be decompressed already."""
    if not raw.startswith(b"\x1f\x8b"):
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        raise _damaged(path, f"its gzip stream breaks off or is damaged ({error})") from error


def decode_idx(contents: Sequence[bytes], paths: Sequence[Path]) -> Images:
    """Decode a pair of idx files: images (n, h, w), then labels (n,)."""
    pixels = _idx_array(contents[0], paths[0], n_axes=3)
    labels = _idx_array(contents[1], paths[1], n_axes=1)
    if len(pixels) != len(labels):
        raise InputError(
            f"{paths[0]} holds {len(pixels)} images but {paths[1]} holds {len(labels)} labels: "
            "take both files from the same source"
        )
    return Images(pixels, labels.astype(np.int64))


def _idx_array(content: bytes, path: Path, *, n_axes: int) -> NDArray[np.uint8]:
    """Read one idx array of unsigned bytes with `n_axes` axes."""
    header = 4 + 4 * n_axes
    if len(content) < header:
        raise _damaged(path, f"it ends inside the idx header of {header} bytes")
    expected = bytes([0, 0, 8, n_axes])
    if content[:4] != expected:
        raise _damaged(path, f"it begins with {content[:4].hex()}, not with {expected.hex()}")
    shape = struct.unpack(f">{n_axes}I", content[4:header])
    length = header + math.prod(shape)
    if len(content) != length:
        raise _damaged(path, f"it has {len(content)} bytes where its header says {length}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def decode_csv(contents: Sequence[bytes], paths: Sequence[Path]) -> Images:
    """Decode one CSV file with a header line and rows of a label and h * h grey levels."""
    try:
        # int16, so that a level above 255 is noticed instead of wrapped.
        table = np.loadtxt(
            io.BytesIO(contents[0]), dtype=np.int16, delimiter=",", skiprows=1, ndmin=2
        )
    except ValueError as error:
        raise _damaged(paths[0], f"it is not a table of whole numbers ({error})") from error
    side = math.isqrt(max(table.shape[1] - 1, 0))
    if side == 0 or side * side != table.shape[1] - 1:
        raise _damaged(paths[0], f"{table.shape[1]} columns are not a label and a square image")
    pixels = _as_bytes(table[:, 1:], paths[0]).reshape(-1, side, side)
    return Images(pixels, table[:, 0].astype(np.int64))


def decode_svhn(contents: Sequence[bytes], paths: Sequence[Path]) -> Images:
    """Decode SVHN's cropped digits: `X` (32, 32, 3, n), `y` (n, 1) with 10 for the digit 0."""
    variables = _mat_variables(contents[0], paths[0], ("X", "y"))
    stack, labels = variables["X"], variables["y"].reshape(-1)
    if stack.ndim != 4 or stack.shape[2] != 3 or stack.shape[3] != len(labels):
        raise _damaged(
            paths[0],
            f"X {stack.shape} and y {variables['y'].shape} are not (h, w, 3, n) and (n, 1)",
        )
    pixels = np.ascontiguousarray(np.moveaxis(_as_bytes(stack, paths[0]), 3, 0))
    labels = labels.astype(np.int64)
    return Images(pixels, np.where(labels == 10, 0, labels))


def decode_svhn_part(contents: Sequence[bytes], paths: Sequence[Path]) -> Images:
    """Decode a part of SVHN: npz with `x` (n, h, w, 3), `y` (n,) and perhaps `exact` (n,)."""
    try:
        with np.load(io.BytesIO(contents[0]), allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
        pixels, labels = arrays["x"], arrays["y"]
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(paths[0], f"it is not an npz file with x and y ({error})") from error
    if pixels.ndim != 4 or labels.shape != (len(pixels),):
        raise _damaged(
            paths[0], f"x {pixels.shape} and y {labels.shape} are not (n, h, w, 3) and (n,)"
        )
    note = f"part of the split only: its first {len(pixels)} images"
    inexact = int(np.count_nonzero(~arrays["exact"])) if "exact" in arrays else 0
    if inexact:
        note += f", {inexact} of them not byte for byte the original"
    return Images(_as_bytes(pixels, paths[0]), labels.astype(np.int64), note)


def unpack_faces(raw: bytes, path: Path) -> bytes:
    """Read the Olivetti faces' pixels (n, 64, 64) out of `faces` (64 * 64, n) as bytes."""
    faces = _mat_variables(raw, path, ("faces",))["faces"]
    if faces.ndim != 2 or faces.shape[0] != _FACE_SIZE**2 or faces.shape[1] % _FACES_PER_PERSON:
        raise _damaged(path, f"faces {faces.shape} is not (4096, 10 for each person)")
    # MATLAB stores each image column by column.
    upright = _as_bytes(faces, path).T.reshape(-1, _FACE_SIZE, _FACE_SIZE).transpose(0, 2, 1)
    return upright.tobytes()


def decode_faces(contents: Sequence[bytes], paths: Sequence[Path]) -> Images:
    """Decode the Olivetti faces: ten images in a row for each person."""
    pixels = np.frombuffer(contents[0], np.uint8).reshape(-1, _FACE_SIZE, _FACE_SIZE)
    return Images(pixels, np.arange(len(pixels), dtype=np.int64) // _FACES_PER_PERSON)


def _mat_variables(raw: bytes, path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Read the named variables of a MATLAB 5 file."""
    scipy_io = optional_module("scipy.io", extra="data")
    try:
        variables: dict[str, Any] = scipy_io.loadmat(io.BytesIO(raw), variable_names=names)
    except Exception as error:  # SciPy's reader meets damage with many kinds of exception.
        raise _damaged(path, f"SciPy cannot read it ({error})") from error
    missing = [name for name in names if name not in variables]
    if missing:
        raise _damaged(path, f"it has no variable {missing[0]}")
    return {name: np.asarray(variables[name]) for name in names}


def _as_bytes(values: NDArray[Any], path: Path) -> NDArray[np.uint8]:
    """Turn grey levels of any number type into uint8, if they are whole and in 0..255."""
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind not in "uif":
        raise _damaged(path, f"its values are of type {values.dtype}, not numbers")
    levels = values.astype(np.uint8)
    if not np.array_equal(levels, values):
        raise _damaged(path, "its values are not whole numbers from 0 to 255")
    return levels


def _damaged(path: Path, reason: str) -> InputError:
    """Say that a file cannot be used, why, and what to do."""
    return InputError(
        f"{path} is truncated or altered: {reason}; replace it, or delete it to have another "
        "copy used"
    )
