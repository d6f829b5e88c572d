"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Columns", "Data", "Device", "Header", "Key", "Model", "Quiet"]

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
