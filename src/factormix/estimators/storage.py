"""Models on disk: safetensors files with their format version and settings in the header.

A file holds named tensors and one JSON text of settings; nothing in it is executed when it is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from factormix.errors import InputError
from factormix.files import replacing

__all__ = ["FORMAT_VERSION", "is_model", "read", "write"]

FORMAT = "factormix"
FORMAT_VERSION = 2


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], settings: Any) -> Path:
    """Write tensors and JSON-ready settings to a file, all of it or nothing."""
    try:
        text = json.dumps(settings)
    except (TypeError, ValueError) as error:
        raise InputError(f"the settings of the model cannot be saved as JSON: {error}.") from error
    header = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "settings": text}
    plain: dict[str, Tensor] = {}
    owners: set[int] = set()
    for name, tensor in tensors.items():
        plain[name] = tensor.detach().to("cpu").contiguous()
        # A file holds no views: what shares its memory with another gets its own.
        if plain[name].untyped_storage().data_ptr() in owners:
            plain[name] = plain[name].clone()
        owners.add(plain[name].untyped_storage().data_ptr())
    with replacing(path) as temporary:
        try:
            save_file(plain, temporary, metadata=header)
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"cannot write {path} ({_brief(error)}): make room or choose another path."
            ) from error
    return Path(path)


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
        _check_state(path, header, tensors)
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


def _check_state(path: Path, header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    # Version 2 put the mean before the loadings in running averages; all else is the same.
    old = int(header["format_version"]) < 2
    if old and any(name.startswith("running.") for name in tensors):
        raise InputError(
            f"{path} holds training in format version 1, from before the first release, which"
            " cannot go on: train the model again."
        )


def _brief(error: Exception) -> str:
    text = str(error).splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
