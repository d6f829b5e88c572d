"""The marks that a report's text may hold: bold, italic, code, paragraphs and lists.

They are read as CommonMark, with three differences that suit technical text: an underscore is no
mark, a star within a word is none either, and HTML, entities, links and the rest have no effect.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from factormix.views.report.packages import check_packages

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

__all__ = ["inline_html", "inline_markdown", "plain", "slug", "text_html", "text_markdown"]


def inline_html(text: str) -> str:
    """Turn a line of text into HTML."""
    return str(_parser().renderInline(text))


def text_html(text: str) -> str:
    """Turn paragraphs, separated by empty lines, and lists into HTML."""
    return str(_parser().render(text.strip()))


def inline_markdown(text: str) -> str:
    """Keep the marks, and keep anything that looks like HTML from being taken for it."""
    return "".join(map(_marked, _tokens(text)))


def text_markdown(text: str) -> str:
    """Do the same with paragraphs and lists, none of whose marks reaches beyond an empty line."""
    return "\n\n".join(inline_markdown(part) for part in re.split(r"\n\s*\n", text.strip()))


def plain(text: str) -> str:
    """Remove the marks of bold, italic and code."""
    return "".join(token.content for token in _tokens(text)).replace("\n", " ")


def slug(text: str) -> str:
    """Make a name for anchors and files out of a text."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "part"


@lru_cache
def _parser() -> MarkdownIt:
    check_packages()
    from markdown_it import MarkdownIt

    parser = MarkdownIt("zero", {"html": False})
    parser.enable(["list", "backticks", "emphasis", "balance_pairs", "fragments_join"])
    parser.inline.ruler.at("emphasis", _stars)
    return parser


def _stars(state: StateInline, silent: bool) -> bool:
    """Take a run of stars for marks; the library pairs them afterwards."""
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


def _tokens(text: str) -> list[Token]:
    """Split a line into text, code and the marks around them."""
    (line,) = _parser().parseInline(text)
    return line.children or []


def _marked(token: Token) -> str:
    if token.type == "text":
        return token.content.replace("&", "&amp;").replace("<", "&lt;")
    if token.type == "code_inline":
        # A backtick at an end of the code would join the mark.
        edge = " " if token.content.startswith("`") or token.content.endswith("`") else ""
        return f"{token.markup}{edge}{token.content}{edge}{token.markup}"
    return token.markup
