"""Tables of numbers, as CSV for programs and as Markdown for people."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from factormix.files import make_folder, write_whole
from factormix.views import report

__all__ = ["Cell", "Table", "folded"]

folded = report.markdown_fold
"""Put Markdown behind a fold."""

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Hold a table under the name of its files."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def csv(self) -> str:
        """Write all cells in full; an empty one stands for nothing."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()

    def markdown(self) -> str:
        """Write the cells as a report does; the caption is left to the page around them."""
        return report.markdown_table(report.Table.of(self.columns, self.rows))

    def save(self, folder: Path) -> None:
        """Write ``name.csv`` and ``name.md`` into a folder."""
        make_folder(folder)
        write_whole(folder / f"{self.name}.csv", self.csv().encode())
        content = f"{self.caption}\n\n{self.markdown()}\n"
        write_whole(folder / f"{self.name}.md", content.encode())
