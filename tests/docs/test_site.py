"""The site in a real browser: every page, wide, narrow and dark."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
playwright = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
SHOTS = ROOT / "build" / "site"
PAGES = sorted(
    str(page.relative_to(ROOT / "docs").with_suffix(".html"))
    for page in (ROOT / "docs").glob("**/*.md")
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH"),
]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site into a folder."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "-q", "build", "--strict", "-d", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site."""
    handler = functools.partial(Quiet, directory=str(site))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("wide", 1280, "light"), ("narrow", 400, "light"), ("dark", 1280, "dark")],
)
def test_every_page_fits_and_fetches_nothing_from_elsewhere(
    address: str, browser: playwright.Browser, name: str, width: int, scheme: str
) -> None:
    view = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    requests: list[str] = []
    errors: list[str] = []
    view.on("request", lambda request: requests.append(request.url))
    view.on("response", lambda r: errors.append(f"{r.status} {r.url}") if r.status >= 400 else None)
    view.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    view.on("pageerror", lambda error: errors.append(str(error)))
    (SHOTS / name).mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        view.goto(f"{address}/{page}", wait_until="networkidle")
        wide = view.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{page} is {wide} pixels wide"
        # Every formula is typeset.
        assert view.locator(".arithmatex:not(:has(.katex))").count() == 0, page
        assert view.locator(".katex-error").count() == 0, page
        broken = view.evaluate(
            "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        )
        assert broken == [], page
        view.screenshot(path=SHOTS / name / f"{page.replace('/', '-')}.png", full_page=True)
    assert errors == []
    assert [url for url in requests if not url.startswith((address, "data:"))] == []
    view.close()


@pytest.mark.parametrize("page", ["index.html", "tutorials/drift.html"])
def test_search_works_from_a_folder_without_a_server(
    site: Path, browser: playwright.Browser, page: str
) -> None:
    view = browser.new_page(viewport={"width": 1280, "height": 1000})
    requests: list[str] = []
    view.on("request", lambda request: requests.append(request.url))
    view.goto((site / page).as_uri())
    view.click(".md-search__input")
    view.keyboard.type("varimax")
    first = view.locator(".md-search-result__link").first
    first.wait_for()
    first.click()
    # The word is in the reference of inspection, and in the guide to sizes.
    view.wait_for_url(re.compile(r"reference/inspection\.html|choosing\.html"))
    assert "varimax" in view.locator("article").inner_text()
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    view.close()
