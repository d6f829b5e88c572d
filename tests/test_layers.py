"""Layers of the package: a lower folder never imports from a higher one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import factormix

PACKAGE = Path(factormix.__file__).parent
LAYERS = ("core", "data", "training", "estimators", "activations", "views", "cli")
"""Folders from the lowest layer to the highest; ``GROUND`` names the files below all of them."""
GROUND = {"defaults", "errors", "files", "notebook"}


def imported(path: Path) -> set[str]:
    """Return the modules and folders of ``factormix`` that a file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[0] == "factormix":
                names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "factormix":
                    names.add(parts[1] if len(parts) > 1 else "factormix")
    return names


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_from_lower_layers_only(layer):
    allowed = GROUND | set(LAYERS[: LAYERS.index(layer) + 1]) | {"__version__"}
    files = sorted((PACKAGE / layer).rglob("*.py"))
    assert files
    for path in files:
        above = imported(path) - allowed
        assert not above, f"{path.relative_to(PACKAGE)} imports {sorted(above)}"


def test_the_ground_imports_nothing_above_it():
    for name in GROUND:
        assert imported(PACKAGE / f"{name}.py") <= GROUND


def test_every_folder_is_a_layer():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == set(LAYERS)
