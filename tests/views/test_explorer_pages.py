"""The explorer in a real browser: what a person clicks, and what they then see.

Screenshots are kept in ``build/explorer``. Anything on the browser's console fails a test.
"""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import factormix
from explorers import CHROMIUM, ENVIRONMENT, Explorer, exploring, make_exhibits

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
SHOTS = Path(__file__).parents[2] / "build" / "explorer"
WIDE, NARROW = {"width": 1280, "height": 860}, {"width": 380, "height": 780}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    make_exhibits(folder)
    return folder


@pytest.fixture(scope="module")
def digits(folder: Path) -> Iterator[Explorer]:
    with exploring(folder / "digits.safetensors", "--data", folder / "digits.npy") as explorer:
        yield explorer


@pytest.fixture(scope="module")
def wine(folder: Path) -> Iterator[Explorer]:
    with exploring(folder / "wine.safetensors", "--data", folder / "wine.csv") as explorer:
        yield explorer


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Open a view of an explorer, and check at the end that the console is empty."""
    contexts, said = [], []

    def opened(explorer: Explorer, view: str = "map", scheme: str = "light", size=None) -> Any:
        contexts.append(browser.new_context(viewport=size or WIDE, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda line: said.append(f"{line.type}: {line.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("requestfailed", lambda request: said.append(f"failed: {request.url}"))
        outside = re.compile(rf"^(?!http://{re.escape(explorer.host)}:{explorer.port}/)")
        page.on(
            "request",
            lambda request: outside.match(request.url) and said.append(f"outside: {request.url}"),
        )
        page.goto(f"{explorer.address}#/{view}")
        shown(page, view.partition("/")[0])
        return page

    yield opened
    for context in contexts:
        context.close()
    # A page that is closed may leave a question without an answer.
    assert [line for line in said if not line.startswith("failed:")] == []


def shown(page: Any, view: str) -> None:
    """Wait until a view is there, whole."""
    page.wait_for_selector(f"#view[data-view='{view}']")


def until(page: Any, condition: str) -> None:
    """Wait for a condition; the page's rules forbid Playwright's own way, which evaluates text."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never: {condition}")


def keep(page: Any, name: str) -> None:
    """Keep a screenshot of the whole page."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


def drawn(page: Any, selector: str) -> str:
    """Return what a canvas shows, as text that can be compared."""
    picture: str = page.locator(selector).first.evaluate("canvas => canvas.toDataURL()")
    return picture


def pixels(page: Any, selector: str) -> np.ndarray:
    """Return the pixels of a canvas, (height, width, 4)."""
    raw = base64.b64decode(drawn(page, selector).partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(raw)).convert("RGBA")).astype(float)


def set_slider(page: Any, selector: str, value: float) -> None:
    page.locator(selector).evaluate(
        "(slider, value) => { slider.value = value;"
        " slider.dispatchEvent(new Event('input', {bubbles: true}));"
        " slider.dispatchEvent(new Event('change', {bubbles: true})); }",
        value,
    )


def text(page: Any, selector: str = "#view") -> str:
    words: str = page.locator(selector).first.inner_text()
    return words


@pytest.mark.parametrize("which", ["digits", "wine"])
def test_the_map_leads_to_components(which: str, visit, request) -> None:
    page = visit(request.getfixturevalue(which))
    page.wait_for_selector("input[value=outliers]:enabled")
    keep(page, f"{which}-map")
    frames = drawn(page, "canvas.map")
    for colour, word in (("likelihood", "Likelihood: "), ("outliers", "Outlier share: ")):
        page.check(f"input[value={colour}]")
        assert text(page, ".mode-word").startswith(word)
        assert drawn(page, "canvas.map") != frames
    page.hover("canvas.map", position={"x": 10, "y": 10})
    component = text(page, ".preview h2")
    assert re.fullmatch(r"Component \d+", component)
    page.click("canvas.map", position={"x": 10, "y": 10})
    shown(page, "component")
    assert text(page, "h1") == component


def test_keys_alone_lead_from_the_map_to_a_slider(digits: Explorer, visit) -> None:
    page = visit(digits, "data")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "view"
    assert text(page, "h1") == "Data", "who skips the tabs stays in the view"
    page.click("#tabs >> text=Map")
    shown(page, "map")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className") == "map":
            break
    else:
        raise AssertionError("the map cannot be reached by the Tab key")
    first = text(page, ".preview h2")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    component = text(page, ".preview h2")
    assert component != first
    page.keyboard.press("Enter")
    shown(page, "component")
    assert text(page, "h1") == component
    before = drawn(page, ".stage canvas")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "factor-0":
            break
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    page.wait_for_timeout(100)
    assert page.locator(".slider output").first.inner_text() == "1"
    assert drawn(page, ".stage canvas") != before


def test_sliders_move_the_picture_as_the_model_says(digits: Explorer, visit, folder: Path) -> None:
    model = factormix.load(folder / "digits.safetensors")
    page = visit(digits, "component/4")
    set_slider(page, "#factor-0", 2)
    set_slider(page, "#factor-2", -1.5)
    page.wait_for_timeout(100)
    expected = model.inverse_transform(np.array([[2.0, 0.0, -1.5]]), np.array([4]))[0]
    facts, _ = digits.ask("model")
    grey = 255 * (expected - facts["low"]) / (facts["high"] - facts["low"])
    found = pixels(page, ".stage canvas").reshape(64, 4)[:, 0]
    assert np.abs(found - np.clip(grey, 0, 255)).max() <= 1
    page.click("text=Back to the centroid")
    mean = 255 * (model.means_[4] - facts["low"]) / (facts["high"] - facts["low"])
    found = pixels(page, ".stage canvas").reshape(64, 4)[:, 0]
    assert np.abs(found - np.clip(mean, 0, 255)).max() <= 1


@pytest.mark.parametrize("which", ["digits", "wine"])
def test_a_component_shows_all_there_is_to_know(which: str, visit, request) -> None:
    page = visit(request.getfixturevalue(which), "component/1")
    page.wait_for_selector(".row-button")
    keep(page, f"{which}-component")
    for word in ("Centroid: ", "Precision: ", "Loadings: ", "noise: ", "Without noise", "Factor 1"):
        assert word in text(page)
    samples = drawn(page, ".strip canvas")
    page.click("text=Draw again")
    page.wait_for_timeout(500)
    assert drawn(page, ".strip canvas") != samples
    page.click("text=Random position")
    if which == "wine":
        assert "alcohol" in text(page, "table.features")
    page.click(".row-button")
    shown(page, "row")
    page.go_back()
    shown(page, "component")
    page.fill("#which", "2")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Component 2')")


def test_features_follow_the_sliders(wine: Explorer, visit, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    page = visit(wine, "component/0")
    set_slider(page, "#factor-1", 3)
    page.wait_for_timeout(100)
    expected = model.inverse_transform(np.array([[0.0, 3.0]]), np.array([0]))[0]
    cells = page.locator("table.features tbody tr td:nth-child(3)").all_inner_texts()
    found = [float(cell.replace(",", "")) for cell in cells]
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("which", ["digits", "wine"])
def test_the_data_and_its_rows(which: str, visit, request) -> None:
    page = visit(request.getfixturevalue(which), "data")
    keep(page, f"{which}-data")
    before = text(page, "section [role=status]")
    set_slider(page, "#share", 15)
    page.wait_for_timeout(700)
    assert text(page, "section [role=status]") != before
    least = page.locator("section:has-text('Least likely') .row-button").first
    score = least.locator("small").inner_text()
    least.click()
    shown(page, "row")
    keep(page, f"{which}-row")
    assert text(page, ".verdict b") == "Outlier"
    assert score.replace(",", "")[:3] in text(page, ".verdict").replace(",", "")
    assert "Factor 1" in text(page)
    assert "knowing all the other" in text(page)
    page.click("text=Next ›")
    shown(page, "row")
    page.click("table.shares a")
    shown(page, "component")


def test_drawing_on_the_pad(digits: Explorer, visit) -> None:
    page = visit(digits, "try")
    box = page.locator("canvas.pad").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] - 40, steps=8)
    page.mouse.up()
    page.wait_for_selector(".verdict")
    keep(page, "digits-try")
    assert "Component" in text(page, ".result")
    first = text(page, ".verdict")
    page.click("text=Clear")
    page.wait_for_timeout(700)
    assert text(page, ".verdict") != first
    page.click("text=A random image of the data")
    page.wait_for_timeout(700)
    before = pixels(page, "canvas.pad")
    page.click("text=Invert")
    np.testing.assert_allclose(pixels(page, "canvas.pad")[..., :3], 255 - before[..., :3], atol=1)
    page.click("text=Invert")
    page.focus("canvas.pad")
    before = drawn(page, "canvas.pad")
    page.keyboard.press("Space")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_timeout(200)
    assert drawn(page, "canvas.pad") != before


def test_an_erased_region_is_filled_in(digits: Explorer, wine: Explorer, visit) -> None:
    page = visit(digits, "try/3")
    page.wait_for_selector(".verdict")
    assert "Filled in" not in text(page)
    page.check("input[value=erase]")
    box = page.locator("canvas.pad").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + box["height"] * 0.3)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 60, box["y"] + box["height"] * 0.3, steps=6)
    page.mouse.up()
    page.wait_for_selector("text=Filled in:")
    keep(page, "digits-filled")
    filled = pixels(page, ".analysis figure canvas")[..., :3]
    assert np.ptp(filled, axis=2).max() == 0, "grey throughout: nothing is left unknown"
    assert "with the same values missing" in text(page, ".verdict")

    page = visit(wine, "try/3")
    page.wait_for_selector(".verdict")
    assert "how many standard deviations away" in text(page)
    page.fill("#value-2", "")
    page.wait_for_selector("h2:has-text('Filled in')")
    assert "ash" in text(page, "section:has-text('Filled in') table")
    for j in range(13):
        page.fill(f"#value-{j}", "")
    page.wait_for_selector(".problem:has-text('at least one')")


def test_dropping_files(digits: Explorer, wine: Explorer, visit, tmp_path: Path, folder) -> None:
    image = tmp_path / "digit.png"
    Image.fromarray(np.load(folder / "digits.npy")[3] * 15).resize((80, 80)).save(image)
    page = visit(digits, "try")
    page.set_input_files("#file", image)
    page.wait_for_selector(".verdict")
    (tmp_path / "no.png").write_bytes(b"no image")
    page.set_input_files("#file", tmp_path / "no.png")
    page.wait_for_selector(".problem:has-text('no image that this browser can read')")

    page = visit(wine, "try")
    table = pd.read_csv(folder / "wine.csv")
    table.iloc[[40], ::-1].to_csv(tmp_path / "row.csv", index=False)
    page.set_input_files("#file", tmp_path / "row.csv")
    page.wait_for_timeout(500)
    for j, value in enumerate(table.iloc[40]):
        assert float(page.input_value(f"#value-{j}")) == pytest.approx(value, rel=1e-5)
    page.fill("#value-0", "1e6")
    page.wait_for_selector(".verdict.out")
    keep(page, "wine-try")
    for content, complaint in (
        ("alcohol,ash\n1,2\n", "has no column"),
        ("1,2,3\n", "13 values, not 3"),
        (",".join(["x"] * 13) + "\n" + ",".join(["y"] * 13), "has no column"),
        ("", "is empty"),
    ):
        (tmp_path / "bad.csv").write_text(content)
        page.set_input_files("#file", tmp_path / "bad.csv")
        page.wait_for_selector(f".problem:has-text('{complaint}')")


def test_a_file_may_be_dropped_anywhere(wine: Explorer, visit, folder: Path) -> None:
    page = visit(wine, "try")
    table = pd.read_csv(folder / "wine.csv")
    drop = """(text) => {
      const files = new DataTransfer();
      files.items.add(new File([text], "row.csv"));
      for (const kind of ["dragover", "drop"]) {
        document.querySelector("h1").dispatchEvent(new DragEvent(kind,
          {dataTransfer: files, bubbles: true, cancelable: true}));
      }
    }"""
    page.evaluate(drop, table.iloc[[50]].to_csv(index=False))
    until(page, f"document.querySelector('#value-0').value === '{table.iloc[50, 0]}'")
    # Elsewhere it is let go without harm: the browser would open it in the place of the page.
    page.click("#tabs >> text=Map")
    shown(page, "map")
    page.evaluate(drop, "1,2")
    assert page.evaluate(
        "!document.body.dispatchEvent(new DragEvent('drop', {bubbles: true, cancelable: true}))"
    )


@pytest.mark.parametrize("which", ["digits", "wine"])
def test_a_row_may_be_changed(which: str, visit, request) -> None:
    page = visit(request.getfixturevalue(which), "row/7")
    said = text(page, ".verdict")
    page.click("text=Change it")
    shown(page, "try")
    page.wait_for_selector(".verdict")
    assert text(page, ".verdict") == said, "no digit of the row is lost on the way"


def test_features_that_stand_out_are_named(wine: Explorer, visit, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    table = pd.read_csv(folder / "wine.csv")
    page = visit(wine)
    k = int(text(page, ".preview h2").removeprefix("Component "))
    _, units = wine.ask("model")
    shown_mean = (model.means_[k] - units["centre"]) / units["scale"]
    highest, lowest = table.columns[shown_mean.argmax()], table.columns[shown_mean.argmin()]
    assert f"Above average: {highest}" in text(page, ".preview")
    assert f"Below average: {lowest}" in text(page, ".preview")
    page.keyboard.press("Enter")
    page.goto(f"{wine.address}#/component/{k}")
    shown(page, "component")
    _, arrays = wine.ask(f"component/{k}")
    strongest = table.columns[np.abs(arrays["loadings"][0]).argmax()]
    assert strongest in text(page, ".slider .moves")


def test_a_new_model_leaves_who_looks_where_they_are(folder: Path, tmp_path: Path, visit) -> None:
    path = tmp_path / "model.safetensors"
    shutil.copy(folder / "digits.safetensors", path)
    with exploring(path) as explorer:
        page = visit(explorer)
        set_slider(page, "#zoom", 30)
        page.focus("canvas.map")
        page.keyboard.press("ArrowRight")
        component = text(page, ".preview h2")
        page.evaluate("document.querySelector('canvas.map').seen = true")
        shutil.copy(folder / "digits.safetensors", path)
        until(page, "!document.querySelector('canvas.map')?.seen")
        until(page, "document.activeElement.className === 'map'")
        assert page.input_value("#zoom") == "30"
        assert text(page, ".preview h2") == component
        page.keyboard.press("Enter")
        shown(page, "component")
        shutil.copy(folder / "digits.safetensors", path)
        page.wait_for_selector("#notice:has-text('The model has changed')")
        page.wait_for_timeout(1500)
        page.click("text=Show the newest")
        page.wait_for_selector("#notice", state="hidden")
        assert text(page, "h1") == component
        page.close()


@pytest.mark.parametrize("which", ["digits", "wine"])
def test_training_that_is_finished(which: str, visit, request) -> None:
    page = visit(request.getfixturevalue(which), "training")
    keep(page, f"{which}-training")
    assert "Training is finished" in text(page)
    assert page.locator("svg.chart polyline").count() >= 2
    assert pixels(page, "canvas.map")[..., :3].std() > 5


@pytest.mark.slow
def test_training_is_watched(folder: Path, tmp_path: Path, visit) -> None:
    arguments = ["train", folder / "digits.npy", "-o", tmp_path / "m.safetensors", "--checkpoint"]
    arguments += [tmp_path / "run", "--every", "1s", "--solver", "sgd", "--batch-size", "5", "-q"]
    arguments += ["--n-components", "9", "--max-epochs", "100000"]
    with exploring(tmp_path / "run", "--wait") as explorer:
        page = visit(explorer, "training")
        assert "Waiting for run" in text(page)
        command = [sys.executable, "-m", "factormix", *map(str, arguments)]
        training = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        try:
            page.wait_for_selector("text=Training is not finished", timeout=60_000)
            page.wait_for_selector("text=/Moment [3-9] of/", timeout=60_000)
            newest = text(page, "section .soft + *") + text(page)
            keep(page, "watched")
            page.locator("#moment").focus()
            page.keyboard.press("Home")
            page.wait_for_selector("text=/Moment 1 of/")
            assert not page.is_checked("#follow")
            assert text(page) != newest
            page.click("#tabs >> text=Map")
            shown(page, "map")
            assert "9 components" in text(page, "header")
            page.close()
        finally:
            training.terminate()
            training.wait(30)


def test_without_data_the_page_says_what_is_missing(folder: Path, visit, browser) -> None:
    with exploring(folder / "wine.safetensors") as explorer:
        page = visit(explorer)
        assert page.is_disabled("input[value=likelihood]")
        assert "--data" in text(page)
        page.click("#tabs >> text=Data")
        shown(page, "data")
        assert "--data" in text(page)
        page.click("#tabs >> text=Component")
        shown(page, "component")
        page.click("#tabs >> text=Try it")
        shown(page, "try")
        page.click("text=Let the model invent one")
        page.wait_for_selector(".verdict")
        assert "rows that the model itself invents" in text(page)
        page.close()
        # The browser itself writes of the lost connection on the console of this page.
        last = browser.new_page()
        last.goto(explorer.address)
        shown(last, "map")
    last.wait_for_selector("#notice:has-text('does not answer')")
    last.close()


def test_an_address_that_leads_nowhere(digits: Explorer, browser) -> None:
    page = browser.new_page()
    page.goto(f"{digits.address}#/component/77")
    shown(page, "problem")
    assert "there is no component 77" in text(page)
    page.click("text=To the map")
    shown(page, "map")
    page.close()


@pytest.mark.parametrize("which", ["digits", "wine"])
@pytest.mark.parametrize(("size", "scheme"), [(NARROW, "light"), (WIDE, "dark")])
def test_every_view_fits_its_window(which: str, size, scheme: str, visit, request) -> None:
    explorer = request.getfixturevalue(which)
    page = visit(explorer, "map", scheme, size)
    label = f"{'narrow' if size is NARROW else 'wide'}-{scheme}"
    for view in ("map", "component/1", "data", "row/2", "try/2", "training"):
        page.evaluate(f"location.hash = '#/{view}'")
        shown(page, view.partition("/")[0])
        page.wait_for_timeout(250)
        keep(page, f"{which}-{label}-{view.partition('/')[0]}")
        root = page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert root[0] <= root[1], f"{view} scrolls sideways"
        assert page.evaluate(OVERLAPS) == []
        assert page.evaluate(SMALLEST) >= 9.5, f"{view} has labels too small to read"
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", dark))) < 200) == (scheme == "dark")


# The height of the smallest letters, in pixels of the page, those of charts included.
SMALLEST = """Math.min(99, ...[...document.querySelectorAll('#view *')]
  .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
  .map(e => parseFloat(getComputedStyle(e).fontSize)
    * (e.ownerSVGElement ? e.ownerSVGElement.getScreenCTM().a : 1)))"""
OVERLAPS = """(() => {
  const found = [];
  const blocks = [...document.querySelectorAll('#view h1, #view h2, #view h3, #view p, #view table,'
    + ' #view figure, #view .slider, #view button, #view .button, #view .row-button, #tabs a')]
    .filter(e => e.offsetParent !== null);
  const boxes = blocks.map(e => e.getBoundingClientRect());
  for (let i = 0; i < blocks.length; i += 1) {
    const a = boxes[i];
    if (a.right > innerWidth + 1) found.push(`cut off: ${blocks[i].innerText.slice(0, 40)}`);
    for (let j = i + 1; j < blocks.length; j += 1) {
      if (blocks[i].contains(blocks[j]) || blocks[j].contains(blocks[i])) continue;
      const b = boxes[j];
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 1) {
        found.push(`${blocks[i].innerText.slice(0, 40)} | ${blocks[j].innerText.slice(0, 40)}`);
      }
    }
  }
  return found;
})()"""
