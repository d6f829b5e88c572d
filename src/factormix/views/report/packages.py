"""The optional packages that a report needs."""

from __future__ import annotations

from importlib.util import find_spec

from factormix.errors import InputError

__all__ = ["check_packages"]

_PACKAGES = {"jinja2": "jinja2", "markdown_it": "markdown-it-py", "matplotlib": "matplotlib"}


def check_packages(extra: str = "reports") -> None:
    """Fail, before any long work, if a report could not be written here."""
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            raise InputError(f'reports need {package}: run pip install "factormix[{extra}]".')
