"""The blocks of a report: its content, before it becomes HTML or Markdown."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import numpy as np

from factormix.errors import InputError
from factormix.views.plotting import figure_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Status = Literal["held", "held with a change", "not found"]
Cell: TypeAlias = "str | float | int | bool | np.generic | None"
Picture: TypeAlias = "Figure | bytes | str | os.PathLike[str]"

_DPI = 150


@dataclass(frozen=True)
class Heading:
    """A heading of level 2 or 3, and the anchor of links to it."""

    kind: ClassVar = "heading"
    text: str
    level: int
    anchor: str


@dataclass(frozen=True)
class Text:
    """Paragraphs and lists, in the text or as a note that stands out."""

    kind: ClassVar = "text"
    text: str
    note: bool = False


@dataclass(frozen=True)
class Code:
    """Lines shown as they are."""

    kind: ClassVar = "code"
    text: str


@dataclass(frozen=True)
class Image:
    """A PNG, the width in CSS pixels at which it is sharp, its caption and alternative text."""

    png: bytes
    width: int
    caption: str
    alt: str | None
    """None takes the caption."""

    @classmethod
    def of(cls, picture: Picture, caption: str, alt: str | None = None) -> Image:
        """Render or read a picture as PNG, and compute its width on the page."""
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
        return cls(png, max(1, round(scale * width)), caption, alt)


@dataclass(frozen=True)
class Images:
    """Pictures side by side."""

    kind: ClassVar = "images"
    images: tuple[Image, ...]


@dataclass(frozen=True)
class Table:
    """Cells as text, and one letter of ``l``, ``c``, ``r`` per column."""

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
        """Convert cells to text; without ``align``, columns of numbers go to the right."""
        cells = [tuple(row) for row in rows]
        for row in cells:
            if len(row) != len(columns):
                raise InputError(
                    f"a table row has {len(row)} cells for {len(columns)} columns: {row}"
                )
        if align is None:
            align = "".join(_choose_align([row[j] for row in cells]) for j in range(len(columns)))
        if len(align) != len(columns) or set(align) - set("lcr"):
            raise InputError(f"align is {align!r}: give one of l, c, r for each column")
        texts = tuple(tuple(map(format_cell, row)) for row in cells)
        return cls(tuple(columns), texts, caption, align)


@dataclass(frozen=True)
class Verdict:
    """A claim, its status, and the number that supports it."""

    claim: str
    status: Status
    number: str


@dataclass(frozen=True)
class Verdicts:
    """Consecutive verdicts."""

    kind: ClassVar = "verdicts"
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Fold:
    """Blocks that appear when their summary is opened."""

    kind: ClassVar = "fold"
    summary: str
    blocks: tuple[Block, ...]


Block: TypeAlias = Heading | Text | Code | Images | Table | Verdicts | Fold


def unfold(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield all blocks in order, with folds replaced by their content."""
    for block in blocks:
        if isinstance(block, Fold):
            yield from unfold(block.blocks)
        else:
            yield block


def format_cell(cell: Cell) -> str:
    """Format a cell: floats with four digits, None as a dash."""
    if cell is None:
        return "–"
    if isinstance(cell, bool | np.bool_):
        return "yes" if cell else "no"
    if isinstance(cell, float | np.floating):
        return f"{cell:.4g}"
    return str(cell)


def _choose_align(cells: Sequence[Cell]) -> str:
    """Align a column of numbers to the right, others to the left."""
    known = [cell for cell in cells if cell is not None]
    return "r" if known and all(map(_is_number, known)) else "l"


def _is_number(cell: Cell) -> bool:
    """Return whether a cell is a number, or text such as "0.5 ± 0.1" or "3 s"."""
    if isinstance(cell, str):
        return re.fullmatch(r"\**[-+−]?\d[\d.,]*( ?(±|%|s|x) ?[\d.,]*)*\**", cell) is not None
    return not isinstance(cell, bool | np.bool_)


def make_slug(text: str) -> str:
    """Make a name for anchors and files from a text."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "part"
