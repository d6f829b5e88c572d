"""The HTML page of a report."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

from factormix.views.report.blocks import (
    Block,
    Code,
    Heading,
    Image,
    Images,
    Table,
    Text,
    Verdict,
    Verdicts,
)
from factormix.views.report.marks import inline_html, paragraphs
from factormix.views.report.template import PAGE, STYLE

__all__ = ["page_html"]

_BADGES = {"held": "good", "held with a change": "fair", "not found": "bad"}


def page_html(title: str, subtitle: str | None, blocks: Sequence[Block]) -> str:
    """Build the page, with a table of contents if there are more than three headings."""
    headings = [block for block in blocks if isinstance(block, Heading)]
    parts = [_contents(headings)] if len(headings) > 3 else []
    parts += map(_block, blocks)
    return PAGE.format(
        style=STYLE,
        title=html.escape(title),
        subtitle=f'<p class="subtitle">{inline_html(subtitle)}</p>' if subtitle else "",
        body="\n".join(parts),
    )


def _contents(headings: Iterable[Heading]) -> str:
    items = "".join(
        f'<li class="level{h.level}"><a href="#{h.anchor}">{inline_html(h.text)}</a></li>'
        for h in headings
    )
    return f'<nav aria-label="Contents"><ul>{items}</ul></nav>'


def _block(block: Block) -> str:
    match block:
        case Heading(text, level, anchor):
            return f'<h{level} id="{anchor}">{inline_html(text)}</h{level}>'
        case Text(text, note):
            return f'<aside class="note">{_text(text)}</aside>' if note else _text(text)
        case Code(text):
            return f"<pre><code>{html.escape(text)}</code></pre>"
        case Images(images):
            return f'<div class="figures">{"".join(map(_image, images))}</div>'
        case Table():
            return _table(block)
        case Verdicts(verdicts):
            return f'<ul class="verdicts">{"".join(map(_verdict, verdicts))}</ul>'


def _text(text: str) -> str:
    """Write paragraphs and lists."""
    parts = []
    for is_list, lines in paragraphs(text):
        tag = "li" if is_list else "p"
        inner = "".join(f"<{tag}>{inline_html(line)}</{tag}>" for line in lines)
        parts.append(f"<ul>{inner}</ul>" if is_list else inner)
    return "\n".join(parts)


def _image(image: Image) -> str:
    """Put a picture into the page itself, as base64."""
    data = base64.b64encode(image.png).decode("ascii")
    return (
        f'<figure style="--width:{image.width}px"><div class="card">'
        f'<img src="data:image/png;base64,{data}" alt="{html.escape(image.alt)}"></div>'
        f"<figcaption>{inline_html(image.caption)}</figcaption></figure>"
    )


def _table(table: Table) -> str:
    """Write a table that scrolls by itself when the page is narrow."""
    head = _cells(table.columns, table.align, 'th scope="col"', "th")
    body = "\n".join(f"<tr>{_cells(row, table.align, 'td', 'td')}</tr>" for row in table.rows)
    caption = f"<caption>{inline_html(table.caption)}</caption>" if table.caption else ""
    return (
        f'<div class="table" tabindex="0"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _cells(cells: Iterable[str], align: str, opening: str, closing: str) -> str:
    return "".join(
        f'<{opening} class="{side}">{inline_html(cell)}</{closing}>'
        for cell, side in zip(cells, align, strict=True)
    )


def _verdict(verdict: Verdict) -> str:
    """Write a verdict behind its coloured badge."""
    return (
        f'<li><span class="badge {_BADGES[verdict.status]}">{verdict.status}</span>'
        f'<span class="claim">{inline_html(verdict.claim)}</span>'
        f'<span class="number">{inline_html(verdict.number)}</span></li>'
    )
