"""The examples of docs/choosing.md run as they stand, from top to bottom."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from factormix.cli import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "choosing.md"


def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(blocks) > 10
    for kind, code in blocks:
        if kind == "python":
            exec(compile(code, str(PAGE), "exec"), names)
            continue
        for line in code.splitlines():
            assert run(shlex.split(line.partition("#")[0])[1:]) == 0, line
    best = names["found"].best_params_
    printed = capsys.readouterr().out
    assert f"{best['n_components']}" in printed
    assert names["classifier"].score(names["X"][names["test"]], names["y"][names["test"]]) > 0.97
    assert names["versus"].difference.mean > 0
    for picture in ("sizes", "nearest", "varimax", "distances", "bins"):
        assert (tmp_path / f"{picture}.png").stat().st_size > 5000


def test_every_picture_is_there() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE.read_text())
    assert pictures
    for picture in pictures:
        assert (PAGE.parent / picture).is_file(), picture
