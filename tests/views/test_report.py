"""Reports: self-contained, escaped, written whole, and readable on narrow and wide pages."""

from __future__ import annotations

import base64
import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorers import CHROMIUM
from factormix.errors import InputError

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from factormix.plotting import figure_png
from factormix.views.report import Report, check_packages

TAGS = set(
    re.findall(
        r"\w+",
        "html head meta title style body main header h1 h2 h3 p ul li strong em code pre nav a "
        "aside div figure img figcaption table caption thead tbody tr th td span details summary",
    )
)


def make_figure(width: float = 4.0, level: float = 1.0) -> Figure:
    fig = Figure(figsize=(width, 2.0))
    fig.add_subplot().plot([0, level, 0])
    return fig


def make_report() -> Report:
    report = Report("A report & its title", "Made for `tests`")
    report.text("First **bold** paragraph.\n\n- one\n- two *slanted*\n\nLast: 2 * 3 * 4.")
    report.heading("Verdict")
    report.verdict("Random starts work", "held", "24.8 of 25")
    report.verdict("Class 9 is found", "not found", 0.71234)
    report.verdict("M is bounded", "held with a change", "by the exact factor")
    report.heading("Figures").figure(make_figure(14), "One **wide** figure")
    report.figures([(make_figure(), "Left"), (make_figure(level=2), "Right")])
    columns = ["model", "AUC"] + [f"class {k}" for k in range(20)]
    report.heading("Table I").table(columns, [["MFA", 0.91] + [0.5] * 20], "A wide table")
    report.heading("Table I", 3).code("factormix train data.npy  # " + 30 * "longword").note(
        "A note."
    )
    with report.fold("All `numbers` & pictures"):
        report.table(["n"], [[1], [2]]).figure(make_figure(level=3), "Inside").heading("Table I", 3)
    return report


@pytest.fixture(scope="module")
def report() -> Report:
    """A report that no test changes."""
    return make_report()


class Page(HTMLParser):
    """Collect tags, attributes and the text between them."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append((self.tags[-1][0] if self.tags else "", data))

    def attributes(self, name: str) -> list[str]:
        return [str(attrs[name]) for _, attrs in self.tags if name in attrs]

    def text(self) -> str:
        return "".join(data for tag, data in self.words if tag != "style")


def test_the_page_loads_nothing(report):
    source = report.html()
    page = Page(source)
    assert not re.search(r"https?://", source)
    assert all(src.startswith("data:image/png;base64,") for src in page.attributes("src"))
    assert all(href.startswith("#") for href in page.attributes("href"))
    assert {tag for tag, _ in page.tags} <= TAGS
    assert not re.search(r"url\(|@import", source)
    assert "default-src 'none'" in source


def test_figures_are_embedded_as_png_with_alternative_text():
    fig = make_figure()
    source = Report("t").figure(fig, 'A "quoted" **figure** <1>').html()
    [image] = [attrs for tag, attrs in Page(source).tags if tag == "img"]
    assert base64.b64decode(str(image["src"]).split(",")[1]) == figure_png(fig)
    assert image["alt"] == 'A "quoted" figure <1>'


def test_pictures_can_be_bytes_or_files(tmp_path):
    png = figure_png(make_figure())
    (tmp_path / "a.png").write_bytes(png)
    pages = [Report("t").figure(source, "c").html() for source in (png, tmp_path / "a.png")]
    assert pages[0] == pages[1]
    (tmp_path / "a.png").write_bytes(b"GIF89a" + bytes(40))
    with pytest.raises(InputError, match="not a PNG"):
        Report("t").figure(tmp_path / "a.png", "c")
    with pytest.raises(InputError, match="cannot read the picture"):
        Report("t").figure(tmp_path / "b.png", "c")


words = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="*`"), min_size=1)


@given(words)
def test_text_never_becomes_html(word):
    nasty = f"<b>{word}</b><script>&amp;\"'"
    report = Report(nasty, nasty).heading(nasty).text(nasty).note(nasty).code(nasty)
    report.table([nasty], [[nasty]], caption=nasty).verdict(nasty, "held", nasty)
    page = Page(report.html())
    assert {tag for tag, _ in page.tags} <= TAGS
    assert page.text().count(nasty) == 12


def test_marks_become_tags_and_other_stars_stay():
    source = Report("t").text("**a b** *c* `**d** <e>` 2 * 3 * 4 **x {}\n\nx_1*y* _z_").html()
    for part in (
        "<strong>a b</strong>",
        "<em>c</em>",
        "<code>**d** &lt;e&gt;</code>",
        "2 * 3 * 4 **x {}</p>",
        "<p>x_1*y* _z_</p>",
    ):
        assert part in source


def test_paragraphs_and_lists():
    source = Report("t").text("one\ntwo\n\nthree:\n- a\n- b\n\nfour").html()
    shown = re.sub(r"\s*\n\s*", " ", source)
    expected = "<p>one two</p> <p>three:</p> <ul> <li>a</li> <li>b</li> </ul> <p>four</p>"
    assert expected in shown


def test_other_markdown_has_no_effect():
    """Headings, links, pictures, entities and rules are shown as they are."""
    text = "# a\n\n[b](c) ![d](e) &lt; \\* <http://f.g>\n\n---\n\n> h"
    page = Page(Report("t").text(text).html())
    inside = page.tags[[tag for tag, _ in page.tags].index("header") :]
    assert {tag for tag, _ in inside} == {"header", "h1", "p"}
    assert [part in page.text() for part in text.split("\n\n")] == [True] * 4


def test_contents_come_after_what_precedes_the_first_heading():
    report = Report("t").text("first")
    with report.fold("more"):
        report.text("inside").heading("A").heading("B").heading("C").heading("D")
    page = report.html()
    assert page.index("<p>first") < page.index("<nav") < page.index("<p>inside")
    assert page.count("<nav") == 1


def test_a_page_with_more_than_three_headings_has_a_table_of_contents():
    report = Report("t").heading("A B").heading("A B").heading("!")
    assert "<nav" not in report.html()
    page = Page(report.heading("A B", 3).heading("A B 2").html())
    targets = [href[1:] for href in page.attributes("href")]
    assert len(targets) == len(set(targets)) == 5
    assert targets == page.attributes("id")
    with pytest.raises(InputError, match="level 2 or 3"):
        report.heading("x", 1)


def test_tables_align_numbers_and_format_cells():
    rows = [["MFA", 0.123456, "0.5 ± 0.1", None, True], ["GMM", np.float32(2), "−1.5", 7, False]]
    source = Report("t").table(["a", "b", "c", "d", "e"], rows).html()
    cells = re.findall(r'<td class="(.)">(.*?)</td>', source)
    assert [side for side, _ in cells[:5]] == ["l", "r", "r", "r", "l"]
    assert [text for _, text in cells] == [
        *("MFA", "0.1235", "0.5 ± 0.1", "–", "yes"),
        *("GMM", "2", "−1.5", "7", "no"),
    ]
    source = Report("t").table(["a", "b"], [[1, 2]], align="cl").html()
    assert '<td class="c">1</td><td class="l">2</td>' in source


def test_bad_blocks_get_one_sentence():
    report = Report("t")
    with pytest.raises(InputError, match="1 cells for 2 columns"):
        report.table(["a", "b"], [[1]])
    with pytest.raises(InputError, match="align is 'lx'"):
        report.table(["a", "b"], [[1, 2]], align="lx")
    with pytest.raises(InputError, match="'held with a change'"):
        report.verdict("claim", "perhaps", "1")  # type: ignore[arg-type]
    assert report.html() == Report("t").html()


def test_verdicts_have_badges(report):
    source = report.html()
    badges = re.findall(r'<span class="badge (\w+)">(.*?)</span>', source)
    assert badges == [("good", "held"), ("bad", "not found"), ("fair", "held with a change")]
    assert source.count('<ul class="verdicts">') == 1, "verdicts in a row are one list"
    assert "0.7123<" in source


def test_equal_reports_are_equal_files(tmp_path, report):
    for name, built in (("a", report), ("b", make_report())):
        assert built.write(tmp_path / f"{name}.html") == tmp_path / f"{name}.html"
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_failure_leaves_the_old_page(tmp_path, report):
    resource = pytest.importorskip("resource")
    path = Report("old").write(tmp_path / "report.html")
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(InputError, match="cannot write"):
            report.write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match="is a folder"):
        report.write(tmp_path)


@pytest.mark.parametrize("images", [".", "pictures"])
def test_markdown_links_to_its_pictures(tmp_path, report, images):
    path = report.markdown(tmp_path / "docs", "page.md", images)
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"!\[(.+?)\]\((.+?)\)", text)
    assert [alt for alt, _ in links] == ["One wide figure", "Left", "Right", "Inside"]
    files = {path.parent / link for _, link in links}
    assert files == set(path.parent.rglob("*.png"))
    assert (path.parent / links[1][1]).read_bytes() == figure_png(make_figure())
    assert text.startswith("# A report &amp; its title\n\n*Made for tests*\n\nFirst **bold** par")
    assert "\n\n- one\n- two *slanted*\n\nLast: 2 * 3 * 4.\n" in text
    assert "\n| Class 9 is found | **not found** | 0.7123 |\n" in text
    assert "\n> A note.\n" in text
    assert "\n```\nfactormix train data.npy" in text


def test_markdown_escapes_html_pipes_and_fences(tmp_path):
    report = (
        Report("t").text("a <b> `<c>` `` `d` ``").table(["x|y"], [["<b>|"]]).code("```\ncode\n```")
    )
    text = report.markdown(tmp_path).read_text(encoding="utf-8")
    assert "a &lt;b> `<c>` `` `d` ``" in text
    assert "| x\\|y |\n| :-- |\n| &lt;b>\\| |" in text
    assert "\n````\n```\ncode\n```\n````\n" in text


def test_folded_blocks_stay_behind_their_summary(tmp_path):
    report = Report("T").text("before")
    with report.fold("Long **table** & more"):
        report.table(["n"], [[1], [2]])
    report.text("after")
    page = report.html()
    inside = page[page.index("<details>") : page.index("</details>")]
    assert "<summary>Long <strong>table</strong> &amp; more</summary>" in inside
    assert "<td" in inside
    assert "after" not in inside
    text = report.markdown(tmp_path).read_text(encoding="utf-8")
    assert text.endswith(
        '<details markdown="1">\n<summary>Long <strong>table</strong> &amp; more</summary>\n\n'
        "| n |\n| --: |\n| 1 |\n| 2 |\n\n</details>\n\nafter\n"
    )


def test_markdown_needs_a_folder(tmp_path, report):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match="cannot make the folder"):
        report.markdown(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("module", "package"),
    [("jinja2", "jinja2"), ("markdown_it", "markdown-it-py"), ("matplotlib", "matplotlib")],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, module, package):
    check_packages()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError) as caught:
        check_packages()
    assert str(caught.value) == f'reports need {package}: run pip install "factormix[reports]".'


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH")
def test_a_browser_shows_the_page_without_sideways_scrolling(tmp_path, report):
    widths, source = (400, 1200), html.escape(report.html())
    # The page forbids scripts, so a page around it measures, at both widths in one go.
    around = tmp_path / "around.html"
    frames = [f'<iframe width="{w}" height="900" srcdoc="{source}"></iframe>' for w in widths]
    around.write_text(
        f"<body>{''.join(frames)}"
        "<script>addEventListener('load', () => {"
        "document.title = [...document.querySelectorAll('iframe')].map(frame => {"
        "const page = frame.contentDocument, root = page.documentElement;"
        "const images = [...page.images].filter(i => i.complete && i.naturalWidth > 0);"
        "const widest = Math.max(...images.map(i => i.getBoundingClientRect().right));"
        "return [root.clientWidth, root.scrollWidth, page.images.length,"
        " images.length, Math.ceil(widest), root.scrollHeight].join(' ');"
        "}).join(';');});</script></body>",
        encoding="utf-8",
    )
    title = re.search(r"<title>([\d ;]+)</title>", dump_dom(around, tmp_path))
    assert title, "the page did not load"
    for width, measured in zip(widths, title[1].split(";"), strict=True):
        client, scroll, images, shown, widest, height = map(int, measured.split())
        assert width - 30 <= client <= width
        assert scroll <= client
        assert widest <= client
        assert shown == images == 4
        assert height > 900


def dump_dom(page: Path, folder: Path) -> str:
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000",
        "--virtual-time-budget=5000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=600).stdout
