"""Pages in Markdown: tables, folds, and links to pictures."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from pages import Page, markdown_table

from factormix.plotting import figure_png


def make_figure(level: float):
    from matplotlib.figure import Figure

    fig = Figure(figsize=(4.0, 2.0))
    fig.add_subplot().plot([0, level, 0])
    return fig


def test_tables_align_numbers_and_format_cells():
    rows = [["MFA", 0.123456, "0.5 ± 0.1", None, True], ["G|M", np.float32(2), "−1.5", 7, False]]
    head, rules, *body = markdown_table(["a|b", "b", "c", "d", "e"], rows).splitlines()
    assert head == r"| a\|b | b | c | d | e |"
    assert rules == "| :-- | --: | --: | --: | :-- |"
    assert body == ["| MFA | 0.1235 | 0.5 ± 0.1 | – | yes |", r"| G\|M | 2 | −1.5 | 7 | no |"]


def test_a_page_links_to_its_pictures(tmp_path: Path):
    page = Page("T", "Made for tests").heading("Results").note("A note.").text("before")
    page.figure(make_figure(1), "One")
    with page.fold("Long table"):
        page.table(["n"], [[1], [2]]).figure(make_figure(2), "Two, inside")
    page.text("after")
    text = page.write(tmp_path / "docs" / "page.md", "pictures").read_text(encoding="utf-8")
    links = re.findall(r"!\[(.+?)\]\((.+?)\)", text)
    assert [alt for alt, _ in links] == ["One", "Two, inside"]
    files = [tmp_path / "docs" / link for _, link in links]
    assert set(files) == set(tmp_path.rglob("*.png"))
    assert files[1].read_bytes() == figure_png(make_figure(2))
    assert text.startswith("# T\n\n*Made for tests*\n\n## Results\n\n> A note.\n\nbefore\n\n![One]")
    inside = text[text.index('<details markdown="1">') : text.index("</details>")]
    assert "<summary>Long table</summary>\n\n| n |\n| --: |\n| 1 |\n| 2 |\n\n![Two" in inside
    assert text.endswith("</details>\n\nafter\n")
