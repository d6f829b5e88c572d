"""``factormix reproduce``: the paper's experiments by one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factormix.cli.console import say

__all__ = ["reproduce"]


def reproduce(
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="[figure1|figure2|table1|convergence|svhn|streaming|all]",
            help="What to run.",
        ),
    ] = "all",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where everything goes.")
    ] = Path("factormix-reproduction"),
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Random starts.", show_default="10, or 1 with --quick"),
    ] = None,
    other_seeds: Annotated[
        int, typer.Option(min=1, help="Random starts of held-out classes other than 9 and 0.")
    ] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few steps on few images, to see that all works.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps per training.", show_default="15 + 50 epochs"),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Look here first for the image sets.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes.", show_default="one per core")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Train nothing: report what is finished.")
    ] = False,
    write_docs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also write reproduction.md and its pictures here."),
    ] = None,
) -> None:
    """Run the paper's experiments again and report what held.

    Every finished training is a file in DIR: run the same command again after an interruption and
    only what is missing is run. Nothing is downloaded; without MNIST and FashionMNIST the
    experiments run on the digits of scikit-learn.
    """
    from dataclasses import replace

    from factormix.studies.reproduction import FULL, QUICK
    from factormix.studies.reproduction import reproduce as run

    scale = QUICK if quick else FULL
    scale = replace(scale, seeds=seeds or scale.seeds, other_seeds=other_seeds)
    if steps is not None:
        scale = replace(scale, name=f"{scale.name}-{steps}-steps", steps=steps)
    folder = None if data is None else str(data)
    try:
        outputs = run(
            output, experiment, scale, data_folder=folder, jobs=jobs, train=not report_only,
            docs=write_docs, say=say,
        )  # fmt: skip
    except KeyboardInterrupt:
        say("Interrupted: the same command goes on where it stopped.")
        raise
    for remark in outputs.remarks:
        say(remark)
    say(f"Report: {outputs.report}")
    if outputs.failures:
        raise typer.Exit(1)
