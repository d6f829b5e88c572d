"""Run every example of a page as a reader would, with this interpreter's factormix.

    python tools/examples.py README.md docs/choosing.md
    python tools/examples.py README.md --all     # also examples that take minutes or serve a page

The blocks of a page run from top to bottom, in a folder with small files under the names that the
pages use. Python blocks share one namespace. Shell lines run in a shell; with ``in_process=True``
calls of factormix without a pipe run in this process, which is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

LONG = ("factormix demo", "factormix explore", "torchrun ")
"""Lines that take minutes, or serve a page until they are stopped."""
SET_UP = (
    *("pip install ", "make ", "git clone ", "cd ", "python benchmarks/", "python tools/"),
    *("factormix data fetch", "tail -f "),
)
"""Lines that a test must not run: they change the environment, download, or take hours."""
LARGE = "datasets.load("
"""Marks a Python block that trains for minutes on data that may be missing."""

TRACKERS = ("import mlflow", "import wandb")
"""Starts of blocks that need packages outside the test environment; test_trackers.py runs them."""

ASSUMED = ("mixture", "sensors", "table", "model", "small", "large", "before", "after")
"""Names of trained models that a page may use without training them."""


def blocks(text: str) -> list[tuple[str, str]]:
    """Return language and code of all example blocks, in order."""
    return re.findall(r"^```(python|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def split_lines(code: str) -> list[str]:
    """Return the lines of a shell block, without comments."""
    lines = code.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def make_inputs(folder: Path) -> None:
    """Write small files under the names that the pages use."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    centres = 4 * random.normal(size=(6, 12))
    rows = centres[random.integers(6, size=900)] + random.normal(size=(900, 12))
    parts = {"rows": rows[:600], "digits": rows[:600], "val": rows[600:750], "new": rows[750:]}
    for file, some in parts.items():
        np.save(folder / f"{file}.npy", some)
    names = ["age", "height", "weight", *(f"x{j}" for j in range(9))]
    gaps = random.random((400, 12)) < 0.2
    for file in ("table", "rows", "new", "clean", "gaps"):
        empty = gaps if file == "gaps" else np.zeros_like(gaps)
        lines = [
            ",".join("" if gone else f"{value:.4f}" for value, gone in zip(*row, strict=True))
            for row in zip(rows, empty, strict=False)
        ]
        (folder / f"{file}.csv").write_text("\n".join([",".join(names), *lines]) + "\n")
    first, *lines = (folder / "rows.csv").read_text().splitlines()
    sensors = [f"{first},machine", *(f"{line},M{i % 3}" for i, line in enumerate(lines))]
    (folder / "sensors.csv").write_text("\n".join(sensors) + "\n")
    np.save(folder / "gaps.npy", np.where(gaps, np.nan, rows[:400]))
    events = [json.dumps(dict(zip(names, row, strict=True))) for row in rows[:50].tolist()]
    (folder / "events.jsonl").write_text("\n".join(events) + "\n")
    (folder / "folder").mkdir()  # an empty folder of data sets
    (folder / "photos").mkdir()
    for i in range(120):
        small = random.integers(0, 256, (3, 3), dtype=np.uint8)
        Image.fromarray(small).resize((12, 12)).save(folder / "photos" / f"{i:03d}.png")
    noisy = random.integers(90, 110, (16, 16), dtype=np.uint8)
    Image.fromarray(noisy).save(folder / "noisy.png")
    scratches = np.diag([0, 0, 1, 1, 1, 1] + [0] * 10).astype(np.uint8)
    Image.fromarray(scratches * 255).save(folder / "scratches.png")
    (folder / "scans").mkdir()
    Image.fromarray(noisy).save(folder / "scans" / "first.png")


def train_models(folder: Path, text: str) -> None:
    """Write the trained mixtures that a page assumes."""
    files = [f"{name}.safetensors" for name in ASSUMED]
    assumed = [name for name in files if name in text and f"-o {name}" not in text]
    if assumed:
        import pandas as pd

        from factormix import MFA

        model = MFA(3, 2, max_epochs=5, random_state=0).fit(pd.read_csv(folder / "rows.csv"))
        for name in assumed:
            model.save(folder / name)


def check_exists(line: str) -> None:
    """Check that the script or target of a line that is not run exists."""
    if not (ROOT / "Makefile").is_file():  # outside a checkout
        return
    words = line.split()
    if words[0] == "python" and not (ROOT / words[1]).is_file():
        raise SystemExit(f"{line}\nnames a script that does not exist")
    targets = (ROOT / "Makefile").read_text(encoding="utf-8") if words[0] == "make" else ""
    if words[0] == "make" and not re.search(rf"^{words[1]}:", targets, re.MULTILINE):
        raise SystemExit(f"{line}\nnames a target that does not exist")


def run_line(line: str, folder: Path, *, in_process: bool) -> None:
    """Run one shell line; a server is started, its page fetched, and stopped."""
    if line.startswith("factormix explore"):
        _explore(line, folder)
    elif in_process and line.startswith("factormix ") and not re.search(r"[|&]", line):
        _call(line)
    else:
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=_environment(), capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{line}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")


def _call(line: str) -> None:
    """Call the command of a line, with its standard input and output from and to files."""
    from factormix.cli import run

    words = shlex.split(line, comments=True)[1:]
    with contextlib.ExitStack() as files:
        if "<" in words:
            # contextlib redirects standard output alone.
            there, sys.stdin = sys.stdin, files.enter_context(open(_take_file(words, "<")))
            files.callback(setattr, sys, "stdin", there)
        if ">" in words:
            out = files.enter_context(open(_take_file(words, ">"), "w"))
            files.enter_context(contextlib.redirect_stdout(out))
        code = run(words)
    if code:
        raise SystemExit(f"{line}\nended with {code}")


def _take_file(words: list[str], sign: str) -> str:
    """Remove the sign of a redirection and the file after it, and return the file."""
    place = words.index(sign)
    _, file = words[place : place + 2]
    del words[place : place + 2]
    return file


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Commands must not open a browser window.
    return os.environ | {"PATH": path, "BROWSER": "true", "PYTHONWARNINGS": "default"}


def _explore(line: str, folder: Path) -> None:
    command = shlex.split(line, comments=True)
    server = subprocess.Popen(
        command, cwd=folder, env=_environment(), stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    found = re.search(r"http://\S+", server.stdout.readline())
    if found is None:
        raise SystemExit(f"{line}\nprinted no address")
    with urllib.request.urlopen(found[0]) as response:
        assert b"factormix" in response.read()
    server.send_signal(signal.SIGINT)
    if server.wait(60):
        raise SystemExit(f"{line}\nended with {server.returncode}")


def run_page(
    path: Path, folder: Path, *, everything: bool = False, in_process: bool = False
) -> dict[str, Any]:
    """Run the examples of a page in an empty folder, and return their variables."""
    text = path.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        make_inputs(folder)
        train_models(folder, text)
        for language, code in blocks(text):
            if code.startswith(TRACKERS):
                continue
            if language == "python":
                if LARGE in code and not everything:
                    print("left out:", code.splitlines()[0], "...", flush=True)
                    continue
                print(code.splitlines()[0], "...", flush=True)
                exec(compile(code, str(path), "exec"), names)
                continue
            for line in split_lines(code):
                if line.startswith(SET_UP) or (line.startswith(LONG) and not everything):
                    print("left out:", line, flush=True)
                    check_exists(line)
                    continue
                print(line, flush=True)
                run_line(line, folder, in_process=in_process)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", type=Path, nargs="+")
    parser.add_argument("--all", action="store_true", help="also examples that take minutes")
    given = parser.parse_args()
    for page in given.pages:
        with tempfile.TemporaryDirectory() as folder:
            run_page(page.resolve(), Path(folder), everything=given.all)
        print(f"the examples of {page.name} ran")


if __name__ == "__main__":
    main()
