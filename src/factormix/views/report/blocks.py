"""The blocks of a report: what it says, before it is HTML or Markdown."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import numpy as np

from factormix.errors import InputError
from factormix.views.plotting import figure_png

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token
    from matplotlib.figure import Figure

__all__ = [
    "Block",
    "Cell",
    "Code",
    "Fold",
    "Heading",
    "Image",
    "Images",
    "Picture",
    "Status",
    "Table",
    "Text",
    "Verdict",
    "Verdicts",
    "cell_text",
    "check_packages",
    "inline_html",
    "inline_markdown",
    "plain",
    "slug",
    "text_html",
    "text_markdown",
    "unfolded",
]

Status = Literal["held", "held with a change", "not found"]
Cell: TypeAlias = "str | float | int | bool | np.generic | None"
Picture: TypeAlias = "Figure | bytes | str | os.PathLike[str]"

_DPI = 150


@dataclass(frozen=True)
class Heading:
    """Hold a heading of level 2 or 3 and the anchor that leads to it."""

    kind: ClassVar = "heading"
    text: str
    level: int
    anchor: str


@dataclass(frozen=True)
class Text:
    """Hold paragraphs and lists, in the text or as a note that stands out from it."""

    kind: ClassVar = "text"
    text: str
    note: bool = False


@dataclass(frozen=True)
class Code:
    """Hold lines to be shown as they are."""

    kind: ClassVar = "code"
    text: str


@dataclass(frozen=True)
class Image:
    """Hold a PNG, the width in CSS pixels at which it is sharp, and what it shows."""

    png: bytes
    width: int
    caption: str
    alt: str

    @classmethod
    def of(cls, picture: Picture, caption: str, alt: str | None = None) -> Image:
        """Render or read a picture as PNG and find the width at which it is to be shown."""
        scale = 1.0
        if isinstance(picture, bytes):
            png = picture
        elif isinstance(picture, str | os.PathLike):
            try:
                png = Path(picture).read_bytes()
            except OSError as error:
                raise InputError(f"cannot read the picture {picture}: {error.strerror}") from error
        else:
            png, scale = figure_png(picture, dpi=_DPI), 96 / _DPI
        if png[:8] != b"\x89PNG\r\n\x1a\n" or len(png) < 24:
            raise InputError(
                f"the picture for {caption!r} is not a PNG: give a PNG file or a figure"
            )
        (width,) = struct.unpack(">I", png[16:20])
        return cls(png, max(1, round(scale * width)), caption, alt or plain(caption))


@dataclass(frozen=True)
class Images:
    """Hold pictures to be shown side by side."""

    kind: ClassVar = "images"
    images: tuple[Image, ...]


@dataclass(frozen=True)
class Table:
    """Hold cells as text, and one letter of ``l``, ``c``, ``r`` per column."""

    kind: ClassVar = "table"
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str | None
    align: str

    @classmethod
    def of(
        cls,
        columns: Sequence[str],
        rows: Iterable[Sequence[Cell]],
        caption: str | None = None,
        align: str | None = None,
    ) -> Table:
        """Write the cells as text; without ``align``, columns of numbers go to the right."""
        cells = [tuple(row) for row in rows]
        for row in cells:
            if len(row) != len(columns):
                raise InputError(
                    f"a table row has {len(row)} cells for {len(columns)} columns: {row}"
                )
        if align is None:
            align = "".join(_natural_align([row[j] for row in cells]) for j in range(len(columns)))
        if len(align) != len(columns) or set(align) - set("lcr"):
            raise InputError(f"align is {align!r}: give one of l, c, r for each of the columns")
        texts = tuple(tuple(map(cell_text, row)) for row in cells)
        return cls(tuple(columns), texts, caption, align)


@dataclass(frozen=True)
class Verdict:
    """Hold a claim, what became of it, and the number that says so."""

    claim: str
    status: Status
    number: str


@dataclass(frozen=True)
class Verdicts:
    """Hold verdicts that follow each other."""

    kind: ClassVar = "verdicts"
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Fold:
    """Hold blocks that are shown when their summary is opened."""

    kind: ClassVar = "fold"
    summary: str
    blocks: tuple[Block, ...]


Block: TypeAlias = Heading | Text | Code | Images | Table | Verdicts | Fold


def unfolded(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield all blocks in their order, those of folds in place of the folds."""
    for block in blocks:
        if isinstance(block, Fold):
            yield from unfolded(block.blocks)
        else:
            yield block


def cell_text(cell: Cell) -> str:
    """Write a cell: floats with four digits, nothing as a dash."""
    if cell is None:
        return "–"
    if isinstance(cell, bool | np.bool_):
        return "yes" if cell else "no"
    if isinstance(cell, float | np.floating):
        return f"{cell:.4g}"
    return str(cell)


def _natural_align(cells: Sequence[Cell]) -> str:
    """Choose the right for a column of numbers, else the left."""
    known = [cell for cell in cells if cell is not None]
    return "r" if known and all(map(_is_number, known)) else "l"


def _is_number(cell: Cell) -> bool:
    """Tell whether a cell is a number, or text that is one with a sign, a spread or a unit."""
    if isinstance(cell, str):
        return re.fullmatch(r"\**[-+−]?\d[\d.,]*( ?(±|%|s|x) ?[\d.,]*)*\**", cell) is not None
    return not isinstance(cell, bool | np.bool_)


_PACKAGES = {"jinja2": "jinja2", "markdown_it": "markdown-it-py", "matplotlib": "matplotlib"}


def check_packages(extra: str = "reports") -> None:
    """Fail, before any long work, if a report could not be written here."""
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            raise InputError(f'reports need {package}: run pip install "factormix[{extra}]".')


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
