"""Arguments and options that commands share: how they are declared, parsed, checked and used."""

from __future__ import annotations

import csv
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factormix.cli.console import print_note
from factormix.defaults import SOLVER_NAMES
from factormix.errors import InputError

if TYPE_CHECKING:
    from factormix.data.readers.base import TableRows
    from factormix.estimators import MFA

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model file of factormix train.")]

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

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

ImageShape = Annotated[
    str | None,
    typer.Option(
        metavar="HEIGHTxWIDTH[x3]",
        help="Shape of the rows as images.",
        show_default="the training images' shape",
    ),
]

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
    typer.Option(
        min=1, help="Maximum number of passes over the data.", show_default="the solver's"
    ),
]

RandomState = Annotated[
    int | None,
    typer.Option(min=0, help="Seed, for the same result every time.", show_default="a new one"),
]

# Not Annotated types: train must know whether they are given, and select has defaults for them.
SOLVER_OPTION = typer.Option(help=f"How to train: {' or '.join(SOLVER_NAMES)}.")
SCALING_OPTION = typer.Option(help="How training standardises the data: global, feature or none.")
DTYPE_OPTION = typer.Option(help="float32 or float64.")


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """Parse an image shape such as 28x28 or 32x32x3."""
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x3)?", text):
        raise InputError(
            f"{text!r} is not an image shape: give HEIGHTxWIDTH, as in 28x28 or 32x32x3."
        )
    return tuple(map(int, text.split("x")))


def parse_seconds(text: str, option: str) -> float:
    """Parse a time such as 60s, 5m, 1.5h or 90, in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", text.strip())
    if not found:
        raise InputError(f"{option} {text!r} is not a time: give seconds, as in 60s, or 5m, or 1h.")
    return float(found[1]) * {"h": 3600, "m": 60}.get(found[2], 1)


def check_output(path: Path, suffixes: tuple[str, ...], *inputs: Path) -> None:
    """Check, before any work, that a file can be written and is none of the inputs."""
    if suffixes and path.suffix.lower() not in suffixes:
        raise InputError(f"{path} has an unknown ending: name it {' or '.join(suffixes)}.")
    if path.is_dir():
        raise InputError(f"{path} is a folder: give the path of a file.")
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} does not exist: create it or name another.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write to the folder {path.parent}: name another.")
    for other in inputs:
        if path.exists() and other.exists() and path.samefile(other):
            raise InputError(f"{path} is both input and output: name another output.")


def check_model_output(path: Path, data: Path, *, resume: bool = False) -> None:
    """Check that a model can be written to a path and replaces nothing but a model."""
    from factormix.training.serialization import is_model

    check_output(path, (), data)
    if path.exists() and not resume and not is_model(path):
        raise InputError(
            f"{path} exists and is not a factormix model: name another file, or remove it."
        )


def check_device(device: str | None) -> None:
    """Check that torch knows a device and that this machine has it."""
    import torch

    try:
        # The copy fails on devices that hold no values, such as meta.
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0].rstrip(". ")
        raise InputError(
            f"the device {device!r} cannot be used ({reason}): name another, such as cpu."
        ) from error


def read_data(
    path: Path,
    *,
    key: str | None = None,
    header: bool | None = None,
    columns: str | None = None,
    image_size: tuple[int, int] | None = None,
    image_shape: tuple[int, ...] | None = None,
) -> TableRows:
    """Read the rows of a file or folder, and print the reader's warnings.

    ``columns`` are separated by commas; quotes keep a comma in a name. ``image_size`` is for
    folders of images alone. ``image_shape``, of a model's training images, is ignored elsewhere.
    """
    from factormix.data.readers import read_rows

    if image_shape is not None and path.is_dir():
        image_size = image_shape[0], image_shape[1]
    names = None
    if columns is not None:
        cells = next(csv.reader([columns], skipinitialspace=True), [])
        names = [cell.strip() for cell in cells]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = read_rows(
            _restore_address(path), key=key, image_size=image_size, header=header, columns=names
        )
    for warning in caught:
        print_note(str(warning.message))
    return rows


def read_held_out(
    path: Path,
    data: Path,
    *,
    key: str | None,
    header: bool | None,
    columns: str | None,
    image_size: tuple[int, int] | None = None,
) -> TableRows:
    """Read held-out rows with those options for the data that apply to them."""
    if path.exists() and data.exists() and path.samefile(data):
        raise InputError(f"{path} is the training data: hold other rows out.")
    suffix, is_folder = path.suffix.lower(), path.is_dir()
    has_names = any(path.glob("*.safetensors")) if is_folder else suffix in (".npz", ".safetensors")
    return read_data(
        path,
        key=key if has_names else None,
        header=header if suffix == ".csv" else None,
        columns=columns,
        image_size=image_size if is_folder else None,
    )


def load_mixture(path: Path, device: str | None = None) -> MFA:
    """Load a model file that must hold a single mixture."""
    from factormix.estimators import load

    return require_mixture(load(path, device=device), path)


def require_mixture(model: object, path: Path) -> MFA:
    """Return a model that was loaded from a path if it is a single mixture."""
    from factormix.estimators import MFA

    if not isinstance(model, MFA):
        raise InputError(
            f"{path} holds an {type(model).__name__}, and this command needs a mixture: give a"
            " file of factormix train."
        )
    return model


def _restore_address(path: Path) -> Path | str:
    """Return an address such as s3://bucket/folder, whose slashes ``Path`` has merged."""
    found = re.fullmatch(r"([a-z][a-z0-9+.-]+):/(.*)", str(path))
    if found is None or path.exists():
        return path
    return f"{found[1]}://{'/' if found[1] == 'file' else ''}{found[2]}"
