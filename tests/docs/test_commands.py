"""The page of commands is what the commands say."""

from __future__ import annotations

import re
from pathlib import Path

import commands
import pytest
import typer

from factormix.cli import app, run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
COMMANDS = dict(commands._walk(typer.main.get_command(app), "factormix"))


def test_the_page_is_up_to_date() -> None:
    assert commands.write_reference() == PAGE, "run python tools/commands.py"


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_of_the_help_is_in_the_section_of_its_command(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run([*path.split()[1:], "--help"])
    shown = set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    section = PAGE.partition(f"\n## {path}\n")[2].partition("\n## ")[0]
    shared = PAGE.partition("\n## Reading DATA\n")[2].partition("\n## ")[0]
    assert "```sh\n" in section
    if "(#reading-data)" in section:
        section += shared
    listed = set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE))
    assert shown - {"--help"} <= listed
