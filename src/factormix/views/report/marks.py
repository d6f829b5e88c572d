"""The marks that a report's text may hold: bold, italic, code, paragraphs and lists."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from itertools import groupby

__all__ = ["inline_html", "inline_markdown", "paragraphs", "plain", "slug"]

_CODE = re.compile(r"`([^`]+)`")
_STRONG = re.compile(r"\*\*(?=\S)(.+?)(?<=\S)\*\*")
_EMPHASIS = re.compile(r"(?<![\w*])\*(?=[^\s*])([^*]+?)(?<=[^\s*])\*(?![\w*])")
_SIGNS = {"code": "`", "strong": "**", "em": "*"}


def plain(text: str) -> str:
    """Remove the marks of bold, italic and code."""
    return _inline(text, str, str, lambda tag, inner: inner)


def inline_html(text: str) -> str:
    """Turn one line of text into HTML."""
    return _inline(text, html.escape, html.escape, lambda tag, inner: f"<{tag}>{inner}</{tag}>")


def inline_markdown(text: str) -> str:
    """Keep the marks, and keep anything that looks like HTML from being taken for it."""
    return _inline(
        text,
        lambda words: words.replace("&", "&amp;").replace("<", "&lt;"),
        str,
        lambda tag, inner: f"{_SIGNS[tag]}{inner}{_SIGNS[tag]}",
    )


def _inline(
    text: str,
    escape: Callable[[str], str],
    escape_code: Callable[[str], str],
    wrap: Callable[[str, str], str],
) -> str:
    """Escape a text and wrap what is marked in its tag; nothing inside code is taken for a mark."""
    parts = _CODE.split(text)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = wrap("code", escape_code(part))
        else:
            bold = _STRONG.sub(lambda match: wrap("strong", match[1]), escape(part))
            parts[index] = _EMPHASIS.sub(lambda match: wrap("em", match[1]), bold)
    return "".join(parts)


def paragraphs(text: str) -> Iterator[tuple[bool, list[str]]]:
    """Split a text at empty lines and around lists; give (is a list, its lines or items)."""
    for part in re.split(r"\n\s*\n", text.strip()):
        lines = [line.strip() for line in part.splitlines()]
        for is_list, run in groupby(lines, key=lambda line: line.startswith("- ")):
            group = list(run)
            yield is_list, [line[2:] for line in group] if is_list else [" ".join(group)]


def slug(text: str) -> str:
    """Make a name for anchors and files out of a text."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "part"
