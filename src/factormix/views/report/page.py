"""The HTML page of a report."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from factormix.views.report.blocks import Block, Heading, unfolded
from factormix.views.report.marks import inline_html, text_html
from factormix.views.report.packages import check_packages

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["page_html"]

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
