"""Build a report block by block, and write it as HTML or Markdown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import get_args

from factormix.errors import InputError
from factormix.files import make_folder, write_whole
from factormix.views.report.blocks import (
    Block,
    Cell,
    Code,
    Fold,
    Heading,
    Image,
    Images,
    Picture,
    Status,
    Table,
    Text,
    Verdict,
    Verdicts,
    format_cell,
    make_slug,
    unfold,
)
from factormix.views.report.render import render_html, render_markdown


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
        return self._add(Text(text, note=True))

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
        if isinstance(last, Verdicts):
            self._blocks[-1] = Verdicts((*last.verdicts, verdict))
            return self
        return self._add(Verdicts((verdict,)))

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
        """Render the page, with styles and pictures inside it and no scripts."""
        return render_html(self.title, self.subtitle, self._blocks)

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
        text = render_markdown(self.title, self.subtitle, self._blocks, links)
        write_whole(path, text.encode())
        return path

    def _add(self, block: Block) -> Report:
        self._blocks.append(block)
        return self
