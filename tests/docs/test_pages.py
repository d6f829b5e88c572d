"""Every example of the README and of the site runs, and pages show the output of their code."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import examples
import tutorials

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
SCRIPTS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
WITH_EXAMPLES = [
    page
    for page in PAGES
    # Tutorials run as scripts, below.
    if page.with_suffix(".py") not in SCRIPTS and examples.blocks(page.read_text(encoding="utf-8"))
]


def name_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


def check_choosing(names: dict[str, Any], folder: Path) -> None:
    assert names["found"].best_params_ == {"n_components": 20, "n_factors": 8}
    assert names["classifier"].score(names["X"][names["test"]], names["y"][names["test"]]) > 0.97
    assert names["versus"].difference.mean > 0
    for picture in ("sizes", "nearest", "varimax", "distances", "bins"):
        assert (folder / f"{picture}.png").stat().st_size > 5000


def check_missing(names: dict[str, Any], folder: Path) -> None:
    import pandas as pd

    # Petal widths of the first flowers, which are all of one kind.
    assert np.abs(names["prediction"] - names["X"][:5, 3]).max() < 0.3
    lower, truth = names["lower"], names["digits"][1500:1510]
    error = (names["filled"] - truth)[:, lower]
    by_mean = (names["digits"][:1500].mean(axis=0) - truth)[:, lower]
    assert (error**2).mean() < 0.7 * (by_mean**2).mean()
    assert names["possible"].shape == (5, 10, 64)
    assert (folder / "imputer.safetensors").exists()
    assert not pd.read_csv(folder / "filled.csv").isna().any().any()
    assert len(pd.read_parquet(folder / "draws.parquet")) == 20 * 400


def check_start(names: dict[str, Any], folder: Path) -> None:
    scores, y = names["scores"], names["y"]
    assert scores[y == 0].mean() < scores[y != 0].mean() - 20
    assert (folder / "digits.safetensors").exists()


def check_index(names: dict[str, Any], folder: Path) -> None:
    check_start(names, folder)
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    shown = re.findall(r"^(?:digits seen in training|zeros, never seen): +(-\d+)$", text, re.M)
    found = [names["scores"][(names["y"] == 0) == zero].mean() for zero in (False, True)]
    assert np.allclose(np.array(shown, dtype=float), found, atol=1.0), f"{shown} {found}"


def check_pytorch(names: dict[str, Any], folder: Path) -> None:
    mixture, standard = names["elbos"]
    assert min(mixture, standard) > 15
    assert mixture > standard - 0.5
    assert names["fixed"].log_prob(names["X"]).mean() > names["mixture"].log_prob(names["X"]).mean()


def check_streams(names: dict[str, Any], folder: Path) -> None:
    import pandas as pd

    found = pd.read_csv(folder / "alerts.csv")
    faults = (found.index < 60) | (found.index == 1800)
    assert found.alert[faults].all()
    assert found.alert[~faults].sum() < 10
    assert found.reason[:60].str.startswith("flow is 90.00").all()
    assert (found.time[1800], found.pump[1800]) == ("00:30:00", "P-17")


CHECKS = {
    "README.md": check_start,
    "docs/index.md": check_index,
    "docs/choosing.md": check_choosing,
    "docs/missing.md": check_missing,
    "docs/pytorch.md": check_pytorch,
    "docs/streams.md": check_streams,
}
"""Checks after the examples of some pages."""


SLOW_PAGES = (
    *("README.md", "docs/choosing.md", "docs/commands.md", "docs/conv.md", "docs/denoising.md"),
    *("docs/explorer.md", "docs/gallery.md", "docs/pytorch.md", "docs/tables.md"),
)
"""Pages whose examples take about five seconds or more; `make slow` runs them, in a shell."""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "page", [p for p in WITH_EXAMPLES if name_page(p) not in SLOW_PAGES], ids=name_page
)
def test_every_example_runs(page: Path, tmp_path: Path) -> None:
    names = examples.run_page(page, tmp_path, in_process=True)
    CHECKS.get(name_page(page), lambda names, folder: None)(names, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_page)
def test_every_example_runs_in_a_shell(page: Path, tmp_path: Path) -> None:
    names = examples.run_page(page, tmp_path, everything=True)
    CHECKS.get(name_page(page), lambda names, folder: None)(names, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_examples_are_in_blocks_that_run(page: Path) -> None:
    """An indented block, or one in another language, would be shown and never run."""
    text = page.read_text(encoding="utf-8")
    kinds = set(re.findall(r"^```+ *(\S+)", text, re.MULTILINE))
    assert kinds <= {"python", "sh", "text"}
    assert not re.findall(r"\n\n    (?:factormix|pip|make|from|import) .*", text)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_page_of_a_tutorial_has_the_cells_of_its_script(script: Path) -> None:
    page = script.with_suffix(".md").read_text(encoding="utf-8")
    place = 0
    for part in tutorials.page_parts(script.stem, script.read_text(encoding="utf-8")):
        found = page.find(part, place)
        assert found >= 0, f"run python tools/tutorials.py {script.stem}: the page lacks {part}"
        place = found + len(part)
    pictures = re.findall(rf"\]\(({script.stem}-\d+\.png)\)", page)
    assert sorted(pictures) == sorted(p.name for p in script.parent.glob(f"{script.stem}-*.png"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_and_targets_that_a_tutorial_names_exist(script: Path) -> None:
    text = script.with_suffix(".md").read_text(encoding="utf-8")
    shell = [code for language, code in examples.blocks(text) if language == "sh"]
    for line in chain.from_iterable(map(examples.split_lines, shell)):
        if line.startswith(examples.SET_UP):
            examples.check_exists(line)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_tutorial_runs_with_the_outputs_of_its_page(script: Path, tmp_path: Path) -> None:
    shown = script.with_suffix(".md").read_text(encoding="utf-8")
    again = tutorials.write_page(script, tmp_path).read_text(encoding="utf-8")
    assert re.findall(r"^```(?:text|python)|^!\[", again, re.MULTILINE) == re.findall(
        r"^```(?:text|python)|^!\[", shown, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 2, x\n```\n", AssertionError, "1"),
        ("```sh\nmake nothing\n```\n", SystemExit, "target"),
        ("```sh\npython benchmarks/nothing.py\n```\n", SystemExit, "script"),
        ("```sh\nfactormix info nothing.safetensors\n```\n", SystemExit, "ended with 2"),
        ("```sh\nfalse | false\n```\n", SystemExit, "ended with 1"),
    ],
)
def test_a_failing_example_is_reported(
    tmp_path: Path, text: str, error: type[BaseException], words: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(error, match=words):
        examples.run_page(page, tmp_path, in_process=True)
