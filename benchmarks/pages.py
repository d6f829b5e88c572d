"""Pages in Markdown: tables, folds, and a page with its pictures beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from factormix.files import make_folder, write_whole
from factormix.views.plotting import figure_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = str | int | float | bool | np.generic | None


def format_cell(cell: Cell) -> str:
    """Format a cell: floats with four digits, None as a dash."""
    if cell is None:
        return "–"
    if isinstance(cell, bool | np.bool_):
        return "yes" if cell else "no"
    return f"{cell:.4g}" if isinstance(cell, float | np.floating) else str(cell)


def _is_number(cell: Cell) -> bool:
    """Return whether a cell is a number, or text such as "0.5 ± 0.1" or "3 s"."""
    if isinstance(cell, str):
        return re.fullmatch(r"\**[-+−]?\d[\d.,]*( ?(±|%|s|x) ?[\d.,]*)*\**", cell) is not None
    return not isinstance(cell, bool | np.bool_)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Write a table with columns of numbers on the right, and with pipes in cells escaped."""
    cells = [tuple(row) for row in rows]
    rules = []
    for column in zip(*cells, strict=True) if cells else [()] * len(columns):
        known = [cell for cell in column if cell is not None]
        rules.append("--:" if known and all(map(_is_number, known)) else ":--")
    head, *body = ([format_cell(c).replace("|", r"\|") for c in row] for row in (columns, *cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rules, *body))


def markdown_fold(summary: str, text: str) -> str:
    """Put Markdown behind a fold, which web pages show closed."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>'


class Page:
    """Collect headings, text, pictures and tables, then write a page and its pictures."""

    def __init__(self, title: str, subtitle: str) -> None:
        self._parts = [f"# {title}", f"*{subtitle}*"]
        self._pictures: list[tuple[str, Figure]] = []

    def text(self, text: str) -> Self:
        """Add Markdown."""
        self._parts.append(text)
        return self

    def heading(self, text: str) -> Self:
        """Begin a section."""
        return self.text(f"## {text}")

    def note(self, text: str) -> Self:
        """Add a remark that stands out from the text."""
        return self.text(f"> {text}")

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = ""
    ) -> Self:
        """Add a table, below its caption."""
        return self.text(f"{caption}\n\n{markdown_table(columns, rows)}".lstrip())

    def figure(self, figure: Figure, caption: str) -> Self:
        """Add a picture; its file is named by its number and caption."""
        slug = re.sub(r"[^a-z0-9]+", "-", caption.lower()).strip("-")[:40].strip("-")
        name = f"{len(self._pictures) + 1:02d}-{slug}.png"
        self._pictures.append((name, figure))
        return self.text(f"![{caption}]({{folder}}{name})\n\n*{caption}*")

    @contextmanager
    def fold(self, summary: str) -> Iterator[None]:
        """Put everything added inside the ``with`` behind a fold."""
        outside, self._parts = self._parts, []
        yield
        inside, self._parts = self._parts, outside
        self.text(markdown_fold(summary, "\n\n".join(inside)))

    def write(self, path: Path, images: str) -> Path:
        """Write the page, after its pictures in the folder ``images`` beside it."""
        make_folder(path.parent / images)
        stem = f"{images}/{path.stem}-"
        for name, figure in self._pictures:
            write_whole(path.parent / f"{stem}{name}", figure_png(figure))
        text = "\n\n".join(self._parts).replace("{folder}", stem)
        write_whole(path, f"{text}\n".encode())
        return path
