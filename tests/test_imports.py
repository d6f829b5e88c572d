"""Which modules are imported when, by the names of loaded modules rather than by time."""

from __future__ import annotations

import json
import subprocess
import sys

COMMANDS = [
    [],
    ["train"],
    ["score"],
    ["select"],
    ["sample"],
    ["outliers"],
    ["impute"],
    ["watch"],
    ["info"],
    ["compare"],
    ["explore"],
    ["demo"],
    ["data"],
    ["data", "list"],
    ["data", "fetch"],
    ["denoise"],
    ["images"],
]


def run_and_report(*stages: str) -> list[set[str]]:
    """Run pieces of code in one new process, and return the modules loaded after each."""
    report = "\nprint('\\n' + json.dumps(list(sys.modules)))\n"
    code = "import json, sys\n" + report.join([*stages, ""])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return [set(json.loads(line)) for line in lines]


def test_help_of_every_command_needs_no_heavy_package():
    calls = "".join(f"assert run({[*command, '--help']!r}) == 0\n" for command in COMMANDS)
    heavy = {"torch", "sklearn", "numpy", "scipy", "pandas", "matplotlib", "tqdm", "safetensors"}
    loaded = run_and_report(f"from factormix.cli import run\n{calls}")[-1]
    assert not heavy & loaded


def test_an_estimator_and_a_fit_import_little_beside_torch_and_scikit_learn():
    base, estimator, fit = run_and_report(
        "import torch, safetensors.torch, sklearn.base, sklearn.utils.validation",
        "from factormix import MFA, load",
        "import numpy as np\nMFA(2, 1, max_epochs=1).fit(np.random.rand(50, 3)).score([[1, 2, 3]])",
    )
    packages = {name.partition(".")[0] for name in estimator - base}
    assert packages - set(sys.stdlib_module_names) <= {"factormix"}
    rooms = {".".join(name.split(".")[:2]) for name in estimator if name.startswith("factormix.")}
    assert not {"factormix.views", "factormix.cli"} & rooms
    packages = {name.partition(".")[0] for name in fit - base}
    assert not {"matplotlib", "pyarrow", "tqdm", "PIL"} & packages
    assert "scipy.stats" not in fit - base
