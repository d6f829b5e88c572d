"""Give every page of the documentation a place in its navigation.

mkdocs calls it. A page that ``mkdocs.yml`` does not name goes to the guides, or to the benchmarks
if its name says so, under its own title.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SECTIONS = {"benchmarks": "Benchmarks"}
"""Sections by how the name of a page begins; all others are guides."""


def on_config(config: Any) -> Any:
    """Add the pages that have no place yet."""
    named = set(_paths(config["nav"]))
    sections = {
        title: pages
        for entry in config["nav"]
        for title, pages in entry.items()
        if isinstance(pages, list)
    }
    for page in sorted(Path(config["docs_dir"]).glob("*.md")):
        if page.name not in named:
            beginning = page.stem.partition("-")[0]
            sections[SECTIONS.get(beginning, "Guides")].append(page.name)
    return config


def _paths(nav: Any) -> list[str]:
    """List the files that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [path for entry in entries for path in _paths(entry)]
