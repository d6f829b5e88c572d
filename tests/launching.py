"""Commands that refuse bad input, and real processes that each write down what they found."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from factormix.cli import run

__all__ = ["check_one_sentence", "fits", "interrupt_on_terminal", "launch", "torchrun"]

FITS = """
import json, os, sys
import numpy as np
from factormix import MFA
from factormix.solvers import CovarianceGradient, NaturalGradient

order = json.loads(sys.argv[1])
table = np.load("rows.npy")
found = []
for case in order:
    options = dict(case["options"])
    if "natural" in case:
        kind = CovarianceGradient if "scales" in case["natural"] else NaturalGradient
        options["solver"] = kind(**case["natural"])
    weights = np.load("weights.npy") if case.get("weighted") else None
    rows = table[: case.get("n_rows", len(table))]
    if case.get("gaps"):
        rows = np.where(np.random.default_rng(0).random(rows.shape) < 0.1, np.nan, rows)
    model = MFA(**options).fit(rows, sample_weight=weights)
    record = dict(model.history_[-1])
    found.append({"record": record, "score": model.score(rows)})
with open(f"found-{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
"""


def check_one_sentence(arguments: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a command ends with one sentence, with every file of the folder untouched."""
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    assert run(arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"factormix: .*\n", printed.err), printed.err
    assert expected in printed.err
    assert {path: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before


def torchrun(
    n: int, *arguments: str, folder: Path, options: tuple[str, ...] = (), check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run n processes of a script, or of a module after ``-m``, in a folder."""
    done = subprocess.run(
        launch(n, *arguments, options=options),
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def launch(n: int, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command that starts n processes."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*start, f"--nproc-per-node={n}", *options, *arguments]


def fits(n: int, cases: list[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    """Fit models by n processes on rows.npy of a folder; return what each process found."""
    script = folder / "fits.py"
    script.write_text(FITS)
    torchrun(n, str(script), json.dumps(cases), folder=folder)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(n)]


def interrupt_on_terminal(
    command: list[str], number: int, shown: str, **options: Any
) -> tuple[int, str, str]:
    """Run a command on a terminal, and send it a signal once it shows a text.

    Return its exit code, its output, and what it wrote to the terminal after the signal.
    """
    pty, termios = (pytest.importorskip(name) for name in ("pty", "termios"))
    terminal, end = pty.openpty()
    # A new terminal has no width, and a progress bar would have no place.
    termios.tcsetwinsize(end, (24, 120))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=end, text=True, **options
    ) as running:
        os.close(end)
        seen = ""
        while shown not in seen:
            seen += os.read(terminal, 1024).decode()
        running.send_signal(number)
        rest = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(terminal, 1024):
                rest += part
        out, _ = running.communicate()
    os.close(terminal)
    return running.returncode, out, rest.decode()
