"""Run the tutorials and write their pages, with their output and pictures.

    python tools/tutorials.py                # all of them, into docs/tutorials
    python tools/tutorials.py images drift   # some of them

A tutorial is a Python script, ``docs/tutorials/NAME.py``, whose cells start with ``# %%``. Text
cells start with ``# %% [markdown]`` and are comments. The page ``NAME.md`` has the same cells, each
followed by its printed output, the value of its last line, and its pictures ``NAME-1.png`` ... The
pages are committed beside the scripts, so building the site runs nothing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "tutorials"
HEAD = "*This page is the output of a script: [{name}.py]({name}.py).*"


def cells(script: str) -> Iterator[tuple[str, str]]:
    """Yield the kind, "text" or "code", and the source of each cell."""
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        mark, _, source = part.partition("\n")
        source = source.strip("\n")
        if mark.strip() == "[markdown]":
            yield "text", re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        else:
            yield "code", source


def page_parts(name: str, script: str) -> list[str]:
    """Return the parts of a page that no run produces, in their order."""
    parts = [f"```python\n{s}\n```" if kind == "code" else s for kind, s in cells(script)]
    title, _, rest = parts[0].partition("\n\n")
    return [title, HEAD.format(name=name), rest, *parts[1:]]


def run_cell(source: str, names: dict[str, Any], file: str) -> tuple[str, list[Any]]:
    """Run a cell, and return its printed output and its figures."""
    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, file, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    text, figures = printed.getvalue(), []
    if hasattr(value, "savefig"):
        figures.append(value)
    elif value is not None:
        text += repr(value)
    return text.strip("\n"), figures


def write_page(script: Path, folder: Path) -> Path:
    """Run a tutorial in an empty folder, and write its page and pictures into another."""
    from factormix.plotting import figure_png

    name, text = script.stem, script.read_text(encoding="utf-8")
    parts = page_parts(name, text)
    page, pictures, names = parts[:3], [], {"__name__": "__main__", "__file__": str(script)}
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        for part, (kind, source) in zip(parts[3:], list(cells(text))[1:], strict=True):
            page.append(part)
            if kind == "text":
                continue
            printed, figures = run_cell(source, names, str(script))
            if printed:
                page.append(f"```text\n{printed}\n```")
            for figure in figures:
                pictures.append(figure_png(figure))
                page.append(f"![{_describe_picture(page)}]({name}-{len(pictures)}.png)")
    # The old page stays until the new one is complete.
    for old in folder.glob(f"{name}-*.png"):
        old.unlink()
    for number, picture in enumerate(pictures, 1):
        (folder / f"{name}-{number}.png").write_bytes(picture)
    path = folder / f"{name}.md"
    path.write_text("\n\n".join(page) + "\n", encoding="utf-8")
    return path


def _describe_picture(page: list[str]) -> str:
    """Return the first sentence of the text above a picture as its description."""
    texts = [part for part in page if not part.startswith(("```", "!["))]
    line = " ".join(texts[-1].split("\n\n")[-1].split())
    return re.sub(r"[\[\]`*]|\([^)]*\)", "", re.split(r"(?<=[.:])\s", line)[0]).strip(".:")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="names of tutorials; default: all")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the pages")
    given = parser.parse_args()
    scripts = sorted(FOLDER.glob("*.py"))
    unknown = set(given.names) - {path.stem for path in scripts}
    if unknown:
        raise SystemExit(f"no tutorial is called {', '.join(sorted(unknown))}")
    given.output.mkdir(parents=True, exist_ok=True)
    for script in scripts:
        if not given.names or script.stem in given.names:
            print(write_page(script, given.output.resolve()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
