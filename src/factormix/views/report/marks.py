"""The marks of text in reports: bold, italic and code, paragraphs and lists.

They are read as CommonMark, with three differences that suit technical text: underscores are not
marks, stars within a word are not marks, and HTML, entities, links and all other syntax have no
effect.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from factormix.errors import InputError

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token


_PACKAGES = {"jinja2": "jinja2", "markdown_it": "markdown-it-py", "matplotlib": "matplotlib"}


def check_packages(extra: str = "reports") -> None:
    """Raise an error if the packages of reports are not installed."""
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            raise InputError(f'reports need {package}: run pip install "factormix[{extra}]".')


def inline_html(text: str) -> str:
    """Convert a line of text to HTML."""
    return str(_parser().renderInline(text))


def paragraphs_html(text: str) -> str:
    """Convert paragraphs, separated by empty lines, and lists to HTML."""
    return str(_parser().render(text.strip()))


def inline_markdown(text: str) -> str:
    """Keep the marks of a line, and escape anything that looks like HTML."""
    return "".join(map(_token_markdown, _parse_line(text)))


def paragraphs_markdown(text: str) -> str:
    """Keep the marks of paragraphs and lists; no mark reaches beyond an empty line."""
    return "\n\n".join(inline_markdown(part) for part in re.split(r"\n\s*\n", text.strip()))


def remove_marks(text: str) -> str:
    """Remove the marks of bold, italic and code."""
    return "".join(token.content for token in _parse_line(text)).replace("\n", " ")


@lru_cache
def _parser() -> MarkdownIt:
    check_packages()
    from markdown_it import MarkdownIt

    parser = MarkdownIt("zero", {"html": False})
    parser.enable(["list", "backticks", "emphasis", "balance_pairs", "fragments_join"])
    parser.inline.ruler.at("emphasis", _parse_stars)
    return parser


def _parse_stars(state: StateInline, silent: bool) -> bool:
    """Read a run of stars as marks, which the library pairs afterwards."""
    from markdown_it.rules_inline.state_inline import Delimiter

    if silent or state.src[state.pos] != "*":
        return False
    run = state.scanDelims(state.pos, False)
    for _ in range(run.length):
        state.push("text", "", 0).content = "*"
        state.delimiters.append(
            Delimiter(ord("*"), run.length, len(state.tokens) - 1, -1, run.can_open, run.can_close)
        )
    state.pos += run.length
    return True


def _parse_line(text: str) -> list[Token]:
    """Split a line into text, code and marks."""
    (line,) = _parser().parseInline(text)
    return line.children or []


def _token_markdown(token: Token) -> str:
    if token.type == "text":
        return token.content.replace("&", "&amp;").replace("<", "&lt;")
    if token.type == "code_inline":
        # A backtick at either end of the code would become part of the mark.
        edge = " " if token.content.startswith("`") or token.content.endswith("`") else ""
        return f"{token.markup}{edge}{token.content}{edge}{token.markup}"
    return token.markup
