"""``factormix data``: the image sets of the experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factormix.cli.console import say

__all__ = ["data_app"]

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
