"""Models on disk: safetensors files with format version, settings and a checksum in the header.

A file holds named tensors and one JSON text of settings; nothing in it is executed when it is read.
The checksum covers all of that, so that a damaged file is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from factormix.errors import InputError
from factormix.files import replacing

__all__ = [
    "FORMAT_VERSION",
    "cannot_write",
    "hashed_name",
    "header_of",
    "is_model",
    "read",
    "write",
]

FORMAT = "factormix"
FORMAT_VERSION = 1


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], settings: Any) -> Path:
    """Write tensors and JSON-ready settings to a file, all of it or nothing."""
    header = header_of(settings)
    plain: dict[str, Tensor] = {}
    owners: set[int] = set()
    for name, tensor in tensors.items():
        plain[name] = tensor.detach().to("cpu").contiguous()
        # A file holds no views: what shares its memory with another gets its own.
        if plain[name].untyped_storage().data_ptr() in owners:
            plain[name] = plain[name].clone()
        owners.add(plain[name].untyped_storage().data_ptr())
    header["checksum"] = _checksum(header, plain)
    try:
        with replacing(path) as temporary:
            save_file(plain, temporary, metadata=header)
    except (SafetensorError, OSError) as error:
        raise cannot_write(path, error) from error
    return Path(path)


def header_of(settings: Any) -> dict[str, str]:
    """Make the header of a file, all but its checksum, from JSON-ready settings."""
    try:
        text = json.dumps(settings)
    except (TypeError, ValueError) as error:
        raise InputError(f"the settings of the model cannot be saved as JSON: {error}.") from error
    return {"format": FORMAT, "format_version": str(FORMAT_VERSION), "settings": text}


def cannot_write(path: str | os.PathLike[str], error: Exception) -> InputError:
    """Say why a file cannot be written."""
    return InputError(f"cannot write {path} ({_brief(error)}): make room or choose another path.")


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Any]:
    """Read back what ``write`` wrote, onto the CPU."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file; check the path of the model.")
    if not path.is_file():
        raise InputError(f"{path} is not a file; give the path of a model file.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
            _check_header(path, header)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _check_sum(path, header, tensors)
        return tensors, json.loads(header["settings"])
    except (SafetensorError, json.JSONDecodeError, KeyError, OSError) as error:
        raise InputError(
            f"{path} is not a complete factormix model ({_brief(error)}): it is truncated, damaged"
            " or of another kind; save the model again."
        ) from error


def is_model(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file is a whole model, of whatever version."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format") == FORMAT
    except (SafetensorError, OSError):
        return False


def _check_header(path: Path, header: Mapping[str, str]) -> None:
    version = header.get("format_version", "")
    if header.get("format") != FORMAT or not version.isdigit():
        raise InputError(
            f"{path} is a safetensors file but not a factormix model: give a file that MFA.save"
            " wrote."
        )
    if int(version) > FORMAT_VERSION:
        raise InputError(
            f"{path} has format version {version}, newer than the {FORMAT_VERSION} that this"
            " factormix reads: upgrade factormix."
        )


def _check_sum(path: Path, header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    if header.get("checksum") != _checksum(header, tensors):
        raise InputError(
            f"{path} is damaged: its checksum does not match what it holds; save the model again or"
            " use an earlier copy."
        )


def _checksum(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 of the version, the settings, and names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    # Each text ends with a zero byte, so that no two contents run together to the same bytes.
    total.update(f"{header['format_version']}\0{header['settings']}\0".encode())
    for name, tensor in sorted(tensors.items()):
        total.update(hashed_name(name, str(tensor.dtype), tuple(tensor.shape)))
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def hashed_name(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return what the checksum has of a tensor before its bytes."""
    return f"{name}\0{dtype}\0{shape}\0".encode()


def _brief(error: Exception) -> str:
    text = str(error).splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
