"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factormix.defaults import SOLVER_NAMES

__all__ = [
    "DTYPE_OPTION",
    "SCALING_OPTION",
    "SOLVER_OPTION",
    "BatchSize",
    "Columns",
    "Data",
    "Device",
    "Header",
    "Key",
    "MaxEpochs",
    "MaxPrecision",
    "Model",
    "Quiet",
    "RandomState",
]

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A file of train.")]

Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="A .npy, .npz, .csv, .parquet, .arrow or .safetensors file, or a folder of images, of"
        " Parquet or Arrow files, or of .npy or .safetensors shards.",
    ),
]

Key = Annotated[str | None, typer.Option(help="Name of the array in .npz or .safetensors files.")]

Header = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="Whether the first line of a .csv file has the names of its columns.",
        show_default="guessed",
    ),
]

Columns = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,...",
        help="Columns to read, by name or by number from 0.",
        show_default="all",
    ),
]

Device = Annotated[
    str | None, typer.Option(help="Where to compute: cpu, cuda, mps.", show_default="cpu")
]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]

MaxPrecision = Annotated[
    float | None,
    typer.Option(
        help="Upper bound on the precisions, 1 / variance, in units of the data.",
        show_default="from the data",
    ),
]

BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Rows per step.", show_default="the solver's")
]

MaxEpochs = Annotated[
    int | None,
    typer.Option(min=1, help="Most passes over the data.", show_default="the solver's"),
]

RandomState = Annotated[
    int | None,
    typer.Option(min=0, help="Seed, for the same result every time.", show_default="a new one"),
]

# Of these, one command needs to know whether they were given, and another has defaults.
SOLVER_OPTION = typer.Option(help=f"How to train: {' or '.join(SOLVER_NAMES)}.")
SCALING_OPTION = typer.Option(help="How training standardises the data: global, feature or none.")
DTYPE_OPTION = typer.Option(help="float32 or float64.")
