"""Run every line of the README as a reader would, with the factormix of the running interpreter.

    python tools/readme.py README.md
    python tools/readme.py README.md --all     # also what takes minutes: large data, demo ...

The Python block and the lines of shell run in a folder of their own, which has small files under
the names that the README uses. The page of `factormix explore` is opened, asked for, and closed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

LONG = ("factormix demo", "factormix reproduce")
LARGE = "datasets.load("
"""What a block of Python has that trains for minutes on data which may not be there."""


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def make_inputs(folder: Path) -> None:
    """Write small files under the names that the README uses."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    centres = 4 * random.normal(size=(6, 12))
    rows = centres[random.integers(6, size=900)] + random.normal(size=(900, 12))
    np.save(folder / "rows.npy", rows[:600])
    np.save(folder / "val.npy", rows[600:750])
    np.save(folder / "new.npy", rows[750:])
    names = ["age", "height", "weight", *(f"x{j}" for j in range(9))]
    for file in ("table.csv", "rows.csv", "new.csv"):
        lines = [",".join(f"{value:.4f}" for value in row) for row in rows[:400]]
        (folder / file).write_text("\n".join([",".join(names), *lines]) + "\n")
    (folder / "photos").mkdir()
    for i in range(120):
        small = random.integers(0, 256, (3, 3), dtype=np.uint8)
        Image.fromarray(small).resize((12, 12)).save(folder / "photos" / f"{i:03d}.png")


def run_line(line: str, folder: Path, environment: dict[str, str]) -> None:
    """Run one line of shell; a page that is served is opened, asked for and closed."""
    if line.startswith("factormix explore"):
        _explore(line, folder, environment)
        return
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{line}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")


def _explore(line: str, folder: Path, environment: dict[str, str]) -> None:
    command = shlex.split(line, comments=True)
    server = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    found = re.search(r"http://\S+", server.stdout.readline())
    if found is None:
        raise SystemExit(f"{line}\nsaid no address")
    with urllib.request.urlopen(found[0]) as response:
        assert b"factormix" in response.read()
    server.send_signal(signal.SIGINT)
    if server.wait(60):
        raise SystemExit(f"{line}\nended with {server.returncode}")


def run_readme(path: Path, *, everything: bool = False) -> list[str]:
    """Run the blocks of a README, and return the lines that were run."""
    text, ran = path.read_text(encoding="utf-8"), []
    binaries = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    # Whatever would open a window does nothing instead.
    environment |= {"BROWSER": "true", "PYTHONWARNINGS": "default"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        for block in blocks(text, "python"):
            if LARGE in block and not everything:
                print("left out:", block.splitlines()[0], "...", flush=True)
                continue
            print(block.splitlines()[0], "...", flush=True)
            script = folder / "lines.py"
            # A block may use what an earlier one has imported.
            script.write_text(f"import factormix\n{block}", encoding="utf-8")
            run_line(f"{shlex.quote(sys.executable)} lines.py", folder, environment)
            ran.append(block)
        for line in "\n".join(blocks(text, "sh")).splitlines():
            if not line.startswith("factormix") or (line.startswith(LONG) and not everything):
                print("left out:", line, flush=True)
                continue
            print(line, flush=True)
            run_line(line, folder, environment)
            ran.append(line)
    return ran


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("readme", type=Path)
    parser.add_argument("--all", action="store_true", help="also what takes minutes")
    given = parser.parse_args()
    ran = run_readme(given.readme.resolve(), everything=given.all)
    print(f"{len(ran)} blocks and lines of {given.readme.name} ran")


if __name__ == "__main__":
    main()
