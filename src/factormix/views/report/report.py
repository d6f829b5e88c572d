"""Build a report block by block, and write it as one HTML page or as Markdown."""

from __future__ import annotations

import base64
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from factormix.errors import InputError
from factormix.files import make_folder, write_whole
from factormix.views.plotting.drawing import figure_png
from factormix.views.report.marks import (
    check_packages,
    inline_html,
    inline_markdown,
    paragraphs_html,
    paragraphs_markdown,
    remove_marks,
)

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure

Status = Literal["held", "held with a change", "not found"]
Cell: TypeAlias = "str | float | int | bool | np.generic | None"
Picture: TypeAlias = "Figure | bytes | str | os.PathLike[str]"

_RULES = {"l": ":--", "c": ":-:", "r": "--:"}
_BADGES = {"held": "good", "held with a change": "fair", "not found": "bad"}


@dataclass
class Report:
    """Collect headings, text, figures, tables and verdicts, then write them as HTML or Markdown.

    Every method that adds something returns the report, so calls can be chained.

    >>> report = Report("A small report").heading("Results").text("It **works**.")
    >>> "<strong>works</strong>" in report.html()
    True
    """

    title: str
    subtitle: str | None = None
    _blocks: list[Block] = field(default_factory=list, repr=False)

    def heading(self, text: str, level: int = 2) -> Report:
        """Begin a section (level 2) or a part of one (level 3)."""
        if level not in (2, 3):
            raise InputError(f"a heading has level 2 or 3, not {level}")
        taken = {block.anchor for block in unfold(self._blocks) if isinstance(block, Heading)}
        anchor, n = make_slug(text), 1
        while anchor in taken:
            n += 1
            anchor = f"{make_slug(text)}-{n}"
        return self._add(Heading(text, level, anchor))

    def text(self, text: str) -> Report:
        """Add paragraphs, separated by empty lines, and lists."""
        return self._add(Text(text))

    def note(self, text: str) -> Report:
        """Add a remark that stands out from the text."""
        return self._add(Note(text))

    def code(self, text: str) -> Report:
        """Add code or the output of a command, shown as it is."""
        return self._add(Code(text.strip("\n")))

    def figure(self, figure: Picture, caption: str, alt: str | None = None) -> Report:
        """Add one picture: a matplotlib figure, PNG bytes or the path of a PNG file."""
        return self._add(Images((Image.of(figure, caption, alt),)))

    def figures(self, pairs: Iterable[tuple[Picture, str]]) -> Report:
        """Add (picture, caption) pairs, side by side if the page is wide enough."""
        return self._add(Images(tuple(Image.of(picture, caption) for picture, caption in pairs)))

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[Cell]],
        caption: str | None = None,
        align: str | None = None,
    ) -> Report:
        """Add a table; ``align`` has one letter of ``l``, ``c``, ``r`` per column.

        Without it, columns of numbers go to the right. Floats get four digits; for more, give text.
        """
        return self._add(Table.of(columns, rows, caption, align))

    def verdict(self, claim: str, status: Status, number: Cell) -> Report:
        """Add a claim, its status, and the number that supports it."""
        if status not in get_args(Status):
            choices = ", ".join(map(repr, get_args(Status)))
            raise InputError(f"status is {status!r}: choose one of {choices}")
        verdict = Verdict(claim, status, format_cell(number))
        last = self._blocks[-1] if self._blocks else None
        if not isinstance(last, Verdicts):
            return self._add(Verdicts((verdict,)))
        self._blocks[-1] = Verdicts((*last.verdicts, verdict))
        return self

    @contextmanager
    def fold(self, summary: str) -> Iterator[None]:
        """Put everything added inside the ``with`` behind a fold; a click on the summary opens it.

        >>> report = Report("A long one")
        >>> with report.fold("All numbers"):
        ...     _ = report.table(["n"], [[1], [2]])
        >>> "<summary>All numbers</summary>" in report.html()
        True
        """
        outside, self._blocks = self._blocks, []
        try:
            yield
        finally:
            inside, self._blocks = self._blocks, outside
        self._add(Fold(summary, tuple(inside)))

    def html(self) -> str:
        """Render the page, with styles and pictures inside it and no scripts.

        More than three headings get a table of contents, above the first of them.
        """
        has_heading = [any(isinstance(b, Heading) for b in unfold([one])) for one in self._blocks]
        return _template().render(
            title=self.title,
            subtitle=self.subtitle,
            blocks=self._blocks,
            headings=[block for block in unfold(self._blocks) if isinstance(block, Heading)],
            contents_at=has_heading.index(True) if any(has_heading) else None,
            badges=_BADGES,
        )

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to ``path``, whole or not at all."""
        write_whole(path, self.html().encode())
        return Path(path)

    def markdown(
        self, folder: str | os.PathLike[str], name: str = "report.md", images: str = "."
    ) -> Path:
        """Write ``folder/name`` as Markdown and its pictures as PNG files into ``folder/images``.

        The text is written last, so that it never links to a picture that does not exist.
        """
        place, path = Path(folder) / images, Path(folder) / name
        make_folder(place)
        groups = [block.images for block in unfold(self._blocks) if isinstance(block, Images)]
        links = []
        for number, image in enumerate(chain.from_iterable(groups), start=1):
            file = f"{path.stem}-{number:02d}-{make_slug(image.caption)[:40].strip('-')}.png"
            write_whole(place / file, image.png)
            links.append(Path(images, file).as_posix())
        parts = [f"# {inline_markdown(self.title)}"]
        if self.subtitle:
            parts.append(f"*{inline_markdown(remove_marks(self.subtitle))}*")
        remaining = iter(links)
        parts += [_render_block(block, remaining) for block in self._blocks]
        write_whole(path, ("\n\n".join(parts) + "\n").encode())
        return path

    def _add(self, block: Block) -> Report:
        self._blocks.append(block)
        return self


class Heading(NamedTuple):
    """A heading of level 2 or 3, and the anchor of links to it."""

    text: str
    level: int
    anchor: str


class Text(NamedTuple):
    """Paragraphs and lists."""

    text: str


class Note(NamedTuple):
    """Paragraphs and lists that stand out."""

    text: str


class Code(NamedTuple):
    """Lines shown as they are."""

    text: str


class Image(NamedTuple):
    """A PNG, the width in CSS pixels at which it is sharp, its caption and alternative text."""

    png: bytes
    width: int
    caption: str
    alt: str

    @classmethod
    def of(cls, picture: Picture, caption: str, alt: str | None = None) -> Image:
        """Render or read a picture as PNG; without ``alt``, the caption describes it."""
        dots_per_pixel = 1.0
        if isinstance(picture, bytes):
            png = picture
        elif isinstance(picture, str | os.PathLike):
            try:
                png = Path(picture).read_bytes()
            except OSError as error:
                raise InputError(f"cannot read the picture {picture}: {error.strerror}") from error
        else:
            # A CSS pixel is 1/96 inch.
            png, dots_per_pixel = figure_png(picture, dpi=150), 150 / 96
        if png[:8] != b"\x89PNG\r\n\x1a\n" or len(png) < 24:
            raise InputError(
                f"the picture for {caption!r} is not a PNG: give a PNG file or a figure"
            )
        (width,) = struct.unpack(">I", png[16:20])
        width = max(1, round(width / dots_per_pixel))
        return cls(png, width, caption, alt or remove_marks(caption))


class Images(NamedTuple):
    """Pictures side by side."""

    images: tuple[Image, ...]


class Table(NamedTuple):
    """Cells as text, and one letter of ``l``, ``c``, ``r`` per column."""

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


class Verdict(NamedTuple):
    """A claim, its status, and the number that supports it."""

    claim: str
    status: Status
    number: str


class Verdicts(NamedTuple):
    """Consecutive verdicts."""

    verdicts: tuple[Verdict, ...]


class Fold(NamedTuple):
    """Blocks that appear when their summary is opened."""

    summary: str
    blocks: tuple[Block, ...]


Block: TypeAlias = Heading | Text | Note | Code | Images | Table | Verdicts | Fold


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
        "kind": lambda block: type(block).__name__,
        "inline": lambda text: Markup(inline_html(text)),
        "paragraphs": lambda text: Markup(paragraphs_html(text)),
        "base64": lambda png: base64.b64encode(png).decode("ascii"),
    }
    return environment.get_template("page.html")


def _render_block(block: Block, links: Iterator[str]) -> str:
    """Render a block as Markdown; ``links`` are the paths of the next pictures."""
    match block:
        case Heading(text, level):
            return f"{'#' * level} {inline_markdown(text)}"
        case Text(text):
            return paragraphs_markdown(text)
        case Note(text):
            return re.sub(r"^", "> ", paragraphs_markdown(text), flags=re.MULTILINE)
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
    alt = re.sub(r"([\[\]])", r"\\\1", inline_markdown(image.alt).replace("\n", " "))
    return f"![{alt}]({link})\n\n*{inline_markdown(remove_marks(image.caption))}*"


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
