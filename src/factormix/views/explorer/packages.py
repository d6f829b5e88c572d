"""The optional packages that the explorer needs."""

from __future__ import annotations

from importlib.util import find_spec

from factormix.errors import InputError

__all__ = ["check_packages"]


def check_packages() -> None:
    """Fail, before any long work, if no page could be served here."""
    for module in ("starlette", "uvicorn"):
        if find_spec(module) is None:
            raise InputError(f'the explorer needs {module}: run pip install "factormix[explore]".')
