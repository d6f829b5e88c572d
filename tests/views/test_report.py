"""Reports: self-contained, escaped, written whole, and readable on narrow and wide pages."""

from __future__ import annotations

import base64
import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorers import CHROMIUM
from factormix.errors import InputError

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from factormix.plotting import figure_png
from factormix.views.report import Report, check_report_packages

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
    report.heading("Figures").figures([(make_figure(14), "One **wide** figure")])
    report.figures([(make_figure(), "Left"), (make_figure(level=2), "Right")])
    columns = ["model", "AUC"] + [f"class {k}" for k in range(20)]
    report.heading("Table I").table(columns, [["MFA", "0.91"] + ["0.5"] * 20], "A wide table")
    report.heading("Table I", 3).code("factormix train data.npy  # " + 30 * "longword").note(
        "A note."
    )
    report.heading("Table I", 3).table(["n"], [["1"], ["2"]], "A narrow table")
    return report.heading("More").figures([(make_figure(level=3), "Alone")])


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
    source = Report("t").figures([(fig, 'A "quoted" **figure** <1>')]).html()
    [image] = [attrs for tag, attrs in Page(source).tags if tag == "img"]
    assert base64.b64decode(str(image["src"]).split(",")[1]) == figure_png(fig)
    assert image["alt"] == 'A "quoted" figure <1>'


words = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="*_`"), min_size=1)


@given(words)
def test_text_never_becomes_html(word):
    nasty = f"<b>{word}</b><script>&amp;\"'"
    report = Report(nasty, nasty).heading(nasty).text(nasty).note(nasty).code(nasty)
    report.table([nasty], [[nasty]], nasty)
    page = Page(report.html())
    assert {tag for tag, _ in page.tags} <= TAGS
    assert page.text().count(nasty) == 10


def test_marks_become_tags_and_other_stars_stay():
    source = Report("t").text("**a b** *c* `**d** <e>` 2 * 3 * 4 **x {}\n\nx_1_y").html()
    for part in (
        "<strong>a b</strong>",
        "<em>c</em>",
        "<code>**d** &lt;e&gt;</code>",
        "2 * 3 * 4 **x {}</p>",
        "<p>x_1_y</p>",
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
    report = Report("t").text("first").heading("A").text("inside")
    page = report.heading("B").heading("C").heading("D").html()
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


@pytest.mark.parametrize(
    ("module", "package"),
    [("markdown_it", "markdown-it-py"), ("matplotlib", "matplotlib")],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, module, package):
    check_report_packages()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError) as caught:
        check_report_packages()
    assert str(caught.value) == f'this needs {package}: run pip install "factormix[reports]".'


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
