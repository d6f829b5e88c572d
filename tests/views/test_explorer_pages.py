"""The explorer in a real browser: what a person clicks, and what they then see.

Anything on the browser's console fails a test. With ``EXPLORER_SHOTS=FOLDER`` in the environment,
screenshots are written there.
"""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import factormix
from explorers import CHROMIUM, ENVIRONMENT, SENTENCE, Explorer, copy_whole, serve_model

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH")

SHOTS = os.environ.get("EXPLORER_SHOTS")
WIDE, NARROW = {"width": 1280, "height": 860}, {"width": 380, "height": 780}
PATIENCE = 60_000
"""Milliseconds after which a condition counts as never fulfilled, even on a busy machine."""


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Open a view of an explorer, and check at the end that the console is empty."""
    contexts, console = [], []

    def open_view(explorer: Explorer, view: str = "map", scheme: str = "light", size=None) -> Any:
        contexts.append(browser.new_context(viewport=size or WIDE, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda line: console.append(f"{line.type}: {line.text}"))
        page.on("pageerror", lambda error: console.append(str(error)))
        own = f"http://{explorer.host}:{explorer.port}/"
        page.on("request", lambda r: r.url.startswith(own) or console.append(f"outside: {r.url}"))
        page.goto(f"{explorer.address}#/{view}")
        wait_for_view(page, view.partition("/")[0])
        return page

    yield open_view
    for context in contexts:
        context.close()
    assert console == []


def wait_for_view(page: Any, view: str) -> None:
    """Wait until a view is complete."""
    page.wait_for_selector(f"#view[data-view='{view}']")


def wait_until(page: Any, condition: str | Callable[[], bool]) -> None:
    """Wait for an expression of the page or a function to be true.

    The page forbids Playwright's own way, which evaluates text.
    """
    end = time.monotonic() + PATIENCE / 1000
    while not (condition() if callable(condition) else page.evaluate(condition)):
        assert time.monotonic() < end, f"never: {condition}"
        page.wait_for_timeout(20)


def take_screenshot(page: Any, name: str) -> None:
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=True)


def read_canvas(page: Any, selector: str) -> str:
    """Return the picture of a canvas as text that can be compared."""
    picture: str = page.locator(selector).first.evaluate("canvas => canvas.toDataURL()")
    return picture


def read_pixels(page: Any, selector: str) -> np.ndarray:
    """Return the pixels of a canvas, (height, width, 4)."""
    raw = base64.b64decode(read_canvas(page, selector).partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(raw)).convert("RGBA")).astype(float)


def set_slider(page: Any, selector: str, value: float) -> None:
    page.locator(selector).evaluate(
        "(slider, value) => { slider.value = value;"
        " slider.dispatchEvent(new Event('input', {bubbles: true}));"
        " slider.dispatchEvent(new Event('change', {bubbles: true})); }",
        value,
    )


def read_text(page: Any, selector: str = "#view") -> str:
    text: str = page.locator(selector).first.inner_text()
    return text


def test_texts_are_searched_and_read_token_by_token(words: Explorer, visit) -> None:
    page = visit(words, "text")
    assert page.locator("#tabs a[aria-current]").inner_text() == "Text"
    assert len(page.locator("table.regions tbody tr").all()) == 4
    take_screenshot(page, "text-components")
    page.locator("#find-token").fill("Cat")
    page.locator("#find-token").press("Enter")
    page.wait_for_selector("text=The components that hold “cat”")
    take_screenshot(page, "text-token")
    page.locator("table.regions tbody a").first.click()
    page.wait_for_selector("text=Typical contexts")
    assert page.locator("h3").all_inner_texts() == ["Factor 1", "Factor 2"]
    assert page.locator(".ends small:text('end')").all_inner_texts() == ["Low end", "High end"] * 2
    take_screenshot(page, "text-component")
    page.locator(".contexts a").first.click()
    page.wait_for_selector(".reading button[aria-pressed=true]")
    wait_until(page, "document.querySelector('.reading button').style.background !== ''")
    take_screenshot(page, "text-document")
    first = page.locator(".reading button").first
    first.click()
    assert first.get_attribute("aria-pressed") == "true"
    assert page.url.endswith("/0")
    text = "".join(page.locator(".reading button").all_text_contents()).split()
    assert set(text) <= set(SENTENCE.split())
    # Clicking a share leads back to the texts of the component.
    page.locator(".shares a").first.click()
    page.wait_for_selector("text=in texts")


def test_a_late_answer_keeps_the_token_and_the_factor_that_are_chosen(words, visit) -> None:
    painted = "[...document.querySelectorAll('.reading button')].map(b => b.style.background)"
    page = visit(words, "text/document/3")
    buttons = page.locator(".reading button")
    # Tokens 0 and t belong to different components, so their colours come from different answers.
    components = words.ask("text/document/3")[1]["components"][:, 0]
    t = int((components != components[0]).argmax())
    expected = {}
    for token, factor in ((0, "0"), (0, "1"), (t, "1")):
        buttons.nth(token).click()
        page.locator("#along").select_option(factor)
        wait_until(page, f"!{painted}.includes('')")
        expected[token, factor] = page.evaluate(painted)
    assert len({str(colours) for colours in expected.values()}) == 3

    held = []
    page.route("**/api/text/document/3?component=*", lambda route: held.append(route))
    buttons.nth(t).click()
    buttons.nth(0).click()
    page.locator("#along").select_option("1")
    wait_until(page, lambda: len(held) == 2)
    assert set(page.evaluate(painted)) == {""}
    for route in reversed(held):
        with page.expect_response(route.request.url):
            route.continue_()
    wait_until(page, f"!{painted}.includes('')")
    assert page.evaluate(painted) == expected[0, "1"]
    page.locator("#along").select_option("0")
    assert page.evaluate(painted) == expected[0, "0"]


def test_the_text_view_fits_a_phone_in_the_dark(words: Explorer, visit) -> None:
    page = visit(words, "text/document/3/2", scheme="dark", size=NARROW)
    wait_until(page, "document.querySelector('.reading button').style.background !== ''")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    take_screenshot(page, "text-narrow-dark")


def check_layout(page: Any, name: str) -> None:
    """Check that nothing is cut off, covered or too small, and take a screenshot."""
    page.evaluate("scrollTo(0, 0)")
    take_screenshot(page, name)
    widths = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    wide, seen = page.evaluate(widths)
    assert wide <= seen
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate(SMALLEST) >= 9.5


def test_samples_of_whole_images_at_every_depth(image_models: Path, visit) -> None:
    with serve_model(image_models / "deep.safetensors") as explorer:
        page = visit(explorer, "samples")
        assert page.locator("#tabs a:visible").all_inner_texts() == ["Samples", "Image", "Training"]
        assert "depth 2" in read_text(page, "#model-facts")
        assert page.locator("canvas.map").count() == 3
        before = read_canvas(page, "canvas.map")
        page.fill("#height", "16")
        page.fill("#width", "12")
        page.click("#again")
        page.wait_for_selector("text=Depth 2: 16 × 12 pixels")
        assert read_canvas(page, "canvas.map") != before
        check_layout(page, "images-samples")
        page.click("#tabs >> text=Training")
        wait_for_view(page, "training")
        assert page.locator("svg.chart polyline").count() == 1
        assert not page.is_visible("text=Centroids")
        # A view that makes no sense for the model leads to its samples.
        page.evaluate("location.hash = '#/map'")
        wait_for_view(page, "samples")
        page.close()


def test_an_image_is_dropped_erased_and_filled(image_models: Path, tmp_path: Path, visit) -> None:
    digit = np.load(image_models / "whole.npy")[0]
    model = factormix.load(image_models / "flat.safetensors")
    Image.fromarray(digit).save(tmp_path / "digit.png")
    Image.new("L", (1100, 1000)).save(tmp_path / "large.png")
    (tmp_path / "notes.png").write_text("no image")
    with serve_model(image_models / "flat.safetensors") as explorer:
        page = visit(explorer, "image", "dark", NARROW)
        for name, sentence in (("notes", "is not an image"), ("large", "1000 × 1100 pixels, and")):
            page.set_input_files("#file", tmp_path / f"{name}.png")
            page.wait_for_selector(f".problem:has-text('{sentence}')")
        page.set_input_files("#file", tmp_path / "digit.png")
        page.wait_for_selector(".legend-bar")
        assert page.locator(".problem").count() == 0
        shown = float(re.search(r"(\S+) bits per dimension", read_text(page, ".total"))[1])
        assert shown == pytest.approx(model.bits_per_dim(digit[None]), rel=1e-3)
        # The most surprising pixel is yellow, the least surprising one is violet.
        bits, colours = model.surprise(digit[None])[0], read_pixels(page, ".pair .picture")
        assert colours[np.unravel_index(bits.argmax(), bits.shape)][1] > 200
        assert colours[np.unravel_index(bits.argmin(), bits.shape)][1] < 20

        pad = page.locator(".pad")
        pad.scroll_into_view_if_needed()
        box = pad.bounding_box()
        for place, action in ((0.4, page.mouse.down), (0.6, page.mouse.up)):
            page.mouse.move(box["x"] + place * box["width"], box["y"] + 0.5 * box["height"])
            action()
        page.click("#fill")
        page.wait_for_selector("text=Draw 8")
        check_layout(page, "images-filled")
        figures = [f".figures figure:nth-child({i}) canvas" for i in range(1, 10)]
        drawn = np.stack([read_pixels(page, figure)[..., 0] for figure in figures])
        facts, _ = explorer.ask("model")
        known = (digit - facts["low"]) * 255 / (facts["high"] - facts["low"])
        differs = np.abs(drawn - known.clip(0, 255)).max(axis=0) > 1
        assert differs[3:5, 3:5].any()
        assert not differs[[0, 1, 6, 7]].any()
        page.close()


@pytest.mark.parametrize("which", ["digits", pytest.param("wine", marks=pytest.mark.slow)])
def test_the_map_leads_to_components(which: str, visit, request) -> None:
    page = visit(request.getfixturevalue(which))
    page.wait_for_selector("input[value=outliers]:enabled")
    take_screenshot(page, f"{which}-map")
    frames = read_canvas(page, "canvas.map")
    for colour, word in (("likelihood", "Likelihood: "), ("outliers", "Outlier share: ")):
        page.check(f"input[value={colour}]")
        assert read_text(page, ".mode-word").startswith(word)
        assert read_canvas(page, "canvas.map") != frames
    page.hover("canvas.map", position={"x": 10, "y": 10})
    component = read_text(page, ".preview h2")
    assert re.fullmatch(r"Component \d+", component)
    page.click("canvas.map", position={"x": 10, "y": 10})
    wait_for_view(page, "component")
    assert read_text(page, "h1") == component


@pytest.mark.parametrize("which", ["digits", pytest.param("wine", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [(1200, 860), (400, 780), (1900, 1000), (1000, 600)])
def test_pictures_fill_the_map(which: str, size: tuple[int, int], visit, request) -> None:
    page = visit(request.getfixturevalue(which), size={"width": size[0], "height": size[1]})
    n = 12 if which == "digits" else 3
    box = page.locator("canvas.map").bounding_box()
    # The space: the width of the scroller without its padding, and the height of the map.
    width = page.evaluate("document.querySelector('.map-scroll').clientWidth") - 8
    height = max(320, 0.72 * size[1])
    assert box["width"] <= width
    assert box["height"] <= height + 1
    tall = 1 if which == "digits" else 0.72
    shapes = [(-(-n // cols), cols) for cols in range(1, n + 1)]
    best = max(min(width / cols, height / rows / tall) for rows, cols in shapes)
    facts, _ = request.getfixturevalue(which).ask("map")
    found = min(box["width"] / cols for rows, cols in shapes if fits_grid(box, rows, cols, tall))
    # Pictures have whole pixels.
    assert best - 1 <= found <= best, facts
    take_screenshot(page, f"{which}-map-{size[0]}")


def fits_grid(box: dict[str, float], rows: int, cols: int, tall: float) -> bool:
    """Return whether a canvas has the shape of a grid of cells, up to rounding."""
    return abs(box["height"] / rows - tall * box["width"] / cols) < 1


def test_the_map_follows_the_size_of_the_window(digits: Explorer, visit) -> None:
    page = visit(digits)
    page.set_viewport_size({"width": 800, "height": 500})
    holder = "document.querySelector('.map-scroll')"
    wait_until(page, f"{holder}.scrollWidth <= {holder}.clientWidth")
    wait_until(page, f"{holder}.scrollHeight <= {holder}.clientHeight")
    set_slider(page, "#zoom", 30)
    wait_until(page, "document.querySelector('canvas.map').clientWidth === 120")
    page.set_viewport_size(WIDE)
    page.wait_for_timeout(100)
    assert page.input_value("#zoom") == "30", "a size that was chosen stays"


def test_the_keyboard_is_enough(digits: Explorer, visit) -> None:
    page = visit(digits, "data")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "view"
    assert read_text(page, "h1") == "Data", "skipping the tabs keeps the view"
    page.click("#tabs >> text=Map")
    wait_for_view(page, "map")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className") == "map":
            break
    else:
        raise AssertionError("the map cannot be reached by the Tab key")
    first = read_text(page, ".preview h2")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    component = read_text(page, ".preview h2")
    assert component != first
    page.keyboard.press("Enter")
    wait_for_view(page, "component")
    assert read_text(page, "h1") == component
    before = read_canvas(page, ".stage canvas")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "factor-0":
            break
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    assert read_text(page, ".slider output") == "1"
    wait_until(page, lambda: read_canvas(page, ".stage canvas") != before)


def test_sliders_move_the_picture_as_the_model_says(digits: Explorer, visit, folder: Path) -> None:
    model = factormix.load(folder / "digits.safetensors")
    page = visit(digits, "component/4")
    facts, _ = digits.ask("model")

    def shows(row: np.ndarray) -> bool:
        grey = 255 * (row - facts["low"]) / (facts["high"] - facts["low"])
        found = read_pixels(page, ".stage canvas").reshape(64, 4)[:, 0]
        return bool(np.abs(found - np.clip(grey, 0, 255)).max() <= 1)

    set_slider(page, "#factor-0", 2)
    set_slider(page, "#factor-2", -1.5)
    expected = model.inverse_transform(np.array([[2.0, 0.0, -1.5]]), np.array([4]))[0]
    wait_until(page, lambda: shows(expected))
    page.click("text=Back to the centroid")
    wait_until(page, lambda: shows(model.means_[4]))


@pytest.mark.parametrize("which", ["digits", pytest.param("wine", marks=pytest.mark.slow)])
def test_the_view_of_a_component(which: str, visit, request) -> None:
    page = visit(request.getfixturevalue(which), "component/1")
    page.wait_for_selector(".row-button")
    take_screenshot(page, f"{which}-component")
    for word in ("Centroid: ", "Precision: ", "Loadings: ", "noise: ", "Without noise", "Factor 1"):
        wait_until(page, lambda word=word: word in read_text(page))
    samples = read_canvas(page, ".strip canvas")
    page.click("text=Draw again")
    wait_until(page, lambda: read_canvas(page, ".strip canvas") != samples)
    page.click("text=Random position")
    if which == "wine":
        assert "alcohol" in read_text(page, "table.features")
    page.click(".row-button")
    wait_for_view(page, "row")
    page.go_back()
    wait_for_view(page, "component")
    page.fill("#which", "2")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Component 2')")


def test_features_follow_the_sliders(wine: Explorer, visit, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    page = visit(wine, "component/0")
    set_slider(page, "#factor-1", 3)
    expected = model.inverse_transform(np.array([[0.0, 3.0]]), np.array([0]))[0]

    def shows_expected() -> bool:
        cells = page.locator("table.features tbody tr td:nth-child(3)").all_inner_texts()
        return np.allclose([float(cell.replace(",", "")) for cell in cells], expected, rtol=1e-3)

    wait_until(page, shows_expected)


@pytest.mark.parametrize("which", ["wine", pytest.param("digits", marks=pytest.mark.slow)])
def test_the_views_of_the_data_and_of_a_row(which: str, visit, request) -> None:
    page = visit(request.getfixturevalue(which), "data")
    take_screenshot(page, f"{which}-data")
    before = read_text(page, "section [role=status]")
    set_slider(page, "#share", 15)
    wait_until(page, lambda: read_text(page, "section [role=status]") != before)
    least = page.locator("section:has-text('Least likely') .row-button").first
    score = least.locator("small").inner_text()
    least.click()
    wait_for_view(page, "row")
    take_screenshot(page, f"{which}-row")
    assert read_text(page, ".verdict b") == "Outlier"
    assert score.replace(",", "")[:3] in read_text(page, ".verdict").replace(",", "")
    assert "Factor 1" in read_text(page)
    assert "given all the other" in read_text(page)
    page.click("text=Next ›")
    wait_for_view(page, "row")
    page.click("table.shares a")
    wait_for_view(page, "component")


@pytest.mark.filterwarnings("ignore:.*'bottle' identifies rows")
def test_rows_are_shown_with_their_ids(folder: Path, tmp_path: Path, visit) -> None:
    table = pd.read_csv(folder / "wine.csv")
    table.insert(0, "bottle", [f"Chateau-{i:04d}" for i in range(len(table))])
    table.to_csv(tmp_path / "named.csv", index=False)
    with serve_model(folder / "wine.safetensors", tmp_path / "named.csv") as explorer:
        page = visit(explorer, "data", size=NARROW)
        buttons = page.locator(".row-button").all_inner_texts()
        assert len(buttons) == 24
        for text in buttons:
            name, row = text.split("\n")[:2]
            assert name == f"Chateau-{int(row.removeprefix('row ')):04d}"
        assert page.evaluate(OVERLAPS) == []
        page.locator(".row-button").first.click()
        wait_for_view(page, "row")
        number, name = read_text(page, "h1").removeprefix("Row ").split(": ")
        assert name == f"Chateau-{int(number):04d}"
        page.close()


def test_drawing_on_the_pad(digits: Explorer, visit) -> None:
    page = visit(digits, "try")
    box = page.locator("canvas.pad").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] - 40, steps=8)
    page.mouse.up()
    page.wait_for_selector(".verdict")
    take_screenshot(page, "digits-try")
    assert "Component" in read_text(page, ".result")
    first = read_text(page, ".verdict")
    page.click("text=Clear")
    wait_until(page, lambda: read_text(page, ".verdict") != first)
    blank = read_canvas(page, "canvas.pad")
    page.click("text=A random image of the data")
    wait_until(page, lambda: read_canvas(page, "canvas.pad") != blank)
    before = read_pixels(page, "canvas.pad")
    page.click("text=Invert")
    np.testing.assert_allclose(
        read_pixels(page, "canvas.pad")[..., :3], 255 - before[..., :3], atol=1
    )
    page.click("text=Invert")
    page.focus("canvas.pad")
    before = read_canvas(page, "canvas.pad")
    page.keyboard.press("Space")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    wait_until(page, lambda: read_canvas(page, "canvas.pad") != before)


def test_an_erased_region_is_filled_in(digits: Explorer, wine: Explorer, visit) -> None:
    page = visit(digits, "try/3")
    page.wait_for_selector(".verdict")
    assert "Filled in" not in read_text(page)
    page.check("input[value=erase]")
    box = page.locator("canvas.pad").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + box["height"] * 0.3)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 60, box["y"] + box["height"] * 0.3, steps=6)
    page.mouse.up()
    page.wait_for_selector("text=Filled in:")
    take_screenshot(page, "digits-filled")
    filled = read_pixels(page, ".analysis figure canvas")[..., :3]
    assert np.ptp(filled, axis=2).max() == 0, "grey throughout: no pixel is missing"
    assert "with the same values missing" in read_text(page, ".verdict")

    page = visit(wine, "try/3")
    page.wait_for_selector(".verdict")
    assert "how many standard deviations" in read_text(page)
    page.fill("#value-2", "")
    page.wait_for_selector("h2:has-text('Filled in')")
    assert "ash" in read_text(page, "section:has-text('Filled in') table")
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
    page.wait_for_selector(".problem:has-text('not an image that this browser can read')")

    page = visit(wine, "try")
    table = pd.read_csv(folder / "wine.csv")
    table.iloc[[40], ::-1].to_csv(tmp_path / "row.csv", index=False)
    page.set_input_files("#file", tmp_path / "row.csv")

    def shows_row() -> bool:
        fields = page.locator(".fields input")
        typed = [float(value) for value in fields.evaluate_all("all => all.map(e => e.value)")]
        return np.allclose(typed, table.iloc[40], rtol=1e-5)

    wait_until(page, shows_row)
    page.fill("#value-0", "1e6")
    page.wait_for_selector(".verdict.out")
    take_screenshot(page, "wine-try")
    for content, complaint in (
        ("alcohol,ash\n1,2\n", "has no column"),
        ("1,2,3\n", "13 values, not 3"),
        (",".join(["x"] * 13) + "\n" + ",".join(["y"] * 13), "has no column"),
        ("", "is empty"),
    ):
        (tmp_path / "bad.csv").write_text(content)
        page.set_input_files("#file", tmp_path / "bad.csv")
        page.wait_for_selector(f".problem:has-text('{complaint}')")


def test_a_file_can_be_dropped_anywhere(wine: Explorer, visit, folder: Path) -> None:
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
    wait_until(page, f"document.querySelector('#value-0').value === '{table.iloc[50, 0]}'")
    # In other views nothing happens: the browser must not open the file in place of the page.
    page.click("#tabs >> text=Map")
    wait_for_view(page, "map")
    page.evaluate(drop, "1,2")
    assert page.evaluate(
        "!document.body.dispatchEvent(new DragEvent('drop', {bubbles: true, cancelable: true}))"
    )


@pytest.mark.parametrize("which", ["wine", pytest.param("digits", marks=pytest.mark.slow)])
def test_a_row_can_be_changed(which: str, visit, request, folder: Path) -> None:
    """The row itself is scored as if left out of training; a copy to change is a new row."""
    explorer = request.getfixturevalue(which)
    if which == "digits":
        rows = np.load(folder / "digits.npy").reshape(-1, 64)
    else:
        rows = pd.read_csv(folder / "wine.csv")
    model = factormix.load(folder / f"{which}.safetensors")
    page = visit(explorer, "row/7")
    page.click("text=Change it")
    wait_for_view(page, "try")
    page.wait_for_selector(".verdict")
    shown = float(re.search(r"Log-likelihood (\S+):", read_text(page, ".verdict"))[1])
    expected = float(model.score_samples(rows[7:8])[0])
    assert shown == pytest.approx(expected, rel=1e-5), "the copy has all digits of the row"


def test_features_that_stand_out_are_named(wine: Explorer, visit, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    table = pd.read_csv(folder / "wine.csv")
    page = visit(wine)
    k = int(read_text(page, ".preview h2").removeprefix("Component "))
    _, units = wine.ask("model")
    shown_mean = (model.means_[k] - units["centre"]) / units["scale"]
    highest, lowest = table.columns[shown_mean.argmax()], table.columns[shown_mean.argmin()]
    assert f"Above average: {highest}" in read_text(page, ".preview")
    assert f"Below average: {lowest}" in read_text(page, ".preview")
    page.keyboard.press("Enter")
    page.goto(f"{wine.address}#/component/{k}")
    wait_for_view(page, "component")
    _, arrays = wine.ask(f"component/{k}")
    strongest = table.columns[np.abs(arrays["loadings"][0]).argmax()]
    assert strongest in read_text(page, ".slider .moves")


@pytest.mark.parametrize(
    "size",
    [
        {"width": 400, "height": 780},
        pytest.param({"width": 1200, "height": 860}, marks=pytest.mark.slow),
    ],
)
def test_every_bar_has_the_name_of_its_column(wine: Explorer, visit, folder: Path, size) -> None:
    columns = list(pd.read_csv(folder / "wine.csv").columns)
    page = visit(wine, "component/1", "light", size)
    lists = page.locator(".figures .named")
    labels = lists.evaluate_all("all => all.map(one => one.ariaLabel)")
    assert labels == [
        "Centroid",
        "Precision",
        "Spread",
        *(f"Loadings of factor {j}" for j in (1, 2)),
    ]
    for i in range(lists.count()):
        assert lists.nth(i).locator(".name").all_text_contents() == columns
    # The bar beside a name is that of its column.
    loadings = wine.ask("component/1")[1]["loadings"]
    found = (
        lists.nth(4)
        .locator(".bar i")
        .evaluate_all(
            "bars => bars.map(bar => parseFloat(bar.style.width)"
            " * (bar.className === 'below' ? -1 : 1))"
        )
    )
    np.testing.assert_allclose(found, 50 * loadings[1] / np.abs(loadings).max(), atol=0.01)
    boxes = page.locator(".figures .named > *").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect())"
        ".map(b => [b.left, b.right, b.top, b.bottom])"
    )
    names, bars = np.array(boxes[::2]), np.array(boxes[1::2])
    assert (names[:, 1] <= bars[:, 0]).all(), "no name reaches into its bar"
    assert (bars[:, 1] <= size["width"]).all()
    assert (bars[:, 1] - bars[:, 0] > 60).all()
    assert ((names[:, 2] <= bars[:, 3]) & (bars[:, 2] <= names[:, 3])).all(), "side by side"
    for view in ("map", "row/2"):
        page.goto(f"{wine.address}#/{view}")
        wait_for_view(page, view.partition("/")[0])
        assert page.locator(".named").first.locator(".name").all_text_contents() == columns


def test_a_picture_names_the_column_that_is_pointed_at(wine: Explorer, visit, folder: Path) -> None:
    model = factormix.load(folder / "wine.safetensors")
    columns = list(pd.read_csv(folder / "wine.csv").columns)
    page = visit(wine, "component/1")
    stage = page.locator(".stage canvas")
    width = stage.bounding_box()["width"]
    for j, column in enumerate(columns):
        stage.hover(position={"x": (j + 0.5) * width / 13, "y": 20})
        name, _, value = read_text(page, ".readout").partition(": ")
        assert name == column
        assert float(value.replace(",", "")) == pytest.approx(model.means_[1][j], rel=1e-3)
    stage.focus()
    page.keyboard.press("ArrowLeft")
    assert read_text(page, ".readout").startswith(columns[-2])
    set_slider(page, "#factor-0", 2)
    moved = model.inverse_transform(np.array([[2.0, 0.0]]), np.array([1]))[0][-2]
    shown = f"document.querySelector('.readout').textContent.split(': ')[1] - {moved}"
    wait_until(page, f"Math.abs({shown}) < 1e-3")

    page = visit(wine, "map")
    facts, arrays = wine.ask("map")
    box = page.locator("canvas.map").bounding_box()
    wide = box["width"] / facts["cols"]
    for j in (0, 6, 12):
        # The frame takes less than half a bar on either side.
        page.hover("canvas.map", position={"x": wide * (1 + (j + 0.5) / 13), "y": 30})
        assert page.get_attribute("canvas.map", "title") == columns[j]
    assert read_text(page, ".preview h2") == f"Component {arrays['order'][1]}"


def test_a_line_names_the_column_that_is_pointed_at(tmp_path: Path, visit) -> None:
    names = [f"sensor {j}" for j in range(40)]
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(80, 40)), columns=names)
    factormix.MFA(2, 1, random_state=0, max_epochs=2).fit(table).save(tmp_path / "m.safetensors")
    with serve_model(tmp_path / "m.safetensors") as explorer:
        page = visit(explorer, "component/0", size=NARROW)
        figure = page.locator(".figures figure:has(canvas[aria-label^=Loadings])")
        width = figure.locator("canvas").bounding_box()["width"]
        figure.locator("canvas").click(position={"x": 31.5 * width / 40, "y": 5})
        assert figure.locator(".readout").text_content() == "sensor 31"
        page.keyboard.press("ArrowRight")
        assert figure.locator(".readout").text_content() == "sensor 32"
        page.close()


def test_a_new_model_keeps_view_focus_and_zoom(folder: Path, tmp_path: Path, visit) -> None:
    path = tmp_path / "model.safetensors"
    copy_whole(folder / "digits.safetensors", path)
    with serve_model(path) as explorer:
        page = visit(explorer)
        set_slider(page, "#zoom", 30)
        page.focus("canvas.map")
        page.keyboard.press("ArrowRight")
        component = read_text(page, ".preview h2")
        page.evaluate("document.querySelector('canvas.map').seen = true")
        later = {"later": "not ready"}
        page.route("**/api/model", lambda route: route.fulfill(status=202, json=later), times=1)
        copy_whole(folder / "digits.safetensors", path)
        wait_until(page, "!document.querySelector('canvas.map')?.seen")
        wait_until(page, "document.activeElement.className === 'map'")
        assert page.input_value("#zoom") == "30"
        assert read_text(page, ".preview h2") == component
        page.keyboard.press("Enter")
        wait_for_view(page, "component")
        copy_whole(folder / "digits.safetensors", path)
        page.wait_for_selector("#notice:has-text('There is a newer model')")
        page.click("text=Show the newest")
        page.wait_for_selector("#notice", state="hidden")
        assert read_text(page, "h1") == component
        page.close()


@pytest.mark.parametrize("which", ["digits", "wine"])
def test_the_training_view_of_a_finished_model(which: str, visit, request) -> None:
    page = visit(request.getfixturevalue(which), "training")
    take_screenshot(page, f"{which}-training")
    assert "Training is finished" in read_text(page)
    assert page.locator("svg.chart polyline").count() >= 2
    assert read_pixels(page, "canvas.map")[..., :3].std() > 5


def read_ticks(page: Any, selector: str) -> list[float]:
    """Return the numbers at an axis."""
    texts = page.locator(selector).all_text_contents()
    return [float(text.replace(",", "")) for text in texts]


def test_axes_of_counts_have_whole_numbers(folder: Path, tmp_path: Path, visit) -> None:
    table = pd.read_csv(folder / "wine.csv").head(40)
    # One component throughout: the range around it has no other whole number.
    model = factormix.MFA(1, 1, random_state=0, max_epochs=30).fit(table)
    assert {record["components"] for record in model.history_} == {1}
    model.save(tmp_path / "one.safetensors")
    table.to_csv(tmp_path / "rows.csv", index=False)
    with serve_model(tmp_path / "one.safetensors", tmp_path / "rows.csv") as explorer:
        page = visit(explorer, "training")
        components = "section:has(h2:text('Components'))"
        assert read_ticks(page, f"{components} .level") == [1]
        places = read_ticks(page, f"{components} .place")
        assert places
        assert all(place.is_integer() for place in places)

        # A page asks again and again, also when the server has gone.
        page.close()
        page = visit(explorer, "data")
        levels = read_ticks(page, "svg.chart .level")
        counts = explorer.ask("data")[0]["histogram"]["counts"]
        assert levels[0] == 0
        assert max(counts) / 2 < levels[-1] <= max(counts)
        assert all(level.is_integer() for level in levels)
        # A bar is as high as its count at the axis.
        heights = page.locator("svg.chart rect").evaluate_all(
            "bars => bars.map(bar => bar.height.baseVal.value)"
        )
        places = page.locator("svg.chart .rule").evaluate_all(
            "rules => rules.map(rule => rule.y1.baseVal.value)"
        )
        unit = (places[0] - places[-1]) / (levels[-1] - levels[0])
        np.testing.assert_allclose(heights, np.array(counts) * unit, atol=1e-3)
        page.close()


@pytest.mark.slow
def test_the_training_view_follows_a_run(folder: Path, tmp_path: Path, visit) -> None:
    arguments = ["train", folder / "digits.npy", "-o", tmp_path / "m.safetensors", "--checkpoint"]
    arguments += [tmp_path / "run", "--every", "1s", "--solver", "sgd", "--batch-size", "5", "-q"]
    arguments += ["--n-components", "9", "--max-epochs", "100000"]
    with serve_model(tmp_path / "run") as explorer:
        page = visit(explorer, "training")
        assert "Waiting for run" in read_text(page)
        command = [sys.executable, "-m", "factormix", *map(str, arguments)]
        training = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        try:
            page.wait_for_selector("text=Training is not finished")
            page.wait_for_selector("text=/Save [3-9] of/")
            newest = read_text(page, "section .soft + *") + read_text(page)
            take_screenshot(page, "watched")
            page.locator("#save").focus()
            page.keyboard.press("Home")
            page.wait_for_selector("text=/Save 1 of/")
            assert not page.is_checked("#follow")
            assert read_text(page) != newest
            page.click("#tabs >> text=Map")
            wait_for_view(page, "map")
            assert "9 components" in read_text(page, "header")
            page.close()
        finally:
            training.terminate()
            training.wait(120)


def test_without_data_the_page_names_the_option(folder: Path, visit, browser) -> None:
    with serve_model(folder / "wine.safetensors") as explorer:
        page = visit(explorer)
        assert page.is_disabled("input[value=likelihood]")
        assert "--data" in read_text(page)
        page.click("#tabs >> text=Data")
        wait_for_view(page, "data")
        assert "--data" in read_text(page)
        page.click("#tabs >> text=Component")
        wait_for_view(page, "component")
        page.click("#tabs >> text=Try it")
        wait_for_view(page, "try")
        page.click("text=A random row of the model")
        page.wait_for_selector(".verdict")
        assert "rows drawn from the model" in read_text(page)
        page.close()
        # The browser reports the lost connection on the console of this page.
        last = browser.new_page()
        last.goto(explorer.address)
        wait_for_view(last, "map")
    last.wait_for_selector("#notice:has-text('does not answer')", timeout=PATIENCE)
    last.close()


def test_an_address_without_a_view(digits: Explorer, browser) -> None:
    page = browser.new_page()
    page.goto(f"{digits.address}#/component/77")
    wait_for_view(page, "problem")
    assert "there is no component 77" in read_text(page)
    page.click("text=To the map")
    wait_for_view(page, "map")
    page.close()


LATE_PARTS = {"component/1": (".strip", ".row-button"), "try/2": (".verdict",)}
"""Parts that appear after their view."""


@pytest.mark.parametrize("which", ["digits", "wine"])
@pytest.mark.parametrize(
    ("size", "scheme"),
    [(NARROW, "light"), pytest.param(WIDE, "dark", marks=pytest.mark.slow)],
)
def test_every_view_fits_its_window(which: str, size, scheme: str, visit, request) -> None:
    explorer = request.getfixturevalue(which)
    page = visit(explorer, "map", scheme, size)
    label = f"{'narrow' if size is NARROW else 'wide'}-{scheme}"
    for view in ("map", "component/1", "data", "row/2", "try/2", "training"):
        page.evaluate(f"location.hash = '#/{view}'")
        wait_for_view(page, view.partition("/")[0])
        for part in LATE_PARTS.get(view, ()):
            page.wait_for_selector(part)
        check_layout(page, f"{which}-{label}-{view.partition('/')[0]}")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", dark))) < 200) == (scheme == "dark")


# The height of the smallest letters in pixels of the page, including charts.
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
