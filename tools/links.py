"""Check that every link of a built site leads to an existing page and anchor.

    python tools/links.py site

Links to other hosts are not followed: a build must not depend on them.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Collect the links and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.places |= {values[name] or "" for name in ("id", "name") if name in values}
        self.links += [values[name] or "" for name in ("href", "src") if name in values]


def find_broken_links(site: Path) -> list[str]:
    """Return every broken link of a site, with its page."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        # The page for unknown addresses is shown at any depth: its links are absolute.
        if path.name == "404.html":
            continue
        for link in page.links:
            if not _leads_somewhere(link, path, pages):
                found.append(f"{path.relative_to(site.resolve())}: {link}")
    return found


def _leads_somewhere(link: str, path: Path, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target = target / "index.html"
    if not target.is_file():
        return False
    return target not in pages or unquote(parts.fragment) in pages[target].places


def main() -> None:
    site = Path(sys.argv[1])
    found = find_broken_links(site)
    if found:
        raise SystemExit("\n".join(["broken links:", *found]))
    print(f"no broken link in {len(list(site.rglob('*.html')))} pages of {site}")


if __name__ == "__main__":
    main()
