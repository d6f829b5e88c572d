"""Render a report as one HTML page or as Markdown.

Text may have bold, italic and code marks, paragraphs and lists. They are read as CommonMark, with
three differences that suit technical text: underscores are not marks, stars within a word are not
marks, and HTML, entities, links and all other syntax have no effect.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from factormix.errors import InputError
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
    unfold,
)

if TYPE_CHECKING:
    from jinja2 import Template
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

_PACKAGES = {"jinja2": "jinja2", "markdown_it": "markdown-it-py", "matplotlib": "matplotlib"}
_RULES = {"l": ":--", "c": ":-:", "r": "--:"}
_BADGES = {"held": "good", "held with a change": "fair", "not found": "bad"}


def check_packages(extra: str = "reports") -> None:
    """Raise an error if the packages of reports are not installed."""
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            raise InputError(f'reports need {package}: run pip install "factormix[{extra}]".')


def render_html(title: str, subtitle: str | None, blocks: Sequence[Block]) -> str:
    """Render a report as a page, with a table of contents for more than three headings."""
    return _template().render(
        title=title,
        subtitle=subtitle,
        blocks=blocks,
        headings=[block for block in unfold(blocks) if isinstance(block, Heading)],
        badges=_BADGES,
    )


@lru_cache
def _template() -> Template:
    """Load the template, which escapes all text except the HTML of the mark parser."""
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
        "paragraphs": lambda text: Markup(paragraphs_html(text)),
        "remove_marks": remove_marks,
        "base64": lambda png: base64.b64encode(png).decode("ascii"),
    }
    return environment.get_template("page.html")


def render_markdown(
    title: str, subtitle: str | None, blocks: Iterable[Block], links: Iterable[str]
) -> str:
    """Render a report as Markdown; ``links`` are the paths of all pictures, in order."""
    parts = [f"# {inline_markdown(title)}"]
    if subtitle:
        parts.append(f"*{inline_markdown(remove_marks(subtitle))}*")
    remaining = iter(links)
    parts += [_render_block(block, remaining) for block in blocks]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """Render a table as Markdown, with pipes in cells escaped."""
    head, *body = (
        [inline_markdown(cell).replace("|", r"\|") for cell in row]
        for row in (table.columns, *table.rows)
    )
    lines = [head, [_RULES[side] for side in table.align], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_fold(summary: str, text: str) -> str:
    """Put Markdown behind a fold, which web pages show closed."""
    inside = inline_html(summary)
    return f'<details markdown="1">\n<summary>{inside}</summary>\n\n{text}\n\n</details>'


def _render_block(block: Block, links: Iterator[str]) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {inline_markdown(text)}"
        case Text(text, note):
            written = paragraphs_markdown(text)
            return re.sub(r"^", "> ", written, flags=re.MULTILINE) if note else written
        case Code(text):
            fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
            return f"{fence}\n{text}\n{fence}"
        case Images(images):
            return "\n\n".join(_render_image(image, next(links)) for image in images)
        case Table(caption=caption):
            grid = markdown_table(block)
            return f"{inline_markdown(caption)}\n\n{grid}" if caption else grid
        case Verdicts(verdicts):
            cells = [(v.claim, f"**{v.status}**", v.number) for v in verdicts]
            return markdown_table(Table(("Claim", "Verdict", "Number"), tuple(cells), None, "lll"))
        case Fold(summary, blocks):
            return markdown_fold(
                summary, "\n\n".join(_render_block(inner, links) for inner in blocks)
            )


def _render_image(image: Image, link: str) -> str:
    alt = inline_markdown(image.alt or remove_marks(image.caption)).replace("\n", " ")
    alt = re.sub(r"([\[\]])", r"\\\1", alt)
    return f"![{alt}]({link})\n\n*{inline_markdown(remove_marks(image.caption))}*"


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
