"""The Markdown of a report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from factormix.views.report.blocks import Block, Code, Heading, Image, Images, Table, Text, Verdicts
from factormix.views.report.marks import inline_markdown, paragraphs, plain

__all__ = ["markdown_text"]

_RULES = {"l": ":--", "c": ":-:", "r": "--:"}


def markdown_text(
    title: str, subtitle: str | None, blocks: Iterable[Block], links: Iterable[str]
) -> str:
    """Build the text; ``links`` are the relative paths of all pictures, in their order."""
    parts = [f"# {inline_markdown(title)}"]
    if subtitle:
        parts.append(f"*{inline_markdown(plain(subtitle))}*")
    remaining = iter(links)
    parts += [_block(block, remaining) for block in blocks]
    return "\n\n".join(parts) + "\n"


def _block(block: Block, links: Iterator[str]) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {inline_markdown(text)}"
        case Text(text, note):
            return re.sub(r"^", "> ", _text(text), flags=re.MULTILINE) if note else _text(text)
        case Code(text):
            fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
            return f"{fence}\n{text}\n{fence}"
        case Images(images):
            return "\n\n".join(_image(image, next(links)) for image in images)
        case Table(columns, rows, caption, align):
            grid = _table(columns, rows, align)
            return f"{inline_markdown(caption)}\n\n{grid}" if caption else grid
        case Verdicts(verdicts):
            cells = [(v.claim, f"**{v.status}**", v.number) for v in verdicts]
            return _table(("Claim", "Verdict", "Number"), cells, "lll")


def _text(text: str) -> str:
    """Write paragraphs and lists."""
    return "\n\n".join(
        "\n".join(("- " if is_list else "") + inline_markdown(line) for line in lines)
        for is_list, lines in paragraphs(text)
    )


def _image(image: Image, link: str) -> str:
    """Write a picture and its caption; brackets in the words for it must not end them."""
    alt = re.sub(r"([\[\]])", r"\\\1", inline_markdown(image.alt).replace("\n", " "))
    return f"![{alt}]({link})\n\n*{inline_markdown(plain(image.caption))}*"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """Write a table; a pipe in a cell must not end it."""
    head, *body = (
        [inline_markdown(cell).replace("|", r"\|") for cell in row] for row in (columns, *rows)
    )
    lines = [head, [_RULES[side] for side in align], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
