"""Which estimators a file can hold: those of the package, and those that a user has defined."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factormix import MFA, InputError, load

X = np.random.default_rng(0).normal(size=(120, 5))


class Careful(MFA):
    """A subclass as a user might write it, with an option of its own."""

    def __init__(
        self,
        n_components: int = 2,
        n_factors: int = 1,
        *,
        care: float = 0.5,
        solver: Any = "natural",
        max_epochs: int | None = 2,
        random_state: int | None = 0,
        dtype: Any = "float32",
        device: Any = None,
    ) -> None:
        super().__init__(
            n_components,
            n_factors,
            solver=solver,
            max_epochs=max_epochs,
            random_state=random_state,
            dtype=dtype,
            device=device,
        )
        self.care = care


def test_a_subclass_comes_back_as_what_it_was(tmp_path):
    model = Careful(care=0.25, solver="em").fit(X)
    model.save(tmp_path / "m")
    copy = load(tmp_path / "m")
    assert type(copy) is Careful
    assert copy.get_params() == model.get_params()
    np.testing.assert_array_equal(copy.score_samples(X), model.score_samples(X))


def test_a_class_of_the_same_name_does_not_take_the_place_of_ours(tmp_path):
    ours = MFA
    made = type("MFA", (ours,), {"__init__": ours.__init__, "__module__": "elsewhere"})
    ours(2, 1, max_epochs=1).fit(X).save(tmp_path / "ours")
    made(2, 1, max_epochs=1).fit(X).save(tmp_path / "theirs")
    assert type(load(tmp_path / "ours")) is ours
    assert type(load(tmp_path / "theirs")) is made


def test_a_class_that_is_not_imported_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from factormix import MFA\nclass Careful(MFA):\n    __init__ = MFA.__init__\n"
    )
    rows = "[[i, i * i % 7, -i] for i in range(50)]"
    fit = f"mine.Careful(2, 1, max_epochs=1).fit({rows})"
    run(f"import sys, mine; {fit}.save(sys.argv[1])", tmp_path)
    with pytest.raises(InputError) as error:
        load(tmp_path / "m")
    assert "mine.Careful" in str(error.value)
    assert "import mine before" in str(error.value)
    code = "import sys, mine, factormix; print(type(factormix.load(sys.argv[1])).__name__)"
    assert run(code, tmp_path) == "Careful\n"


def run(code: str, folder: Path) -> str:
    """Run code as a process of its own in a folder, with the path of a model as its argument."""
    command = [sys.executable, "-c", code, str(folder / "m")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
