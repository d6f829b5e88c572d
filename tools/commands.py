"""Write the reference of the command line from the commands themselves.

    python tools/commands.py             # write docs/commands.md
    python tools/commands.py --check     # end with an error if the page is not up to date

Texts, options, defaults and examples come from the Typer application, so the page and ``--help``
say the same.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import typer

from factormix.cli import app
from factormix.cli.options import Reading

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"

READING = tuple(field.name for field in fields(Reading))
"""Options that all commands with DATA share; they have one table for all."""

HEAD = """\
# The command line

*`python tools/commands.py` writes this page from the commands. Their `--help` has the same texts.*

| command | |
|---|---|
{commands}

Every command also has `--help`, and `factormix --version` prints the version. Results go to files
or standard output; notes, progress and errors go to standard error. A file is written beside its
target and then moved, so a command that is stopped leaves the old file.

| exit code | meaning |
|---|---|
| 0 | success |
| 2 | wrong options or input: one sentence on standard error says what is wrong and what to do |
| 130, 143 | stopped by Ctrl-C, by SIGTERM |

[File formats](formats.md) describes the files that the commands read and write, and
[Tables in files](tables.md) the choice of columns.

## Reading DATA

{data}

{reading}

The commands {readers} share these options.
"""


def write_reference() -> str:
    """Return the page: all commands, with their arguments, options and examples."""
    commands = list(_walk(typer.main.get_command(app), "factormix"))
    readers = [one for one in commands if _has_reading_options(one[1])]
    names = [f"`{path.removeprefix('factormix ')}`" for path, _ in readers]
    reading = [one for one in readers[0][1].params if one.name in READING]
    summaries = [
        f"| [`{path}`](#{path.replace(' ', '-')}) | {_paragraphs(command.help)[0]} |"
        for path, command in commands
    ]
    head = HEAD.format(
        commands="\n".join(summaries),
        readers=f"{', '.join(names[:-1])} and {names[-1]}",
        data=_mark_options(next(p.help for p in readers[0][1].params if p.name == "data")),
        reading=_describe_options(readers[0][1], reading),
    )
    return "\n".join([head, *(_describe_command(*one) for one in commands)])


def _walk(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every command of a group and of the groups in it, with its full name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _walk(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _has_reading_options(command: Any) -> bool:
    return set(READING) <= {one.name for one in command.params}


def _show_argument(one: Any) -> str:
    return str(one.metavar) if one.required else f"[{one.metavar}]"


def _describe_command(path: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    shared = READING if _has_reading_options(command) else ()
    own = [one for one in options if one.name not in shared]
    usage = " ".join([path, *map(_show_argument, arguments), "[OPTIONS]"])
    parts = [f"## {path}", f"`{usage}`", *_paragraphs(command.help)]
    if arguments:
        parts.append(_describe_arguments(arguments))
    if own:
        parts.append(_describe_options(command, own))
    if len(own) < len(options):
        parts.append("It also has the options for [reading DATA](#reading-data).")
    examples = command.epilog.partition("\n")[2].partition("\n")[2]
    parts.append(f"```sh\n{textwrap.dedent(examples).strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _paragraphs(text: str) -> list[str]:
    """Split a docstring into its paragraphs, each filled to the width of the pages."""
    return [
        textwrap.fill(" ".join(part.split()), 120, break_long_words=False, break_on_hyphens=False)
        for part in _mark_options(textwrap.dedent(text)).strip().split("\n\n")
    ]


def _mark_options(text: str) -> str:
    """Set the names of options in type, unless they are already."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<![\w-])(--[a-z][a-z-]*)", r"`\1`", part) for part in parts[::2]]
    return "`".join(parts)


def _describe_arguments(arguments: list[Any]) -> str:
    rows = []
    for one in arguments:
        text = _mark_options(one.help)
        if one.name == "data":
            text = "A file or folder of rows, or standard input: see [reading DATA](#reading-data)."
        rows.append(f"| `{_cell(one.metavar)}` | {_cell(_add_default(one, text))} |")
    return "\n".join(["| argument | |", "|---|---|", *rows])


def _describe_options(command: Any, options: list[Any]) -> str:
    types = inspect.signature(command.callback, eval_str=True).parameters
    rows = []
    for one in options:
        name = _name(one, types[one.name].annotation)
        rows.append(f"| {name} | {_cell(_add_default(one, _mark_options(one.help)))} |")
    return "\n".join(["| option | |", "|---|---|", *rows])


def _name(option: Any, annotation: Any) -> str:
    """Return the names of an option, the long one first, and the kind of its value."""
    names = [*sorted(option.opts, key=len, reverse=True), *option.secondary_opts]
    value = "" if option.is_flag else option.metavar or _kind(annotation)
    names[0] = f"{names[0]} {value}".strip()
    return ", ".join(f"`{_cell(name)}`" for name in names)


def _kind(annotation: Any) -> str:
    """Name the values of an option: its choices, or a word for its type."""
    kinds = [one for one in _plain_types(annotation) if one is not type(None)]
    if issubclass(kinds[0], Enum):
        return "/".join(choice.value for choice in kinds[0])
    return {int: "NUMBER", float: "NUMBER", str: "NAME", Path: "PATH"}[kinds[0]]


def _plain_types(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union, without the remarks of ``Annotated``."""
    plain = annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation
    return get_args(plain) or (plain,)


def _add_default(parameter: Any, text: str) -> str:
    """Add to a text whether a parameter is required, or its default as the help shows it."""
    if parameter.required:
        is_option = parameter.param_type_name == "option"
        return f"{text} Required." if is_option else text
    if isinstance(parameter.show_default, str):
        return f"{text} Default: {_mark_options(parameter.show_default)}."
    value = parameter.default
    value = getattr(value, "value", value)
    if parameter.param_type_name == "option" and parameter.secondary_opts:
        value = (parameter.opts if value else parameter.secondary_opts)[0]
    if value is None or value is False:
        return text
    return f"{text} Default: `{value}`."


def _cell(text: str) -> str:
    """Replace bars, which would end the cell of a table."""
    return text.replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    text = write_reference()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{PAGE.name} is not up to date: run python tools/commands.py")


if __name__ == "__main__":
    main()
