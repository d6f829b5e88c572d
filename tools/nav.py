"""Add every page of the documentation to the navigation.

mkdocs calls this hook. A page that ``mkdocs.yml`` does not name goes to the guides, or to the
benchmarks if its name starts with "benchmarks", under its own title.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SECTIONS = {"benchmarks": "Benchmarks"}
"""Sections by the first word of a page's name; all other pages are guides."""


def on_config(config: Any) -> Any:
    """Add the pages that the navigation does not name."""
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
