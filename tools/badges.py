"""Draw the badges of the README from pyproject.toml: docs/images/badges.

python tools/badges.py
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images" / "badges"
SHAPE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" \
aria-label="{left}: {right}">
<rect width="{width}" height="20" rx="3" fill="#555"/>
<path d="M{split} 0h{rest}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{rest}z" fill="#2f6db3"/>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{at_left}" y="14">{left}</text><text x="{at_right}" y="14">{right}</text>
</g>
</svg>
"""


def read_facts() -> dict[str, str]:
    """Read the texts of the badges."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    source = (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"', source, re.MULTILINE)
    about, strict = project["project"], project["tool"]["mypy"]["strict"]
    return {
        "version": version,
        "Python": f"{about['requires-python'].removeprefix('>=')} or newer",
        "license": about["license"],
        "types": "mypy --strict" if strict else "some",
    }


def draw(left: str, right: str) -> str:
    """Draw one badge as SVG."""
    split, rest = 7 * len(left) + 12, 7 * len(right) + 9
    return SHAPE.format(
        left=left, right=right, width=split + rest + 3, split=split, rest=rest,
        at_left=split / 2, at_right=split + (rest + 3) / 2,
    )  # fmt: skip


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for left, right in read_facts().items():
        (FOLDER / f"{left.lower()}.svg").write_text(draw(left, right), encoding="utf-8")


if __name__ == "__main__":
    main()
