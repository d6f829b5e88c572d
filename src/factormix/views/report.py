"""Reports: headings, text, pictures and tables on one HTML page that needs no other file."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Self

from factormix.errors import InputError, require_package
from factormix.files import write_whole
from factormix.views.plotting.drawing import figure_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
"""Dots of a picture per inch. A CSS pixel is 1/96 inch."""


def check_report_packages(extra: str = "reports") -> None:
    """Raise an error if the packages of reports are not installed."""
    require_package("matplotlib", extra)
    require_package("markdown_it", extra, "markdown-it-py")


class Report:
    """Collect headings, text, pictures and tables, then write them as one HTML page.

    Text may hold a little Markdown: paragraphs, lists, ``**bold**``, ``*italic*`` and code between
    backticks. All other text is shown as it is: HTML has no effect. Every method that adds
    something returns the report, so calls can be chained.

    >>> report = Report("A small report").heading("Results").text("It **works**.")
    >>> "<strong>works</strong>" in report.html()
    True
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title, self.subtitle = title, subtitle
        self._parts: list[str] = []
        self._contents: list[str] = []
        """Links to the headings."""
        self._first_heading = 0
        """Number of the part before which the table of contents stands."""

    def heading(self, text: str, level: int = 2) -> Self:
        """Begin a section (level 2) or a part of one (level 3)."""
        if level not in (2, 3):
            raise InputError(f"a heading has level 2 or 3, not {level}")
        if not self._contents:
            self._first_heading = len(self._parts)
        line, anchor = _inline(text), f"part-{len(self._contents) + 1}"
        self._contents.append(f'<li class="level{level}"><a href="#{anchor}">{line}</a></li>')
        return self._add(f'<h{level} id="{anchor}">{line}</h{level}>')

    def text(self, text: str) -> Self:
        """Add paragraphs, separated by empty lines, and lists."""
        return self._add(_parser().render(text))

    def note(self, text: str) -> Self:
        """Add a remark that stands out from the text."""
        return self._add(f'<aside class="note">{_parser().render(text)}</aside>')

    def code(self, text: str) -> Self:
        """Add code or the output of a command, shown as it is."""
        return self._add(f"<pre><code>{html.escape(text)}</code></pre>")

    def figures(self, pairs: Iterable[tuple[Figure, str]]) -> Self:
        """Add pictures with captions, side by side if the page is wide enough."""
        shown = "\n".join(_draw(figure, caption) for figure, caption in pairs)
        return self._add(f'<div class="figures">\n{shown}\n</div>')

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> Self:
        """Add a table; all columns but the first are aligned to the right, as numbers are."""
        head = "".join(f'<th scope="col">{_inline(name)}</th>' for name in columns)
        lines = ("".join(f"<td>{_inline(cell)}</td>" for cell in row) for row in rows)
        body = "\n".join(f"<tr>{line}</tr>" for line in lines)
        return self._add(
            f'<div class="table" tabindex="0"><table>\n<caption>{_inline(caption)}</caption>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
        )

    def html(self) -> str:
        """Render the page, with styles and pictures inside it and no scripts.

        More than three headings get a table of contents, above the first of them.
        """
        parts = list(self._parts)
        if len(self._contents) > 3:
            links = "\n".join(self._contents)
            contents = f'<nav aria-label="Contents">\n<ul>\n{links}\n</ul>\n</nav>'
            parts.insert(self._first_heading, contents)
        page = Template(files("factormix.views").joinpath("report.html").read_text("utf-8"))
        return page.substitute(
            title=html.escape(self.title),
            subtitle=f'<p class="subtitle">{_inline(self.subtitle)}</p>' if self.subtitle else "",
            content="\n".join(parts),
        )

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to ``path``, whole or not at all."""
        write_whole(path, self.html().encode())
        return Path(path)

    def _add(self, part: str) -> Self:
        self._parts.append(part)
        return self


@lru_cache
def _parser() -> Any:
    check_report_packages()
    from markdown_it import MarkdownIt

    marks = ["list", "backticks", "emphasis", "balance_pairs", "fragments_join"]
    return MarkdownIt("zero", {"html": False}).enable(marks)


def _inline(text: str) -> str:
    line: str = _parser().renderInline(text)
    return line


def _draw(figure: Figure, caption: str) -> str:
    (line,) = _parser().parseInline(caption)
    plain = html.escape("".join(token.content for token in line.children))
    png, width = figure_png(figure, dpi=DPI), round(96 * figure.get_figwidth())
    return (
        f'<figure style="--width:{width}px"><div class="card"><img alt="{plain}"'
        f' src="data:image/png;base64,{base64.b64encode(png).decode()}"></div>'
        f"<figcaption>{_inline(caption)}</figcaption></figure>"
    )
