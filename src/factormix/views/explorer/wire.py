"""How answers travel to the page: JSON facts and arrays of numbers in one message.

A message is the length of its header (four bytes, little-endian), the header as JSON, and the bytes
of the arrays, each from a multiple of eight on. The header has the ``facts``, and of each array
its name, dtype, shape and first byte after the header.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["message", "plain"]

DTYPES = {"float32", "uint8", "int32", "float64"}


def message(facts: Mapping[str, Any], **arrays: NDArray[Any]) -> bytes:
    """Write facts, which JSON knows, and arrays of the dtypes that the page knows."""
    described, pieces, at = [], [], 0
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise TypeError(f"the page does not read arrays of {array.dtype.name}")
        raw = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        dtype, shape = array.dtype.name, list(array.shape)
        described.append({"name": name, "dtype": dtype, "shape": shape, "at": at})
        padding = -len(raw) % 8
        pieces += [raw, b"\0" * padding]
        at += len(raw) + padding
    header = json.dumps({"facts": plain(facts), "arrays": described}, allow_nan=False).encode()
    header += b" " * (-(len(header) + 4) % 8)
    return struct.pack("<I", len(header)) + header + b"".join(pieces)


def plain(value: Any) -> Any:
    """Turn numbers of NumPy into those of JSON, which has no NaN: that becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
