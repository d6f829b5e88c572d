"""Optional packages, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from factormix.errors import InputError

__all__ = ["optional_module"]


def optional_module(name: str, *, extra: str) -> Any:
    """Import the module `name`, or say which extra of factormix brings it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise InputError(
            f'this needs the package {package}: run pip install "factormix[{extra}]"'
        ) from error
