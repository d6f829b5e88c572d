"""The examples of docs/missing.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from factormix.cli import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "missing.md"


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_the_python_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in examples("python"):
        exec(compile(code, str(PAGE), "exec"), names)
        if "prediction" in names and "rest" not in names:
            # Petal widths of the first flowers, which are all of one kind.
            assert np.abs(names["prediction"] - names["X"][:5, 3]).max() < 0.3
    lower = names["lower"]
    error = (names["filled"] - names["digits"][1500:1510])[:, lower]
    by_mean = (names["digits"][:1500].mean(axis=0) - names["digits"][1500:1510])[:, lower]
    assert (error**2).mean() < 0.7 * (by_mean**2).mean()
    assert names["possible"].shape == (5, 10, 64)
    assert (tmp_path / "imputer.safetensors").exists()


def test_the_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).normal(size=(80, 6))
    rows[np.random.default_rng(1).random(rows.shape) < 0.2] = np.nan
    pd.DataFrame(rows, columns=list("abcdef")).to_csv("gaps.csv", index=False)
    (commands,) = examples("sh")
    for line in commands.strip().splitlines():
        arguments = line.partition("#")[0].split()
        assert arguments[0] == "factormix"
        assert run(arguments[1:]) == 0
    assert not pd.read_csv("filled.csv").isna().any().any()
    assert len(pd.read_parquet("draws.parquet")) == 20 * 80
