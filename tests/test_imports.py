"""What is imported when: told by the modules that are loaded, not by time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMMANDS = [
    [],
    ["train"],
    ["score"],
    ["select"],
    ["sample"],
    ["outliers"],
    ["info"],
    ["compare"],
    ["explore"],
    ["demo"],
    ["reproduce"],
    ["data"],
    ["data", "list"],
    ["data", "fetch"],
]


def loaded(code: str) -> set[str]:
    """Return the names of the modules that are loaded after some code, in a process of its own."""
    code += "\nimport sys, json; print('\\n' + json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_of_every_command_needs_no_heavy_package():
    calls = "".join(f"assert run({[*command, '--help']!r}) == 0\n" for command in COMMANDS)
    heavy = {"torch", "sklearn", "numpy", "scipy", "pandas", "matplotlib", "tqdm", "safetensors"}
    assert not heavy & loaded(f"from factormix.cli import run\n{calls}")


@pytest.fixture(scope="module")
def needed() -> set[str]:
    """What torch and scikit-learn's base classes load on their own."""
    return loaded("import torch, safetensors.torch, sklearn.base, sklearn.utils.validation")


def test_the_estimator_adds_little_to_torch_and_scikit_learn(needed: set[str]) -> None:
    more = loaded("from factormix import MFA, load") - needed
    packages = {name.partition(".")[0] for name in more} - set(sys.stdlib_module_names)
    assert packages <= {"factormix"}, "and nothing of pictures, tables or progress bars"
    rooms = {".".join(name.split(".")[:2]) for name in more if name.startswith("factormix.")}
    assert not {"factormix.views", "factormix.studies", "factormix.cli"} & rooms


def test_a_fit_loads_no_more_than_it_uses(needed: set[str]) -> None:
    fit = "MFA(2, 1, max_epochs=1).fit(np.random.rand(50, 3)).score([[1, 2, 3]])"
    more = loaded(f"import numpy as np\nfrom factormix import MFA\n{fit}") - needed
    assert not {"matplotlib", "pyarrow", "tqdm", "PIL"} & {name.partition(".")[0] for name in more}
    assert "scipy.stats" not in more
