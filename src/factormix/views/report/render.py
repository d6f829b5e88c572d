"""The marks that a report's text may hold: bold, italic, code, paragraphs and lists.

They are read as CommonMark, with three differences that suit technical text: an underscore is no
mark, a star within a word is none either, and HTML, entities, links and the rest have no effect.

The Markdown of a report.

The HTML page of a report.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from factormix.views.report.blocks import (
    Block,
    Code,
    Fold,
    Heading,
    Image,
    Images,
    Table,
    Text,
    Verdicts,
    check_packages,
    inline_html,
    inline_markdown,
    plain,
    text_html,
    text_markdown,
    unfolded,
)

if TYPE_CHECKING:
    pass
if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["markdown_fold", "markdown_table", "markdown_text", "page_html"]


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


def markdown_table(table: Table) -> str:
    """Write the cells of a table; a pipe in a cell must not end it."""
    head, *body = (
        [inline_markdown(cell).replace("|", r"\|") for cell in row]
        for row in (table.columns, *table.rows)
    )
    lines = [head, [_RULES[side] for side in table.align], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_fold(summary: str, text: str) -> str:
    """Put Markdown behind a fold, which sites and code hosts show closed until it is opened."""
    inside = inline_html(summary)
    return f'<details markdown="1">\n<summary>{inside}</summary>\n\n{text}\n\n</details>'


def _block(block: Block, links: Iterator[str]) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {inline_markdown(text)}"
        case Text(text, note):
            written = text_markdown(text)
            return re.sub(r"^", "> ", written, flags=re.MULTILINE) if note else written
        case Code(text):
            fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
            return f"{fence}\n{text}\n{fence}"
        case Images(images):
            return "\n\n".join(_image(image, next(links)) for image in images)
        case Table(caption=caption):
            grid = markdown_table(block)
            return f"{inline_markdown(caption)}\n\n{grid}" if caption else grid
        case Verdicts(verdicts):
            cells = [(v.claim, f"**{v.status}**", v.number) for v in verdicts]
            return markdown_table(Table(("Claim", "Verdict", "Number"), tuple(cells), None, "lll"))
        case Fold(summary, blocks):
            return markdown_fold(summary, "\n\n".join(_block(one, links) for one in blocks))


def _image(image: Image, link: str) -> str:
    """Write a picture and its caption; brackets in the words for it must not end them."""
    alt = re.sub(r"([\[\]])", r"\\\1", inline_markdown(image.alt).replace("\n", " "))
    return f"![{alt}]({link})\n\n*{inline_markdown(plain(image.caption))}*"


_BADGES = {"held": "good", "held with a change": "fair", "not found": "bad"}


def page_html(title: str, subtitle: str | None, blocks: Sequence[Block]) -> str:
    """Build the page, with a table of contents if there are more than three headings."""
    return _template().render(
        title=title,
        subtitle=subtitle,
        blocks=blocks,
        headings=[block for block in unfolded(blocks) if isinstance(block, Heading)],
        badges=_BADGES,
    )


@lru_cache
def _template() -> Template:
    """Read the template, in which whatever is not HTML of the parser's own is escaped."""
    check_packages()
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("factormix.views.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "inline": lambda text: Markup(inline_html(text)),
        "paragraphs": lambda text: Markup(text_html(text)),
        "base64": lambda png: base64.b64encode(png).decode("ascii"),
    }
    return environment.get_template("page.html")
